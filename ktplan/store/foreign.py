"""Folders that kt-kernel's own converter wrote, opened as stores: merged safetensors, or the tree of .kt files.

They hold the same bytes as a store but say nothing of themselves. Sizes follow from the tensors, the number of experts
and parts from counting names upwards as kt-kernel's loader does; unlike there a gap is an error and not an end. From
which model they were made, and how well, is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ktplan.errors import BadInput
from ktplan.model.header import read_header
from ktplan.store.layout import U8, layout_for
from ktplan.store.manifest import KIND, StoreFile, StoreManifest, StoreShape, tensor_name
from ktplan.store.mapping import map_file

_NAME = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(\d+)\.numa\.(\d+)\.(weight|scale)")
_TREE_LAYER = re.compile(r"_layer_(\d+)")
_TREE_PART = re.compile(r"_numa_(\d+)")
_TREE_FILE = re.compile(r"(INT4|INT8)_(gate|up|down)_(\d+)_(\d+)Byte_(quant|scale)_\.kt")
_AGAIN = "copy the folder again or convert the model again"


class Blob(NamedTuple):
    """Where the bytes of a tensor lie."""

    file: Path
    start: int
    bytes: int


class ForeignFolder(NamedTuple):
    """What a folder holds, and where."""

    manifest: StoreManifest
    layers: dict[int, dict[str, Blob]]  # layer -> tensor name -> place
    mapped: bool  # few files, which can be mapped; else the many small ones of a tree, which are read


def find_foreign(path: Path) -> ForeignFolder | None:
    """The kt-kernel folder at `path`, or None if it is none. Raises BadInput for one that is not whole."""
    if not path.is_dir():
        return None
    if any(_TREE_LAYER.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir()):
        layers, mapped = _collect(_tree_blobs(path)), False
    else:
        layers, mapped = _collect(_merged_blobs(path)), True
    return ForeignFolder(_manifest(path, layers), layers, mapped) if layers else None


def load_layer(folder: ForeignFolder, layer: int) -> dict[str, U8]:
    """The tensors of a layer by name: views of mapped files, or one block of memory that the files were read into."""
    blobs = folder.layers[layer]
    if folder.mapped:
        maps = {file: map_file(file) for file in _files(blobs)}
        return {name: maps[blob.file][blob.start : blob.start + blob.bytes] for name, blob in blobs.items()}
    memory = np.empty(sum(blob.bytes for blob in blobs.values()), np.uint8)
    tensors: dict[str, U8] = {}
    start = 0
    for name, blob in blobs.items():
        tensors[name] = memory[start : start + blob.bytes]
        with blob.file.open("rb") as file:
            if file.readinto(tensors[name].data) != blob.bytes:
                raise BadInput(f"{blob.file} became shorter while it was read", hint=_AGAIN)
        tensors[name].flags.writeable = False
        start += blob.bytes
    return tensors


def _files(blobs: dict[str, Blob]) -> set[Path]:
    return {blob.file for blob in blobs.values()}


def _merged_blobs(path: Path) -> Iterator[tuple[str, Blob]]:
    for file in sorted(path.rglob("*.safetensors")):
        header = read_header(file)
        if header.metadata.get("format") == KIND:
            continue  # ktplan's own, and without store.json not finished
        for info in header.tensors.values():
            if _NAME.fullmatch(info.name):
                yield info.name, Blob(file, info.start, info.bytes)


def _tree_blobs(path: Path) -> Iterator[tuple[str, Blob]]:
    for file in sorted(path.glob("_layer_*/_numa_*/*.kt")):
        layer, part = _TREE_LAYER.fullmatch(file.parent.parent.name), _TREE_PART.fullmatch(file.parent.name)
        found = _TREE_FILE.fullmatch(file.name)
        if layer is None or part is None or found is None:
            continue
        _, projection, expert, size, what = found.groups()
        actual = file.stat().st_size
        if actual != int(size):
            raise BadInput(f"{file} has {actual:,} bytes, its name says {int(size):,}", hint=_AGAIN)
        kind = "weight" if what == "quant" else "scale"
        name = tensor_name(int(layer.group(1)), projection, int(expert), int(part.group(1)), kind)
        yield name, Blob(file, 0, actual)


def _collect(blobs: Iterator[tuple[str, Blob]]) -> dict[int, dict[str, Blob]]:
    layers: dict[int, dict[str, Blob]] = {}
    for name, blob in blobs:
        found = _NAME.fullmatch(name)
        assert found is not None
        own = layers.setdefault(int(found.group(1)), {})
        if name in own:
            raise BadInput(f"{blob.file} holds {name}, so does {own[name].file}", hint="keep one of them")
        own[name] = blob
    return dict(sorted(layers.items()))


def _manifest(path: Path, layers: dict[int, dict[str, Blob]]) -> StoreManifest:
    shape = _shape(path, *next(iter(layers.items())))
    for layer, blobs in layers.items():
        _check_layer(path, shape, layer, blobs)
    files = tuple(
        StoreFile(
            name=str(next(iter(blobs.values())).file.relative_to(path)),
            layer=layer,
            bytes=sum(blob.bytes for blob in blobs.values()),
            sha256=None,
        )
        for layer, blobs in layers.items()
    )
    return StoreManifest(
        model=path.resolve().name,
        family=None,
        fingerprint=None,
        scheme=f"int{shape.bits}-row",
        bits=shape.bits,
        rounding=None,
        layout=layout_for(shape.bits).name,
        parts=shape.parts,
        layers=tuple(layers),
        experts=shape.experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        activation=None,
        files=files,
        errors={},
    )


def _shape(path: Path, layer: int, blobs: dict[str, Blob]) -> StoreShape:
    """Experts and parts by counting upwards, sizes from the first expert."""
    experts = parts = 0
    while tensor_name(layer, "up", experts, 0, "weight") in blobs:
        experts += 1
    while tensor_name(layer, "up", 0, parts, "weight") in blobs:
        parts += 1
    first = [tensor_name(layer, projection, 0, 0, what) for projection, what in (
        ("gate", "weight"), ("gate", "scale"), ("down", "scale"))]  # fmt: skip
    absent = [name for name in first if name not in blobs]
    if not experts or absent:
        name = absent[0] if absent else tensor_name(layer, "up", 0, 0, "weight")
        raise BadInput(f"{path} has packed experts of layer {layer} but not {name}", hint=_AGAIN)
    weight, rows, hidden = blobs[first[0]].bytes, blobs[first[1]].bytes // 4, blobs[first[2]].bytes // 4
    bits = next((bits for bits in (8, 4) if weight * 8 == rows * hidden * bits), None)
    if bits is None or hidden % layout_for(bits).unit or rows % layout_for(bits).unit:
        raise BadInput(
            f"{path}: {first[0]} has {weight:,} bytes for {rows} rows of {hidden} inputs, which is neither AMXINT8 nor "
            "AMXINT4",
            hint="only these two of kt-kernel's formats can be read",
        )
    return StoreShape(bits=bits, parts=parts, experts=experts, hidden=hidden, intermediate=rows * parts)


def _check_layer(path: Path, shape: StoreShape, layer: int, blobs: dict[str, Blob]) -> None:
    wanted = {tensor.name: tensor.bytes for tensor in shape.layer_tensors(layer)}
    for name, size in wanted.items():
        if name not in blobs:
            raise BadInput(
                f"{path} lacks {name}; it has {shape.experts} experts in {shape.parts} parts elsewhere",
                hint=_AGAIN,
            )
        if blobs[name].bytes != size:
            raise BadInput(
                f"{blobs[name].file}: {name} has {blobs[name].bytes:,} bytes, not {size:,}", hint=_AGAIN
            )
    if extra := sorted(set(blobs) - set(wanted)):
        raise BadInput(
            f"{blobs[extra[0]].file}: {extra[0]} is beyond the {shape.experts} experts and {shape.parts} "
            "parts that are there without a gap",
            hint=_AGAIN,
        )
