"""How many experts of each layer: exact over cost tables, with a bound.

`tables[m, n]` is layer m's time with n GPU experts. One number is chosen for each layer, all together at most
`slots` (a multiple-choice knapsack).

bound      Lagrangian over the lower hulls: no choice can be better
pruning    a number whose reduced cost exceeds the gap between bound and a feasible plan is in no better plan
solution   min-plus programme over what is left: exact
bytes      where layers differ in bytes an expert: HiGHS by way of scipy, same tables
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.errors import KtplanError, MachineLacks

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_EPS: Final = 1e-12


class Solution(NamedTuple):
    """Numbers of GPU experts, their time, and how good that can be at best."""

    numbers: Ints  # [layers]
    value: float  # seconds
    bound: float  # seconds: no plan of nested sets is below
    price: float  # seconds that one more slot would save

    @property
    def gap(self) -> float:
        """Relative distance from the bound; 0 is proven optimal."""
        return max(0.0, (self.value - self.bound) / self.value) if self.value > 0 else 0.0


class Tables:
    """Cost tables with their hulls, which are the same for any number of slots."""

    def __init__(self, values: Floats) -> None:
        self.values = values
        self.steps = _steps(values)


def solve(given: Tables | Floats, slots: int) -> Solution:
    """The best numbers for equal bytes; `bound` is the Lagrangian's, the value is exact."""
    known = given if isinstance(given, Tables) else Tables(given)
    tables, relaxed = known.values, _relaxed(known.steps, slots)
    layers = np.arange(len(tables))
    start = _greedy(tables, slots, relaxed)
    upper = float(tables[layers, start].sum())
    room = upper - relaxed.bound + _EPS * max(1.0, upper)
    reduced = tables + relaxed.price * np.arange(tables.shape[1])
    reduced = reduced - reduced.min(axis=1, keepdims=True)
    candidates = [np.flatnonzero(row <= room) for row in reduced]
    numbers = _programme(tables, slots, candidates)
    if numbers is None or tables[layers, numbers].sum() > upper:
        numbers = start
    numbers = _fill(tables, slots, numbers)
    return Solution(numbers, float(tables[layers, numbers].sum()), relaxed.bound, relaxed.price)


