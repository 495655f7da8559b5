"""What counts promise on other text: the hit-rate curve, the transfer matrix, the Lorenz curve.

All are about the best set of so many experts by counts (top-N over the whole model, equal counts in cell order), the
rule of strategy `frequency`. One sort gives the whole curve. Held-out values leave whole documents out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.profile.interval import interval
from ktplan.profile.profile import ActivationProfile, Counts

FOLDS: Final = 5
_HALVES: Final = 40  # splits that show how a placement follows its text
_SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SEED: Final = 42

Floats = npt.NDArray[np.float64]


class HitCurve(NamedTuple):
    """Hit rates by share of the experts; the held-out ones are None with a single document."""

    ratios: tuple[float, ...]
    in_sample: tuple[float, ...]
    held_out: tuple[float, ...] | None
    low: tuple[float, ...] | None  # 5 %, of as many other documents
    high: tuple[float, ...] | None  # 95 %


class Transfer(NamedTuple):
    """`rates[a, b]`: hit rate on data set b of a placement made from data set a; the diagonal is held out."""

    datasets: tuple[str, ...]
    ratio: float
    rates: Floats
    held_out: tuple[bool, ...]  # False: the data set has one document, its own rate is in-sample

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "datasets": list(self.datasets),
            "ratio": self.ratio,
            "rates": [[round(float(rate), 6) for rate in row] for row in self.rates],
            "diagonal_held_out": list(self.held_out),
        }


def order(counts: Counts) -> npt.NDArray[np.int64]:
    """Cells of [layers, experts] by falling count; equal counts by layer, then id."""
    return np.argsort(-counts.ravel(), kind="stable").astype(np.int64)


def hit_curve(profile: ActivationProfile, ratios: Sequence[float], folds: int = FOLDS) -> HitCurve:
    """The curve at some shares of the experts, with intervals for as many other documents."""
    cells = profile.counts.shape[1] * profile.experts
    at = np.array([int(cells * ratio) for ratio in ratios])
    total = profile.total()
    in_sample = _served(total[None], order(total), at)[0] / total.sum()
    found = tuple(float(rate) for rate in in_sample)
    folds = min(folds, profile.documents)
    if folds < 2:
        return HitCurve(tuple(ratios), found, None, None, None)
    hits = held_out_hits(profile, at, folds)
    slots = profile.slots()
    rates = hits.sum(axis=0) / slots.sum()
    low, high = interval(hits, slots, widening(profile))
    low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    return HitCurve(tuple(ratios), found, _floats(rates), _floats(low), _floats(high))


def held_out_hits(profile: ActivationProfile, at: npt.NDArray[np.int64], folds: int) -> Counts:
    """int64 [documents, len(at)]: slots of each document served by the top `at` cells of the other folds' counts."""
    dealt, total = profile.folds(folds), profile.total()
    hits = np.zeros((profile.documents, len(at)), dtype=np.int64)
    for fold in range(folds):
        mine = dealt == fold
        left_out = profile.counts[mine]
        hits[mine] = _served(left_out, order(total - left_out.sum(axis=0)), at)
    return hits


def widening(profile: ActivationProfile) -> float:
    """How many times farther a placement's rate on other text lies from its estimate than documents alone explain.

    A placement follows the favourites of the documents it was made from. Half of the documents are planned on and
    judged by folds, the other half is what comes; the square of the difference is compared with what drawing documents
    explains, over shares of the experts and many splits. At least 1; 1 below 8 documents, where halves say nothing.
    """
    documents = profile.documents
    if documents < 8:
        return 1.0
    flat = profile.counts.reshape(documents, -1)
    at = np.array([int(flat.shape[1] * share) for share in _SHARES])
    # Sums of whole numbers are exact, and float32 is twice as fast.
    flat = flat.astype(np.float32 if flat.sum(axis=0).max() < 2**24 else np.float64)
    draw = np.random.RandomState(_SEED)
    half = documents // 2
    squares = np.zeros(len(at))
    for _ in range(_HALVES):
        split = draw.permutation(documents)
        member = np.zeros((FOLDS + 1, documents), flat.dtype)
        member[np.arange(half) % FOLDS, split[:half]] = 1
        member[FOLDS, split[half:]] = 1
        sums = (member @ flat).astype(np.float64)
        whole = sums[:FOLDS].sum(axis=0)
        served = _running(sums, np.concatenate([whole - sums[:FOLDS], whole[None]]), at)
        judged = served[:FOLDS].sum(axis=0) / whole.sum()
        squares += (served[FOLDS] / sums[FOLDS].sum() - judged) ** 2
    hits, slots = held_out_hits(profile, at, FOLDS), profile.slots()
    off = hits - hits.sum(axis=0) / slots.sum() * slots[:, None]
    explained = off.var(axis=0, ddof=1) / slots.mean() ** 2 * (1 / half + 1 / (documents - half))
    return float(np.sqrt(max(1.0, (squares / _HALVES / np.maximum(explained, 1e-12)).mean())))


def _running(counts: Floats, rank: Floats, at: npt.NDArray[np.int64]) -> Floats:
    """[rows, len(at)]: choices that the top `at` cells by rank serve, equal ones in cell order, whatever sorts."""
    apart = np.arange(rank.shape[1]) / (2.0 * rank.shape[1]) - rank
    served = np.cumsum(np.take_along_axis(counts, np.argsort(apart, axis=1), axis=1), axis=1)
    return np.concatenate([np.zeros((len(counts), 1)), served], axis=1)[:, at]


def transfer(profile: ActivationProfile, ratio: float) -> Transfer | None:
    """How well each data set's placement serves each other one; None with a single data set."""
    names = tuple(sorted(set(profile.dataset_of)))
    if len(names) < 2:
        return None
    at = np.array([int(profile.counts.shape[1] * profile.experts * ratio)])
    of = np.array(profile.dataset_of)
    parts = [profile.select(np.flatnonzero(of == name)) for name in names]
    rates = np.zeros((len(names), len(names)))
    apart = []
    for row, own in enumerate(parts):
        best = order(own.total())
        for column, other in enumerate(parts):
            rates[row, column] = _served(other.total()[None], best, at)[0, 0] / other.slots().sum()
        folds = min(FOLDS, own.documents)
        apart.append(folds >= 2)
        if folds >= 2:
            rates[row, row] = held_out_hits(own, at, folds).sum() / own.slots().sum()
    return Transfer(names, ratio, rates, tuple(apart))


def lorenz_band(profile: ActivationProfile, points: int = 101) -> tuple[Floats, Floats, Floats, Floats]:
    """(share of a layer's experts, busiest first; least, mean and most of the choices they serve, over layers)."""
    total = np.sort(profile.total(), axis=1)[:, ::-1]
    share = np.cumsum(total, axis=1) / np.maximum(total.sum(axis=1, keepdims=True), 1)
    x = np.linspace(0, 1, points)
    grid = np.arange(profile.experts + 1) / profile.experts
    lines = np.array([np.interp(x, grid, np.concatenate([[0.0], row])) for row in share])
    return x, lines.min(axis=0), lines.mean(axis=0), lines.max(axis=0)


def _served(counts: Counts, best: npt.NDArray[np.int64], at: npt.NDArray[np.int64]) -> Counts:
    """int64 [documents, len(at)] for counts [documents, layers, experts]."""
    ranked = counts.reshape(len(counts), -1)[:, best]
    running = np.concatenate([np.zeros((len(counts), 1), np.int64), np.cumsum(ranked, axis=1)], axis=1)
    return np.asarray(running[:, at], dtype=np.int64)


def _floats(values: Floats) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
