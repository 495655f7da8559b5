"""Experts on two sides compute what transformers' own module computes, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan import network
from ktplan.errors import BadInput, DoesNotFit
from ktplan.model import ExpertWeights, open_source
from ktplan.model.source import Biases
from ktplan.network import torch_threads
from ktplan.rules import Rules
from ktplan.runtime.device_experts import DeviceExperts
from ktplan.runtime.inject import LayerExperts
from ktplan.runtime.loader import build, check_memory, open_sources, prepare
from ktplan.runtime.moe import DECODE, PREFILL, HybridExperts, RouteCounters
from ktplan.store import ExpertStore

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "olmoe", "gpt_oss", "gemma4_text")
IDS = torch.tensor([[11, 48, 200, 7, 7, 96, 131, 5, 255, 64, 32, 16]])
EXACT = 1e-5  # relative, float32 summed in another order
SIXTEEN_BITS = 3e-4  # the engine's 16-bit activations
BLOCK = 128


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def typical(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The median over tokens: in a random model rounding may send a token to other experts, and that is no fault."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(ids, use_cache=False).logits[0].float()
    return found


def loaded(path: Path, rules: Rules | None = None, store: Path | None = None, **more: Any) -> Any:
    return build(prepare(open_sources(path, store), rules=rules, dtype="float32"), threads=1, **more)


class FromStore:
    """A weight source whose experts are what the store's codes stand for."""

    def __init__(self, store: Path) -> None:
        self._store = ExpertStore.open(store)

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        return self._store.expert(layer, expert)

    def expert_biases(self, layer: int, expert: int) -> Biases:
        return Biases(None, None, None)  # transformers' module keeps its own


