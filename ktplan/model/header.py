"""safetensors headers, read with suspicion: every claim is checked against the file before a byte is used.

Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors, README "Format").
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ktplan.errors import BadInput

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the limit of the reference implementation
_AGAIN = "download it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `start` counts from the beginning of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """All that a safetensors file says about itself."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of one file.

    Raises BadInput for a missing or cut file, a Git LFS pointer, a header that is too large or no JSON, and tensors
    whose dtype, shape and place contradict each other or the file's size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            _refuse_lfs_pointer(path, start + file.read(40))
            length = int.from_bytes(start, "little")
            if size < 8 or length > size - 8 or length > _MAX_HEADER:
                raise BadInput(
                    f"{path} is cut off or no safetensors file: its header announces {length:,} bytes, "
                    f"the file has {size:,}",
                    hint=_AGAIN,
                )
            file.seek(8)
            text = file.read(length)
    except OSError as fault:
        raise BadInput(
            f"{path} cannot be read: {fault.strerror}", hint="check the path and its permissions"
        ) from None
    entries = _parse(path, text)
    metadata = entries.pop("__metadata__", None) or {}
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_places(path, tensors, size, 8 + length)
    return Header(tensors, {str(key): str(value) for key, value in metadata.items()})


def read_bytes(info: TensorInfo, start: int, size: int) -> bytes:
    """`size` bytes of the tensor's file from `start`; raises BadInput, naming both, where they are not there."""
    try:
        with info.file.open("rb") as file:
            file.seek(start)
            raw = file.read(size)
    except OSError as fault:
        raise BadInput(
            f"{info.file} cannot be read: {fault.strerror} ({info.name})", hint="check the disk"
        ) from None
    if len(raw) != size:
        raise BadInput(f"{info.file} became shorter while it was read ({info.name})", hint="check the disk")
    return raw


def refuse_lfs_pointer(path: Path) -> None:
    """Raise BadInput where `path` is a Git LFS pointer instead of the file it points to."""
    with path.open("rb") as file:
        _refuse_lfs_pointer(path, file.read(48))


def _refuse_lfs_pointer(path: Path, beginning: bytes) -> None:
    if beginning.startswith(b"version https://git-lfs"):
        raise BadInput(
            f"{path} is a Git LFS pointer, not the file itself",
            hint="run 'git lfs pull' in that folder, or download the file",
        )


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(f"{path}: its header is not JSON; the file is damaged", hint=_AGAIN) from None
    if not isinstance(entries, dict):
        raise BadInput(f"{path}: its header is not a JSON object; the file is damaged", hint=_AGAIN)
    if not isinstance(entries.get("__metadata__", {}), dict | None):
        raise BadInput(f"{path}: the metadata in its header is no JSON object", hint=_AGAIN)
    return entries


def _tensor(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        plausible = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (TypeError, KeyError, ValueError):
        plausible = False
    if not plausible or not isinstance(dtype, str):
        raise BadInput(f"{path}: the header entry of {name} is damaged", hint=_AGAIN)
    item = ITEM_BYTES.get(dtype)
    if item is not None and prod(shape) * item != end - begin:
        raise BadInput(
            f"{path}: {name} claims {dtype} {list(shape)} = {prod(shape) * item:,} bytes "
            f"but its offsets span {end - begin:,}",
            hint=_AGAIN,
        )
    return TensorInfo(name, dtype, shape, path, data + begin, end - begin)


def _check_places(path: Path, tensors: dict[str, TensorInfo], size: int, data: int) -> None:
    end = data
    for info in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.bytes)):
        if info.start != end:
            raise BadInput(f"{path}: {info.name} overlaps its neighbour or leaves a hole", hint=_AGAIN)
        end = info.start + info.bytes
    if end < size:
        raise BadInput(f"{path} is damaged: it has {size:,} bytes, its header describes {end:,}", hint=_AGAIN)
    if end > size:
        first = next(t for t in tensors.values() if t.start + t.bytes > size)
        raise BadInput(
            f"{path} is cut off: it has {size:,} bytes, its header promises {end:,} (first short tensor: {first.name})",
            hint=_AGAIN,
        )
