"""One expert: read into buffers that are used again, quantized and packed by native code, in the order of the file."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadInput, KtplanError
from ktplan.kernels import PackOutcome, PackTask, Pool, pack_weights
from ktplan.model.source import PROJECTIONS, ExpertWeights, Place, WeightSource
from ktplan.quant.groups import U16, shares
from ktplan.quant.rounding import F32, multipliers
from ktplan.quant.scheme import TOP_LEVEL, Rounding, Scheme
from ktplan.store.layout import U8, padded
from ktplan.store.manifest import StoreShape

Matrix = npt.NDArray[Any]  # float32, or bfloat16 as uint16; rows are outputs
_OPEN_FILES = 8


class ExpertError(NamedTuple):
    """Sums over one projection of one expert: squared differences, and squared weights."""

    error: float
    energy: float

    @property
    def relative(self) -> float:
        """Relative RMS error, in four digits: all there is to tell, and store.json of a large model stays readable."""
        return float(f"{(self.error / self.energy) ** 0.5:.4g}") if self.energy else 0.0


class Slot:
    """Memory for one expert on its way: what was read, and what will be written. Used again and again."""

    def __init__(self) -> None:
        self._read: list[U8] = [np.empty(0, np.uint8) for _ in PROJECTIONS]
        self._packed: U8 = np.empty(0, np.uint8)

    def to_read(self, number: int, size: int) -> U8:
        """`size` bytes for projection `number`."""
        if len(self._read[number]) < size:
            self._read[number] = np.empty(size, np.uint8)
        return self._read[number][:size]

    def to_write(self, size: int) -> U8:
        """`size` bytes for the packed expert."""
        if len(self._packed) < size:
            self._packed = np.empty(size, np.uint8)
        return self._packed[:size]


class Reader:
    """Reads experts. Plain numbers go straight into a slot's buffers, other forms through the source's own reader."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._places = getattr(source, "expert_places", None)
        self._open: OrderedDict[Path, int] = OrderedDict()

    @property
    def in_place(self) -> bool:
        """Whether experts are plain numbers: reading them is then a copy, which one thread does best."""
        return self._find(self._source.spec.moe_layers[0], 0) is not None

    def read(self, slot: Slot, layer: int, expert: int) -> Sequence[Matrix]:
        """gate, up and down. Raises KtplanError for trouble with the disk, BadInput for a file that became shorter."""
        try:
            places = self._find(layer, expert)
            if places is None:
                return self._source.expert(layer, expert)
            return [self._fill(slot, number, place) for number, place in enumerate(places)]
        except OSError as fault:
            raise KtplanError(
                f"{self._source.root}: layer {layer}, expert {expert} cannot be read: {fault.strerror or fault}",
                hint="check the disk and the permissions of the model's files",
            ) from fault

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _find(self, layer: int, expert: int) -> tuple[Place, ...] | None:
        found: tuple[Place, ...] | None = None if self._places is None else self._places(layer, expert)
        return found

    def _fill(self, slot: Slot, number: int, place: Place) -> Matrix:
        item = 4 if place.dtype == "F32" else 2
        data = slot.to_read(number, place.rows * place.columns * item)
        view, offset = data.data, place.start
        handle = self._handle(place.file)
        while view:
            got = os.preadv(handle, [view], offset)
            if not got:
                raise BadInput(f"{place.file} became shorter while it was read", hint="check the disk")
            view, offset = view[got:], offset + got
        dtype = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}[place.dtype]
        matrix: Matrix = data.view(dtype).reshape(place.rows, place.columns)
        return matrix.astype(np.float32) if place.dtype == "F16" else matrix

    def _handle(self, file: Path) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) == _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[file] = os.open(file, os.O_RDONLY)
        return self._open[file]


def pad_expert(matrices: Sequence[Matrix], intermediate: int) -> Sequence[Matrix]:
    """gate, up and down with zeros behind them up to `intermediate` rows (of down: columns); as given if none lack."""
    gate, up, down = matrices[:3]
    lacking = intermediate - len(gate)
    if not lacking:
        return matrices
    below, behind = ((0, lacking), (0, 0)), ((0, 0), (0, lacking))
    return [np.pad(gate, below), np.pad(up, below), np.pad(down, behind)]


