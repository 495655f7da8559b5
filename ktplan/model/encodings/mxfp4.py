"""MXFP4: FP4 E2M1 codes, one E8M0 scale for 32 inputs of a row.

w = LUT[code] * 2^(scale - 127); a byte holds input 2i in its low half and 2i + 1 in its high half.
Three names for the same numbers: gpt-oss `_blocks` u8 [rows, columns/32, 16] and `_scales` u8; DeepSeek-V4 `weight` i8
[rows, columns/2] and `scale` e8m0; compressed-tensors mxfp4-pack-quantized `weight_packed` u8 and `weight_scale` u8.
Sources: OCP microscaling specification 1.0; transformers integrations/mxfp4.py; kt-kernel's DeepSeek-V4 converter.
"""

from __future__ import annotations

from collections.abc import Mapping

from ktplan.model.encodings.pieces import (
    Encoding,
    Floats,
    Hints,
    Part,
    Piece,
    expect,
    exponents,
    fp4,
)

_GROUP = 32


def _name(parts: Mapping[str, Part], rows: int, columns: int) -> str:
    return "mxfp4"


def _fits(parts: Mapping[str, Part], rows: int, columns: int) -> bool:
    return parts["weight"].dtype in ("U8", "I8") and parts["scale"].dtype in ("U8", "F8_E8M0")


def _check(parts: Mapping[str, Part], rows: int, columns: int, hints: Hints) -> None:
    groups = columns // _GROUP
    expect(parts["weight"], (rows, columns // 2), (rows, groups, _GROUP // 2))
    expect(parts["scale"], (rows, groups))


def _decode(pieces: Mapping[str, Piece], rows: int, columns: int, hints: Hints) -> Floats:
    return fp4(pieces["weight"].data, exponents(pieces["scale"].data), rows, columns)


MXFP4 = Encoding(
    name=_name, required=frozenset({"weight", "scale"}), fits=_fits, check=_check, decode=_decode
)
