"""Groups of 4-bit levels with bfloat16 scales, and bfloat16: the specification, and native code with its bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan.kernels import PackTask, Pool, available_isas, pack_weights
from ktplan.quant import (
    Bfloat16Rows,
    QuantizedGroups,
    dequantize_stored,
    quantize_groups,
    squared_error_stored,
)
from ktplan.quant.groups import narrow, offsets_of, tries, widen
from ktplan.quant.rounding import multipliers
from ktplan.store.layout import pack, pack_scales, packed_bytes

from .test_native_rounding import as_bf16, odd_rows

ISAS = available_isas()
GROUPS = (32, 64, 128)
MEANINGS = pytest.mark.parametrize("offsets", [False, True], ids=["plain", "offsets"])


def odd_groups(rows: int, columns: int, seed: int) -> np.ndarray:
    """`odd_rows`, with groups near both ends of float32, of one sign, and of one value in both signs."""
    matrix = odd_rows(rows, columns, seed)
    matrix[11, ::2] = np.finfo(np.float32).max
    matrix[12, 1::3] = -np.finfo(np.float32).max
    matrix[13] = np.abs(matrix[13])
    matrix[14] = -np.abs(matrix[14])
    matrix[15] = np.where(np.arange(columns) % 2, np.float32(0.25), np.float32(-0.25))
    matrix[16] = np.float32(2.0**-120)
    matrix[17] = np.float32(-(2.0**-121))
    matrix[18] = -0.0
    matrix[19, :32] = 0
    return matrix


def native_groups(
    matrix: np.ndarray, group: int, offsets: bool, isa: str, threads: int = 2
) -> tuple[bytes, bytes, tuple[bool, float, float]]:
    rows, columns = matrix.shape
    packed = np.full(packed_bytes(rows, columns, 4), 0xAA, np.uint8)
    task = PackTask(matrix, packed, np.full(rows * columns // group, 0xAAAA, np.uint16))
    (outcome,) = pack_weights(
        [task], 4, "mse", multipliers(7), group=group, offsets=offsets, tries=tries(offsets),
        pool=Pool(threads, spin_us=0), isa=isa,
    )  # fmt: skip
    return task.packed.tobytes(), task.scale.tobytes(), outcome


def specified_groups(
    matrix: np.ndarray, group: int, offsets: bool
) -> tuple[bytes, bytes, tuple[bool, float, float]]:
    rows = quantize_groups(matrix, group, offsets=offsets)
    return (
        pack(rows.levels, 4).tobytes(),
        pack_scales(rows.scale).tobytes(),
        (True, *squared_error_stored(matrix, rows)),
    )


def native_bfloat16(matrix: np.ndarray, isa: str) -> tuple[bytes, tuple[bool, float, float]]:
    task = PackTask(matrix, np.full(2 * matrix.size, 0xAA, np.uint8), np.empty(0, np.float32))
    (outcome,) = pack_weights([task], 16, "mse", multipliers(0), pool=Pool(2, spin_us=0), isa=isa)
    return task.packed.tobytes(), outcome


@pytest.mark.parametrize("isa", ISAS)
@MEANINGS
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", [(32, 128), (96, 384), (160, 3712)], ids=str)
def test_every_instruction_set_gives_the_specified_groups(
    shape: tuple[int, int], group: int, offsets: bool, isa: str
) -> None:
    matrix = odd_groups(*shape, seed=shape[1])
    assert native_groups(matrix, group, offsets, isa) == specified_groups(matrix, group, offsets)
    bits, values = as_bf16(matrix)
    assert native_groups(bits, group, offsets, isa) == specified_groups(values, group, offsets)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(32, 32), (96, 416), (160, 1824)], ids=str)
def test_every_instruction_set_gives_the_nearest_bfloat16(shape: tuple[int, int], isa: str) -> None:
    matrix = odd_groups(*shape, seed=shape[1])
    rows = Bfloat16Rows(narrow(matrix))
    error = squared_error_stored(matrix, rows)
    assert native_bfloat16(matrix, isa) == (pack(rows.bits, 16).tobytes(), (True, *error))
    assert 0 < error[0] < 2.0**-16 * error[1]
    bits, values = as_bf16(matrix)
    energy = squared_error_stored(values, Bfloat16Rows(bits))[1]
    assert native_bfloat16(bits, isa) == (pack(bits, 16).tobytes(), (True, 0.0, energy))


@MEANINGS
def test_the_largest_float32_becomes_no_infinity(offsets: bool) -> None:
    matrix = np.full((1, 32), np.finfo(np.float32).max, np.float32)
    assert widen(narrow(matrix)).max() == np.float32(3.3895314e38)
    for sign in (1, -1):
        found = dequantize_stored(quantize_groups(sign * matrix, 32, offsets=offsets))
        assert np.isfinite(found).all() and np.abs(found / matrix - sign).max() < (0.03 if offsets else 0.01)


@pytest.mark.parametrize("isa", ISAS)
def test_the_columns_of_a_part_and_threads_change_nothing(isa: str) -> None:
    whole = odd_groups(64, 640, seed=1)
    for group, offsets in itertools.product(GROUPS, (False, True)):
        part = native_groups(whole[:, 128:384], group, offsets, isa)
        assert part == native_groups(whole[:, 128:384].copy(), group, offsets, isa, threads=5)
    assert native_bfloat16(whole[:, 32:128], isa) == native_bfloat16(whole[:, 32:128].copy(), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_told(isa: str, value: float) -> None:
    matrix = odd_groups(64, 128, seed=3)
    matrix[37, 101] = value
    for form in (matrix, as_bf16(matrix)[0]):
        assert not native_groups(form, 32, True, isa)[2][0]
        assert not native_bfloat16(form, isa)[1][0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(GROUPS),
    st.booleans(),
    st.sampled_from(ISAS),
    st.integers(0, 2**32 - 1),
)
def test_whatever_the_values_the_bytes_are_the_specified_ones(
    values: list[float], group: int, offsets: bool, isa: str, seed: int
) -> None:
    matrix = np.random.default_rng(seed).choice(np.array(values, np.float32), (32, 128))
    assert native_groups(matrix, group, offsets, isa) == specified_groups(matrix, group, offsets)
    bits, wide = as_bf16(matrix)
    assert native_groups(bits, group, offsets, isa) == specified_groups(wide, group, offsets)
    rows = Bfloat16Rows(narrow(matrix))
    assert native_bfloat16(matrix, isa) == (
        pack(rows.bits, 16).tobytes(),
        (True, *squared_error_stored(matrix, rows)),
    )


def best_error(weights: np.ndarray, group: int, offsets: bool) -> float:
    """Relative error with the best of many bfloat16 scales of both signs, tried one by one, in float64.

    Of plain scales nearly all; with offsets each of them, on the nearest scale that means it.
    """
    groups = weights.reshape(-1, group).astype(np.float64)
    largest = np.abs(groups).max(axis=1)
    least = np.full(len(groups), np.inf)
    for reach in np.geomspace(3, 12, 300 if offsets else 450):
        for sign in (1, -1):
            near = narrow((sign * largest / reach).astype(np.float32))
            for code in range(4) if offsets else [None]:
                bits = near if code is None else (near & np.uint16(0xFFFC)) | np.uint16(code)
                scale, offset = widen(bits).astype(np.float64)[:, None], 0 if code is None else (code + 1) / 2
                levels = np.clip(np.rint(groups / scale - offset), -8, 7) + offset
                least = np.minimum(least, np.square(groups - levels * scale).sum(axis=1))
    return float(np.sqrt(least.sum() / np.square(groups).sum()))


@MEANINGS
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", ["bell-shaped", "heavy tails", "outliers"])
def test_the_search_comes_near_the_best_there_is(kind: str, group: int, offsets: bool) -> None:
    random = np.random.default_rng(7)
    weights = random.standard_normal((64, 1024)).astype(np.float32)
    if kind == "heavy tails":
        weights = random.standard_t(5, weights.shape).astype(np.float32)
    elif kind == "outliers":
        weights[random.random(weights.shape) < 0.001] *= 10
    error, energy = squared_error_stored(weights, quantize_groups(weights, group, offsets=offsets))
    found, best = (error / energy) ** 0.5, best_error(weights, group, offsets)
    assert best * (1 - (1e-3 if offsets else 1e-6)) <= found < (1.04 if offsets else 1.02) * best
    if kind == "bell-shaped":
        bounds = {32: 0.076, 64: 0.086, 128: 0.096} if offsets else {32: 0.082, 64: 0.091, 128: 0.099}
        assert found < bounds[group]


def test_errors_are_those_of_the_weights_that_are_stored() -> None:
    weights = np.random.default_rng(1).standard_normal((32, 256)).astype(np.float32)
    for rows in (
        quantize_groups(weights, 64, offsets=False),
        quantize_groups(weights, 64, offsets=True),
        Bfloat16Rows(narrow(weights)),
    ):
        rest = dequantize_stored(rows).astype(np.float64) - weights
        error, energy = squared_error_stored(weights, rows)
        assert error == pytest.approx(float(np.square(rest).sum()), rel=1e-5)
        assert energy == pytest.approx(float(np.square(weights.astype(np.float64)).sum()), rel=1e-6)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("low", [-8, -7])
def test_weights_that_were_4_bit_groups_before_are_kept_exactly(low: int, group: int) -> None:
    random = np.random.default_rng(5)
    levels = random.integers(low, 8, (32, 256), dtype=np.int8)
    levels[:, ::group] = low  # each group uses the whole range, as quantizers see to
    scale = narrow((random.standard_normal((32, 256 // group)) * 0.02).astype(np.float32))
    weights = dequantize_stored(QuantizedGroups(levels, scale, group, False))
    rows = quantize_groups(weights, group, offsets=False)
    assert np.array_equal(dequantize_stored(rows), weights)
    assert squared_error_stored(weights, rows)[0] == 0


def test_scales_have_both_signs_so_that_the_largest_weight_can_sit_at_minus_eight() -> None:
    weights = np.random.default_rng(2).standard_normal((32, 256)).astype(np.float32)
    rows = quantize_groups(weights, 32, offsets=False)
    largest = np.take_along_axis(
        weights.reshape(-1, 32), np.abs(weights).reshape(-1, 32).argmax(axis=1)[:, None], axis=1
    )
    assert (np.sign(widen(rows.scale)).reshape(-1, 1) == -np.sign(largest)).all()
    assert rows.levels.min() == -8 and rows.levels.max() == 7


def test_with_offsets_the_range_of_levels_follows_the_weights() -> None:
    weights = np.random.default_rng(2).standard_normal((32, 256)).astype(np.float32)
    weights[:8, ::32] = 6
    weights[8:16, ::32] = -6
    rows = quantize_groups(weights, 32, offsets=True)
    assert (offsets_of(rows.scale)[:16] >= 1.5).all() and (widen(rows.scale)[:8] > 0).all()
    assert (widen(rows.scale)[8:16] < 0).all() and set(np.unique(offsets_of(rows.scale)[16:])) == {
        0.5,
        1,
        1.5,
        2,
    }
    assert rows.levels.min() == -8 and rows.levels.max() == 7


def test_wrong_groups_and_scales_are_refused_by_name() -> None:
    matrix, packed = np.zeros((32, 128), np.float32), np.zeros(32 * 64, np.uint8)
    scale = np.zeros(32 * 4, np.uint16)
    for task, group, words in (
        (PackTask(matrix, packed, scale), 16, "32, 64 or 128"),
        (PackTask(matrix, packed, scale[1:]), 32, "scale"),
        (PackTask(matrix, packed, scale.astype(np.float32)), 32, "scale"),
        (PackTask(matrix[:, :64].copy(), packed[:1024], scale[:64]), 32, "128 columns"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            pack_weights([task], 4, "mse", multipliers(7), group=group, tries=tries(offsets=False))
    with pytest.raises(ValueError, match="tries"):
        pack_weights([PackTask(matrix, packed, scale)], 4, "mse", multipliers(7), group=32)
    with pytest.raises((TypeError, ValueError), match="scale"):
        pack_weights(
            [PackTask(matrix, np.zeros(8192, np.uint8), np.zeros(32, np.float32))], 16, "mse", multipliers(0)
        )
