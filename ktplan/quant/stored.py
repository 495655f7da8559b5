"""What a store keeps of a matrix, in any of its formats, and the weights that it stands for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktplan.quant.groups import (
    Bfloat16Rows,
    QuantizedGroups,
    dequantize_groups,
    squared_error_bfloat16,
    squared_error_groups,
    widen,
)
from ktplan.quant.rounding import F32, QuantizedRows, dequantize, squared_error

Stored = QuantizedRows | QuantizedGroups | Bfloat16Rows


def dequantize_stored(rows: Stored) -> F32:
    """The float32 [N, K] that is stored."""
    if isinstance(rows, QuantizedRows):
        return dequantize(rows)
    return dequantize_groups(rows) if isinstance(rows, QuantizedGroups) else widen(rows.bits)


def joined_rows(pieces: Sequence[Stored]) -> Stored:
    """Matrices of one format and one width, one above the other."""
    first = pieces[0]
    if isinstance(first, Bfloat16Rows):
        return Bfloat16Rows(
            np.concatenate([piece.bits for piece in pieces if isinstance(piece, Bfloat16Rows)])
        )
    if isinstance(first, QuantizedGroups):
        groups = [piece for piece in pieces if isinstance(piece, QuantizedGroups)]
        levels, scales = [piece.levels for piece in groups], [piece.scale for piece in groups]
        return QuantizedGroups(np.concatenate(levels), np.concatenate(scales), first.group)
    rows = [piece for piece in pieces if isinstance(piece, QuantizedRows)]
    return QuantizedRows(
        np.concatenate([piece.levels for piece in rows]),
        np.concatenate([piece.scale for piece in rows]),
        first.tile_bits,
    )


def some_rows(rows: Stored, own: slice) -> Stored:
    """Some rows of a matrix."""
    if isinstance(rows, Bfloat16Rows):
        return Bfloat16Rows(rows.bits[own])
    if isinstance(rows, QuantizedGroups):
        return QuantizedGroups(rows.levels[own], rows.scale[own], rows.group)
    return QuantizedRows(
        np.ascontiguousarray(rows.levels[own]), np.ascontiguousarray(rows.scale[own]), rows.tile_bits
    )


def squared_error_stored(weights: F32, rows: Stored) -> tuple[float, float]:
    """Sum of squared differences, and sum of squared weights."""
    if isinstance(rows, QuantizedRows):
        return squared_error(weights, rows)
    if isinstance(rows, QuantizedGroups):
        return squared_error_groups(weights, rows)
    return squared_error_bfloat16(weights, rows)
