"""FP8 with scales: by block (DeepSeek, Qwen, MXFP8), by row, by tensor.

w = value * scale. The scale is called weight_scale_inv in DeepSeek's files (a misnomer: it multiplies), weight_scale in
compressed-tensors' and ModelOpt's, scale in DeepSeek-V4's. It is float, or an E8M0 exponent byte (`scale_fmt: ue8m0`).
Blocks at the right and lower edge are padded: a matrix of 192 rows has two rows of blocks of 128.
Sources: transformers integrations/finegrained_fp8.py, compressed-tensors quantization/lifecycle/forward.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ktplan.errors import BadInput
from ktplan.model.encodings.pieces import Encoding, Floats, Hints, Part, Piece, expect, floats

_SCALES = ("F32", "F16", "BF16", "F8_E8M0", "U8")
_USUAL = (128, 128)


def _block(scale: tuple[int, ...], rows: int, columns: int, hints: Hints) -> tuple[int, int] | None:
    """Rows and columns a scale stands for: the configured block, the usual one, or what divides evenly."""
    if len(scale) != 2:
        return None
    for block in (hints.block, _USUAL):
        if block and scale == (-(-rows // block[0]), -(-columns // block[1])):
            return block
    if 0 not in scale and rows % scale[0] == 0 and columns % scale[1] == 0:
        return rows // scale[0], columns // scale[1]
    return None


def _kind(scale: tuple[int, ...], rows: int) -> str:
    if scale in ((), (1,), (1, 1)):
        return "tensor"
    return "channel" if scale in ((rows,), (rows, 1)) else "block"


def _name(parts: Mapping[str, Part], rows: int, columns: int) -> str:
    return f"float8 per {_kind(parts['scale'].shape, rows)}"


def _fits(parts: Mapping[str, Part], rows: int, columns: int) -> bool:
    return parts["weight"].dtype in ("F8_E4M3", "F8_E5M2") and parts["scale"].dtype in _SCALES


def _check(parts: Mapping[str, Part], rows: int, columns: int, hints: Hints) -> None:
    expect(parts["weight"], (rows, columns))
    scale = parts["scale"].shape
    if _kind(scale, rows) == "block" and _block(scale, rows, columns, hints) is None:
        block = hints.block or _USUAL
        raise BadInput(
            f"{parts['scale'].name} has shape {list(scale)}; a weight of {[rows, columns]} in blocks "
            f"of {list(block)} has {[-(-rows // block[0]), -(-columns // block[1])]}",
            hint="weight_block_size in config.json does not belong to these files, or a file is damaged",
        )


def _decode(pieces: Mapping[str, Piece], rows: int, columns: int, hints: Hints) -> Floats:
    weight, scale = floats(pieces["weight"]), floats(pieces["scale"])
    kind = _kind(scale.shape, rows)
    if kind != "block":
        return weight * scale.reshape(-1, 1)
    block = _block(scale.shape, rows, columns, hints)
    assert block is not None  # _check has seen these shapes
    for start in range(scale.shape[0]):  # one row of blocks at a time: no second matrix of scales
        band = slice(start * block[0], min(rows, (start + 1) * block[0]))
        weight[band] *= np.repeat(scale[start], block[1])[:columns]
    return weight


FP8 = Encoding(name=_name, required=frozenset({"weight", "scale"}), fits=_fits, check=_check, decode=_decode)
