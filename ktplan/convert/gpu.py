"""A checkpoint's routed experts to GPTQ form for the GPU: a whole model, or just the experts that a plan puts there.

Calibration text goes through the model one decoder layer at a time (calibrate.py). In a MoE layer each expert is
read, rounded with the tokens it gets (expert_rounding.py), written (gptq_folder.py) and used for what the next layer
sees, then forgotten: memory holds one layer's dense weights, one expert, and a few matrices of second moments.
Everything that can be known beforehand is checked before a weight is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ktplan import network
from ktplan.artifact import new_directory
from ktplan.convert.calibrate import LayerByLayer, Text, read_text
from ktplan.convert.expert_rounding import (
    Activation,
    Choice,
    LayerExperts,
    Outcome,
    RoundedExpert,
    choose,
    stacked,
)
from ktplan.convert.gptq_checkpoint import GptqCheckpoint
from ktplan.convert.gptq_folder import (
    FolderWriter,
    Linear,
    expert_linears,
    pieces,
    quantization_config,
    unreadable,
)
from ktplan.convert.gpu_plan import GpuOptions, GpuPlan, plan_gpu
from ktplan.errors import BadInput, BadUsage, DoesNotFit
from ktplan.experts import ExpertId, ExpertSet
from ktplan.model import ExpertWeights, WeightSource
from ktplan.model.safetensors import widen
from ktplan.model.source import PROJECTIONS
from ktplan.profile import Corpus
from ktplan.progress import SILENT, Progress, Task
from ktplan.quant.gptq import Rounded, SecondMoments
from ktplan.quant.gptq_format import PackedLinear, pack_linear

__all__ = [
    "GptqCheckpoint",
    "GpuOptions",
    "GpuPlan",
    "GpuReport",
    "convert_gpu",
    "plan_gpu",
]


class LinearRow(NamedTuple):
    """What happened to one included linear layer."""

    name: str
    outcome: Outcome


class ExpertRow(NamedTuple):
    """What happened to one expert; `tokens` of calibration text were routed to it."""

    layer: int
    expert: int
    tokens: int
    gate_up: Outcome
    down: Outcome

    @property
    def id(self) -> ExpertId:
        """Which expert."""
        return ExpertId(self.layer, self.expert)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """What a conversion did. Seconds, bytes; errors are relative squared output errors (see Outcome)."""

    plan: GpuPlan
    experts: tuple[ExpertRow, ...]
    linears: tuple[LinearRow, ...]
    tokens: int  # of calibration text, 0 without
    held_out_tokens: int
    documents: int
    seconds: float

    @property
    def unreached(self) -> ExpertSet:
        """The experts that no calibration token was routed to; none are known without calibration."""
        return ExpertSet(row.id for row in self.experts if self.tokens and not row.tokens)

    @property
    def plainly_rounded(self) -> ExpertSet:
        """The experts of which a matrix was rounded to nearest though GPTQ was asked for."""
        if self.plan.options.method == "rtn":
            return ExpertSet()
        return ExpertSet(row.id for row in self.experts if "rtn" in (row.gate_up.method, row.down.method))


def convert_gpu(
    source: WeightSource,
    out: Path,
    options: GpuOptions,
    *,
    experts: ExpertSet | None = None,
    corpus: Corpus | None = None,
    progress: Progress = SILENT,
) -> GpuReport:
    """Write the GPTQ folder `out` (new or empty); if anything fails or the user stops it, nothing is left.

    Raises what `plan_gpu` raises; BadUsage for the method "gptq" without a corpus; BadInput naming the tensor where a
    weight is not finite or too large for float16 scales.
    """
    started = time.monotonic()
    plan = plan_gpu(source, out, options, experts)
    if options.method == "gptq" and corpus is None:
        raise BadUsage(
            "GPTQ needs calibration text",
            hint="give --dataset FILE... or --dataset corpus:profile, or --method rtn",
        )
    with new_directory(out) as folder, _memory_explained(plan):
        work = _Work(source, plan, FolderWriter(folder, plan.folder))
        text: Text | None = None
        if options.method == "gptq" and corpus is not None:
            text = read_text(
                source.root, corpus, chunk=min(options.chunk, source.spec.context), max_tokens=options.max_tokens,
                progress=progress,
            )  # fmt: skip
            work.calibrated(text, folder, progress)
        else:
            work.rounded(progress)
        if plan.folder.complete:
            _copy(source, work.writer, plan, progress)
        report = GpuReport(
            plan=plan,
            experts=tuple(work.experts),
            linears=tuple(work.linears),
            tokens=text.tokens if text else 0,
            held_out_tokens=_held_out_tokens(text) if text else 0,
            documents=text.documents if text else 0,
            seconds=time.monotonic() - started,
        )
        work.writer.publish(source, _settings(source, plan), _record(source, report, corpus))
    return report


@contextmanager
def _memory_explained(plan: GpuPlan) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as fault:
        raise DoesNotFit(
            f"the memory of {plan.device} ran out", hint="use --device cpu, or free memory on that device"
        ) from fault


class _Work:
    """A conversion under way: reads, rounds, writes, and remembers what it did."""

    def __init__(self, source: WeightSource, plan: GpuPlan, writer: FolderWriter) -> None:
        self._source, self._plan, self.writer = source, plan, writer
        self._device = torch.device(plan.device)
        self._scheme = plan.folder.scheme
        self._calibration = plan.options.calibration
        self.experts: list[ExpertRow] = []
        self.linears: list[LinearRow] = []

    def rounded(self, progress: Progress) -> None:
        """Every layer to nearest: no text, no forward pass."""
        folder = self._plan.folder
        with progress.task("rounding", len(folder.experts), "experts") as task, torch.no_grad():
            for layer in sorted({*folder.experts.layers, *folder.linears}):
                self.writer.layer(layer, self._rounded_layer(layer, task))

    def _rounded_layer(self, layer: int, task: Task) -> Iterator[tuple[Linear, PackedLinear]]:
        for linear in self._plan.folder.linears.get(layer, ()):
            weight = _dense_weight(self._source, linear).to(self._device)
            yield self._linear_done(
                linear, choose(weight, None, None, self._scheme, self._calibration.effort)
            )
        for expert in self._plan.folder.experts.layer(layer):
            matrices = stacked(self._read(layer, expert), self._device)
            choices = [
                choose(matrix, None, None, self._scheme, self._calibration.effort) for matrix in matrices
            ]
            yield from self._finished(layer, expert, RoundedExpert(0, *choices))
            task.advance()

    def calibrated(self, text: Text, folder: Path, progress: Progress) -> None:
        """Layer after layer, each calibrated on what the quantized ones before it give."""
        plan, spec = self._plan, self._source.spec
        run = LayerByLayer(
            self._source.root,
            self._source,
            text,
            dtype=network.as_dtype(plan.buffers.dtype),
            folder=folder if plan.buffers.on_disk else None,
            device=self._device,
        )
        activation = _activation(spec.activation)
        last = max({*plan.folder.experts.layers, *plan.folder.linears})
        with progress.task("quantizing", len(plan.folder.experts), "experts") as task, torch.no_grad():
            for layer in range(last + 1):
                task.note(f"layer {layer + 1}/{spec.layers}")
                with run.loaded(layer):
                    self.writer.layer(
                        layer, self._calibrated_layer(run, layer, activation, layer < last, task)
                    )
                    if layer < last:
                        run.advance(layer)

    def _calibrated_layer(
        self, run: LayerByLayer, layer: int, activation: Activation, needed: bool, task: Task
    ) -> Iterator[tuple[Linear, PackedLinear]]:
        """Quantize a layer, first its linears in the order they run, then its experts.

        `needed`: another layer follows, so what the experts give must be computed.
        """
        yield from self._calibrated_linears(run, layer)
        if layer not in self._source.spec.moe_layers:
            return
        experts = LayerExperts(
            run, run.route(layer), activation, self._scheme, self._calibration, self._device
        )
        run.outputs.clear()
        chosen = set(self._plan.folder.experts.layer(layer))
        for expert in range(self._source.spec.experts):
            if expert in chosen:
                result = experts.round(expert, self._read(layer, expert))
                yield from self._finished(layer, expert, result)
                if needed:
                    experts.give(expert, result.gate_up.rounded.weight(), result.down.rounded.weight())
                task.advance()
            elif needed and experts.tokens(expert):
                experts.give_unrounded(expert, self._read(layer, expert))

    def _calibrated_linears(self, run: LayerByLayer, layer: int) -> Iterator[tuple[Linear, PackedLinear]]:
        """A layer's included linears; the file has them in the order of the plan, they are made in running order."""
        own = {linear.name: linear for linear in self._plan.folder.linears.get(layer, ())}
        made: dict[str, tuple[Linear, PackedLinear]] = {}
        for stage in run.stages(layer, list(own)) if own else []:
            fit = SecondMoments(own[stage[0]].inputs, self._device)
            held = SecondMoments(own[stage[0]].inputs, self._device)

            def see(
                inputs: Tensor, held_out: Tensor, fit: SecondMoments = fit, held: SecondMoments = held
            ) -> None:
                fit.add(inputs[~held_out])
                held.add(inputs[held_out])

            run.observe(layer, stage[0], see)
            judge = held.mean() if held.tokens else None
            for name in stage:
                module = run.module(name)
                assert isinstance(module, nn.Linear)
                choice = choose(module.weight, fit.mean(), judge, self._scheme, self._calibration.effort)
                module.weight.copy_(choice.rounded.weight())
                made[name] = self._linear_done(own[name], choice)
        for name in own:
            yield made[name]

    def _linear_done(self, linear: Linear, choice: Choice) -> tuple[Linear, PackedLinear]:
        self.linears.append(LinearRow(linear.name, choice.outcome))
        return linear, _packed(choice.rounded)

    def _finished(
        self, layer: int, expert: int, result: RoundedExpert
    ) -> Iterator[tuple[Linear, PackedLinear]]:
        linears = expert_linears(self._source, layer, expert)
        gate_up, inner = result.gate_up.rounded, self._source.spec.moe_intermediate
        yield linears["gate"], _packed(Rounded(gate_up.codes[:inner], gate_up.scales[:inner], gate_up.scheme))
        yield linears["up"], _packed(Rounded(gate_up.codes[inner:], gate_up.scales[inner:], gate_up.scheme))
        yield linears["down"], _packed(result.down.rounded)
        outcomes = result.gate_up.outcome, result.down.outcome
        self.experts.append(ExpertRow(layer, expert, result.tokens, *outcomes))

    def _read(self, layer: int, expert: int) -> ExpertWeights:
        names = self._source.expert_names(layer, expert)
        try:
            weights = self._source.expert(layer, expert)
        except OSError as fault:
            raise unreadable(self._source.file_of(names["down"]), fault) from fault
        for projection, matrix in zip(PROJECTIONS, weights, strict=True):
            _refuse_unusable(
                self._source, names[projection], f"layer {layer}, expert {expert}, {projection}", matrix
            )
        return weights


