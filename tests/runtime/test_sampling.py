"""The next token: greedy, filtered, repeatable."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ktplan.errors import BadInput, BadUsage
from ktplan.runtime.sampling import Sampler, Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])


def drawn(draws: int = 400, seen: tuple[int, ...] = (), **how: float) -> Counter[int]:
    sampler = Sampler(Sampling(seed=1, **{"temperature": 1.0, **how}))  # type: ignore[arg-type]
    return Counter(sampler(LOGITS, seen) for _ in range(draws))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert Sampler(Sampling())(LOGITS, ()) == 0
    assert Sampler(Sampling())(LOGITS.bfloat16(), ()) == 0


def test_shares_follow_the_probabilities() -> None:
    found = drawn(4000)
    expected = LOGITS.softmax(-1)
    for token in range(4):
        assert found[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)


def test_high_temperature_levels_and_low_sharpens() -> None:
    assert drawn(temperature=0.1)[0] > 390
    assert drawn(temperature=50.0)[4] > 40


def test_top_k_keeps_the_best() -> None:
    assert set(drawn(top_k=2)) == {0, 1}
    assert set(drawn(top_k=1)) == {0}


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    # Shares are 0.64, 0.24, 0.09, 0.03, 0.00.
    assert set(drawn(top_p=0.6)) == {0}
    assert set(drawn(top_p=0.7)) == {0, 1}
    assert set(drawn(top_p=0.9)) == {0, 1, 2}
    assert set(drawn(top_p=0.0)) == {0}


def test_min_p_drops_what_is_far_below_the_best() -> None:
    assert set(drawn(min_p=0.3)) == {0, 1}
    assert set(drawn(min_p=1.0)) == {0}


def test_a_penalty_moves_away_from_what_was_said() -> None:
    assert Sampler(Sampling(repetition_penalty=3.0))(LOGITS, (0,)) == 1
    assert Sampler(Sampling(repetition_penalty=3.0))(LOGITS - 5, (0,)) == 1  # negative logits go further down
    assert torch.equal(LOGITS, torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0]))


def test_the_same_seed_draws_the_same() -> None:
    def text(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=2.0, seed=seed))
        return [sampler(LOGITS, ()) for _ in range(50)]

    assert text(5) == text(5)
    assert text(5) != text(6)
    assert text(None) != text(None)


@pytest.mark.parametrize(
    "how",
    [{"temperature": -1.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"top_k": -1}, {"repetition_penalty": 0.0}],
)
def test_impossible_settings_are_refused(how: dict[str, float]) -> None:
    with pytest.raises(BadUsage, match="must lie in"):
        Sampling(**how)  # type: ignore[arg-type]


def test_no_token_is_drawn_from_what_is_no_number() -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(BadInput, match="2 of the model's 3 logits are NaN"):
            Sampler(Sampling(temperature=temperature))(torch.tensor([1.0, torch.nan, torch.nan]), ())


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(BadUsage, match=f"the seed is {seed}"):
        Sampling(seed=seed)
