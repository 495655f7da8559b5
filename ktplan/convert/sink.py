"""Where finished experts go: one thread writes and digests them in order, another makes layers durable.

So reading and quantizing never wait for the disk, until it is more than a little behind.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

from ktplan.artifact import explained
from ktplan.convert.job import FinishedLayer, Journal, Stamps
from ktplan.errors import BadInput
from ktplan.model.source import PROJECTIONS, WeightSource
from ktplan.store.manifest import StoreShape
from ktplan.store.writer import ShardWriter

# Unwritten bytes that the system may hold of a shard: little enough that Ctrl-C is never kept waiting for long.
_FLUSH_BYTES = 64 << 20
_OUTSTANDING = 2  # flushes that may be under way


class Sink:
    """The shards of a job. Use as a context manager; `close` waits until every layer is recorded."""

    def __init__(
        self,
        journal: Journal,
        shape: StoreShape,
        facts: Mapping[str, str],
        source: WeightSource,
        sources: Mapping[int, Stamps],
    ) -> None:
        """`sources`: the stamps of each layer's files before anything was read; a layer is good if they still hold."""
        self._journal, self._shape, self._facts = journal, shape, facts
        self._source, self._sources = source, sources
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._writes: deque[Future[None]] = deque()
        self._syncs: deque[Future[None]] = deque()
        self._shard: ShardWriter | None = None
        self._unflushed = 0
        self._broken = False  # a write failed: those that were waiting behind it are dropped
        self._errors: dict[str, list[float]] = {}
        self._output_errors: dict[str, list[float]] = {}

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What was handed over is little, and layers that are nearly done are worth the moment it takes.
        self._writer.shutdown(wait=True)
        self._syncer.shutdown(wait=True)
        if self._shard is not None:
            with suppress(OSError):
                self._shard.close()

    def put(
        self,
        layer: int,
        expert: int,
        arrays: Sequence[Any],
        errors: Mapping[str, float],
        output_errors: Mapping[str, float] | None = None,
    ) -> Future[None]:
        """Write an expert, in order; the arrays must not change until the result is done."""
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()
        self._writes.append(self._writer.submit(self._write, layer, expert, arrays, errors, output_errors))
        return self._writes[-1]

    def close(self) -> None:
        """Wait until all is written, durable and recorded. Raises what went wrong on the way."""
        while self._writes:
            self._writes.popleft().result()
        while self._syncs:
            self._syncs.popleft().result()

    # On the writer's thread.

    def _write(
        self,
        layer: int,
        expert: int,
        arrays: Sequence[Any],
        errors: Mapping[str, float],
        output_errors: Mapping[str, float] | None,
    ) -> None:
        if self._broken:
            return
        self._broken = True  # until this one went well
        self._write_one(layer, expert, arrays, errors, output_errors)
        self._broken = False

    def _write_one(
        self,
        layer: int,
        expert: int,
        arrays: Sequence[Any],
        errors: Mapping[str, float],
        output_errors: Mapping[str, float] | None,
    ) -> None:
        if expert == 0:
            self._errors = {projection: [] for projection in PROJECTIONS}
            self._output_errors = {projection: [] for projection in PROJECTIONS} if output_errors else {}
            self._shard = ShardWriter(self._journal.part(layer), self._shape, layer, self._facts)
            self._unflushed = 0
        assert self._shard is not None
        self._unflushed += self._shard.add(arrays)
        for projection in PROJECTIONS:
            self._errors[projection].append(errors[projection])
            if output_errors:
                self._output_errors[projection].append(output_errors[projection])
        if expert == self._shape.experts - 1:
            self._sync(self._finish, self._shard, layer, self._errors, self._output_errors)
            self._shard = None
        elif self._unflushed >= _FLUSH_BYTES:
            self._sync(self._shard.flush)
            self._unflushed = 0

    def _sync(self, work: Callable[..., None], *arguments: object) -> None:
        while len(self._syncs) >= _OUTSTANDING:
            self._syncs.popleft().result()
        self._syncs.append(self._syncer.submit(work, *arguments))

    # On the other thread.

    def _finish(
        self,
        shard: ShardWriter,
        layer: int,
        errors: dict[str, list[float]],
        output_errors: dict[str, list[float]],
    ) -> None:
        with shard:
            file = shard.finish(self._journal.job.shard(layer))
        before = self._sources[layer]
        changed = [
            name for name, stamp in stamps_of(self._source, layer).items() if before.get(name) != stamp
        ]
        if changed:
            raise BadInput(
                f"the model's file {changed[0]} was changed while layer {layer} was converted",
                hint="convert again when nothing writes to the model",
            )
        done = FinishedLayer(
            file=file,
            errors={projection: tuple(found) for projection, found in errors.items()},
            sources=before,
            output_errors={projection: tuple(found) for projection, found in output_errors.items()},
        )
        with explained(self._journal.folder):
            self._journal.record(layer, done)


def stamps_of(source: WeightSource, layer: int) -> Stamps:
    """Size and time of change of the files that hold a layer's experts, named below the model's folder."""
    files = {
        source.file_of(name)
        for expert in range(source.spec.experts)
        for name in source.expert_names(layer, expert).values()
    }
    stamps: dict[str, tuple[int, int]] = {}
    for file in sorted(files):
        found = file.stat()
        stamps[os.path.relpath(file, source.root)] = (found.st_size, found.st_mtime_ns)
    return stamps
