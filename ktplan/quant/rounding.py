"""Rows of weights to integer levels and one scale each, and back.

Two rules for the scale, in the same stored form:

kt    kt-kernel's bytes exactly. The scale comes from the row's largest magnitude, so one outlier coarsens its row.
mse   The scale with the least squared error. A row is first reduced to a histogram of its magnitudes; the error of
      every clip ratio of a grid is then one matrix product away. The best one is refined on the real values by
      alternating rounding and least squares, and compared with the largest-magnitude scale, than which the result
      is never worse. Costs about ten passes over the weights; a plain search of the same quality costs hundreds.

Stored scales follow kt-kernel: INT8 stands for `level * scale`, INT4 for `(16 * level) * scale`, since its kernels
read a nibble as the high half of a byte. numpy only; this file is also the specification for other implementations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ktplan.quant.scheme import Scheme

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int8]

# A block of rows: small enough to stay in cache with its scratch, large enough that threads spend their time in numpy
# and not in handing Python's lock to each other (two threads, 64 Ki: slower than one; 256 Ki: 1.6 times faster).
_BLOCK_ELEMENTS = 256 * 1024
SCRATCH_BYTES = 10 * 4 * _BLOCK_ELEMENTS  # what quantize_rows needs beside its argument and result
# OpenBLAS multiplies this many rows of histogram by the grid on the calling thread; larger products wake a team of
# threads that here only get in each other's way (its interface/gemm.c compares M * N * K with 2^18).
_PRODUCT_ROWS = 32

_SMALLEST_NORMAL = np.float32(2.0**-126)

# Histogram: 16 bins an octave over 12 octaves below the row's maximum. The bin of a float is its top bits.
_BIN_SHIFT = 19
_OCTAVES = 12
_FIRST_BIN = int(np.float32(2.0**-_OCTAVES).view(np.uint32)) >> _BIN_SHIFT
_CLIP_RATIOS = 32
# Lowest clip ratio worth trying, by top level. Clipping an outlier pays only while it is below about sqrt(K) times the
# row's RMS, and 15 levels want to reach 2.7 times the RMS: 2.7 / sqrt(K) is above 0.025 up to K = 11664.
_LOWEST_RATIO = {127: 0.25, 7: 0.025, 1: 0.009}
_REFINEMENTS = 2


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Levels int8 [N, K] and the scale float32 [N] as it is stored; `tile_bits` 8 or 4 tells what a scale means."""

    levels: I8
    scale: F32
    tile_bits: int


def quantize_rows(weights: F32, scheme: Scheme) -> QuantizedRows:
    """Quantize float32 [N, K], row by row; all values must be finite.

    Works in blocks of rows, so the memory needed beside the result does not grow with N. Rows that are zero, or so
    small that their scale would be denormal (kernels flush those to zero), get scale 0 and level 0.
    """
    rows, columns = weights.shape
    levels = np.empty((rows, columns), np.int8)
    scale = np.empty(rows, np.float32)
    for block in _blocks(rows, columns):
        if scheme.rounding == "kt":
            levels[block], scale[block] = _kt_block(weights[block], scheme.bits)
        else:
            levels[block], scale[block] = _mse_block(weights[block], scheme)
    return QuantizedRows(levels, scale, scheme.tile_bits)


def dequantize(rows: QuantizedRows) -> F32:
    """The float32 [N, K] that the levels stand for."""
    weights = rows.levels.astype(np.float32)
    weights *= _step(rows.scale, rows.tile_bits)[:, None]
    return weights


