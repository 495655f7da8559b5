"""Plans that say how fast they will be: intervals, prices, deferral, several GPUs, sglang-kt's quirks, llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ktplan.errors import BadUsage, DoesNotFit
from ktplan.placement import PlacementPlan, fit, make_plan
from ktplan.placement.budget import Needs
from ktplan.placement.choose import Chooser
from ktplan.placement.comparison import compare_all
from ktplan.placement.decide import setting_of
from ktplan.placement.known import describe, reference
from ktplan.placement.llamacpp import to_llamacpp
from ktplan.placement.memory import Anatomy, Line
from ktplan.placement.predict import deferral, rates
from ktplan.placement.replay import Routing, orders
from ktplan.placement.several import plan_several
from ktplan.placement.strategies import compat

Make = Callable[..., Any]
BIG: dict[str, Any] = {"layers": 6, "experts": 16, "top_k": 4, "hidden": 2048, "moe_intermediate": 768}


@pytest.fixture
def spec(spec_of: Make) -> Any:
    return spec_of(**BIG)


def test_a_plan_carries_its_speed_and_comes_back(spec: Any, profile_of: Make, tmp_path: Any) -> None:
    plan = make_plan(
        spec, profile_of(spec), slots=30, strategy="optimal", machine=describe("RTX 4090, Xeon 8x DDR5-4800")
    )
    found = plan.prediction
    assert found is not None and found.decode_low <= found.decode <= found.decode_high
    assert found.per_gib >= 0 and found.per_16k_context >= 0 and found.prefill > found.decode
    assert found.gap is not None and found.gap < 0.05 and "%" in found.bottleneck
    plan.save(tmp_path / "plan.json")
    assert PlacementPlan.load(tmp_path / "plan.json") == plan


def test_more_experts_are_never_slower(spec: Any, profile_of: Make) -> None:
    profile = profile_of(spec)
    setting = setting_of(spec, fit(spec, slots=0), reference())
    routing = Routing(profile)
    spent = []
    for slots in range(0, spec.expert_count + 1, 8):
        chosen = Chooser(strategy="optimal", slots=slots, routing=routing, costs=setting.costs).choose()
        spent.append(routing.times(setting.costs, chosen.mask).mean())
        assert chosen.solution is not None and spent[-1] == pytest.approx(chosen.solution.value, rel=1e-3)
    assert all(after <= before * (1 + 1e-6) for before, after in zip(spent[:-1], spent[1:], strict=True))


def test_the_interval_is_over_documents() -> None:
    alike, apart = np.full(20, 2.0), np.array([1.0, 3.0] * 10)
    weights = np.ones(20)
    assert rates(alike, weights, 1) == (0.5, 0.5, 0.5)
    middle, low, high = rates(apart, weights, 4)
    assert middle == 2.0 and low < 1.9 and high > 2.1


def test_deferral_is_advised_until_the_cpu_never_waits(spec: Any, profile_of: Make) -> None:
    routing = Routing(profile_of(spec))
    setting = setting_of(spec, fit(spec, slots=0), reference())
    none = np.zeros((6, 16), bool)
    slow_gpu = replace(setting, costs=replace(setting.costs, attention=60e-6, cpu=30e-6, hop=45e-6))
    depth, gain = deferral(routing, none, slow_gpu)
    assert 1 <= depth < 4 and gain > 0.1
    assert deferral(routing, ~none, slow_gpu) == (0, 0.0)
    assert deferral(routing, none, replace(slow_gpu, batch=8)) == (0, 0.0)


def test_a_batch_needs_more_distinct_experts(spec: Any, profile_of: Make) -> None:
    profile = profile_of(spec)
    costs = setting_of(spec, fit(spec, slots=0), reference()).costs
    order = orders(profile.total())
    tables = [Routing(profile, batch=batch).tables(costs, order) for batch in (1, 4, 16)]
    assert (tables[0][:, 0] < tables[1][:, 0]).all() and (tables[1][:, 0] < tables[2][:, 0]).all()
    assert tables[2][:, 0].max() <= costs.hop + 16 * costs.cpu * (1 + 1e-9)


def test_robust_serves_the_slowest_data_set_better(spec: Any, profile_of: Make) -> None:
    common, rare = profile_of(spec, seed=1, documents=20), profile_of(spec, seed=2, documents=4)
    from ktplan.profile.merge import merge

    both = merge([common, rare], names=["common", "rare"])
    routing = Routing(both)
    costs = setting_of(spec, fit(spec, slots=0), reference()).costs
    parts = [np.array([name == want for name in both.dataset_of]) for want in ("common", "rare")]
    worst = {}
    for strategy in ("frequency", "robust"):
        mask = Chooser(strategy=strategy, slots=32, routing=routing, costs=costs).choose().mask
        worst[strategy] = max(routing.times(costs, mask).mean(part) for part in parts)
    assert worst["robust"] < worst["frequency"]
    with pytest.raises(BadUsage, match="several data sets"):
        Chooser(
            strategy="robust", slots=3, routing=Routing(replace(common, sources=("a",) * 20)), costs=costs
        ).choose()


def test_comparison_has_every_strategy_and_sane_ends(spec: Any, profile_of: Make) -> None:
    setting = setting_of(spec, fit(spec, slots=0), reference())
    table = compare_all(profile_of(spec), setting, (0.0, 0.5, 1.0))
    names = {row.strategy for row in table.rows}
    assert names == {"random", "uniform", "front-loading", "frequency", "optimal", "robust"}
    assert table.note is not None and "trace" in table.note
    for row in table.rows:
        assert row.decode_low <= row.decode <= row.decode_high
        assert row.hit_rate == row.ratio if row.ratio in (0, 1) else 0 < row.hit_rate < 1
    middle = {row.strategy: row.decode for row in table.rows if row.ratio == 0.5}
    assert middle["optimal"] >= middle["frequency"] > middle["random"]


def test_several_gpus_hold_consecutive_layers_within_their_memory(spec: Any, profile_of: Make) -> None:
    parts = Anatomy(
        lines=(Line("x", 8 << 20),),
        by_layer=dict.fromkeys(range(6), 1 << 20),
        embedding=1 << 20,
        head=1 << 20,
    )
    cards = (60 << 20, 100 << 20)
    needs = Needs(kv_bytes=6 << 20, workspace=1 << 20, attention="")
    plan = plan_several(spec, profile_of(spec), parts, cards, needs, margin=1 << 20)
    first, second = plan.devices["cuda:0"], plan.devices["cuda:1"]
    assert max(first.layers) < min(second.layers)
    one = plan.budget.expert_bytes
    for experts, card in ((first, cards[0]), (second, cards[1])):
        assert len(experts) * one + 2 * len(experts.layers) * (1 << 20) <= card
    assert len(second) > len(first) and plan.prediction is not None
    with pytest.raises(DoesNotFit, match="2 GPUs of 2.00 MiB, 2.00 MiB: dense weights 8.00 MiB") as fault:
        plan_several(spec, None, parts, (2 << 20, 2 << 20), needs, strategy="uniform", margin=1 << 20)
    # 8 of weights, 6 of cache, 2 x (1 + 1) of workspace and margin: 14 too many, more than the cache can give.
    assert fault.value.hint == "give 14.0 MiB more in all, or lower --margin"
    with pytest.raises(DoesNotFit) as fault:
        plan_several(
            spec, None, parts, (7 << 20, 7 << 20), needs, strategy="uniform", margin=1 << 20, context=3000
        )
    assert fault.value.hint == "give 4.00 MiB more in all, or lower --context to about 1,000"


@pytest.mark.parametrize("strategy", ["frequency", "optimal", "uniform"])
def test_a_plan_for_several_gpus_is_judged_on_documents_it_did_not_see(
    spec: Any, profile_of: Make, strategy: str
) -> None:
    parts = Anatomy(lines=(), by_layer={}, embedding=0, head=0)
    one = fit(spec, slots=1).expert_bytes
    needs = Needs(kv_bytes=0, workspace=0, attention="")
    plan = plan_several(
        spec, profile_of(spec, skew=3.0), parts, (20 * one, 12 * one), needs, strategy=strategy, margin=0
    )
    told = plan.expectation
    assert len(plan.gpu) == 32 and told is not None and told.held_out is not None and told.folds == 5
    assert plan.prediction is not None and plan.prediction.held_out
    assert told.held_out_low is not None and told.held_out_high is not None
    assert told.held_out_low <= told.held_out <= told.held_out_high
    if strategy == "uniform":
        assert told.held_out == told.in_sample
    else:
        assert told.random < told.held_out < told.in_sample <= told.bound


def test_sglang_quirks_are_repeated_on_request(spec_of: Make, profile_of: Make) -> None:
    qwen = spec_of(layers=4, experts=8, moe_layers=(0, 2, 3))
    assert len(compat(qwen, "uniform", 8, None)) == 6  # two of eight go to the dense layer 1 and are lost
    deepseek = spec_of(layers=4, experts=8, moe_layers=(1, 2, 3), family="deepseek_v3")
    counts = np.zeros((3, 8), np.int64)
    counts[:, :4] = 5
    kept = compat(deepseek, "frequency", 20, counts)
    assert len(kept) == 12  # eight zero cells of the dense row win the ties
    plan = make_plan(deepseek, profile_of(deepseek), slots=10, kt_compat=True)
    assert plan.prediction is None and len(plan.gpu) == 10


def test_llama_cpp_gets_whole_layers_and_the_loss_in_words(spec: Any, profile_of: Make) -> None:
    plan = make_plan(spec, profile_of(spec), slots=50)
    made = to_llamacpp(plan, profile_of(spec))
    assert len(made.layers) == 3 and made.served == pytest.approx(0.5) and "whole layers" in made.notes[0]
    if "-ot" in made.flags:
        pattern, _, device = made.flags[-1].rpartition("=")
        on_cpu = [layer for layer in range(6) if re.search(pattern, f"blk.{layer}.ffn_up_exps.weight")]
        assert device == "CPU" and sorted([*on_cpu, *made.layers]) == list(range(6))
    whole = to_llamacpp(make_plan(spec, strategy="front-loading", slots=spec.expert_count))
    assert whole.flags == ("-ngl", "999", "--fit", "off")
