"""Experts rounded with calibration text, layer after layer: `--rounding gptq` of convert-cpu.

As convert-gpu does it: text goes through the model one decoder layer at a time, each expert is fitted to the second
moments of its own tokens shrunk towards those of the whole layer, and what follows sees what the rounded experts give.
Down projections do more: they are fitted not to their own old outputs but to what the layer lacks, so that each one
makes up for what rounding did to its gate and up and to the experts before it. Layers that an earlier run has finished
are not rounded again: their experts are read back for what they give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ktplan.artifact import sha256_bytes
from ktplan.convert.calibrate import LayerByLayer, Routing, Text, read_text
from ktplan.convert.expert import pad_expert, refuse_not_finite
from ktplan.convert.expert_rounding import BLOCK_ROWS, Activation, Calibration, LayerExperts, sample, stacked
from ktplan.convert.job import Journal
from ktplan.convert.sink import Sink
from ktplan.errors import BadInput
from ktplan.model import ExpertWeights, ModelSpec
from ktplan.model.source import PROJECTIONS, WeightSource
from ktplan.profile import Corpus
from ktplan.progress import Progress, Task
from ktplan.quant.gptq import Effort, output_error
from ktplan.quant.gptq_format import GptqScheme
from ktplan.quant.groups import U16, QuantizedGroups, narrow
from ktplan.quant.rounding import F32, I8, QuantizedRows
from ktplan.quant.row_feedback import Grid, RoundedRows, nearest, with_feedback
from ktplan.quant.scheme import Scheme
from ktplan.quant.stored import dequantize_stored, squared_error_stored
from ktplan.store import ExpertStore, StoreManifest, StoreShape
from ktplan.store.layout import U8, layout_for, pack_stored

_TOKEN_BUFFERS = 4  # of hidden states: what enters a layer, what its experts see, give, and lack
_MATRICES = 8  # of second moments and what is made of them, at once


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationText:
    """What experts are fitted on: at most `max_tokens` of `corpus`, cut into pieces of `chunk` tokens."""

    corpus: Corpus
    max_tokens: int = 65_536
    chunk: int = 256
    settings: Calibration = field(default_factory=lambda: Calibration(effort=Effort(polish=4)))

    @property
    def digest(self) -> str:
        """Changes with anything that may change a level."""
        files = [(file.name, file.sha256) for file in self.corpus.files]
        return sha256_bytes(repr((files, self.max_tokens, self.chunk, self.settings)).encode())

    def memory(self, spec: ModelSpec) -> int:
        """Bytes that fitting takes beside the experts under way: tokens' activations, second moments, a layer."""
        tokens = 4 * _TOKEN_BUFFERS * self.max_tokens * spec.hidden
        widest = max(spec.hidden, spec.moe_intermediate)
        layer = spec.dense_bytes // max(spec.layers, 1) * 2 + 4 * 4 * spec.params_per_expert
        return tokens + 4 * _MATRICES * widest * widest + layer

    def read(self, source: WeightSource, progress: Progress) -> Text:
        """The text as tokens of the model."""
        chunk = min(self.chunk, source.spec.context)
        return read_text(source.root, self.corpus, chunk=chunk, max_tokens=self.max_tokens, progress=progress)


class Fitted(NamedTuple):
    """One matrix: how it was rounded, and its relative squared output error on held-out text."""

    rounded: RoundedRows
    error: float


Pair = tuple[Tensor, Tensor]  # gate above up, and down


def _pieces(rows: Tensor) -> list[slice]:
    return [slice(start, start + BLOCK_ROWS) for start in range(0, len(rows), BLOCK_ROWS)]


