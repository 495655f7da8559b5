"""Updates as a pure function: shrinkage, swaps that pay, KTransformers' rule beside them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan.placement.update import (
    KAPPAS,
    Policy,
    begin,
    chances_of,
    fit_kappa,
    kt_update,
    observe,
    place_by,
    replay,
    scores,
    update,
)
from ktplan.profile.trace import Trace


def test_scores_lie_between_profile_and_prompt() -> None:
    chances = np.array([[0.9, 0.1]])
    state = observe(begin(np.array([[True, False]])), np.array([[0, 10]]), 10, float("inf"))
    assert np.allclose(scores(state, chances, 10.0), [[0.45, 0.55]])
    assert np.allclose(scores(state, chances, float("inf")), chances)
    assert np.allclose(scores(state, chances, 0.0), [[0.0, 1.0]])


def test_old_choices_fade_by_half() -> None:
    state = observe(begin(np.zeros((1, 2), bool)), np.array([[8, 0]]), 8, 16.0)
    state = observe(state, np.array([[0, 16]]), 16, 16.0)
    assert np.allclose(state.hits, [[4, 16]]) and state.tokens == 8 / 2 + 16


def test_a_swap_must_beat_the_copy_and_the_noise() -> None:
    gpu = np.array([[True, False, False, False]])
    chances = np.array([[0.3, 0.25, 0.25, 0.2]])
    seen = observe(begin(gpu), np.array([[0, 40, 0, 0]]), 40, 64.0)
    cheap = update(seen, chances, Policy(kappa=16, saved=15e-6, noise=1.0))
    assert [(swap.into, swap.out) for swap in cheap.swaps] == [((0, 1), (0, 0))]
    assert not update(seen, chances, Policy(kappa=16, saved=15e-6, swap=1.0)).swaps
    assert not update(seen, chances, Policy(kappa=16, saved=15e-6, noise=50.0)).swaps
    assert not update(seen, chances, Policy(kappa=float("inf"), saved=15e-6)).swaps


def test_numbers_of_a_layer_may_move_or_stay() -> None:
    gpu = np.array([[True, True], [False, False]])
    seen = observe(begin(gpu), np.array([[30, 0], [30, 30]]), 30, 1e6)
    chances = np.full((2, 2), 0.5)
    free = update(seen, chances, Policy(kappa=1, noise=0))
    assert free.state.gpu.sum(axis=1).tolist() == [1, 1]
    held = update(seen, chances, Policy(kappa=1, noise=0, across_layers=False))
    assert held.state.gpu.sum(axis=1).tolist() == [2, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12))
def test_updates_keep_the_number_of_experts(seed: int, slots: int) -> None:
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 9, (3, 4))
    gpu = place_by(draw.random((3, 4)), slots)
    after = update(observe(begin(gpu), counts, 9, 32.0), chances_of(counts, 2), Policy(kappa=8, noise=0))
    assert after.state.gpu.sum() == slots
    assert kt_update(gpu, counts).sum(axis=1).tolist() == gpu.sum(axis=1).tolist()


def test_kts_rule_takes_the_prompts_favourites_and_ignores_everything_else() -> None:
    gpu = np.array([[True, True, False, False], [True, False, False, False]])
    prompt = np.array([[0, 3, 0, 9], [0, 0, 2, 2]])
    assert kt_update(gpu, prompt).astype(int).tolist() == [[0, 1, 0, 1], [0, 0, 1, 0]]


def trace_of(documents: int, tokens: int, shared: bool, seed: int = 0) -> tuple[Trace, np.ndarray]:
    """One layer of 16 experts, top-1; documents have favourites of their own, or all the same ones."""
    draw = np.random.default_rng(seed)
    ids = []
    for document in range(documents):
        own = np.arange(16) if shared else np.roll(np.arange(16), 4 * document)
        ids.append(own[np.minimum(draw.geometric(0.35, tokens) - 1, 15)])
    flat = np.concatenate(ids)
    owners = np.repeat(np.arange(documents), tokens).astype(np.int32)
    counts = np.stack([np.bincount(row, minlength=16)[None] for row in ids])
    phases = np.zeros(len(flat), np.uint8)
    return Trace(flat[None, :, None].astype(np.uint16), owners, phases, True), counts


def test_kappa_is_small_where_documents_differ_and_large_where_they_do_not() -> None:
    own, own_counts = trace_of(12, 120, shared=False)
    same, same_counts = trace_of(12, 120, shared=True)
    for by in ("hits", "likelihood"):
        assert fit_kappa(own, own_counts, 1, 4, 24, by=by) <= 16, by
        assert fit_kappa(same, same_counts, 1, 4, 24, by=by) >= 128, by
    assert fit_kappa(own, own_counts, 1, 4, 500) == KAPPAS[-1]


def test_replay_counts_every_hit_and_every_copy() -> None:
    trace, counts = trace_of(4, 200, shared=False)
    chances = chances_of(counts.sum(axis=0), 1)
    gpu = place_by(chances, 4)
    still = replay(trace, chances, gpu, Policy(kappa=float("inf")))
    assert still.swaps == 0 and still.hits == int(gpu[0][trace.ids[0].ravel()].sum())
    moving = replay(trace, chances, gpu, Policy(kappa=8, half_life=64, noise=0.0, swap=0.0))
    calmer = replay(trace, chances, gpu, Policy(kappa=8, half_life=64, noise=1.0, swap=1.0))
    assert moving.hit_rate > still.hit_rate + 0.1
    assert calmer.swaps < moving.swaps and calmer.hit_rate > still.hit_rate
    assert moving.tokens == 800 and moving.slots == 800
