"""`ktplan convert-cpu`: pack a model's routed experts for the CPU."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktplan.cli.options import (
    ByteSize,
    ManyFiles,
    TokenCount,
    model_word,
    optional_model_argument,
    output_options,
    text_files,
    warn_if_crowded,
)
from ktplan.cli.output import Output
from ktplan.cli.store_format import chosen_scheme
from ktplan.errors import BadUsage
from ktplan.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from ktplan.convert.calibrated import CalibrationText
    from ktplan.convert.cpu import Plan, Report
    from ktplan.model import WeightSource
    from ktplan.quant.scheme import Scheme


@click.command("convert-cpu")
@optional_model_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for the store; new or empty.")
@click.option(
    "--bits",
    type=click.Choice(["8", "4", "2"]),
    help="Width of a weight: 4 (default) takes 0.56 bytes a weight, 8 is near lossless at 1 byte. 2 keeps levels -1, "
    "0, 1 in 4-bit tiles: a deliberately coarse specimen that saves nothing, for seeing what quantization does. For "
    "kt-kernel the default is 8.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16"]),
    help="bf16: keep 16 bits, for models too small or too precious to quantize.",
)
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128", "row"]),
    help="With 4 bits: weights that share a scale. 32 (default) is the most exact. row, one scale for each output row, "
    "is what kt-kernel's formats have, and what 8 bits have always.",
)
@click.option(
    "--target",
    type=click.Choice(["ktplan", "kt-kernel"]),
    help="Who runs the store. ktplan (default): the best format of our own runtime. kt-kernel: one that kt-kernel "
    "loads as well; --rounding kt implies it.",
)
@click.option(
    "--rounding",
    type=click.Choice(["mse", "kt", "gptq"]),
    help="mse (default) searches each scale for the least error. kt gives kt-kernel's bytes exactly. gptq fits levels "
    "and scales to what --calibration text makes the experts see: the least damage, in the same format.",
)
@click.option(
    "--calibration",
    cls=ManyFiles,
    multiple=True,
    metavar="FILE...",
    help="Text for --rounding gptq (.txt, .jsonl, corpus:profile), or a profile of this model: then the texts that "
    "it was recorded on, looked for beside it and in the present folder. Several may follow.",
)
@click.option(
    "--max-tokens", type=TokenCount(), default=65_536, show_default=True, help="Of the calibration text."
)
@click.option(
    "--numa-parts",
    type=int,
    default=1,
    show_default=True,
    help="Split every expert for this many NUMA nodes; see also ktplan repartition.",
)
@click.option(
    "--mixed",
    type=ByteSize(),
    metavar="BUDGET",
    help="With 4 bits: give 8 bits to the experts that 4 hurt most, as long as all of them fit into BUDGET (e.g. "
    "20GiB). Only ktplan reads such a store.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads that quantize. Default: all CPUs.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Go on with the conversion that was stopped in DIR; model and options are known there.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, say what it takes, write nothing.")
@output_options
@click.pass_context
def convert_cpu_command(
    context: click.Context,
    /,
    model: Path | None,
    output: Path | None,
    threads: int | None,
    resume: Path | None,
    dry_run: bool,
    out: Output,
    **options: Any,
) -> None:
    """Pack the routed experts of MODEL for the CPU.

    The store is a folder of safetensors, one a MoE layer, that ktplan maps, with store.json beside them: what was
    converted, how, and each expert's error. With --target kt-kernel an unmodified kt-kernel reads it as well (AMXINT8,
    AMXINT4). Dense weights stay in the model. A conversion that was stopped, in whatever way, goes on when the same
    command is given again.

    \b
    Examples:
      ktplan convert-cpu tiny -o tiny-int4
      ktplan convert-cpu ./Qwen3-30B-A3B -o ./store --numa-parts 2 --dry-run
      ktplan convert-cpu ./Qwen3-30B-A3B -o ./store --bits 8 --target kt-kernel
      ktplan convert-cpu --resume ./store
    """
    from ktplan.convert.cpu import convert_cpu, plan_cpu
    from ktplan.convert.job import Arguments
    from ktplan.model import open_source

    if resume is not None:
        model, output, options = _recalled(context, resume, model, output, options)
    if model is None or output is None:
        missing = "MODEL" if model is None else "-o"
        raise BadUsage(f"{missing} is missing", hint="ktplan convert-cpu MODEL -o STORE, or --resume DIR")
    warn_if_crowded(threads, out)
    scheme = chosen_scheme(options)
    source = open_source(model)
    if options["target"] == "kt-kernel" or scheme.rounding == "kt":
        _refuse_other_activations(source)
    if options["target"] == "kt-kernel":
        _refuse_padding(source, scheme)
    _note_what_is_left_out(source, out)
    options["calibration"] = [_absolute(name) for name in options["calibration"]]
    calibration = _calibration(options, source, out)
    if dry_run:
        plan = plan_cpu(
            source,
            output,
            scheme,
            options["numa_parts"],
            threads=threads,
            calibration=calibration,
            mixed=options["mixed"],
        )
        out.report("convert-cpu-plan", _plan_body(plan), lambda: _show_plan(plan, out))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is finished stays
    report = convert_cpu(
        source,
        output,
        scheme,
        options["numa_parts"],
        threads=threads,
        calibration=calibration,
        mixed=options["mixed"],
        arguments=Arguments(model_path=str(model.absolute()), options=options),
        progress=out.progress(),
    )
    for layer, reason in report.redone.items():
        out.warn(f"layer {layer} was made again: {reason}")
    out.report("convert-cpu-report", _report_body(report), lambda: _show_report(report, out))
    if padding := report.manifest.padding:
        width = report.manifest.intermediate
        out.note(
            f"experts are {width - padding} wide and padded with zeros to {width}, a multiple that the layout needs"
            + ("; kt-kernel itself cannot read this store" if options["rounding"] == "kt" else "")
        )
    out.hint(f"ktplan run {model_word(model)} --store {output}")


def _absolute(name: str) -> str:
    return name if name.startswith("corpus:") else str(Path(name).absolute())


def _calibration(options: dict[str, Any], source: WeightSource, out: Output) -> CalibrationText | None:
    """The text to fit to: files, or the ones that a profile of this model was recorded on."""
    if not options["calibration"]:
        return None
    from ktplan.convert.calibrated import CalibrationText
    from ktplan.profile import ActivationProfile, read_corpus
    from ktplan.profile.texts import texts_of

    files: list[Path] = []
    text_field = "text"
    for name in options["calibration"]:
        if name.endswith(".safetensors"):
            profile = ActivationProfile.load(Path(name)).for_model(source.spec)
            text_field = str(profile.settings.get("text_field", text_field))
            found: Sequence[Path] = texts_of(profile, [Path(name).parent, Path.cwd()])
        else:
            found = text_files("--calibration", [name])
        files += (file for file in found if file not in files)
    corpus = read_corpus(files, text_field)
    if warning := corpus.warning():
        out.warn(warning)
    return CalibrationText(corpus=corpus, max_tokens=options["max_tokens"])


def _recalled(
    context: click.Context, folder: Path, model: Path | None, output: Path | None, options: dict[str, Any]
) -> tuple[Path, Path, dict[str, Any]]:
    """What the stopped conversion was asked, and what is given now; where they differ the job is refused by name."""
    from click.core import ParameterSource

    from ktplan.convert.job import recorded_arguments

    if output is not None and output.absolute() != folder.absolute():
        raise BadUsage(f"-o {output} is not the folder of --resume {folder}", hint="leave out -o")
    from ktplan.model import locate

    recorded = recorded_arguments(folder)
    now = {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    return model or locate(recorded.model_path), folder, {**options, **recorded.options, **now}


def _refuse_other_activations(source: WeightSource) -> None:
    """kt-kernel's INT8 and INT4 experts compute silu(gate) * up; it would run others without a word, and wrongly."""
    spec = source.spec
    if spec.expert_bias or spec.activation not in ("silu", "swish"):
        extra = "biases" if spec.expert_bias else f"the activation '{spec.activation}'"
        raise BadUsage(
            f"experts of {spec.model_type} have {extra}, which kt-kernel's INT8 and INT4 kernels do not compute",
            hint="leave out --target kt-kernel and --rounding kt: our own runtime computes them",
        )


