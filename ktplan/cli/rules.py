"""`ktplan rules check`: what a rule file does to a model, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktplan.cli.options import ByteSize, output_options
from ktplan.cli.output import Output
from ktplan.errors import BadInput
from ktplan.units import format_bytes

if TYPE_CHECKING:
    from ktplan.runtime.lint import Lint

_File = click.Path(path_type=Path)


@click.group("rules")
def rules_command() -> None:
    """Work on injection rules.

    \b
    Example:
      ktplan rules check rules.yaml ./model
    """


@rules_command.command("check")
@click.argument("rules_file", metavar="RULES", type=_File)
@click.argument("model", metavar="MODEL")
@click.option("--gpu-memory", type=ByteSize(), help="What a GPU has: more weights than that are an error.")
@click.option("--store", type=_File, help="The expert store that the CPU will use: its real sizes count.")
@click.option("--device", default="gpu", show_default=True, help="Where modules go that no rule takes.")
@output_options
def check_command(
    rules_file: Path, model: str, gpu_memory: int | None, store: Path | None, device: str, out: Output
) -> None:
    """Say what each rule takes, what none takes, and what is wrong; loads no weights and runs no code of the file.

    Exit code 4 when there is an error: a rule that takes nothing, experts that do not exist, a GPU that is too small.

    \b
    Example:
      ktplan rules check rules.yaml ./model --gpu-memory 24GiB
    """
    from ktplan import rules as files
    from ktplan.model import locate

    rules = files.load(rules_file)
    path = locate(model)
    from ktplan import network
    from ktplan.runtime.lint import lint

    skeleton = network.skeleton(path, network.as_dtype("bfloat16"))
    limits = {"gpu": gpu_memory} if gpu_memory is not None else {}
    sizes = None
    if store is not None:
        from ktplan.runtime.loader import expert_bytes, open_sources

        sizes = expert_bytes(skeleton, open_sources(path, store).store)
    found = lint(skeleton, rules, device=device, expert_bytes=sizes, limits=limits)
    body = {
        "rules": [asdict(rule) for rule in found.rules],
        "findings": [asdict(finding) for finding in found.findings],
        "bytes": dict(found.bytes),
        "errors": found.errors,
    }
    out.report("rules-check", body, lambda: _render(found, out))
    for finding in found.findings:
        where = found.rules[finding.rule].where if finding.rule is not None else str(rules_file)
        out.warn(f"{where} {finding.text}" + (" (error)" if finding.level == "error" else ""))
    if found.errors:
        raise click.exceptions.Exit(BadInput.exit_code)


def _render(found: Lint, out: Output) -> None:
    out.table(
        ["rule", "takes", "of", "layers", "experts of", "bytes"],
        [
            (
                f"{rule.where}: {rule.pattern}",
                rule.modules,
                rule.matches,
                rule.layers or "-",
                rule.experts_layers or "-",
                ", ".join(f"{name} {format_bytes(size)}" for name, size in rule.bytes.items()) or "-",
            )
            for rule in found.rules
        ],
        right=(1, 2),
    )
    total = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.bytes.items())
    out.line(f"weights: {total}")
