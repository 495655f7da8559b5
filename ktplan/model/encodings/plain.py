"""Weights stored as floats: bf16, fp16, fp32, and FP8 without a scale."""

from __future__ import annotations

from collections.abc import Mapping

from ktplan.errors import BadInput
from ktplan.model.encodings.pieces import Encoding, Floats, Hints, Part, Piece, expect, floats

_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3",
    "F8_E5M2": "float8_e5m2",
}


def _name(parts: Mapping[str, Part], rows: int, columns: int) -> str:
    return _NAMES[parts["weight"].dtype]


def _fits(parts: Mapping[str, Part], rows: int, columns: int) -> bool:
    return parts["weight"].dtype in _NAMES


def _check(parts: Mapping[str, Part], rows: int, columns: int, hints: Hints) -> None:
    weight = parts["weight"]
    expect(weight, (rows, columns))
    if weight.dtype.startswith("F8") and hints.method:
        raise BadInput(
            f"{weight.name} is FP8 of quant_method '{hints.method}' and its scale is missing",
            hint="the download is incomplete",
        )


def _decode(pieces: Mapping[str, Piece], rows: int, columns: int, hints: Hints) -> Floats:
    return floats(pieces["weight"]).reshape(rows, columns)


PLAIN = Encoding(name=_name, required=frozenset({"weight"}), fits=_fits, check=_check, decode=_decode)
