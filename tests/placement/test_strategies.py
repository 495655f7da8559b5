"""The four strategies against KTransformers' masks, re-stated here in torch, and against what must always hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ktplan.errors import BadUsage
from ktplan.experts import ExpertId, ExpertSet
from ktplan.placement.strategies import STRATEGIES, Cells, choose, torch_permutation


def kt_mask(
    layers: int, experts: int, first_dense: int, every: int, slots: int, strategy: str, counts: np.ndarray
) -> torch.Tensor:
    """bool [layers, experts] as sglang-kt 0.7.2 makes it, without the dense rows that it sets True at the end."""
    moe = [layer for layer in range(layers) if layer >= first_dense and layer % every == 0]
    mask = torch.zeros(layers, experts, dtype=torch.bool)
    if strategy == "uniform":
        base, remainder = slots // len(moe), slots % len(moe)
        for place, layer in enumerate(moe):
            mask[layer, : min(base + (1 if place < remainder else 0), experts)] = True
    elif strategy == "front-loading":
        left = slots
        for layer in moe:
            mask[layer, : min(left, experts)] = True
            left -= min(left, experts)
    elif strategy == "random":
        generator = torch.Generator(device="cpu")
        generator.manual_seed(42)
        for cell in torch.randperm(len(moe) * experts, generator=generator)[:slots].tolist():
            mask[moe[cell // experts], cell % experts] = True
    else:
        table = torch.zeros(layers, experts)
        table[moe] = torch.from_numpy(counts).float()
        flat = torch.zeros(layers * experts, dtype=torch.bool)
        flat[torch.topk(table.flatten(), k=slots, sorted=False).indices] = True
        mask = flat.reshape(layers, experts)
    return mask


@pytest.mark.parametrize("case", range(50))
def test_plans_are_ktransformers_masks_on_random_models(case: int) -> None:
    draw = np.random.default_rng(case)
    layers, experts = int(draw.integers(2, 20)), int(draw.integers(2, 70))
    first_dense, every = int(draw.integers(0, 2)), int(draw.integers(1, 3))
    moe = tuple(layer for layer in range(layers) if layer >= first_dense and layer % every == 0)
    if not moe:
        moe, first_dense, every = tuple(range(layers)), 0, 1
    total = len(moe) * experts
    slots = (
        [0, total, len(moe) * (experts // 2) + 1][case % 3] if case < 9 else int(draw.integers(0, total + 1))
    )
    # Distinct and positive: with ties or zeros torch.topk is free to choose, dense rows included.
    counts = draw.permutation(np.arange(1, total + 1)).reshape(len(moe), experts)
    for strategy in STRATEGIES:
        mask = kt_mask(layers, experts, first_dense, every, slots, strategy, counts)
        ours = choose(strategy, Cells(moe, experts), slots, counts, 42)
        expected = ExpertSet(ExpertId(int(layer), int(expert)) for layer, expert in mask.nonzero())
        assert ours == expected, (strategy, layers, experts, moe, slots)


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**32 - 1, 2**32 + 5, 2**63 - 1])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 64, 1664, 6144, 24576])
def test_the_permutation_is_torchs(size: int, seed: int) -> None:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    assert torch_permutation(size, seed).tolist() == torch.randperm(size, generator=generator).tolist()


def test_a_golden_permutation_needs_no_torch() -> None:
    # torch 2.13.0: torch.randperm(12, generator=torch.Generator().manual_seed(42))
    assert torch_permutation(12, 42).tolist() == [6, 8, 1, 7, 0, 2, 10, 11, 4, 3, 5, 9]


def test_ties_fall_to_the_lower_layer_then_to_the_lower_id() -> None:
    counts = np.array([[5, 7, 5, 0], [7, 5, 0, 0]])
    cells = Cells((3, 9), 4)
    wanted = [(3, 1), (9, 0), (3, 0), (3, 2), (9, 1), (3, 3), (9, 2), (9, 3)]
    for slots in range(9):
        assert choose("frequency", cells, slots, counts) == ExpertSet(
            ExpertId(*cell) for cell in wanted[:slots]
        )


def test_frequency_ranks_over_the_whole_model() -> None:
    counts = np.array([[100, 90, 80, 70], [4, 3, 2, 1]])
    assert choose("frequency", Cells((0, 1), 4), 4, counts).to_ranges() == {"0": "0-3"}


def test_uniform_gives_the_remainder_to_the_first_layers() -> None:
    assert choose("uniform", Cells((1, 2, 5), 8), 8, None).to_ranges() == {"1": "0-2", "2": "0-2", "5": "0-1"}


def test_front_loading_fills_whole_layers() -> None:
    assert choose("front-loading", Cells((1, 2, 5), 8), 19, None).to_ranges() == {
        "1": "0-7",
        "2": "0-7",
        "5": "0-2",
    }


@pytest.mark.parametrize("strategy", ["optimal", "robust"])
def test_what_is_solved_over_counts_asks_for_a_profile(strategy: str) -> None:
    with pytest.raises(BadUsage, match=strategy) as refused:
        choose(strategy, Cells((0, 1), 4), 3, None)
    assert "--profile" in str(refused.value.hint)


def test_what_cannot_be_chosen_is_refused_with_the_range() -> None:
    cells = Cells((0, 1), 8)
    with pytest.raises(BadUsage, match="17 GPU experts are out of range") as fault:
        choose("uniform", cells, 17, None)
    assert "16" in str(fault.value.hint)
    with pytest.raises(BadUsage, match="-1 GPU experts"):
        choose("uniform", cells, -1, None)
    with pytest.raises(BadUsage, match="needs counts"):
        choose("frequency", cells, 3, None)
    with pytest.raises(BadUsage, match="no strategy 'best'"):
        choose("best", cells, 3, None)
    with pytest.raises(BadUsage, match="seed -1"):
        choose("random", cells, 3, None, -1)


models = st.tuples(
    st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True),
    st.integers(1, 12),
    st.integers(0, 2**40),
)


@given(models, st.data())
def test_a_plan_has_exactly_the_budget_and_stays_in_the_model(
    model: tuple[list[int], int, int], data: st.DataObject
) -> None:
    layers, experts, seed = model
    cells = Cells(tuple(sorted(layers)), experts)
    slots = data.draw(st.integers(0, cells.size))
    counts = np.random.default_rng(seed).integers(0, 5, (len(layers), experts))
    for strategy in STRATEGIES:
        gpu = choose(strategy, cells, slots, counts, seed)
        assert len(gpu) == slots
        assert all(layer in layers and 0 <= expert < experts for layer, expert in gpu)


@given(models, st.data())
def test_no_strategy_serves_more_of_its_own_text_than_frequency(
    model: tuple[list[int], int, int], data: st.DataObject
) -> None:
    layers, experts, seed = model
    cells = Cells(tuple(sorted(layers)), experts)
    slots = data.draw(st.integers(0, cells.size))
    counts = np.random.default_rng(seed).integers(0, 50, (len(layers), experts))
    place = {layer: row for row, layer in enumerate(cells.layers)}

    def served(strategy: str) -> int:
        return sum(
            int(counts[place[layer], expert])
            for layer, expert in choose(strategy, cells, slots, counts, seed)
        )

    best = served("frequency")
    assert all(served(strategy) <= best for strategy in STRATEGIES)


@given(models)
def test_larger_plans_contain_smaller_ones(model: tuple[list[int], int, int]) -> None:
    layers, experts, seed = model
    cells = Cells(tuple(sorted(layers)), experts)
    counts = np.random.default_rng(seed).integers(0, 3, (len(layers), experts))
    for strategy in STRATEGIES:
        smaller = ExpertSet()
        for slots in range(cells.size + 1):
            larger = choose(strategy, cells, slots, counts, seed)
            assert smaller - larger == ExpertSet()
            smaller = larger
