"""The native engine: exact integers, the same bits on every instruction set, right against numpy and kt-kernel."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from ktplan import kernels
from ktplan.errors import BadInput, BadUsage, MachineLacks
from ktplan.kernels import ExpertLayer, PackedExpert, Pool
from ktplan.quant import Scheme, dequantize, quantize_rows
from ktplan.store.layout import pack

ISAS = kernels.available_isas()
GOLDEN = Path(__file__).parents[1] / "golden"


def _recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_recipe_kernels", GOLDEN / "recipe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


recipe = _recipe()


def random_levels(random: np.random.Generator, rows: int, columns: int, bits: int) -> np.ndarray:
    top = 127 if bits == 8 else 7
    return random.integers(-top, top + 1, (rows, columns)).astype(np.int8)


class Experts:
    """Some random experts: packed for the engine, dequantized for numpy."""

    def __init__(self, count: int, hidden: int, inner: int, bits: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.hidden, self.inner, self.bits = hidden, inner, bits
        self.packed: list[PackedExpert] = []
        self.plain: list[tuple[np.ndarray, ...]] = []
        for _ in range(count):
            arrays: list[Any] = []
            plain = []
            for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner)):
                weights = random.standard_normal((rows, columns)).astype(np.float32) / np.float32(
                    np.sqrt(columns)
                )
                quantized = quantize_rows(weights, Scheme(bits, rounding="mse"))
                arrays += [pack(quantized.levels, bits), quantized.scale]
                plain.append(dequantize(quantized))
            self.packed.append(PackedExpert(*arrays))
            self.plain.append(tuple(plain))

    def layer(self, **how: Any) -> ExpertLayer:
        return ExpertLayer([self.packed], hidden=self.hidden, intermediate=self.inner, bits=self.bits, **how)

    def expected(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        out = np.zeros(x.shape, np.float64)
        for token, chosen in enumerate(ids):
            for place, expert in enumerate(chosen):
                if 0 <= expert < len(self.plain):
                    gate, up, down = (matrix.astype(np.float64) for matrix in self.plain[expert])
                    g, u = gate @ x[token].astype(np.float64), up @ x[token].astype(np.float64)
                    out[token] += weights[token, place] * (down @ (g / (1 + np.exp(-g)) * u))
        return out

    def routed(self, tokens: int, top_k: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        x = random.standard_normal((tokens, self.hidden)).astype(np.float32)
        ids = np.argsort(random.random((tokens, len(self.packed))), axis=1)[:, :top_k].astype(np.int64)
        return x, ids, random.random((tokens, top_k)).astype(np.float32)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("activation_bits", [16, 8])
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 6).map(lambda n: 32 * n),
    steps=st.sampled_from([1, 2, 3, 5, 28, 29]),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_integer_products_are_exact_on_every_instruction_set(
    bits: int, activation_bits: int, rows: int, steps: int, tokens: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    levels = random_levels(random, rows, steps * 128, bits)
    x = (random.standard_normal((tokens, steps * 128)) * 10.0 ** random.integers(-3, 4)).astype(np.float32)
    weight = levels.astype(np.int64) * (16 if bits == 4 else 1)
    for isa in ISAS:
        activations, _ = kernels.quantize_rows(x, activation_bits, isa=isa)
        exact = activations.astype(np.int64) @ weight.T
        dots = kernels.dot_products(x, pack(levels, bits), rows, bits, activation_bits, isa=isa)
        np.testing.assert_array_equal(dots, exact, err_msg=isa)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize("columns", [18432, 65536])
def test_the_largest_sums_do_not_overflow(bits: int, activation_bits: int, columns: int) -> None:
    """Every level and every activation at its extreme, over the widest K of today's models and of the layout."""
    top = 127 if bits == 8 else 7
    levels = np.full((32, columns), top, np.int8)
    levels[1::2] = -top
    levels[::4] = -top - 1
    x = np.ones((3, columns), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    for isa in ISAS:
        activations, _ = kernels.quantize_rows(x, activation_bits, isa=isa)
        exact = activations.astype(np.int64) @ (levels.astype(np.int64) * (16 if bits == 4 else 1)).T
        dots = kernels.dot_products(x, pack(levels, bits), 32, bits, activation_bits, isa=isa)
        np.testing.assert_array_equal(dots, exact, err_msg=isa)


@pytest.mark.parametrize("isa", ISAS)
def test_activations_of_16_bits_lose_next_to_nothing(isa: str) -> None:
    x = np.random.default_rng(3).standard_normal((5, 512)).astype(np.float32)
    for bits, bound in ((16, 2**-15), (8, 2**-7)):
        levels, scale = kernels.quantize_rows(x, bits, isa=isa)
        error = np.abs(levels * scale[:, None].astype(np.float64) - x).max(axis=1)
        assert np.all(error <= np.abs(x).max(axis=1) * bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("activation_bits", "bound"), [(16, 2e-4), (8, 2e-2)])
def test_a_layer_equals_numpy_on_the_dequantized_weights(
    isa: str, bits: int, activation_bits: int, bound: float
) -> None:
    experts = Experts(6, 256, 128, bits)
    layer = experts.layer(isa=isa, activation_bits=activation_bits)
    for tokens in (1, 2, 5, 17, 40):
        routed = experts.routed(tokens, 3)
        expected = experts.expected(*routed)
        error = np.linalg.norm(layer.forward(*routed) - expected) / np.linalg.norm(expected)
        assert error < bound, (tokens, error)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (384, 256), (3840, 128)])
