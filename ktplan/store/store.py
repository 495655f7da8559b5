"""The expert store: packed experts of one model in a folder, mapped and never copied.

The folder is what an unmodified kt-kernel loads (its tensor names and bytes) plus `store.json`, which says what it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ktplan.artifact import sha256_file
from ktplan.errors import BadInput
from ktplan.experts import format_ranges
from ktplan.model.header import read_header
from ktplan.model.source import PROJECTIONS, ExpertWeights
from ktplan.model.spec import ModelSpec
from ktplan.progress import SILENT, Progress
from ktplan.quant.rounding import F32, QuantizedRows, dequantize
from ktplan.store.layout import U8, layout_for, unpack
from ktplan.store.manifest import JOB_FILE, MANIFEST_FILE, StoreFile, StoreManifest

_ALIGNMENT = 64  # bytes; what the kernels' loads ask for


class PackedArrays(NamedTuple):
    """One part of one expert: packed bytes uint8 [N*K*bits/8] and scales float32 [N]; read-only, 64-byte aligned."""

    gate: U8
    gate_scale: F32
    up: U8
    up_scale: F32
    down: U8
    down_scale: F32

    def pairs(self) -> tuple[tuple[U8, F32], ...]:
        """Weight and scale of gate, up and down."""
        return (self.gate, self.gate_scale), (self.up, self.up_scale), (self.down, self.down_scale)


class ExpertStore:
    """A finished store, opened for reading. Shards are mapped when a layer is first asked for."""

    def __init__(self, path: Path, manifest: StoreManifest) -> None:
        self._path, self._manifest = path, manifest
        self._files = {file.layer: file for file in manifest.files}
        self._layers: dict[int, dict[str, U8]] = {}

    @classmethod
    def open(cls, path: Path) -> ExpertStore:
        """Open the folder `path`; checks `store.json` and the size of every shard, reads no weights.

        Raises BadInput for a folder that is not a finished store, a shard that is missing or cut off, another version.
        """
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
            raise BadInput(
                f"{path} {what}; an expert store is a folder", hint="make one with ktplan convert-cpu"
            )
        if not (path / MANIFEST_FILE).is_file():
            raise _unfinished(path)
        manifest = StoreManifest.load(path)
        for file in manifest.files:
            _check_size(path / file.name, file)
        return cls(path, manifest)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def manifest(self) -> StoreManifest:
        return self._manifest

    @property
    def bytes(self) -> int:
        """Size of all shards."""
        return self._manifest.total_bytes

    def check_model(self, spec: ModelSpec) -> None:
        """Raise BadInput where the store was made from another model than `spec` describes."""
        if self._manifest.fingerprint != spec.fingerprint:
            raise BadInput(
                f"{self._path} was made from {self._manifest.model} ({_short(self._manifest.fingerprint)}), "
                f"this model is {spec.name} ({_short(spec.fingerprint)})",
                hint=f"give the store of this model, or make one with ktplan convert-cpu {spec.name} -o STORE",
            )

    def packed(self, layer: int, expert: int, part: int = 0) -> PackedArrays:
        """One part of one expert as views of the mapped file.

        Raises BadInput for a layer, expert or part that the store does not hold, and for a damaged shard.
        """
        manifest = self._manifest
        tensors = self._layer(layer)
        if not 0 <= expert < manifest.experts or not 0 <= part < manifest.parts:
            raise BadInput(
                f"{self._path} has experts 0-{manifest.experts - 1} in parts 0-{manifest.parts - 1}, "
                f"not expert {expert}, part {part}",
                hint="this store belongs to another model or another NUMA split",
            )
        names = [tensor.name for tensor in manifest.shape.tensors(layer, expert, part)]
        weights = [tensors[name] for name in names[:3]]
        scales = [tensors[name].view(np.float32) for name in names[3:]]
        return PackedArrays(weights[0], scales[0], weights[1], scales[1], weights[2], scales[2])

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """The float32 weights that the packed expert stands for, its parts put together."""
        shape = self._manifest.shape
        bits = shape.bits_of(layer, expert)
        pieces: dict[str, list[F32]] = {projection: [] for projection in PROJECTIONS}
        for part in range(shape.parts):
            packed = self.packed(layer, expert, part)
            for projection, (weight, scale) in zip(PROJECTIONS, packed.pairs(), strict=True):
                levels = unpack(weight, *shape.rows_and_columns(projection), bits)
                pieces[projection].append(
                    dequantize(QuantizedRows(levels, scale, layout_for(bits).tile_bits))
                )
        return ExpertWeights(
            np.concatenate(pieces["gate"], axis=0),
            np.concatenate(pieces["up"], axis=0),
            np.concatenate(pieces["down"], axis=1),
        )

    def verify(self, progress: Progress = SILENT) -> None:
        """Read every shard and compare its digest. Raises BadInput naming the first one that differs."""
        with progress.task("verifying", self.bytes, "B") as task:
            for file in self._manifest.files:
                if sha256_file(self._path / file.name) != file.sha256:
                    raise _damaged(self._path / file.name, "its digest differs from store.json")
                task.advance(file.bytes)

    def _layer(self, layer: int) -> dict[str, U8]:
        if layer not in self._layers:
            self._layers[layer] = self._map(layer)
        return self._layers[layer]

    def _map(self, layer: int) -> dict[str, U8]:
        file = self._files.get(layer)
        if file is None:
            raise BadInput(
                f"{self._path} has no experts of layer {layer}; its layers are {format_ranges(self._manifest.layers)}",
                hint="this store belongs to another model",
            )
        path = self._path / file.name
        _check_size(path, file)
        found = read_header(path).tensors
        mapped = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        tensors: dict[str, U8] = {}
        for tensor in self._manifest.shape.layer_tensors(layer):
            info = found.get(tensor.name)
            if info is None or (info.dtype, info.shape) != (tensor.dtype, (tensor.elements,)):
                raise _damaged(path, f"{tensor.name} is missing or not {tensor.dtype} [{tensor.elements}]")
            if info.start % _ALIGNMENT:
                raise _damaged(path, f"{tensor.name} does not lie on a multiple of {_ALIGNMENT} bytes")
            tensors[tensor.name] = mapped[info.start : info.start + info.bytes]
        return tensors


def _unfinished(path: Path) -> BadInput:
    if (path / JOB_FILE).is_file():
        return BadInput(
            f"{path} is an unfinished conversion: there is no {MANIFEST_FILE} yet",
            hint=f"ktplan convert-cpu --resume {path} goes on where it stopped",
        )
    return BadInput(
        f"{path} is not a finished expert store: there is no {MANIFEST_FILE}",
        hint="make one with ktplan convert-cpu; kt-kernel's own folders lack the facts that ktplan needs",
    )


def _check_size(path: Path, file: StoreFile) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise _damaged(path, f"the shard of layer {file.layer} is missing") from None
    if size != file.bytes:
        raise _damaged(path, f"it has {size:,} bytes, store.json says {file.bytes:,}")


def _damaged(path: Path, why: str) -> BadInput:
    return BadInput(f"{path} is damaged: {why}", hint="copy the store again or convert the model again")


def _short(fingerprint: str) -> str:
    kind, _, digits = fingerprint.partition(":")
    return f"{kind}:{digits[:12]}"
