"""A checkpoint's routed experts to an expert store, one expert at a time.

One thread reads and writes in order, a few others quantize and pack; what is in memory is a handful of experts, however
large the model is. Everything that can be known beforehand is checked before the first byte is read.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ktplan.convert.job import FinishedLayer, Job, Journal, check_output, existing, output_folder
from ktplan.errors import BadInput
from ktplan.model.source import PROJECTIONS, ExpertWeights, WeightSource
from ktplan.progress import SILENT, Progress, Task
from ktplan.quant.rounding import F32, SCRATCH_BYTES, quantize_rows, squared_error
from ktplan.quant.scheme import Scheme
from ktplan.store.layout import U8, check_parts, layout_for, pack
from ktplan.store.manifest import StoreManifest, StoreShape
from ktplan.store.writer import ShardWriter, shard_bytes, write_index

# More threads than this mostly wait for the one that reads and writes, and for Python's lock.
_MOST_THREADS = 8
# store.json and the index: a generous allowance in the check of free space, per expert.
_BYTES_OF_NAMES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a conversion would read, write and need. Bytes, seconds."""

    out: Path
    job: Job
    experts: int  # a layer
    resumed: int  # layers that an earlier run has finished
    bytes_in: int
    bytes_out: int
    disk_free: int
    peak_memory: int
    threads: int
    seconds: float | None  # None: not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a conversion did. `bytes_in` counts what this run read, `resumed` the layers an earlier run had finished."""

    store: Path
    manifest: StoreManifest
    bytes_in: int
    seconds: float
    resumed: int


class _Converted(NamedTuple):
    """One expert in file order, and each projection's relative RMS error."""

    arrays: list[U8 | F32]
    errors: dict[str, float]


def plan_cpu(
    source: WeightSource,
    out: Path,
    scheme: Scheme,
    numa_parts: int = 1,
    *,
    threads: int | None = None,
    measure: bool = True,
) -> Plan:
    """Check all that can be checked beforehand and say what the conversion will take; writes nothing.

    `measure` converts one expert to estimate the time. Raises BadInput for sizes that fit no layout, BadUsage for an
    illegal number of parts or an output that is in use, DoesNotFit for a disk that is too small.
    """
    spec = source.spec
    spec.check_plain_experts()
    check_parts(spec, scheme.bits, numa_parts)
    job, shape = _job(source, scheme, numa_parts), _shape(source, scheme, numa_parts)
    bytes_out = sum(shard_bytes(shape, layer, _facts(job)) for layer in job.layers)
    resumed = check_output(out, job, bytes_out + _BYTES_OF_NAMES * spec.expert_count)
    workers = threads or _default_threads()
    return Plan(
        out=out,
        job=job,
        experts=spec.experts,
        resumed=resumed,
        bytes_in=spec.expert_bytes,
        bytes_out=bytes_out,
        disk_free=_free(out),
        peak_memory=_peak_memory(shape, workers, fused=spec.fused),
        threads=workers,
        seconds=_estimate(source, scheme, numa_parts, workers) if measure else None,
    )


