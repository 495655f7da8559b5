"""How many experts fit: counted, as a share, in bytes; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktplan.errors import BadUsage, DoesNotFit
from ktplan.model import ModelSpec, read_spec
from ktplan.placement import expert_bytes, fit
from ktplan.quant.gptq_format import GptqScheme, pack_linear

GIB = 1 << 30
Make = Callable[..., ModelSpec]


def test_none_and_all_are_valid_budgets(spec_of: Make) -> None:
    spec = spec_of(layers=2, experts=8)
    assert (
        fit(spec, gpu_experts=0).slots == 0
        and fit(spec, ratio=0.0).slots == 0
        and fit(spec, gpu_memory=0).slots == 0
    )
    assert (
        fit(spec, gpu_experts=8).slots
        == fit(spec, gpu_experts="all").slots
        == fit(spec, ratio=1.0).slots
        == 16
    )
    assert fit(spec, gpu_memory=GIB).slots == 16


@pytest.mark.parametrize("number", [-1, 9, 200, "none"])
def test_experts_a_layer_out_of_range_are_refused_with_the_range(spec_of: Make, number: int | str) -> None:
    with pytest.raises(BadUsage, match="out of range") as fault:
        fit(spec_of(layers=2, experts=8), gpu_experts=number)
    assert "0 to 8" in str(fault.value.hint)


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan"), float("inf")])
def test_a_share_out_of_range_is_refused_with_the_range(spec_of: Make, ratio: float) -> None:
    with pytest.raises(BadUsage, match="out of range") as fault:
        fit(spec_of(), ratio=ratio)
    assert "0 to 1" in str(fault.value.hint)


def test_a_share_is_cut_as_sglang_cuts_it(spec_of: Make) -> None:
    # Binary fractions: 100 * 0.29 is 28.999999999999996.
    assert fit(spec_of(layers=10, experts=10), ratio=0.29).slots == 28
    assert fit(spec_of(layers=10, experts=10), ratio=0.3).slots == 30


def test_layers_without_experts_take_no_part(spec_of: Make) -> None:
    spec = spec_of(layers=6, experts=8, moe_layers=(1, 3, 5))
    assert fit(spec, gpu_experts=2).slots == 6
    assert fit(spec, ratio=0.5).slots == 12


def test_exactly_one_way_to_say_it(spec_of: Make) -> None:
    with pytest.raises(BadUsage, match="nothing says"):
        fit(spec_of())
    with pytest.raises(BadUsage, match="--gpu-experts and --ratio exclude each other"):
        fit(spec_of(), gpu_experts=1, ratio=0.1)
    with pytest.raises(BadUsage, match="40 GPU experts are out of range"):
        fit(spec_of(layers=2, experts=8), slots=40)


def test_memory_for_experts_is_all_theirs_and_never_exceeded(spec_of: Make) -> None:
    spec = spec_of(layers=4, experts=8)
    one = expert_bytes(spec, "bf16")
    for memory in (one - 1, one, 7 * one - 1, 7 * one, 1000 * one):
        budget = fit(spec, gpu_memory=memory)
        assert budget.experts_bytes <= memory and budget.slots == min(memory // one, 32)
        assert budget.limit_of == "experts"


def test_memory_of_the_card_pays_for_everything(spec_of: Make) -> None:
    spec = spec_of(layers=4, experts=8)
    one = expert_bytes(spec, "bf16")
    rest = spec.dense_bytes + 1000 * spec.kv_bytes_per_token + 5000
    budget = fit(spec, card_memory=rest + 5 * one + 17, context=1000, margin=5000)
    assert budget.slots == 5 and budget.total_bytes == rest + 5 * one
    assert sum(size for what, size, _ in budget.lines() if what != "in all") == budget.total_bytes
    with pytest.raises(DoesNotFit, match="--card-memory gives"):
        fit(spec, card_memory=rest - 1, context=1000, margin=5000)


def test_longer_contexts_leave_fewer_experts(spec_of: Make) -> None:
    spec = spec_of(layers=4, experts=64, kv_bytes_per_token=40_000)
    slots = [
        fit(spec, card_memory=48 << 20, context=context, margin=0).slots for context in (0, 256, 512, 1024)
    ]
    assert slots == sorted(slots, reverse=True) and slots[0] > slots[-1]


def test_kv_cache_follows_the_models_heads(family_checkpoint: Callable[..., Path]) -> None:
    grouped = read_spec(family_checkpoint("qwen3_moe"))  # 3 layers, 2 KV heads of 32
    latent = read_spec(family_checkpoint("deepseek_v3"))  # 3 layers, rank 32 + rope 16
    for context in (1024, 65536):
        assert fit(grouped, ratio=0.5, context=context).kv_bytes == 3 * 2 * 2 * 32 * 2 * context
        assert fit(latent, ratio=0.5, context=context).kv_bytes == 3 * (32 + 16) * 2 * context


def test_the_default_context_is_what_the_model_can_up_to_8192(spec_of: Make) -> None:
    assert fit(spec_of(context=1024), ratio=0.1).context == 1024
    assert fit(spec_of(context=131072), ratio=0.1).context == 8192


@pytest.mark.parametrize(("gpu_format", "bits"), [("gptq-w4", 4), ("gptq-w8", 8)])
def test_gptq_sizes_are_those_of_the_packed_tensors(spec_of: Make, gpu_format: str, bits: int) -> None:
    spec = spec_of(hidden=256, moe_intermediate=384)
    scheme = GptqScheme(bits, 128)
    packed = 0
    for outputs, inputs in ((384, 256), (384, 256), (256, 384)):
        codes = np.zeros((outputs, inputs), np.uint8)
        scales = np.ones((outputs, inputs // 128), np.float16)
        packed += sum(tensor.nbytes for tensor in pack_linear(codes, scales, scheme))
    assert expert_bytes(spec, gpu_format) == packed


def test_sides_that_gptq_cannot_group_by_128_use_smaller_groups_or_are_refused(spec_of: Make) -> None:
    narrow = spec_of(hidden=256, moe_intermediate=96)  # groups of 32
    assert (
        expert_bytes(narrow, "gptq-w4")
        > expert_bytes(spec_of(hidden=256, moe_intermediate=128), "gptq-w4") * 96 // 128
    )
    with pytest.raises(BadUsage, match="cannot be gptq-w4: its 40 inputs"):
        expert_bytes(spec_of(hidden=256, moe_intermediate=40), "gptq-w4")
    with pytest.raises(BadUsage, match="no GPU format"):
        expert_bytes(narrow, "fp8")


@given(st.integers(0, 10**9), st.integers(0, 4096), st.integers(0, 10**8))
def test_more_memory_never_means_fewer_experts(spec_of: Make, memory: int, context: int, margin: int) -> None:
    spec = spec_of()
    rest = spec.dense_bytes + context * spec.kv_bytes_per_token + margin

    def slots(card: int) -> int:
        return fit(spec, card_memory=rest + card, context=context, margin=margin).slots

    assert slots(memory) <= slots(memory + 1000) <= slots(10**10) == spec.expert_count
