"""How far a rate on other text may lie from the one that was found: an interval that keeps its word.

What is asked is where the rate of *another* text of as many documents will be, not where the mean of all texts is.
Three things vary: the documents that were profiled, those to come, and the placement, which follows the favourites of
the former. The first two are drawn (a bootstrap over documents, twice); the third is a factor, `curves.widening`.
Quantiles are expanded for few documents as Student's t would (Hesterberg 2015, section 5.3).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

DRAWS: Final = 1000
BAND: Final = (0.05, 0.95)
SEED: Final = 42

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def interval(
    values: Floats | Counts,
    weights: Floats | Counts,
    widening: Floats | float = 1.0,
    *,
    draws: int = DRAWS,
    seed: int = SEED,
) -> tuple[Floats, Floats]:
    """5 and 95 % bounds [n] of `sum(values) / sum(weights)` on as many other documents.

    values [documents, n], weights [documents]. Documents of weight 0 say nothing and are left out. With a single
    document both bounds are the rate itself.
    """
    kept = weights > 0
    values, weights = values[kept].astype(np.float64), weights[kept].astype(np.float64)
    rate = values.sum(axis=0) / weights.sum()
    documents = len(values)
    if documents < 2:
        return rate, rate
    draw = np.random.RandomState(seed & 0xFFFFFFFF)  # its stream is frozen: the same everywhere
    here, there = (_drawn(draw, values, weights, draws) for _ in range(2))
    away = np.asarray(widening) * (here + there - 2 * rate)
    tail = _expanded(BAND[0], documents)
    low, high = np.quantile(away, (tail, 1 - tail), axis=0)
    return np.minimum(rate + low, rate), np.maximum(rate + high, rate)


def _drawn(draw: np.random.RandomState, values: Floats, weights: Floats, draws: int) -> Floats:
    chosen = draw.randint(0, len(values), size=(draws, len(values)))
    times = np.zeros((draws, len(values)))
    np.add.at(times, (np.arange(draws)[:, None], chosen), 1.0)
    return np.asarray((times @ values) / (times @ weights)[:, None] if values.ndim > 1
                      else (times @ values) / (times @ weights))  # fmt: skip


def _expanded(tail: float, documents: int) -> float:
    """The tail of the bootstrap that leaves `tail` outside: bootstrap samples of n vary as n - 1 would."""
    normal = NormalDist()
    return normal.cdf(math.sqrt(documents / (documents - 1)) * student(tail, documents - 1))


def student(p: float, degrees: int) -> float:
    """Quantile of Student's t (Hill 1970's expansion, three terms; exact enough from 3 degrees on)."""
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(z + sum(term / degrees ** (power + 1) for power, term in enumerate(terms)))
