"""`ktplan convert-cpu`: pack a model's routed experts for the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktplan.cli.options import model_argument, model_word, output_options
from ktplan.cli.output import Output
from ktplan.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from ktplan.convert.cpu import Plan, Report
    from ktplan.model import SafetensorsSource


@click.command("convert-cpu")
@model_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for the store; new or empty.",
)
@click.option(
    "--bits",
    type=click.Choice(["8", "4", "2"]),
    default="8",
    show_default=True,
    help="Width of a weight: 8 is near lossless, 4 half the memory. 2 keeps levels -1, 0, 1 in 4-bit tiles: a "
    "deliberately coarse specimen that saves nothing, for seeing what quantization does.",
)
@click.option(
    "--group-size",
    type=click.Choice(["row"]),
    default="row",
    show_default=True,
    help="Weights that share a scale; this layout has one scale for each row.",
)
@click.option(
    "--rounding",
    type=click.Choice(["mse", "kt"]),
    default="mse",
    show_default=True,
    help="mse searches each row's scale for the least error. kt gives kt-kernel's bytes exactly.",
)
@click.option(
    "--numa-parts",
    type=int,
    default=1,
    show_default=True,
    help="Split every expert for this many NUMA nodes; the number is fixed in the store.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads that quantize. Default: the CPUs, at most 8."
)
@click.option("--dry-run", is_flag=True, help="Check everything, say what it takes, write nothing.")
@output_options
def convert_cpu_command(
    model: Path,
    output: Path,
    bits: str,
    group_size: str,
    rounding: str,
    numa_parts: int,
    threads: int | None,
    dry_run: bool,
    out: Output,
) -> None:
    """Pack the routed experts of MODEL for the CPU.

    The store is a folder of safetensors, one a MoE layer, that ktplan maps and that an unmodified kt-kernel reads
    (AMXINT8, AMXINT4), with store.json beside them: what was converted, how, and each expert's error. Dense weights
    stay in the model. A conversion that was stopped goes on when the same command is given again.

    \b
    Examples:
      ktplan convert-cpu tiny -o tiny-int8
      ktplan convert-cpu ./Qwen3-30B-A3B -o ./store --bits 4 --numa-parts 2 --dry-run
    """
    del group_size  # one choice so far
    from ktplan.convert.cpu import convert_cpu, plan_cpu
    from ktplan.model import open_source
    from ktplan.quant.scheme import Scheme

    source = open_source(model)
    _note_what_is_left_out(source, out)
    scheme = Scheme(int(bits), rounding="kt" if rounding == "kt" else "mse")
    if dry_run:
        plan = plan_cpu(source, output, scheme, numa_parts, threads=threads)
        out.report("convert-cpu-plan", _plan_body(plan), lambda: _show_plan(plan, out))
        return
    report = convert_cpu(source, output, scheme, numa_parts, threads=threads, progress=out.progress())
    out.report("convert-cpu-report", _report_body(report), lambda: _show_report(report, out))
    out.hint(f"ktplan run {model_word(model)} --store {output}")


def _note_what_is_left_out(source: SafetensorsSource, out: Output) -> None:
    if beyond := source.beyond_names():
        out.note(
            f"left out: {len(beyond)} tensors of layers from {source.spec.layers} on, which config.json does not count "
            "(multi-token prediction)"
        )


def _show_plan(plan: Plan, out: Output) -> None:
    job = plan.job
    out.line(
        f"{len(job.layers)} MoE layers of {plan.experts} experts   {job.scheme}, rounding {job.rounding}   "
        f"layout {job.layout}   {_parts(job.parts)}"
    )
    out.line(
        f"reads {format_bytes(plan.bytes_in)}, writes {format_bytes(plan.bytes_out)} to {plan.out} "
        f"(disk has {format_bytes(plan.disk_free)})"
    )
    if plan.resumed:
        out.line(f"{plan.resumed} layers are there already; the conversion that was stopped goes on")
    about = f", about {format_seconds(plan.seconds)}" if plan.seconds is not None else ""
    out.line(f"peak memory {format_bytes(plan.peak_memory)} with {plan.threads} threads{about}")


def _plan_body(plan: Plan) -> dict[str, Any]:
    job = plan.job
    return {
        "model": job.model,
        "fingerprint": job.fingerprint,
        "scheme": job.scheme,
        "rounding": job.rounding,
        "layout": job.layout,
        "numa_parts": job.parts,
        "layers": list(job.layers),
        "experts": plan.experts,
        "output": str(plan.out),
        "resumed_layers": plan.resumed,
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "disk_free_bytes": plan.disk_free,
        "peak_memory_bytes": plan.peak_memory,
        "threads": plan.threads,
        "estimated_seconds": plan.seconds,
    }


def _show_report(report: Report, out: Output) -> None:
    manifest = report.manifest
    resumed = f" ({report.resumed} layers were there already)" if report.resumed else ""
    out.line(
        f"wrote {report.store}: {len(manifest.layers) * manifest.experts} experts of {manifest.model}, "
        f"{manifest.scheme}, {_parts(manifest.parts)}{resumed}"
    )
    rate = format_rate(report.bytes_in / max(report.seconds, 1e-9))
    out.line(
        f"{format_bytes(report.bytes_in)} in, {format_bytes(manifest.total_bytes)} out, "
        f"{format_seconds(report.seconds)}, {rate}"
    )
    worst = manifest.worst(1)[0]
    out.line(
        f"weight error (relative RMS): mean {manifest.mean_error:.4f}, "
        f"worst {worst.error:.4f} (layer {worst.layer}, expert {worst.expert}, {worst.projection})"
    )


def _report_body(report: Report) -> dict[str, Any]:
    manifest = report.manifest
    return {
        "store": str(report.store),
        "model": manifest.model,
        "fingerprint": manifest.fingerprint,
        "scheme": manifest.scheme,
        "rounding": manifest.rounding,
        "layout": manifest.layout,
        "numa_parts": manifest.parts,
        "layers": list(manifest.layers),
        "experts": manifest.experts,
        "resumed_layers": report.resumed,
        "bytes_in": report.bytes_in,
        "bytes_out": manifest.total_bytes,
        "seconds": report.seconds,
        "mean_error": manifest.mean_error,
        "worst_errors": [found._asdict() for found in manifest.worst()],
    }


def _parts(count: int) -> str:
    return "1 NUMA part" if count == 1 else f"{count} NUMA parts"
