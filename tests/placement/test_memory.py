"""Cache bytes by the kind of attention, dense weights by kind, and what to change when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktplan.errors import BadInput, DoesNotFit
from ktplan.model import open_source
from ktplan.network import quiet
from ktplan.placement import fit
from ktplan.placement.budget import Needs
from ktplan.placement.memory import anatomy, cache, workspace

GQA = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "hidden_size": 128}
MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "num_attention_heads": 4}


def test_grouped_heads_have_their_own_size() -> None:
    found = cache(GQA, layers=3, context=1024)
    assert found.bytes == 3 * 1024 * 2 * 1 * 128 * 2 and found.per_token == 3 * 512
    assert "multi-query" in found.kind


def test_latent_attention_caches_one_vector() -> None:
    assert cache(MLA, layers=2, context=65536, batch=3).bytes == 3 * 2 * 65536 * (32 + 16) * 2


def test_a_window_bounds_the_cache_and_linear_layers_hold_a_state() -> None:
    windowed = {**GQA, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
    assert cache(windowed, 2, 1000).bytes == (128 + 1000) * 512
    assert (
        cache({**windowed, "use_sliding_window": False, "layer_types": None}, 2, 1000).bytes == 2 * 1000 * 512
    )
    linear = {
        **GQA, "full_attention_interval": 4, "linear_num_value_heads": 8, "linear_num_key_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    short, long = cache(linear, 4, 100), cache(linear, 4, 200)
    assert long.bytes - short.bytes == 100 * 512 and short.per_token == 512
    assert short.bytes - 100 * 512 == 3 * (8 * 16 * 16 * 4 + (2 * 4 * 16 + 8 * 16) * 4 * 2)


_COMMON = {
    "vocab_size": 264, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 2,
}  # fmt: skip
_LOCAL = {
    **{key: value for key, value in _COMMON.items() if not key.startswith(("moe", "num_experts"))},
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
}  # fmt: skip
_LATENT = {
    **_COMMON, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
_LINEAR = {
    **_COMMON, "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32,
}  # fmt: skip
# Family: transformers' config class, its fields, layers that keep a window.
ATTENTION = {
    "grouped": ("Qwen3Moe", {**_COMMON, "head_dim": 64}, 3, 0),
    "multi-head": ("Olmoe", {**_COMMON, "num_key_value_heads": 4}, 2, 0),
    "multi-query": ("Qwen3Moe", {**_COMMON, "num_key_value_heads": 1, "head_dim": 32}, 2, 0),
    "sliding": ("Mixtral", _LOCAL, 2, 2),
    "sliding and full": ("GptOss", {**_LOCAL, "head_dim": 32}, 4, 2),
    "latent": ("DeepseekV3", _LATENT, 2, 0),
    "linear and full": ("Qwen3Next", _LINEAR, 4, 0),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_the_cache_is_as_large_as_transformers_own(kind: str) -> None:
    """A forward pass of two sequences of 40 tokens in bfloat16, then every tensor of its cache."""
    import torch
    import transformers

    name, fields, layers, windows = ATTENTION[kind]
    with quiet():
        config = getattr(transformers, f"{name}Config")(**fields, num_hidden_layers=layers)
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
        with torch.inference_mode():
            held = model(input_ids=torch.arange(80).view(2, 40), use_cache=True).past_key_values
    tensors = [
        tensor
        for layer in held.layers
        for value in vars(layer).values()
        for tensor in (value.values() if isinstance(value, dict) else [value])
        if isinstance(tensor, torch.Tensor) and tensor.ndim
    ]
    told = cache(config.to_dict(), layers, 40, 2)
    # A window holds one token fewer between two calls than in the next one.
    between = windows * 2 * 2 * 2 * 32 * 2
    assert told.bytes - between == sum(tensor.nbytes for tensor in tensors), told


def test_a_nested_config_is_unwrapped_and_nonsense_is_refused() -> None:
    assert cache({"text_config": GQA}, 1, 10).bytes == cache(GQA, 1, 10).bytes
    with pytest.raises(BadInput, match="num_attention_heads"):
        cache({"num_attention_heads": "four"}, 1, 10)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "olmoe"])
def test_dense_lines_add_up_to_the_byte(family: str, family_checkpoint: Callable[..., Path]) -> None:
    source = open_source(family_checkpoint(family))
    found = anatomy(source)
    assert found.total == source.spec.dense_bytes
    assert sum(found.by_layer.values()) + found.embedding + found.head == source.spec.dense_bytes
    names = {line.what for line in found.lines}
    assert {"embedding", "attention", "routers"} <= names
    assert ("shared experts" in names) == (source.spec.shared_experts > 0)


def test_what_does_not_fit_names_the_line_and_the_amount(spec_of: Callable[..., Any]) -> None:
    spec = spec_of(dense_bytes=10 << 20, kv_bytes_per_token=1024)
    needs = Needs(kv_bytes=4 << 20, workspace=1 << 20, attention="")
    with pytest.raises(DoesNotFit) as fault:
        fit(spec, card_memory=14 << 20, margin=0, context=4096, needs=needs)
    assert fault.value.hint == "give 1.00 MiB more, or lower --context to 3,072"
    assert fit(spec, card_memory=15 << 20, margin=0, context=4096, needs=needs).slots == 0
    with pytest.raises(DoesNotFit) as fault:
        fit(spec, card_memory=1 << 20, margin=0, context=0)
    assert "9.00 MiB more" in str(fault.value.hint)


def test_lines_of_a_budget_sum_to_its_total(spec_of: Callable[..., Any]) -> None:
    spec = spec_of()
    needs = Needs(kv_bytes=123, workspace=workspace(spec), attention="x", dense_lines=(("attention", 5),))
    budget = fit(spec, card_memory=64 << 20, margin=1000, needs=needs, batch=2)
    counted = [size for what, size, _ in budget.lines() if not what.startswith("  ") and what != "in all"]
    assert sum(counted) == budget.total_bytes <= 64 << 20
    assert budget.total_bytes + budget.expert_bytes > 64 << 20 or budget.slots == spec.expert_count
