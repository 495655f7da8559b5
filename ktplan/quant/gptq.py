"""GPTQ: rounding a layer's weights so that its outputs change least, given second moments of its inputs.

One layer is `W [N, K]` (outputs by inputs); its inputs enter only through `H = mean(x x^T) [K, K]`. The error that
everything here minimizes is `trace((W - Q) H (W - Q)^T)`: the mean squared change of the outputs.

    search_scales     one scale for each group of inputs: least error weighted by the diagonal of H
    round_to_nearest  the floor that everything is compared with
    quantize          columns by falling importance, each one's rounding error paid back by the columns still to come
                      (Frantar et al., "GPTQ", arXiv 2210.17323); then scales and codes polished in turn

Columns are visited by importance, but scales belong to natural groups and codes stay in natural order, so a file
needs no permutation. Works on any torch device; knows nothing of models or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktplan.errors import KtplanError
from ktplan.quant.gptq_format import GptqScheme

_SMALLEST_SCALE = 2.0**-24  # the smallest positive float16
_LARGEST_SCALE = 65504.0  # the largest one
_DAMP_DOUBLINGS = 12
_LEAST_IMPORTANCE = 1e-3  # of the mean: inputs that calibration never saw still count a little
# Scales tried, as a share of the one that just reaches the group's largest weight: first coarse, then around the best.
_COARSE = (1.04, 0.96, 0.88, 0.80, 0.72, 0.64, 0.56, 0.48)
_FINE = (-0.06, -0.04, -0.02, 0.02, 0.04, 0.06)
_REFIT_DAMP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard `quantize` tries.

    `damp`: share of the mean diagonal added to H before it is inverted; doubled until the factorization succeeds.
    `block`: columns handled before the rest of the matrix is brought up to date. `polish`: rounds of refitting scales
    by least squares and re-choosing codes one column at a time; every step of a round lowers the error.
    `signed_scales`: let a 4-bit group's scale be negative where its largest weight is positive, so that this weight
    uses the level -8, which a positive scale leaves to negative weights; about a tenth less error for free.
    """

    damp: float = 0.05
    block: int = 128
    polish: int = 2
    signed_scales: bool = True


@dataclass(frozen=True, slots=True)
class Rounded:
    """A quantized layer: codes uint8 [N, K] and scales float32 [N, K/g] that float16 holds exactly.

    A scale of 0 marks a group of zeros.
    """

    codes: Tensor
    scales: Tensor
    scheme: GptqScheme

    def weight(self) -> Tensor:
        """The float32 weight [N, K] that the codes stand for."""
        levels = self.codes.float() - self.scheme.zero
        levels *= spread(self.scales, self.scheme)
        return levels


class SecondMoments:
    """Sum of x x^T over the inputs seen so far, float32 [K, K], and their number."""

    def __init__(self, inputs: int, device: torch.device | str = "cpu") -> None:
        self.sum = torch.zeros(inputs, inputs, device=device)
        self.tokens = 0

    def add(self, inputs: Tensor) -> None:
        """Add the rows of `inputs` float [tokens, K]."""
        rows = inputs.float()
        self.sum.addmm_(rows.T, rows)
        self.tokens += rows.shape[0]

    def mean(self) -> Tensor:
        """mean(x x^T); zero when nothing was seen."""
        return self.sum / max(self.tokens, 1)


def shrink(routed: SecondMoments, layer: Tensor, weight: float) -> Tensor:
    """An expert's H from its own tokens and a layer-wide one that counts as `weight` tokens.

    (sum of the expert's n tokens + weight * layer) / (n + weight): the layer's H for an expert that saw nothing, its
    own for one that saw much. `layer` is mean(x x^T) [K, K].
    """
    total = routed.tokens + weight
    return (routed.sum + weight * layer) / total if total else routed.sum


def spread(scales: Tensor, scheme: GptqScheme) -> Tensor:
    """One scale a group [N, K/g] to one a weight [N, K]."""
    return scales.repeat_interleave(scheme.group_size, dim=1)


