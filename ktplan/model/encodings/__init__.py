"""How matrices lie in safetensors files, one module an encoding; told apart by tensor names, dtypes and shapes.

A matrix is a stem (`...experts.3.gate_proj`) and tensors that add a suffix to it. SUFFIXES gives the part each suffix
holds; `recognise` finds the encoding from the parts that are there. config.json's quantization_config is a hint, used
where files leave something open (Hints).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ktplan.errors import BadInput
from ktplan.model.encodings.awq import AWQ
from ktplan.model.encodings.fp8 import FP8
from ktplan.model.encodings.gptq import GPTQ
from ktplan.model.encodings.mxfp4 import MXFP4
from ktplan.model.encodings.nvfp4 import NVFP4_DIVISOR, NVFP4_FACTOR
from ktplan.model.encodings.packed import INTEGER, PACKED
from ktplan.model.encodings.pieces import NUMPY, Encoding, Floats, Hints, Part, Piece, floats
from ktplan.model.encodings.plain import PLAIN

# The order matters where two encodings fit the same parts: the more particular comes first.
ENCODINGS = (GPTQ, AWQ, NVFP4_DIVISOR, NVFP4_FACTOR, PACKED, MXFP4, FP8, INTEGER, PLAIN)

# Suffix of a tensor name to the part it holds. IGNORED ones describe activations or repeat what shapes say.
SUFFIXES = {
    "": "weight", ".weight": "weight", "_weight": "weight", "_blocks": "weight",
    ".weight_scale_inv": "scale", "_scale_inv": "scale", "_weight_scale_inv": "scale",
    ".weight_scale": "scale", "_weight_scale": "scale", ".scale": "scale", "_scales": "scale", "_scale": "scale",
    ".weight_packed": "packed", ".weight_global_scale": "divisor", ".weight_scale_2": "factor",
    "_weight_scale_2": "factor", ".weight_zero_point": "zero", ".weight_g_idx": "order",
    ".qweight": "qweight", ".qzeros": "qzeros", ".scales": "scales", ".g_idx": "g_idx",
    ".bias": "bias", "_bias": "bias",
}  # fmt: skip
IGNORED = frozenset({
    ".weight_shape", ".input_scale", "_input_scale", ".input_global_scale", ".output_scale", ".input_zero_point",
    ".weight_quantizer._amax", ".input_quantizer._amax",
})  # fmt: skip

METHODS = frozenset({
    "fp8", "finegrained_fp8", "fbgemm_fp8", "mxfp4", "gptq", "gptqmodel", "awq", "compressed-tensors", "modelopt",
    "modelopt_fp4", "nvfp4", "auto-round", "auto_round", "mxfp8",
})  # fmt: skip


def recognise(parts: Mapping[str, Part], rows: int, columns: int, hints: Hints) -> Encoding:
    """The encoding of a matrix [rows, columns], its shapes checked.

    Raises BadInput naming the tensors and their dtypes where no encoding fits, or the one whose shape contradicts it.
    """
    there = _fp4_unpacked(parts, parts)
    for encoding in ENCODINGS:
        known = encoding.required | encoding.optional
        if encoding.required <= set(there) <= known and encoding.fits(there, rows, columns):
            encoding.check(there, rows, columns, hints)
            return encoding
    said = f"; quantization_config says '{hints.method}'" if hints.method else ""
    found = ", ".join(f"{part.name} {part.dtype} {list(part.shape)}" for _, part in sorted(parts.items()))
    raise BadInput(f"weights are stored in a way that is not known: {found}{said}", hint=OTHER_VERSION)


def decode(encoding: Encoding, pieces: Mapping[str, Piece], rows: int, columns: int, hints: Hints) -> Floats:
    """float32 [rows, columns] from the pieces of one matrix."""
    parts = {name: Part(piece.dtype, piece.data.shape) for name, piece in pieces.items()}
    return encoding.decode(_fp4_unpacked(pieces, parts), rows, columns, hints)


_Each = TypeVar("_Each")


def _fp4_unpacked(values: Mapping[str, _Each], parts: Mapping[str, Part]) -> dict[str, _Each]:
    """compressed-tensors calls FP4 pairs weight_packed too: where it is u8, it is the weight of an FP4 encoding."""
    fp4 = "packed" in parts and parts["packed"].dtype == "U8"
    return {("weight" if fp4 and name == "packed" else name): value for name, value in values.items()}


OTHER_VERSION = "give the bfloat16 version of the model"

__all__ = [
    "ENCODINGS",
    "IGNORED",
    "METHODS",
    "NUMPY",
    "OTHER_VERSION",
    "SUFFIXES",
    "Encoding",
    "Floats",
    "Hints",
    "Part",
    "Piece",
    "decode",
    "floats",
    "recognise",
]
