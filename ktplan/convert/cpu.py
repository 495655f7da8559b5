"""A checkpoint's routed experts to an expert store, one expert at a time.

One thread reads, native threads quantize and pack, one thread writes, one waits for the disk; what is in memory is a
handful of experts, however large the model is. Everything that can be known beforehand is checked before the first
byte is read.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ktplan.convert.expert import (
    ExpertError,
    Matrix,
    Reader,
    Slot,
    pack_expert,
    quantize_expert,
    refuse_not_finite,
)
from ktplan.convert.job import Arguments, Job, Journal, check_output, existing, output_folder
from ktplan.convert.mixed import choose_wide, wide_count
from ktplan.convert.sink import Sink, stamps_of
from ktplan.errors import BadUsage, DoesNotFit
from ktplan.hardware import available_memory
from ktplan.kernels import Pool
from ktplan.model.source import PROJECTIONS, WeightSource
from ktplan.progress import SILENT, Progress, Task
from ktplan.quant.scheme import Scheme
from ktplan.store.layout import check_parts, layout_for, padded
from ktplan.store.manifest import StoreManifest, StoreShape
from ktplan.store.writer import shard_bytes, write_index
from ktplan.units import format_bytes

if TYPE_CHECKING:
    from ktplan.convert.calibrated import CalibrationText

__all__ = ["Plan", "Report", "convert_cpu", "plan_cpu", "quantize_expert"]

_MOST_THREADS = 64
# Threads that read a quantized checkpoint, whose experts take work to read.
_MOST_READERS = 4
# store.json and the index: a generous allowance in the check of free space, per expert.
_BYTES_OF_NAMES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a conversion would read, write and need. Bytes, seconds."""

    out: Path
    job: Job
    experts: int  # a layer
    weights: int  # of all experts, as the model counts them
    resumed: int  # layers that an earlier run has finished
    bytes_in: int
    bytes_out: int
    disk_free: int
    peak_memory: int
    threads: int
    seconds: float | None  # None: not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a conversion did. `bytes_in` counts what this run read, `resumed` the layers an earlier run had finished.

    `redone`: layers that an earlier run had finished too, and why they were made again.
    """

    store: Path
    manifest: StoreManifest
    bytes_in: int
    seconds: float
    resumed: int
    redone: Mapping[int, str]


def plan_cpu(
    source: WeightSource,
    out: Path,
    scheme: Scheme,
    numa_parts: int = 1,
    *,
    threads: int | None = None,
    calibration: CalibrationText | None = None,
    mixed: int | None = None,
    measure: bool = True,
) -> Plan:
    """Check all that can be checked beforehand and say what the conversion will take; writes nothing.

    `measure` converts one expert to estimate the time. `mixed`: bytes that all experts may take when those that 4 bits
    hurt most have 8 (see `mixed.choose_wide`). Raises BadInput for sizes that fit no layout, BadUsage for an
    illegal number of parts or an output that is in use, DoesNotFit for a disk or a memory that is too small.
    """
    spec = source.spec
    spec.check_experts(calibrated=calibration is not None)
    check_parts(spec, scheme.bits, numa_parts, scheme.group)
    if (scheme.rounding == "gptq") != (calibration is not None):
        raise BadUsage(
            "--rounding gptq needs calibration text, and nothing else uses it",
            hint="give --rounding gptq --calibration FILE... (or corpus:profile, the embedded text)",
        )
    job, shape = job_of(source, scheme, numa_parts, calibration, mixed), shape_of(source, scheme, numa_parts)
    bytes_out = sum(shard_bytes(shape, layer, facts_of(job)) for layer in job.layers)
    if mixed is not None:
        wide = wide_count(source, scheme, shape, mixed)
        bytes_out += wide * (shape.plain_bytes(8) - shape.plain_bytes(scheme.bits))
    resumed = check_output(out, job, bytes_out + _BYTES_OF_NAMES * spec.expert_count)
    workers = threads or default_threads()
    peak = _peak_memory(source, shape, workers)
    if calibration is not None:
        peak += calibration.memory(source.spec)
    _refuse_too_little_memory(peak, workers)
    return Plan(
        out=out,
        job=job,
        experts=spec.experts,
        weights=spec.expert_count * spec.params_per_expert,
        resumed=resumed,
        bytes_in=spec.expert_bytes,
        bytes_out=bytes_out,
        disk_free=_free(out),
        peak_memory=peak,
        threads=workers,
        seconds=_estimate(source, scheme, shape, workers) if measure and calibration is None else None,
    )


def convert_cpu(
    source: WeightSource,
    out: Path,
    scheme: Scheme,
    numa_parts: int = 1,
    *,
    threads: int | None = None,
    calibration: CalibrationText | None = None,
    mixed: int | None = None,
    arguments: Arguments | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Write the expert store `out` (a new or empty folder, or one where the same job was stopped).

    Deterministic: equal jobs give equal bytes, whatever the threads and however often the work was stopped.
    `arguments` are kept for who goes on without repeating them. Raises what `plan_cpu` raises; BadInput naming tensor
    and place where a weight is not finite, or a file that changes; DoesNotFit where the disk fills up; KtplanError for
    other trouble with it; Interrupted for Ctrl-C once a layer is finished.
    """
    started = time.monotonic()
    plan = plan_cpu(
        source, out, scheme, numa_parts, threads=threads, calibration=calibration, mixed=mixed, measure=False
    )
    shape = shape_of(source, scheme, numa_parts)
    if mixed is not None:
        shape = replace(shape, wide=choose_wide(source, scheme, shape, mixed, plan.threads, progress))
    per_layer = plan.bytes_in // len(plan.job.layers)
    sources = {layer: stamps_of(source, layer) for layer in plan.job.layers}
    arguments = arguments or Arguments(model_path=str(source.root.absolute()))
    with output_folder(out, plan.job, arguments, sources) as journal:
        resumed = len(journal.finished)
        left = [layer for layer in plan.job.layers if layer not in journal.finished]
        with (
            progress.task("converting", per_layer * len(left), "B") as task,
            Sink(journal, shape, facts_of(plan.job), source, sources) as sink,
        ):
            if calibration is None:
                _Conversion(source, scheme, shape, plan.threads, sink, task).run(left)
            else:
                from ktplan.convert.calibrated import (
                    convert_calibrated,
                )  # loads torch, which nothing else here does

                text = calibration.read(source, progress)
                convert_calibrated(source, scheme, shape, text, calibration.settings, journal, sink, task)
            sink.close()
        manifest = publish(journal, source, scheme, shape)
    return Report(
        store=out,
        manifest=manifest,
        bytes_in=per_layer * len(left),
        seconds=time.monotonic() - started,
        resumed=resumed,
        redone=journal.redone,
    )


