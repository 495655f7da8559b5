"""All strategies and both dynamic rules over shares of the experts: hit rates and predicted speeds on left-out documents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from ktplan.placement.choose import Chooser, better, judge
from ktplan.placement.decide import FOLDS, with_weights
from ktplan.placement.predict import Setting, rates, rest_of
from ktplan.placement.replay import Mask, Routing
from ktplan.placement.strategies import DEFAULT_SEED
from ktplan.placement.update import chances_of, fit_kappa, kt_update, place_by, scores, sequences
from ktplan.placement.update import State as UpdateState
from ktplan.profile.profile import ActivationProfile

RATIOS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STATIC: Final = ("random", "uniform", "front-loading", "frequency", "optimal")
DYNAMIC: Final = "dynamic"  # KTransformers' rule
SHRUNK: Final = "shrunk"  # ours: prompt counts shrunk toward the profile
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
    routing = Routing(profile, batch=setting.batch, seed=seed)
    several = len(set(profile.dataset_of)) > 1
    names = (*STATIC, "robust") if several else STATIC
    rows: list[Row] = []
    for ratio in ratios:
        slots = int(profile.counts.shape[1] * profile.experts * ratio)
        rows += [_static(routing, name, ratio, slots, setting, seed) for name in names]
        rows += _dynamic(routing, ratio, slots, setting, prompt)
    note = None
    if not any(row.strategy == DYNAMIC for row in rows):
        note = f"no dynamic rules: they are replayed from a trace (profile --trace) of documents beyond {prompt} tokens"
    return Table(tuple(rows), note)


def _static(routing: Routing, name: str, ratio: float, slots: int, setting: Setting, seed: int) -> Row:
    chooser = with_weights(Chooser(strategy=name, slots=slots, routing=routing, costs=setting.costs, seed=seed))
    judged = judge(chooser, FOLDS)
    if name == "optimal":
        plain = judge(
            Chooser(strategy="frequency", slots=slots, routing=routing, costs=setting.costs, seed=seed), FOLDS
        )
        judged = judged if better(judged, plain) else plain
    hits = judged.hits if judged.held_hits is None else judged.held_hits
    speed = rates(rest_of(setting) + judged.seconds, judged.weights, setting.batch)
    return Row(name, ratio, slots, float(hits.sum() / routing.slots.sum()), *speed)


def _dynamic(routing: Routing, ratio: float, slots: int, setting: Setting, prompt: int) -> list[Row]:
    """Both rules on documents left out: update once from a prompt, serve the rest."""
    profile, trace = routing.profile, routing.profile.trace
    if trace is None or setting.batch > 1 or profile.documents < 2:
        return []
    folds = min(FOLDS, profile.documents)
    dealt = profile.folds(folds)
    outcome: dict[str, list[tuple[float, float, int]]] = {DYNAMIC: [], SHRUNK: []}
    for fold in range(folds):
        rest = dealt != fold
        counts = np.asarray(profile.counts[rest].sum(axis=0))
        chances = chances_of(counts, profile.top_k)
        start = place_by(counts.astype(np.float64), slots)
        inner = np.flatnonzero(rest)
        kappa = fit_kappa(trace.of(inner.tolist()), profile.counts[inner], profile.top_k, slots, prompt)
        for cut in sequences(trace, profile.experts, prompt, np.flatnonzero(~rest).tolist()):
            state = UpdateState(hits=cut.prompt.astype(np.float64), tokens=float(prompt), gpu=start)
            for name, mask in (
                (DYNAMIC, kt_update(start, cut.prompt)),
                (SHRUNK, place_by(scores(state, chances, kappa), slots)),
            ):
                outcome[name].append((_seconds(cut.rest, mask, setting), *_served(cut.rest, mask)))
    if not outcome[DYNAMIC]:
        return []
    rows = []
    for name, found in outcome.items():
        seconds, hits, slots_seen = (np.array(column, dtype=np.float64) for column in zip(*found, strict=True))
        speed = rates(rest_of(setting) + seconds, slots_seen, setting.batch)
        rows.append(Row(name, ratio, slots, float(hits.sum() / slots_seen.sum()), *speed))
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
