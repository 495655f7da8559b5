"""A safetensors file written front to back: names, types and shapes first, then the data of one tensor after another.

What is in memory is one tensor, however large the file. The digest is made on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ktplan.artifact import cannot_write
from ktplan.model.header import ITEM_BYTES

_ALIGNMENT = 8  # of the first tensor, as the reference implementation pads


class Entry(NamedTuple):
    """A tensor that a file will hold: safetensors' word for its type, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)


class WrittenFile(NamedTuple):
    """A finished file: its name, size and digest."""

    name: str
    bytes: int
    sha256: str


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """All bytes of a file before its first tensor."""
    places: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for entry in entries:
        places[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.bytes],
        }
        start += entry.bytes
    text = json.dumps(places, separators=(",", ":")).encode()
    text = text.ljust(len(text) + -len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def file_bytes(entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
    """Size of the file that holds these tensors."""
    return len(header(entries, metadata)) + sum(entry.bytes for entry in entries)


class TensorFile:
    """The file under way; `put` takes the tensors in the order of `entries`. Use as a context manager.

    Raises DoesNotFit or KtplanError naming the file where it cannot be written.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self._path, self._left = path, list(reversed(entries))
        self._digest = hashlib.sha256()
        self._bytes = 0
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as fault:
            raise cannot_write(path, fault) from fault
        self._write(header(entries, metadata))

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """The data of the next tensor, in pieces."""
        entry = self._left.pop()
        assert entry.name == name, f"{name} comes where {entry.name} belongs"
        before = self._bytes
        for piece in pieces:
            self._write(piece)
        assert self._bytes - before == entry.bytes, f"{name}: {self._bytes - before} of {entry.bytes} bytes"

    def finish(self, name: str) -> WrittenFile:
        """Make the file durable; `name` is what it will be called."""
        assert not self._left, f"{self._left[-1].name} was not written"
        try:
            os.fsync(self._file.fileno())
        except OSError as fault:
            raise cannot_write(self._path, fault) from fault
        return WrittenFile(name, self._bytes, "sha256:" + self._digest.hexdigest())

    def _write(self, data: bytes | memoryview) -> None:
        left = memoryview(data).cast("B")
        self._digest.update(left)
        self._bytes += len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as fault:
            raise cannot_write(self._path, fault) from fault
