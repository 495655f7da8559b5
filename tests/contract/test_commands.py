"""Every command has help with an example, and answers mistakes in one line with the right code."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("place", "tiny", "--ratios", "1"), ("error: No such option '--ratios'", "hint:  ktplan place --help")),
        (("place",), ("error: Missing argument 'MODEL'", "hint:  ktplan place --help")),
        (("run", "tiny", "--max-new-tokens", "0"), ("'--max-new-tokens'", "0 is not in the range")),
        (("run", "tiny", "--gpu-memory", "9" * 400), ("is too large",)),
        (("profile", "tiny", "--dataset", "nowhere.txt"), ("does not exist",)),
        (("profile", "--dataset", __file__), ("--dataset takes every word", "put MODEL first")),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_answered_in_one_line_with_a_hint(
    cli: Callable[..., Any], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = cli(*arguments)
    done.refused(2, *words)
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def ktplan(*arguments: str, shell: str = "", **how: Any) -> subprocess.CompletedProcess[str]:
    line = shlex.join([sys.executable, "-m", "ktplan", *arguments])
    return subprocess.run(
        ["bash", "-c", f"{line} {shell}"], capture_output=True, text=True, timeout=300, **how
    )


@pytest.mark.parametrize("shell", ["<&-", "2>&-", "<&- 2>&-"])
def test_closed_streams_do_no_harm(shell: str) -> None:
    done = ktplan("inspect", "tiny", shell=shell)
    assert done.returncode == 0 and "fingerprint" in done.stdout and not done.stderr


def test_a_prompt_from_a_closed_stdin_is_empty() -> None:
    done = ktplan("run", "tiny", shell="<&-")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: the prompt is empty")


def test_an_answer_that_cannot_be_written_is_an_error() -> None:
    done = ktplan("inspect", "tiny", shell=">/dev/full")
    assert done.returncode == 3
    assert done.stderr.startswith("error: No space left on device\nhint:")


def test_a_reader_that_leaves_early_gets_no_complaint() -> None:
    done = ktplan("inspect", "tiny", "--json", shell="| head -1")
    assert done.stdout == "{\n" and not done.stderr


def test_names_in_an_unknown_encoding_are_shown_as_escapes(cli: Callable[..., Any], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    cli("place", "tiny", "--strategy", "uniform", "--ratio", "0.5", "-o", plan).ok()
    output = os.fsencode(tmp_path) + b"/\xff.yaml"
    done = cli("emit", plan, "-o", os.fsdecode(output)).ok()
    assert "\\udcff.yaml" in done.stdout and Path(os.fsdecode(output)).is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_way_to_stop_a_command_is_told_in_one_line(number: signal.Signals, tmp_path: Path) -> None:
    work = subprocess.Popen(
        [sys.executable, "-m", "ktplan", "run", "tiny", "--chat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert work.stderr is not None
    while (line := work.stderr.readline()) and "/help" not in line:
        pass
    work.send_signal(number)
    _, said = work.communicate(timeout=60)
    assert (work.returncode, said.strip().splitlines()[-1]) == (130, "error: interrupted")


def test_a_fault_of_our_own_is_one_line_and_a_traceback_on_request() -> None:
    program = (
        "import ktplan.cli.main as m, click\n"
        "@click.command()\n"
        "def fall(): {}['key']\n"
        "m.root.get_command = lambda *_: fall\n"
        "m.main(['fall'])"
    )
    for debug, wanted in (("", "error: ktplan stumbled: KeyError"), ("1", "Traceback")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env={**os.environ, "KTPLAN_DEBUG": debug},
        )
        assert done.returncode == 1 and done.stderr.startswith(wanted), done.stderr


@pytest.mark.parametrize("columns", ["20", "0", "wide"])
def test_no_figure_of_a_table_is_cut_short(cli: Callable[..., Any], columns: str) -> None:
    narrow = cli("inspect", "tiny", env={"COLUMNS": columns}).ok()
    assert narrow.stdout == cli("inspect", "tiny").ok().stdout and "…" not in narrow.stdout
