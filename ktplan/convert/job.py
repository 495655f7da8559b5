"""A conversion that can be stopped at any moment: the output folder while the work goes on.

Until the very end shards carry the suffix `.part` and there is no `store.json`, so nothing in the folder looks complete
to ktplan or to kt-kernel. `job.json` says what was asked; `journal.jsonl` grows by one sealed line for every layer that
is whole and durable. What remains when the work ends early:

    unusable weights in the model      nothing: all that this run made is removed
    any other end before a layer       nothing (SIGKILL and power loss: files that are taken over or replaced)
    any other end later                the finished layers; the same command, or --resume, goes on from there

A second run goes on only for the same job, else it is refused by the name of the argument that differs. Before it goes
on it checks what is there: a shard that was changed, or whose source was changed since, is made again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ktplan.artifact import (
    explained,
    fsync_directory,
    locked_folder,
    read_json,
    sha256_bytes,
    sha256_file,
    write_json,
)
from ktplan.errors import BadInput, BadUsage, DoesNotFit, Interrupted, KtplanError
from ktplan.store.manifest import JOB_FILE, MANIFEST_FILE, StoreFile, errors_from_json
from ktplan.store.writer import INDEX_FILE, shard_name
from ktplan.units import format_bytes
from ktplan.version import __version__

JOURNAL_FILE = "journal.jsonl"
_KIND = "ktplan-convert-job"
_VERSION = 1

LayerErrors = Mapping[str, tuple[float, ...]]
Stamps = Mapping[str, tuple[int, int]]  # source file, below the model's folder -> size, time of change in ns

# What decides the bytes of a store -> what the user calls it.
_ARGUMENTS = {
    "model": "MODEL",
    "fingerprint": "MODEL",
    "layers": "MODEL",
    "scheme": "--bits",  # or another: see _format_option
    "layout": "--bits",
    "rounding": "--rounding",
    "parts": "--numa-parts",
    "calibration": "--calibration",
    "mixed": "--mixed",
    "program": "the version of the program",
}


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
    calibration: str | None = None  # what the calibration text and settings are, as a digest
    mixed: int | None = None  # bytes that experts may take when some are kept in INT8
    program: str = f"ktplan {__version__}"  # another version may round otherwise

    def shard(self, layer: int) -> str:
        """The final name of a layer's file."""
        return shard_name(self.layers.index(layer) + 1, len(self.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a command needs to ask for the same job again: where things are, and the options as they were given."""

    model_path: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedLayer:
    """A shard that is whole and durable, its experts' weight errors by projection, and what it was made from."""

    file: StoreFile
    errors: LayerErrors
    sources: Stamps = field(default_factory=dict)
    output_errors: LayerErrors = field(default_factory=dict)  # with calibration


class Journal:
    """The finished layers of a job; `record` makes one more survive a crash."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job
        self.finished: dict[int, FinishedLayer] = {}
        self.redone: dict[
            int, str
        ] = {}  # layers that an earlier run had finished, and why they are made again

    def part(self, layer: int) -> Path:
        """Where a layer's shard is written."""
        return self.folder / f"{self.job.shard(layer)}.part"

    def begin(self, arguments: Arguments) -> None:
        """Write `job.json`: from now on the folder holds an unfinished conversion."""
        body = {"job": asdict(self.job), **asdict(arguments)}
        write_json(self.folder / JOB_FILE, _KIND, _VERSION, body)

    def record(self, layer: int, done: FinishedLayer) -> None:
        """`layer` is finished and on disk: append a line, durable when this returns."""
        fsync_directory(self.folder)
        line = _sealed(done)
        handle = os.open(self.folder / JOURNAL_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            before = os.fstat(handle).st_size
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(handle, left) :]
                os.fsync(handle)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)
        if not before:
            fsync_directory(self.folder)
        self.finished[layer] = done

    def publish(self) -> None:
        """Give the shards their names; the caller writes `store.json` afterwards and then calls `close`."""
        for layer in self.job.layers:
            os.replace(self.part(layer), self.folder / self.job.shard(layer))
        fsync_directory(self.folder)

    def close(self) -> None:
        """The store is complete; what stays of the job when the disk fails now does no harm."""
        with suppress(OSError):
            (self.folder / JOURNAL_FILE).unlink(missing_ok=True)
            (self.folder / JOB_FILE).unlink()
            fsync_directory(self.folder)

    def drop_unfinished(self) -> None:
        """Remove the shards that are half written; what cannot be removed does no harm."""
        for layer in self.job.layers:
            if layer not in self.finished:
                with suppress(OSError):
                    self.part(layer).unlink(missing_ok=True)


def check_output(folder: Path, job: Job, bytes_needed: int) -> int:
    """How many layers are there from an earlier run; raises what `output_folder` would, without touching the disk.

    BadUsage: `folder` is a file, holds other things or another job. KtplanError: it is not writable. DoesNotFit: the
    disk is too small.
    """
    finished: dict[int, FinishedLayer] = {}
    if (folder / JOB_FILE).is_file():
        _refuse_another_job(folder, job)
        finished = _read_journal(folder, job)[0]
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


def recorded_arguments(folder: Path) -> Arguments:
    """What the conversion that was stopped in `folder` was asked. Raises BadInput where there is none."""
    if not (folder / JOB_FILE).is_file():
        what = "a finished store" if (folder / MANIFEST_FILE).is_file() else "no conversion that was stopped"
        raise BadInput(f"{folder} holds {what}: there is no {JOB_FILE}", hint="give the folder that -o named")
    body = read_json(folder / JOB_FILE, _KIND, _VERSION)
    try:
        return Arguments(model_path=str(body["model_path"]), options=dict(body["options"]))
    except (KeyError, TypeError, ValueError) as fault:
        raise _damaged_job(folder, fault) from None


@contextmanager
def output_folder(
    folder: Path, job: Job, arguments: Arguments, sources: Mapping[int, Stamps]
) -> Iterator[Journal]:
    """The journal of a new job in `folder`, or of the same job that was stopped there.

    `sources` are the present stamps of each layer's files. See the head of this file for what stays when the body
    fails. Raises Interrupted for Ctrl-C once a layer is done.
    """
    resuming = (folder / JOB_FILE).is_file()
    made = [] if resuming else _new_folder(folder)
    journal = Journal(folder, job)
    with explained(folder), locked_folder(folder):
        try:
            if resuming:
                _refuse_another_job(folder, job)
                _take_over(journal, sources)
            journal.begin(arguments)
            yield journal
        except BaseException as fault:
            if not resuming and (isinstance(fault, BadInput) or not journal.finished):
                _remove(folder, made)
                raise
            if not isinstance(fault, BadUsage):
                journal.drop_unfinished()
            if isinstance(fault, KeyboardInterrupt) and journal.finished:
                raise _stopped(journal) from None
            if isinstance(fault, KtplanError) and journal.finished:
                fault.hint = (
                    f"{fault.hint or 'see above'}; {_kept(journal)}, the same command goes on from there"
                )
            raise


def _kept(journal: Journal) -> str:
    return f"{len(journal.finished)} of {len(journal.job.layers)} layers are kept in {journal.folder}"


def _stopped(journal: Journal) -> Interrupted:
    return Interrupted(
        f"stopped after {len(journal.finished)} of {len(journal.job.layers)} layers; they are kept in {journal.folder}",
        hint=f"ktplan convert-cpu --resume {journal.folder} goes on (so does the same command), or remove that folder",
    )


def _new_folder(folder: Path) -> list[Path]:
    """Create `folder` for a new job; returns the folders that were made, innermost first."""
    if folder.exists() and not folder.is_dir():
        raise BadUsage(f"{folder} exists and is a file", hint="name a new folder with -o")
    if folder.exists() and any(folder.iterdir()):
        raise BadUsage(
            f"{folder} exists and is not empty", hint="name a new folder with -o, or remove that one first"
        )
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove(folder: Path, made: list[Path]) -> None:
    """Take back what a new job made; what cannot be removed has no store.json and so looks like what it is."""
    with suppress(OSError):
        for entry in folder.iterdir():
            entry.unlink()
        for path in made:
            path.rmdir()


def _damaged_job(folder: Path, fault: object) -> BadInput:
    return BadInput(f"{folder / JOB_FILE} is damaged: {fault!r}", hint=f"remove {folder} and convert again")


def _refuse_another_job(folder: Path, job: Job) -> None:
    body = read_json(folder / JOB_FILE, _KIND, _VERSION)
    try:
        found = Job(**{**body["job"], "layers": tuple(body["job"]["layers"])})
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise _damaged_job(folder, fault) from None
    differs: dict[str, str] = {}
    for (name, old), new in zip(asdict(found).items(), asdict(job).values(), strict=True):
        if old != new:
            option = _ARGUMENTS[name] if name not in ("scheme", "layout") else _format_option(found, job)
            differs.setdefault(option, f"{option} was {_short(old)}, is {_short(new)} now")
    if differs:
        raise BadUsage(
            f"{folder} holds an unfinished conversion with other arguments: {'; '.join(differs.values())}",
            hint=f"ktplan convert-cpu --resume {folder} finishes that one; or name a new folder with -o",
        )


def _format_option(one: Job, other: Job) -> str:
    """What a user changes to get from one format to the other."""
    if "bf16" in (one.scheme, other.scheme):
        return "--dtype"
    widths = [job.scheme.partition("-")[0] for job in (one, other)]
    return "--group-size" if widths[0] == widths[1] else "--bits"


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else text[:28] + "..."


def _sealed(done: FinishedLayer) -> bytes:
    body = {
        "file": asdict(done.file),
        "errors": dict(done.errors),
        "sources": dict(done.sources),
        "output_errors": dict(done.output_errors),
    }
    text = json.dumps(body, sort_keys=True)
    return (
        f'{{"layer": {done.file.layer}, "seal": "{sha256_bytes(text.encode())}", "body": {text}}}\n'.encode()
    )


def _unsealed(line: bytes) -> FinishedLayer | None:
    """The layer that a line of the journal tells of; None for a line that was cut off or changed."""
    try:
        whole = json.loads(line)
        body = whole["body"]
        if sha256_bytes(json.dumps(body, sort_keys=True).encode()) != whole["seal"]:
            return None
        output_errors = errors_from_json({"0": body["output_errors"]})[0] if body["output_errors"] else {}
        return FinishedLayer(
            file=StoreFile(**body["file"]),
            errors=errors_from_json({"0": body["errors"]})[0],
            sources={name: (int(size), int(time)) for name, (size, time) in body["sources"].items()},
            output_errors=output_errors,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_journal(folder: Path, job: Job) -> tuple[dict[int, FinishedLayer], int]:
    """The layers that sealed lines tell of, the later line counting, and how many bytes whole lines take."""
    path = folder / JOURNAL_FILE
    if not path.is_file():
        return {}, 0
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    lines = [_unsealed(line) for line in data[:end].splitlines()]
    return {
        done.file.layer: done for done in lines if done is not None and done.file.layer in job.layers
    }, end


def _take_over(journal: Journal, sources: Mapping[int, Stamps]) -> None:
    """Keep the layers whose shards and sources are as recorded; shards get their unfinished names back."""
    folder = journal.folder
    finished, whole = _read_journal(folder, journal.job)
    if (folder / JOURNAL_FILE).is_file():
        os.truncate(folder / JOURNAL_FILE, whole)  # a line that was being written when the power failed
    for name in (MANIFEST_FILE, INDEX_FILE):
        (folder / name).unlink(missing_ok=True)
    for layer, done in finished.items():
        final, part = folder / journal.job.shard(layer), journal.part(layer)
        if final.is_file():  # the end was near: names had been given already
            os.replace(final, part)
        if reason := _reason_to_redo(part, done, sources.get(layer, {})):
            journal.redone[layer] = reason
        else:
            journal.finished[layer] = done
    for name in (JOB_FILE, INDEX_FILE, MANIFEST_FILE):
        for half_written in folder.glob(f".{name}.*.part"):
            half_written.unlink()


def _reason_to_redo(part: Path, done: FinishedLayer, sources: Stamps) -> str | None:
    for name, stamp in sources.items():
        if done.sources.get(name) != stamp:
            return f"the model's file {name} was changed since"
    if not part.is_file():
        return f"{part.name} is gone"
    if part.stat().st_size != done.file.bytes or sha256_file(part) != done.file.sha256:
        return f"{part.name} was changed since"
    return None
