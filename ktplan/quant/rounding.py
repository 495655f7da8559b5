"""Rows of weights to integer levels and one scale each, and back.

Two rules for the scale, in the same stored form:

kt    kt-kernel's bytes exactly. The scale comes from the row's largest magnitude, so one outlier coarsens its row.
mse   The scale with the least squared error. Magnitudes become whole numbers (the largest is 32767), so that the sums
      which judge a clip ratio are exact in whatever order they are added. The best ratio of a coarse grid, then of a
      fine one around it, is refined by alternating rounding and least squares, at last on the real values; the
      result is compared with the largest-magnitude scale, than which it is never worse.

Stored scales follow kt-kernel: INT8 stands for `level * scale`, INT4 for `(16 * level) * scale`, since its kernels
read a nibble as the high half of a byte.

numpy only. This file is the specification: the native code that conversion runs (kernels.pack_weights) gives the same
bytes on every machine. So every float operation here has one meaning, and sums that decide something are exact or
have a fixed order (`lanes`).
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
I32 = npt.NDArray[np.int32]

# A block of rows: small enough to stay in cache with its scratch, large enough that threads spend their time in numpy
# and not in handing Python's lock to each other (two threads, 64 Ki: slower than one; 256 Ki: 1.6 times faster).
_BLOCK_ELEMENTS = 256 * 1024
_SMALLEST_NORMAL = np.float32(2.0**-126)

# Magnitudes as whole numbers: the largest of a row becomes this.
_UNITS = 32767
# Lowest clip ratio worth trying, by top level. Clipping an outlier pays only while it is below about sqrt(K) times the
# row's RMS, and 15 levels want to reach 2.7 times the RMS: 2.7 / sqrt(K) is above 0.025 up to K = 11664.
_LOWEST_RATIO = {127: 0.25, 7: 0.025, 1: 0.009}
_GRID_POINTS = {127: 41, 7: 41, 1: 49}
_COARSE = 4  # every fourth point of the grid is tried, then those between it and its neighbours
_LIFT = np.float32(
    2.0**64
)  # rows below 1 / _LIFT are multiplied by it: exact, and their reciprocal stays finite


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

    Computed in units of each row's step, so that huge and tiny weights neither overflow nor vanish. Rows with scale 0
    count for nothing: they are zero, or too small for any kernel.
    """
    error = energy = 0.0
    steps = _step(rows.scale, rows.tile_bits)
    for block in _blocks(*weights.shape):
        step = steps[block]
        alive = step != 0
        inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=alive)
        value = np.multiply(weights[block], inverse[:, None])
        rest = value - rows.levels[block].astype(np.float32)
        square = np.where(alive, step.astype(np.float64) * step.astype(np.float64), 0.0)
        # Row after row: the order is part of the specification.
        for row in lanes(rest * rest) * square:
            error += float(row)
        for row in lanes(value * value) * square:
            energy += float(row)
    return error, energy


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    height = max(1, _BLOCK_ELEMENTS // max(columns, 1))
    for first in range(0, rows, height):
        yield slice(first, min(first + height, rows))


def _step(scale: F32, tile_bits: int) -> F32:
    return scale * np.float32(16) if tile_bits == 4 else scale


# kt: the arithmetic of kt-kernel 0.7.2 as released, which is built with -ffast-math.


def _kt_block(weights: F32, bits: int) -> tuple[I8, F32]:
    values = _flush(to_bfloat16(weights))
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


def to_bfloat16(weights: F32) -> F32:
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


@lru_cache(maxsize=4)
def multipliers(top_level: int) -> npt.NDArray[np.uint16]:
    """The search's grid, ascending: sixteenths of a level for the largest magnitude under each clip ratio.

    Empty for formats without levels (`top_level` 0).
    """
    if not top_level:
        return np.empty(0, np.uint16)
    ratios = np.geomspace(1.0, _LOWEST_RATIO[top_level], _GRID_POINTS[top_level])
    grid = np.rint(16 * top_level / ratios).astype(np.uint16)
    grid.flags.writeable = False
    return grid


def _mse_block(weights: F32, scheme: Scheme) -> tuple[I8, F32]:
    top = scheme.top_level
    magnitude = np.abs(weights)
    largest = magnitude.max(axis=1)
    # Below this the largest-magnitude scale is denormal: the whole row is zero to a kernel that flushes denormals.
    alive = largest >= _SMALLEST_NORMAL * np.float32(top * (16 if scheme.tile_bits == 4 else 1))
    unit = np.where(alive, largest, np.float32(1))
    lift = np.where(unit < 1 / _LIFT, _LIFT, np.float32(1))
    scaled = magnitude * lift[:, None]
    scaled *= (np.float32(_UNITS) / (unit * lift))[:, None]
    scaled[~alive] = 0
    units = np.minimum(np.rint(scaled), np.float32(_UNITS)).astype(np.int32)

    searched = _refit(scaled, _search(units, top), top)
    absmax = np.full(len(unit), _UNITS / top)
    stored_searched, stored_absmax = _stored(searched, unit, scheme), _stored(absmax, unit, scheme)
    better = _error(scaled, searched, top) < _error(scaled, absmax, top)
    better &= stored_searched >= _SMALLEST_NORMAL
    scale = np.where(alive, np.where(better, stored_searched, stored_absmax), np.float32(0))

    step = _step(scale, scheme.tile_bits)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=alive)
    levels = weights * inverse[:, None]
    np.rint(levels, out=levels)
    np.clip(levels, -top, top, out=levels)
    return levels.astype(np.int8), scale


