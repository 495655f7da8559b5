"""What a placement costs on recorded routing, document by document, and the cost tables that solvers work on.

With a trace every token is replayed, so the distribution of CPU experts is the real one. Without, a document's K
choices are taken as independent with its own share of CPU choices (so `P(no CPU expert) = h ** K`); documents still
differ, which is most of what matters.

Experts of a layer are taken in order of their counts; `tables[m, n]` is the mean time of layer m's routed experts when
the first n are on the GPU. A token's time changes only where n passes one of its K ranks, so a histogram of sorted
ranks gives the whole table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.experts import ExpertId, ExpertSet
from ktplan.placement.cost import Costs
from ktplan.profile.curves import widening
from ktplan.profile.profile import ActivationProfile, Counts

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

TOKENS: Final = 8_000  # of a trace that are replayed: sampling error is far below that of the documents
GROUPS: Final = 1500  # steps of a batch that are drawn
_GRID: Final = 8193  # points of the share of CPU choices


class Times(NamedTuple):
    """Per document: mean seconds of a step's routed experts in all layers, and the document's weight (tokens)."""

    seconds: Floats  # [documents]
    weights: Floats  # [documents]; 0 where the trace has no token of a document

    def mean(self, documents: Mask | None = None) -> float:
        """Over some documents, weighted."""
        weights = self.weights if documents is None else self.weights * documents
        return float((self.seconds * weights).sum() / max(weights.sum(), 1e-300))


class Routing:
    """The routing that placements are judged by. `batch` sequences, of different documents, make a step together."""

    def __init__(
        self, profile: ActivationProfile, *, batch: int = 1, seed: int = 42, tokens: int = TOKENS
    ) -> None:
        self.profile, self.batch = profile, batch
        self.kept: dict[Any, Any] = {}  # what choosers found that does not depend on the number of slots
        self.counts: Counts = profile.counts
        self.slots = profile.slots().astype(np.float64)
        self._ids: npt.NDArray[np.uint16] | None = None
        self._owners: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        if profile.trace is not None and profile.trace.tokens and _covers(profile):
            self._take(profile, seed, tokens)

    @property
    def replayed(self) -> bool:
        """True where a trace decides, False where shares do."""
        return self._ids is not None

    @cached_property
    def widening(self) -> float:
        """See `ktplan.profile.curves.widening`."""
        return widening(self.profile)

    @property
    def layers(self) -> int:
        return int(self.counts.shape[1])

    @property
    def experts(self) -> int:
        return int(self.counts.shape[2])

    def mask(self, gpu: ExpertSet) -> Mask:
        """bool [layers, experts], True on the GPU."""
        found = np.zeros((self.layers, self.experts), dtype=bool)
        for place, layer in enumerate(self.profile.layers):
            found[place, list(gpu.layer(layer))] = True
        return found

    def hits(self, mask: Mask) -> Counts:
        """int64 [documents]: slots that the GPU serves, from all counts."""
        # Whole numbers in floats: exact, and a matrix product is many times faster than a sum over a mask.
        return np.asarray((self._flat @ mask.ravel().astype(self._flat.dtype)).astype(np.int64))

    @cached_property
    def _flat(self) -> npt.NDArray[np.floating[Any]]:
        exact = np.float32 if self.slots.max(initial=0) < 2**24 else np.float64
        return self.counts.reshape(len(self.counts), -1).astype(exact)

    @cached_property
    def weights(self) -> Floats:
        """[documents]: what each weighs in times, replayed tokens or all."""
        if self._ids is None:
            return self.profile.tokens.astype(np.float64)
        return np.bincount(self._owners, minlength=self.profile.documents).astype(np.float64)

    def times(self, costs: Costs, mask: Mask, documents: Mask | None = None) -> Times:
        """Seconds of a step's routed experts, by document; of some alone where only those are asked for."""
        if self._ids is None:
            return self._times_by_share(costs, mask)
        if self.batch > 1:
            return self._times_of_groups(costs, mask)
        choices = self._ids.shape[2]
        table = costs.table(choices)
        kept = slice(None) if documents is None else np.flatnonzero(documents[self._owners])
        ids = self._ids[:, kept]
        spent = np.zeros(ids.shape[1])
        for layer, chosen in enumerate(ids):
            spent += table[choices - mask[layer].view(np.uint8)[chosen].sum(axis=1, dtype=np.int64)]
        return self._by_document(spent, self._owners[kept])

    def tables(self, costs: Costs, order: npt.NDArray[np.int64], shares: Floats | None = None) -> Floats:
        """float64 [layers, experts + 1]: mean time by number of GPU experts, taken in `order` [layers, experts].

        `shares` [documents] multiplies what each document weighs; 0 leaves it out.
        """
        weights = self.weights if shares is None else self.weights * shares
        if self._ids is None:
            return self._tables_by_share(costs, order, weights / max(weights.sum(), 1e-300))
        kept = np.flatnonzero(weights[self._owners])
        each = (
            None if shares is None or len(np.unique(shares[weights > 0])) < 2 else shares[self._owners[kept]]
        )
        return np.stack([self._table(costs, layer, order[layer], kept, each) for layer in range(self.layers)])

    def _table(
        self,
        costs: Costs,
        layer: int,
        order: npt.NDArray[np.int64],
        kept: npt.NDArray[np.int64],
        each: Floats | None,
    ) -> Floats:
        assert self._ids is not None
        rank = np.empty(self.experts, dtype=np.int16)
        rank[order] = np.arange(self.experts, dtype=np.int16)
        if self.batch > 1:
            return self._table_of_groups(costs, layer, rank)
        ranks = np.sort(rank[self._ids[layer][kept]], axis=1)
        choices = ranks.shape[1]
        steps = costs.table(choices)
        change = np.zeros(self.experts + 1)
        for place in range(
            choices
        ):  # n passes the rank of the (place + 1)-th best expert: one fewer on the CPU
            seen = np.bincount(ranks[:, place], weights=each, minlength=self.experts)
            change[1:] += seen * (steps[choices - place - 1] - steps[choices - place])
        total = float(len(ranks)) if each is None else float(each.sum())
        return steps[choices] + np.cumsum(change) / max(total, 1e-300)

    def _take(self, profile: ActivationProfile, seed: int, tokens: int) -> None:
        trace = profile.trace
        assert trace is not None
        chosen = np.arange(trace.tokens)
        if trace.tokens > tokens:
            chosen = np.sort(np.random.RandomState(seed).permutation(trace.tokens)[:tokens])
        self._ids = np.ascontiguousarray(trace.ids[:, chosen])
        self._owners = trace.owners[chosen]
        if self.batch > 1:
            draw = np.random.RandomState(seed + 1)
            self._groups = draw.randint(0, len(chosen), size=(GROUPS, self.batch))

    def _by_document(self, spent: Floats, owners: npt.NDArray[np.int32] | None = None) -> Times:
        owners = self._owners if owners is None else owners
        size = self.profile.documents
        weights = np.bincount(owners, minlength=size).astype(np.float64)
        return Times(np.bincount(owners, weights=spent, minlength=size) / np.maximum(weights, 1), weights)

    def _present(self, layer: int) -> Mask:
        """bool [groups, experts]: experts that a step of the batch needs."""
        assert self._ids is not None
        ids = self._ids[layer][self._groups].reshape(len(self._groups), -1)
        found = np.zeros((len(ids), self.experts), dtype=bool)
        np.put_along_axis(found, ids.astype(np.int64), True, axis=1)
        return found

    def _times_of_groups(self, costs: Costs, mask: Mask) -> Times:
        spent = np.zeros(len(self._groups))
        for layer in range(self.layers):
            present = self._present(layer)
            on_gpu = (present & mask[layer]).sum(axis=1)
            spent += costs.experts_time(present.sum(axis=1) - on_gpu, on_gpu)
        return self._by_document(spent, self._owners[self._groups[:, 0]])

    def _table_of_groups(self, costs: Costs, layer: int, rank: npt.NDArray[np.int16]) -> Floats:
        by_rank = self._present(layer)[:, np.argsort(rank)]
        on_gpu = np.concatenate([np.zeros((len(by_rank), 1), np.int64), np.cumsum(by_rank, axis=1)], axis=1)
        time = costs.experts_time(on_gpu[:, -1:] - on_gpu, on_gpu)
        return np.asarray(time.mean(axis=0))

    def _times_by_share(self, costs: Costs, mask: Mask) -> Times:
        weights = self.profile.tokens.astype(np.float64)
        if self.batch > 1:
            chance = self._chances()
            cold = np.where(mask, 0.0, chance)
            seconds = _many(costs, cold, np.where(mask, chance, 0.0), self.batch).sum(axis=1)
            return Times(np.asarray(seconds), weights)
        per_layer = np.maximum(self.counts.sum(axis=2), 1)
        share = 1.0 - (self.counts * mask).sum(axis=2) / per_layer
        return Times(_of_share(costs, self.profile.top_k)(share).sum(axis=1), weights)

    def _tables_by_share(self, costs: Costs, order: npt.NDArray[np.int64], shares: Floats) -> Floats:
        kept = np.flatnonzero(shares)
        weights = shares[kept]
        of_share = _of_share(costs, self.profile.top_k)
        rows = []
        for layer in range(self.layers):
            ranked = self.counts[kept, layer][:, order[layer]].astype(np.float64)
            if self.batch > 1:
                rows.append(self._table_of_chances(costs, ranked, weights))
                continue
            served = np.cumsum(ranked, axis=1)
            share = 1.0 - served / np.maximum(served[:, -1:], 1)
            share = np.concatenate([np.ones((len(kept), 1)), share], axis=1)
            rows.append(weights @ of_share(share))
        return np.stack(rows)

    def _chances(self) -> Floats:
        """[documents, layers, experts]: chance that a token of the batch chooses an expert, a document's own token
        in it.
        """
        own = self.profile.top_k * self.counts / np.maximum(self.counts.sum(axis=2, keepdims=True), 1)
        total = self.counts.sum(axis=0)
        pool = self.profile.top_k * total / np.maximum(total.sum(axis=1, keepdims=True), 1)
        return np.asarray(np.minimum((own + (self.batch - 1) * pool) / self.batch, 1.0))

    def _table_of_chances(self, costs: Costs, ranked: Floats, weights: Floats) -> Floats:
        pool = weights @ (self.profile.top_k * ranked / np.maximum(ranked.sum(axis=1, keepdims=True), 1))
        pool = np.minimum(pool, 1.0)
        upper = np.triu(np.ones((len(pool) + 1, len(pool))))  # row n: experts from n on are cold
        return _many(costs, upper * pool, (1 - upper) * pool, self.batch)


