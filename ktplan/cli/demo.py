"""`ktplan demo`: the whole chain on the embedded model, each command shown as a user would type it.

The demo runs the very commands through the command line's own front; its tables are read from their `--json`.
"""

from __future__ import annotations

import io
import json
import shlex
import shutil
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click

from ktplan.cli.options import output_options
from ktplan.cli.output import Output
from ktplan.errors import BadUsage
from ktplan.units import format_bytes, format_percent, format_seconds

_MARK = "demo.json"
_RATIOS = (10, 30, 50)
_STRATEGIES = ("uniform", "random", "front-loading", "frequency")
# name in the table: options of convert-cpu
_STORES = {
    "INT8": ("--bits", "8"),
    "INT4": (),
    "INT4-row": ("--group-size", "row"),
    "INT4-kt": ("--bits", "4", "--rounding", "kt"),
    "INT2": ("--bits", "2"),
}
_REMARKS = {
    "bf16": "the unquantized model, transformers' own forward",
    "INT8": "",
    "INT4": "groups of 32 with searched scales: what convert-cpu writes without options",
    "INT4-row": "one scale a row, searched: as large as kt's",
    "INT4-kt": "the bytes that kt-kernel writes",
    "INT2": "deliberately coarse: what damage looks like",
}


@click.command("demo")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="ktplan-demo",
    show_default=True,
    help="Folder for the files.",
)
@click.option(
    "--tokens",
    type=int,
    default=16384,
    show_default=True,
    help="Held-out tokens to evaluate on; profiles take six times, calibration twice as many.",
)
@output_options
def demo_command(output: Path, tokens: int, out: Output) -> None:
    """Walk the whole chain on the embedded model, with real text.

    Converts, profiles, places, emits, evaluates and generates; shows each command before it runs and ends with
    what each number format costs and what each placement strategy buys.

    \b
    Example:
      ktplan demo
      ktplan demo -o /tmp/demo --tokens 4096
    """
    started = time.monotonic()
    folder = _fresh(output)
    walk = _Walk(folder, out)
    formats = _chain(walk, tokens)
    hits = walk.measure(
        "place",
        "tiny",
        "--profile",
        walk.file("profile.safetensors"),
        "--test",
        walk.file("held-out.safetensors"),
        "--compare",
    )
    sample = walk.measure(
        "run", "tiny", "--store", walk.file("INT8"), "--gpu-weights", walk.file("gpu-w4"),
        "--rules", walk.file("rules.yaml"), "--prompt", "The President of the United States",
        "--max-new-tokens", 60, "--temperature", 0.7, "--seed", 1,
    )  # fmt: skip
    seconds = time.monotonic() - started
    body = {
        "formats": formats,
        "hit_rates": hits["rows"],
        "sample": sample,
        "folder": str(folder),
        "seconds": seconds,
    }
    out.report("demo", body, lambda: _render(body, out))


def _chain(walk: _Walk, tokens: int) -> dict[str, dict[str, Any]]:
    """Everything up to the measured cost of each format, by name."""
    walk.run("inspect", "tiny")
    for name, options in _STORES.items():
        walk.run("convert-cpu", "tiny", "-o", walk.file(name), *options)
    profile, held_out, plan = (
        walk.file("profile.safetensors"),
        walk.file("held-out.safetensors"),
        walk.file("plan.json"),
    )
    walk.run("profile", "tiny", "--dataset", "corpus:profile", "--max-tokens", 6 * tokens, "-o", profile)
    walk.run(
        "profile", "tiny", "--dataset", "corpus:test", "--max-tokens", 6 * tokens, "-o", held_out, "--no-plot"
    )
    walk.run("place", "tiny", "--profile", profile, "--strategy", "frequency", "--ratio", "0.3", "-o", plan)
    walk.run(
        "convert-gpu", "tiny", "-o", walk.file("gpu-w4"), "--bits", "4", "--plan", plan, "--dataset", "corpus:profile",
        "--max-tokens", 2 * tokens,
    )  # fmt: skip
    walk.run("emit", plan, "--for", "ktplan", "-o", walk.file("rules.yaml"))
    walk.run("emit", plan, "--for", "sglang-kt", "-o", walk.file("sglang-kt"))
    stores = [word for name in _STORES for word in ("--store", walk.file(name))]
    result = walk.measure("eval", "tiny", *stores, "--dataset", "corpus:test", "--max-tokens", tokens)
    reference = result["reference"]
    return {"bf16": reference, **dict(zip(_STORES, result["stores"], strict=True))}