class Wanted:
    """What a matrix [N, K] should make of its inputs, as sums over tokens: the outputs need not be those it gave."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.moments = torch.zeros(inputs, inputs)  # of the inputs
        self.cross = torch.zeros(inputs, outputs)  # inputs with wanted outputs
        self.size = 0.0  # squares of the wanted outputs
        self.tokens = 0.0

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Rows of inputs [tokens, K] and the outputs [tokens, N] wanted for them."""
        self.moments.addmm_(inputs.T, inputs)
        self.cross.addmm_(inputs.T, outputs)
        self.size += float(outputs.square().sum(dtype=torch.float64))
        self.tokens += len(inputs)

    def with_prior(self, prior: Wanted, weight: float) -> Wanted:
        """Means over these tokens and `prior`'s, which count as `weight` tokens."""
        share = weight / max(prior.tokens, 1)
        whole = Wanted(*self.cross.shape)
        total = max(self.tokens + weight, 1.0)
        whole.moments = (self.moments + share * prior.moments) / total
        whole.cross = (self.cross + share * prior.cross) / total
        whole.size = (self.size + share * prior.size) / total
        whole.tokens = total
        return whole

    def best_near(self, weight: Tensor, damp: float) -> Tensor:
        """The matrix that gives the wanted outputs best by least squares, held back towards `weight` [N, K]."""
        mean = float(self.moments.diagonal().mean())
        if mean == 0:
            return weight
        damped = self.moments + damp * mean * torch.eye(len(self.moments))
        change: Tensor = torch.linalg.solve(damped, self.cross - self.moments @ weight.T)
        return weight + change.T

    def error(self, weight: Tensor) -> float:
        """Relative squared error of the outputs that `weight` gives."""
        matrix = weight.double()
        given = float(((matrix @ self.moments.double()) * matrix).sum())
        rest = self.size - 2 * float((matrix.T * self.cross).sum(dtype=torch.float64)) + given
        return max(rest, 0.0) / self.size if self.size else 0.0