def solve_bytes(tables: Floats, weights: Ints, budget: int) -> Solution:
    """The best numbers when an expert of layer m takes `weights[m]` bytes and all may take `budget`.

    Needs scipy (the extra `solve`); raises MachineLacks without it.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ModuleNotFoundError:
        raise MachineLacks(
            "scipy is needed where experts differ in bytes", hint="pip install 'ktplan[solve]'"
        ) from None
    layers, sizes = tables.shape
    rows = np.repeat(np.arange(layers), sizes)
    columns = np.arange(layers * sizes)
    once = csr_array((np.ones(layers * sizes), (rows, columns)), shape=(layers, sizes * layers))
    scale = float(max(1, int(weights.max())))
    bytes_row = (weights[:, None] * np.arange(sizes)).ravel() / scale
    unit = float(np.abs(tables).max()) or 1.0
    answer: Any = milp(
        tables.ravel() / unit,
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint(bytes_row[None], -np.inf, budget / scale),
        ],
        integrality=np.ones(layers * sizes),
        bounds=Bounds(0, 1),
        options={"time_limit": 20.0, "mip_rel_gap": 1e-9},
    )
    if answer.x is None:
        raise KtplanError(f"no plan was found: {answer.message}")
    numbers = answer.x.reshape(layers, sizes).argmax(axis=1).astype(np.int64)
    value = float(tables[np.arange(layers), numbers].sum())
    bound = float(answer.mip_dual_bound if answer.mip_dual_bound is not None else answer.fun) * unit
    return Solution(numbers, value, min(bound, value), 0.0)


class Relaxed(NamedTuple):
    """The linear relaxation: `price` seconds a slot, a bound on the time, and steps of the hulls by falling gain."""

    bound: float
    price: float
    layers: Ints  # [steps]
    targets: Ints  # [steps]: the number of experts that a step leads to
    sizes: Ints  # [steps]


class Steps(NamedTuple):
    """Steps of the lower hulls by falling gain, and the time with no slot at all."""

    start: float
    layers: Ints  # [steps]
    targets: Ints  # [steps]: the number of experts that a step leads to
    sizes: Ints  # [steps]
    gains: Floats  # [steps]: seconds a slot


def _steps(tables: Floats) -> Steps:
    layers, targets, sizes, gains = [], [], [], []
    for place, row in enumerate(tables):
        corners = _hull(row)
        for before, after in zip(corners[:-1], corners[1:], strict=True):
            gain = (row[before] - row[after]) / (after - before)
            if gain <= 0:
                break
            layers.append(place)
            targets.append(after)
            sizes.append(after - before)
            gains.append(gain)
    gain = np.array(gains, dtype=np.float64)
    order = np.argsort(-gain, kind="stable")
    at, to, size = (np.array(column, dtype=np.int64)[order] for column in (layers, targets, sizes))
    return Steps(float(tables[:, 0].sum()), at, to, size, gain[order])


def relax(tables: Floats, slots: int) -> Relaxed:
    """Spend slots on the lower hulls where they gain most."""
    return _relaxed(_steps(tables), slots)


def _relaxed(steps: Steps, slots: int) -> Relaxed:
    gain, size = steps.gains, steps.sizes
    used = np.cumsum(size)
    full = int(np.searchsorted(used, slots, side="right"))
    saved = float((gain[:full] * size[:full]).sum())
    price = 0.0
    if full < len(gain):
        price = float(gain[full])
        saved += price * (slots - (int(used[full - 1]) if full else 0))
    return Relaxed(steps.start - saved, price, steps.layers, steps.targets, size)


def _hull(row: Floats) -> list[int]:
    """Corners of the lower convex hull of (n, row[n])."""
    values = row.tolist()
    corners: list[int] = []
    for n, value in enumerate(values):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (values[b] - values[a]) * (n - a) >= (value - values[a]) * (b - a):
                corners.pop()
            else:
                break
        corners.append(n)
    return corners


def _greedy(tables: Floats, slots: int, relaxed: Relaxed) -> Ints:
    """Hull steps that fit whole, then what is left where it gains most: feasible, near the bound."""
    numbers = np.zeros(len(tables), dtype=np.int64)
    blocked = np.zeros(len(tables), dtype=bool)
    left = slots
    for layer, target, size in zip(
        relaxed.layers.tolist(), relaxed.targets.tolist(), relaxed.sizes.tolist(), strict=True
    ):
        if size <= left and not blocked[layer]:
            numbers[layer] = target
            left -= size
        else:
            blocked[layer] = True
    for _ in range(len(tables)):
        best_gain, best = 0.0, None
        for layer, row in enumerate(tables):
            reach = row[numbers[layer] : numbers[layer] + left + 1]
            to = int(reach.argmin())
            if to and row[numbers[layer]] - reach[to] > best_gain:
                best_gain, best = float(row[numbers[layer]] - reach[to]), (layer, to)
        if best is None:
            break
        numbers[best[0]] += best[1]
        left -= best[1]
    return numbers


def _fill(tables: Floats, slots: int, numbers: Ints) -> Ints:
    """Slots that gain nothing on this text are filled where they cost nothing: other text may use those experts."""
    filled = numbers.copy()
    left = slots - int(numbers.sum())
    for layer, row in enumerate(tables):
        if left <= 0:
            break
        here = int(filled[layer])
        free = np.flatnonzero(row[here : here + left + 1] <= row[here] * (1 + _EPS))
        filled[layer] += int(free[-1])
        left -= int(free[-1])
    return filled


def _programme(tables: Floats, slots: int, candidates: list[Ints]) -> Ints | None:
    """Exact over the candidates; None where no combination of them fits."""
    low = np.array([row[0] for row in candidates])
    high = np.array([row[-1] for row in candidates])
    rest_low = np.concatenate([np.cumsum(low[::-1])[::-1][1:], [0]])
    first = 0
    best = np.zeros(1)
    trail: list[tuple[int, npt.NDArray[np.int16]]] = []
    for place, row in enumerate(candidates):
        new_first = first + int(low[place])
        last = min(first + len(best) - 1 + int(high[place]), slots - int(rest_low[place]))
        if last < new_first:
            return None
        size = last - new_first + 1
        value = np.full(size, np.inf)
        choice = np.zeros(size, dtype=np.int16)
        for n in row.tolist():
            begin = first + n - new_first
            count = min(len(best), size - begin)
            if count <= 0:
                continue
            offer = best[:count] + tables[place, n]
            there = value[begin : begin + count]
            better = offer < there
            there[better] = offer[better]
            choice[begin : begin + count][better] = n
        trail.append((new_first, choice))
        first, best = new_first, value
    place_at = int(np.argmin(best))
    if not np.isfinite(best[place_at]):
        return None
    total = first + place_at
    numbers = np.zeros(len(candidates), dtype=np.int64)
    for place in range(len(candidates) - 1, -1, -1):
        begin, choice = trail[place]
        numbers[place] = choice[total - begin]
        total -= int(numbers[place])
    return numbers
