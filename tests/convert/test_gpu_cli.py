"""`ktplan convert-gpu` as typed: reports, refusals and the warning about unreached experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktplan.convert.gptq_checkpoint import GptqCheckpoint
from ktplan.experts import ExpertSet

Cli = Callable[..., Any]


def test_a_dry_run_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    args = ("convert-gpu", "tiny", "-o", tmp_path / "x", "--dataset", "corpus:profile", "--dry-run", "--json")
    body = cli(*args).ok().json()
    assert body["kind"] == "convert-gpu-plan"
    assert body["scheme"] == "w4a16-g128"
    assert body["experts"] == {str(layer): "0-15" for layer in range(4)}
    assert body["peak_memory_bytes"] > body["activation_bytes"] > 0
    assert len(body["kept"]) == 4 * 5
    assert not list(tmp_path.iterdir())


def test_a_conversion_reports_every_expert(cli: Cli, tmp_path: Path) -> None:
    dataset = ("--dataset", "corpus:profile", "--max-tokens", "2k", "--bits", "8")
    done = cli("convert-gpu", "tiny", "-o", tmp_path / "x", *dataset, "--json").ok()
    body = done.json()
    assert body["kind"] == "convert-gpu-report"
    assert len(body["results"]) == 64
    assert body["results"][0]["gate_up"].keys() == {"method", "gptq_error", "rtn_error"}
    assert 0 < body["tokens"] <= 2000
    assert len(body["files"]) == 4
    assert "is a model of its own" in done.stderr
    assert GptqCheckpoint.open(tmp_path / "x").settings.bits == 8


def test_a_plan_makes_a_folder_of_its_experts(cli: Cli, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    cli("place", "tiny", "--strategy", "uniform", "--ratio", "0.25", "-o", plan).ok()
    done = cli("convert-gpu", "tiny", "-o", tmp_path / "x", "--plan", plan, "--method", "rtn").ok()
    assert "16 of 64 experts of tiny as w4a16-g128" in done.stdout
    assert "no model of its own" in done.stderr
    checkpoint = GptqCheckpoint.open(tmp_path / "x")
    assert checkpoint.experts == ExpertSet.from_ranges({str(layer): "0-3" for layer in range(4)})


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, ("GPTQ needs calibration text", "--dataset")),
        (("--method", "rtn", "--dataset", "corpus:test"), 2, ("uses no text",)),
        (("--dataset", "corpus:test", "--max-tokens", "0"), 2, ("--max-tokens 0",)),
        (("--bits", "3"), 2, ("'3' is not one of",)),
        (("--dataset", "corpus:test", "--damp", "nan"), 2, ("--damp", "'nan' is not a finite number")),
        (
            ("--method", "rtn", "--include", "a{99999999999}"),
            2,
            ("not a regular expression", "e.g. 'self_attn'"),
        ),
        (("--dataset", "nowhere.jsonl"), 2, ("nowhere.jsonl does not exist",)),
        (("--method", "rtn", "--plan", "nowhere.json"), 4, ("nowhere.json does not exist",)),
    ],
)
def test_mistakes_are_answered_in_one_line(
    arguments: tuple[str, ...], code: int, words: tuple[str, ...], cli: Cli, tmp_path: Path
) -> None:
    cli("convert-gpu", "tiny", "-o", tmp_path / "x", *arguments).refused(code, *words)
    assert not list(tmp_path.iterdir())