class _Conversion:
    """Experts in order: read ahead by a few, packed by all threads, handed to the sink."""

    def __init__(
        self, source: WeightSource, scheme: Scheme, shape: StoreShape, threads: int, sink: Sink, task: Task
    ) -> None:
        self._source, self._scheme, self._shape = source, scheme, shape
        self._sink, self._task = sink, task
        self._reader = Reader(source)
        self._readers = 1 if self._reader.in_place else min(threads, _MOST_READERS)
        self._pool = Pool(threads, spin_us=0)
        self._error = ExpertError(0.0, 0.0)

    def run(self, layers: Sequence[int]) -> None:
        spec = self._source.spec
        wanted = iter([(layer, expert) for layer in layers for expert in range(spec.experts)])
        free = deque(Slot() for _ in range(self._readers + 2))
        reading: deque[tuple[int, int, Slot, Future[Sequence[Matrix]]]] = deque()
        writing: deque[tuple[Slot, Future[None]]] = deque()
        bytes_each = spec.expert_bytes // spec.expert_count
        try:
            with ThreadPoolExecutor(self._readers, thread_name_prefix="read") as readers:
                for layer, expert, slot in _as_slots_come(wanted, free):
                    reading.append(
                        (layer, expert, slot, readers.submit(self._reader.read, slot, layer, expert))
                    )
                while reading:
                    layer, expert, slot, future = reading.popleft()
                    self._note(layers, layer, expert)
                    writing.append((slot, self._pack(layer, expert, slot, future.result())))
                    self._task.advance(bytes_each)
                    while writing and (writing[0][1].done() or not (reading or free)):
                        written, done = writing.popleft()
                        done.result()
                        free.append(written)
                    for layer, expert, slot in _as_slots_come(wanted, free):
                        reading.append(
                            (layer, expert, slot, readers.submit(self._reader.read, slot, layer, expert))
                        )
        finally:
            self._reader.close()

    def _pack(self, layer: int, expert: int, slot: Slot, matrices: Sequence[Matrix]) -> Future[None]:
        out = slot.to_write(self._shape.expert_bytes(layer, expert))
        bits = self._shape.bits_of(layer, expert)
        found = pack_expert(matrices, self._scheme, self._shape, bits, out, self._pool)
        if found is None:
            refuse_not_finite(self._source, layer, expert, matrices)
        assert found is not None
        for one in found:
            self._error = ExpertError(self._error.error + one.error, self._error.energy + one.energy)
        errors = {projection: one.relative for projection, one in zip(PROJECTIONS, found, strict=True)}
        return self._sink.put(layer, expert, [out], errors)

    def _note(self, layers: Sequence[int], layer: int, expert: int) -> None:
        if expert == 0:
            number = layers.index(layer) + 1
            self._task.note(f"layer {number}/{len(layers)}, error {self._error.relative:.4f}")


