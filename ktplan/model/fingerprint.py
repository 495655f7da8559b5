"""Which model a checkpoint holds, whatever its files, names and shards are called: a digest of samples of its weights.

The same model saved with one tensor an expert or one for all, in a stack that is transposed or in rows that alternate,
has one fingerprint, as long as its other tensors are cut alike. A fine-tune has another one, even if nothing but its
experts differ; so has another encoding of the weights. Only samples are read: a model of any size is known at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ktplan.model.header import TensorInfo

_SAMPLE_BYTES = 64  # of each dense tensor, and of each part of a packed matrix
_SAMPLE_WEIGHTS = 32  # neighbours in a row of a plain matrix
_SAMPLED_EXPERTS = 8  # of each layer


class Run(NamedTuple):
    """Some bytes of a file."""

    file: Path
    start: int
    size: int


def fingerprint(facts: object, dense: Iterable[TensorInfo], experts: Sequence[Run]) -> str:
    """sha256 of facts, of every dense tensor's dtype, shape and middle bytes, and of what `experts` points at.

    Dense tensors count in an order of their own: names differ between ways to save one model.
    """
    tensors = list(dense)
    middles = [Run(t.file, *_middle(t.start, t.bytes)) for t in tensors]
    held = _read([*middles, *experts])
    digest = hashlib.sha256(json.dumps(facts).encode())
    for line in sorted(
        f"{t.dtype} {t.shape} {sample.hex()}\n" for t, sample in zip(tensors, held, strict=False)
    ):
        digest.update(line.encode())
    for sample in held[len(tensors) :]:
        digest.update(sample)
    return "sha256:" + digest.hexdigest()


def sampled_experts(count: int) -> list[int]:
    """The experts of a layer that are looked at: evenly chosen, the first and the last among them."""
    some = min(count, _SAMPLED_EXPERTS)
    return sorted({number * (count - 1) // max(some - 1, 1) for number in range(some)})


def plain_runs(
    file: Path, start: int, item: int, rows: int, columns: int, *, row: int, total_rows: int, transposed: bool
) -> Iterator[Run]:
    """A few neighbours of the middle row of a projection [rows, columns] of `item` bytes a weight.

    It lies in a matrix of `total_rows` that begins at `start`, or in its transposed; `row` is the row there that holds
    the projection's middle row.
    """
    count = min(columns, _SAMPLE_WEIGHTS)
    first = (columns - count) // 2
    if not transposed:
        yield Run(file, start + (row * columns + first) * item, count * item)
        return
    for column in range(first, first + count):
        yield Run(file, start + (column * total_rows + row) * item, item)


def packed_runs(info: TensorInfo, start: int, size: int, halves: int) -> Iterator[Run]:
    """The middle bytes of each of `halves` equal pieces of a tensor's `size` bytes at `start`."""
    piece = size // halves
    for number in range(halves):
        yield Run(info.file, *_middle(start + number * piece, piece))


def _middle(start: int, size: int) -> tuple[int, int]:
    return start + max(0, size - _SAMPLE_BYTES) // 2, min(size, _SAMPLE_BYTES)


def _read(runs: Sequence[Run]) -> list[bytes]:
    """What the runs point at; every file is opened once and read in order."""
    found = [b""] * len(runs)
    files: dict[Path, list[int]] = {}
    for number, run in enumerate(runs):
        files.setdefault(run.file, []).append(number)
    for file, numbers in files.items():
        with file.open("rb", buffering=0) as handle:
            for number in sorted(numbers, key=lambda number: runs[number].start):
                handle.seek(runs[number].start)
                found[number] = handle.read(runs[number].size)
    return found
