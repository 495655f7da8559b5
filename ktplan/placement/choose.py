"""From a strategy's name to the experts it takes, on all documents or on some of them.

`uniform`, `frequency`, `front-loading` and `random` are rules (strategies.py). `optimal` decides numbers for each
layer by solving over cost tables, `robust` does so for the slowest of several data sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadUsage
from ktplan.experts import ExpertId, ExpertSet
from ktplan.placement.cost import Costs
from ktplan.placement.replay import Floats, Mask, Routing, orders, to_mask
from ktplan.placement.solve import Solution, Tables, solve
from ktplan.placement.strategies import DEFAULT_SEED, NEED_PROFILE, STRATEGIES, Cells, choose
from ktplan.profile.profile import Counts

ALL_STRATEGIES: Final = (*STRATEGIES, *NEED_PROFILE)
_FIXED: Final = ("uniform", "front-loading", "random")  # the same whatever was counted
_ROUNDS: Final = 12  # of raising the weight of the slowest data set


class Chosen(NamedTuple):
    """Experts as bool [layers, experts], and where a solver chose them what it says of them."""

    mask: Mask
    solution: Solution | None
    layers: tuple[int, ...]

    @property
    def gpu(self) -> ExpertSet:
        """The experts by their ids."""
        rows, experts = np.nonzero(self.mask)
        return ExpertSet(
            ExpertId(self.layers[row], expert)
            for row, expert in zip(rows.tolist(), experts.tolist(), strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """A strategy with all it needs. `costs` is needed by the solved ones; `weights` [data sets] by `robust`."""

    strategy: str
    slots: int
    routing: Routing
    costs: Costs | None = None
    seed: int = DEFAULT_SEED
    weights: Floats | None = None

    def choose(self, documents: Mask | None = None) -> Chosen:
        """The experts by the counts of some documents (all when None). Raises BadUsage as `strategies.choose` does."""
        profile = self.routing.profile
        cells = Cells(profile.layers, profile.experts)
        counts = self._counts(documents)
        if self.strategy not in NEED_PROFILE:
            gpu = choose(self.strategy, cells, self.slots, counts, self.seed, as_cells=True)
            mask = np.zeros(cells.size, dtype=bool)
            mask[gpu] = True
            return Chosen(mask.reshape(counts.shape), None, profile.layers)
        if not 0 <= self.slots <= cells.size:
            raise BadUsage(
                f"{self.slots:,} GPU experts are out of range",
                hint=f"the model has {cells.size:,}: give 0 to that",
            )
        if self.costs is None:
            raise BadUsage(
                f"strategy '{self.strategy}' needs the costs of a machine",
                hint="give --hardware or --what-if",
            )
        if self.strategy == "robust":
            return self._robust(documents)
        order, tables = self._tables(counts, documents)
        solution = solve(tables, self.slots)
        return Chosen(to_mask(order, solution.numbers), solution, profile.layers)

    def _counts(self, documents: Mask | None) -> Counts:
        held, key = self.routing.kept, b"" if documents is None else documents.tobytes()
        if key not in held:
            counts = self.routing.counts if documents is None else self.routing.counts[documents]
            held[key] = np.asarray(counts.sum(axis=0), dtype=np.int64)
        found: Counts = held[key]
        return found

    def _tables(self, counts: Counts, documents: Mask | None) -> tuple[npt.NDArray[np.int64], Tables]:
        """Order and tables of some documents: the same at every number of slots, so they are kept."""
        assert self.costs is not None
        held = self.routing.kept
        key = (self.costs, b"" if documents is None else documents.tobytes())
        if key not in held:
            order = orders(counts)
            shares = None if documents is None else documents.astype(np.float64)
            held[key] = order, Tables(self.routing.tables(self.costs, order, shares))
        found: tuple[npt.NDArray[np.int64], Tables] = held[key]
        return found

    def _robust(self, documents: Mask | None) -> Chosen:
        weights = self.robust_weights() if self.weights is None else self.weights
        return self._weighted(data_set_masks(self.routing, documents), weights)

    def robust_weights(self, start: Floats | None = None, rounds: int = _ROUNDS) -> Floats:
        """[data sets]: for the data set that is slowest. Weights rise where a step takes longer than the others'
        mean.
        """
        parts = data_set_masks(self.routing)
        if len(parts) < 2 or self.costs is None:
            raise BadUsage(
                "strategy 'robust' needs several data sets",
                hint="profile with --dataset NAME=FILE, or merge with --names",
            )
        weights = np.full(len(parts), 1 / len(parts)) if start is None else start
        best, least = weights, np.inf
        for _ in range(rounds):
            times = self.routing.times(self.costs, self._weighted(parts, weights).mask)
            spent = np.array([times.mean(part) for part in parts])
            if spent.max() < least:
                best, least = weights, float(spent.max())
            weights = weights * np.exp(4.0 * (spent / spent.mean() - 1))
            weights = weights / weights.sum()
        return best

    def _weighted(self, parts: list[Mask], weights: Floats) -> Chosen:
        assert self.costs is not None
        shares = []
        for part in parts:
            counts = self._counts(part).astype(np.float64)
            shares.append(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
        mixed = np.tensordot(weights, np.stack(shares), axes=1)
        order = np.argsort(-mixed, axis=1, kind="stable").astype(np.int64)
        each = np.zeros(self.routing.profile.documents)
        for weight, part in zip(weights, parts, strict=True):
            each[part] += weight / max(self.routing.weights[part].sum(), 1e-300)
        solution = solve(Tables(self.routing.tables(self.costs, order, each)), self.slots)
        return Chosen(to_mask(order, solution.numbers), solution, self.routing.profile.layers)


def data_set_masks(routing: Routing, documents: Mask | None = None) -> list[Mask]:
    """The documents of each data set, in the order of their names."""
    of = np.array(routing.profile.dataset_of)
    allowed = np.ones(len(of), bool) if documents is None else documents
    masks = [(of == name) & allowed for name in sorted(set(routing.profile.dataset_of))]
    # A fold that holds all documents of a data set leaves it none to plan by: all others stand in.
    return [mask if mask.any() else allowed for mask in masks]


class Judged(NamedTuple):
    """A strategy on each document: by the set made of all, and by sets that never saw the document."""

    chosen: Chosen
    hits: npt.NDArray[np.int64]  # [documents], in-sample
    held_hits: npt.NDArray[np.int64] | None  # None with a single document
    seconds: Floats  # [documents]: routed experts of a step; held out where there are several documents
    weights: Floats
    folds: int | None
    widening: float = 1.0  # of intervals, because the set follows its text; see curves.widening


def judge(chooser: Chooser, folds: int) -> Judged:
    """Choose, and judge by k-fold over documents. Without costs no time is told (zeros)."""
    routing, profile = chooser.routing, chooser.routing.profile
    whole = chooser.choose()
    mask = whole.mask
    folds = min(folds, profile.documents)
    if folds < 2:
        return Judged(whole, routing.hits(mask), None, *_times(chooser, mask), None)
    dealt = profile.folds(folds)
    held = np.zeros(profile.documents, dtype=np.int64)
    seconds, weights = np.zeros(profile.documents), np.zeros(profile.documents)
    for fold in range(folds):
        mine = dealt == fold
        apart = mask if chooser.strategy in _FIXED else chooser.choose(~mine).mask
        held[mine] = routing.hits(apart)[mine]
        spent, weight = _times(chooser, apart, mine)
        seconds[mine], weights[mine] = spent[mine], weight[mine]
    wider = 1.0 if chooser.strategy in _FIXED else routing.widening
    return Judged(whole, routing.hits(mask), held, seconds, weights, folds, wider)


def better(first: Judged, second: Judged) -> bool:
    """Whether `first` takes less time than `second` on documents that neither saw."""
    return float((first.seconds * first.weights).sum()) <= float((second.seconds * second.weights).sum())


def _times(chooser: Chooser, mask: Mask, documents: Mask | None = None) -> tuple[Floats, Floats]:
    if chooser.costs is None:
        size = chooser.routing.profile.documents
        return np.zeros(size), np.ones(size)
    times = chooser.routing.times(chooser.costs, mask, documents)
    return times.seconds, times.weights
