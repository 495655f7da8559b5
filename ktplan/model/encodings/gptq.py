"""GPTQ: qweight i32 [columns*bits/32, rows], qzeros i32 [groups, rows*bits/32], scales [groups, rows], g_idx [columns].

Codes are packed along the inputs, low bits first: w[n, k] = scales[g, n] * (code - zero), g = g_idx[k]. Version 1 files
store zero - 1, version 2 files the zero; labels are wrong often enough (vllm#38966) that the words decide where they
can: symmetric files hold one word everywhere, 0x77777777 in version 1 and 0x88888888 in version 2.
Sources: AutoGPTQ nn_modules/qlinear, GPTQModel utils/model.py (convert_gptq_v1_to_v2_format).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ktplan.errors import BadInput
from ktplan.model.encodings.pieces import Encoding, Floats, Hints, Part, Piece, Raw, expect, floats, unpack

_BITS = (2, 3, 4, 5, 6, 7, 8)


def _bits(parts: Mapping[str, Part], columns: int) -> int:
    return parts["qweight"].shape[0] * 32 // columns


def _name(parts: Mapping[str, Part], rows: int, columns: int) -> str:
    return f"gptq int{_bits(parts, columns)}"


def _fits(parts: Mapping[str, Part], rows: int, columns: int) -> bool:
    shape = parts["qweight"].shape
    return len(shape) == 2 and shape[1] == rows and (shape[0] * 32) % columns == 0


def _check(parts: Mapping[str, Part], rows: int, columns: int, hints: Hints) -> None:
    stored = hints.text("checkpoint_format") or hints.text("format")
    if stored not in ("", "gptq", "gptq_v2"):
        raise BadInput(
            f"{parts['qweight'].name}: quantization_config says GPTQ checkpoint_format '{stored}'",
            hint="give a file in the format 'gptq' or 'gptq_v2'",
        )
    bits = _bits(parts, columns)
    if bits not in _BITS:
        raise BadInput(
            f"{parts['qweight'].name} has shape {list(parts['qweight'].shape)}: "
            f"{bits} bits for {columns} inputs",
            hint="config.json belongs to another model, or the file is damaged",
        )
    groups = parts["scales"].shape[0] if parts["scales"].shape else 0
    expect(parts["scales"], (groups, rows))
    expect(parts["qzeros"], (groups, rows * bits // 32))
    if "g_idx" in parts:
        expect(parts["g_idx"], (columns,))
    elif not groups or columns % groups:
        raise BadInput(
            f"{parts['scales'].name} has {groups} groups for {columns} inputs and there is no g_idx",
            hint="the file is damaged",
        )


def stored_zero_is_less_one(words: Raw, bits: int, hints: Hints) -> bool:
    """Whether qzeros hold zero - 1 (version 1). The words decide in symmetric files, else the label, else version 1."""
    if hints.settings.get("sym") is not False and words.size and 32 % bits == 0:
        first = int(words.flat[0]) & 0xFFFFFFFF
        if np.all(words == words.flat[0]):
            middle = 1 << (bits - 1)
            repeated = sum(1 << shift for shift in range(0, 32, bits))
            if first in ((middle - 1) * repeated, middle * repeated):
                return first == (middle - 1) * repeated
    return (hints.text("checkpoint_format") or hints.text("format")) != "gptq_v2"


def _decode(pieces: Mapping[str, Piece], rows: int, columns: int, hints: Hints) -> Floats:
    words, scale = pieces["qweight"].data, floats(pieces["scales"])
    bits = words.shape[0] * 32 // columns
    zeros = unpack(pieces["qzeros"].data, bits, rows)
    if stored_zero_is_less_one(pieces["qzeros"].data, bits, hints):
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    groups = scale.shape[0]
    index = pieces["g_idx"].data if "g_idx" in pieces else np.arange(columns) // (columns // groups)
    if index.size and not 0 <= index.min() <= index.max() < groups:
        raise BadInput(
            f"g_idx points to group {int(index.max())} of {groups}",
            hint="the file is damaged; download it again",
        )
    weight = unpack(words.T, bits, columns).astype(np.float32)
    weight -= zeros.T.astype(np.float32)[:, index]
    weight *= scale.T[:, index]
    return weight


GPTQ = Encoding(
    name=_name,
    required=frozenset({"qweight", "qzeros", "scales"}),
    optional=frozenset({"g_idx"}),
    fits=_fits,
    check=_check,
    decode=_decode,
)