def search_scales(
    weight: Tensor, scheme: GptqScheme, importance: Tensor | None = None, *, signed: bool = True
) -> Tensor:
    """Scales float32 [N, K/g], exact in float16, with the least squared rounding error of each group.

    `importance` [K] weighs the inputs (the diagonal of H); None counts them alike. With `signed`, 4-bit scales take
    the sign that gives the group's largest weight the level -8. Groups of zeros get scale 0.
    """
    grouped = weight.reshape(weight.shape[0], -1, scheme.group_size)
    weights = _importance(importance, weight).reshape(1, -1, scheme.group_size)
    place = grouped.abs().argmax(dim=-1, keepdim=True)
    largest = grouped.gather(-1, place).squeeze(-1)
    signed = signed and scheme.bits == 4
    reach = -largest / scheme.zero if signed else largest.abs() / (scheme.zero - 0.5)
    scales, least = torch.zeros_like(reach), torch.full_like(reach, torch.inf)

    def attempt(candidate: Tensor) -> None:
        candidate = _as_stored(candidate)
        levels = _levels(grouped, _inverse(candidate)[..., None], scheme.zero)
        error = ((levels.mul_(candidate[..., None]).sub_(grouped)).square_() * weights).sum(dim=-1)
        better = error < least
        scales.copy_(torch.where(better, candidate, scales))
        least.copy_(torch.where(better, error, least))

    for share in _COARSE:
        attempt(reach * share)
    best = scales.clone()
    for offset in _FINE:
        attempt(best + reach * offset)
    return scales


def round_to_nearest(weight: Tensor, scales: Tensor, scheme: GptqScheme) -> Rounded:
    """Every weight to its nearest level."""
    levels = _levels(weight, _inverse(spread(scales, scheme)), scheme.zero)
    return Rounded(_codes(levels, scheme), scales, scheme)


def quantize(weight: Tensor, hessian: Tensor, scales: Tensor, scheme: GptqScheme, effort: Effort) -> Rounded:
    """Round `weight` [N, K] for inputs with second moments `hessian` [K, K], starting from `scales` [N, K/g].

    With a diagonal `hessian` and no polishing this is round_to_nearest; columns that the inputs never use keep their
    weight, rounded. Raises KtplanError when `hessian` is not finite.
    """
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(hessian[order][:, order], effort.damp)
    columns = weight[:, order].T.contiguous()
    steps = spread(scales, scheme)[:, order].T.contiguous()
    levels = torch.empty_like(columns)
    levels[order] = _error_feedback(columns, steps, factor, scheme.zero, effort.block)
    levels = levels.T.contiguous()
    for _ in range(effort.polish):
        scales = _refit_scales(weight, levels, scales, hessian, scheme)
        levels = _choose_again(weight, levels, scales, hessian, scheme, effort)
    return Rounded(_codes(levels, scheme), scales, scheme)


def output_error(weight: Tensor, approximation: Tensor, hessian: Tensor) -> float:
    """trace((W - Q) H (W - Q)^T): the mean squared change of a token's outputs."""
    rest = weight - approximation
    return float(((rest @ hessian) * rest).sum(dtype=torch.float64).clamp_min(0))


def _importance(importance: Tensor | None, weight: Tensor) -> Tensor:
    if importance is None:
        return torch.ones(weight.shape[1], device=weight.device)
    mean = importance.mean()
    return importance / mean + _LEAST_IMPORTANCE if mean > 0 else torch.ones_like(importance)


def _as_stored(scales: Tensor) -> Tensor:
    """The nearest values that float16 holds; never 0 but for 0 itself."""
    magnitude = scales.abs().clamp(_SMALLEST_SCALE, _LARGEST_SCALE).half().float()
    return magnitude * scales.sign()


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale, and 0 for scale 0: a group of zeros stays one whatever error is fed into it."""
    return torch.where(scales == 0, 0, 1 / torch.where(scales == 0, 1, scales))


def _levels(weight: Tensor, inverse: Tensor, zero: int) -> Tensor:
    return (weight * inverse).round_().clamp_(-zero, zero - 1)


def _codes(levels: Tensor, scheme: GptqScheme) -> Tensor:
    return (levels + scheme.zero).to(torch.uint8)


def inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped `hessian`.

    Inputs that calibration never saw have a zero diagonal; damping alone makes it positive, and their zero
    off-diagonal entries keep them out of everyone else's feedback.
    """
    inputs = hessian.shape[0]
    mean = float(hessian.diagonal().mean())
    eye = torch.eye(inputs, device=hessian.device)
    if mean == 0:
        return eye
    share = damp
    for _ in range(_DAMP_DOUBLINGS):
        lower, failed = torch.linalg.cholesky_ex(hessian + share * mean * eye)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                return upper
        share = max(2 * share, 1e-6)
    raise KtplanError(
        f"the second moments of {inputs} layer inputs have no inverse even with damping {share:g}",
        hint="the model's activations are not finite; check its weights",
    )


