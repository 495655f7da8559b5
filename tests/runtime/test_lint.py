"""Anybody's rule file against a model: what each rule takes, gaps, overlaps, dead rules, ranges that are none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktplan import network
from ktplan.errors import BadInput
from ktplan.model import read_spec
from ktplan.placement import make_plan
from ktplan.placement.emit import to_rules
from ktplan.rules import load, parse
from ktplan.runtime.lint import Lint, lint
from ktplan.store import ExpertStore


def rule(name: str, device: str = "cpu", more: str = "") -> str:
    return (
        f"- match:\n    name: {name}\n  replace:\n    class: ktransformers.operators.experts.KTransformersExperts\n"
        f"    kwargs:\n      generate_device: {device}\n{more}"
    )


@pytest.fixture(scope="module")
def skeleton(tiny: Path) -> Any:
    return network.skeleton(tiny, network.as_dtype("bfloat16"))


def check(skeleton: Any, text: str, **more: Any) -> Lint:
    return lint(skeleton, parse(text), **more)


def words(found: Lint) -> str:
    return "\n".join(f"{finding.level} {finding.text}" for finding in found.findings)


def test_own_rules_are_clean_and_bytes_add_up(skeleton: Any, tiny: Path) -> None:
    spec = read_spec(tiny)
    found = lint(skeleton, to_rules(make_plan(spec, strategy="uniform", slots=20), spec))
    assert not found.findings and found.errors == 0
    assert sum(found.bytes.values()) >= spec.dense_bytes + spec.expert_bytes
    assert found.bytes["cuda:0"] >= 20 * 2 * spec.params_per_expert


def test_a_class_of_digits_is_no_range(skeleton: Any) -> None:
    found = check(
        skeleton, rule(r"^model\.layers\.([0-15])\.mlp\.experts$", "cuda:0") + rule(r"\.mlp\.experts$")
    )
    assert found.rules[0].experts_layers == "0-1" and found.rules[1].experts_layers == "2-3"
    assert "[0-15] is a set of single characters" in words(found) and found.errors == 0


def test_a_class_that_runs_backwards_is_refused_with_what_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(rule(r"^model\.layers\.([4-10])\.mlp\.experts$"))
    with pytest.raises(BadInput, match="line 2: name is no regular expression: bad character range") as fault:
        load(path)
    assert fault.value.hint == "[4-10] is a set of single characters: write (?:4|5|6|7|8|9|10)"
    assert re.fullmatch("(?:4|5|6|7|8|9|10)", "10")


def test_a_stores_own_sizes_count_on_the_cpu(
    cli: Callable[..., Any], tiny: Path, store_of: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(rule(r"\.mlp\.experts$"))
    told = (
        cli("rules", "check", tmp_path / "rules.yaml", tiny, "--store", store_of(tiny), "--json").ok().json()
    )
    one = ExpertStore.open(store_of(tiny)).manifest.bytes_per_expert
    assert told["rules"][0]["bytes"] == {"cpu": 64 * one}


def test_gaps_overlaps_and_dead_rules(skeleton: Any) -> None:
    gap = check(skeleton, rule(r"^model\.layers\.0\.mlp\.experts$"))
    assert "no rule takes the routed experts of layers 1-3" in words(gap)
    overlap = check(skeleton, rule(r"^model\.layers\.[01]\.mlp\.experts$") + rule(r"\.mlp\.experts$"))
    assert "overlaps" not in words(overlap)  # the last rule is for what is left
    middle = check(
        skeleton,
        rule(r"layers\.[01]\.mlp\.experts$") + rule(r"layers\.[12]\.mlp\.experts$") + rule(r"mlp\.experts$"),
    )
    assert "overlaps: 1 of the 2" in words(middle)
    dead = check(skeleton, rule(r"\.mlp\.experts$") + rule(r"layers\.3\.mlp\.experts$") + rule("nothing"))
    assert "is unreachable" in words(dead) and "matches no module" in words(dead) and dead.errors == 2


def test_what_a_closed_module_hides_is_unreachable(skeleton: Any) -> None:
    closed = (
        rule(r"\.mlp\.experts$", more="  recursive: false\n")
        + "- match:\n    name: mlp\\.experts\\.act_fn$\n  replace:\n    kwargs: {generate_device: cpu}\n"
    )
    found = check(skeleton, closed)
    assert "inside modules that earlier rules close" in words(found)


def test_loose_patterns_and_wrong_places(skeleton: Any, tiny: Path) -> None:
    found = check(skeleton, rule("^model.layers.1.mlp.experts$") + rule(r"\.mlp\.experts$"))
    assert "has a dot that is not escaped" in words(found)
    assert "which is no experts module" in words(check(skeleton, rule(r"^model\.layers\.0\.mlp$")))
    beyond = rule(r"\.mlp\.experts$", "cuda:0", "      gpu_experts: 0-99\n")
    assert "places expert 16" in words(check(skeleton, beyond))


def test_a_gpu_that_is_too_small_is_an_error(skeleton: Any) -> None:
    found = check(skeleton, rule(r"\.mlp\.experts$", "cuda:0"), limits={"gpu": 10 << 20})
    assert "cuda:0 gets" in words(found) and found.errors == 1
    assert check(skeleton, rule(r"\.mlp\.experts$", "cuda:0"), limits={"gpu": 64 << 20}).errors == 0


def test_the_command(cli: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(rule(r"\.mlp\.experts$", "cuda:0"))
    body = cli("rules", "check", file, "tiny", "--json").ok().json()
    assert body["kind"] == "rules-check" and body["rules"][0]["experts_layers"] == "0-3"
    cli("rules", "check", file, "tiny", "--gpu-memory", "1MiB").refused(4, "cuda:0 gets")
    file.write_text(rule("x").replace("generate_device", "genrate_device"))
    cli("rules", "check", file, "tiny").refused(4, "line 6", "did you mean 'generate_device'")
