"""How weights lie in memory: kt-kernel's AMX tiles, as bytes that any of its and our kernels read in place.

A projection is N output rows of K inputs. INT8 takes K bytes a row. INT4 takes 64 bytes for every 128 inputs: the low
nibble of byte j is input j, the high nibble input 64 + j, both two's complement. BF16 takes 2 K bytes a row. Rows and
bytes are then reordered:

    [N in blocks of 64 (INT8, BF16) or 128 (INT4)] [K in blocks of 3584 (INT8, BF16) or 1792 (INT4) bytes] [32 rows]
    [64 bytes of K] [2 halves of 16 rows] [16 words] [16 rows] [4 bytes]

so that each kilobyte is one AMX B-tile: a 16 x 16 transpose of 4-byte words, the order of vpdpbusd and vdpbf16ps as
well. The last block of N or K may be shorter.

Scales lie apart. One scale a row: float32 in natural order. One for each group of a row's inputs: bfloat16, for each 32
rows and each group in order the 32 rows' scales, which is one line of 64 bytes. BF16 has none.

A group's weight is level * scale in layouts `int4-g32-v1` and so on; in `int4-g32-o-v1` it is (level + offset) * scale,
where the scale's last two bits, 0 to 3, mean the offset 0.5, 1, 1.5 or 2 (see quant.groups). Both take the same bytes.

NUMA parts split the intermediate size: part p has its share of gate and up rows and of down columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadInput, BadUsage
from ktplan.quant.groups import U16, Bfloat16Rows, QuantizedGroups
from ktplan.quant.rounding import F32, I8
from ktplan.quant.scheme import GROUPS
from ktplan.quant.stored import Stored

U8 = npt.NDArray[np.uint8]

_TILE_BYTES = 64  # of K, in each of 16 rows


@dataclass(frozen=True, slots=True)
class Layout:
    """A versioned order of bytes. `unit`: hidden size and each part's width must be multiples of it (see `padded`)."""

    name: str
    tile_bits: int
    row_block: int
    byte_block: int
    unit: int
    group: int | None = None
    offsets: bool = False  # scales of groups choose offsets for levels

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of K = `columns` inputs."""
        return columns * self.tile_bits // 8

    @property
    def scale_dtype(self) -> Literal["F32", "BF16"]:
        """How a scale is stored."""
        return "F32" if self.group is None else "BF16"

    def scales(self, rows: int, columns: int) -> int:
        """How many scales N = `rows` by K = `columns` weights have."""
        if self.tile_bits == 16:
            return 0
        return rows if self.group is None else rows * (columns // self.group)

    def scale_bytes(self, rows: int, columns: int) -> int:
        """Bytes of their scales."""
        return self.scales(rows, columns) * (4 if self.group is None else 2)


AMX_INT8 = Layout("amx-int8-v1", 8, 64, 3584, 64)
AMX_INT4 = Layout("amx-int4-v1", 4, 128, 1792, 128)
BF16 = Layout("bf16-v1", 16, 64, 3584, 32)
_GROUPED = {
    (group, offsets): Layout(f"int4-g{group}-{'o-' if offsets else ''}v1", 4, 128, 1792, 128, group, offsets)
    for group in GROUPS
    for offsets in (False, True)
}
_OPTIONS = {8: "--bits 8", 16: "--dtype bf16"}  # what a user asks for
LAYOUTS = {layout.name: layout for layout in (AMX_INT8, AMX_INT4, BF16, *_GROUPED.values())}


class Sizes(Protocol):
    """What of a model decides whether it fits a layout; a ModelSpec is one."""

    @property
    def hidden(self) -> int: ...

    @property
    def moe_intermediate(self) -> int: ...


def layout_for(bits: int, group: int | None = None, offsets: bool = False) -> Layout:
    """The layout of a scheme: 16 bits, 8 in INT8 tiles, 4 (with groups or without) and 2 in INT4 tiles.

    What `bits` alone decides (tiles, units, legal parts) is the same for all groups.
    """
    if group is not None and bits == 4:
        return _GROUPED[group, offsets]
    return {16: BF16, 8: AMX_INT8}.get(bits, AMX_INT4)


def packed_bytes(rows: int, columns: int, bits: int) -> int:
    """Bytes that N = `rows` by K = `columns` weights take without their scales."""
    return rows * layout_for(bits).row_bytes(columns)


def pack(weights: I8 | U16, bits: int) -> U8:
    """Levels int8 [N, K], or with 16 bits bfloat16 as uint16, to their bytes, one dimension.

    N must be a multiple of 32, K of the layout's unit.
    """
    rows, columns = weights.shape
    layout = layout_for(bits)
    packed = np.empty(rows * layout.row_bytes(columns), np.uint8)
    source = _nibbles(weights) if layout.tile_bits == 4 else np.ascontiguousarray(weights).view(np.uint8)
    for block, tiles in _blocks(packed, rows, columns, layout):
        height, width = block[0].stop - block[0].start, block[1].stop - block[1].start
        words = source[block].reshape(height // 32, 2, 16, width // _TILE_BYTES, 16, 4)
        tiles[...] = words.transpose(0, 3, 1, 4, 2, 5)
    return packed


def unpack(packed: U8 | I8, rows: int, columns: int, bits: int) -> I8:
    """The levels int8 [N, K] of packed bytes: the inverse of `pack`."""
    layout = layout_for(bits)
    plain = _plain(packed, rows, columns, layout)
    if layout.tile_bits == 8:
        return plain.view(np.int8)
    low = (plain << np.uint8(4)).view(np.int8) >> 4
    high = plain.view(np.int8) >> 4
    levels = np.stack([low.reshape(rows, -1, 64), high.reshape(rows, -1, 64)], axis=2)
    return levels.reshape(rows, columns)


def unpack_bfloat16(packed: U8, rows: int, columns: int) -> U16:
    """The same for 16 bits: bfloat16 bit patterns [N, K]."""
    return _plain(packed, rows, columns, BF16).view(np.uint16)


def pack_scales(scale: U16) -> U16:
    """The scales [N, K / group] of groups in the order of the file, one dimension."""
    rows, groups = scale.shape
    return np.ascontiguousarray(scale.reshape(rows // 32, 32, groups).transpose(0, 2, 1)).reshape(-1)


def unpack_scales(packed: U16, rows: int) -> U16:
    """The inverse of `pack_scales`; [N / 32, K / group, 32] or in one dimension."""
    lines = packed.reshape(rows // 32, -1, 32)
    return np.ascontiguousarray(lines.transpose(0, 2, 1)).reshape(rows, -1)


def pack_stored(rows: Stored) -> list[U8 | F32 | U16]:
    """A matrix as a store keeps it: its packed bytes, and its scales where it has some."""
    if isinstance(rows, Bfloat16Rows):
        return [pack(rows.bits, 16)]
    if isinstance(rows, QuantizedGroups):
        return [pack(rows.levels, 4), pack_scales(rows.scale)]
    return [pack(rows.levels, rows.tile_bits), rows.scale]


def _plain(packed: U8 | I8, rows: int, columns: int, layout: Layout) -> U8:
    """Rows of bytes in natural order.

    Written from the offset formula instead of by turning `pack` round, so that each checks the other.
    """
    row_bytes = layout.row_bytes(columns)
    data = packed.view(np.uint8).reshape(rows, row_bytes)
    plain = np.empty((rows, row_bytes), np.uint8)
    for first in range(0, rows, layout.row_block):
        block = data[first : first + layout.row_block].reshape(-1)
        plain[first : first + layout.row_block] = block[_offsets(len(block) // row_bytes, row_bytes, layout)]
    return plain


@lru_cache(maxsize=8)
def _offsets(rows: int, row_bytes: int, layout: Layout) -> npt.NDArray[np.int64]:
    """Where byte (r, x) of one block of rows lies in that block's packed bytes."""
    r = np.arange(rows)[:, None]
    x = np.arange(row_bytes)[None, :]
    width = layout.byte_block
    this_width = np.minimum(width, row_bytes - x // width * width)
    k = x % width
    offset = x // width * width * rows + r // 32 * 32 * this_width + k // 64 * 64 * 32
    offset = offset + r // 16 % 2 * 1024 + k % 64 // 4 * 64 + r % 16 * 4 + k % 4
    offset.flags.writeable = False
    return offset


def _nibbles(levels: I8 | U16) -> U8:
    rows, columns = levels.shape
    pairs = levels.view(np.uint8).reshape(rows, columns // 128, 2, 64)
    nibbles = pairs[:, :, 0] & np.uint8(0x0F)
    nibbles |= pairs[:, :, 1] << np.uint8(4)
    return nibbles.reshape(rows, columns // 2)


def _blocks(
    packed: U8, rows: int, columns: int, layout: Layout
) -> Iterator[tuple[tuple[slice, slice], npt.NDArray[np.uint8]]]:
    """Each block of rows and row bytes, with the six-dimensional view of the packed bytes that belongs to it."""
    row_bytes, width = layout.row_bytes(columns), layout.byte_block
    start = 0
    for row in range(0, rows, layout.row_block):
        row_end = min(row + layout.row_block, rows)
        for byte in range(0, row_bytes, width):
            byte_end = min(byte + width, row_bytes)
            size = (row_end - row) * (byte_end - byte)
            shape = ((row_end - row) // 32, (byte_end - byte) // _TILE_BYTES, 2, 16, 16, 4)
            yield (slice(row, row_end), slice(byte, byte_end)), packed[start : start + size].reshape(shape)
            start += size


def padded(intermediate: int, bits: int) -> int:
    """The width that experts of this intermediate size have in a store: zeros fill the last unit of the layout.

    Zero rows of gate and up give silu(0) * 0 = 0, which zero columns of down take: the sum is the same.
    """
    unit = layout_for(bits).unit
    return -(-intermediate // unit) * unit


def legal_parts(sizes: Sizes, bits: int) -> tuple[int, ...]:
    """The numbers of NUMA parts that a model can be split into, smallest first; empty if it fits no layout."""
    unit = layout_for(bits).unit
    if sizes.hidden % unit:
        return ()
    units = padded(sizes.moe_intermediate, bits) // unit
    return tuple(parts for parts in range(1, units + 1) if units % parts == 0)


def check_parts(sizes: Sizes, bits: int, parts: int, group: int | None = None) -> None:
    """Raise BadInput for a model that fits the layout in no way, BadUsage for a number of parts that is not legal."""
    layout, legal = layout_for(bits, group), legal_parts(sizes, bits)
    wider = next((other for other in (8, 16) if other > bits and legal_parts(sizes, other)), None)
    if not legal:
        raise BadInput(
            f"layout {layout.name} needs a hidden size that is a multiple of {layout.unit}; "
            f"this model has {sizes.hidden}",
            hint="this model's experts cannot be packed for CPU kernels"
            if wider is None
            else f"use {_OPTIONS[wider]}, which needs multiples of {layout_for(wider).unit}",
        )
    if parts in legal:
        return
    width = padded(sizes.moe_intermediate, bits)
    share = width / parts if parts > 0 else 0
    filled = f", {width} with padding" if width != sizes.moe_intermediate else ""
    values = ", ".join(map(str, legal))
    wider = next((other for other in (8, 16) if other > bits and parts in legal_parts(sizes, other)), None)
    other = "" if wider is None else f", or convert with {_OPTIONS[wider]}"
    raise BadUsage(
        f"experts are {sizes.moe_intermediate} wide{filled}; {parts} NUMA parts make {share:g} each, "
        f"layout {layout.name} needs a multiple of {layout.unit}",
        hint=f"for this model --numa-parts may be {values}{other}",
    )