class RowExperts(LayerExperts):
    """The experts of a layer, rounded row by row to a store's format, in order."""

    def __init__(
        self, run: LayerByLayer, routing: Routing, activation: Activation, parts: int, scheme: Scheme,
        calibration: Calibration,
    ) -> None:  # fmt: skip
        # The GPTQ scheme is for files of another kind and not used here.
        super().__init__(run, routing, activation, GptqScheme(8, 128), calibration, torch.device("cpu"))
        self._parts, self._rounded_to = parts, scheme
        # What the rounded experts so far give too little, [tokens, hidden].
        self._lacking = torch.zeros(len(run.held_out), run.inputs.width)

    def fit(self, expert: int, weights: ExpertWeights) -> tuple[Fitted, Fitted]:
        """gate and up (one above the other), then down for what the rounded gate and up make of the inputs."""
        gate_up, down = stacked(weights, self._device)
        rows = self._routing.rows[expert]
        held = self._run.held_out[rows]
        fit = self._shrunk(self._hidden_moments(rows[~held]), self._layer_fit)
        judge = self._held(self._hidden_moments(rows[held]), self._layer_held)
        first = self._better(gate_up, fit, judge, self._grid(gate_up, 1))
        second = self._fit_down(expert, gate_up, down, first.rounded.weight())
        self._note_lack(expert, (gate_up, down), (first.rounded.weight(), second.rounded.weight()))
        return first, second

    def _grid(self, weight: Tensor, parts: int) -> Grid:
        scheme = self._rounded_to
        if scheme.group is not None:
            return Grid.of_groups(weight.shape[1], scheme.group)
        return Grid.of_rows(scheme.top_level, parts)

    def _better(self, weight: Tensor, fit: Tensor, judge: Tensor | None, grid: Grid) -> Fitted:
        """With feedback or to nearest, whichever changes the outputs of text that was not fitted on less."""
        against = fit if judge is None else judge
        whole = output_error(weight, torch.zeros_like(weight), against)
        with _one_thread():
            found = [
                with_feedback(weight, fit, grid, self._calibration.effort),
                nearest(weight, fit.diagonal(), grid),
            ]
        errors = [
            output_error(weight, rounded.weight(), against) / whole if whole else 0.0 for rounded in found
        ]
        best = 0 if errors[0] <= errors[1] else 1
        return Fitted(found[best], errors[best])

    def _fit_down(self, expert: int, gate_up: Tensor, down: Tensor, rounded: Tensor) -> Fitted:
        """The down projection that makes the layer lack least, given the rounded gate and up."""
        rows = self._routing.rows[expert]
        held = self._run.held_out[rows]
        inputs = down.shape[1]
        prior, layer = self._calibration.prior * inputs, sample(self._fit_rows, inputs)
        fit = self._wanted(expert, (gate_up, down), rounded, ~held).with_prior(
            self._wanted_of_layer(expert, (gate_up, down), rounded, layer), prior
        )
        judge = fit
        if self._layer_held is not None:
            layer = sample(self._held_rows, inputs)
            share = len(self._held_rows) / max(len(self._fit_rows), 1)
            judge = self._wanted(expert, (gate_up, down), rounded, held).with_prior(
                self._wanted_of_layer(expert, (gate_up, down), rounded, layer), prior * share
            )
        effort, grid = self._calibration.effort, self._grid(down, self._parts)
        with _one_thread():
            found = [
                with_feedback(fit.best_near(down, effort.damp), fit.moments, grid, effort),
                nearest(down, fit.moments.diagonal(), grid),
            ]
        errors = [judge.error(candidate.weight()) for candidate in found]
        best = 0 if errors[0] <= errors[1] else 1
        return Fitted(found[best], errors[best])

    def _wanted(self, expert: int, exact: Pair, rounded: Tensor, which: Tensor) -> Wanted:
        """What down should give on some of the expert's own tokens: its share of the layer, and what that lacks."""
        rows = self._routing.rows[expert][which]
        shares = self._routing.weights[expert][which]
        wanted = Wanted(rounded.shape[0] // 2, exact[1].shape[0])
        for some, hidden in zip(_pieces(rows), self._blocks(rows), strict=True):
            share = shares[some, None]
            output = self._inner(exact[0], hidden) @ exact[1].T * share + self._lacking[rows[some]]
            wanted.add(self._inner(rounded, hidden) * share, output)
        return wanted

    def _wanted_of_layer(self, expert: int, exact: Pair, rounded: Tensor, rows: Tensor) -> Wanted:
        """The same for tokens of the layer at large, with the weight that the expert's own tokens have."""
        shares = self._routing.weights[expert]
        share = float(shares.square().mean().sqrt()) if len(shares) else 1.0
        wanted = Wanted(rounded.shape[0] // 2, exact[1].shape[0])
        for hidden in self._blocks(rows):
            output = self._inner(exact[0], hidden) @ exact[1].T
            wanted.add(self._inner(rounded, hidden) * share, output * share)
        return wanted

    def _note_lack(self, expert: int, exact: Pair, rounded: Pair) -> None:
        rows, shares = self._routing.rows[expert], self._routing.weights[expert]
        for some, hidden in zip(_pieces(rows), self._blocks(rows), strict=True):
            lack = self._inner(exact[0], hidden) @ exact[1].T - self._inner(rounded[0], hidden) @ rounded[1].T
            self._lacking[rows[some]] += lack * shares[some, None]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small operations in a row: torch's threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def convert_calibrated(
    source: WeightSource,
    scheme: Scheme,
    shape: StoreShape,
    text: Text,
    settings: Calibration,
    journal: Journal,
    sink: Sink,
    task: Task,
) -> None:
    """Round and write the layers that the journal does not know yet."""
    spec = source.spec
    left = [layer for layer in spec.moe_layers if layer not in journal.finished]
    if not left:
        return
    if spec.activation not in ACT2FN:
        raise BadInput(
            f"config.json says hidden_act '{spec.activation}', which is not known", hint="check config.json"
        )
    done = _finished_store(journal, source, scheme, shape)
    run = LayerByLayer(source.root, source, text)
    bytes_each = spec.expert_bytes // spec.expert_count
    with torch.no_grad():
        for layer in range(left[-1] + 1):
            task.note(f"layer {layer + 1}/{spec.layers}")
            with run.loaded(layer):
                if layer in spec.moe_layers:
                    experts = RowExperts(
                        run, run.route(layer), ACT2FN[spec.activation], shape.parts, scheme, settings
                    )
                    run.outputs.clear()
                    for expert in range(spec.experts):
                        if layer in left:
                            weights = _round(source, experts, scheme, shape, sink, layer, expert)
                            task.advance(bytes_each)
                        else:
                            weights = done.expert(layer, expert)
                        if layer < left[-1] and experts.tokens(expert):
                            experts.give_unrounded(expert, weights)
                if layer < left[-1]:
                    run.advance(layer)


def _round(
    source: WeightSource,
    experts: RowExperts,
    scheme: Scheme,
    shape: StoreShape,
    sink: Sink,
    layer: int,
    expert: int,
) -> ExpertWeights:
    """Round and write one expert; returns the weights that it has from now on."""
    given = source.expert(layer, expert)
    refuse_not_finite(source, layer, expert, given)
    exact = ExpertWeights(*pad_expert(given, shape.intermediate))
    first, second = experts.fit(expert, exact)
    levels = first.rounded.levels.numpy(), second.rounded.levels.numpy()
    steps = first.rounded.step.numpy(), second.rounded.step.numpy()
    arrays: list[U8 | F32 | U16] = []
    sums = {projection: np.zeros(2) for projection in PROJECTIONS}
    inner, share = shape.intermediate, shape.intermediate // shape.parts
    found: dict[str, list[F32]] = {projection: [] for projection in PROJECTIONS}
    for part in range(shape.parts):
        own = slice(part * share, (part + 1) * share)
        below = slice(inner + own.start, inner + own.stop)
        scales = slice(
            part * (steps[1].shape[1] // shape.parts), (part + 1) * (steps[1].shape[1] // shape.parts)
        )
        pieces = {
            "gate": (exact.gate[own], _stored(levels[0][own], steps[0][own], scheme)),
            "up": (exact.up[own], _stored(levels[0][below], steps[0][below], scheme)),
            "down": (exact.down[:, own], _stored(levels[1][:, own], steps[1][:, scales], scheme)),
        }
        packed = [pack_stored(rows) for _, rows in pieces.values()]
        arrays += [one[0] for one in packed] + [one[1] for one in packed]
        for projection, (piece, rows) in pieces.items():
            sums[projection] += squared_error_stored(np.ascontiguousarray(piece), rows)
            found[projection].append(dequantize_stored(rows))
    errors = {name: _relative(*sums[name]) for name in PROJECTIONS}
    outputs = {"gate": first.error, "up": first.error, "down": second.error}
    sink.put(layer, expert, arrays, errors, {name: _relative(error, 1.0) for name, error in outputs.items()})
    kept = slice(0, inner - shape.padding)
    gate, up = (np.concatenate(found[name])[kept] for name in ("gate", "up"))
    return ExpertWeights(gate, up, np.ascontiguousarray(np.concatenate(found["down"], axis=1)[:, kept]))


def _stored(levels: I8, step: F32, scheme: Scheme) -> QuantizedRows | QuantizedGroups:
    """`step` [N, number of scales a row]."""
    if scheme.group is not None:
        return QuantizedGroups(np.ascontiguousarray(levels), narrow(np.ascontiguousarray(step)), scheme.group)
    scale = step[:, 0] / np.float32(16) if scheme.tile_bits == 4 else step[:, 0]
    return QuantizedRows(np.ascontiguousarray(levels), np.ascontiguousarray(scale), scheme.tile_bits)


def _relative(error: float, energy: float) -> float:
    return float(f"{(error / energy) ** 0.5:.4g}") if energy else 0.0


def _finished_store(journal: Journal, source: WeightSource, scheme: Scheme, shape: StoreShape) -> ExpertStore:
    """The layers that are there already, opened under their unfinished names."""
    job, spec = journal.job, source.spec
    finished = {layer: journal.finished[layer] for layer in job.layers if layer in journal.finished}
    manifest = StoreManifest(
        model=job.model, family=spec.family, fingerprint=job.fingerprint, scheme=job.scheme, bits=scheme.bits,
        rounding=job.rounding, layout=layout_for(scheme.bits, scheme.group).name, parts=shape.parts,
        layers=tuple(finished), experts=spec.experts, hidden=spec.hidden, intermediate=shape.intermediate,
        padding=shape.padding,
        activation=spec.activation,
        files=tuple(replace(done.file, name=f"{done.file.name}.part") for done in finished.values()),
        errors={},
    )  # fmt: skip
    return ExpertStore(Path(journal.folder), manifest)
