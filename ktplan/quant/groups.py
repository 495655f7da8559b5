"""Groups of weights to 4-bit levels and one bfloat16 scale each; and weights to bfloat16.

A group is 32, 64 or 128 neighbouring inputs of one output row. Levels are -8..7, and there are two meanings:

    plain      weight = level * scale. The scale may be negative, so that a group's largest weight can sit at -8
               whatever its sign. Weights that were such levels before, with bfloat16 scales, are kept exactly.
    `offsets`  weight = (level + offset) * scale. The last two bits of the scale, which stay part of its value, choose
               the offset, 0.5, 1, 1.5 or 2: so the levels' range, -7.5..7.5 to -6..9 steps or its mirror image,
               follows a group whose weights reach further on one side. Other weights lose 7 % less.

The scale with the least squared error is searched (`tries`): plain ones among shares of the group's largest weight;
with offsets for several numbers of steps that half of the range may take, each with the three offsets that fit the
group's middle best. A scale is rounded to what can be stored *before* levels are chosen. Then twice the
least-squares scale of the best one's levels. What is compared is the error that is really stored.

numpy only. This file is the specification: the native code that conversion runs (kernels.pack_groups and
kernels.pack_bfloat16) gives the same bytes on every machine. Every sum is a float32 sum in the order of the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ktplan.quant.rounding import F32, F64, I8, lanes, to_bfloat16

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

LOWEST, HIGHEST = -8, 7
_REFITS = 2
# Levels that a group's largest weight may get, in steps below zero. More points, a wider range, more refits and scales
# of the other sign together lower the error by less than 0.4 % in groups of 32, also with outliers and heavy tails.
# Whole numbers are among them: weights that were such levels before, with bfloat16 scales (Kimi-K2), are kept exactly.
_PLAIN_REACHES = (5.0, 5.5, 6.0, 6.35, 6.7, 7.0, 7.25, 7.5, 7.75, 8.0, 8.3, 8.6)
# With offsets: steps from the middle of the range to its ends. Three, and least squares from there, are as good as six
# to 0.8 %.
_REACHES = (6.3, 7.1, 7.8)
FURTHEST = 1.5  # steps by which offsets move the range
_CODES = 4
_SMALLEST = np.uint32(7 << 23)  # 2^-120: below it a scale would come near to float32's denormals
_TOP_FIELD = 254  # exponent of the largest float32s
_PLAIN_CAP = np.float32(0.498046875)  # there no scale is so large that -8 times it overflows
_CAP = np.float32(0.4375)  # nor that 9 times it does


@dataclass(frozen=True, slots=True)
class QuantizedGroups:
    """Levels int8 [N, K] in -8..7, and the scales as bfloat16 bit patterns, uint16 [N, K / group].

    `offsets`: the last two bits of a scale choose what is added to levels.
    """

    levels: I8
    scale: U16
    group: int
    offsets: bool


@dataclass(frozen=True, slots=True)
class Bfloat16Rows:
    """Weights as bfloat16 bit patterns, uint16 [N, K]."""

    bits: U16


@lru_cache(maxsize=2)
def tries(offsets: bool) -> F32:
    """What is tried: scales as multiples of a group's largest weight and its sign; with `offsets` numbers of steps."""
    table = np.array(_REACHES, np.float32) if offsets else (-1 / np.array(_PLAIN_REACHES)).astype(np.float32)
    table.flags.writeable = False
    return table


