"""The native quantizer gives the specification's bytes, on every instruction set and with any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan.kernels import PackTask, Pool, available_isas, pack_weights
from ktplan.quant import Scheme, quantize_rows, squared_error
from ktplan.quant.rounding import multipliers
from ktplan.store.layout import pack, packed_bytes

SCHEMES = [Scheme(8), Scheme(4), Scheme(2), Scheme(8, rounding="kt"), Scheme(4, rounding="kt")]
ISAS = available_isas()


def native(
    matrix: np.ndarray, scheme: Scheme, isa: str, threads: int = 2
) -> tuple[bytes, bytes, tuple[bool, float, float]]:
    rows, columns = matrix.shape
    task = PackTask(
        matrix,
        np.full(packed_bytes(rows, columns, scheme.bits), 0xAA, np.uint8),
        np.full(rows, np.nan, np.float32),
    )
    pool = Pool(threads, spin_us=0)
    (outcome,) = pack_weights(
        [task], scheme.bits, scheme.rounding, multipliers(scheme.top_level), pool=pool, isa=isa
    )
    return task.packed.tobytes(), task.scale.tobytes(), outcome


def specified(matrix: np.ndarray, scheme: Scheme) -> tuple[bytes, bytes, tuple[bool, float, float]]:
    rows = quantize_rows(matrix, scheme)
    return (
        pack(rows.levels, scheme.bits).tobytes(),
        rows.scale.tobytes(),
        (True, *squared_error(matrix, rows)),
    )


def as_bf16(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bit patterns, and the same values as float32."""
    bits = (matrix.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def odd_rows(rows: int, columns: int, seed: int) -> np.ndarray:
    """Bell-shaped rows, and rows with outliers, zeros, few values, extreme magnitudes and denormals."""
    random = np.random.default_rng(seed)
    matrix = random.standard_normal((rows, columns)).astype(np.float32)
    matrix[1::8] = random.standard_t(3, matrix[1::8].shape)
    matrix[2::8] *= np.float32(2.0**-110)
    matrix[3::8] *= np.float32(2.0**120)
    matrix[4::8] *= np.where(random.random(matrix[4::8].shape) < 0.002, np.float32(60), np.float32(1))
    matrix[5::8] = random.integers(-3, 4, matrix[5::8].shape)
    matrix[6, :] = 0
    matrix[7, : columns // 2] = 0
    matrix[8, :] *= np.float32(2.0**-126)
    matrix[9, :] *= np.float32(2.0**-119)
    matrix[10, :] = np.float32(3.4e38) * np.sign(matrix[10, :])
    return matrix


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}-{scheme.rounding}")
@pytest.mark.parametrize("shape", [(64, 128), (128, 256), (192, 3712), (320, 768)], ids=str)
def test_every_instruction_set_gives_the_specified_bytes(
    shape: tuple[int, int], scheme: Scheme, isa: str
) -> None:
    if scheme.bits == 8:
        shape = (shape[0], shape[1] + 64)  # K of INT8 is a multiple of 64 only
    matrix = odd_rows(*shape, seed=shape[1])
    assert native(matrix, scheme, isa) == specified(matrix, scheme)
    bits, values = as_bf16(matrix)
    assert native(bits, scheme, isa) == specified(values, scheme)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_may_lie_apart_as_the_columns_of_a_part_do(isa: str) -> None:
    whole = odd_rows(64, 512, seed=1)
    for scheme in SCHEMES:
        assert native(whole[:, 128:384], scheme, isa) == native(whole[:, 128:384].copy(), scheme, isa)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}-{scheme.rounding}")
def test_threads_change_nothing(scheme: Scheme) -> None:
    matrix = odd_rows(256, 256, seed=2)
    assert native(matrix, scheme, ISAS[0], threads=1) == native(matrix, scheme, ISAS[0], threads=5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_told(isa: str, value: float) -> None:
    matrix = odd_rows(64, 128, seed=3)
    matrix[37, 101] = value
    for scheme in SCHEMES:
        assert not native(matrix, scheme, isa)[2][0]
        assert not native(as_bf16(matrix)[0], scheme, isa)[2][0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(SCHEMES),
    st.sampled_from(ISAS),
    st.integers(0, 2**32 - 1),
)
def test_whatever_the_values_the_bytes_are_the_specified_ones(
    values: list[float], scheme: Scheme, isa: str, seed: int
) -> None:
    matrix = np.random.default_rng(seed).choice(np.array(values, np.float32), (64, 128))
    assert native(matrix, scheme, isa) == specified(matrix, scheme)
    bits, wide = as_bf16(matrix)
    assert native(bits, scheme, isa) == specified(wide, scheme)


def test_wrong_shapes_and_types_are_refused_by_name() -> None:
    grid = multipliers(127)
    matrix = np.zeros((64, 128), np.float32)
    packed, scale = np.zeros(64 * 128, np.uint8), np.zeros(64, np.float32)
    for task, words in (
        (PackTask(matrix[:, ::2], packed, scale), "rows without gaps"),
        (PackTask(matrix[:33], packed, scale), "multiple of 32 rows"),
        (PackTask(matrix.astype(np.float64), packed, scale), "float32, or bfloat16"),
        (PackTask(matrix, packed[1:], scale), "packed"),
        (PackTask(matrix, packed, scale[1:]), "scale"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            pack_weights([task], 8, "kt", grid)
