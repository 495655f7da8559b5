"""A store split for another number of NUMA nodes, without the model.

Parts divide the intermediate size: gate and up go by rows, each of which keeps its levels and its scale, so they move
without loss. Down goes by columns, and its scales belong to a part's own columns: cutting parts into smaller ones
keeps levels and scales and loses nothing, joining parts loses nothing only where their scales are the same (as after
a cut). Elsewhere down must be rounded again, which is done only when asked for.

Scales of groups stay with their groups, which never cross a part's border (its width is a multiple of 128), and
bfloat16 has no scales: such stores always move without loss.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ktplan.artifact import fsync_directory, new_directory
from ktplan.convert.expert import ExpertError, pack_tasks
from ktplan.errors import BadUsage
from ktplan.kernels import PackTask, Pool
from ktplan.progress import SILENT, Progress
from ktplan.quant.groups import U16, Bfloat16Rows, QuantizedGroups
from ktplan.quant.rounding import F32, QuantizedRows, dequantize
from ktplan.quant.stored import Stored, joined_rows, some_rows
from ktplan.store import ExpertStore, StoreManifest, StoreShape
from ktplan.store.layout import U8, check_parts, layout_for, pack_stored
from ktplan.store.writer import ShardWriter, shard_name, write_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Repartition:
    """What was done. `error`: relative RMS change of the down weights, 0 where nothing was rounded again."""

    store: Path
    manifest: StoreManifest
    lossless: bool
    error: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Sizes:
    hidden: int
    moe_intermediate: int


def repartition(
    store: ExpertStore,
    out: Path,
    parts: int,
    *,
    requantize: bool = False,
    threads: int = 1,
    progress: Progress = SILENT,
) -> Repartition:
    """Write `store` in `parts` parts to the new or empty folder `out`; if anything fails nothing is left.

    Raises BadUsage for a number of parts that the layout does not allow, an output in use, or where down would have to
    be rounded again and `requantize` does not consent; BadInput for a damaged store.
    """
    started = time.monotonic()
    manifest = store.manifest
    check_parts(_Sizes(manifest.hidden, manifest.intermediate), manifest.bits, parts, manifest.group)
    lossless = _moves_without_loss(store, parts)
    if not lossless and not requantize:
        raise BadUsage(
            f"{store.path} has {manifest.parts} parts whose down scales differ: in {parts} parts the down weights "
            "would have to be rounded again",
            hint=f"convert the model again with --numa-parts {parts}, or accept the loss with --requantize",
        )
    shape = replace(manifest.shape, parts=parts)
    total = ExpertError(0.0, 0.0)
    files = []
    with new_directory(out) as folder:
        with (
            progress.task("repartitioning", len(manifest.layers) * manifest.experts, "experts") as task,
            ThreadPoolExecutor(threads, thread_name_prefix="repack") as pool,
        ):
            for number, layer in enumerate(manifest.layers, start=1):
                name = shard_name(number, len(manifest.layers))
                with ShardWriter(folder / f"{name}.part", shape, layer, _facts(manifest, parts)) as shard:
                    for first in range(0, manifest.experts, 2 * threads):
                        some = range(first, min(first + 2 * threads, manifest.experts))
                        moved = pool.map(lambda expert, layer=layer: _move(store, shape, layer, expert), some)
                        for arrays, error in moved:
                            shard.add(arrays)
                            total = ExpertError(total.error + error.error, total.energy + error.energy)
                            task.advance()
                    files.append(shard.finish(name))
                store.release(layer)
        result = replace(
            manifest,
            parts=parts,
            files=tuple(files),
            errors=manifest.errors if lossless else {},
            output_errors=manifest.output_errors if lossless else {},
            rounding=manifest.rounding
            if lossless
            else f"{manifest.rounding or 'unknown'}, down rounded again",
        )
        for file in files:
            (folder / f"{file.name}.part").rename(folder / file.name)
        fsync_directory(folder)
        write_index(folder, result)
        result.save(folder)
    return Repartition(
        store=out,
        manifest=result,
        lossless=lossless,
        error=0.0 if lossless else total.relative,
        seconds=time.monotonic() - started,
    )


def _facts(manifest: StoreManifest, parts: int) -> Mapping[str, str]:
    return {
        "model": manifest.model,
        "fingerprint": manifest.fingerprint or "unknown",
        "scheme": manifest.scheme,
        "rounding": manifest.rounding or "unknown",
        "layout": manifest.layout,
        "parts": str(parts),
    }


def _moves_without_loss(store: ExpertStore, parts: int) -> bool:
    """Whether every new part of down gets, in each row, one scale only. Reads nothing but scales."""
    manifest = store.manifest
    if parts % manifest.parts == 0:
        return True
    overlaps = _overlaps(manifest.intermediate, manifest.parts, parts)
    for layer in manifest.layers:
        for expert in range(manifest.experts):
            if not _has_row_scales(manifest, layer, expert):
                continue
            found = [store.packed(layer, expert, part).down_scale for part in range(manifest.parts)]
            scales = [scale.view(np.float32) for scale in found if scale is not None]
            if any(_joined(np.stack([scales[part] for part in own])) is None for own in overlaps):
                return False
    return True


def _has_row_scales(manifest: StoreManifest, layer: int, expert: int) -> bool:
    layout = manifest.shape.layout_of(layer, expert)
    return layout.group is None and layout.tile_bits != 16


def _overlaps(intermediate: int, old: int, new: int) -> list[list[int]]:
    """For each new part the old ones whose columns it takes."""
    share, wanted = intermediate // old, intermediate // new
    return [
        [
            part
            for part in range(old)
            if part * share < (own + 1) * wanted and (part + 1) * share > own * wanted
        ]
        for own in range(new)
    ]


def _joined(scales: F32) -> F32 | None:
    """One scale a row from [pieces, rows]; 0 (all levels 0) goes with any other. None where they differ."""
    largest: F32 = scales.max(axis=0)
    return largest if ((scales == largest) | (scales == 0)).all() else None


def _move(
    store: ExpertStore, shape: StoreShape, layer: int, expert: int
) -> tuple[list[U8 | F32 | U16], ExpertError]:
    """An expert's arrays in file order for its new parts, and the change of its down weights."""
    manifest = store.manifest
    old = [store.quantized(layer, expert, part) for part in range(manifest.parts)]
    gate, up = (joined_rows([part[name] for part in old]) for name in ("gate", "up"))
    share = shape.intermediate // shape.parts
    overlaps = _overlaps(shape.intermediate, manifest.parts, shape.parts)
    arrays: list[U8 | F32 | U16] = []
    change = ExpertError(0.0, 0.0)
    for part in range(shape.parts):
        own = slice(part * share, (part + 1) * share)
        down = _columns([piece["down"] for piece in old], own, overlaps[part])
        packed = [pack_stored(some_rows(gate, own)), pack_stored(some_rows(up, own))]
        if down is not None:
            packed.append(pack_stored(down))
        else:
            exact = np.concatenate([dequantize(_by_rows(piece["down"])) for piece in old], axis=1)[:, own]
            again, own_change = _round_again(exact, shape.bits_of(layer, expert))
            packed.append(again)
            change = ExpertError(change.error + own_change.error, change.energy + own_change.energy)
        arrays += [found[0] for found in packed] + [scale for found in packed for scale in found[1:]]
    return arrays, change