def dequantized(path: Path, store: Path) -> Any:
    """transformers' own network with the store's weights: the oracle for the CPU engine."""
    model: Any = network.load_whole(path)
    for layer, (_, module) in network.experts_modules(model).items():
        network.load_experts(module, FromStore(store), layer)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("experts", ["", "0-2,5", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unquantized_experts_on_any_side_agree_with_transformers(
    family_checkpoint: Callable[..., Path], hybrid: Callable[[str], Rules], family: str, experts: str
) -> None:
    path = family_checkpoint(family)
    found = loaded(path, hybrid(experts))
    assert relative(logits(found.model), logits(network.load_whole(path))) <= EXACT


@pytest.mark.parametrize(("bits", "parts"), [(8, 1), (8, 2), (4, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_store_computes_what_its_codes_stand_for(
    family_checkpoint: Callable[..., Path], store_of: Callable[..., Path], family: str, bits: int, parts: int
) -> None:
    path = family_checkpoint(family)
    store = store_of(path, bits, parts)
    expected = logits(dequantized(path, store))
    assert relative(logits(loaded(path, store=store).model), expected) <= SIXTEEN_BITS
    coarse = loaded(path, store=store, activation_bits=8)
    assert SIXTEEN_BITS < typical(logits(coarse.model), expected) <= 0.03


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_int8_is_near_the_unquantized_model(
    family_checkpoint: Callable[..., Path],
    store_of: Callable[..., Path],
    hybrid: Callable[[str], Rules],
    family: str,
) -> None:
    path = family_checkpoint(family)
    expected = logits(network.load_whole(path))
    all_cpu = typical(logits(loaded(path, store=store_of(path)).model), expected)
    assert 0 < all_cpu < 0.02
    assert typical(logits(loaded(path, hybrid("0-3"), store_of(path)).model), expected) < all_cpu


def test_placement_does_not_change_the_result(
    tiny: Path, store_of: Callable[..., Path], hybrid: Callable[[str], Rules]
) -> None:
    """GPU experts with the store's own weights: any mix gives the logits of the CPU engine alone."""
    store = store_of(tiny)
    reference = loaded(tiny, store=store)
    expected = logits(reference.model)
    for experts in ("0", "1-6,9", "all"):
        network_ = loaded(tiny, hybrid(experts), store)
        for layer, module in network_.experts.items():
            source = FromStore(store)
            module.gpu_side = DeviceExperts.load(
                lambda expert, layer=layer, source=source: source.expert(layer, expert),
                ids=module.place.gpu,
                experts=module.place.experts,
                dtype=torch.float32,
                device=torch.device("cpu"),
                gate=silu_gate,
            )
        assert relative(logits(network_.model), expected) <= SIXTEEN_BITS


def random_layer(
    ids: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[DeviceExperts, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(8, 2 * BLOCK, BLOCK, generator=generator) / 8
    down = torch.randn(8, BLOCK, BLOCK, generator=generator) / 8
    held = list(ids)
    experts = DeviceExperts(
        gate_up[held].to(dtype),
        down[held].to(dtype),
        ids=held,
        experts=8,
        gate=silu_gate,
    )
    return experts, gate_up, down


def by_the_formula(
    gate_up: torch.Tensor, down: torch.Tensor, held: Sequence[int], hidden: torch.Tensor, index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    out = torch.zeros_like(hidden)
    for token, row in enumerate(index.tolist()):
        for choice, expert in enumerate(row):
            if expert in held:
                gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
                value = down[expert] @ (torch.nn.functional.silu(gate) * up)
                out[token] += weights[token, choice] * value
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.integers(0, 7), min_size=1),
    st.lists(st.lists(st.integers(-1, 8), min_size=3, max_size=3), max_size=9),
)
def test_torch_experts_follow_the_formula(held: set[int], choices: list[list[int]]) -> None:
    """Any tokens (none too), any choices, "no expert" (-1 or E) and experts of elsewhere among them."""
    experts, gate_up, down = random_layer(sorted(held))
    index = torch.tensor(choices, dtype=torch.int64).reshape(len(choices), 3)
    generator = torch.Generator().manual_seed(len(choices))
    hidden = torch.randn(len(choices), BLOCK, generator=generator)
    weights = torch.rand(len(choices), 3, generator=generator)
    found = experts.forward(hidden, index, weights)
    assert found.shape == hidden.shape and found.dtype == torch.float32
    assert torch.allclose(found, by_the_formula(gate_up, down, held, hidden, index, weights), atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3, 65, 130])
def test_padding_of_bfloat16_rows_leaves_no_trace(tokens: int) -> None:
    experts, _, _ = random_layer(range(8), torch.bfloat16)
    exact, gate_up, down = random_layer(range(8))
    hidden = torch.randn(tokens, BLOCK, generator=torch.Generator().manual_seed(1))
    index = torch.stack([torch.arange(tokens) % 8, torch.full((tokens,), 2)], dim=1)
    weights = torch.full((tokens, 2), 0.5)
    found = experts.forward(hidden.bfloat16(), index, weights)
    assert relative(found, exact.forward(hidden, index, weights)) < 0.02


def layer_of_two_sides(gpu: Sequence[int], store: Path, tiny: Path, counters: RouteCounters) -> HybridExperts:
    from ktplan.kernels import Pool
    from ktplan.runtime.cpu_experts import CpuExperts

    place = LayerExperts(layer=2, name="x", experts=16, gpu=tuple(gpu), gpu_device="cpu")
    source = open_source(tiny)
    side = None
    if gpu:
        side = DeviceExperts.load(
            lambda expert: source.expert(2, expert),
            ids=place.gpu,
            experts=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
            gate=silu_gate,
        )
    cpu = None
    if place.cpu:
        opened = ExpertStore.open(store)
        cpu = CpuExperts(opened, 2, ids=place.cpu, pool=Pool(1), activation_bits=16)
    return HybridExperts(place, gpu_side=side, cpu_side=cpu, counters=counters)


@pytest.mark.parametrize("gpu", [(), (0, 5, 9), tuple(range(16))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_token_one_token_and_no_expert(
    tiny: Path, store_of: Callable[..., Path], gpu: tuple[int, ...], dtype: torch.dtype
) -> None:
    module = layer_of_two_sides(gpu, store_of(tiny), tiny, RouteCounters())
    empty = module(
        torch.zeros(0, 256, dtype=dtype), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2, dtype=dtype)
    )
    assert empty.shape == (0, 256) and empty.dtype == dtype
    hidden = torch.randn(1, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    half = torch.full((1, 2), 0.5, dtype=dtype)
    both = module(hidden, torch.tensor([[5, 6]]), half)
    padded = module(hidden, torch.tensor([[5, 16]]), half) + module(hidden, torch.tensor([[16, 6]]), half)
    assert both.dtype == dtype
    assert relative(padded, both) < (1e-6 if dtype == torch.float32 else 0.02)
    nothing = module(hidden, torch.tensor([[16, 16]]), half)
    assert torch.equal(nothing, torch.zeros_like(hidden))


def test_routes_are_counted_by_phase(tiny: Path, store_of: Callable[..., Path]) -> None:
    counters = RouteCounters()
    module = layer_of_two_sides((0, 5, 9), store_of(tiny), tiny, counters)
    module(torch.zeros(2, 256), torch.tensor([[0, 1], [5, 9]]), torch.ones(2, 2))
    counters.phase = DECODE
    module(torch.zeros(1, 256), torch.tensor([[1, 2]]), torch.ones(1, 2))
    assert counters.totals() == {PREFILL: (3, 4), DECODE: (0, 2)}
    assert counters.hit_rate(PREFILL) == 0.75
    counters.clear()
    assert counters.hit_rate(PREFILL) is None


def test_a_gpu_that_is_not_there_is_stood_in_for_and_said(
    tiny: Path, hybrid: Callable[[str], Rules], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prepared = prepare(open_sources(tiny), rules=hybrid("0-3"))
    assert prepared.notes == ("no GPU found: torch on the CPU stands in for cuda:0",)
    assert prepared.dtype == torch.float32
    assert prepared.placement.bytes["cuda:0"] == 4 * 4 * 3 * 256 * 128 * 4
    with pytest.raises(DoesNotFit, match=r"1\.00 MiB"):
        check_memory(prepared, 2**20)
    assert check_memory(prepared, 2**30) is prepared


def test_stores_and_weights_of_another_model_are_refused(
    tiny: Path, family_checkpoint: Callable[..., Path], store_of: Callable[..., Path]
) -> None:
    with pytest.raises(BadInput, match="was made from"):
        open_sources(family_checkpoint("qwen3_moe"), store_of(tiny))


def test_what_is_held_is_reported(
    tiny: Path, store_of: Callable[..., Path], hybrid: Callable[[str], Rules]
) -> None:
    found = loaded(tiny, hybrid("0-3"), store_of(tiny))
    manifest = ExpertStore.open(store_of(tiny)).manifest
    assert found.bytes["store (mapped)"] == 4 * 12 * manifest.bytes_per_expert
    experts = 4 * 4 * 3 * 256 * 128 * 4
    dense = {
        tensor.data_ptr(): tensor.nbytes for tensor in (*found.model.parameters(), *found.model.buffers())
    }
    assert found.bytes["cpu"] == experts + sum(dense.values())
    assert not list(found.experts[0].parameters())


def test_threads_as_asked_or_as_many_as_the_matrices_can_use(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    model = loaded(tiny).model
    assert torch_threads(model, 3) == 3
    assert torch_threads(model, None) == 1  # its largest dense matrix has 256 KiB
    wide = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(1024, 1280, bias=False)])})
    assert torch_threads(wide, None) == 5
