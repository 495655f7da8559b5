"""All strategies and both dynamic rules over shares of the experts: hit rates and predicted speeds on left-out
documents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from ktplan.placement.choose import Chooser, better, judge
from ktplan.placement.decide import FOLDS
from ktplan.placement.predict import Setting, rates, rest_of
from ktplan.placement.replay import Floats, Mask, Routing
from ktplan.placement.strategies import DEFAULT_SEED
from ktplan.placement.update import (
    Ints,
    chances_of,
    first,
    fit_kappas,
    kt_update,
    place_by,
    ranking,
    scores,
    sequences,
)
from ktplan.placement.update import State as UpdateState
from ktplan.profile.profile import ActivationProfile

RATIOS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STATIC: Final = ("random", "uniform", "front-loading", "frequency", "optimal")
DYNAMIC: Final = "dynamic"  # KTransformers' rule
SHRUNK: Final = "shrunk"  # ours: prompt counts shrunk toward the profile
_TOKENS: Final = 2500  # replayed: a table of rounded figures needs no more
_FITTED: Final = 12  # documents that kappa is fitted on in each fold
PROMPT: Final = 32  # tokens from which the dynamic rules update


class Row(NamedTuple):
    """One strategy at one share. Rates are held out where the profile has several documents."""

    strategy: str
    ratio: float
    slots: int
    hit_rate: float
    decode: float
    decode_low: float
    decode_high: float


class Table(NamedTuple):
    """Rows, and why there are no dynamic ones where there are none."""

    rows: tuple[Row, ...]
    note: str | None


def compare_all(
    profile: ActivationProfile,
    setting: Setting,
    ratios: Iterable[float] = RATIOS,
    *,
    seed: int = DEFAULT_SEED,
    prompt: int = PROMPT,
) -> Table:
    """The table. Dynamic rules need a trace with documents longer than `prompt` tokens."""
    routing = Routing(profile, batch=setting.batch, seed=seed, tokens=_TOKENS)
    several = len(set(profile.dataset_of)) > 1
    names = (*STATIC, "robust") if several else STATIC
    asked = [(ratio, int(profile.counts.shape[1] * profile.experts * ratio)) for ratio in ratios]
    moving = _dynamic(routing, asked, setting, prompt)
    rows: list[Row] = []
    weights: Floats | None = None
    for ratio, slots in asked:
        for name in names:
            chooser = Chooser(strategy=name, slots=slots, routing=routing, costs=setting.costs, seed=seed)
            if name == "robust":  # weights move little from one share to the next: go on from there
                weights = chooser.robust_weights(weights, rounds=12 if weights is None else 2)
                chooser = replace(chooser, weights=weights)
            rows.append(_static(chooser, ratio, setting))
        rows += [row for row in moving if row.ratio == ratio]
    note = None
    if not moving:
        note = f"no dynamic rules: they are replayed from a trace (profile --trace) of documents beyond {prompt} tokens"
    return Table(tuple(rows), note)


def _static(chooser: Chooser, ratio: float, setting: Setting) -> Row:
    judged = judge(chooser, FOLDS)
    if chooser.strategy == "optimal":
        plain = judge(replace(chooser, strategy="frequency"), FOLDS)
        judged = judged if better(judged, plain) else plain
    hits = judged.hits if judged.held_hits is None else judged.held_hits
    speed = rates(rest_of(setting) + judged.seconds, judged.weights, setting.batch, judged.widening)
    rate = float(hits.sum() / chooser.routing.slots.sum())
    return Row(chooser.strategy, ratio, chooser.slots, rate, *speed)


def _dynamic(routing: Routing, asked: list[tuple[float, int]], setting: Setting, prompt: int) -> list[Row]:
    """Both rules on documents left out: update once from a prompt, serve the rest."""
    profile, trace = routing.profile, routing.profile.trace
    if trace is None or setting.batch > 1 or profile.documents < 2:
        return []
    folds = min(FOLDS, profile.documents)
    dealt = profile.folds(folds)
    outcome: dict[tuple[str, float], list[tuple[float, float, int]]] = {}
    for fold in range(folds):
        rest = dealt != fold
        counts = np.asarray(profile.counts[rest].sum(axis=0))
        chances = chances_of(counts, profile.top_k)
        inner = np.flatnonzero(rest)
        budgets = [slots for _, slots in asked]
        kappas = fit_kappas(
            trace.of(inner.tolist()), profile.counts[inner], profile.top_k, budgets, prompt, most=_FITTED
        )
        cuts = sequences(trace, profile.experts, prompt, np.flatnonzero(~rest).tolist())
        ranked: dict[tuple[int, float], Ints] = {}
        for (ratio, slots), kappa in zip(asked, kappas, strict=True):
            start = place_by(counts.astype(np.float64), slots)
            for number, cut in enumerate(cuts):
                state = UpdateState(hits=cut.prompt.astype(np.float64), tokens=float(prompt), gpu=start)
                if (number, kappa) not in ranked:
                    ranked[number, kappa] = ranking(scores(state, chances, kappa))
                for name, mask in (
                    (DYNAMIC, kt_update(start, cut.prompt)),
                    (SHRUNK, first(ranked[number, kappa], slots, start.shape)),
                ):
                    one = (_seconds(cut.rest, mask, setting), *_served(cut.rest, mask))
                    outcome.setdefault((name, ratio), []).append(one)
    rows = []
    for (name, ratio), found in outcome.items():
        seconds, hits, weights = (np.array(column, dtype=np.float64) for column in zip(*found, strict=True))
        speed = rates(rest_of(setting) + seconds, weights, setting.batch, routing.widening)
        rows.append(Row(name, ratio, dict(asked)[ratio], float(hits.sum() / weights.sum()), *speed))
    return rows


def _served(rest: np.ndarray[tuple[int, ...], np.dtype[np.int64]], mask: Mask) -> tuple[float, int]:
    return float((rest * mask).sum()), int(rest.sum())


def _seconds(rest: np.ndarray[tuple[int, ...], np.dtype[np.int64]], mask: Mask, setting: Setting) -> float:
    """A step's routed experts when each choice falls on the CPU with the document's share in that layer."""
    share = (rest * ~mask).sum(axis=1) / np.maximum(rest.sum(axis=1), 1)
    k = setting.top_k
    table = setting.costs.table(k)
    chances = np.zeros((len(share), k + 1))
    chances[:, 0] = 1.0
    for _ in range(k):
        chances[:, 1:] = chances[:, 1:] * (1 - share)[:, None] + chances[:, :-1] * share[:, None]
        chances[:, 0] *= 1 - share
    return float((chances @ table).sum())
