"""`ktplan emit`: write a plan as injection rules, or as the files that make sglang-kt take it."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktplan.artifact import check_output_file
from ktplan.cli.options import output_options
from ktplan.cli.output import Output

if TYPE_CHECKING:
    from ktplan.model import ModelSpec
    from ktplan.placement import PlacementPlan

_TARGETS = ("ktplan", "kt-yaml", "sglang-kt", "llama.cpp")


@click.command("emit")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "--for", "target", type=click.Choice(_TARGETS), default="ktplan", show_default=True,
    help="Rules for ktplan; rules in KTransformers' classes; counts and flags for sglang-kt; flags for llama.cpp.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path),
    help="The file to write, or for sglang-kt the new folder.  [default: rules.yaml, sglang-kt or llama.cpp.txt]",
)  # fmt: skip
@click.option(
    "--model", metavar="MODEL", help="Check that the plan was made for this model. Not needed to emit."
)
@output_options
def emit_command(plan_file: Path, target: str, output: Path | None, model: str | None, out: Output) -> None:
    """Write a plan as injection rules or flags for other engines.

    \b
    Example:
      ktplan emit plan.json -o rules.yaml
      ktplan emit plan.json --for sglang-kt -o placement
    """
    from ktplan.model import locate, read_spec
    from ktplan.placement import PlacementPlan

    plan = PlacementPlan.load(plan_file)
    spec = read_spec(locate(model)) if model else None
    if target == "llama.cpp":
        _emit_llamacpp(plan, spec, output or Path("llama.cpp.txt"), out)
    elif target == "sglang-kt":
        _emit_sglang(plan, spec, output or Path("sglang-kt"), out)
    else:
        rules_file = output or Path("rules.yaml")
        check_output_file(rules_file, sources=(plan_file,))
        _emit_rules(plan, spec, target, rules_file, out)


def _emit_rules(plan: PlacementPlan, spec: ModelSpec | None, dialect: str, output: Path, out: Output) -> None:
    from ktplan.placement import emit

    rules = emit.to_rules(plan, spec, dialect)
    rules.save(output, emit.heading(plan, dialect))
    whole = emit.whole_layers(plan)
    notes = []
    kept = plan.shape.experts * len(whole)
    if dialect == "kt-yaml" and kept < len(plan.gpu):
        notes.append(
            f"unmodified KTransformers places whole layers: {kept:,} of {len(plan.gpu):,} planned experts would be on "
            "its GPU (strategy front-loading fills whole layers); ktplan reads the per-expert lists of the same file"
        )
    body = {
        "output": str(output),
        "for": dialect,
        "rules": len(rules),
        "gpu_experts": len(plan.gpu),
        "whole_layers": list(whole),
        "notes": notes,
    }
    out.report(
        "emit-report",
        body,
        lambda: out.line(f"wrote {output}: {len(rules)} rules for {len(plan.gpu):,} GPU experts"),
    )
    for note in notes:
        out.note(note)
    if dialect == "ktplan":
        out.hint(f"ktplan run MODEL --store STORE --rules {output}")


def _emit_sglang(plan: PlacementPlan, spec: ModelSpec | None, output: Path, out: Output) -> None:
    import torch

    from ktplan.artifact import new_directory
    from ktplan.placement import emit

    made = emit.to_sglang(plan, spec, str(output / "counts.pt"))
    archive = io.BytesIO()
    torch.save({"logical_count": torch.from_numpy(made.counts)}, archive)
    with new_directory(output) as folder:
        (folder / "counts.pt").write_bytes(archive.getvalue())
        (folder / "flags.txt").write_text("\n".join(made.flags) + "\n", encoding="utf-8")
        (folder / "launch.txt").write_text(emit.launch_line(plan, made.flags), encoding="utf-8")
    body = {
        "output": str(output),
        "for": "sglang-kt",
        "gpu_experts": len(plan.gpu),
        "flags": made.flags,
        "notes": made.notes,
    }
    out.report("emit-report", body, lambda: out.line(f"wrote {output}: counts.pt, flags.txt, launch.txt"))
    for note in made.notes:
        out.warn(note)


def _emit_llamacpp(plan: PlacementPlan, spec: ModelSpec | None, output: Path, out: Output) -> None:
    from ktplan.artifact import write_whole
    from ktplan.placement.llamacpp import to_llamacpp

    if spec is not None:
        plan.for_model(spec)
    made = to_llamacpp(plan)
    words = shlex.join(made.flags)
    write_whole(output, f"{words}\n".encode())
    body = {
        "output": str(output),
        "for": "llama.cpp",
        "gpu_layers": list(made.layers),
        "gpu_experts": len(plan.gpu),
        "flags": list(made.flags),
        "served": made.served,
        "planned": made.planned,
        "notes": list(made.notes),
    }
    out.report("emit-report", body, lambda: out.line(f"wrote {output}: {words}"))
    for note in made.notes:
        out.note(note)
