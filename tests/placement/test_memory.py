"""Cache bytes by the kind of attention, dense weights by kind, and what to change when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktplan.errors import BadInput, DoesNotFit
from ktplan.model import open_source
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
    assert short.bytes - 100 * 512 == 3 * (8 * 16 * 16 * 4 + (2 * 4 * 16 + 8 * 16) * 3 * 2)


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
