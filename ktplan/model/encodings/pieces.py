"""What an encoding is handed: the stored arrays of one matrix, still in their stored type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadInput

Floats = npt.NDArray[np.float32]
Raw = npt.NDArray[Any]

# safetensors dtype to the numpy type that holds its bits; the 16- and 8-bit floats are held as unsigned integers.
NUMPY = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "U8": "u1",
    "I8": "i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8", "F64": "<f8",
    "BOOL": "?",
}  # fmt: skip


class Part(NamedTuple):
    """One tensor of an encoded matrix as its header describes it."""

    dtype: str
    shape: tuple[int, ...]
    name: str = ""  # file and tensor, for messages


class Piece(NamedTuple):
    """One tensor of an encoded matrix: its dtype, and its values in the numpy type of NUMPY."""

    dtype: str
    data: Raw


@dataclass(frozen=True, slots=True)
class Hints:
    """What config.json's quantization_config says: consulted only where the tensors leave a question open."""

    method: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, as fine-grained FP8 files and compressed-tensors say it."""
        block = self.settings.get("weight_block_size")
        for group in (self.settings.get("config_groups") or {}).values():
            block = block or ((group or {}).get("weights") or {}).get("block_structure")
        if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
            return block[0], block[1]
        return None

    def text(self, key: str) -> str:
        """A setting in lower case; empty where the file does not say."""
        value = self.settings.get(key)
        return str(value).lower() if value is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How one kind of file stores a matrix [rows, columns], rows are outputs.

    `required` and `optional` name the parts (suffixes of the tensor names); `fits` says from dtypes whether the parts
    are this encoding; `check` raises BadInput naming the tensor where shapes contradict [rows, columns]; `decode` gives
    float32 [rows, columns], exact but for one rounding of each value.
    """

    name: Callable[[Mapping[str, Part], int, int], str]
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    fits: Callable[[Mapping[str, Part], int, int], bool]
    check: Callable[[Mapping[str, Part], int, int, Hints], None]
    decode: Callable[[Mapping[str, Piece], int, int, Hints], Floats]


def expect(part: Part, *shapes: tuple[int, ...]) -> None:
    """Raise BadInput unless the part has one of `shapes`."""
    if part.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise BadInput(
            f"{part.name} has shape {list(part.shape)}, config.json asks for {wanted}",
            hint="config.json and weights belong to different models, or the file is damaged",
        )


def floats(piece: Piece) -> Floats:
    """The values of a float (or integer, or E8M0 exponent) part as float32; exact for all but F64."""
    dtype, data = piece
    if dtype == "BF16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F8_E4M3":
        return e4m3()[data]
    if dtype == "F8_E5M2":
        return e5m2()[data]
    if dtype in ("F8_E8M0", "U8"):
        return exponents(data)
    return data.astype(np.float32)


def exponents(data: Raw) -> Floats:
    """E8M0 bytes as powers of two, 2^(byte-127); 255 is NaN (OCP microscaling specification, section 5.4.1)."""
    return _exponent_table()[data]


@cache
def _exponent_table() -> Floats:
    powers = np.ldexp(np.float64(1), np.arange(255) - 127).astype(np.float32)
    return np.append(powers, np.float32(np.nan))


@cache
def e4m3() -> Floats:
    """FP8 E4M3FN, all 256 codes: no infinities, 0x7F and 0xFF are NaN (Micikevicius et al. 2022, arXiv:2209.05433)."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * np.exp2(exponent - 7.0))
    value[(code & 127) == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


@cache
def e5m2() -> Floats:
    """FP8 E5M2, all 256 codes: the upper byte of IEEE half precision."""
    return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


@cache
def e2m1() -> Floats:
    """FP4 E2M1, all 16 codes (OCP microscaling specification, table 5)."""
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return np.array([*half, *(-value for value in half)], np.float32)


def nibbles(data: Raw) -> npt.NDArray[np.uint8]:
    """Bytes [..., n] to their 4-bit codes [..., 2n], the low half of a byte first."""
    data = data.view(np.uint8)
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


def unpack(words: Raw, bits: int, count: int) -> npt.NDArray[np.uint8]:
    """The first `count` codes of each row of 32-bit words [..., n]: codes of `bits`, dense, low bits first."""
    stream = np.ascontiguousarray(words).astype("<u4").view(np.uint8)
    if bits == 8:
        return stream[..., :count]
    if bits == 4:
        return nibbles(stream)[..., :count]
    ones = np.unpackbits(stream, axis=-1, bitorder="little")[..., : count * bits]
    ones = ones.reshape(*ones.shape[:-1], count, bits)
    return np.packbits(ones, axis=-1, bitorder="little")[..., 0]


def by_group(scale: Floats, columns: int) -> Floats:
    """Scales [rows, groups] repeated to [rows, columns]; the groups are equally long."""
    return np.repeat(scale, columns // scale.shape[-1], axis=-1)


def fp4(packed: Raw, scale: Floats, rows: int, columns: int) -> Floats:
    """FP4 pairs of a matrix [rows, columns] and the scale [rows, groups] of each group, as float32."""
    weight = e2m1()[nibbles(packed.reshape(rows, columns // 2))]
    weight *= by_group(scale, columns)
    return weight
