"""What a set of experts is worth: the share of routed slots (token x top-k) that the GPU serves.

A profile flatters the plan that was made from it. So every rate comes twice: in-sample, and held out, where each
document is judged by a plan that never saw it. Tokens of one document choose alike, therefore folds and draws are
whole documents; error bars over tokens would be several times too narrow. Intervals are for as many other documents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.experts import ExpertSet
from ktplan.model import ModelSpec
from ktplan.placement.budget import slots_of
from ktplan.placement.choose import Chooser, Judged, judge
from ktplan.placement.replay import Routing
from ktplan.placement.strategies import DEFAULT_SEED, STRATEGIES, Cells, choose
from ktplan.profile.interval import interval
from ktplan.profile.profile import ActivationProfile

FOLDS: Final = 5
_PLACES: Final = 6  # decimals of a rate in a file: far below any interval, and the same on every machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Hit rates of one plan, as fractions. Held-out values are None when there are too few documents."""

    in_sample: float
    held_out: float | None
    held_out_low: float | None  # 5 %, on as many other documents
    held_out_high: float | None  # 95 %
    uniform: float  # what `uniform` with as many slots serves of the same profile
    random: float  # what `random` does
    bound: float  # the most that any set of so many experts serves of this profile
    folds: int | None
    documents: int
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class HeldOut(NamedTuple):
    """A held-out hit rate and its 5 to 95 % interval for as many other documents."""

    rate: float
    low: float
    high: float
    folds: int


class Comparison(NamedTuple):
    """One strategy at one budget. `test` is the rate on a second profile, None where there is none."""

    strategy: str
    ratio: float
    slots: int
    in_sample: float
    held_out: float | None
    held_out_low: float | None
    held_out_high: float | None
    test: float | None


def hit_rate(gpu: ExpertSet, profile: ActivationProfile) -> float:
    """Share of the profile's routed slots that the experts in `gpu` serve.

    Also the way to judge a plan on text that it was not made from: give a profile recorded on that text.
    """
    return _rate(*_served(gpu, profile))


def held_out(
    profile: ActivationProfile, strategy: str, slots: int, *, seed: int = DEFAULT_SEED, folds: int = FOLDS
) -> HeldOut | None:
    """The hit rate on documents that the plan did not see: k-fold by document, with a bootstrap over documents.

    None when the profile has a single document.
    """
    chooser = Chooser(strategy=strategy, slots=slots, routing=Routing(profile), seed=seed)
    return held_out_of(judge(chooser, folds), profile, seed)


def held_out_of(judged: Judged, profile: ActivationProfile, seed: int) -> HeldOut | None:
    """The held-out rate of a strategy that was judged."""
    if judged.held_hits is None or judged.folds is None:
        return None
    slots = profile.slots()
    low, high = interval(judged.held_hits, slots, judged.widening, seed=seed)
    rate = _rate(judged.held_hits, slots)
    return HeldOut(
        rate, round(max(0.0, float(low)), _PLACES), round(min(1.0, float(high)), _PLACES), judged.folds
    )


def expect(
    profile: ActivationProfile,
    gpu: ExpertSet,
    *,
    strategy: str,
    seed: int = DEFAULT_SEED,
    judged: Judged | None = None,
) -> Expectation:
    """Everything a plan promises of its profile; `judged` where the strategy was already tried by folds."""
    cells = Cells(profile.layers, profile.experts)
    slots = len(gpu)
    total = profile.total()

    def rate(name: str) -> float:
        return hit_rate(choose(name, cells, slots, total, seed), profile)

    left_out = held_out_of(judged, profile, seed) if judged else held_out(profile, strategy, slots, seed=seed)
    return Expectation(
        in_sample=hit_rate(gpu, profile),
        held_out=left_out.rate if left_out else None,
        held_out_low=left_out.low if left_out else None,
        held_out_high=left_out.high if left_out else None,
        uniform=rate("uniform"),
        random=rate("random"),
        bound=rate("frequency"),
        folds=left_out.folds if left_out else None,
        documents=profile.documents,
        tokens=profile.token_count,
    )


def compare(
    spec: ModelSpec,
    profile: ActivationProfile,
    ratios: Iterable[float] = (0.1, 0.3, 0.5),
    seed: int = DEFAULT_SEED,
    test: ActivationProfile | None = None,
) -> list[Comparison]:
    """All strategies at several shares of the experts, in-sample, held out, and on a second profile when given.

    Raises BadInput when a profile belongs to another model.
    """
    cells = Cells(spec.moe_layers, spec.experts)
    total = profile.for_model(spec).total()
    other = test.for_model(spec) if test else None
    rows = []
    for ratio in ratios:
        slots = slots_of(spec, ratio)
        for strategy in STRATEGIES:
            gpu = choose(strategy, cells, slots, total, seed)
            left_out = held_out(profile, strategy, slots, seed=seed)
            rate, low, high = (left_out.rate, left_out.low, left_out.high) if left_out else (None, None, None)
            on_test = hit_rate(gpu, other) if other else None
            rows.append(Comparison(strategy, ratio, slots, hit_rate(gpu, profile), rate, low, high, on_test))
    return rows


def _served(
    gpu: ExpertSet, profile: ActivationProfile
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(slots that `gpu` serves, all slots), each int64 [documents]."""
    hits = np.zeros(profile.documents, dtype=np.int64)
    for place, layer in enumerate(profile.layers):
        chosen = list(gpu.layer(layer))
        if chosen:
            hits += profile.counts[:, place, chosen].sum(axis=1)
    return hits, _slots(profile)


def _slots(profile: ActivationProfile) -> npt.NDArray[np.int64]:
    return profile.slots()


def _rate(hits: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> float:
    return round(int(hits.sum()) / int(slots.sum()), _PLACES)
