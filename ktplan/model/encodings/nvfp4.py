"""NVFP4: FP4 E2M1 codes, one E4M3 scale for 16 inputs of a row, one float32 number for the tensor.

compressed-tensors (nvfp4-pack-quantized) stores that number as a divisor, weight_global_scale: w = LUT[code] * s / g;
ModelOpt as a factor, weight_scale_2: w = LUT[code] * s * f. LUT * s is exact in float32, so a value is rounded once.
Sources: compressed-tensors compressors/nvfp4; NVIDIA ModelOpt quantization/qtensor/nvfp4_tensor.py.
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
    floats,
    fp4,
)

_GROUP = 16


def _name(parts: Mapping[str, Part], rows: int, columns: int) -> str:
    return "nvfp4"


def _fits(parts: Mapping[str, Part], rows: int, columns: int) -> bool:
    return parts["weight"].dtype in ("U8", "I8") and parts["scale"].dtype == "F8_E4M3"


def _check(parts: Mapping[str, Part], rows: int, columns: int, hints: Hints) -> None:
    expect(parts["weight"], (rows, columns // 2))
    expect(parts["scale"], (rows, columns // _GROUP))
    for part in ("divisor", "factor"):
        if part in parts:
            expect(parts[part], (), (1,))


def _decode(pieces: Mapping[str, Piece], rows: int, columns: int, hints: Hints) -> Floats:
    weight = fp4(pieces["weight"].data, floats(pieces["scale"]), rows, columns)
    if "divisor" in pieces:
        weight /= floats(pieces["divisor"]).reshape(())
    else:
        weight *= floats(pieces["factor"]).reshape(())
    return weight


NVFP4_DIVISOR = Encoding(
    name=_name, required=frozenset({"weight", "scale", "divisor"}), fits=_fits, check=_check, decode=_decode
)
NVFP4_FACTOR = Encoding(
    name=_name, required=frozenset({"weight", "scale", "factor"}), fits=_fits, check=_check, decode=_decode
)