def _stored(step: F64, unit: F32, scheme: Scheme) -> F32:
    """The float32 to store for steps in units of largest / 32767; never so large that a weight overflows."""
    sixteen = 16 if scheme.tile_bits == 4 else 1
    most = float(np.finfo(np.float32).max) / (scheme.top_level * sixteen * (1 + 2.0**-22))
    stored: F32 = np.minimum(step * unit.astype(np.float64) / _UNITS / sixteen, most).astype(np.float32)
    return stored


class _Moments:
    """Sums over each row of level * magnitude and of level^2, and their gain: how much error their best step saves."""

    def __init__(self, units: I32, levels: I32) -> None:
        # Whole numbers below 2^53: float64 holds them exactly in whatever order they are added.
        values = levels.astype(np.float64)
        self.product = np.einsum("ij,ij->i", values, units.astype(np.float64))
        self.square = np.einsum("ij,ij->i", values, values)

    @property
    def gain(self) -> F64:
        gain: F64 = np.divide(
            self.product * self.product, self.square, out=np.zeros_like(self.square), where=self.square > 0
        )
        return gain

    def take_better(
        self, other: _Moments, among: npt.NDArray[np.bool_] | None = None
    ) -> npt.NDArray[np.bool_]:
        """Replace the rows where `other` gains more; returns which."""
        better = other.gain > self.gain
        if among is not None:
            better &= among
        self.product = np.where(better, other.product, self.product)
        self.square = np.where(better, other.square, self.square)
        return better


def _search(units: I32, top: int) -> F64:
    """The best step of each row, in units of largest / 32767."""
    grid = multipliers(top).astype(np.int32)
    best = _on_grid(units, grid[np.zeros(len(units), int)], top)
    coarse = np.zeros(len(units), int)
    for point in range(_COARSE, len(grid), _COARSE):
        better = best.take_better(_on_grid(units, np.full(len(units), grid[point]), top))
        coarse[better] = point
    for offset in (-3, -2, -1, 1, 2, 3):
        points = coarse + offset
        inside = (points >= 0) & (points < len(grid))
        best.take_better(_on_grid(units, grid[np.clip(points, 0, len(grid) - 1)], top), inside)
    inverse = np.divide(best.square, best.product, out=np.zeros_like(best.square), where=best.product > 0)
    levels = _rounded(units.astype(np.float32), inverse.astype(np.float32), top)
    best.take_better(_Moments(units, levels.astype(np.int32)))
    step: F64 = np.divide(
        best.product, best.square, out=np.full(len(units), _UNITS / top), where=best.square > 0
    )
    return step


def _on_grid(units: I32, multiplier: I32, top: int) -> _Moments:
    sixteenths = np.minimum((units * multiplier[:, None] + (1 << 14)) >> 15, 16 * top)
    return _Moments(units, (sixteenths + 8) >> 4)


def _refit(magnitude: F32, step: F64, top: int) -> F64:
    """The step with the least squared error for the levels that `step` gives."""
    levels = _rounded(magnitude, (1.0 / step).astype(np.float32), top)
    product, square = lanes(levels * magnitude), lanes(levels * levels)
    refitted: F64 = np.divide(product, square, out=step.copy(), where=square > 0)
    return refitted


def _error(magnitude: F32, step: F64, top: int) -> F64:
    levels = _rounded(magnitude, (1.0 / step).astype(np.float32), top)
    rest = magnitude - levels * step.astype(np.float32)[:, None]
    return lanes(rest * rest)


def _rounded(magnitude: F32, inverse: F32, top: int) -> F32:
    levels: F32 = np.minimum(np.rint(magnitude * inverse[:, None]), np.float32(top))
    return levels


def lanes(values: F32) -> F64:
    """Row sums: float32 over columns j, j + 16, ... in that order for each j below 16, then those 16 in float64."""
    rows, columns = values.shape
    padded = np.pad(values, ((0, 0), (0, -columns % 16))).reshape(rows, -1, 16)
    sums = padded[:, 0].copy()
    for column in range(1, padded.shape[1]):
        sums += padded[:, column]
    total = np.zeros(rows)
    for lane in range(16):
        total += sums[:, lane].astype(np.float64)
    return total
