"""GGUF headers, read with suspicion: every claim is checked against the file before a byte of data is used.

Format: magic "GGUF", version, tensor count, key count; keys; tensor infos (name, dimensions fastest first, type,
offset); data, aligned (ggml docs/gguf.md). Long arrays (vocabularies) are counted, not read:
a header costs milliseconds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from ktplan.errors import BadInput
from ktplan.model.header import TensorInfo, refuse_lfs_pointer

_VERSIONS = (2, 3)
_AGAIN = "download it again"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ARRAY = 4096  # longer arrays are known by their length only
_MAX_RANK = 8


@dataclass(frozen=True, slots=True)
class Length:
    """A long array, of which only the length was read."""

    count: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All that a GGUF file says about itself; tensor shapes slowest axis first, as numpy has them."""

    file: Path
    values: Mapping[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self.place = path, data, 0

    def take(self, form: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + form, self._data, self.place)
        except struct.error:
            raise self._cut() from None
        self.place += struct.calcsize("<" + form)
        return value

    def text(self) -> str:
        length = self.take("Q")
        if length > len(self._data) - self.place:
            raise self._cut()
        raw = self._data[self.place : self.place + length]
        self.place += length
        return raw.decode("utf-8", errors="replace")

    def skip(self, count: int) -> None:
        if count > len(self._data) - self.place:
            raise self._cut()
        self.place += count

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise BadInput(
                f"{self._path}: a key has the unknown type {kind}; the header is damaged", hint=_AGAIN
            )
        return self.take(_SCALARS[kind])

    def _array(self) -> Any:
        kind, count = self.take("I"), self.take("Q")
        if kind in _SCALARS and count > _MAX_ARRAY:
            self.skip(count * struct.calcsize(_SCALARS[kind]))
            return Length(count)
        if kind == _STRING and count > _MAX_ARRAY:
            for _ in range(count):
                self.skip(self.take("Q"))
            return Length(count)
        return [self.value(kind) for _ in range(count)]

    def _cut(self) -> BadInput:
        return BadInput(
            f"{self._path} is cut off or damaged: it ends inside its header at {len(self._data):,} bytes",
            hint=_AGAIN,
        )


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of one GGUF file.

    Raises BadInput for a missing, foreign, cut, big-endian or unknown-version file, and naming the tensor for an
    unknown type or data beyond the end of the file.
    """
    try:
        refuse_lfs_pointer(path)
        size = path.stat().st_size
        if size < 24:
            raise BadInput(f"{path} is cut off: it has {size:,} bytes, less than a GGUF header", hint=_AGAIN)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(path, data), size)
    except OSError as fault:
        raise BadInput(
            f"{path} cannot be read: {fault.strerror}", hint="check the path and its permissions"
        ) from None


def _read(path: Path, cursor: _Cursor, size: int) -> GgufHeader:
    magic, version = cursor.take("4s"), cursor.take("I")
    if magic != b"GGUF":
        raise BadInput(f"{path} is no GGUF file", hint="give a folder, a .safetensors or a .gguf file")
    if version & 0xFFFF == 0:
        raise BadInput(
            f"{path} is a big-endian GGUF file, which cannot be read", hint="give the little-endian version"
        )
    if version not in _VERSIONS:
        raise BadInput(
            f"{path} has GGUF version {version}, known are 2 and 3", hint="convert it with llama.cpp"
        )
    count, keys = cursor.take("Q"), cursor.take("Q")
    values: dict[str, Any] = {}
    for _ in range(keys):
        name = cursor.text()
        values[name] = cursor.value(cursor.take("I"))
    described = [_describe(path, cursor) for _ in range(count)]
    alignment = values.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise BadInput(f"{path}: general.alignment is {alignment!r}", hint=_AGAIN)
    data = -(-cursor.place // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in described:
        info = _placed(path, name, shape, kind, data + offset)
        if name in tensors or info.start + info.bytes > size:
            raise BadInput(
                f"{path} is cut off or damaged: {name} ends at byte {info.start + info.bytes:,}, the file has "
                f"{size:,} bytes"
                if name not in tensors
                else f"{path}: {name} is there twice",
                hint=_AGAIN,
            )
        tensors[name] = info
    return GgufHeader(path, values, tensors)


def _describe(path: Path, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, rank = cursor.text(), cursor.take("I")
    if rank > _MAX_RANK:
        raise BadInput(f"{path}: {name} has {rank} dimensions; the header is damaged", hint=_AGAIN)
    shape = tuple(cursor.take("Q") for _ in range(rank))
    return name, shape[::-1], cursor.take("I"), cursor.take("Q")


def _placed(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        raise BadInput(
            f"{path}: {name} has the unknown type {kind}",
            hint="update gguf, or give another quantization of the model",
        ) from None
    block, item = GGML_QUANT_SIZES[known]
    row = shape[-1] if shape else 1
    if row % block:
        raise BadInput(
            f"{path}: {name} has rows of {row}, {known.name} needs a multiple of {block}", hint=_AGAIN
        )
    return TensorInfo(name, known.name, shape, path, start, prod(shape) // block * item)
