"""What convert-gpu will do: which layers, in which groups, into which files, with how much memory and disk.

Made from names, shapes and the disk alone; `--dry-run` prints it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ktplan import network
from ktplan.convert.expert_rounding import Calibration, Method
from ktplan.convert.gptq_folder import FolderPlan, Linear, companions_bytes, plan_folder, unquantized
from ktplan.convert.job import existing
from ktplan.errors import BadInput, BadUsage, DoesNotFit, KtplanError, MachineLacks
from ktplan.experts import ExpertId, ExpertSet
from ktplan.model import WeightSource
from ktplan.quant.gptq import Effort
from ktplan.quant.gptq_format import GROUP_SIZES, GptqScheme
from ktplan.units import format_bytes

# What activations may take in memory before they are kept as bfloat16, and then in a file.
_BUFFER_BYTES = 2 << 30
# How quantized dense weights show: by type, or by the name of their words where the type says nothing.
_QUANTIZED = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8"})
_QUANTIZED_SUFFIXES = (".qweight", ".weight_packed", ".weight_scale", "_scale_inv")
_RECORD_BYTES = 2048  # of gpu-experts.json and the index, for each expert: a generous allowance


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """What to make and how. `include` are regular expressions for names of linear layers beside the routed experts."""

    bits: int
    group_size: int = 128
    method: Method = "gptq"
    include: tuple[str, ...] = ()
    max_tokens: int = 131_072
    chunk: int = 256
    calibration: Calibration = field(default_factory=lambda: Calibration(effort=Effort()))
    device: str | None = None  # None: the first CUDA device, else the CPU
    buffer_bytes: int = _BUFFER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """What a conversion will read, write and need. Bytes."""

    out: Path
    options: GpuOptions
    folder: FolderPlan
    group_size_why: str | None  # None: as asked
    skipped_linears: Mapping[str, str]  # matched by `include` but impossible to store, and why
    kept: tuple[str, ...]  # matrices that stay as they are
    bytes_out: int
    disk_free: int
    buffers: Buffers
    peak_memory: int
    device: str


class Buffers(NamedTuple):
    """How activations between layers are kept."""

    dtype: str  # "float32" or "bfloat16"
    bytes: int
    on_disk: bool


def plan_gpu(
    source: WeightSource, out: Path, options: GpuOptions, experts: ExpertSet | None = None
) -> GpuPlan:
    """Check all that can be checked beforehand and say what the conversion will take; writes nothing.

    `experts` limits the work to these and the output to a partial folder; None means all, in a complete model.
    Raises BadUsage for an output in use, options that contradict each other or match nothing; BadInput for sizes that
    no group fits; DoesNotFit for a disk that is too small.
    """
    spec = source.spec
    spec.check_experts(calibrated=True)
    _check_source(source, options, complete=experts is None)
    if experts is not None and options.include:
        raise BadUsage(
            "--include quantizes dense layers, a folder for a plan holds nothing but its experts",
            hint="leave out --include, or --plan",
        )
    if experts is not None and not len(experts):
        raise BadUsage(
            "the plan puts no expert on the GPU: there is nothing to convert", hint="make another plan"
        )
    linears, skipped = _included(source, options)
    scheme, why = _scheme(source, options, linears)
    linears = _storable(linears, scheme, skipped)
    everything = ExpertSet(
        ExpertId(layer, number) for layer in spec.moe_layers for number in range(spec.experts)
    )
    folder = plan_folder(
        source, scheme, everything if experts is None else experts, linears, complete=experts is None
    )
    quantized = len(folder.experts) + sum(map(len, linears.values()))
    bytes_out = folder.bytes + _RECORD_BYTES * quantized
    if folder.complete:
        bytes_out += companions_bytes(source.root)
    buffers = _buffers(source, options)
    _check_output(out, bytes_out + (buffers.bytes if buffers.on_disk else 0))
    return GpuPlan(
        out=out,
        options=options,
        folder=folder,
        group_size_why=why,
        skipped_linears=skipped,
        kept=tuple(unquantized(source, folder)),
        bytes_out=bytes_out,
        disk_free=shutil.disk_usage(existing(out)).free,
        buffers=buffers,
        peak_memory=_peak_memory(source, options, buffers),
        device=_device(options),
    )


def _check_source(source: WeightSource, options: GpuOptions, *, complete: bool) -> None:
    """Config and dense weights must be such that the network can be built, or the folder completed, from them."""
    if not (source.root / "config.json").is_file():
        raise BadInput(
            f"{source.root} has no config.json: the GPTQ folder needs the model's own",
            hint="give the safetensors folder of the model",
        )
    if not complete and options.method == "rtn":
        return  # experts alone, and no forward pass
    for name in source.dense_names():
        if source.info(name).dtype in _QUANTIZED or name.endswith(_QUANTIZED_SUFFIXES):
            raise BadInput(
                f"{source.file_of(name)}: {name} is stored as {source.info(name).dtype}: the model's dense weights are "
                "quantized, and a GPTQ folder cannot keep them so",
                hint="give the bfloat16 version of the model, or convert the experts of a plan with --method rtn",
            )


# What is to be quantized, and in which groups.


def _included(
    source: WeightSource, options: GpuOptions
) -> tuple[dict[int, tuple[Linear, ...]], dict[str, str]]:
    """The linear layers that `include` names, by decoder layer; and those that it names in vain."""
    if not options.include:
        return {}, {}
    patterns = [_pattern(text) for text in options.include]
    model = network.skeleton(source.root)
    linears: dict[int, list[Linear]] = {}
    skipped: dict[str, str] = {}
    candidates: list[str] = []
    for name in source.dense_names():
        module = name.removesuffix(".weight")
        layer = network.layer_of(module)
        if layer is None or module == name or not _is_linear(model, module):
            continue
        candidates.append(module)
        if any(pattern.search(module) for pattern in patterns):
            outputs, inputs = source.info(name).shape
            linears.setdefault(layer, []).append(Linear(module, outputs, inputs))
    for text, pattern in zip(options.include, patterns, strict=True):
        if not any(pattern.search(module) for module in candidates):
            raise BadUsage(
                f"--include '{text}' matches no linear layer",
                hint=f"names look like {', '.join(candidates[:4])}; routed experts are always quantized",
            )
    return {layer: tuple(own) for layer, own in linears.items()}, skipped


def _is_linear(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name), nn.Linear)
    except AttributeError:
        return False


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as fault:
        raise BadUsage(
            f"--include '{text}' is not a regular expression: {fault}", hint="e.g. 'self_attn'"
        ) from None


def _scheme(
    source: WeightSource, options: GpuOptions, linears: Mapping[int, Sequence[Linear]]
) -> tuple[GptqScheme, str | None]:
    """The largest group size up to the one asked for that divides the inputs of every layer: a file has only one."""
    spec = source.spec
    GptqScheme(options.bits, options.group_size)
    widths = {"hidden size": spec.hidden, "expert intermediate size": spec.moe_intermediate}
    widths |= {linear.name: linear.inputs for own in linears.values() for linear in own}
    for size in GROUP_SIZES:
        if size <= options.group_size and not any(width % size for width in widths.values()):
            if size == options.group_size:
                return GptqScheme(options.bits, size), None
            name, width = next((n, w) for n, w in widths.items() if w % options.group_size)
            return (
                GptqScheme(options.bits, size),
                f"groups of {size} instead of {options.group_size}: the {name} {width} is no multiple of "
                f"{options.group_size}",
            )
    name, width = next((n, w) for n, w in widths.items() if w % GROUP_SIZES[-1])
    raise BadInput(
        f"the {name} of {spec.name} is {width}, which is no multiple of any group size "
        f"({', '.join(map(str, GROUP_SIZES))})",
        hint="no GPU kernel takes such a layer in GPTQ form; leave these experts in their own type",
    )


def _storable(
    linears: Mapping[int, Sequence[Linear]], scheme: GptqScheme, skipped: dict[str, str]
) -> dict[int, tuple[Linear, ...]]:
    """The linears that the format can hold; the others go to `skipped` with the reason."""
    kept: dict[int, tuple[Linear, ...]] = {}
    for layer, own in linears.items():
        for linear in own:
            if reason := scheme.misfit(linear.outputs, linear.inputs):
                skipped[linear.name] = reason
        if fitting := tuple(linear for linear in own if linear.name not in skipped):
            kept[layer] = fitting
    if linears and not kept:
        name, reason = next(iter(skipped.items()))
        raise BadUsage(
            f"--include matches {name}, which cannot be stored: {reason}", hint="name other layers"
        )
    return kept


# What it takes.


def _device(options: GpuOptions) -> str:
    if options.device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(options.device)
    except RuntimeError:
        raise BadUsage(f"--device '{options.device}' is no device", hint="e.g. cpu, cuda or cuda:1") from None
    there = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type != "cpu" and (device.index or 0) >= there:
        raise MachineLacks(
            f"--device {options.device} is not there: {there} CUDA devices", hint="use --device cpu"
        )
    return options.device


def _buffers(source: WeightSource, options: GpuOptions) -> Buffers:
    if options.method == "rtn":
        return Buffers("float32", 0, False)
    # Three buffers of one row a token, see LayerByLayer; the prefix of special tokens is small change.
    values = 3 * options.max_tokens * source.spec.hidden
    if 4 * values <= options.buffer_bytes:
        return Buffers("float32", 4 * values, False)
    return Buffers("bfloat16", 2 * values, 2 * values > options.buffer_bytes)


def _peak_memory(source: WeightSource, options: GpuOptions, buffers: Buffers) -> int:
    """What the process has now and will add. Working copies were counted in the code and checked by measuring."""
    spec = source.spec
    hidden, inner = spec.hidden, spec.moe_intermediate
    expert = 2 * inner * hidden  # gate and up, the larger of the two matrices that are rounded
    weights = 3 * inner * hidden + 10 * expert
    if options.method == "rtn":
        return _resident() + 4 * weights
    moments = 11 * max(hidden, inner) ** 2
    dense: dict[int | None, int] = {}
    for name in source.dense_names():
        layer = network.layer_of(name)
        dense[layer] = dense.get(layer, 0) + prod(source.info(name).shape)
    outside = dense.pop(None, 0)
    forward = 2048 * 24 * hidden
    in_layer = max(dense.values(), default=0) + forward + moments + weights
    return _resident() + 4 * max(outside, in_layer) + (0 if buffers.on_disk else buffers.bytes)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _check_output(out: Path, bytes_needed: int) -> None:
    if out.exists() and not out.is_dir():
        raise BadUsage(f"{out} exists and is a file", hint="name a new folder with -o")
    if out.is_dir() and any(out.iterdir()):
        raise BadUsage(
            f"{out} exists and is not empty", hint="name a new folder with -o, or remove that one first"
        )
    place = existing(out)
    if not os.access(place, os.W_OK | os.X_OK):
        raise KtplanError(
            f"{out} cannot be written: no permission in {place}", hint="choose another output with -o"
        )
    free = shutil.disk_usage(place).free
    if bytes_needed > free:
        raise DoesNotFit(
            f"the output needs {format_bytes(bytes_needed)} on {place}, {format_bytes(free)} are free",
            hint=f"free {format_bytes(bytes_needed - free)}, convert fewer experts with --plan, or choose another disk "
            "with -o",
        )
