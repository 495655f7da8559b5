"""A conversion that can be stopped at any moment: the output folder while the work goes on.

Until the very end shards carry the suffix `.part` and there is no `store.json`, so nothing in the folder looks complete
to ktplan or to kt-kernel. `convert.progress.json` names the job and the layers that are finished. What remains when the
work ends early:

    an error                           nothing: all that this run made is removed
    Ctrl-C before the first layer      nothing
    Ctrl-C later, SIGKILL, power loss  the finished layers; the same command goes on from there

A second run goes on only for the same job (model, scheme, rounding, layout, parts), else it is refused by name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ktplan.artifact import explained, fsync_directory, new_directory, read_json, sha256_file, write_json
from ktplan.errors import BadInput, BadUsage, DoesNotFit, Interrupted, KtplanError
from ktplan.store.manifest import MANIFEST_FILE, PROGRESS_FILE, StoreFile, errors_from_json
from ktplan.store.writer import INDEX_FILE, shard_name
from ktplan.units import format_bytes
from ktplan.version import __version__

_KIND = "ktplan-convert-progress"
_VERSION = 1

LayerErrors = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was asked, as far as it decides the bytes of the store: equal jobs write equal stores."""

    model: str
    fingerprint: str
    scheme: str
    rounding: str
    layout: str
    parts: int
    layers: tuple[int, ...]
    program: str = f"ktplan {__version__}"  # another version may round otherwise

    def shard(self, layer: int) -> str:
        """The final name of a layer's file."""
        return shard_name(self.layers.index(layer) + 1, len(self.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedLayer:
    """A shard that is whole and durable, and its experts' weight errors by projection."""

    file: StoreFile
    errors: LayerErrors


class Journal:
    """The finished layers of a job; `record` makes one more survive a crash."""

    def __init__(self, folder: Path, job: Job, finished: dict[int, FinishedLayer]) -> None:
        self.folder, self.job, self.finished = folder, job, finished

    def part(self, layer: int) -> Path:
        """Where a layer's shard is written."""
        return self.folder / f"{self.job.shard(layer)}.part"

    def record(self, layer: int, done: FinishedLayer) -> None:
        """`layer` is finished and on disk."""
        fsync_directory(self.folder)
        self.finished[layer] = done
        self.save()

    def save(self) -> None:
        """Write the journal whole."""
        finished = [
            {"file": asdict(done.file), "errors": dict(done.errors)} for done in self.finished.values()
        ]
        write_json(
            self.folder / PROGRESS_FILE, _KIND, _VERSION, {"job": asdict(self.job), "finished": finished}
        )

    def publish(self) -> None:
        """Give the shards their names; the caller writes `store.json` afterwards and then calls `close`."""
        for layer in self.job.layers:
            os.replace(self.part(layer), self.folder / self.job.shard(layer))
        fsync_directory(self.folder)

    def close(self) -> None:
        """The store is complete."""
        (self.folder / PROGRESS_FILE).unlink()

    def drop_unfinished(self) -> None:
        """Remove the shard that is half written."""
        for layer in self.job.layers:
            if layer not in self.finished:
                self.part(layer).unlink(missing_ok=True)


def check_output(folder: Path, job: Job, bytes_needed: int) -> int:
    """How many layers are there from an earlier run; raises what `output_folder` would, without touching the disk.

    BadUsage: `folder` is a file, holds other things or another job. KtplanError: it is not writable. DoesNotFit: the
    disk is too small.
    """
    finished: dict[int, FinishedLayer] = {}
    if (folder / PROGRESS_FILE).is_file():
        finished = _read_journal(folder, job)
    elif folder.exists() and not folder.is_dir():
        raise BadUsage(f"{folder} exists and is a file", hint="name a new folder with -o")
    elif folder.is_dir() and any(folder.iterdir()):
        raise BadUsage(
            f"{folder} exists and is not empty", hint="name a new folder with -o, or remove that one first"
        )
    place = existing(folder)
    if not place.is_dir():
        raise BadUsage(f"{place} is a file, so {folder} cannot be made", hint="name a new folder with -o")
    if not os.access(place, os.W_OK | os.X_OK):
        raise KtplanError(
            f"{folder} cannot be written: no permission in {place}", hint="choose another output with -o"
        )
    free = shutil.disk_usage(place).free
    bytes_needed -= sum(done.file.bytes for done in finished.values())
    if bytes_needed > free:
        raise DoesNotFit(
            f"the store needs {format_bytes(bytes_needed)} on {place}, {format_bytes(free)} are free",
            hint=f"free {format_bytes(bytes_needed - free)}, use fewer --bits or another disk with -o",
        )
    return len(finished)


def existing(path: Path) -> Path:
    """`path` or its nearest parent that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


@contextmanager
def output_folder(folder: Path, job: Job) -> Iterator[Journal]:
    """The journal of a new job in `folder`, or of the same job that was stopped there.

    See the head of this file for what stays when the body fails. Raises Interrupted for Ctrl-C once a layer is done.
    """
    if (folder / PROGRESS_FILE).is_file():
        with explained(folder), _locked(folder):
            journal = Journal(folder, job, _verified(folder, job, _read_journal(folder, job)))
            journal.save()
            try:
                yield journal
            except KeyboardInterrupt:
                journal.drop_unfinished()
                raise _stopped(journal) from None
            except BaseException:
                journal.drop_unfinished()
                raise
        return
    stopped: Journal | None = None
    with new_directory(folder):
        journal = Journal(folder, job, {})
        journal.save()
        try:
            yield journal
        except KeyboardInterrupt:
            if not journal.finished:
                raise
            journal.drop_unfinished()
            stopped = journal
    if stopped is not None:
        raise _stopped(stopped)


def _stopped(journal: Journal) -> Interrupted:
    return Interrupted(
        f"stopped after {len(journal.finished)} of {len(journal.job.layers)} layers; they are kept in {journal.folder}",
        hint="run the same command again to go on, or remove that folder",
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second conversion out of the folder. The kernel drops the lock with the process, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadUsage(
                f"another conversion is writing to {folder}", hint="wait for it, or name another folder"
            ) from None
        yield
    finally:
        os.close(handle)


def _read_journal(folder: Path, job: Job) -> dict[int, FinishedLayer]:
    path = folder / PROGRESS_FILE
    body = read_json(path, _KIND, _VERSION)
    try:
        found = Job(**{**body["job"], "layers": tuple(body["job"]["layers"])})
        finished = [
            FinishedLayer(file=StoreFile(**entry["file"]), errors=errors_from_json({"0": entry["errors"]})[0])
            for entry in body["finished"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise BadInput(f"{path} is damaged: {fault!r}", hint=f"remove {folder} and convert again") from None
    differs = [
        f"{name} {old!r}, now {new!r}"
        for (name, old), new in zip(asdict(found).items(), asdict(job).values(), strict=True)
        if old != new
    ]
    if differs:
        raise BadUsage(
            f"{folder} holds an unfinished conversion of another kind: {'; '.join(differs)}",
            hint="repeat the command that began it, name a new folder with -o, or remove that one",
        )
    return {done.file.layer: done for done in finished if done.file.layer in job.layers}


def _verified(folder: Path, job: Job, finished: dict[int, FinishedLayer]) -> dict[int, FinishedLayer]:
    """The layers whose shards are on disk as recorded, under their unfinished names; the rest is done again."""
    kept: dict[int, FinishedLayer] = {}
    for layer, done in finished.items():
        final = folder / job.shard(layer)
        part = folder / f"{job.shard(layer)}.part"
        if final.is_file():  # the end was near: names had been given already
            os.replace(final, part)
        if (
            part.is_file()
            and part.stat().st_size == done.file.bytes
            and sha256_file(part) == done.file.sha256
        ):
            kept[layer] = done
    for name in (INDEX_FILE, MANIFEST_FILE):
        (folder / name).unlink(missing_ok=True)
    for name in (PROGRESS_FILE, INDEX_FILE, MANIFEST_FILE):
        for half_written in folder.glob(f".{name}.*.part"):
            half_written.unlink()
    return kept
