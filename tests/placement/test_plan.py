"""The plan as a file: same inputs, same bytes; every contradiction is found when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktplan.errors import BadInput, BadUsage
from ktplan.placement import PlacementPlan, fit, make_plan

Make = Callable[..., Any]


@pytest.fixture
def plan(spec_of: Make, profile_of: Make) -> PlacementPlan:
    spec = spec_of(layers=5, experts=8, moe_layers=(1, 2, 4))
    return make_plan(spec, profile_of(spec), budget=fit(spec, ratio=0.4, gpu_format="gptq-w4"))


def test_what_is_saved_comes_back(plan: PlacementPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert PlacementPlan.load(tmp_path / "plan.json") == plan


def test_the_same_inputs_give_the_same_bytes(spec_of: Make, profile_of: Make, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        spec = spec_of()
        make_plan(spec, profile_of(spec), slots=9).save(tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_the_file_says_what_a_person_asks(plan: PlacementPlan, profile_of: Make, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    body = json.loads((tmp_path / "plan.json").read_text())
    assert (body["kind"], body["version"], body["strategy"], body["seed"]) == (
        "placement-plan",
        1,
        "frequency",
        42,
    )
    assert set(body["gpu"]) == {"gpu"} and set(body["gpu"]["gpu"]) <= {"1", "2", "4"}
    assert (
        body["budget"]["slots"] == 9 and body["budget"]["experts_bytes"] == 9 * body["budget"]["expert_bytes"]
    )
    assert body["inputs"]["profile"].startswith("sha256:")
    assert 0 < body["expectation"]["held_out_low"] <= body["expectation"]["held_out"] <= 1


def test_figures_of_a_plan(plan: PlacementPlan) -> None:
    assert len(plan.gpu) == 9 == sum(plan.per_layer()) and len(plan.per_layer()) == 3
    assert plan.expectation is not None and plan.hit_rate == plan.expectation.held_out


def test_without_a_profile_a_plan_promises_nothing(spec_of: Make, tmp_path: Path) -> None:
    for strategy in ("uniform", "front-loading", "random"):
        made = make_plan(spec_of(), strategy=strategy, slots=7)
        assert made.expectation is None and made.hit_rate is None and made.inputs == {} and len(made.gpu) == 7
        made.save(tmp_path / "plan.json")
        assert PlacementPlan.load(tmp_path / "plan.json") == made
    with pytest.raises(BadUsage, match="needs counts"):
        make_plan(spec_of(), slots=7)


def test_slots_or_a_budget_but_not_both(spec_of: Make) -> None:
    spec = spec_of()
    with pytest.raises(BadUsage, match="either slots or a budget"):
        make_plan(spec, strategy="uniform")
    with pytest.raises(BadUsage, match="either slots or a budget"):
        make_plan(spec, strategy="uniform", slots=1, budget=fit(spec, slots=1))


def test_profile_and_plan_of_another_model_are_refused_with_both_fingerprints(
    plan: PlacementPlan, spec_of: Make, profile_of: Make
) -> None:
    other = spec_of(layers=5, experts=8, moe_layers=(1, 2, 4), fingerprint="sha256:" + "00" * 32)
    for attempt in (lambda: plan.for_model(other), lambda: make_plan(other, profile_of(spec_of()), slots=1)):
        with pytest.raises(BadInput, match="another model") as fault:
            attempt()
        assert "sha256:cdcd" in fault.value.message and "sha256:0000" in fault.value.message


def set_at(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            body = body[key]
        body[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_at("gpu/gpu/2", "0-8"),
        set_at("gpu/gpu/3", "0"),
        set_at("gpu/gpu/2", "0-99999999999"),
        set_at("gpu/gpu/x", "0"),
        set_at("gpu/gpu/1", None),
        set_at("gpu/gpu", {}),
        set_at("gpu/cpu", {}),
        set_at("gpu/somewhere", {}),
        set_at("gpu/cuda:1", {"1": "0-7"}),
        set_at("gpu", None),
        set_at("budget/slots", 8),
        set_at("budget/slots", "9"),
        set_at("budget/dense_bytes", -1),
        set_at("budget/kv_bytes", 1.5),
        set_at("budget", {}),
        set_at("shape/experts", 4),
        set_at("shape/moe_layers", "1-7"),
        set_at("shape/moe_layers", ""),
        set_at("shape/layers", True),
        set_at("shape/experts_module", "model.layers.experts"),
        set_at("shape/experts_module", "model.layers.{expert}"),
        set_at("shape/top_k", 0),
        set_at("expectation/held_out", "much"),
        set_at("expectation", []),
        set_at("inputs", {"profile": 3}),
        set_at("seed", None),
        set_at("fingerprint", 5),
    ],
)
def test_every_contradiction_is_found(plan: PlacementPlan, tmp_path: Path, change: Any) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    with pytest.raises(BadInput, match=r"plan\.json is damaged"):
        PlacementPlan.load(path)


def test_foreign_and_newer_files_are_told_apart(plan: PlacementPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"kind": "something"}')
    with pytest.raises(BadInput, match="is not a placement-plan"):
        PlacementPlan.load(path)
    plan.save(path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(BadInput, match="version 2"):
        PlacementPlan.load(path)
