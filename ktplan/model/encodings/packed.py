"""compressed-tensors pack-quantized (llm-compressor; Kimi-K2's own INT4) and int-quantized.

pack-quantized: weight_packed i32 [rows, columns*bits/32], codes along the inputs, low bits first, signed codes stored
with 2^(bits-1) added; weight_scale [rows, groups]; weight_zero_point i32 [rows*bits/32, groups], packed along the
outputs in the same way, or int8; weight_g_idx [columns]. int-quantized: weight i8, weight_scale [rows, groups],
weight_zero_point i8. w[n, k] = scale[n, g] * (code - zero).
Source: compressed-tensors compressors/quantized_compressors/pack_quantized.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadInput
from ktplan.model.encodings.pieces import Encoding, Floats, Hints, Part, Piece, expect, floats, unpack

_FLOATS = ("BF16", "F16", "F32")


def _bits(parts: Mapping[str, Part], columns: int) -> int:
    """The width whose codes fill the words of a row: widths up to 8 packed densely, the last word padded."""
    words = parts["packed"].shape[-1] if parts["packed"].shape else 0
    return next((bits for bits in (4, 8, 2, 3, 5, 6, 7) if -(-columns * bits // 32) == words), 0)


def _packed_name(parts: Mapping[str, Part], rows: int, columns: int) -> str:
    return f"int{_bits(parts, columns)} pack-quantized"


def _packed_fits(parts: Mapping[str, Part], rows: int, columns: int) -> bool:
    return parts["packed"].dtype == "I32" and parts["scale"].dtype in _FLOATS


def _packed_check(parts: Mapping[str, Part], rows: int, columns: int, hints: Hints) -> None:
    bits = _bits(parts, columns)
    if not bits:
        raise BadInput(
            f"{parts['packed'].name} has shape {list(parts['packed'].shape)}, which packs no width up to 8 bits of "
            f"{[rows, columns]}",
            hint="config.json belongs to another model, or the file is damaged",
        )
    expect(parts["packed"], (rows, -(-columns * bits // 32)))
    groups = _check_scale(parts, rows, columns)
    if "zero" in parts and parts["zero"].dtype == "I32":
        expect(parts["zero"], (-(-rows * bits // 32), groups))
    elif "zero" in parts:
        expect(parts["zero"], parts["scale"].shape)


def _check_scale(parts: Mapping[str, Part], rows: int, columns: int) -> int:
    scale = parts["scale"].shape
    if scale in ((), (1,), (rows,)):
        return 1
    groups = scale[1] if len(scale) == 2 else 0
    expect(parts["scale"], (rows, groups), (1, 1))
    if not groups or (columns % groups and "order" not in parts):
        raise BadInput(
            f"{parts['scale'].name} has {groups} groups for {columns} inputs", hint="the file is damaged"
        )
    if "order" in parts:
        expect(parts["order"], (columns,))
    return groups


def _scaled(codes: Floats, pieces: Mapping[str, Piece], zero: npt.NDArray[np.float32] | None) -> Floats:
    """Subtract zeros and multiply by scales, both [rows or 1, groups]."""
    rows, columns = codes.shape
    scale = floats(pieces["scale"])
    scale = scale if scale.ndim == 2 else scale.reshape(-1, 1)
    groups = scale.shape[1]
    if "order" in pieces and (index := pieces["order"].data).min(initial=0) >= 0:  # -1 marks an unused index
        if index.max(initial=0) >= groups:
            raise BadInput(
                f"weight_g_idx points to group {int(index.max())} of {groups}", hint="the file is damaged"
            )
    else:
        index = np.arange(columns) // -(-columns // groups)
    if zero is not None:
        codes -= zero[:, index]
    codes *= scale[:, index]
    return codes


def _packed_decode(pieces: Mapping[str, Piece], rows: int, columns: int, hints: Hints) -> Floats:
    parts = {name: Part(piece.dtype, piece.data.shape) for name, piece in pieces.items()}
    bits = _bits(parts, columns)
    middle = np.float32(1 << (bits - 1))
    codes = unpack(pieces["packed"].data, bits, columns).astype(np.float32)
    codes -= middle
    zero = None
    if "zero" in pieces:
        stored = pieces["zero"]
        if stored.dtype == "I32":
            zero = unpack(stored.data.T, bits, rows).T.astype(np.float32) - middle
        else:
            zero = stored.data.reshape(rows, -1).astype(np.float32)
    return _scaled(codes, pieces, zero)


def _integer_name(parts: Mapping[str, Part], rows: int, columns: int) -> str:
    return "int8"


def _integer_fits(parts: Mapping[str, Part], rows: int, columns: int) -> bool:
    return parts["weight"].dtype == "I8" and parts["scale"].dtype in _FLOATS


def _integer_check(parts: Mapping[str, Part], rows: int, columns: int, hints: Hints) -> None:
    expect(parts["weight"], (rows, columns))
    _check_scale(parts, rows, columns)
    if "zero" in parts:
        expect(parts["zero"], parts["scale"].shape)


def _integer_decode(pieces: Mapping[str, Piece], rows: int, columns: int, hints: Hints) -> Floats:
    zero = None
    if "zero" in pieces:
        zero = pieces["zero"].data.astype(np.float32)
        zero = zero if zero.ndim == 2 else zero.reshape(-1, 1)
    return _scaled(pieces["weight"].data.astype(np.float32), pieces, zero)


PACKED = Encoding(
    name=_packed_name,
    required=frozenset({"packed", "scale"}),
    optional=frozenset({"zero", "order", "shape"}),
    fits=_packed_fits,
    check=_packed_check,
    decode=_packed_decode,
)
INTEGER = Encoding(
    name=_integer_name,
    required=frozenset({"weight", "scale"}),
    optional=frozenset({"zero", "order"}),
    fits=_integer_fits,
    check=_integer_check,
    decode=_integer_decode,
)
