"""Every architecture of transformers with routed experts: read from what transformers saves, both ways, exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ktplan.errors import BadInput  # noqa: E402
from ktplan.model import ExpertWeights, ModelSpec, open_source  # noqa: E402
from ktplan.model.families import ALIASES, UNREADABLE, architectures, family_of  # noqa: E402

READABLE = sorted(set(architectures()) - set(UNREADABLE) - {"jetmoe", "dbrx"})


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore")  # of transformers, about tiny configurations
@pytest.mark.parametrize("model_type", READABLE)
def test_experts_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    import generate_architectures as generate
    from tiny_architectures import experts_modules, rows_of, tiny_model

    model = tiny_model(model_type)
    modules = dict(experts_modules(model))
    fingerprints: dict[Any, set[str]] = {}
    for form, options in (("single", {}), ("fused", {"save_original_format": False})):
        folder = tmp_path / form
        model.save_pretrained(folder, **options)
        source = open_source(folder)
        spec = source.spec
        dense = sorted((source.info(name).dtype, source.info(name).shape) for name in source.dense_names())
        fingerprints.setdefault(str(dense), set()).add(spec.fingerprint)
        assert {spec.experts_module_name(layer) for layer in spec.moe_layers} == set(modules)
        for layer in spec.moe_layers:
            module = modules[spec.experts_module_name(layer)]
            for expert in range(spec.experts):
                _assert_equal(source.expert(layer, expert), rows_of(module, expert))
    # One model, one fingerprint; some families save their other weights in two ways as well.
    assert all(len(found) == 1 for found in fingerprints.values())
    assert len(fingerprints) == 1 or model_type not in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
    assert generate.record_of(model) == architectures()[model_type]
    name, module = next(iter(modules.items()))
    layer = next(layer for layer in spec.moe_layers if spec.experts_module_name(layer) == name)
    _assert_output_is_that_of(module, [source.expert(layer, expert) for expert in range(spec.experts)], spec)


def _assert_equal(ours: ExpertWeights, theirs: dict[str, Any]) -> None:
    for role in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
        found = getattr(ours, role)
        if role in theirs:
            np.testing.assert_array_equal(found, theirs[role].detach().float().numpy(), err_msg=role)
        else:
            assert found is None or not len(found)


def _assert_output_is_that_of(module: Any, experts: list[ExpertWeights], spec: ModelSpec) -> None:
    """The layer's output is transformers': weights as they are read, and the formula that spec.activation names."""
    if spec.activation == "softcapped-swiglu" or "post-norm" in spec.activation:
        return  # refused by name wherever experts are run; no formula of ours to compare
    module = module.float()
    random = torch.Generator().manual_seed(1)
    x = torch.randn(7, spec.hidden, generator=random)
    choice = torch.rand(7, spec.experts, generator=random).argsort(dim=1)[:, : min(2, spec.experts)]
    share = torch.rand(choice.shape, generator=random)
    outputs = torch.stack([_output(expert, spec, x) for expert in experts])
    with torch.no_grad():
        if type(module).__name__ == "Llama4TextExperts":  # takes the tokens of all experts in turn
            torch.testing.assert_close(
                outputs, module(x.repeat(spec.experts, 1)).view(spec.experts, 7, -1), rtol=1e-4, atol=1e-6
            )
            return
        theirs = module(x, choice, share)
    ours = torch.zeros_like(x)
    for token in range(7):
        for expert, weight in zip(choice[token], share[token], strict=True):
            ours[token] += weight * outputs[expert, token]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def _output(expert: ExpertWeights, spec: ModelSpec, x: Any) -> Any:
    _, up, down = (torch.from_numpy(matrix) for matrix in expert)
    high = x @ up.T + (torch.from_numpy(expert.up_bias) if expert.up_bias is not None else 0)
    if spec.activation.endswith("-ungated"):
        middle = torch.relu(high) ** 2
    else:
        low = x @ torch.from_numpy(expert.gate).T
        low = low + (torch.from_numpy(expert.gate_bias) if expert.gate_bias is not None else 0)
        middle = _activate(spec.activation, low, high)
    return middle @ down.T + (torch.from_numpy(expert.down_bias) if expert.down_bias is not None else 0)


def _activate(name: str, gate: Any, up: Any) -> Any:
    from transformers.activations import ACT2FN

    if name == "swiglu-oai":  # alpha 1.702, limit 7 (gpt-oss); these small values do not reach the limit
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return torch.nn.functional.silu(gate) * up if name == "swiglu-clamped" else ACT2FN[name](gate) * up


@pytest.mark.filterwarnings("ignore")
def test_jetmoe_keeps_its_stacks_in_modules(tmp_path: Path) -> None:
    from tiny_architectures import tiny_model

    model = tiny_model("jetmoe")
    model.save_pretrained(tmp_path)
    source, weights = open_source(tmp_path), model.state_dict()
    for layer in source.spec.moe_layers:
        both = weights[f"model.layers.{layer}.mlp.input_linear.weight"].float().numpy()
        down = weights[f"model.layers.{layer}.mlp.output_linear.weight"].float().numpy()
        for expert in range(source.spec.experts):
            np.testing.assert_array_equal(np.concatenate(source.expert(layer, expert)[:2]), both[expert])
            np.testing.assert_array_equal(source.expert(layer, expert).down, down[expert])


@pytest.mark.filterwarnings("ignore")
def test_dbrx_keeps_all_experts_in_one_flat_matrix_a_projection(tmp_path: Path) -> None:
    from tiny_architectures import tiny_model

    model = tiny_model("dbrx").float()
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    spec = source.spec
    assert (spec.experts, spec.hidden, spec.moe_intermediate, spec.moe_layers) == (4, 64, 96, (0, 1, 2, 3))
    assert spec.experts_module_name(1) == "transformer.blocks.1.ffn.experts"
    assert family_of("dbrx").names["up"] == "transformer.blocks.{layer}.ffn.experts.{expert}.up_proj.weight"
    experts = [source.expert(1, expert) for expert in range(4)]
    module = model.get_submodule(spec.experts_module_name(1))
    for expert, found in enumerate(experts):
        own = slice(expert * 96, (expert + 1) * 96)
        for ours, theirs in zip(
            found, (module.mlp.w1[own], module.mlp.v1[own], module.mlp.w2[own].T), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs.detach().numpy())
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = module(x[None], torch.tensor([[3]] * 7), torch.ones(7, 1))[0]
    torch.testing.assert_close(_output(experts[3], spec, x), theirs, rtol=1e-4, atol=1e-6)


def test_the_table_holds_every_architecture_that_transformers_stacks() -> None:
    from tiny_architectures import candidates, experts_modules, model_class, tiny_model

    # Wrappers of another model type's experts that no small configuration exists for.
    unreadable = set(UNREADABLE) | {"qwen3_omni_moe", "nemo_speechlm"}
    for model_type in set(candidates()) - set(architectures()) - unreadable:
        try:
            model = tiny_model(model_type, "meta")
        except Exception:  # a configuration that resists tiny sizes has to be listed
            pytest.fail(
                f"{model_type} ({model_class(model_type).__name__}) is neither in the table nor UNREADABLE"
            )
        assert not experts_modules(model), model_type


@pytest.mark.parametrize("model_type", sorted(UNREADABLE))
def test_other_kinds_of_experts_are_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(BadInput, match=f"{model_type}.*{UNREADABLE[model_type][:20]}"):
        family_of(model_type)


def test_every_alias_leads_to_a_record() -> None:
    assert {ALIASES[name] for name in ALIASES} <= set(architectures())
    for name in ALIASES:
        assert family_of(name) is not None


def test_the_documented_table_is_the_generated_one() -> None:
    import generate_architectures as generate

    page = Path(__file__).resolve().parents[2] / "docs" / "models.md"
    assert generate.markdown() in page.read_text(encoding="utf-8")


def test_a_multimodal_wrapper_of_a_known_text_model_is_read(tiny: Path, tmp_path: Path) -> None:
    """Any wrapper: its own model_type need not be known, the text model in it decides."""
    config = json.loads((tiny / "config.json").read_text())
    wrapped = {"model_type": "wonder_vl", "text_config": config, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    (tmp_path / "model.safetensors").symlink_to(tiny / "model.safetensors")
    source = open_source(tmp_path)
    assert source.spec.experts_module_name(1) == "model.language_model.layers.1.mlp.experts"
    np.testing.assert_array_equal(source.expert(1, 3).up, open_source(tiny).expert(1, 3).up)
