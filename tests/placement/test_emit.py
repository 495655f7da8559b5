"""Rules and counts files reproduce the plan when they are read as their readers read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ktplan import network
from ktplan import rules as rule_files
from ktplan.errors import BadInput, BadUsage
from ktplan.experts import ExpertId, ExpertSet, parse_ranges
from ktplan.model import read_spec
from ktplan.placement import PlacementPlan, make_plan
from ktplan.placement.emit import heading, launch_line, ratio_text, to_rules, to_sglang, whole_layers
from ktplan.rules import DEFAULT, HYBRID, KT_EXPERTS

Make = Callable[..., Any]
FAMILY_MODULES = ("model.layers.{layer}.mlp.experts", "model.layers.{layer}.block_sparse_moe.experts")


def first_match(rules: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """KTransformers' own reading of a rule file: re.search from the top, the first match wins."""
    return next(rule for rule in rules if re.search(rule["match"]["name"], name))


def read_plainly(text: str) -> list[dict[str, Any]]:
    rules = yaml.safe_load(text)
    assert isinstance(rules, list)
    return rules


def experts_by_rules(plan: PlacementPlan, dialect: str) -> ExpertSet:
    rules = read_plainly(to_rules(plan, dialect=dialect).dump(heading(plan, dialect)))
    found = []
    for layer in plan.shape.moe_layers:
        rule = first_match(rules, f"model.layers.{layer}.mlp.experts")
        assert rule["recursive"] is False
        kwargs = rule["replace"]["kwargs"]
        if kwargs.get("generate_device", "cpu") == "cpu":
            ids = parse_ranges(kwargs.get("gpu_experts", ""))
        else:
            ids = tuple(range(plan.shape.experts))
        found += [ExpertId(layer, expert) for expert in ids]
    return ExpertSet(found)


@pytest.mark.parametrize("strategy", ["frequency", "uniform", "front-loading", "random"])
@pytest.mark.parametrize("slots", [0, 1, 7, 300, 959, 960])
@pytest.mark.parametrize("dialect", ["ktplan", "kt-yaml"])
def test_each_of_120_layers_gets_exactly_its_experts(
    spec_of: Make, profile_of: Make, strategy: str, slots: int, dialect: str
) -> None:
    spec = spec_of(layers=120, experts=8)
    plan = make_plan(spec, profile_of(spec, documents=3), strategy=strategy, slots=slots)
    made = to_rules(plan, spec, dialect)
    assert rule_files.parse(made.dump()) == made
    for layer in range(120):
        name = f"model.layers.{layer}.mlp.experts"
        assert sum(bool(re.search(str(rule.match.name), name)) for rule in made.rules[:-1]) == 1
    assert experts_by_rules(plan, dialect) == plan.gpu


def test_only_experts_modules_are_taken_and_the_rest_has_a_device(spec_of: Make) -> None:
    plan = make_plan(spec_of(layers=12), strategy="uniform", slots=30)
    rules = read_plainly(to_rules(plan).dump())
    for name in (
        "",
        "lm_head",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.experts.0",
        "model.layers.1.mlp.shared_experts",
    ):
        assert first_match(rules, name)["replace"] == {"class": DEFAULT, "kwargs": {"generate_device": "gpu"}}
    assert first_match(rules, "model.layers.1.mlp.experts")["replace"]["class"] == HYBRID
    # Escaped and anchored: a dot is a dot, and layer 1 is not layer 11.
    assert first_match(rules, "modelxlayers.1.mlp.experts")["replace"]["class"] == DEFAULT
    assert first_match(rules, "other.model.layers.1.mlp.experts")["replace"]["class"] == DEFAULT


def test_neighbouring_layers_with_the_same_experts_share_a_rule(spec_of: Make) -> None:
    spec = spec_of(layers=12, experts=8)
    plan = make_plan(spec, strategy="uniform", slots=12 * 2 + 5)  # five layers of 3, seven of 2
    made = to_rules(plan)
    assert len(made) == 3
    assert made.rules[0].match.name == r"^model\.layers\.(?:0|1|2|3|4)\.mlp\.experts$"
    assert made.rules[1].replace.kwargs == {"gpu_device": "gpu", "gpu_experts": "0-1"}