def _refuse_padding(source: WeightSource, scheme: Scheme) -> None:
    """kt-kernel expects experts as wide as config.json says: a store with padding is not for it."""
    from ktplan.store.layout import layout_for, padded

    width, unit = source.spec.moe_intermediate, layout_for(scheme.bits).unit
    if padded(width, scheme.bits) != width:
        raise BadUsage(
            f"experts are {width} wide, kt-kernel's {scheme.bits}-bit kernels need a multiple of {unit}",
            hint="leave out --target kt-kernel: our own runtime takes padded experts",
        )


def _note_what_is_left_out(source: WeightSource, out: Output) -> None:
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
        f"({plan.bytes_out / plan.weights:.4g} bytes a weight; disk has {format_bytes(plan.disk_free)})"
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
        "bytes_per_weight": plan.bytes_out / plan.weights,
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
        f"weight error (relative RMS): mean {manifest.mean_error or 0.0:.4f}, "
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
        "redone_layers": {str(layer): reason for layer, reason in report.redone.items()},
        "bytes_in": report.bytes_in,
        "bytes_out": manifest.total_bytes,
        "seconds": report.seconds,
        "mean_error": manifest.mean_error,
        "worst_errors": [found._asdict() for found in manifest.worst()],
    }


def _parts(count: int) -> str:
    return "1 NUMA part" if count == 1 else f"{count} NUMA parts"
