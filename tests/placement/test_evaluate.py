"""Hit rates: exact on known counts, held out by whole documents, with intervals that mean something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ktplan.errors import BadInput
from ktplan.experts import ExpertId, ExpertSet
from ktplan.placement import STRATEGIES, compare, expect, hit_rate
from ktplan.placement.evaluate import held_out
from ktplan.placement.strategies import Cells, choose
from ktplan.profile import ActivationProfile
from ktplan.profile.curves import widening

Make = Callable[..., Any]


def test_the_hit_rate_is_the_share_of_routed_slots(spec_of: Make, profile_of: Make) -> None:
    profile = profile_of(spec_of(layers=2, experts=4))
    total = profile.total()
    gpu = ExpertSet([ExpertId(0, 1), ExpertId(1, 3)])
    assert hit_rate(gpu, profile) == round((total[0, 1] + total[1, 3]) / total.sum(), 6)
    assert hit_rate(ExpertSet(), profile) == 0.0
    assert hit_rate(Cells((0, 1), 4).at(range(8)), profile) == 1.0


def test_held_out_documents_are_judged_by_a_plan_that_never_saw_them(spec_of: Make, profile_of: Make) -> None:
    profile = profile_of(spec_of(), documents=11)
    found = held_out(profile, "frequency", 9)
    hits = slots = 0
    for fold in range(5):
        rest, left_out = profile.split(fold, 5)
        gpu = choose("frequency", Cells(profile.layers, profile.experts), 9, rest.total())
        place = {layer: row for row, layer in enumerate(profile.layers)}
        hits += sum(int(left_out.total()[place[layer], expert]) for layer, expert in gpu)
        slots += int(left_out.total().sum())
    assert found is not None and found.rate == round(hits / slots, 6) and found.folds == 5
    assert found.low <= found.rate <= found.high


def test_a_plan_for_one_document_flatters_itself_and_held_out_does_not(
    spec_of: Make, profile_of: Make
) -> None:
    # Documents with nothing in common: in-sample looks fine, on another document there is nothing to gain.
    spec = spec_of(layers=1, experts=40)
    counts = np.zeros((10, 1, 40), np.int64)
    for document in range(10):
        counts[document, 0, 4 * document : 4 * document + 4] = 50
    profile = replace(
        profile_of(spec, documents=10), counts=counts, tokens=np.full(10, 100), sources=("a",) * 10
    )
    assert hit_rate(choose("frequency", Cells((0,), 40), 20, profile.total()), profile) == 0.5
    found = held_out(profile, "frequency", 20)
    assert found is not None and found.rate < 0.3


def test_one_document_has_no_held_out_rate(spec_of: Make, profile_of: Make) -> None:
    profile = profile_of(spec_of(), documents=1)
    assert held_out(profile, "frequency", 5) is None
    expectation = expect(profile, ExpertSet(), strategy="frequency")
    assert expectation.held_out is None and expectation.folds is None


def test_the_same_profile_gives_the_same_figures(spec_of: Make, profile_of: Make) -> None:
    profile = profile_of(spec_of())
    assert held_out(profile, "frequency", 9) == held_out(profile, "frequency", 9)


def test_nothing_and_everything_are_certain(spec_of: Make, profile_of: Make) -> None:
    spec = spec_of(layers=2, experts=4)
    profile = profile_of(spec)
    for strategy in STRATEGIES:
        assert held_out(profile, strategy, 0) == (0.0, 0.0, 0.0, 5)
        assert held_out(profile, strategy, 8) == (1.0, 1.0, 1.0, 5)


def test_the_band_covers_new_documents_of_the_same_kind(spec_of: Make, profile_of: Make) -> None:
    """A plan's rate on fresh documents falls into a 5 to 95 % band about as often as it should."""
    spec = spec_of(layers=2, experts=16)
    everything = profile_of(spec, documents=400, skew=0.5, seed=5)
    inside = 0
    for start in range(0, 400, 20):
        sample = everything.select(range(start, start + 20))
        band = held_out(sample, "frequency", 8)
        others = everything.select([n for n in range(400) if not start <= n < start + 20])
        rate = hit_rate(choose("frequency", Cells(spec.moe_layers, 16), 8, sample.total()), others)
        assert band is not None
        inside += band.low <= rate <= band.high
    assert inside >= 14, f"{inside} of 20"


def test_expectations_name_the_peers_and_the_bound(spec_of: Make, profile_of: Make) -> None:
    spec = spec_of()
    profile = profile_of(spec)
    cells = Cells(spec.moe_layers, spec.experts)
    gpu = choose("uniform", cells, 10, None)
    found = expect(profile, gpu, strategy="uniform")
    assert found.in_sample == found.uniform == hit_rate(gpu, profile)
    assert found.random == hit_rate(choose("random", cells, 10, None), profile)
    assert found.bound == hit_rate(choose("frequency", cells, 10, profile.total()), profile)
    assert found.bound >= max(found.uniform, found.random)
    # A plan that reads no counts is the same on every fold, so nothing is lost by leaving documents out.
    assert found.held_out == found.in_sample


def test_a_comparison_has_a_row_for_each_strategy_and_share(spec_of: Make, profile_of: Make) -> None:
    spec = spec_of(layers=3, experts=10)
    rows = compare(spec, profile_of(spec, seed=1), (0.1, 0.5), 42, profile_of(spec, seed=2))
    assert [(row.ratio, row.strategy, row.slots) for row in rows] == [
        (ratio, strategy, slots) for ratio, slots in ((0.1, 3), (0.5, 15)) for strategy in STRATEGIES
    ]
    assert all(row.test is not None and row.held_out is not None for row in rows)
    best = {ratio: max(row.in_sample for row in rows if row.ratio == ratio) for ratio in (0.1, 0.5)}
    assert all(row.in_sample == best[row.ratio] for row in rows if row.strategy == "frequency")


def test_profiles_of_another_model_cannot_be_compared(spec_of: Make, profile_of: Make) -> None:
    spec, other = spec_of(), spec_of(fingerprint="sha256:" + "00" * 32)
    foreign: ActivationProfile = profile_of(other)
    with pytest.raises(BadInput, match="another model"):
        compare(spec, foreign)
    with pytest.raises(BadInput, match="another model"):
        compare(spec, profile_of(spec), test=foreign)


def test_a_placement_that_follows_its_text_widens(spec_of: Make, profile_of: Make) -> None:
    spec = spec_of(layers=4, experts=32)
    few, many = profile_of(spec, documents=10, skew=2.0), profile_of(spec, documents=60, skew=0.1)
    assert widening(few) > 1.2 and widening(few) > widening(many) >= 1.0
    assert widening(profile_of(spec, documents=5)) == 1.0
    assert widening(few) == widening(few)
