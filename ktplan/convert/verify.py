"""A store read again from end to end: digests, levels and scales, and how far its weights are from the model's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ktplan.convert.expert import ExpertError, pad_expert
from ktplan.model.source import PROJECTIONS, ExpertWeights, WeightSource
from ktplan.progress import SILENT, Progress
from ktplan.quant.groups import Bfloat16Rows, QuantizedGroups, widen
from ktplan.quant.stored import Stored, dequantize_stored
from ktplan.store import ExpertStore

# Errors are recorded in four digits, from sums in another order.
_RECORDED_TOLERANCE = 0.01
_NOT_A_NUMBER = "not a number"
_AHEAD = 2  # experts a thread that may wait for their turn


class TensorError(NamedTuple):
    """One projection of one expert: relative RMS difference from the model (None: not compared), and as recorded."""

    layer: int
    expert: int
    projection: str
    error: float | None
    recorded: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found. `damages` are sentences; without any the store is what it says."""

    damages: tuple[str, ...]
    tensors: tuple[TensorError, ...]  # worst first where they were compared, else in order
    digests: bool  # whether there were digests to check

    @property
    def compared(self) -> bool:
        """Whether the model's own weights were looked at."""
        return any(tensor.error is not None for tensor in self.tensors)


def verify_store(
    store: ExpertStore,
    against: WeightSource | None = None,
    *,
    threads: int = 1,
    progress: Progress = SILENT,
) -> Verification:
    """Check all of `store`. Raises BadInput where `against` is another model than the store's."""
    manifest = store.manifest
    if against is not None:
        store.check_model(against.spec)
    damages: list[str] = []
    digests = False
    with progress.task("checking digests", store.bytes, "B") as task:
        for file in manifest.files:
            holds = store.digest_holds(file)
            digests = digests or holds is not None
            if holds is False:
                damages.append(f"{store.path / file.name}: its digest differs from store.json")
            task.advance(file.bytes)
    tensors: list[TensorError] = []
    count = len(manifest.layers) * manifest.experts
    with progress.task("reading weights", count, "experts") as task:
        for found, faults in _experts(store, against, threads):
            tensors += found
            damages += faults
            task.advance()
    if against is not None:
        tensors.sort(key=lambda tensor: -(tensor.error or 0.0))
    return Verification(damages=tuple(damages), tensors=tuple(tensors), digests=digests)


def _experts(
    store: ExpertStore, against: WeightSource | None, threads: int
) -> Iterator[tuple[list[TensorError], list[str]]]:
    manifest = store.manifest
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        for layer in manifest.layers:
            for first in range(0, manifest.experts, threads * _AHEAD):
                some = range(first, min(first + threads * _AHEAD, manifest.experts))
                yield from pool.map(lambda expert, layer=layer: _check(store, against, layer, expert), some)
            store.release(layer)


def _check(
    store: ExpertStore, against: WeightSource | None, layer: int, expert: int
) -> tuple[list[TensorError], list[str]]:
    manifest = store.manifest
    faults: list[str] = []
    sums = {projection: ExpertError(0.0, 0.0) for projection in PROJECTIONS}
    exact = None
    if against is not None:
        exact = ExpertWeights(*pad_expert(against.expert(layer, expert), manifest.intermediate)[:3])
    share = manifest.intermediate // manifest.parts
    for part in range(manifest.parts):
        own = slice(part * share, (part + 1) * share)
        for projection, rows in store.quantized(layer, expert, part).items():
            where = f"layer {layer}, expert {expert}, {projection}, part {part}"
            if fault := _fault(rows):
                faults.append(f"{where}: {fault}")
            if exact is None or (fault and fault.endswith(_NOT_A_NUMBER)):
                continue
            piece = getattr(exact, projection)
            piece = piece[:, own] if projection == "down" else piece[own]
            rest = (dequantize_stored(rows) - piece).astype(np.float64)
            before = sums[projection]
            sums[projection] = ExpertError(
                before.error + float(np.square(rest).sum()),
                before.energy + float(np.square(piece.astype(np.float64)).sum()),
            )
    tensors: list[TensorError] = []
    for projection in PROJECTIONS:
        table = manifest.errors.get(layer)
        recorded = None if table is None else table[projection][expert]
        error = None if exact is None else sums[projection].relative
        tensors.append(TensorError(layer, expert, projection, error, recorded))
        if (
            error is not None
            and recorded is not None
            and abs(error - recorded) > _RECORDED_TOLERANCE * recorded + 1e-6
        ):
            faults.append(
                f"layer {layer}, expert {expert}, {projection}: differs from the model by {error:.4g}, "
                f"store.json says {recorded:.4g}"
            )
    return tensors, faults


def _fault(rows: Stored) -> str | None:
    """What no conversion writes."""
    if isinstance(rows, Bfloat16Rows):
        return None if np.isfinite(widen(rows.bits)).all() else f"a weight is {_NOT_A_NUMBER}"
    if isinstance(rows, QuantizedGroups):
        if not np.isfinite(widen(rows.scale)).all():
            return f"a scale is {_NOT_A_NUMBER}"
        return None
    if not (np.isfinite(rows.scale).all() and (rows.scale >= 0).all()):
        return f"a scale is negative or {_NOT_A_NUMBER}"
    lowest = -128 if rows.tile_bits == 8 else -8
    return f"holds the level {lowest}, which kernels cannot negate" if (rows.levels == lowest).any() else None
