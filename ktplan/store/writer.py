"""Writing one shard of a store: the header is computed from the sizes, then experts go out one after the other.

An unmodified kt-kernel reads the result: it walks the folder for *.safetensors and goes by tensor names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from ktplan.artifact import cannot_write, write_whole
from ktplan.errors import DoesNotFit, KtplanError
from ktplan.quant.groups import U16
from ktplan.quant.rounding import F32
from ktplan.store.layout import U8
from ktplan.store.manifest import KIND, VERSION, StoreFile, StoreManifest, StoreShape
from ktplan.units import format_bytes

INDEX_FILE = "model.safetensors.index.json"
_PAGE = 4096


def shard_name(number: int, count: int) -> str:
    """The name of the shard `number` (from 1) of `count`, as kt-kernel's converter names it."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def shard_header(shape: StoreShape, layer: int, facts: Mapping[str, str]) -> bytes:
    """The beginning of a shard up to its first tensor.

    Padded with spaces (the format allows it) to whole pages, so that data starts on a page; sizes are such that every
    tensor then lies on a multiple of 64 bytes, and kernels read weights straight from the file's map.
    """
    entries: dict[str, object] = {
        "__metadata__": {**facts, "format": KIND, "version": str(VERSION), "layer": str(layer)},
    }
    start = 0
    for tensor in shape.layer_tensors(layer):
        end = start + tensor.bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": [tensor.elements],
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(8 + len(text)) % _PAGE + len(text)
    return length.to_bytes(8, "little") + text.ljust(length)


def shard_bytes(shape: StoreShape, layer: int, facts: Mapping[str, str]) -> int:
    """Size of a layer's file."""
    return len(shard_header(shape, layer, facts)) + shape.layer_bytes(layer)


class ShardWriter:
    """One layer's shard, front to back; its digest is made on the way. Use as a context manager.

    Raises DoesNotFit naming the file and its size where the disk is full, KtplanError for other trouble.
    """

    def __init__(self, path: Path, shape: StoreShape, layer: int, facts: Mapping[str, str]) -> None:
        self._path, self._layer = path, layer
        self._bytes = shard_bytes(shape, layer, facts)
        self._written = 0
        self._digest = hashlib.sha256()
        self._handle: int | None = None
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as fault:
            raise cannot_write(path, fault) from fault
        self._put(shard_header(shape, layer, facts))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, whole or not."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)

    def add(self, arrays: Iterable[U8 | F32 | U16]) -> int:
        """The next expert: for each part three packed weights and three scales, or all in one. Returns their bytes."""
        before = self._written
        for array in arrays:
            self._put(array.data.cast("B"))
        return self._written - before

    def flush(self) -> None:
        """Have the disk take what was written so far; may run while more is written."""
        try:
            if self._handle is not None:
                os.fdatasync(self._handle)
        except OSError as fault:
            raise self._trouble(fault) from fault

    def finish(self, name: str) -> StoreFile:
        """Make the file durable; `name` is what it will be called."""
        assert self._written == self._bytes, f"layer {self._layer}: {self._written} of {self._bytes} bytes"
        assert self._handle is not None
        try:
            os.fsync(self._handle)
        except OSError as fault:
            raise self._trouble(fault) from fault
        return StoreFile(
            name=name, layer=self._layer, bytes=self._bytes, sha256="sha256:" + self._digest.hexdigest()
        )

    def _put(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        self._digest.update(left)
        self._written += len(left)
        assert self._handle is not None
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError as fault:
            raise self._trouble(fault) from fault

    def _trouble(self, fault: OSError) -> KtplanError:
        if fault.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return cannot_write(self._path, fault)
        free = shutil.disk_usage(self._path.parent).free
        return DoesNotFit(
            f"{self._path} cannot be written: {fault.strerror}; layer {self._layer} needs {format_bytes(self._bytes)}, "
            f"{format_bytes(free)} are free there",
            hint="free disk space (or raise the limit on file sizes), or choose another output with -o",
        )


def write_index(folder: Path, manifest: StoreManifest) -> None:
    """The index beside the shards, as Hugging Face tools know it."""
    shape = manifest.shape
    places = {tensor.name: file.name for file in manifest.files for tensor in shape.layer_tensors(file.layer)}
    size = sum(map(shape.layer_bytes, manifest.layers))
    body = {"metadata": {"total_size": size}, "weight_map": places}
    write_whole(folder / INDEX_FILE, (json.dumps(body, indent=1, sort_keys=True) + "\n").encode())
