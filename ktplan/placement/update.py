"""Changing the GPU's experts while serving: a pure function from what was seen to what to swap.

State of a layer: decayed hits x and decayed tokens n. An expert's score is its chance as a Dirichlet posterior sees it,
`(x_e + kappa * p_e) / (n + kappa)`: the profile's p counts as kappa tokens. kappa is the one under which left-out
documents are likeliest (`fit_kappa`), for a prompt length; infinity keeps the profile. An outsider replaces an insider
when what it will save until it is forgotten exceeds the cost of the copy and the noise of the two scores.

`kt_update` is KTransformers' own rule for comparison: the last prompt's counts alone, each layer's number fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.profile.profile import Counts
from ktplan.profile.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

KAPPAS: Final = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is remembered: `hits` [layers, experts] and `tokens`, both decayed; `gpu` is where experts are."""

    hits: Floats
    tokens: float
    gpu: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When to swap. Times in seconds."""

    kappa: float  # tokens that the profile is worth
    half_life: float = 64.0  # tokens
    saved: float = 1.0  # seconds that one hit saves
    swap: float = 0.0  # seconds of a copy that nothing hides
    noise: float = 1.0  # standard errors that a gain must exceed
    swaps: int | None = None  # at most so many, each update
    across_layers: bool = True  # numbers of a layer may change


class Swap(NamedTuple):
    """One expert in, one out, by position in the layers' order; not always of one layer."""

    into: tuple[int, int]
    out: tuple[int, int]
    gain: float  # seconds until the scores are forgotten


class Update(NamedTuple):
    """The new state and what has to be copied for it."""

    state: State
    swaps: tuple[Swap, ...]


def begin(gpu: Mask) -> State:
    """Nothing seen yet."""
    return State(hits=np.zeros(gpu.shape), tokens=0.0, gpu=gpu.copy())


def observe(state: State, counts: npt.NDArray[np.int64], tokens: int, half_life: float) -> State:
    """Take the choices of `tokens` more tokens; earlier ones fade by half every `half_life`."""
    kept = 2.0 ** (-tokens / half_life) if half_life != float("inf") else 1.0
    return State(hits=kept * state.hits + counts, tokens=kept * state.tokens + tokens, gpu=state.gpu)


def scores(state: State, chances: Floats, kappa: float) -> Floats:
    """Posterior chance that a token chooses an expert; `chances` [layers, experts] are the profile's, summing to k."""
    if kappa == float("inf") or state.tokens + kappa <= 0:
        return chances
    return (state.hits + kappa * chances) / (state.tokens + kappa)


def update(state: State, chances: Floats, policy: Policy) -> Update:
    """Swap while the best outsider beats the worst insider by more than the copy and the noise."""
    score = scores(state, chances, policy.kappa)
    horizon = min(policy.half_life, 1e9)
    error = np.sqrt(np.maximum(score * (1 - np.minimum(score, 1)), 0) / max(state.tokens + policy.kappa, 1.0))
    gpu = state.gpu.copy()
    swaps: list[Swap] = []
    groups = [np.arange(gpu.size)] if policy.across_layers else list(np.arange(gpu.size).reshape(gpu.shape))
    for group in groups:
        inside = group[gpu.ravel()[group]]
        outside = group[~gpu.ravel()[group]]
        flat, noise = score.ravel(), error.ravel()
        worst = inside[np.argsort(flat[inside], kind="stable")]
        best = outside[np.argsort(-flat[outside], kind="stable")]
        for out, into in zip(worst.tolist(), best.tolist(), strict=False):
            if policy.swaps is not None and len(swaps) >= policy.swaps:
                break
            gap = float(flat[into] - flat[out])
            limit = policy.swap + policy.noise * policy.saved * horizon * float(
                np.hypot(noise[into], noise[out])
            )
            if gap <= 0 or gap * policy.saved * horizon <= limit:
                break
            gpu.ravel()[into], gpu.ravel()[out] = True, False
            width = gpu.shape[1]
            swaps.append(
                Swap(divmod(into, width), divmod(out, width), gap * policy.saved * horizon - policy.swap)
            )
    return Update(State(hits=state.hits, tokens=state.tokens, gpu=gpu), tuple(swaps))


def place_by(score: Floats, slots: int) -> Mask:
    """The top `slots` cells; equal scores by layer, then id."""
    return first(ranking(score), slots, score.shape)


def ranking(score: Floats) -> Ints:
    """Cells by falling score; equal ones by layer, then id."""
    return np.argsort(-score.ravel(), kind="stable").astype(np.int64)


def first(ranked: Ints, slots: int, shape: tuple[int, ...]) -> Mask:
    """The first `slots` cells of a ranking as a mask."""
    gpu = np.zeros(ranked.size, dtype=bool)
    gpu[ranked[:slots]] = True
    return gpu.reshape(shape)


def kt_update(gpu: Mask, prompt: npt.NDArray[np.int64]) -> Mask:
    """KTransformers: each layer's number stays, its experts are the prompt's most frequent ones; unused ones by id."""
    new = np.zeros_like(gpu)
    ranks = np.argsort(-prompt, axis=1, kind="stable")
    np.put_along_axis(new, ranks, np.arange(gpu.shape[1]) < gpu.sum(axis=1, keepdims=True), axis=1)
    return new


def chances_of(counts: Counts, top_k: int) -> Floats:
    """[layers, experts] from counts: chance that a token chooses an expert; even where a layer was never seen."""
    totals = counts.sum(axis=1, keepdims=True)
    even = np.full(counts.shape, top_k / counts.shape[1])
    return np.where(totals > 0, top_k * counts / np.maximum(totals, 1), even)