def _as_slots_come(wanted: Iterator[tuple[int, int]], free: deque[Slot]) -> Iterator[tuple[int, int, Slot]]:
    """The next experts to read, as long as there are free slots."""
    while free:
        following = next(wanted, None)
        if following is None:
            return
        yield (*following, free.popleft())


def publish(journal: Journal, source: WeightSource, scheme: Scheme, shape: StoreShape) -> StoreManifest:
    """All layers are recorded: give the store its names and, last of all, `store.json`."""
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
        intermediate=shape.intermediate,
        activation=spec.activation,
        files=tuple(layer.file for layer in done),
        errors={layer.file.layer: layer.errors for layer in done},
        output_errors={layer.file.layer: layer.output_errors for layer in done if layer.output_errors},
        wide=shape.wide,
        padding=shape.padding,
    )
    journal.publish()
    write_index(journal.folder, manifest)
    manifest.save(journal.folder)
    journal.close()
    return manifest


def job_of(
    source: WeightSource,
    scheme: Scheme,
    parts: int,
    calibration: CalibrationText | None = None,
    mixed: int | None = None,
) -> Job:
    """What decides the bytes of a conversion."""
    spec = source.spec
    return Job(
        model=spec.name,
        fingerprint=spec.fingerprint,
        scheme=scheme.name if mixed is None else f"{scheme.name} and int8-row",
        rounding=scheme.rounding,
        layout=layout_for(scheme.bits, scheme.group).name,
        parts=parts,
        mixed=mixed,
        layers=spec.moe_layers,
        calibration=None if calibration is None else calibration.digest,
    )


def shape_of(source: WeightSource, scheme: Scheme, parts: int) -> StoreShape:
    """The sizes of the store that a conversion writes."""
    spec = source.spec
    width = padded(spec.moe_intermediate, scheme.bits)
    return StoreShape(
        bits=scheme.bits,
        group=scheme.group,
        parts=parts,
        experts=spec.experts,
        hidden=spec.hidden,
        intermediate=width,
        padding=width - spec.moe_intermediate,
    )


def facts_of(job: Job) -> dict[str, str]:
    """What every shard says of itself, for whoever finds it alone."""
    return {
        "model": job.model,
        "fingerprint": job.fingerprint,
        "scheme": job.scheme,
        "rounding": job.rounding,
        "layout": job.layout,
        "parts": str(job.parts),
    }


def default_threads() -> int:
    """The CPUs that this process may use."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _free(out: Path) -> int:
    found = os.statvfs(existing(out))
    return found.f_bavail * found.f_frsize


def _peak_memory(source: WeightSource, shape: StoreShape, threads: int) -> int:
    """What the process has now, plus the experts under way with their results."""
    weights = 3 * shape.hidden * shape.intermediate
    in_place = Reader(source).in_place
    readers = 1 if in_place else min(threads, _MOST_READERS)
    # A slot holds an expert as it is stored or as float32; reading another form takes some float32 on the way.
    item = source.spec.expert_bytes // max(source.spec.expert_params, 1) if in_place else 4
    slots = (readers + 2) * (weights * item + shape.plain_bytes(shape.bits))
    scratch = threads * 40 * max(shape.hidden, shape.intermediate)
    return _resident() + slots + scratch + (0 if in_place else readers * 3 * 4 * weights)


def _refuse_too_little_memory(peak: int, threads: int) -> None:
    free = available_memory()
    if free is not None and peak - _resident() > free:
        raise DoesNotFit(
            f"converting needs {format_bytes(peak)} of memory with {threads} threads, {format_bytes(free)} are free",
            hint="end other programs, or use fewer --threads (with --calibration also fewer --max-tokens)",
        )


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _estimate(source: WeightSource, scheme: Scheme, shape: StoreShape, threads: int) -> float:
    """Seconds for the whole model, from one real expert, converted twice: the first time touches new memory."""
    layer = source.spec.moe_layers[0]
    reader, slot, pool = Reader(source), Slot(), Pool(threads, spin_us=0)
    out = np.empty(shape.plain_bytes(scheme.bits), np.uint8)
    seconds = 0.0
    try:
        for _ in range(2):
            started = time.perf_counter()
            matrices = reader.read(slot, layer, 0)
            pack_expert(matrices, scheme, shape, scheme.bits, out, pool)
            seconds = time.perf_counter() - started
    finally:
        reader.close()
    return source.spec.expert_count * seconds
