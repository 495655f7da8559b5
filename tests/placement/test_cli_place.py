"""`ktplan place` and `ktplan emit` as a user runs them, from a real profile of the embedded model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktplan import rules as rule_files
from ktplan.model import read_spec
from ktplan.placement import PlacementPlan

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def profile(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("profile") / "p.safetensors"
    cli("profile", "tiny", "--dataset", "corpus:profile", "--max-tokens", "6k", "--no-plot", "-o", path).ok()
    return path


def test_from_profile_to_rules_and_counts(cli: Cli, profile: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    placed = cli("place", "tiny", "--profile", profile, "--ratio", "0.3", "-o", plan_file).ok()
    for word in (
        "19 of 64 experts",
        "KV cache",
        "held out",
        "uniform",
        "random",
        "bound",
        "GPU experts a layer",
    ):
        assert word in placed.stdout
    assert f"ktplan emit {plan_file}" in placed.stderr
    plan = PlacementPlan.load(plan_file)
    assert plan.expectation is not None and plan.expectation.held_out is not None
    # The embedded model has skew: a profile of other documents buys more than chance.
    assert plan.expectation.held_out > plan.expectation.random + 0.05

    cli("emit", plan_file, "-o", tmp_path / "rules.yaml", "--model", "tiny").ok()
    rules = rule_files.load(tmp_path / "rules.yaml")
    for layer in range(4):
        rule = next(
            rule for rule in rules if re.search(str(rule.match.name), f"model.layers.{layer}.mlp.experts")
        )
        assert rule_files.expert_ids(rule.replace.kwargs["gpu_experts"]) == plan.gpu.layer(layer)

    theirs = cli("emit", plan_file, "--for", "kt-yaml", "-o", tmp_path / "kt.yaml").ok()
    assert "unmodified KTransformers" in theirs.stderr
    assert (tmp_path / "kt.yaml").read_text().startswith("# tiny: 19 of 64 experts on the GPU")

    cli("emit", plan_file, "--for", "sglang-kt", "-o", tmp_path / "sg").ok()
    counts = torch.load(tmp_path / "sg" / "counts.pt", weights_only=True)["logical_count"]
    assert counts.dtype == torch.int32 and counts.shape == (1, 4, 16)
    assert {(int(layer), int(expert)) for layer, expert in (counts[0] == 2).nonzero()} == set(plan.gpu)
    flags = (tmp_path / "sg" / "flags.txt").read_text().split()
    assert flags[3] == str(tmp_path / "sg" / "counts.pt") and int(64 * float(flags[5])) == 19
    assert "--kt-weight-path" in (tmp_path / "sg" / "launch.txt").read_text()


def test_the_same_inputs_give_the_same_files(cli: Cli, profile: Path, tmp_path: Path) -> None:
    asked = ("place", "tiny", "--profile", profile, "--gpu-memory", "3MiB")
    for name in ("a", "b"):
        cli(*asked, "-o", tmp_path / f"{name}.json").ok()
        cli("emit", tmp_path / f"{name}.json", "-o", tmp_path / f"{name}.yaml").ok()
    for kind in ("json", "yaml"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_json_carries_budget_plan_and_expectation(cli: Cli, profile: Path, tmp_path: Path) -> None:
    body = cli(
        "place", "tiny", "--profile", profile, "--gpu-memory", "3MiB", "--gpu-format", "gptq-w4", "--test", profile,
        "-o", tmp_path / "plan.json", "--json",
    ).ok().json()  # fmt: skip
    assert body["kind"] == "place-report" and body["budget"]["limit_of"] == "experts"
    assert body["budget"]["slots"] == 3 * 2**20 // body["budget"]["expert_bytes"] == sum(body["per_layer"])
    assert body["test_hit_rate"] == body["expectation"]["in_sample"]


def test_strategies_are_compared(cli: Cli, profile: Path) -> None:
    rows = (
        cli("place", "tiny", "--profile", profile, "--compare", "--test", profile, "--json")
        .ok()
        .json()["rows"]
    )
    assert len(rows) == 11 * 6  # no trace, no dynamic rules; four files, so robust takes part
    held_out = {(row["strategy"], row["ratio"]): row["hit_rate"] for row in rows}
    for ratio in (0.1, 0.3, 0.5):
        assert held_out["frequency", ratio] == max(
            rate for (_, other), rate in held_out.items() if other == ratio
        )
    text = cli("place", "tiny", "--profile", profile, "--compare").ok().stdout
    assert "front-loading" in text and "50 % (32)" in text


@pytest.mark.parametrize(("number", "on_gpu"), [("0", 0), ("16", 64), ("all", 64)])
def test_none_and_all_are_plans(cli: Cli, tmp_path: Path, number: str, on_gpu: int) -> None:
    plan = tmp_path / "plan.json"
    cli("place", "tiny", "--strategy", "uniform", "--gpu-experts", number, "-o", plan).ok()
    assert len(PlacementPlan.load(plan).gpu) == on_gpu
    for target in ("ktplan", "kt-yaml"):
        cli("emit", plan, "--for", target, "-o", tmp_path / target).ok()
    if not on_gpu:
        result = cli("emit", plan, "--for", "sglang-kt", "-o", tmp_path / "sg").ok()
        assert "no expert is on the GPU" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu-experts", "17"), ["0 to 16"]),
        (("--gpu-experts", "-1"), ["0 to 16"]),
        (("--gpu-experts", "many"), ["'many'"]),
        (("--ratio", "1.5"), ["0 to 1"]),
        (("--ratio", "-0.1"), ["0 to 1"]),
        ((), ["--gpu-experts, --ratio, --gpu-memory, --card-memory"]),
        (("--ratio", "0.5", "--gpu-memory", "1GiB"), ["exclude each other"]),
        (("--gpu-memory", "lots"), ["not an amount of memory"]),
        (("--ratio", "0.5", "--seed", "-3"), ["seed -3"]),
        (("--compare",), ["--compare needs counts"]),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    cli("place", "tiny", "--strategy", "random", *arguments, "-o", tmp_path / "plan.json").refused(2, *words)
    assert not list(tmp_path.iterdir())


def test_a_card_that_is_too_small_is_exit_code_3(cli: Cli, tmp_path: Path) -> None:
    asked = ("place", "tiny", "--strategy", "uniform", "-o", tmp_path / "plan.json", "--card-memory")
    cli(*asked, "8MiB").refused(3, "--card-memory gives 8.00 MiB", "margin")
    cli(*asked, "8MiB", "--margin", "0").refused(3, "lower --context to")
    cli(*asked, "12MiB", "--margin", "0").ok()
    assert 0 < len(PlacementPlan.load(tmp_path / "plan.json").gpu) < 64


def test_frequency_needs_a_profile_and_the_right_one(
    cli: Cli, profile: Path, tmp_path: Path, tiny: Path, family_checkpoint: Callable[..., Path]
) -> None:
    output = tmp_path / "plan.json"
    cli("place", "tiny", "--ratio", "0.3", "-o", output).refused(2, "needs counts", "--profile")
    other = family_checkpoint("olmoe")
    both = (
        read_spec(tiny).fingerprint,
        read_spec(other).fingerprint,
        "4 MoE layers x 16",
        "3 MoE layers x 8",
    )
    cli("place", other, "--profile", profile, "--ratio", "0.3", "-o", output).refused(4, *both)
    cli("place", "tiny", "--profile", tiny / "model.safetensors", "--ratio", "0.3", "-o", output).refused(
        4, "is not an activation-profile"
    )
    cli("place", "tiny", "--profile", profile, "--ratio", "0.3", "-o", profile).refused(
        2, "is read by this command"
    )
    assert not output.exists()


def test_emit_refuses_what_is_no_plan_and_what_is_another_models(
    cli: Cli, tmp_path: Path, tiny: Path, family_checkpoint: Callable[..., Path]
) -> None:
    plan = tmp_path / "plan.json"
    cli("emit", plan, "-o", tmp_path / "r.yaml").refused(4, "does not exist")
    cli("emit", tiny / "config.json", "-o", tmp_path / "r.yaml").refused(4, "is not a placement-plan")
    cli("place", "tiny", "--strategy", "uniform", "--ratio", "0.5", "-o", plan).ok()
    other = family_checkpoint("olmoe")
    both = (read_spec(tiny).fingerprint, read_spec(other).fingerprint)
    cli("emit", plan, "--model", other, "-o", tmp_path / "r.yaml").refused(4, *both)
    (tmp_path / "sg").mkdir()
    (tmp_path / "sg" / "mine.txt").write_text("x")
    cli("emit", plan, "--for", "sglang-kt", "-o", tmp_path / "sg").refused(2, "is not empty")
    body = json.loads(plan.read_text())
    body["gpu"]["gpu"]["3"] = "0-16"
    plan.write_text(json.dumps(body))
    cli("emit", plan, "-o", tmp_path / "r.yaml").refused(4, "plan.json is damaged")
    assert not (tmp_path / "r.yaml").exists() and [p.name for p in (tmp_path / "sg").iterdir()] == [
        "mine.txt"
    ]


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys, ktplan.placement, ktplan.placement.emit, ktplan.profile.report, ktplan.profile.recorder, "
        "ktplan.cli.place, ktplan.cli.profile, ktplan.cli.emit; "
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_no_output_takes_the_place_of_an_input(cli: Cli, tiny: Path, profile: Path, tmp_path: Path) -> None:
    model, plan = tmp_path / "model", tmp_path / "plan.json"
    shutil.copytree(tiny, model)
    asked = ("place", model, "--profile", profile, "--ratio", "0.3", "-o")
    cli(*asked, plan).ok()
    held = plan.read_bytes()
    for output in (profile, model / "config.json"):
        cli(*asked, output).refused(2, "is read by this command", str(output))
    cli("emit", plan, "-o", plan).refused(2, "is read by this command", str(plan))
    assert plan.read_bytes() == held
    assert (model / "config.json").read_bytes() == (tiny / "config.json").read_bytes()