def _error_feedback(columns: Tensor, steps: Tensor, factor: Tensor, zero: int, block: int) -> Tensor:
    """The column loop, on columns as rows [K, N] in the order of `factor`. Overwrites `columns`; returns levels."""
    levels = torch.empty_like(columns)
    inverse = _inverse(steps)
    for start in range(0, len(columns), block):
        end = min(start + block, len(columns))
        inner = factor[start:end, start:end]
        pivots = inner.diagonal().tolist()
        errors = torch.empty_like(columns[start:end])
        for row in range(end - start):
            column = columns[start + row]
            level = _levels(column, inverse[start + row], zero)
            levels[start + row] = level
            errors[row] = (column - level * steps[start + row]) / pivots[row]
            columns[start + row + 1 : end].addr_(inner[row, row + 1 :], errors[row], alpha=-1)
        columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return levels


def _refit_scales(
    weight: Tensor, levels: Tensor, scales: Tensor, hessian: Tensor, scheme: GptqScheme
) -> Tensor:
    """The scales with the least output error for given levels: one small least-squares problem an output.

    With c_j the levels of group j (zero elsewhere), the scales s solve sum_j (c_i H c_j^T) s_j = c_i H w^T for all i.
    """
    outputs, inputs = weight.shape
    groups, size = inputs // scheme.group_size, scheme.group_size
    damped = _damped(hessian, _REFIT_DAMP)
    right = ((weight @ damped) * levels).reshape(outputs, groups, size).sum(dim=-1)
    left = torch.empty(outputs, groups, groups, device=weight.device)
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        left[:, :, group] = (
            ((levels[:, own] @ damped[own]) * levels).reshape(outputs, groups, size).sum(dim=-1)
        )
    # A group whose levels are all 0 says nothing about its scale: it keeps the one it has.
    silent = left.diagonal(dim1=1, dim2=2) <= 0
    left += torch.diag_embed(silent.float())
    right = torch.where(silent, scales, right)
    solved, failed = torch.linalg.solve_ex(left, right)
    usable = solved.isfinite() & (solved != 0) & (scales != 0) & (failed == 0)[:, None]
    return torch.where(usable, _as_stored(solved.nan_to_num()), scales)


def _choose_again(
    weight: Tensor, levels: Tensor, scales: Tensor, hessian: Tensor, scheme: GptqScheme, effort: Effort
) -> Tensor:
    """Give each input in turn the level that is best while all others stay as they are; once through all inputs."""
    damped = _damped(hessian, effort.damp)
    order = damped.diagonal().argsort(descending=True, stable=True)
    damped = damped[order][:, order]
    curvature = damped.diagonal().tolist()
    steps = spread(scales, scheme)[:, order].T.contiguous()
    inverse = _inverse(steps)
    chosen = levels[:, order].T.contiguous()
    rest = weight[:, order].T - chosen * steps  # [K, N]: what is missing still
    for start in range(0, len(chosen), effort.block):
        end = min(start + effort.block, len(chosen))
        gradient = damped[start:end] @ rest
        for row in range(end - start):
            if curvature[start + row] <= 0:
                continue
            wanted = rest[start + row] + chosen[start + row] * steps[start + row]
            others = gradient[row] / curvature[start + row] - rest[start + row]
            level = _levels(wanted + others, inverse[start + row], scheme.zero)
            change = (level - chosen[start + row]) * steps[start + row]
            gradient[row:].addr_(damped[start + row : end, start + row], change, alpha=-1)
            rest[start + row] -= change
            chosen[start + row] = level
    result = torch.empty_like(chosen)
    result[order] = chosen
    return result.T.contiguous()


def _damped(hessian: Tensor, damp: float) -> Tensor:
    damped = hessian.clone()
    damped.diagonal().add_(damp * float(hessian.diagonal().mean()))
    return damped
