"""The expert store: packed experts of one model in a folder, mapped and never copied.

The folder is what an unmodified kt-kernel loads (its tensor names and bytes) plus `store.json`, which says what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from ktplan.quant.groups import U16, Bfloat16Rows, QuantizedGroups
from ktplan.quant.rounding import F32, QuantizedRows
from ktplan.quant.stored import Stored, dequantize_stored
from ktplan.store.foreign import ForeignFolder, find_foreign, load_layer
from ktplan.store.layout import U8, Layout, unpack, unpack_bfloat16, unpack_scales
from ktplan.store.manifest import JOB_FILE, MANIFEST_FILE, StoreFile, StoreManifest
from ktplan.store.mapping import map_file

_ALIGNMENT = 64  # bytes; what the kernels' loads ask for


class PackedArrays(NamedTuple):
    """One part of one expert: packed bytes uint8 [N*K*bits/8] and their scales; read-only, 64-byte aligned.

    Scales are float32 [N], with groups bfloat16 bit patterns, uint16 [N / 32, K / group, 32], None for bfloat16.
    """

    gate: U8
    gate_scale: F32 | U16 | None
    up: U8
    up_scale: F32 | U16 | None
    down: U8
    down_scale: F32 | U16 | None

    def pairs(self) -> tuple[tuple[U8, F32 | U16 | None], ...]:
        """Weight and scale of gate, up and down."""
        return (self.gate, self.gate_scale), (self.up, self.up_scale), (self.down, self.down_scale)


class ExpertStore:
    """A finished store, opened for reading. Shards are mapped when a layer is first asked for."""

    def __init__(self, path: Path, manifest: StoreManifest, foreign: ForeignFolder | None = None) -> None:
        self._path, self._manifest, self._foreign = path, manifest, foreign
        self._files = {file.layer: file for file in manifest.files}
        self._layers: dict[int, dict[str, U8]] = {}

    @classmethod
    def open(cls, path: Path) -> ExpertStore:
        """Open the folder `path`; checks `store.json` and the size of every shard, reads no weights.

        A folder that kt-kernel's converter wrote (safetensors or .kt files) opens too: see `foreign`. Raises BadInput
        for a folder that is not a finished store, a shard that is missing or cut off, another version.
        """
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
            raise BadInput(
                f"{path} {what}; an expert store is a folder", hint="make one with ktplan convert-cpu"
            )
        if not (path / MANIFEST_FILE).is_file():
            found = None if (path / JOB_FILE).is_file() else find_foreign(path)
            if found is None:
                raise _unfinished(path)
            return cls(path, found.manifest, found)
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
    def foreign(self) -> bool:
        """Whether another program wrote it: then its model, its rounding, its errors and digests are not known."""
        return self._foreign is not None

    @property
    def bytes(self) -> int:
        """Size of all shards."""
        return self._manifest.total_bytes

    def check_model(self, spec: ModelSpec) -> None:
        """Raise BadInput where the store was made from another model than `spec` describes.

        A folder that kt-kernel wrote does not tell its model: there only sizes and layers can be compared.
        """
        own = self._manifest
        if own.fingerprint is None:
            sizes = (own.layers, own.experts, own.hidden, own.intermediate)
            wanted = (spec.moe_layers, spec.experts, spec.hidden, spec.moe_intermediate)
            if sizes != wanted:
                raise BadInput(
                    f"{self._path} holds {_sizes(*sizes)}, {spec.name} has {_sizes(*wanted)}",
                    hint="give the folder that was made from this model",
                )
        elif own.fingerprint != spec.fingerprint:
            raise BadInput(
                f"{self._path} was made from {own.model} ({_short(own.fingerprint)}), "
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
        layout = manifest.shape.layout_of(layer, expert)
        scales: list[F32 | U16 | None] = [
            _scales(tensors[name], manifest.shape.rows_and_columns(projection)[0], layout)
            for name, projection in zip(names[3:], PROJECTIONS, strict=False)
        ] or [None, None, None]
        return PackedArrays(weights[0], scales[0], weights[1], scales[1], weights[2], scales[2])

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """The float32 weights that the packed expert stands for, its parts put together."""
        pieces: dict[str, list[F32]] = {projection: [] for projection in PROJECTIONS}
        for part in range(self._manifest.parts):
            for projection, rows in self.quantized(layer, expert, part).items():
                pieces[projection].append(dequantize_stored(rows))
        own = self._manifest.intermediate - self._manifest.padding
        return ExpertWeights(
            np.concatenate(pieces["gate"], axis=0)[:own],
            np.concatenate(pieces["up"], axis=0)[:own],
            np.ascontiguousarray(np.concatenate(pieces["down"], axis=1)[:, :own]),
        )

    def verify(self, progress: Progress = SILENT) -> None:
        """Read every shard and compare its digest. Raises BadInput naming the first one that differs."""
        with progress.task("verifying", self.bytes, "B") as task:
            for file in self._manifest.files:
                if not self.digest_holds(file):
                    raise _damaged(self._path / file.name, "its digest differs from store.json")
                task.advance(file.bytes)

    def digest_holds(self, file: StoreFile) -> bool | None:
        """Whether a shard has the digest that store.json gives; None where none is known."""
        return None if file.sha256 is None else sha256_file(self._path / file.name) == file.sha256

    def release(self, layer: int) -> None:
        """Let a layer's map go; arrays that were given out keep it alive."""
        self._layers.pop(layer, None)

    def quantized(self, layer: int, expert: int, part: int) -> dict[str, Stored]:
        """Levels and scales (or bfloat16 values) of one part of an expert by projection."""
        shape = self._manifest.shape
        layout = shape.layout_of(layer, expert)
        return {
            projection: _unpacked(weight, scale, *shape.rows_and_columns(projection), layout)
            for projection, (weight, scale) in zip(
                PROJECTIONS, self.packed(layer, expert, part).pairs(), strict=True
            )
        }

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
        if self._foreign is not None:
            return load_layer(self._foreign, layer)
        path = self._path / file.name
        _check_size(path, file)
        found = read_header(path).tensors
        mapped = map_file(path)
        tensors: dict[str, U8] = {}
        for tensor in self._manifest.shape.layer_tensors(layer):
            info = found.get(tensor.name)
            if info is None or (info.dtype, info.shape) != (tensor.dtype, (tensor.elements,)):
                raise _damaged(path, f"{tensor.name} is missing or not {tensor.dtype} [{tensor.elements}]")
            if info.start % _ALIGNMENT:
                raise _damaged(path, f"{tensor.name} does not lie on a multiple of {_ALIGNMENT} bytes")
            tensors[tensor.name] = mapped[info.start : info.start + info.bytes]
        return tensors


