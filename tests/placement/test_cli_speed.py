"""`ktplan place` with machines, sweeps, comparisons and several GPUs; `ktplan profile`'s verbs; `ktplan doctor`'s
machines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktplan.placement import PlacementPlan
from ktplan.placement.machine import HardwareSpec

Cli = Callable[..., Any]
MACHINE = "RTX 4090 24GiB, 2x Xeon 8x DDR5-4800 512GiB"


@pytest.fixture(scope="module")
def profile(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("profile") / "p.safetensors"
    cli(
        "profile",
        "tiny",
        "--dataset",
        "corpus:profile",
        "--max-tokens",
        "4k",
        "--trace",
        "--no-plot",
        "-o",
        path,
    ).ok()
    return path


def test_a_plan_for_another_machine_says_how_fast(cli: Cli, profile: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    told = cli(
        "place",
        "tiny",
        "--profile",
        profile,
        "--strategy",
        "optimal",
        "--ratio",
        "0.3",
        "--what-if",
        MACHINE,
        "-o",
        plan,
    ).ok()
    for word in (
        "decode",
        "t/s",
        "5-95 % of as much other text",
        "one more GiB",
        "16k more context",
        "bottleneck",
        "solver's gap",
    ):
        assert word in told.stdout, word
    assert "reference machine" not in told.stderr
    found = PlacementPlan.load(plan).prediction
    assert found is not None and found.replayed and found.held_out


def test_comparison_and_sweep_and_two_gpus(cli: Cli, profile: Path, tmp_path: Path) -> None:
    compared = (
        cli("place", "tiny", "--profile", profile, "--compare", "--plot", tmp_path / "c.png", "--json")
        .ok()
        .json()
    )
    names = {row["strategy"] for row in compared["rows"]}
    assert {"dynamic", "shrunk", "optimal", "robust", "random"} <= names
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    swept = cli(
        "place", "tiny", "--profile", profile, "--what-if", "vram=1032MiB..1040MiB,ctx=256..1k",
        "--what-if", MACHINE, "--json",
    ).ok().json()  # fmt: skip
    fastest = {(row["vram"], row["ctx"]): row["decode"] for row in swept["rows"] if row["decode"]}
    for (vram, ctx), speed in fastest.items():
        assert all(other >= speed for (v, c), other in fastest.items() if v >= vram and c <= ctx)
    plan = tmp_path / "two.json"
    cli(
        "place",
        "tiny",
        "--profile",
        profile,
        "--card-memory",
        "1033MiB",
        "--card-memory",
        "1035MiB",
        "-o",
        plan,
    ).ok()
    assert set(PlacementPlan.load(plan).devices) == {"cuda:0", "cuda:1"}
    cli("emit", plan, "-o", tmp_path / "rules.yaml").ok()
    cli("rules", "check", tmp_path / "rules.yaml", "tiny").ok()


def test_profiles_are_merged_shown_drawn_and_exported(cli: Cli, profile: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.safetensors"
    cli("profile", "merge", profile, profile, "--weights", "2,1", "--names", "x,y", "-o", both).ok()
    info = cli("profile", "info", both, "--json").ok().json()
    assert info["datasets"] == ["x", "y"] and info["tokens"] == 12_000 and info["transfer"] is not None
    cli("profile", "report", both, "-o", tmp_path / "r.html", "--png", tmp_path / "r.png").ok()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "r.html").read_text()
    assert page.count("data:image/png") == 3 and "http" not in page and "<script" not in page
    cli("profile", "export", profile, "-o", tmp_path / "c.pt").ok()
    back = cli("profile", "import", "tiny", tmp_path / "c.pt", "-o", tmp_path / "back.safetensors").ok()
    assert "mixed" in back.stderr
    cli(
        "place",
        "tiny",
        "--profile",
        tmp_path / "back.safetensors",
        "--ratio",
        "0.5",
        "-o",
        tmp_path / "p.json",
    ).ok()
    cli("profile", "merge", profile, "-o", both).refused(2, "one profile")
    cli("profile", "info", tmp_path / "c.pt").refused(4, "c.pt")


def test_named_data_sets_folders_and_patterns(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "logs" / f"{name}.txt").write_text(f"Some text of {name}. " * 9)
    (tmp_path / "c.csv").write_text("kind,text\nx,hello there\ny,general remark\n")
    output = tmp_path / "p.safetensors"
    made = cli(
        "profile", "tiny", "--dataset", f"chat={tmp_path / 'logs'}", f"{tmp_path}/*.csv", "--group-by", "kind",
        "--no-plot",
        "-o", output, "--json",
    ).ok().json()  # fmt: skip
    assert made["datasets"] == ["chat", "x", "y"] and made["documents"] == 4
    cli("profile", "tiny", "--dataset", f"{tmp_path}/*.none", "-o", output).refused(2, "matches no file")
    cli("profile", "tiny", "--dataset", "hf:nobody/nothing", "-o", output).refused(
        2, "not in the Hugging Face cache"
    )


def test_a_described_machine_is_written_and_used(cli: Cli, profile: Path, tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    cli("doctor", "--what-if", MACHINE, "-o", file).ok()
    assert HardwareSpec.load(file).gpus[0].memory == 24 << 30
    # What fits is the default: all of a tiny model on a large card.
    told = cli("place", "tiny", "--profile", profile, "--hardware", file, "-o", tmp_path / "p.json").ok()
    assert "64 of 64 experts" in told.stdout
    cli("doctor", "-o", file).refused(2, "nothing was measured")
    cli(
        "place", "tiny", "--hardware", file, "--what-if", MACHINE, "--ratio", "1", "--strategy", "uniform"
    ).refused(2, "several machines")


def test_measuring_gives_figures_with_origin_and_spread() -> None:
    from ktplan.runtime.measure import measure

    found = measure(threads=1, repeats=2, layer_bytes=1 << 20)
    assert all(figure.origin == "measured" and figure.value > 1e8 for figure in found.cpu_bandwidth)
    seconds = [figure.value for _, figure in found.cpu_experts]
    assert seconds[-1] > seconds[0] > 0 and found.cpu_expert_bytes and found.hop.value > 0
