"""Expert counts from llama.cpp's importance matrix in GGUF form.

`llama-imatrix` writes, for each `blk.N.ffn_{gate,up,down}_exps.weight`, a tensor `<name>.counts` (F32, one value for
each expert): the token slots routed to it (tools/imatrix/imatrix.cpp). Prompts alone pass through it.
The older .dat form scales all experts by one count and has lost them.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadInput
from ktplan.model import ModelSpec
from ktplan.profile.imports import Imported, from_counts

_MAGIC: Final = b"GGUF"
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_F32: Final = 0
_COUNTS: Final = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down|gate_up)_exps\.weight\.counts")
_LIMIT: Final = 1 << 24  # names, arrays and tensors beyond this are damage, not data


class _Reader:
    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self.data, self.at = path, data, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise BadInput(f"{self._path} is cut off at byte {len(self.data):,}", hint="copy the file again")
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return self.take(self._sane(self.scalar("<Q"))).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalar("<I"), self._sane(self.scalar("<Q"))
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise BadInput(f"{self._path} has a value of unknown type {kind}", hint="copy the file again")
        return self.scalar(_SCALARS[kind])

    def _sane(self, count: int) -> int:
        if count > _LIMIT:
            raise BadInput(f"{self._path} announces {count:,} entries", hint="the file is damaged")
        return count


def read_imatrix(spec: ModelSpec, path: Path) -> Imported:
    """The counts as a prompt profile. Raises BadInput for the .dat form, damage, other models or absent layers."""
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise BadInput(f"{path} cannot be read: {fault.strerror}", hint="check the path") from None
    if data[:4] != _MAGIC:
        raise BadInput(
            f"{path} is no GGUF file",
            hint="the older .dat form of imatrix has lost the counts of single experts: run llama-imatrix again with a "
            "name that ends in .gguf",
        )
    about, tensors = _read(path, data)
    rows: dict[int, npt.NDArray[np.float32]] = {}
    for name, values in tensors.items():
        found = _COUNTS.fullmatch(name)
        if found is None:
            continue
        layer = int(found.group(1))
        if layer in rows and not np.array_equal(rows[layer], values):
            raise BadInput(
                f"{path}: the projections of layer {layer} have different counts", hint="make the file again"
            )
        rows[layer] = values
    if not rows:
        raise BadInput(
            f"{path} has no expert counts", hint="it was made for a dense model, or by an old llama-imatrix"
        )
    missing = [layer for layer in spec.moe_layers if layer not in rows]
    alien = [layer for layer in rows if layer not in spec.moe_layers]
    sizes = {len(row) for row in rows.values()}
    if missing or alien or sizes != {spec.experts}:
        raise BadInput(
            f"{path} counts layers {sorted(rows)[0]}-{sorted(rows)[-1]} ({len(rows)}) x {sorted(sizes)} "
            f"experts; {spec.name} "
            f"has {len(spec.moe_layers)} MoE layers x {spec.experts} experts",
            hint="the file belongs to another model",
        )
    datasets = about.get("imatrix.datasets")
    notes = ["imatrix counts are of prompts alone; profile generated tokens for a placement that serves them"]
    if datasets:
        notes.append(
            f"recorded on {', '.join(map(str, datasets)) if isinstance(datasets, list) else datasets}"
        )
    counts = np.stack([rows[layer] for layer in spec.moe_layers])
    return from_counts(spec, counts, path, "imatrix", phases="prefill", notes=notes)


def _read(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.float32]]]:
    reader = _Reader(path, data)
    reader.take(4)
    version = reader.scalar("<I")
    if version not in (2, 3):
        raise BadInput(f"{path} is GGUF version {version}; 2 and 3 are read", hint="big-endian files are not")
    count, pairs = reader._sane(reader.scalar("<Q")), reader._sane(reader.scalar("<Q"))
    about = {}
    for _ in range(pairs):
        key = reader.text()
        about[key] = reader.value(reader.scalar("<I"))
    places: list[tuple[str, int, int, int]] = []
    for _ in range(count):
        name = reader.text()
        size = 1
        for _ in range(min(reader.scalar("<I"), 8)):
            size *= reader.scalar("<Q")
        places.append((name, size, reader.scalar("<I"), reader.scalar("<Q")))
    align = int(about.get("general.alignment", 32)) or 32
    start = -(-reader.at // align) * align
    tensors = {}
    for name, size, kind, offset in places:
        if kind == _F32 and start + offset + 4 * size > len(data):
            raise BadInput(f"{path} is cut off inside {name}", hint="copy the file again")
        if not name.endswith(".counts"):
            continue
        if kind != _F32:
            raise BadInput(f"{path}: {name} has type {kind}, F32 is expected", hint="make the file again")
        reader.at = start + offset
        tensors[name] = np.frombuffer(reader.take(4 * reader._sane(size)), dtype="<f4")
    return about, tensors
