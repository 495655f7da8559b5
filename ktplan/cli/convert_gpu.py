"""`ktplan convert-gpu`: quantize a model's routed experts for the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktplan.cli.options import (
    FiniteNumber,
    TokenCount,
    dataset_option,
    model_argument,
    model_word,
    output_options,
)
from ktplan.cli.output import Output
from ktplan.errors import BadUsage
from ktplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ktplan.convert.gpu import GpuPlan, GpuReport
    from ktplan.experts import ExpertSet
    from ktplan.model import WeightSource
    from ktplan.profile import Corpus

_ROWS = 20  # experts named in the table, worst first
_NAMES = 6  # tensors named in a note


@click.command("convert-gpu")
@model_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write; new or empty."
)
@click.option(
    "--bits", type=click.Choice(["4", "8"]), default="4", show_default=True, help="Width of a weight."
)
@click.option(
    "--group-size",
    type=click.Choice(["128", "64", "32"]),
    default="128",
    show_default=True,
    help="Weights that share a scale. Where a layer's width is no multiple, the next smaller size is taken for all.",
)
@click.option(
    "--method",
    type=click.Choice(["gptq", "rtn"]),
    default="gptq",
    show_default=True,
    help="gptq fits codes to calibration text; rtn rounds to nearest with searched scales and needs none.",
)
@dataset_option(required=False)
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    help="Only the experts that this plan puts on the GPU: a folder for 'ktplan run --gpu-weights', not a model.",
)
@click.option(
    "--include",
    multiple=True,
    metavar="REGEX",
    help="Quantize further linear layers whose names match, e.g. 'self_attn' or 'shared_expert'. May be repeated.",
)
@click.option(
    "--max-tokens",
    type=TokenCount(),
    default=131_072,
    show_default=True,
    help="Calibration tokens at most; the files share them evenly.",
)
@click.option(
    "--chunk", type=TokenCount(), default=256, show_default=True, help="Tokens of a document seen at once."
)
@click.option(
    "--damp",
    type=FiniteNumber(min=0, max=1, min_open=True),
    default=0.05,
    show_default=True,
    help="Share of the mean diagonal added to the second moments; raised by itself where that is not enough.",
)
@click.option(
    "--min-tokens",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Round experts that saw fewer tokens to nearest; 0 fits those, too, to the layer's other tokens.",
)
@click.option(
    "--positive-scales",
    is_flag=True,
    help="For readers that reject negative scales; costs about a tenth more error at 4 bits.",
)
@click.option("--device", help="Where to compute, e.g. cpu or cuda:0. Default: the first GPU, else the CPU.")
@click.option("--dry-run", is_flag=True, help="Check everything, say what it takes, write nothing.")
@output_options
def convert_gpu_command(
    model: Path,
    output: Path,
    bits: str,
    group_size: str,
    method: str,
    dataset: tuple[Path, ...],
    plan_path: Path | None,
    include: tuple[str, ...],
    max_tokens: int,
    chunk: int,
    damp: float,
    min_tokens: int,
    positive_scales: bool,
    device: str | None,
    dry_run: bool,
    out: Output,
) -> None:
    """Quantize the routed experts of MODEL for the GPU: GPTQ W4A16 or W8A16.

    Calibration text runs through the model one layer at a time, so a model need not fit in memory. The folder is a
    complete checkpoint in the GPTQ format; everything but the experts is copied as it is. With --plan it holds just
    the experts of the plan. No expert comes out worse than by rounding to nearest.

    \b
    Examples:
      ktplan convert-gpu tiny -o tiny-w4 --dataset corpus:profile --max-tokens 32k
      ktplan convert-gpu ./Qwen3-30B-A3B -o ./gpu --plan plan.json --dataset chat.jsonl code.jsonl
    """
    _check_usage(method, dataset, max_tokens, chunk)
    from ktplan.model import open_safetensors

    source = open_safetensors(model)
    experts = _planned(plan_path, source)
    from ktplan.convert.expert_rounding import Calibration
    from ktplan.convert.gpu import GpuOptions, convert_gpu, plan_gpu
    from ktplan.profile import read_corpus
    from ktplan.quant.gptq import Effort

    effort = Effort(damp=damp, signed_scales=not positive_scales)
    options = GpuOptions(
        bits=int(bits),
        group_size=int(group_size),
        method="rtn" if method == "rtn" else "gptq",
        include=include,
        max_tokens=max_tokens,
        chunk=chunk,
        calibration=Calibration(effort=effort, least_tokens=min_tokens),
        device=device,
    )
    plan = plan_gpu(source, output, options, experts)
    _note_what_is_left_out(plan, source, out)
    corpus = read_corpus(dataset) if dataset else None
    if corpus and (warning := corpus.warning()):
        out.warn(warning)
    if dry_run:
        out.report("convert-gpu-plan", _plan_body(plan, source), lambda: _show_plan(plan, source, out))
        return
    report = convert_gpu(source, output, options, experts=experts, corpus=corpus, progress=out.progress())
    for text in _warnings(report):
        out.warn(text)
    out.report(
        "convert-gpu-report", _report_body(report, source, corpus), lambda: _show_report(report, source, out)
    )
    if report.plan.folder.complete:
        out.note(f"{output} is a model of its own in GPTQ form")
    else:
        out.note(f"{output} holds experts only and is no model of its own; it goes with {model_word(model)}")
    out.hint(
        f"ktplan run {model_word(model)} --gpu-weights {output}"
        + (f" --plan {plan_path}" if plan_path else "")
    )


def _check_usage(method: str, dataset: tuple[Path, ...], max_tokens: int, chunk: int) -> None:
    if method == "gptq" and not dataset:
        raise BadUsage(
            "GPTQ needs calibration text",
            hint="give --dataset FILE... (or --dataset corpus:profile, the embedded text), or --method rtn",
        )
    if method == "rtn" and dataset:
        raise BadUsage("--method rtn uses no text, but --dataset is given", hint="leave out one of them")
    for name, value in (("--max-tokens", max_tokens), ("--chunk", chunk)):
        if value < 1:
            raise BadUsage(f"{name} {value} leaves nothing to calibrate with", hint="give 1 or more")


def _planned(plan_path: Path | None, source: WeightSource) -> ExpertSet | None:
    if plan_path is None:
        return None
    from ktplan.placement import PlacementPlan

    return PlacementPlan.load(plan_path).for_model(source.spec).gpu


def _note_what_is_left_out(plan: GpuPlan, source: WeightSource, out: Output) -> None:
    if plan.group_size_why:
        out.note(plan.group_size_why)
    if plan.skipped_linears:
        named = "; ".join(f"{name}: {why}" for name, why in list(plan.skipped_linears.items())[:_NAMES])
        out.warn(f"{len(plan.skipped_linears)} included layers stay as they are ({named})")
    if beyond := source.beyond_names():
        out.note(
            f"left out: {len(beyond)} tensors of layers from {source.spec.layers} on, which config.json does not count "
            "(multi-token prediction)"
        )


def _warnings(report: GpuReport) -> list[str]:
    warnings = []
    if unreached := report.unreached:
        ranges = "; ".join(f"layer {layer}: {ids}" for layer, ids in unreached.to_ranges().items())
        how = "rounded with the moments of their layer's other tokens"
        if report.plan.options.calibration.least_tokens > 0:
            how = "rounded to nearest; more text would reach them"
        warnings.append(
            f"{len(unreached)} of {len(report.experts)} experts were never reached by the calibration text and were "
            f"{how} ({ranges})"
        )
    if report.tokens and not report.held_out_tokens:
        warnings.append(
            "the calibration text is too short to hold some of it out: errors are those on the text fitted to"
        )
    return warnings


def _show_plan(plan: GpuPlan, source: WeightSource, out: Output) -> None:
    spec, folder = source.spec, plan.folder
    linears = sum(map(len, folder.linears.values()))
    more = f" and {linears} other layers" if linears else ""
    out.line(
        f"{len(folder.experts)} of {spec.expert_count} experts{more}   {folder.scheme.name}, {plan.options.method}   "
        f"on {plan.device}"
    )
    if folder.complete:
        out.line(f"a complete model: {len(plan.kept)} matrices stay as they are")
    else:
        out.line("a folder of experts for this plan, no model of its own")
    out.line(f"writes {format_bytes(plan.bytes_out)} to {plan.out} (disk has {format_bytes(plan.disk_free)})")
    line = f"peak memory {format_bytes(plan.peak_memory)}"
    if plan.buffers.bytes:
        where = "in a temporary file beside the output" if plan.buffers.on_disk else "in memory"
        line += (
            f"; activations of at most {plan.options.max_tokens:,} tokens take {format_bytes(plan.buffers.bytes)} "
            f"{where} as {plan.buffers.dtype}"
        )
    out.line(line)


def _plan_body(plan: GpuPlan, source: WeightSource) -> dict[str, Any]:
    return {
        **_common_body(plan, source),
        "disk_free_bytes": plan.disk_free,
        "peak_memory_bytes": plan.peak_memory,
        "activation_bytes": plan.buffers.bytes,
        "activations_on_disk": plan.buffers.on_disk,
        "activation_dtype": plan.buffers.dtype,
    }


def _common_body(plan: GpuPlan, source: WeightSource) -> dict[str, Any]:
    return {
        "model": source.spec.name,
        "fingerprint": source.spec.fingerprint,
        "output": str(plan.out),
        "complete": plan.folder.complete,
        "scheme": plan.folder.scheme.name,
        "bits": plan.folder.scheme.bits,
        "group_size": plan.folder.scheme.group_size,
        "group_size_why": plan.group_size_why,
        "method": plan.options.method,
        "device": plan.device,
        "bytes_out": plan.bytes_out,
        "experts": plan.folder.experts.to_ranges(),
        "kept": list(plan.kept),
        "skipped": dict(plan.skipped_linears),
    }


def _report_body(report: GpuReport, source: WeightSource, corpus: Corpus | None) -> dict[str, Any]:
    from ktplan.convert.gpu import expert_result, outcome_result

    body = _common_body(report.plan, source)
    return {
        **body,
        "tokens": report.tokens,
        "held_out_tokens": report.held_out_tokens,
        "documents": report.documents,
        "files": [file._asdict() for file in corpus.files] if corpus else [],
        "results": [expert_result(row) for row in report.experts],
        "linears": {row.name: outcome_result(row.outcome) for row in report.linears},
        "unreached": report.unreached.to_ranges(),
        "rounded_to_nearest": report.plainly_rounded.to_ranges(),
        "seconds": report.seconds,
        "warnings": _warnings(report),
    }


def _show_report(report: GpuReport, source: WeightSource, out: Output) -> None:
    plan = report.plan
    calibrated = plan.options.method == "gptq"
    worst = sorted(report.experts, key=lambda row: -max(_kept_error(row.gate_up), _kept_error(row.down)))[
        :_ROWS
    ]
    columns = ["layer", "expert", "tokens", "gate+up", "gptq", "rtn", "down", "gptq", "rtn"]
    rows = [
        (
            row.layer,
            row.expert,
            f"{row.tokens:,}" if calibrated else "",
            *(cell for outcome in (row.gate_up, row.down) for cell in _cells(outcome)),
        )
        for row in worst
    ]
    what = "relative squared error of outputs" if calibrated else "relative squared error of weights"
    if report.held_out_tokens:
        what += f" on {report.held_out_tokens:,} held-out tokens"
    out.line(f"{what}, worst {len(rows)} of {len(report.experts)} experts first")
    out.table(columns, rows, right=(0, 1, 2, 4, 5, 7, 8))
    out.line(f"gate+up: {_summary([row.gate_up for row in report.experts])}")
    out.line(f"down: {_summary([row.down for row in report.experts])}")
    if report.linears:
        out.line(f"{len(report.linears)} other layers: {_summary([row.outcome for row in report.linears])}")
    text = f" with {report.tokens:,} tokens of {report.documents:,} documents" if calibrated else ""
    out.line(
        f"wrote {plan.out}: {len(report.experts)} of {source.spec.expert_count} experts of {source.spec.name} as "
        f"{plan.folder.scheme.name}{text}, {format_seconds(report.seconds)}"
    )
    kept = ", ".join(plan.kept[:_NAMES]) + (" ..." if len(plan.kept) > _NAMES else "")
    if plan.folder.complete:
        out.line(f"{len(plan.kept)} matrices were not quantized: {kept}")


def _kept_error(outcome: Any) -> float:
    return float(outcome.gptq_error if outcome.method == "gptq" else outcome.rtn_error)


def _cells(outcome: Any) -> tuple[str, str, str]:
    gptq = "" if outcome.gptq_error is None else _figure(outcome.gptq_error)
    return outcome.method, gptq, _figure(outcome.rtn_error)


def _figure(error: float) -> str:
    return f"{error:.2e}" if 0 < error < 1e-3 else f"{error:.5f}"


def _summary(outcomes: list[Any]) -> str:
    kept = sum(map(_kept_error, outcomes)) / len(outcomes)
    nearest = sum(outcome.rtn_error for outcome in outcomes) / len(outcomes)
    if all(outcome.gptq_error is None for outcome in outcomes):
        return f"mean error {_figure(nearest)}"
    fitted = sum(outcome.method == "gptq" for outcome in outcomes)
    share = f", {kept / nearest:.2f} of it" if nearest else ""
    return (
        f"mean error {_figure(kept)} where rounding to nearest gives {_figure(nearest)}{share}; "
        f"gptq kept in {fitted} of {len(outcomes)}"
    )