class _Walk:
    """Runs commands as a user would, showing each."""

    def __init__(self, folder: Path, out: Output) -> None:
        self._folder, self._out = folder, out

    def file(self, name: str) -> str:
        return str(self._folder / name)

    def run(self, *words: object) -> None:
        """Show the command, run it and let it speak (except under --json, where only the end is printed)."""
        arguments = self._show(words)
        if self._out.json_mode:
            with redirect_stdout(io.StringIO()):
                _invoke([*arguments, "-q"])
        else:
            _invoke(arguments)

    def measure(self, *words: object) -> dict[str, Any]:
        """Show the command, run it with --json and give back what it said."""
        arguments = self._show(words)
        said = io.StringIO()
        with redirect_stdout(said):
            _invoke([*arguments, "--json"])
        body: dict[str, Any] = json.loads(said.getvalue())
        return body

    def _show(self, words: tuple[object, ...]) -> list[str]:
        arguments = [str(word) for word in words]
        if not self._out.json_mode:
            self._out.line()
            self._out.line(click.style(f"$ ktplan {shlex.join(arguments)}", bold=True))
        return arguments


def _invoke(arguments: list[str]) -> None:
    from ktplan.cli.main import root

    root.main(args=arguments, prog_name="ktplan", standalone_mode=False)


def _fresh(folder: Path) -> Path:
    """An empty folder; one that an earlier demo made is emptied, anything else is left alone."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / _MARK).is_file():
            raise BadUsage(f"{folder} exists and is not from a demo", hint="name another folder with -o")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text('{"kind": "demo", "version": 1}\n')
    return folder


def _render(body: dict[str, Any], out: Output) -> None:
    bold = {"bold": True}
    out.line()
    rows = []
    for name, row in body["formats"].items():
        rows.append(
            [
                name,
                format_bytes(row["experts_bytes"]),
                f"{row['perplexity']:.3f}",
                f"{row['kl']:.5f}" if row["kl"] is not None else "-",
                format_percent(row["top1_agreement"]) if row["top1_agreement"] is not None else "-",
                f"{row['tokens_per_s']:,.0f}",
                _REMARKS[name],
            ]
        )
    tokens = body["formats"]["bf16"]["tokens"]
    out.table(
        ["experts", "size", "perplexity", "KL nats", "top-1", "tokens/s", ""],
        rows,
        title=f"What number formats cost, {tokens:,} held-out tokens in four domains",
        right=range(1, 6),
    )
    out.line()
    rates = {(row["strategy"], round(100 * row["ratio"])): row["test"] for row in body["hit_rates"]}
    out.table(
        ["strategy", *(f"{ratio} % on the GPU" for ratio in _RATIOS)],
        [[name, *(format_percent(rates[name, ratio]) for ratio in _RATIOS)] for name in _STRATEGIES],
        title="What placement buys: share of expert calls the GPU serves, on text the plan has not seen",
        right=(1, 2, 3),
    )
    sample = body["sample"]
    out.line()
    out.line(click.style("Text from the placed, quantized model (a specimen, not a chat model)", **bold))
    out.line(sample["prompt"] + sample["text"])
    out.line()
    out.line(f"files are in {body['folder']}, made in {format_seconds(body['seconds'])}")
    out.line(
        "on a model of your own:  ktplan inspect MODEL   then   ktplan convert-cpu MODEL -o STORE --dry-run"
    )
