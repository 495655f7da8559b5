"""GPTQ for a store's formats: rows with one scale for all inputs, one for each NUMA part, or one for each group.

The levels and scales are those of ktplan.quant.rounding's and groups' formats, so the files are ordinary ones. What is
minimized is the change of outputs, trace((W - Q) H (W - Q)^T) with H the second moments of the inputs (see gptq):

    a row's scale decides how much error feedback can repair, so several scales are tried, each with feedback
    the best one's levels and scale are then polished in turn; every step lowers the error

Scales of groups are found beforehand, as columns are taken in order of importance and not of groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ktplan.quant import groups
from ktplan.quant.gptq import Effort, inverse_factor

# Shares of the step that just reaches a row's largest weight, tried without feedback to find where to begin.
_SHARES = tuple(0.92**power for power in range(40))
# Steps tried with feedback, as shares of the best one without.
_WITH_FEEDBACK = (0.8, 0.9, 1.0, 1.12)
_GROUPS_WITH_FEEDBACK = (0.93, 1.0, 1.06)  # a group has fewer weights to repair
_GROUP_REFITS = 2
_LEAST_IMPORTANCE = 1e-3  # of the mean: inputs that calibration never saw still count a little
_REFIT_DAMP = 1e-3
_SMALLEST_STEP = 2.0**-122  # the stored scale, a sixteenth of it, is a normal float32
_LARGEST_GROUP_STEP = 2.0**124  # times -8 it is a float32


@dataclass(frozen=True, slots=True)
class Grid:
    """What may be stored: levels `low`..`top`, and `parts` scales a row, each for its share of the inputs.

    `groups`: scales are bfloat16 and may be negative; `offsets`: their last two bits choose what is added to levels.
    In between "levels" are those sums, multiples of a half: what is multiplied by the step.
    """

    low: int
    top: int
    parts: int
    groups: bool = False
    offsets: bool = False

    @classmethod
    def of_rows(cls, top: int, parts: int) -> Grid:
        """Rows with levels -top..top."""
        return cls(-top, top, parts)

    @classmethod
    def of_groups(cls, inputs: int, group: int, offsets: bool = False) -> Grid:
        """Groups of a row's inputs."""
        return cls(groups.LOWEST, groups.HIGHEST, inputs // group, groups=True, offsets=offsets)

    def nearest(self, values: Tensor, offset: Tensor) -> Tensor:
        """Values in units of a step to levels with their offset, in place."""
        if not self.offsets:
            return values.round_().clamp_(self.low, self.top)
        return values.sub_(offset).round_().clamp_(self.low, self.top).add_(offset)

    def offset(self, step: Tensor) -> Tensor:
        """What is added to levels where the step is `step`."""
        return _offset(step) if self.offsets else torch.zeros_like(step)

    def rounded(self, levels: Tensor, step: Tensor) -> RoundedRows:
        """From levels [N, K] with their offsets."""
        whole = levels - self.offset(_spread(step, levels.shape[1]))
        return RoundedRows(whole.to(torch.int8), step, self.offsets)


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Levels int8 [N, K], and the step float32 [N, parts] of each part's inputs, which may choose `offsets`."""

    levels: Tensor
    step: Tensor
    offsets: bool

    def weight(self) -> Tensor:
        """The float32 [N, K] that the levels stand for."""
        step = _spread(self.step, self.levels.shape[1])
        levels = self.levels.float()
        return (levels + _offset(step) if self.offsets else levels) * step


def nearest(weight: Tensor, importance: Tensor, grid: Grid) -> RoundedRows:
    """Every weight to its nearest level; the steps have the least error weighted by `importance` [K]."""
    step = _search(weight, importance, grid)
    return grid.rounded(_levels(weight, _spread(step, weight.shape[1]), grid), step)


def with_feedback(weight: Tensor, hessian: Tensor, grid: Grid, effort: Effort) -> RoundedRows:
    """Round `weight` [N, K] for inputs with second moments `hessian` [K, K].

    Raises KtplanError when `hessian` is not finite.
    """
    rows, inputs = weight.shape
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(hessian[order][:, order], effort.damp)
    start = _search(weight, hessian.diagonal(), grid)
    # All tries go through the column loop together, as rows of their own.
    shares = _GROUPS_WITH_FEEDBACK if grid.groups else _WITH_FEEDBACK
    steps = torch.cat([_storable(start * share, grid, _code(start)) for share in shares])
    spread = _spread(steps, inputs)
    tries = weight.repeat(len(shares), 1)
    levels = torch.empty_like(tries)
    levels[:, order] = _feed(tries[:, order], spread[:, order], factor, grid, effort.block)
    tries -= levels * spread
    error = ((tries @ hessian) * tries).sum(dim=1).reshape(len(shares), rows)
    chosen = error.argmin(dim=0) * rows + torch.arange(rows, device=weight.device)
    best_levels, best_step = levels[chosen], steps[chosen]
    for _ in range(effort.polish):
        refit = partial(_refit_groups, grid) if grid.groups else _refit
        best_step = refit(weight, best_levels, best_step, hessian)
        best_levels = _choose_again(weight, best_levels, best_step, hessian, grid, effort)
    return grid.rounded(best_levels, best_step)


def _spread(step: Tensor, inputs: int) -> Tensor:
    return step.repeat_interleave(inputs // step.shape[1], dim=1)


def _inverse(step: Tensor) -> Tensor:
    return torch.where(step == 0, 0, 1 / torch.where(step == 0, 1, step))


def _levels(weight: Tensor, step: Tensor, grid: Grid) -> Tensor:
    return grid.nearest(weight * _inverse(step), grid.offset(step))


def _code(step: Tensor) -> Tensor:
    """The last two bits of steps that are bfloat16 numbers, int32."""
    return (step.view(torch.int32) >> 16) & 3


def _offset(step: Tensor) -> Tensor:
    return _code(step).float().mul_(0.5).add_(0.5)


def _storable(step: Tensor, grid: Grid, code: Tensor) -> Tensor:
    """The nearest steps that can be stored: any float32 for rows, bfloat16 for groups.

    With offsets, one whose last two bits are `code`; steps that are as good as zero are zero.
    """
    if not grid.groups:
        return step
    bounded = step.clamp(-_LARGEST_GROUP_STEP, _LARGEST_GROUP_STEP)
    if not grid.offsets:
        return torch.where(bounded.abs() < _SMALLEST_STEP, 0, bounded).bfloat16().float()
    last = code << 16
    size = ((bounded.abs().view(torch.int32) - last + (1 << 17)) & ~0x3FFFF) + last
    return torch.where(bounded.abs() < _SMALLEST_STEP, 0, size.view(torch.float32).copysign(bounded))


def _search(weight: Tensor, importance: Tensor, grid: Grid) -> Tensor:
    rows = len(weight)
    grouped = weight.reshape(rows, grid.parts, -1)
    mean = float(importance.mean())
    weights = torch.ones_like(importance) if mean == 0 else importance / mean + _LEAST_IMPORTANCE
    weights = weights.reshape(1, grid.parts, -1)
    if grid.groups:
        return _search_groups(grouped, weights, grid)
    reach = grouped.abs().amax(dim=-1) / grid.top
    reach = torch.where(reach < _SMALLEST_STEP, 0, reach)
    best, least = reach, torch.full_like(reach, torch.inf)
    for share in _SHARES if grid.top == 7 else _SHARES[:12]:
        step = torch.where(reach * share < _SMALLEST_STEP, reach, reach * share)
        rest = _levels(grouped, step[..., None], grid).mul_(step[..., None]).sub_(grouped)
        error = (rest.square_() * weights).sum(dim=-1)
        best, least = torch.where(error < least, step, best), torch.minimum(error, least)
    return best


def _search_groups(grouped: Tensor, importance: Tensor, grid: Grid) -> Tensor:
    """As groups.quantize_groups does it, with errors weighted: its tries, then least squares."""
    best = torch.zeros_like(grouped[..., 0])
    least, fitted = torch.full_like(best, torch.inf), best

    def attempt(wanted: Tensor, code: Tensor) -> None:
        nonlocal best, least, fitted
        step = _storable(wanted, grid, code)
        levels = _levels(grouped, step[..., None], grid)
        error = ((levels * step[..., None] - grouped).square_() * importance).sum(dim=-1)
        weighted = levels * importance
        square = (weighted * levels).sum(dim=-1)
        own = (weighted * grouped).sum(dim=-1) / torch.where(square > 0, square, 1)
        better = error < least
        best, least = torch.where(better, step, best), torch.minimum(error, least)
        fitted = torch.where(better, own, fitted)

    for wanted, code in _tries(grouped, grid):
        attempt(wanted, code)
    for _ in range(_GROUP_REFITS):
        attempt(fitted, _code(best))
    return best


def _tries(grouped: Tensor, grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    """Steps [N, parts] and the last bits that they should have."""
    high, low = grouped.amax(dim=-1), grouped.amin(dim=-1)
    if not grid.offsets:
        peak = torch.where(high > -low, high, low)
        for share in groups.tries(offsets=False).tolist():
            yield peak * share, _code(peak)
        return
    half, peak = (high - low) / 2, torch.maximum(high, -low)
    sign = torch.where(high > -low, 1.0, -1.0)
    for reach in groups.tries(offsets=True).tolist():
        step = torch.maximum(half / reach, peak / (reach + groups.FURTHEST)) * sign
        middle = ((high + low) * _inverse(step)).clamp(1, 2).round().int()
        for code in (middle - 1, middle, middle + 1):
            yield step, code


def _feed(weight: Tensor, step: Tensor, factor: Tensor, grid: Grid, block: int) -> Tensor:
    """The column loop on columns in the order of `factor`: levels [N, K]."""
    columns, steps = weight.T.contiguous(), step.T.contiguous()
    inverse, offsets = _inverse(steps), grid.offset(steps)
    levels = torch.empty_like(columns)
    for start in range(0, len(columns), block):
        end = min(start + block, len(columns))
        inner = factor[start:end, start:end]
        pivots = inner.diagonal().tolist()
        errors = torch.empty_like(columns[start:end])
        for row in range(end - start):
            column = columns[start + row]
            level = grid.nearest(column * inverse[start + row], offsets[start + row])
            levels[start + row] = level
            errors[row] = (column - level * steps[start + row]) / pivots[row]
            columns[start + row + 1 : end].addr_(inner[row, row + 1 :], errors[row], alpha=-1)
        columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return levels.T.contiguous()


def _damped(hessian: Tensor, damp: float) -> Tensor:
    damped = hessian.clone()
    damped.diagonal().add_(damp * float(hessian.diagonal().mean()))
    return damped


def _refit(weight: Tensor, levels: Tensor, step: Tensor, hessian: Tensor) -> Tensor:
    """The steps with the least output error for given levels: a problem of `parts` unknowns a row.

    With c_j the levels of part j (zero elsewhere): sum_j (c_i H c_j^T) s_j = c_i H w^T for all i.
    """
    rows, parts = step.shape
    damped = _damped(hessian, _REFIT_DAMP)
    size = weight.shape[1] // parts
    right = ((weight @ damped) * levels).reshape(rows, parts, size).sum(dim=-1)
    left = torch.stack(
        [
            ((levels[:, own : own + size] @ damped[own : own + size]) * levels)
            .reshape(rows, parts, size)
            .sum(dim=-1)
            for own in range(0, parts * size, size)
        ],
        dim=2,
    )
    silent = left.diagonal(dim1=1, dim2=2) <= 0
    left = left + torch.diag_embed(silent.float())
    solved, failed = torch.linalg.solve_ex(left, torch.where(silent, step, right))
    usable = solved.isfinite() & (solved > _SMALLEST_STEP) & (step != 0) & (failed == 0)[:, None]
    return torch.where(usable, solved, step)


def _refit_groups(grid: Grid, weight: Tensor, levels: Tensor, step: Tensor, hessian: Tensor) -> Tensor:
    """Give each group in turn the scale that is best while all others stay as they are, where that lowers the error."""
    damped = _damped(hessian, _REFIT_DAMP)
    size = weight.shape[1] // step.shape[1]
    rest = weight - levels * _spread(step, weight.shape[1])
    chosen = step.clone()
    for number in range(step.shape[1]):
        own = slice(number * size, (number + 1) * size)
        codes, before = levels[:, own], chosen[:, number]
        slope = ((rest @ damped[:, own]) * codes).sum(dim=1)
        curve = ((codes @ damped[own, own]) * codes).sum(dim=1)
        wanted = _storable(before + slope / torch.where(curve > 0, curve, 1), grid, _code(before))
        change = wanted - before
        better = (curve * change - 2 * slope) * change < 0
        better &= (curve > 0) & (before != 0) & (wanted.abs() > _SMALLEST_STEP) & wanted.isfinite()
        change = torch.where(better, change, 0)
        chosen[:, number] = torch.where(better, wanted, before)
        rest[:, own] -= codes * change[:, None]
    return chosen


def _choose_again(
    weight: Tensor, levels: Tensor, step: Tensor, hessian: Tensor, grid: Grid, effort: Effort
) -> Tensor:
    """Give each input in turn the level that is best while all others stay as they are; once through all inputs."""
    damped = _damped(hessian, _REFIT_DAMP)
    curvature = damped.diagonal().tolist()
    steps = _spread(step, weight.shape[1]).T.contiguous()
    inverse, offsets = _inverse(steps), grid.offset(steps)
    chosen = levels.T.contiguous()
    rest = weight.T - chosen * steps
    for start in range(0, len(chosen), effort.block):
        end = min(start + effort.block, len(chosen))
        gradient = damped[start:end] @ rest
        for row in range(end - start):
            if curvature[start + row] <= 0:
                continue
            wanted = chosen[start + row] * steps[start + row] + gradient[row] / curvature[start + row]
            level = grid.nearest(wanted * inverse[start + row], offsets[start + row])
            change = (level - chosen[start + row]) * steps[start + row]
            gradient[row:].addr_(damped[start + row : end, start + row], change, alpha=-1)
            rest[start + row] -= change
            chosen[start + row] = level
    return chosen.T.contiguous()
