"""The float steps around the integer products: right, and the same bits on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan import kernels
from ktplan.kernels import Activation

from .formats import ACTIVATIONS, in_torch, same_bits

ISAS = kernels.available_isas()
LIMIT = {8: 127, 16: 32639}

patterns = st.integers(0, 2**32 - 1)


def floats(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)[None]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@settings(max_examples=40, deadline=None)
@given(gate=st.lists(patterns, min_size=32, max_size=32), up=st.lists(patterns, min_size=32, max_size=32))
def test_activations_are_the_same_bits_for_any_floats(
    activation: Activation, gate: list[int], up: list[int]
) -> None:
    """NaN, infinities, denormals and both zeros included."""
    reference = kernels.activate(floats(gate), floats(up), isa="scalar", activation=activation)
    for isa in ISAS:
        same_bits(kernels.activate(floats(gate), floats(up), isa=isa, activation=activation), reference, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_are_torchs_in_float64(isa: str, activation: Activation) -> None:
    """Within a few units in the last place of the larger of 1 and the gate; GELU's error function is good to 1.5e-7."""
    import torch

    gate = np.linspace(-30, 30, 16 * 4096, dtype=np.float32)[None]
    up = np.random.default_rng(4).uniform(-3, 3, gate.shape).astype(np.float32)
    exact = in_torch(activation, *(torch.from_numpy(x).double() for x in (gate, up))).numpy()
    ours = kernels.activate(gate, up, isa=isa, activation=activation)
    assert np.all(np.abs(ours - exact) <= 3e-7 * np.maximum(1, np.abs(gate)) * (1 + np.abs(up)))


@pytest.mark.parametrize("isa", ISAS)
def test_swiglu_is_accurate_over_the_whole_range(isa: str) -> None:
    gate = np.linspace(-86, 87, 16 * 4096, dtype=np.float32)[None]
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    ours = kernels.activate(gate, np.ones_like(gate), isa=isa)
    np.testing.assert_allclose(ours, exact, rtol=4e-7)


@pytest.mark.parametrize("isa", ISAS)
def test_swiglu_far_out_is_the_gate_or_nothing(isa: str) -> None:
    gate = np.zeros((1, 16), np.float32)
    gate[0, :5] = [200, -200, np.inf, 3e38, -3e38]
    ours = kernels.activate(gate, np.ones_like(gate), isa=isa)
    assert ours[0, 0] == 200 and ours[0, 2] == np.inf and ours[0, 3] == np.float32(3e38)
    assert abs(ours[0, 1]) < 1e-35 and abs(ours[0, 4]) < 10


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(patterns, min_size=32, max_size=32))
def test_rounding_to_bfloat16_is_to_nearest_even(bits: list[int]) -> None:
    x = floats(bits)
    word = np.array(bits, np.uint64)
    rounded = ((word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)[None]
    for isa in ISAS:
        ours = kernels.round_bf16(x, isa=isa)
        same_bits(ours, np.where(np.isnan(x), x, rounded))


@pytest.mark.parametrize("bits", [8, 16])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), power=st.floats(-95, 120), columns=st.sampled_from([64, 128, 320]))
def test_levels_are_the_nearest_and_the_same_everywhere(
    bits: int, seed: int, power: float, columns: int
) -> None:
    x = np.random.default_rng(seed).standard_normal((3, columns)).astype(np.float32) * np.float32(2.0**power)
    levels, scale = kernels.quantize_rows(x, bits, isa="scalar")
    amax = np.abs(x).max(axis=1)
    np.testing.assert_array_equal(scale, amax / np.float32(LIMIT[bits]))
    np.testing.assert_array_equal(np.abs(levels).max(axis=1), LIMIT[bits])
    exact = x.astype(np.float64) / amax[:, None].astype(np.float64) * LIMIT[bits]
    assert np.abs(levels - exact).max() <= 0.5 + 2**-7  # the factor is a float32
    for isa in ISAS:
        others, scales = kernels.quantize_rows(x, bits, isa=isa)
        np.testing.assert_array_equal(others, levels, err_msg=isa)
        np.testing.assert_array_equal(scales, scale, err_msg=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [8, 16])
def test_rows_without_a_usable_size_have_no_levels(isa: str, bits: int) -> None:
    x = np.zeros((5, 64), np.float32)
    x[1] = 1e-40  # far below anything a model computes; its reciprocal is infinite
    x[2, 3] = np.nan
    x[3, 63] = -np.inf
    x[4] = -0.0
    levels, scale = kernels.quantize_rows(x, bits, isa=isa)
    assert not levels.any()
    np.testing.assert_array_equal(scale, [0, 0, np.nan, np.nan, 0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_every_byte_is_a_legal_weight(isa: str, activation_bits: int) -> None:
    """Also -128 and the nibble -8, which no rounding of ours writes."""
    from ktplan.store.layout import unpack

    random = np.random.default_rng(5)
    x = random.standard_normal((7, 256)).astype(np.float32)
    levels, _ = kernels.quantize_rows(x, activation_bits, isa=isa)
    for bits, factor in ((8, 1), (4, 16)):
        packed = random.integers(0, 256, 96 * 256 * bits // 8, np.uint8)
        weights = unpack(packed, 96, 256, bits).astype(np.int64) * factor
        assert weights.min() == -128
        dots = kernels.dot_products(x, packed, 96, bits, activation_bits, isa=isa)
        np.testing.assert_array_equal(dots, levels.astype(np.int64) @ weights.T)
