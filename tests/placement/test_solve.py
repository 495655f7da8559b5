"""How many experts of each layer: exact, bounded, and right where greedy is wrong."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan.placement.cost import Costs
from ktplan.placement.solve import relax, solve, solve_bytes

COSTS = Costs(hop=45, cpu=15, gpu=1.5, attention=0, head=0)
# Two layers, four experts, two chosen by each token: (experts, probability).
TOKENS = (
    (((0, 1), 0.5), ((2, 3), 0.3), ((0, 2), 0.2)),
    (((0, 1), 0.4), ((0, 2), 0.3), ((1, 3), 0.3)),
)


def time_of(gpu: frozenset[tuple[int, int]]) -> float:
    table = COSTS.table(2)
    return sum(
        chance * table[sum((layer, expert) not in gpu for expert in chosen)]
        for layer, tokens in enumerate(TOKENS)
        for chosen, chance in tokens
    )


def nested_tables() -> np.ndarray:
    rows = []
    for layer, tokens in enumerate(TOKENS):
        chance = np.zeros(4)
        for chosen, share in tokens:
            chance[list(chosen)] += share
        order = np.argsort(-chance, kind="stable")
        alone = [
            (other, expert) for other in range(2) for expert in range(4) if other != layer
        ]  # the other layer wholly on the GPU, where it costs 2 x 1.5
        rows.append(
            [time_of(frozenset([*alone, *((layer, int(e)) for e in order[:n])])) - 3.0 for n in range(5)]
        )
    return np.array(rows)


@pytest.mark.parametrize(
    ("slots", "best"), [(0, 150.0), (2, 111.0), (3, 95.1), (4, 73.2), (5, 56.1), (8, 6.0)]
)
def test_the_worked_example_is_solved_as_brute_force_does(slots: int, best: float) -> None:
    cells = list(product(range(2), range(4)))
    assert min(time_of(frozenset(chosen)) for chosen in combinations(cells, slots)) == pytest.approx(best)
    found = solve(nested_tables(), slots)
    assert found.value == pytest.approx(best)
    assert found.bound <= found.value + 1e-9 and found.numbers.sum() <= slots


def test_highs_agrees_with_the_programme() -> None:
    tables = nested_tables()
    for slots in range(9):
        assert solve_bytes(tables, np.array([1, 1]), slots).value == pytest.approx(solve(tables, slots).value)


def test_layers_of_other_bytes_are_a_knapsack() -> None:
    tables = np.array([[10.0, 0.0], [9.0, 0.0], [8.0, 0.0]])
    found = solve_bytes(tables, np.array([3, 2, 2]), 4)
    assert found.numbers.tolist() == [0, 1, 1] and found.value == pytest.approx(10.0)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 20), st.integers(0, 10**6))
def test_no_choice_is_better_and_the_bound_is_one(layers: int, experts: int, slots: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    tables = draw.random((layers, experts + 1)).round(2)  # neither monotone nor convex, with ties
    slots = min(slots, layers * experts)
    best = min(
        sum(tables[layer, n] for layer, n in enumerate(numbers))
        for numbers in product(range(experts + 1), repeat=layers)
        if sum(numbers) <= slots
    )
    found = solve(tables, slots)
    assert found.value == pytest.approx(best)
    assert found.bound <= best + 1e-9 and found.price >= 0


def test_the_price_of_a_slot_falls_and_ends_at_nothing() -> None:
    draw = np.random.default_rng(0)
    hits = np.sort(draw.random((6, 20)), axis=1)[:, ::-1].cumsum(axis=1)
    tables = np.concatenate([np.zeros((6, 1)), -hits], axis=1) + hits[:, -1:]
    prices = [relax(tables, slots).price for slots in range(0, 121, 10)]
    assert prices == sorted(prices, reverse=True) and prices[-1] == 0
