"""AWQ in its GEMM layout: qweight i32 [columns, rows/8], qzeros i32 [groups, rows/8], scales [groups, rows].

Packed along the outputs: position i of a word holds row 8c + (0,2,4,6,1,3,5,7)[i], so rows 8c .. 8c+7 lie at positions
0,4,1,5,2,6,3,7. The zero is stored as it is: w[n, k] = scales[k//g, n] * (code - zero).
Source: AutoAWQ awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ktplan.errors import BadInput
from ktplan.model.encodings.pieces import Encoding, Floats, Hints, Part, Piece, Raw, expect, floats, unpack

_BITS = 4
_POSITIONS = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def _name(parts: Mapping[str, Part], rows: int, columns: int) -> str:
    return "awq int4"


def _fits(parts: Mapping[str, Part], rows: int, columns: int) -> bool:
    shape = parts["qweight"].shape
    return len(shape) == 2 and shape[0] == columns and shape[1] != rows


def _check(parts: Mapping[str, Part], rows: int, columns: int, hints: Hints) -> None:
    version = hints.text("version")
    if version not in ("", "gemm"):
        raise BadInput(
            f"{parts['qweight'].name}: quantization_config says AWQ version '{version}', only GEMM is read",
            hint="give the GEMM version of the model",
        )
    expect(parts["qweight"], (columns, rows * _BITS // 32))
    groups = parts["qzeros"].shape[0] if parts["qzeros"].shape else 0
    if not groups or columns % groups:
        raise BadInput(
            f"{parts['qzeros'].name} has {groups} groups for {columns} inputs", hint="the file is damaged"
        )
    expect(parts["qzeros"], (groups, rows * _BITS // 32))
    expect(parts["scales"], (groups, rows))


def _codes(words: Raw, rows: int) -> Raw:
    codes = unpack(words, _BITS, rows).reshape(words.shape[0], -1, 8)
    return codes[..., _POSITIONS].reshape(words.shape[0], rows)


def _decode(pieces: Mapping[str, Piece], rows: int, columns: int, hints: Hints) -> Floats:
    scale = floats(pieces["scales"])
    weight = _codes(pieces["qweight"].data, rows).astype(np.float32)
    length = columns // scale.shape[0]
    weight -= np.repeat(_codes(pieces["qzeros"].data, rows).astype(np.float32), length, axis=0)
    weight *= np.repeat(scale, length, axis=0)
    return np.ascontiguousarray(weight.T)


AWQ = Encoding(
    name=_name, required=frozenset({"qweight", "qzeros", "scales"}), fits=_fits, check=_check, decode=_decode
)