def _scales(raw: U8, rows: int, layout: Layout) -> F32 | U16:
    if layout.group is None:
        return raw.view(np.float32)
    return raw.view(np.uint16).reshape(rows // 32, -1, 32)


def _unpacked(weight: U8, scale: F32 | U16 | None, rows: int, columns: int, layout: Layout) -> Stored:
    if scale is None:
        return Bfloat16Rows(unpack_bfloat16(weight, rows, columns))
    levels = unpack(weight, rows, columns, layout.tile_bits)
    if layout.group is None:
        return QuantizedRows(levels, scale.view(np.float32), layout.tile_bits)
    return QuantizedGroups(levels, unpack_scales(scale.view(np.uint16), rows), layout.group)


def _unfinished(path: Path) -> BadInput:
    if (path / JOB_FILE).is_file():
        return BadInput(
            f"{path} is an unfinished conversion: there is no {MANIFEST_FILE} yet",
            hint=f"ktplan convert-cpu --resume {path} goes on where it stopped",
        )
    return BadInput(
        f"{path} is not a finished expert store: there is no {MANIFEST_FILE}",
        hint="make one with ktplan convert-cpu; a folder that kt-kernel's converter wrote would do as well",
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


def _sizes(layers: Sequence[int], experts: int, hidden: int, intermediate: int) -> str:
    return f"layers {format_ranges(layers)} of {experts} experts, {hidden} x {intermediate}"


def _short(fingerprint: str) -> str:
    kind, _, digits = fingerprint.partition(":")
    return f"{kind}:{digits[:12]}"