def widen(bits: U16) -> F32:
    """The float32 values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def offsets_of(scale: U16) -> F32:
    """What is added to the levels of groups with these scales (bit patterns), where scales choose offsets."""
    return _offset((scale & np.uint16(_CODES - 1)).astype(np.float32))


def _offset(code: F32) -> F32:
    return code * np.float32(0.5) + np.float32(0.5)


def narrow(values: F32) -> U16:
    """The bit patterns of the nearest bfloat16 values, ties to even; never an infinity."""
    return (to_bfloat16(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def quantize_groups(weights: F32, group: int, *, offsets: bool) -> QuantizedGroups:
    """Quantize float32 [N, K] with K a multiple of `group`; all values must be finite.

    Groups that are zero, or so small that their scale would be nearly denormal, get scale 0 and levels 0.
    """
    rows, columns = weights.shape
    values, back, alive, capped = _normalized(weights, group)
    search = _Search(values, np.where(capped, _CAP if offsets else _PLAIN_CAP, np.float32(4)), offsets)
    (_try_offsets if offsets else _try_plain)(search, values, alive)
    for _ in range(_REFITS):
        search.attempt(search.least_squares(), search.code)
    scale = np.where(alive, search.scale * back, np.float32(0))
    levels = _levels(values, search.scale, search.offset).astype(np.int8)
    return QuantizedGroups(
        np.ascontiguousarray(levels.T).reshape(rows, columns),
        (scale.view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(rows, -1),
        group,
        offsets,
    )


def _try_plain(search: _Search, values: F32, alive: npt.NDArray[np.bool_]) -> None:
    peak = np.where(alive, _largest(values), np.float32(-1))
    for share in tries(offsets=False):
        search.attempt(peak * share, search.code)


def _try_offsets(search: _Search, values: F32, alive: npt.NDArray[np.bool_]) -> None:
    low = values.min(axis=0)
    high = np.where(alive, values.max(axis=0), np.float32(1))
    middle, half = (high + low) * np.float32(0.5), (high - low) * np.float32(0.5)
    peak = np.maximum(high, -low)
    sign = np.where(high > -low, np.float32(1), np.float32(-1))
    for reach in tries(offsets=True):
        widest = np.maximum(
            half * (np.float32(1) / reach), peak * (np.float32(1) / (reach + np.float32(FURTHEST)))
        )
        scale = widest * sign
        code = np.rint((middle + middle) * (np.float32(1) / scale))
        code = np.minimum(np.maximum(code, np.float32(1)), np.float32(_CODES - 2))
        for step in (-1, 0, 1):
            search.attempt(scale, code + np.float32(step))


def dequantize_groups(rows: QuantizedGroups) -> F32:
    """The float32 [N, K] that levels and scales stand for."""
    weights = rows.levels.astype(np.float32)
    if rows.offsets:
        weights += np.repeat(offsets_of(rows.scale), rows.group, axis=1)
    weights *= np.repeat(widen(rows.scale), rows.group, axis=1)
    return weights


def squared_error_groups(weights: F32, rows: QuantizedGroups) -> tuple[float, float]:
    """Sum of squared differences, and sum of squared weights. Groups with scale 0 count for nothing."""
    values, back, alive, _ = _normalized(weights, rows.group)
    levels = rows.levels.reshape(-1, rows.group).T.astype(np.float32)
    if rows.offsets:
        levels += offsets_of(rows.scale).reshape(-1)
    scale = widen(rows.scale).reshape(-1) * (np.float32(1) / back)
    square = np.where(alive, back.astype(np.float64) * back.astype(np.float64), 0.0)
    error = _sum((values - levels * scale) ** 2).astype(np.float64) * square
    energy = _sum(values * values).astype(np.float64) * square
    return _row_sums(error, len(weights)), _row_sums(energy, len(weights))


def squared_error_bfloat16(weights: F32, rows: Bfloat16Rows) -> tuple[float, float]:
    """The same for bfloat16, summed over each row in 16 lanes (see rounding.lanes) in units of a power of two."""
    field = np.minimum(np.abs(weights).max(axis=1).view(np.uint32) >> np.uint32(23), np.uint32(253))
    field = np.maximum(field, np.uint32(7))
    factor, back = _powers(field)
    values = weights * factor[:, None]
    rest = values - widen(rows.bits) * factor[:, None]
    square = back.astype(np.float64) * back.astype(np.float64)
    error, energy = lanes(rest * rest) * square, lanes(values * values) * square
    return _in_order(error), _in_order(energy)


class _Search:
    """The best scale and offset so far of each group, in the groups' own units; see `attempt`."""

    def __init__(self, values: F32, cap: F32, offsets: bool) -> None:
        self._values, self._cap, self._offsets = values, cap, offsets
        self.scale = np.zeros(values.shape[1], np.float32)
        self.code = self.scale.copy()
        self._gain = np.full(values.shape[1], -np.inf, np.float32)
        self._product, self._square = self.scale.copy(), self.scale.copy()

    @property
    def offset(self) -> F32:
        """What is added to levels."""
        return self._offset_of(self.code)

    def _offset_of(self, code: F32) -> F32:
        return _offset(code) if self._offsets else np.zeros_like(code)

    def attempt(self, scale: F32, code: F32) -> None:
        """Take `scale`, rounded to bfloat16, where it saves more of the squared error than what is there.

        With offsets it is rounded to one whose last bits are `code`.
        """
        scale = np.maximum(np.minimum(scale, self._cap), -self._cap)
        scale = _coded(scale, code) if self._offsets else to_bfloat16(scale)
        offset = self._offset_of(code)
        levels = _levels(self._values, scale, offset) + offset
        product, square = _sum(levels * self._values), _sum(levels * levels)
        gain = scale * ((product + product) - scale * square)
        better = gain > self._gain
        self._gain = np.where(better, gain, self._gain)
        self.scale = np.where(better, scale, self.scale)
        self.code = np.where(better, code, self.code)
        self._product = np.where(better, product, self._product)
        self._square = np.where(better, square, self._square)

    def least_squares(self) -> F32:
        """The scale with the least error for the levels of the best so far."""
        fitted: F32 = np.divide(self._product, self._square, out=self.scale.copy(), where=self._square > 0)
        return fitted