def test_outputs_are_the_same_bits_everywhere(
    bits: int, activation_bits: int, hidden: int, inner: int
) -> None:
    """On every instruction set, for any number of threads, whatever other tokens are in the batch."""
    experts = Experts(5, hidden, inner, bits)
    x, ids, weights = experts.routed(33, 2)
    reference = experts.layer(isa="scalar", activation_bits=activation_bits, threads_pool=Pool(1)).forward(
        x, ids, weights
    )
    for isa in ISAS:
        for threads in (1, 2, 3):
            layer = experts.layer(isa=isa, activation_bits=activation_bits, threads_pool=Pool(threads))
            np.testing.assert_array_equal(
                layer.forward(x, ids, weights), reference, err_msg=f"{isa} {threads}"
            )
        for token in (0, 13, 32):
            one = slice(token, token + 1)
            np.testing.assert_array_equal(layer.forward(x[one], ids[one], weights[one]), reference[one])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("case", ["base", "numa2"])
@pytest.mark.parametrize("isa", ISAS)
def test_kt_kernels_own_bytes_give_kt_kernels_own_outputs(case: str, kind: str, isa: str) -> None:
    """Within one bfloat16 step of what kt-kernel 0.7.2 computed from the same files and tokens."""
    import torch

    sizes = recipe.CASES[case]
    stored = load_file(GOLDEN / "kt-kernel-0.7.2" / f"{case}.{kind}.safetensors")
    parts = [
        [
            PackedExpert(
                *(
                    stored[f"blk.0.ffn_{projection}_exps.{expert}.numa.{part}.{what}"]
                    for projection in ("gate", "up", "down")
                    for what in ("weight", "scale")
                )
            )
            for expert in range(sizes.experts)
        ]
        for part in range(sizes.parts)
    ]
    layer = ExpertLayer(
        parts, hidden=sizes.hidden, intermediate=sizes.intermediate, bits=int(kind[3:]), isa=isa, activation_bits=8,
        numerics="upstream",
    )  # fmt: skip
    with safe_open(GOLDEN / "kt-kernel-0.7.2" / "forward.safetensors", "pt") as file:
        for tokens in (1, 4, 40):
            x, ids, weights = recipe.tokens(case, tokens)
            theirs = file.get_tensor(f"{case}.{kind.upper()}.q{tokens}.amx").view(torch.int16)
            ours = kernels.round_bf16(layer.forward(x, ids, weights), isa=isa)
            step = np.abs(ordered(recipe.bf16_bits(ours)) - ordered(theirs.numpy().view(np.uint16)))
            assert step.max() <= 1, (tokens, step.max(), (step > 0).mean())


