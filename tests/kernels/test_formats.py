"""Every format of weights on every instruction set: the scalar kernels' bits, and right against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan import kernels
from ktplan.kernels import Activation, Pool
from ktplan.store.layout import pack, unpack

from .formats import (
    ACTIVATIONS,
    BF16,
    INTEGERS,
    Experts,
    Fill,
    Format,
    experts,
    in_torch,
    projection,
    same_bits,
)

ISAS = kernels.available_isas()
VECTOR_ISAS = [name for name in ISAS if name != "scalar"]
# tails of n-blocks (64 or 128 rows) and of k-blocks (3584 inputs, bfloat16 1792), from one step to several blocks
ROWS = st.sampled_from([32, 64, 96, 128, 160, 288])
COLUMNS = st.sampled_from([128, 256, 384, 1792, 1920, 3584, 3712, 4096])


def rows_of(random: np.random.Generator, tokens: int, columns: int) -> np.ndarray:
    """Ordinary rows among rows with every level at its limit, of zeros, tiny, huge, and not finite."""
    x = random.standard_normal((tokens, columns)).astype(np.float32)
    kinds = random.integers(0, 9, tokens)
    x[kinds == 1] = random.choice(np.array([-3, 3], np.float32), columns)
    x[kinds == 2] = 0
    x[kinds == 3] *= np.float32(1e-36)
    x[kinds == 4] *= np.float32(1e20)
    for kind, poison in ((5, np.nan), (6, np.inf), (7, -np.inf)):
        x[kinds == kind, random.integers(columns)] = poison
    x[kinds == 8, 1:] = 0
    return x


def project(x: np.ndarray, weights: Any, form: Format, activation_bits: int, isa: str) -> np.ndarray:
    bits, group = form
    rows = len(weights.dense)
    return kernels.project_rows(
        x, weights.packed, weights.scale, rows, bits, activation_bits, isa=isa, group=group
    )


@pytest.mark.parametrize("form", INTEGERS)
@pytest.mark.parametrize("activation_bits", [16, 8])
@settings(max_examples=20, deadline=None)
@given(
    rows=ROWS,
    columns=COLUMNS,
    tokens=st.integers(1, 17),
    fill=st.sampled_from(["random", "random", "lowest", "highest", "mixed"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_have_the_same_bits_on_every_instruction_set(
    form: Format, activation_bits: int, rows: int, columns: int, tokens: int, fill: Fill, seed: int
) -> None:
    random = np.random.default_rng(seed)
    weights = projection(random, rows, columns, form, fill)
    x = rows_of(random, tokens, columns)
    expected = project(x, weights, form, activation_bits, "scalar")
    assert np.isnan(expected).all(axis=1).tolist() == (~np.isfinite(x).all(axis=1)).tolist()
    for isa in VECTOR_ISAS:
        same_bits(project(x, weights, form, activation_bits, isa), expected, isa)


@pytest.mark.parametrize("form", INTEGERS)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("activation_bits", "bound"), [(16, 5e-5), (8, 2e-2)])
def test_products_equal_the_dequantized_weights_in_float64(
    form: Format, isa: str, activation_bits: int, bound: float
) -> None:
    random = np.random.default_rng(1)
    for rows, columns in ((160, 384), (96, 4096)):
        weights = projection(random, rows, columns, form)
        x = random.standard_normal((9, columns)).astype(np.float32)
        expected = x.astype(np.float64) @ weights.dense.T
        error = np.linalg.norm(project(x, weights, form, activation_bits, isa) - expected, axis=1)
        assert np.all(error < bound * np.linalg.norm(expected, axis=1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("activation_bits", "bound"), [(16, 1e-6), (8, 1e-6)])
def test_bfloat16_products_are_sums_in_float32(isa: str, activation_bits: int, bound: float) -> None:
    """Against float64, relative to the sum of the products' sizes; 8 bits mean inputs rounded to bfloat16."""
    random = np.random.default_rng(2)
    for rows, columns in ((32, 32), (160, 384), (96, 1824), (32, 3616)):
        weights = projection(random, rows, columns, BF16)
        x = random.standard_normal((9, columns)).astype(np.float32)
        inputs = x if activation_bits == 16 else kernels.round_bf16(x, isa="scalar")
        exact = inputs.astype(np.float64) @ weights.dense.T
        size = np.abs(inputs).astype(np.float64) @ np.abs(weights.dense).T
        # as two bfloat16 numbers an input keeps 16 bits
        own = bound if activation_bits == 8 else max(bound, 2.0**-17)
        assert np.all(np.abs(project(x, weights, BF16, activation_bits, isa) - exact) <= own * size)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation_bits", [16, 8])