def _normalized(weights: F32, group: int) -> tuple[F32, F32, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Groups as columns [group, N K / group], each multiplied by a power of two so that its largest is near 1.

    Also the power of two that undoes it, which groups are not as good as zero, and which are near float32's end.
    """
    columns = np.ascontiguousarray(weights.reshape(-1, group).T)
    largest = np.abs(columns).max(axis=0).view(np.uint32)
    alive, field = largest >= _SMALLEST, largest >> np.uint32(23)
    capped = field == _TOP_FIELD
    factor, back = _powers(np.where(alive, np.minimum(field, np.uint32(253)), np.uint32(127)))
    return columns * np.where(alive, factor, np.float32(0)), back, alive, capped


def _powers(field: U32) -> tuple[F32, F32]:
    """1 / 2^e and 2^e for the exponent field of 2^e."""
    factor: F32 = ((np.uint32(254) - field) << np.uint32(23)).view(np.float32)
    back: F32 = (field << np.uint32(23)).view(np.float32)
    return factor, back


def _largest(values: F32) -> F32:
    """The value with the largest magnitude of each column; of v and -v the negative one."""
    high, low = values.max(axis=0), values.min(axis=0)
    largest: F32 = np.where(high > -low, high, low)
    return largest


def _coded(scale: F32, code: F32) -> F32:
    """The nearest bfloat16 whose last two bits are `code`."""
    bits = scale.view(np.uint32)
    last = code.astype(np.uint32) << np.uint32(16)
    size = (bits & np.uint32(0x7FFFFFFF)) - last + np.uint32(1 << 17)
    size = (size & np.uint32(0xFFFC0000)) + last
    coded: F32 = (size | (bits & np.uint32(0x80000000))).view(np.float32)
    return coded


def _levels(values: F32, scale: F32, offset: F32) -> F32:
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    rounded = np.rint(values * inverse - offset)
    levels: F32 = np.minimum(np.maximum(rounded, np.float32(LOWEST)), np.float32(HIGHEST))
    return levels


def _sum(values: F32) -> F32:
    """Sums of columns, in the order of the rows."""
    total = np.zeros(values.shape[1], np.float32)
    for row in values:
        total += row
    return total


def _row_sums(values: F64, rows: int) -> float:
    """The sum of each row's groups in order, and of the rows in order."""
    table = values.reshape(rows, -1)
    total = np.zeros(rows)
    for column in table.T:
        total += column
    return _in_order(total)


def _in_order(values: F64) -> float:
    total = 0.0
    for value in values:
        total += float(value)
    return total