def pack_expert(
    matrices: Sequence[Matrix],
    scheme: Scheme,
    shape: StoreShape,
    bits: int,
    out: U8,
    pool: Pool | None = None,
) -> list[ExpertError] | None:
    """Quantize gate, up and down into `out` (see StoreShape.tensors for the order); each projection's error.

    `bits` is what this expert has, 8 in place of the scheme's for a wide one. Part p gets its share of gate and up rows
    and of down columns; its down scales come from its own columns. None where a value is not finite. Deterministic,
    whatever the threads and the instruction set.
    """
    layout = shape.layout(bits)
    scale_dtype = np.float32 if layout.group is None else np.uint16
    tasks: list[PackTask] = []
    start = 0
    matrices = pad_expert(matrices, shape.intermediate)
    share = shape.intermediate // shape.parts
    for part in range(shape.parts):
        own = slice(part * share, (part + 1) * share)
        pieces = [matrices[0][own], matrices[1][own], matrices[2][:, own]]
        sizes = [len(piece) * layout.row_bytes(piece.shape[1]) for piece in pieces]
        places = [start, start + sizes[0], start + sizes[0] + sizes[1]]
        start += sum(sizes)
        for piece, place, size in zip(pieces, places, sizes, strict=True):
            scale_size = layout.scale_bytes(*piece.shape)
            scale = out[start : start + scale_size].view(scale_dtype)
            start += scale_size
            tasks.append(PackTask(piece, out[place : place + size], scale))
    assert start == len(out)
    found = pack_tasks(tasks, bits, scheme.rounding, layout.group, pool)
    if not all(outcome.finite for outcome in found):
        return None
    return [
        ExpertError(
            sum(outcome.error for outcome in found[number::3]),
            sum(outcome.energy for outcome in found[number::3]),
        )
        for number in range(3)
    ]


def pack_tasks(
    tasks: Sequence[PackTask], bits: int, rounding: Rounding, group: int | None, pool: Pool | None
) -> list[PackOutcome]:
    """Quantize and pack with the grids of the searches that the specifications give."""
    rule: Literal["kt", "mse"] = "kt" if rounding == "kt" else "mse"
    return pack_weights(
        tasks, bits, rule, multipliers(TOP_LEVEL[bits]), group=group, shares=shares(), pool=pool
    )


def quantize_expert(
    weights: ExpertWeights, scheme: Scheme, parts: int
) -> tuple[list[U8 | F32 | U16], dict[str, float]]:
    """One expert's packed weights and scales as arrays in file order, and each projection's relative RMS error."""
    own, hidden = weights.gate.shape
    width = padded(own, scheme.bits)
    shape = StoreShape(
        bits=scheme.bits, group=scheme.group, parts=parts, experts=1, hidden=hidden, intermediate=width,
        padding=width - own,
    )  # fmt: skip
    out = np.empty(shape.plain_bytes(scheme.bits), np.uint8)
    errors = pack_expert(weights, scheme, shape, scheme.bits, out)
    if errors is None:
        raise BadInput("the weights hold a NaN or an infinity", hint="the checkpoint is damaged")
    arrays: list[U8 | F32 | U16] = []
    dtypes = {"I8": np.uint8, "F32": np.float32, "BF16": np.uint16}
    start = 0
    for part in range(parts):
        for tensor in shape.tensors(0, 0, part):
            piece = out[start : start + tensor.bytes]
            arrays.append(piece.view(dtypes[tensor.dtype]))
            start += tensor.bytes
    return arrays, {name: found.relative for name, found in zip(PROJECTIONS, errors, strict=True)}


def refuse_not_finite(source: WeightSource, layer: int, expert: int, matrices: Sequence[Matrix]) -> None:
    """Raise BadInput naming the tensor, how many NaN and infinities it holds, and where the first one is."""
    for projection, given in zip(PROJECTIONS, matrices, strict=True):
        matrix = (given.astype(np.uint32) << 16).view(np.float32) if given.dtype == np.uint16 else given
        bad = ~np.isfinite(matrix)
        if not bad.any():
            continue
        name = source.expert_names(layer, expert)[projection]
        row, column = np.argwhere(bad)[0]
        raise BadInput(
            f"{source.file_of(name)}: {name} (layer {layer}, expert {expert}, {projection}) holds {int(bad.sum())} "
            f"values that are NaN or infinite, the first is {matrix[row, column]} at row {row}, column {column}",
            hint="the checkpoint is damaged or badly merged; download or merge it again",
        )