def _packed(rounded: Rounded) -> PackedLinear:
    scales = rounded.scales
    # A group of zeros has all codes at the zero; its scale may be anything, and 1 troubles no reader.
    stored = torch.where(scales == 0, 1.0, scales).half()
    return pack_linear(rounded.codes.cpu().numpy(), stored.cpu().numpy(), rounded.scheme)


def _refuse_unusable(source: WeightSource, name: str, where: str, matrix: np.ndarray[Any, Any]) -> None:
    bad = ~np.isfinite(matrix)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise BadInput(
            f"{source.file_of(name)}: {name} ({where}) holds {int(bad.sum())} values that are NaN or infinite, the "
            f"first is {matrix[row, column]} at row {row}, column {column}",
            hint="the checkpoint is damaged or badly merged; download or merge it again",
        )
    largest = float(np.abs(matrix).max(initial=0))
    if largest > 65504 * 7:
        raise BadInput(
            f"{source.file_of(name)}: {name} ({where}) holds {largest:g}, the format's float16 scales end at 65504 x 7",
            hint="this model cannot be stored in GPTQ form",
        )


def _dense_weight(source: WeightSource, linear: Linear) -> Tensor:
    name = f"{linear.name}.weight"
    info = source.info(name)
    if info.dtype not in ("BF16", "F16", "F32"):
        raise BadInput(
            f"{info.file}: {name} is stored as {info.dtype}", hint="give the bfloat16 version of the model"
        )
    weight = widen(b"".join(pieces(source, name)), info.dtype).reshape(info.shape)
    _refuse_unusable(source, name, "included by name", weight)
    return network.tensor_of(weight)