class Cut(NamedTuple):
    """A document cut in two: what its prompt chose, and what the rest of it did."""

    prompt: npt.NDArray[np.int64]  # [layers, experts]
    rest: npt.NDArray[np.int64]


def sequences(trace: Trace, experts: int, prompt: int, documents: Sequence[int] | None = None) -> list[Cut]:
    """Documents with more than `prompt` tokens, cut there."""
    layers = trace.ids.shape[0]
    order = np.argsort(trace.owners, kind="stable")
    owners = trace.owners[order]
    wanted = None if documents is None else set(map(int, documents))
    found = []
    cells = trace.ids.astype(np.int64) + np.arange(layers)[:, None, None] * experts
    for piece in np.split(np.arange(len(order)), np.flatnonzero(np.diff(owners)) + 1):
        if len(piece) <= prompt or (wanted is not None and int(owners[piece[0]]) not in wanted):
            continue
        own = cells[:, order[piece]]
        head, tail = own[:, :prompt].ravel(), own[:, prompt:].ravel()
        size = layers * experts
        found.append(
            Cut(
                np.bincount(head, minlength=size).reshape(layers, experts),
                np.bincount(tail, minlength=size).reshape(layers, experts),
            )
        )
    return found


def fit_kappa(
    trace: Trace, counts: Counts, top_k: int, slots: int, prompt: int, *, by: str = "likelihood"
) -> float:
    """`fit_kappas` for one budget."""
    return fit_kappas(trace, counts, top_k, (slots,), prompt, by=by)[0]


def fit_kappas(
    trace: Trace,
    counts: Counts,
    top_k: int,
    slots: Sequence[int],
    prompt: int,
    *,
    folds: int = 3,
    most: int | None = None,
    by: str = "likelihood",
) -> list[float]:
    """For each budget the kappa of KAPPAS that is best on left-out documents after an update from `prompt` tokens.

    `by` is the "likelihood" of left-out choices (one kappa for all budgets) or "hits" (what each budget serves).
    `counts` [documents, layers, experts] are those of the trace's documents; each is judged by chances of the other
    folds, at most `most` of them. Infinity (keep the profile) where no document is long enough.
    """
    documents = len(counts)
    value = np.zeros((len(KAPPAS), len(slots)))
    limit = None if most is None else -(-most // folds)
    for fold in range(min(folds, documents)):
        mine = list(range(fold, documents, folds))
        others = np.ones(documents, bool)
        others[mine] = False
        if not others.any():
            continue
        chances = chances_of(np.asarray(counts[others].sum(axis=0)), top_k)
        for cut in sequences(trace, counts.shape[2], prompt, mine)[:limit]:
            for row, kappa in enumerate(KAPPAS):
                if by == "likelihood":
                    value[row] += log_likelihood(cut, chances, prompt, kappa) * cut.rest.sum()
                else:
                    value[row] += served_curve(cut, chances, slots, prompt, kappa)
    if not value.any():
        return [float("inf")] * len(slots)
    # Equal ones: the larger kappa, which moves less.
    return [KAPPAS[len(KAPPAS) - 1 - int(np.argmax(column[::-1]))] for column in value.T]


def served_curve(
    cut: Cut, chances: Floats, slots: Sequence[int], prompt: int, kappa: float
) -> npt.NDArray[np.int64]:
    """int64 [budgets]: slots of the rest served after one update from the prompt, for several budgets at once."""
    state = State(hits=cut.prompt.astype(np.float64), tokens=float(prompt), gpu=np.zeros(chances.shape, bool))
    order = ranking(scores(state, chances, kappa))
    running = np.concatenate([[0], np.cumsum(cut.rest.ravel()[order])])
    return np.asarray(running[list(slots)], dtype=np.int64)


def log_likelihood(cut: Cut, chances: Floats, prompt: int, kappa: float) -> float:
    """Of the rest's choices under the posterior after the prompt, nats a choice."""
    state = State(hits=cut.prompt.astype(np.float64), tokens=float(prompt), gpu=np.zeros(chances.shape, bool))
    score = scores(state, chances, kappa)
    share = np.maximum(score / score.sum(axis=1, keepdims=True), 1e-9)
    return float((cut.rest * np.log(share)).sum() / max(1, cut.rest.sum()))


class Stream(NamedTuple):
    """Replay of a policy over documents one after another."""

    hits: int
    slots: int
    swaps: int
    tokens: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.slots)


def replay(trace: Trace, chances: Floats, gpu: Mask, policy: Policy, *, every: int = 1) -> Stream:
    """Serve the trace's tokens in order, update after every `every` tokens; counts every copy."""
    state = begin(gpu)
    hits = slots = swaps = 0
    layers, experts = gpu.shape
    base = np.arange(layers)[:, None] * experts
    for start in range(0, trace.tokens, every):
        ids = trace.ids[:, start : start + every].astype(np.int64)
        cells = (base[:, :, None] + ids).ravel()
        hits += int(state.gpu.ravel()[cells].sum())
        slots += cells.size
        seen = np.bincount(cells, minlength=gpu.size).reshape(gpu.shape)
        done = update(observe(state, seen, ids.shape[1], policy.half_life), chances, policy)
        state = done.state
        swaps += len(done.swaps)
    return Stream(hits, slots, swaps, trace.tokens)