def test_bfloat16_products_do_not_depend_on_the_batch(isa: str, activation_bits: int) -> None:
    random = np.random.default_rng(3)
    weights = projection(random, 96, 1824, BF16)
    x = random.standard_normal((17, 1824)).astype(np.float32)
    x[5, 100] = np.inf
    whole = project(x, weights, BF16, activation_bits, isa)
    assert np.isnan(whole[5]).all() and np.isfinite(np.delete(whole, 5, axis=0)).all()
    for count in (*range(1, 10), 16):
        same_bits(project(x[:count], weights, BF16, activation_bits, isa), whole[:count])


def test_bfloat16_weights_keep_denormals_and_infinities() -> None:
    """Widening is a shift: every weight counts, and one that is not finite spoils its own output only."""
    halves = np.zeros((32, 64), np.uint16)
    halves[0, :3] = 1, 0x8001, 3  # 2^-133 and multiples
    halves[1, 5] = 0x7F80
    halves[2, 6] = 0x7FC0
    x = np.ones((2, 64), np.float32)
    for isa in ISAS:
        if kernels.bf16_words(isa) == "AVX-512 BF16":
            continue  # vdpbf16ps takes denormals for zeros
        out = kernels.project_rows(x, pack(halves.view(np.int8), 8), None, 32, 16, 16, isa=isa)
        np.testing.assert_array_equal(out[:, 0], np.float32(3 * 2.0**-133))
        assert np.isinf(out[:, 1]).all() and np.isnan(out[:, 2]).all() and not out[:, 3:].any()


# --- whole layers ---


def expected_layer(layer: Experts, activation: Activation, call: tuple[np.ndarray, ...]) -> np.ndarray:
    """torch's functions in float64."""
    import torch

    out = np.zeros(call[0].shape)
    x = torch.from_numpy(call[0]).double()
    for token, chosen in enumerate(call[1]):
        for place, expert in enumerate(chosen):
            gate, up, down, gate_bias, up_bias, down_bias = map(torch.from_numpy, layer.dense[expert])
            product = in_torch(activation, gate @ x[token] + gate_bias, up @ x[token] + up_bias)
            out[token] += call[2][token, place] * (down @ product + down_bias).numpy()
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("form", [*INTEGERS, BF16], ids=str)
def test_layers_equal_torch_in_float64(form: Format, activation: Activation) -> None:
    """Biases, limits and every activation; the same bits on every instruction set where weights are whole numbers."""
    some = experts(3, 384, 256, form)
    call = some.routed(11)
    expected = expected_layer(some, activation, call)
    scalar = some.layer(isa="scalar", activation=activation, threads_pool=Pool(1)).forward(*call)
    for isa in ISAS:
        out = some.layer(isa=isa, activation=activation, threads_pool=Pool(2)).forward(*call)
        assert np.linalg.norm(out - expected) < 1e-4 * np.linalg.norm(expected), isa
        if form != BF16:
            same_bits(out, scalar, isa)


@pytest.mark.parametrize("form", INTEGERS, ids=str)
def test_layers_with_8_bit_activations_have_the_same_bits(form: Format) -> None:
    some = experts(3, 384, 256, form)
    call = some.routed(40)
    expected = expected_layer(some, Activation(), call)
    scalar = some.layer(isa="scalar", activation_bits=8, threads_pool=Pool(1)).forward(*call)
    assert np.linalg.norm(scalar - expected) < 3e-2 * np.linalg.norm(expected)
    for isa in VECTOR_ISAS:
        same_bits(some.layer(isa=isa, activation_bits=8, threads_pool=Pool(1)).forward(*call), scalar, isa)


def without_columns(packed: np.ndarray, rows: int, columns: int, bits: int, first: int) -> np.ndarray:
    """Zeros in place of the columns from `first` on."""
    wide, width = (8, 2) if bits == 16 else (bits, 1)
    levels = unpack(packed, rows, columns * width, wide).copy()
    levels[:, first * width :] = 0
    return pack(levels, wide)


@pytest.mark.parametrize("form", [*INTEGERS, BF16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_padding_adds_nothing(form: Format, activation: Activation) -> None:
    """Rows of zeros in gate and up make products of exactly zero, whatever down holds in those columns; rows of zeros
    in down make outputs of exactly zero."""
    padding = 40
    some = experts(2, 256, 256, form, padding=padding)
    call = some.routed(3)
    cut, silent = [], []
    for expert in some.packed:
        down = without_columns(expert.down, 256, 256, form[0], 256 - padding)
        assert not np.array_equal(down, expert.down)
        cut.append(expert._replace(down=down))
        nothing = projection(np.random.default_rng(9), 256, 256, form, padding=256)
        silent.append(expert._replace(down=nothing.packed, down_scale=nothing.scale, down_bias=None))
    for isa in ISAS:
        how = {"isa": isa, "activation": activation, "threads_pool": Pool(1)}
        same_bits(
            replace(some, packed=cut).layer(**how).forward(*call), some.layer(**how).forward(*call), isa
        )
        np.testing.assert_array_equal(replace(some, packed=silent).layer(**how).forward(*call), 0)
