"""Rules on a network: the same walk as KTransformers', with a report that says what each rule took."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ktplan import network, rules
from ktplan.errors import BadInput
from ktplan.rules import HYBRID, KT_EXPERTS, Match, Replace, Rule, Rules
from ktplan.runtime.inject import ExpertBytes, LayerExperts, Placement, is_a, place


@pytest.fixture(scope="module")
def tiny_skeleton(tiny: Path) -> Any:
    return network.skeleton(tiny, "bfloat16")


def placed(model: Any, *made: Rule, device: str = "cpu", on_gpu: bool = False) -> Placement:
    return place(model, Rules(made, "r.yaml"), device=device, experts_on_gpu=on_gpu)


def device_rule(name: str, device: str, **more: Any) -> Rule:
    return Rule(match=Match(name=name), replace=Replace(kwargs={"generate_device": device}), **more)


def experts_rule(name: str, experts: object, class_name: str = HYBRID, **kwargs: Any) -> Rule:
    return Rule(
        match=Match(name=name),
        replace=Replace(class_name=class_name, kwargs={"gpu_experts": experts, **kwargs}),
    )


def test_the_first_matching_rule_wins(tiny_skeleton: Any) -> None:
    found = placed(
        tiny_skeleton,
        device_rule(r"layers\.3\.self_attn", "cuda:1"),
        device_rule(r"^model\.layers", "cuda:0"),
    )
    assert found.modules["model.layers.3.self_attn.q_proj"] == "cuda:1"
    assert found.modules["model.layers.3.mlp.gate"] == "cuda:0"
    assert found.modules["lm_head"] == "cpu"
    assert found.device_of("model.layers.0.self_attn.q_proj.weight") == "cuda:0"


def test_a_matched_parent_does_not_stop_its_children(tiny_skeleton: Any) -> None:
    found = placed(
        tiny_skeleton, device_rule(r"^model\.layers\.1$", "cuda:0"), device_rule("q_proj", "cuda:1")
    )
    assert found.modules["model.layers.1"] == "cuda:0"
    assert found.modules["model.layers.1.self_attn.q_proj"] == "cuda:1"
    assert found.modules["model.layers.1.self_attn.k_proj"] == "cpu"


def test_a_closed_module_takes_its_inside_along(tiny_skeleton: Any) -> None:
    found = placed(
        tiny_skeleton,
        device_rule(r"^model\.layers\.1$", "cuda:0", recursive=False),
        device_rule("q_proj", "cuda:1"),
    )
    assert found.modules["model.layers.1.self_attn.q_proj"] == "cuda:0"
    assert found.modules["model.layers.2.self_attn.q_proj"] == "cuda:1"
    assert found.experts[1].gpu == tuple(range(16))
    assert found.taken[0].modules == 13


def test_name_and_class_must_both_hold(tiny_skeleton: Any) -> None:
    both = Rule(
        match=Match(name=r"layers\.0\.", class_name="torch.nn.Linear"),
        replace=Replace(kwargs={"generate_device": "cuda:0"}),
    )
    found = placed(tiny_skeleton, both)
    assert found.taken[0].modules == 4
    assert found.taken[0].examples[0] == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "class_name",
    [
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        "ktransformers.models.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        "torch.nn.Module",
        "torch.nn.modules.module.Module",
    ],
)
def test_classes_are_told_by_name(tiny_skeleton: Any, class_name: str) -> None:
    assert is_a(tiny_skeleton.model.layers[0].mlp, class_name)


def test_other_classes_do_not_match(tiny_skeleton: Any) -> None:
    assert not is_a(tiny_skeleton.model.layers[0].mlp, "Qwen3MoeSparseMoeBlock")
    assert not is_a(tiny_skeleton.model.layers[0].mlp, "torch.nn.Linear")


def test_experts_are_placed_one_by_one(tiny_skeleton: Any) -> None:
    found = placed(
        tiny_skeleton,
        experts_rule(r"^model\.layers\.0\.mlp\.experts$", "0-3,7"),
        experts_rule(r"^model\.layers\.1\.mlp\.experts$", "all", gpu_device="cuda:1"),
        experts_rule(r"^model\.layers\.2\.mlp\.experts$", [], KT_EXPERTS, generate_device="cpu"),
        experts_rule(r"^model\.layers\.3\.mlp\.experts$", [5], KT_EXPERTS, generate_device="cuda:0"),
    )
    assert [layer.gpu for layer in found.experts] == [(0, 1, 2, 3, 7), tuple(range(16)), (), (5,)]
    assert [layer.gpu_device for layer in found.experts] == ["cuda:0", "cuda:1", "cuda:0", "cuda:0"]
    assert found.gpu_experts.to_ranges() == {"0": "0-3,7", "1": "0-15", "3": "5"}
    assert found.experts[0].cpu == (4, 5, 6, *range(8, 16))


@pytest.mark.parametrize(("device", "gpu"), [("cpu", 0), ("gpu", 16), ("cuda:1", 16)])
@pytest.mark.parametrize("class_name", ["default", KT_EXPERTS])
def test_a_device_rule_places_a_whole_layer(
    tiny_skeleton: Any, class_name: str, device: str, gpu: int
) -> None:
    rule = Rule(
        match=Match(name=r"\.experts$"),
        replace=Replace(class_name=class_name, kwargs={"generate_device": device}),
    )
    assert {len(layer.gpu) for layer in placed(tiny_skeleton, rule).experts} == {gpu}


@pytest.mark.parametrize(
    ("device", "on_gpu", "gpu"), [("cuda:0", True, 16), ("cuda:0", False, 0), ("cpu", True, 0)]
)
def test_experts_without_a_rule(tiny_skeleton: Any, device: str, on_gpu: bool, gpu: int) -> None:
    found = placed(tiny_skeleton, device=device, on_gpu=on_gpu)
    assert {len(layer.gpu) for layer in found.experts} == {gpu}


def test_bytes_of_every_rule_and_device(tiny_skeleton: Any) -> None:
    expert = 3 * 256 * 128 * 2
    found = place(
        tiny_skeleton,
        Rules((experts_rule(r"layers\.[01]\.mlp\.experts$", "0-4"), device_rule("^lm_head", "cuda:1"))),
        device="cuda:0",
        experts_on_gpu=False,
        expert_bytes=ExpertBytes(gpu=expert, cpu=1000),
    )
    assert found.taken[0].bytes == {"cpu": 2 * 11 * 1000, "cuda:0": 2 * 5 * expert}
    assert found.taken[1].bytes == {}  # tied with the embedding, which is counted where it lies
    assert found.taken[2].where == "no rule (default: cuda:0)"
    assert found.bytes["cpu"] == 2 * 11 * 1000 + 2 * 16 * 1000
    dense = sum(p.nbytes for n, p in tiny_skeleton.named_parameters() if ".experts." not in n)
    rotary = sum(buffer.nbytes for buffer in tiny_skeleton.buffers())
    assert found.bytes["cuda:0"] == 10 * expert + dense + rotary


def test_a_rule_that_takes_nothing_is_an_error_unless_optional(tiny_skeleton: Any) -> None:
    idle = experts_rule(r"^model\.layers\.9\.mlp\.experts$", "0")
    with pytest.raises(BadInput, match=r"r\.yaml, rule 1 matches no module: name \^model"):
        placed(tiny_skeleton, idle)
    shadowed = (device_rule(".*", "cpu"), experts_rule(r"\.experts$", "0"))
    with pytest.raises(BadInput, match="rule 2 matches no module"):
        placed(tiny_skeleton, *shadowed)
    allowed = Rule(match=idle.match, replace=idle.replace, optional=True)
    assert placed(tiny_skeleton, allowed).taken[0].modules == 0


def test_experts_that_do_not_exist_are_refused(tiny_skeleton: Any) -> None:
    with pytest.raises(BadInput, match=r"expert 16 of model\.layers\.0\.mlp\.experts .* only 0-15"):
        placed(tiny_skeleton, experts_rule(r"\.experts$", "3,16"))


def test_experts_in_the_place_of_something_else_are_refused(tiny_skeleton: Any) -> None:
    with pytest.raises(BadInput, match=r"takes model\.layers\.0\.mlp .*no experts module"):
        placed(tiny_skeleton, experts_rule(r"\.mlp$", "0"))


def test_a_range_in_a_character_class_is_pointed_out(tiny_skeleton: Any) -> None:
    found = placed(
        tiny_skeleton, device_rule(r"^model\.layers\.([0-15])\.", "cpu"), device_rule(r"x_?[1-9]?", "cpu")
    )
    assert len(found.warnings) == 1
    assert "[0-15] is a set of single characters" in found.warnings[0]
    assert found.warnings[0].endswith("the rule takes layers 0, 1")


def test_an_unanchored_pattern_shows_the_layers_it_took(tiny: Path, tmp_path: Path) -> None:
    config = (tiny / "config.json").read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 24')
    (tmp_path / "config.json").write_text(config)
    deep = network.skeleton(tmp_path, "bfloat16")
    found = placed(
        deep, experts_rule("^model.layers.1.*mlp.experts", [], KT_EXPERTS, generate_device="cuda:0")
    )
    assert found.taken[0].layers == (1, *range(10, 20))


def test_other_operators_of_ktransformers_only_say_where(tiny_skeleton: Any) -> None:
    text = (
        "- match: {class: torch.nn.Linear}\n"
        "  replace:\n"
        "    class: ktransformers.operators.linear.KTransformersLinear\n"
        "    kwargs: {generate_device: cuda, generate_op: KLinearMarlin, prefill_device: cuda}\n"
    )
    found = place(tiny_skeleton, rules.parse(text), device="cpu", experts_on_gpu=False)
    assert found.modules["model.layers.0.self_attn.q_proj"] == "cuda:0"
    assert any("only the device is taken" in note for note in found.notes)
    assert any("prefill_device is not used" in note for note in found.notes)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "olmoe"])
def test_every_family_has_its_experts_where_rules_expect_them(family_checkpoint: Any, family: str) -> None:
    model = network.skeleton(family_checkpoint(family))
    found = placed(
        model, experts_rule(r"^model\.layers\.\d+\.mlp\.experts$", "1"), device_rule("^.*$", "gpu")
    )
    assert all(re.fullmatch(r"model\.layers\.\d+\.mlp\.experts", layer.name) for layer in found.experts)
    assert {layer.gpu for layer in found.experts} == {(1,)}
    assert set(found.modules.values()) == {"cuda:0"}
    assert not any(name.startswith("model.layers.2.mlp.experts") for name in found.modules)


def test_sides_of_a_layer_cover_it_once() -> None:
    layer = LayerExperts(layer=0, name="x", experts=4, gpu=(1, 3), gpu_device="cpu")
    assert sorted(layer.gpu + layer.cpu) == [0, 1, 2, 3]
