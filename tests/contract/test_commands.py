"""Every command has help with an example, and answers mistakes in one line with the right code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from ktplan.cli.main import COMMANDS, root

COMMAND_NAMES = sorted(COMMANDS)


def command(name: str) -> click.Command:
    found = root.get_command(click.Context(root), name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", COMMAND_NAMES)
def test_help_says_what_it_does_and_shows_an_example(name: str) -> None:
    text = command(name).help or ""
    assert f"ktplan {name}" in text
    assert len(text.split("\n")[0]) > 10


@pytest.mark.parametrize("name", COMMAND_NAMES)
def test_every_option_has_help(name: str) -> None:
    for parameter in command(name).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts} has no help"


@pytest.mark.parametrize(
    "name",
    sorted({"doctor", "inspect", "convert-cpu", "convert-gpu", "profile", "place", "emit", "eval", "demo"}),
)
def test_every_reporting_command_speaks_json(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in command(name).params)


def test_the_command_lines_of_the_manual_exist() -> None:
    wanted = {
        "convert-cpu": {"-o", "--bits", "--group-size", "--rounding", "--numa-parts", "--dry-run"},
        "convert-gpu": {"-o", "--bits", "--group-size", "--dataset", "--plan", "--method"},
        "profile": {"--dataset", "-o"},
        "place": {"--profile", "--strategy", "--gpu-experts", "--ratio", "--gpu-memory", "--seed", "-o"},
        "emit": {"--for", "-o"},
        "run": {
            "--store",
            "--gpu-weights",
            "--rules",
            "--plan",
            "--prompt",
            "--chat",
            "--max-new-tokens",
            "--temperature",
            "--seed",
        },
        "eval": {"--store", "--dataset"},
    }
    for name, options in wanted.items():
        have = {option for parameter in command(name).params for option in parameter.opts}
        assert options <= have, f"{name} lacks {options - have}"


def test_an_unknown_command_is_a_usage_error(cli: Callable[..., Any]) -> None:
    cli("convert").refused(2, "No such command")


@pytest.mark.parametrize("name", ["inspect", "convert-cpu", "profile", "run", "eval", "place"])
def test_a_folder_that_is_no_model_is_refused(name: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    more: dict[str, list[Any]] = {
        "convert-cpu": ["-o", tmp_path / "out"],
        "profile": ["-o", tmp_path / "out", "--dataset", "corpus:test"],
        "eval": ["--dataset", "corpus:test"],
        "place": ["-o", tmp_path / "out", "--strategy", "uniform", "--ratio", "0.5"],
        "run": ["--prompt", "x"],
    }
    folder = tmp_path / "empty"
    folder.mkdir()
    cli(name, folder, *more.get(name, [])).refused(4, "error:", str(folder), "hint:")
    assert [entry.name for entry in tmp_path.iterdir()] == ["empty"]


def test_a_model_that_is_not_there_is_named(cli: Callable[..., Any]) -> None:
    cli("inspect", "./nowhere").refused(4, "no model at ./nowhere")