def to_mask(order: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> Mask:
    """bool [layers, experts]: the first `numbers[m]` experts of each layer in `order`."""
    mask = np.zeros(order.shape, dtype=bool)
    np.put_along_axis(mask, order, np.arange(order.shape[1])[None] < numbers[:, None], axis=1)
    return mask


def to_set(
    layers: tuple[int, ...], order: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]
) -> ExpertSet:
    """The first `numbers[m]` experts of each layer in `order`."""
    return ExpertSet(
        ExpertId(layer, int(expert))
        for place, layer in enumerate(layers)
        for expert in order[place][: int(numbers[place])]
    )


def orders(counts: Counts) -> npt.NDArray[np.int64]:
    """int64 [layers, experts]: each layer's experts by falling count, equal ones by id."""
    return np.argsort(-counts, axis=1, kind="stable").astype(np.int64)


def _of_share(costs: Costs, choices: int) -> Callable[[Floats], Floats]:
    """Mean time of a layer when each of K choices falls on the CPU with a given chance, tabulated once."""
    grid = np.linspace(0, 1, _GRID)
    chances = np.zeros((_GRID, choices + 1))
    chances[:, 0] = 1.0
    for _ in range(choices):
        chances[:, 1:] = chances[:, 1:] * (1 - grid)[:, None] + chances[:, :-1] * grid[:, None]
        chances[:, 0] *= 1 - grid
    mean = chances @ costs.table(choices)
    # The nearest point: np.interp takes ten times as long, and the grid is finer than any share is known.
    return lambda share: mean[np.rint(share * (_GRID - 1)).astype(np.intp)]


def _many(costs: Costs, cold: Floats, hot: Floats, batch: int) -> Floats:
    """Mean time of a layer for chances [..., experts] of one token: distinct experts of `batch` independent tokens."""
    distinct = (1 - (1 - cold) ** batch).sum(axis=-1)
    on_gpu = (1 - (1 - hot) ** batch).sum(axis=-1)
    with np.errstate(divide="ignore"):
        none = np.exp(batch * np.log1p(-np.minimum(cold, 1.0)).sum(axis=-1))
    some = np.maximum(1 - none, 1e-12)
    busy = costs.experts_time(distinct / some, on_gpu)
    return np.asarray(none * costs.gpu * on_gpu + (1 - none) * busy)


def _covers(profile: ActivationProfile) -> bool:
    """A trace decides only where it has something of nearly every document."""
    trace: Any = profile.trace
    return len(np.unique(trace.owners)) >= 0.9 * profile.documents