def convert_cpu(
    source: WeightSource,
    out: Path,
    scheme: Scheme,
    numa_parts: int = 1,
    *,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Write the expert store `out` (a new or empty folder, or one where the same job was stopped).

    Deterministic: equal jobs give equal bytes, whatever the threads and however often the work was stopped. Raises
    what `plan_cpu` raises; BadInput naming tensor and place where a weight is not finite; DoesNotFit where the disk
    fills up; Interrupted for Ctrl-C once a layer is finished.
    """
    started = time.monotonic()
    plan = plan_cpu(source, out, scheme, numa_parts, threads=threads, measure=False)
    shape = _shape(source, scheme, numa_parts)
    per_layer = plan.bytes_in // len(plan.job.layers)
    with output_folder(out, plan.job) as journal:
        resumed = len(journal.finished)
        with (
            progress.task("converting", plan.bytes_in - resumed * per_layer, "B") as task,
            ThreadPoolExecutor(plan.threads, thread_name_prefix="quantize") as pool,
        ):
            work = _Work(source, scheme, numa_parts, shape, plan.threads, pool)
            for number, layer in enumerate(plan.job.layers, start=1):
                if layer not in journal.finished:
                    task.note(f"layer {number}/{len(plan.job.layers)}")
                    journal.record(layer, _convert_layer(work, journal, layer, task))
        manifest = _publish(journal, source, scheme)
    return Report(
        store=out,
        manifest=manifest,
        bytes_in=plan.bytes_in - resumed * per_layer,
        seconds=time.monotonic() - started,
        resumed=resumed,
    )


@dataclass(frozen=True, slots=True)
class _Work:
    source: WeightSource
    scheme: Scheme
    parts: int
    shape: StoreShape
    threads: int
    pool: ThreadPoolExecutor


def _convert_layer(work: _Work, journal: Journal, layer: int, task: Task) -> FinishedLayer:
    errors: dict[str, list[float]] = {projection: [] for projection in PROJECTIONS}
    spec = work.source.spec
    bytes_each = spec.expert_bytes // spec.expert_count
    with ShardWriter(journal.part(layer), work.shape, layer, _facts(journal.job)) as shard:
        for converted in _experts_of(work, layer):
            shard.add(converted.arrays)
            for projection, error in converted.errors.items():
                errors[projection].append(error)
            task.advance(bytes_each)
        file = shard.finish(journal.job.shard(layer))
    return FinishedLayer(file=file, errors={projection: tuple(found) for projection, found in errors.items()})


def _experts_of(work: _Work, layer: int) -> Iterator[_Converted]:
    """The layer's experts in order; at most `threads` of them are being converted while the next one is read."""
    waiting: deque[Future[_Converted]] = deque()
    for expert in range(work.source.spec.experts):
        weights = _read(work.source, layer, expert)
        if len(waiting) == work.threads:
            yield waiting.popleft().result()
        waiting.append(work.pool.submit(_convert_expert, work, layer, expert, weights))
        del weights
    while waiting:
        yield waiting.popleft().result()


def _read(source: WeightSource, layer: int, expert: int) -> ExpertWeights:
    try:
        return source.expert(layer, expert)
    except OSError as fault:
        raise BadInput(
            f"{source.root}: layer {layer}, expert {expert} cannot be read: {fault.strerror or fault}",
            hint="check the disk and the permissions of the model's files",
        ) from fault


def _convert_expert(work: _Work, layer: int, expert: int, weights: ExpertWeights) -> _Converted:
    for projection, matrix in zip(PROJECTIONS, weights, strict=True):
        _refuse_not_finite(work.source, layer, expert, projection, matrix)
    arrays, errors = quantize_expert(weights, work.scheme, work.parts)
    return _Converted(arrays, errors)


def quantize_expert(
    weights: ExpertWeights, scheme: Scheme, parts: int
) -> tuple[list[U8 | F32], dict[str, float]]:
    """One expert's packed weights and scales in file order (see StoreShape.tensors), and each projection's error.

    Part p gets its share of gate and up rows and of down columns; its down scales come from its own columns.
    """
    arrays: list[U8 | F32] = []
    sums = {projection: np.zeros(2) for projection in PROJECTIONS}
    share = len(weights.gate) // parts
    for part in range(parts):
        own = slice(part * share, (part + 1) * share)
        scales: list[F32] = []
        for projection, matrix in zip(PROJECTIONS, weights, strict=True):
            piece = matrix[:, own] if projection == "down" else matrix[own]
            rows = quantize_rows(piece, scheme)
            sums[projection] += squared_error(piece, rows)
            arrays.append(pack(rows.levels, scheme.bits))
            scales.append(rows.scale)
        arrays += scales
    return arrays, {projection: _relative(*sums[projection]) for projection in PROJECTIONS}


def _relative(error: float, energy: float) -> float:
    # Four digits tell all there is to tell, and keep store.json of a large model readable.
    return float(f"{(error / energy) ** 0.5:.4g}") if energy else 0.0


def _refuse_not_finite(source: WeightSource, layer: int, expert: int, projection: str, matrix: F32) -> None:
    bad = ~np.isfinite(matrix)
    if not bad.any():
        return
    name = source.expert_names(layer, expert)[projection]
    row, column = np.argwhere(bad)[0]
    raise BadInput(
        f"{source.file_of(name)}: {name} (layer {layer}, expert {expert}, {projection}) holds {int(bad.sum())} values "
        f"that are NaN or infinite, the first is {matrix[row, column]} at row {row}, column {column}",
        hint="the checkpoint is damaged or badly merged; download or merge it again",
    )


def _publish(journal: Journal, source: WeightSource, scheme: Scheme) -> StoreManifest:
    job, spec = journal.job, source.spec
    done = [journal.finished[layer] for layer in job.layers]
    manifest = StoreManifest(
        model=job.model,
        family=spec.family,
        fingerprint=job.fingerprint,
        scheme=job.scheme,
        bits=scheme.bits,
        rounding=job.rounding,
        layout=job.layout,
        parts=job.parts,
        layers=job.layers,
        experts=spec.experts,
        hidden=spec.hidden,
        intermediate=spec.moe_intermediate,
        activation=spec.activation,
        files=tuple(layer.file for layer in done),
        errors={layer.file.layer: layer.errors for layer in done},
    )
    journal.publish()
    write_index(journal.folder, manifest)
    manifest.save(journal.folder)
    journal.close()
    return manifest


def _job(source: WeightSource, scheme: Scheme, parts: int) -> Job:
    spec = source.spec
    return Job(
        model=spec.name,
        fingerprint=spec.fingerprint,
        scheme=scheme.name,
        rounding=scheme.rounding,
        layout=layout_for(scheme.bits).name,
        parts=parts,
        layers=spec.moe_layers,
    )


def _shape(source: WeightSource, scheme: Scheme, parts: int) -> StoreShape:
    spec = source.spec
    return StoreShape(
        bits=scheme.bits,
        parts=parts,
        experts=spec.experts,
        hidden=spec.hidden,
        intermediate=spec.moe_intermediate,
    )


def _facts(job: Job) -> dict[str, str]:
    """What every shard says of itself, for whoever finds it alone."""
    return {
        "model": job.model,
        "fingerprint": job.fingerprint,
        "scheme": job.scheme,
        "rounding": job.rounding,
        "layout": job.layout,
        "parts": str(job.parts),
    }


def _default_threads() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _free(out: Path) -> int:
    found = os.statvfs(existing(out))
    return found.f_bavail * found.f_frsize


def _peak_memory(shape: StoreShape, threads: int, *, fused: bool) -> int:
    """What the process has now, plus the experts under way with their results, plus the one that is being read."""
    weights = shape.hidden * shape.intermediate  # of one projection
    # float32 weights, packed result, levels int8 of one projection
    converting = 12 * weights + shape.expert_bytes + weights + SCRATCH_BYTES
    # float32 weights, raw bytes and a 4-byte intermediate of the tensor that is being widened
    reading = 12 * weights + 10 * weights * (2 if fused else 1)
    return _resident() + threads * converting + reading


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _estimate(source: WeightSource, scheme: Scheme, parts: int, threads: int) -> float:
    """Seconds for the whole model, from one real expert; the search's tables are built before the clock starts."""
    quantize_rows(np.zeros((1, 128), np.float32), scheme)
    layer = source.spec.moe_layers[0]
    started = time.perf_counter()
    weights = _read(source, layer, 0)
    read = time.perf_counter()
    quantize_expert(weights, scheme, parts)
    converted = time.perf_counter()
    return source.spec.expert_count * (read - started + (converted - read) / threads)