def ordered(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns as integers in the order of their values."""
    signed = bits.astype(np.int32)
    return np.where(signed & 0x8000, 0x8000 - signed, signed)


def test_numa_parts_add_up_to_the_whole() -> None:
    experts = Experts(3, 256, 256, 8)
    halves = []
    for part in range(2):
        rows = slice(128 * part, 128 * (part + 1))
        held = []
        for gate, up, down in experts.plain:
            arrays: list[Any] = []
            for matrix in (gate[rows], up[rows], np.ascontiguousarray(down[:, rows])):
                quantized = quantize_rows(matrix, Scheme(8, rounding="kt"))
                arrays += [pack(quantized.levels, 8), quantized.scale]
            held.append(PackedExpert(*arrays))
        halves.append(held)
    split = ExpertLayer(halves, hidden=256, intermediate=256, bits=8)
    routed = experts.routed(7, 2)
    expected = experts.expected(*routed)
    assert np.linalg.norm(split.forward(*routed) - expected) / np.linalg.norm(expected) < 0.02


def test_bfloat16_inputs_are_taken_as_they_are() -> None:
    import torch

    experts = Experts(4, 256, 128, 8)
    x, ids, weights = experts.routed(6, 2)
    bits = recipe.bf16_bits(x)
    rounded = recipe.bf16_values(bits)
    expected = experts.layer().forward(rounded, ids, weights)
    np.testing.assert_array_equal(experts.layer().forward(bits, ids, weights), expected)
    tensor = torch.from_numpy(rounded).to(torch.bfloat16)
    np.testing.assert_array_equal(
        experts.layer().forward(tensor, torch.from_numpy(ids), torch.from_numpy(weights)), expected
    )


class TestRouting:
    experts = Experts(4, 256, 128, 8)

    def test_no_tokens_give_no_rows(self) -> None:
        x, ids, weights = self.experts.routed(0, 2)
        assert self.experts.layer().forward(x, ids, weights).shape == (0, 256)

    def test_ids_that_name_no_expert_contribute_nothing(self) -> None:
        x, ids, weights = self.experts.routed(3, 2)
        ids[0], ids[1, 0] = (-1, 4), 2**40
        out = self.experts.layer().forward(x, ids, weights)
        assert not out[0].any()
        np.testing.assert_allclose(out, self.experts.expected(x, ids, weights), atol=5e-4)

    def test_absent_experts_contribute_nothing(self) -> None:
        held: list[PackedExpert | None] = [*self.experts.packed]
        held[2] = None
        layer = ExpertLayer([held], hidden=256, intermediate=128, bits=8)
        x, ids, weights = self.experts.routed(8, 2)
        np.testing.assert_array_equal(
            layer.forward(x, ids, weights),
            self.experts.layer().forward(x, np.where(ids == 2, -1, ids), weights),
        )

    def test_all_tokens_may_choose_one_expert(self) -> None:
        x, _, weights = self.experts.routed(50, 1)
        ids = np.full((50, 1), 3, np.int64)
        expected = self.experts.expected(x, ids, weights)
        np.testing.assert_allclose(self.experts.layer().forward(x, ids, weights), expected, atol=1e-3)

    def test_a_weight_of_zero_counts_for_nothing(self) -> None:
        x, ids, weights = self.experts.routed(4, 2)
        weights[:] = 0
        assert not self.experts.layer().forward(x, ids, weights).any()

    @pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_stays_in_its_own_token(self, poison: float) -> None:
        x, ids, weights = self.experts.routed(5, 2)
        clean = self.experts.layer().forward(x, ids, weights)
        x[2, 17] = poison
        out = self.experts.layer().forward(x, ids, weights)
        assert np.isnan(out[2]).all()
        others = [0, 1, 3, 4]
        np.testing.assert_array_equal(out[others], clean[others])


class TestArguments:
    experts = Experts(2, 256, 128, 8)

    def test_packed_arrays_of_another_size_are_refused(self) -> None:
        short = self.experts.packed[0]._replace(up=self.experts.packed[0].up[:-1])
        with pytest.raises(BadInput, match="expert 0, part 0: up has shape"):
            ExpertLayer([[short]], hidden=256, intermediate=128, bits=8)

    @pytest.mark.parametrize("how", [{"bits": 5}, {"activation_bits": 4}, {"numerics": "upstream"}])
    def test_settings_that_do_not_exist_are_refused(self, how: dict[str, Any]) -> None:
        arguments: dict[str, Any] = {"hidden": 256, "intermediate": 128, "bits": 8, **how}
        with pytest.raises(BadUsage):
            ExpertLayer([self.experts.packed], **arguments)

    def test_an_instruction_set_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(MachineLacks, match="'mmx' is not in this build"):
            self.experts.layer(isa="mmx")


def test_submitted_work_is_the_same_work() -> None:
    experts = Experts(4, 256, 128, 4)
    layers = [experts.layer(), Experts(4, 256, 128, 4, seed=9).layer()]
    routed = experts.routed(9, 2)
    expected = [layer.forward(*routed) for layer in layers]
    pending = [layer.submit(*routed) for layer in layers for _ in range(5)]
    for number, job in enumerate(pending):
        np.testing.assert_array_equal(job.result(), expected[number // 5])


def test_many_callers_may_share_a_pool() -> None:
    from concurrent.futures import ThreadPoolExecutor

    experts = Experts(4, 256, 128, 8)
    pool = Pool(2)
    layers = [experts.layer(threads_pool=pool) for _ in range(4)]
    routed = experts.routed(11, 2)
    expected = layers[0].forward(*routed)
    with ThreadPoolExecutor(4) as callers:
        for result in callers.map(lambda layer: layer.forward(*routed), layers * 8):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_lowers_the_instruction_set(isa: str) -> None:
    show = "from ktplan import kernels; print(kernels.isa().value)"
    env = {**os.environ, "KTPLAN_ISA": isa}
    assert (
        subprocess.run([sys.executable, "-c", show], env=env, capture_output=True, text=True).stdout.strip()
        == isa
    )


def test_importing_leaves_the_floating_point_state_alone() -> None:
    """Some engines flush denormals for the whole process when they are imported."""
    show = "import ktplan.kernels, numpy as np; print(np.float32(1e-40) * np.float32(1) != 0)"
    assert (
        subprocess.run([sys.executable, "-c", show], capture_output=True, text=True).stdout.strip() == "True"
    )


def test_a_forked_child_computes_or_says_why_not() -> None:
    show = """
import os, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
sys.path.insert(0, {folder!r})
import importlib.util
spec = importlib.util.spec_from_file_location("t", {file!r}); t = importlib.util.module_from_spec(spec)
sys.modules["t"] = t; spec.loader.exec_module(t)
experts = t.Experts(2, 256, 128, 8); layer = experts.layer(threads_pool=t.Pool(2)); routed = experts.routed(4, 2)
whole = layer.forward(*routed)
child = os.fork()
if child == 0:
    try:
        same = np.array_equal(layer.forward(*routed), whole)
        os._exit(0 if same else 3)
    except RuntimeError:
        os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    code = show.format(folder=str(Path(__file__).parent), file=__file__)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0", done.stderr
