"""One layer's experts rounded to GPTQ codes, with the tokens that the router gives them.

An expert's second moments are its own tokens' and, as if they were some more tokens, those of the whole layer: what is
known of rarely used experts then comes from text in general, and an expert without any token is no special case.
Gate and up see the layer's hidden states; down sees what the *rounded* gate and up make of them. On text that was held
out, GPTQ's result is compared with plain rounding, and the better one is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ktplan.convert.calibrate import LayerByLayer, Routing
from ktplan.model import ExpertWeights
from ktplan.network import tensor_of
from ktplan.quant.gptq import (
    Effort,
    Rounded,
    SecondMoments,
    output_error,
    quantize,
    round_to_nearest,
    search_scales,
    shrink,
)
from ktplan.quant.gptq_format import GptqScheme

Method = Literal["gptq", "rtn"]

BLOCK_ROWS = 4096  # tokens on the way through an expert at a time
_LEAST_SAMPLE = 2048  # tokens of the layer that stand for text in general at an expert's down projection

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How statistics become codes.

    `prior`: the layer's second moments count as so many tokens per input (2: as 2 K tokens for K inputs). Measured on
    the embedded model with 0 to 2,048 tokens an expert, held-out error was least between 1 and 4.
    `least_tokens`: experts that saw fewer are rounded to nearest whatever the layer's moments promise.
    """

    effort: Effort
    prior: float = 2.0
    least_tokens: int = 0


class Outcome(NamedTuple):
    """How one matrix was rounded, and both methods' relative output error (of the squared outputs) where known.

    Errors are on held-out text where there is some. Without calibration `rtn_error` is the relative weight error.
    """

    method: Method
    gptq_error: float | None
    rtn_error: float


class Choice(NamedTuple):
    """The codes chosen for one matrix, and how they came about."""

    rounded: Rounded
    outcome: Outcome


class RoundedExpert(NamedTuple):
    """One expert's codes: gate and up were chosen together (one above the other), then down."""

    tokens: int
    gate_up: Choice
    down: Choice


def stacked(weights: ExpertWeights, device: torch.device) -> tuple[Tensor, Tensor]:
    """Gate above up, which see the same inputs, as one matrix [2 I, H]; and down [H, I]."""
    gate_up = torch.cat([tensor_of(weights.gate), tensor_of(weights.up)])
    return gate_up.to(device), tensor_of(weights.down).to(device)


def choose(
    weight: Tensor,
    fit: Tensor | None,
    judge: Tensor | None,
    scheme: GptqScheme,
    effort: Effort,
    *,
    gptq: bool = True,
) -> Choice:
    """Round `weight` [N, K] in both ways and keep the one with less error under `judge`.

    `fit` [K, K] are the second moments that GPTQ and the scales are fitted to, `judge` others (None: the same ones).
    Without `fit`, or with `gptq` False, there is only rounding to nearest.
    """
    # With 8 bits next to nothing is gained by clipping weights that this text uses little, and other text would pay.
    importance = fit.diagonal() if fit is not None and scheme.bits == 4 else None
    scales = search_scales(weight, scheme, importance, signed=effort.signed_scales)
    nearest = round_to_nearest(weight, scales, scheme)
    if fit is None:
        return Choice(nearest, Outcome("rtn", None, _weight_error(weight, nearest)))
    against = fit if judge is None else judge
    whole = output_error(weight, torch.zeros_like(weight), against)

    def error(rounded: Rounded) -> float:
        return output_error(weight, rounded.weight(), against) / whole if whole else 0.0

    rtn_error = error(nearest)
    if not gptq:
        return Choice(nearest, Outcome("rtn", None, rtn_error))
    fitted = quantize(weight, fit, scales, scheme, effort)
    gptq_error = error(fitted)
    if gptq_error <= rtn_error:
        return Choice(fitted, Outcome("gptq", gptq_error, rtn_error))
    return Choice(nearest, Outcome("rtn", gptq_error, rtn_error))


def _weight_error(weight: Tensor, rounded: Rounded) -> float:
    whole = float(weight.square().sum(dtype=torch.float64))
    return float((weight - rounded.weight()).square().sum(dtype=torch.float64)) / whole if whole else 0.0