def squared_error(weights: F32, rows: QuantizedRows) -> tuple[float, float]:
    """Sum of squared differences, and sum of squared weights: divide and take the root for the relative RMS error.

    Computed relative to the largest magnitude, so that huge and tiny weights neither overflow nor vanish.
    """
    unit = max(float(np.abs(weights).max(initial=0.0)), float(_SMALLEST_NORMAL))
    inverse = 1.0 / unit
    error = energy = 0.0
    step = _step(rows.scale, rows.tile_bits)
    for block in _blocks(*weights.shape):
        exact = weights[block] * inverse
        rest = rows.levels[block] * (step[block] * inverse)[:, None]
        rest -= exact
        # float32 is good enough for the sum over one row, not over a block.
        error += float(np.einsum("ij,ij->i", rest, rest).sum(dtype=np.float64))
        energy += float(np.einsum("ij,ij->i", exact, exact).sum(dtype=np.float64))
    return error * unit**2, energy * unit**2


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    height = max(1, _BLOCK_ELEMENTS // max(columns, 1))
    for first in range(0, rows, height):
        yield slice(first, min(first + height, rows))


def _step(scale: F32, tile_bits: int) -> F32:
    return scale * np.float32(16) if tile_bits == 4 else scale


# kt: the arithmetic of kt-kernel 0.7.2 as released, which is built with -ffast-math.


def _kt_block(weights: F32, bits: int) -> tuple[I8, F32]:
    values = _flush(_to_bfloat16(weights))
    largest = np.abs(values).max(axis=1)
    if bits == 8:
        # Its source divides by 127; the build multiplies by the rounded reciprocal, another last bit in 2 % of rows.
        scale = largest * (np.float32(1) / np.float32(127))
    else:
        scale = (largest.astype(np.float64) / 112.0).astype(np.float32)
    scale = _flush(scale)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    rounded = np.rint(values * inverse[:, None]).astype(np.int8)
    if bits == 4:
        # Rounded to int8 first and then to a multiple of 16, halves away from zero: twice, hence the larger error.
        sixteenths = (np.abs(rounded.astype(np.int16)) + 8) >> 4
        rounded = (np.sign(rounded) * sixteenths).astype(np.int8)
    return rounded, scale


def _to_bfloat16(weights: F32) -> F32:
    """Float32 values rounded to bfloat16, nearest even: kt-kernel quantizes from bfloat16 whatever the file holds."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    rounded &= np.uint32(0xFFFF0000)
    values: F32 = rounded.view(np.float32)
    # Between bfloat16's largest and float32's largest, rounding up would make an infinity.
    np.clip(values, -_BFLOAT16_MAX, _BFLOAT16_MAX, out=values)
    return values


_BFLOAT16_MAX = np.uint32(0x7F7F0000).view(np.float32)


def _flush(values: F32) -> F32:
    flushed: F32 = np.where(np.abs(values) < _SMALLEST_NORMAL, np.float32(0), values)
    return flushed


# mse: search.


def _mse_block(weights: F32, scheme: Scheme) -> tuple[I8, F32]:
    magnitude = np.abs(weights)
    largest = magnitude.max(axis=1)
    # Below this the largest-magnitude scale is denormal: the whole row is zero to a kernel that flushes denormals.
    alive = largest >= _SMALLEST_NORMAL * np.float32(scheme.top_level * (16 if scheme.tile_bits == 4 else 1))
    unit = np.where(alive, largest, np.float32(1))
    magnitude *= (np.float32(1) / unit)[:, None]

    absmax = np.full(len(unit), 1.0 / scheme.top_level)
    searched = _refined(magnitude, _best_of_grid(magnitude, scheme.top_level), scheme.top_level)
    stored_absmax = _stored(absmax, unit, scheme)
    stored_searched = _stored(searched, unit, scheme)
    better = _error(magnitude, searched, scheme.top_level) < _error(magnitude, absmax, scheme.top_level)
    better &= stored_searched >= _SMALLEST_NORMAL
    scale = np.where(alive, np.where(better, stored_searched, stored_absmax), np.float32(0))

    step = _step(scale, scheme.tile_bits)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=alive)
    levels = weights * inverse[:, None]
    np.rint(levels, out=levels)
    np.clip(levels, -scheme.top_level, scheme.top_level, out=levels)
    return levels.astype(np.int8), scale


def _stored(step: F64, unit: F32, scheme: Scheme) -> F32:
    """The float32 to store for steps that are relative to each row's unit; never so large that a weight overflows."""
    sixteen = 16 if scheme.tile_bits == 4 else 1
    most = float(np.finfo(np.float32).max) / (scheme.top_level * sixteen * (1 + 2.0**-22))
    stored: F32 = np.minimum(step * unit / sixteen, most).astype(np.float32)
    return stored


def _best_of_grid(magnitude: F32, top_level: int) -> F64:
    """The step of the best clip ratio for each row of magnitudes in 0..1 (rows all zero: any)."""
    steps, errors = _grid(top_level)
    bins = len(errors)
    number = magnitude.view(np.int32) >> _BIN_SHIFT
    number -= np.int32(_FIRST_BIN - 1)
    np.clip(number, 0, bins - 1, out=number)
    number += np.arange(len(magnitude), dtype=np.int32)[:, None] * np.int32(bins)
    counts = np.bincount(number.ravel(), minlength=len(magnitude) * bins).reshape(-1, bins)
    counted = counts.astype(np.float64)
    total = np.concatenate(
        [counted[n : n + _PRODUCT_ROWS] @ errors for n in range(0, len(counted), _PRODUCT_ROWS)]
    )
    # The error is smooth in the logarithm of the step: a parabola through the best point and its neighbours.
    row = np.arange(len(total))
    best = np.clip(total.argmin(axis=1), 1, len(steps) - 2)
    left, middle, right = (total[row, best + shift] for shift in (-1, 0, 1))
    curvature = left - 2 * middle + right
    offset = np.divide(left - right, 2 * curvature, out=np.zeros_like(left), where=curvature > 0)
    refined: F64 = steps[best] * (steps[1] / steps[0]) ** np.clip(offset, -1, 1)
    return refined


@lru_cache(maxsize=4)
def _grid(top_level: int) -> tuple[F64, F64]:
    """Steps [C] of the grid and the squared error [bins, C] that a magnitude of each bin has under each step.

    Errors are whole numbers (units of 2^-32): with them the products above are exact in float64 in whatever order a
    BLAS adds, so all machines choose the same scale.
    """
    numbers = np.arange((_OCTAVES << (23 - _BIN_SHIFT)) + 1, dtype=np.uint32) + np.uint32(_FIRST_BIN)
    edges = (numbers << np.uint32(_BIN_SHIFT)).view(np.float32).astype(np.float64)  # ..., the last one is 1.0
    low = np.concatenate([[0.0], edges])
    high = np.concatenate([edges, [1.0]])
    inside = (np.arange(16) + 0.5) / 16
    magnitude = low[:, None] + (high - low)[:, None] * inside
    steps = np.geomspace(_LOWEST_RATIO[top_level], 1.0, _CLIP_RATIOS) / top_level
    errors = np.empty((len(low), len(steps)))
    for number, step in enumerate(steps):
        rounded = np.minimum(np.rint(magnitude / step), top_level) * step
        errors[:, number] = np.square(magnitude - rounded).mean(axis=1)
    return steps, np.rint(errors * 2.0**32)


def _refined(magnitude: F32, step: F64, top_level: int) -> F64:
    """Alternate between the best levels for a step and the best step for the levels; each turn lowers the error."""
    for _ in range(_REFINEMENTS):
        levels = _rounded(magnitude, step, top_level)
        product = np.einsum("ij,ij->i", levels, magnitude).astype(np.float64)
        square = np.einsum("ij,ij->i", levels, levels).astype(np.float64)
        step = np.divide(product, square, out=step.copy(), where=square > 0)
    return step


def _error(magnitude: F32, step: F64, top_level: int) -> F32:
    rest = _rounded(magnitude, step, top_level)
    rest *= step.astype(np.float32)[:, None]
    rest -= magnitude
    error: F32 = np.einsum("ij,ij->i", rest, rest)
    return error


def _rounded(magnitude: F32, step: F64, top_level: int) -> F32:
    levels = magnitude * (1.0 / step).astype(np.float32)[:, None]
    np.rint(levels, out=levels)
    np.minimum(levels, np.float32(top_level), out=levels)
    return levels