def _columns(pieces: Sequence[Stored], own: slice, overlaps: Sequence[int]) -> Stored | None:
    """Columns `own` of matrices side by side; None where their rows have scales that differ."""
    first = pieces[0]
    if isinstance(first, Bfloat16Rows):
        whole = np.concatenate([piece.bits for piece in pieces if isinstance(piece, Bfloat16Rows)], axis=1)
        return Bfloat16Rows(whole[:, own])
    if isinstance(first, QuantizedGroups):
        groups = [piece for piece in pieces if isinstance(piece, QuantizedGroups)]
        scale = np.concatenate([piece.scale for piece in groups], axis=1)
        levels = np.concatenate([piece.levels for piece in groups], axis=1)
        within = slice(own.start // first.group, own.stop // first.group)
        return QuantizedGroups(np.ascontiguousarray(levels[:, own]), scale[:, within], first.group)
    rows = [_by_rows(piece) for piece in pieces]
    joined = _joined(np.stack([rows[number].scale for number in overlaps]))
    if joined is None:
        return None
    levels = np.concatenate([piece.levels for piece in rows], axis=1)
    return QuantizedRows(np.ascontiguousarray(levels[:, own]), joined, first.tile_bits)


def _by_rows(piece: Stored) -> QuantizedRows:
    assert isinstance(piece, QuantizedRows), "only scales of rows can stand in the way"
    return piece


def _round_again(exact: F32, bits: int) -> tuple[list[U8 | F32 | U16], ExpertError]:
    rows, columns = exact.shape
    task = PackTask(
        exact, np.empty(rows * layout_for(bits).row_bytes(columns), np.uint8), np.empty(rows, np.float32)
    )
    (found,) = pack_tasks([task], bits, "mse", None, Pool(1))
    return [task.packed, task.scale], ExpertError(found.error, found.energy)