class LayerExperts:
    """The experts of the layer that `run` has just routed."""

    def __init__(
        self,
        run: LayerByLayer,
        routing: Routing,
        activation: Activation,
        scheme: GptqScheme,
        calibration: Calibration,
        device: torch.device,
    ) -> None:
        self._run, self._routing, self._activation = run, routing, activation
        self._scheme, self._calibration, self._device = scheme, calibration, device
        everyone = torch.arange(len(run.held_out))
        self._fit_rows, self._held_rows = everyone[~run.held_out], everyone[run.held_out]
        self._layer_fit = self._hidden_moments(self._fit_rows).mean()
        self._layer_held = self._hidden_moments(self._held_rows).mean() if len(self._held_rows) else None

    def round(self, expert: int, weights: ExpertWeights) -> RoundedExpert:
        """Codes for one expert."""
        gate_up, down = stacked(weights, self._device)
        rows = self._routing.rows[expert]
        held = self._run.held_out[rows]
        fit_rows, held_rows = rows[~held], rows[held]
        gptq = len(fit_rows) >= self._calibration.least_tokens

        fit = self._shrunk(self._hidden_moments(fit_rows), self._layer_fit)
        judge = self._held(self._hidden_moments(held_rows), self._layer_held)
        first = choose(gate_up, fit, judge, self._scheme, self._calibration.effort, gptq=gptq)
        del fit, judge

        rounded = first.rounded.weight()
        prior = self._inner_moments(rounded, sample(self._fit_rows, down.shape[1])).mean()
        fit = self._shrunk(self._inner_moments(rounded, fit_rows), prior)
        judge = None
        if self._layer_held is not None:
            prior = self._inner_moments(rounded, sample(self._held_rows, down.shape[1])).mean()
            judge = self._held(self._inner_moments(rounded, held_rows), prior)
        second = choose(down, fit, judge, self._scheme, self._calibration.effort, gptq=gptq)
        return RoundedExpert(len(rows), first, second)

    def give(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """Add what an expert with these weights gives its tokens to the layer's outputs."""
        rows, weights = self._routing.rows[expert], self._routing.weights[expert]
        for start in range(0, len(rows), BLOCK_ROWS):
            some = slice(start, start + BLOCK_ROWS)
            inner = self._inner(gate_up, self._run.inputs.read(rows[some], self._device))
            self._run.outputs.add(rows[some], (inner @ down.T) * weights[some, None].to(self._device))

    def give_unrounded(self, expert: int, weights: ExpertWeights) -> None:
        """The same for an expert that keeps its weights."""
        self.give(expert, *stacked(weights, self._device))

    def tokens(self, expert: int) -> int:
        """How many tokens an expert has."""
        return len(self._routing.rows[expert])

    def _shrunk(self, routed: SecondMoments, layer: Tensor) -> Tensor:
        return shrink(routed, layer, self._calibration.prior * layer.shape[0])

    def _held(self, routed: SecondMoments, layer: Tensor | None) -> Tensor | None:
        """The same mixture on held-out text, of which there is less: the layer counts less in proportion."""
        if layer is None:
            return None
        share = len(self._held_rows) / max(len(self._fit_rows), 1)
        return shrink(routed, layer, self._calibration.prior * layer.shape[0] * share)

    def _hidden_moments(self, rows: Tensor) -> SecondMoments:
        moments = SecondMoments(self._layer_width, self._device)
        for hidden in self._blocks(rows):
            moments.add(hidden)
        return moments

    def _inner_moments(self, gate_up: Tensor, rows: Tensor) -> SecondMoments:
        moments = SecondMoments(gate_up.shape[0] // 2, self._device)
        for hidden in self._blocks(rows):
            moments.add(self._inner(gate_up, hidden))
        return moments

    def _inner(self, gate_up: Tensor, hidden: Tensor) -> Tensor:
        gate, up = (hidden @ gate_up.T).chunk(2, dim=-1)
        return self._activation(gate) * up

    def _blocks(self, rows: Tensor) -> Iterator[Tensor]:
        for start in range(0, len(rows), BLOCK_ROWS):
            yield self._run.inputs.read(rows[start : start + BLOCK_ROWS], self._device)

    @property
    def _layer_width(self) -> int:
        return self._run.inputs.width


def sample(rows: Tensor, inputs: int) -> Tensor:
    """Evenly chosen rows, enough for second moments of `inputs` inputs to have full rank."""
    wanted = max(_LEAST_SAMPLE, 2 * inputs)
    if len(rows) <= wanted:
        return rows
    return rows[torch.arange(wanted) * len(rows) // wanted]