def _activation(name: str) -> Activation:
    if name not in ACT2FN:
        raise BadInput(f"config.json says hidden_act '{name}', which is not known", hint="check config.json")
    found: Activation = ACT2FN[name]
    return found


def _copy(source: WeightSource, writer: FolderWriter, plan: GpuPlan, progress: Progress) -> None:
    total = sum(entry.bytes for shard in plan.folder.shards if shard.layer is None for entry in shard.entries)
    with progress.task("copying the rest", total, "B") as task:
        for copied in writer.copy_dense(source):
            task.advance(copied)


# What the folder says of itself.


def _settings(source: WeightSource, plan: GpuPlan) -> dict[str, Any]:
    calibration = plan.options.calibration
    details = {
        "static_activation_order": True,
        "signed_scales": calibration.effort.signed_scales and plan.folder.scheme.bits == 4,
        "polish": calibration.effort.polish,
    }
    return quantization_config(
        source, plan.folder, method=plan.options.method, damp=calibration.effort.damp, details=details
    )


def _record(source: WeightSource, report: GpuReport, corpus: Corpus | None) -> dict[str, Any]:
    plan, spec = report.plan, source.spec
    calibration = plan.options.calibration
    return {
        "model": spec.name,
        "family": spec.family,
        "fingerprint": spec.fingerprint,
        "complete": plan.folder.complete,
        "bits": plan.folder.scheme.bits,
        "group_size": plan.folder.scheme.group_size,
        "method": plan.options.method,
        "experts": plan.folder.experts.to_ranges(),
        "linears": [row.name for row in report.linears],
        "calibration": None
        if corpus is None or not report.tokens
        else {
            "files": [file._asdict() for file in corpus.files],
            "documents": report.documents,
            "tokens": report.tokens,
            "held_out_tokens": report.held_out_tokens,
            "chunk": plan.options.chunk,
            **asdict(calibration),
        },
        "results": [expert_result(row) for row in report.experts],
    }


def expert_result(row: ExpertRow) -> dict[str, Any]:
    """One expert's line of a report."""
    return {**row._asdict(), "gate_up": outcome_result(row.gate_up), "down": outcome_result(row.down)}


def outcome_result(outcome: Outcome) -> dict[str, Any]:
    """What was chosen for one matrix, in plain values; four digits tell all there is to tell."""
    return {
        "method": outcome.method,
        "gptq_error": None if outcome.gptq_error is None else float(f"{outcome.gptq_error:.4g}"),
        "rtn_error": float(f"{outcome.rtn_error:.4g}"),
    }


def _held_out_tokens(text: Text) -> int:
    return sum(len(ids) for ids, held in zip(text.sequences, text.held_out, strict=True) if held)