def test_devices_that_change_every_seven_layers_are_kept_to_the_layer(spec_of: Make) -> None:
    names = ["cpu", "cuda:0", "cuda:1"]
    device = {layer: names[layer // 7 % 3] for layer in range(120)}
    spec = spec_of(layers=120, experts=4)
    sets = {
        name: ExpertSet(
            ExpertId(layer, expert) for layer in range(120) if device[layer] == name for expert in range(4)
        )
        for name in names[1:]
    }
    base = make_plan(spec, strategy="uniform", slots=sum(map(len, sets.values())))
    plan = replace(base, devices=sets)
    for_kt = read_plainly(to_rules(plan, dialect="kt-yaml").dump())
    for_us = read_plainly(to_rules(plan).dump())
    for layer in range(120):
        kwargs = first_match(for_kt, f"model.layers.{layer}.mlp.experts")["replace"]["kwargs"]
        assert kwargs["generate_device"] == device[layer]
        ours = first_match(for_us, f"model.layers.{layer}.mlp.experts")["replace"]["kwargs"]
        assert ours["gpu_experts"] == ("" if device[layer] == "cpu" else "0-3")
        assert device[layer] in ("cpu", ours["gpu_device"])


def test_a_layer_on_two_gpus_cannot_be_said(spec_of: Make) -> None:
    base = make_plan(spec_of(layers=1, experts=4), strategy="uniform", slots=2)
    split = replace(
        base, devices={"cuda:0": ExpertSet([ExpertId(0, 0)]), "cuda:1": ExpertSet([ExpertId(0, 1)])}
    )
    with pytest.raises(BadUsage, match="layer 0 live on cuda:0 and cuda:1"):
        to_rules(split)


def test_ktransformers_yaml_has_its_classes_and_says_what_it_ignores(spec_of: Make) -> None:
    plan = make_plan(spec_of(layers=4, experts=8), strategy="front-loading", slots=19)
    text = to_rules(plan, dialect="kt-yaml").dump(heading(plan, "kt-yaml"))
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert any("ignores 'gpu_experts'" in line and "3 of the planned experts" in line for line in comments)
    rules = read_plainly(text)
    whole, partly, none = (
        first_match(rules, f"model.layers.{layer}.mlp.experts")["replace"] for layer in (0, 2, 3)
    )
    assert whole_layers(plan) == (0, 1)
    assert {rule["class"] for rule in (whole, partly, none)} == {KT_EXPERTS}
    assert whole["kwargs"] == {
        "prefill_device": "cuda:0", "prefill_op": "KExpertsTorch",
        "generate_device": "cuda:0", "generate_op": "KExpertsMarlin", "out_device": "cuda:0",
    }  # fmt: skip
    on_cpu = {**whole["kwargs"], "generate_device": "cpu", "generate_op": "KExpertsCPU"}
    assert none["kwargs"] == on_cpu
    assert partly["kwargs"] == {**on_cpu, "gpu_experts": "0-2"}


def test_ktransformers_older_module_names_match_too(spec_of: Make) -> None:
    plan = make_plan(spec_of(layers=3, family="mixtral"), strategy="uniform", slots=9)
    theirs = read_plainly(to_rules(plan, dialect="kt-yaml").dump())
    for layer in range(3):
        rules = [first_match(theirs, module.format(layer=layer)) for module in FAMILY_MODULES]
        assert rules[0] == rules[1] and rules[0]["replace"]["class"] == KT_EXPERTS


def test_a_plan_of_another_model_is_not_emitted_for_it(spec_of: Make) -> None:
    plan = make_plan(spec_of(), strategy="uniform", slots=3)
    other = spec_of(fingerprint="sha256:" + "00" * 32)
    for attempt in (lambda: to_rules(plan, other), lambda: to_sglang(plan, other)):
        with pytest.raises(BadInput, match="another model"):
            attempt()
    with pytest.raises(BadUsage, match="no rules for 'llama.cpp'"):
        to_rules(plan, dialect="llama.cpp")


def sglang_mask(counts: np.ndarray, cells: int, ratio: str) -> ExpertSet:
    """sglang-kt's `frequency`: sum, flatten, top int(cells * ratio) by torch.topk."""
    table = torch.from_numpy(counts).sum(dim=0).float()
    slots = int(cells * float(ratio))
    chosen = torch.topk(table.flatten(), k=slots, sorted=False).indices.tolist()
    return ExpertSet(ExpertId(cell // table.shape[1], cell % table.shape[1]) for cell in chosen)


@pytest.mark.parametrize(
    "slots",
    [0, 1, 2, 3, 29, 63, 64, 65, 100, 511, 512, 513, 1000, 1777, 1856, 2276, 3000, 3500, 3711, 3712],
)
def test_sglang_reads_exactly_the_plan(spec_of: Make, profile_of: Make, slots: int) -> None:
    spec = spec_of(layers=61, experts=64, moe_layers=tuple(range(3, 61)), family="deepseek_v3")
    plan = make_plan(spec, profile_of(spec, documents=2), slots=slots)
    made = to_sglang(plan, spec, "counts.pt")
    assert made.counts.dtype == np.int32 and made.counts.shape == (1, 61, 64)
    assert not made.counts[0, :3].any() and set(np.unique(made.counts[0, 3:])) <= {1, 2}
    assert made.flags[:4] == [
        "--kt-expert-placement-strategy",
        "frequency",
        "--init-expert-location",
        "counts.pt",
    ]
    assert made.flags[4] == "--kt-gpu-experts-ratio"
    assert 0 < float(made.flags[5]) <= 1
    assert sglang_mask(made.counts, 58 * 64, made.flags[5]) == plan.gpu
    assert bool(made.notes) == (slots == 0)


def test_sglangs_own_count_of_layers_is_used_where_it_misreads_a_family(spec_of: Make) -> None:
    spec = spec_of(layers=6, experts=8, moe_layers=(1, 3, 5))
    plan = make_plan(spec, strategy="random", slots=11)
    made = to_sglang(plan)
    assert any("all 6 layers" in note for note in made.notes)
    assert sglang_mask(made.counts, 6 * 8, made.flags[5]) == plan.gpu


@given(st.integers(1, 200_000), st.data())
def test_a_ratio_hits_its_number_for_every_size(cells: int, data: st.DataObject) -> None:
    slots = data.draw(st.integers(0, cells))
    text = ratio_text(slots, cells)
    assert int(cells * float(text)) == slots
    assert "e" not in text and 0 < float(text) <= 1


def test_the_launch_line_can_be_pasted(spec_of: Make) -> None:
    plan = make_plan(spec_of(), strategy="uniform", slots=3)
    line = launch_line(plan, to_sglang(plan, counts_file="my plan/counts.pt").flags)
    assert "--init-expert-location 'my plan/counts.pt'" in line and "--kt-weight-path STORE" in line


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "olmoe"])
def test_rules_name_the_modules_that_a_network_of_the_family_has(
    family_checkpoint: Callable[..., Path], family: str
) -> None:
    path = family_checkpoint(family)
    spec = read_spec(path)
    plan = make_plan(spec, strategy="random", slots=spec.expert_count // 2)
    names = [name for name, _ in network.experts_modules(network.skeleton(path)).values()]
    for dialect in ("ktplan", "kt-yaml"):
        rules = to_rules(plan, spec, dialect).rules[:-1]
        matches = np.array(
            [[bool(re.search(str(rule.match.name), name)) for rule in rules] for name in names]
        )
        assert (matches.sum(axis=1) == 1).all(), dialect
