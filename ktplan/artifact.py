"""Files that others can trust: whole or not at all, with a kind, a version and a digest.

Every JSON file of the suite carries `kind`, `version` and `made_by`; readers refuse a foreign kind and a newer version.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ktplan.errors import BadInput, BadUsage, DoesNotFit, KtplanError
from ktplan.version import __version__

T = TypeVar("T")

_SHORT = 32  # characters of a file's name in that of its temporary file: names have a limit
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sha256_bytes(data: bytes) -> str:
    """`"sha256:<hex>"` of some bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """`"sha256:<hex>"` of a file, read in pieces."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary file name beside `path`; on success it takes the place of `path`, on failure it is removed.

    A reader sees the old file or the new one, never half. Raises BadUsage where `path` cannot be a file, KtplanError
    naming `path` where its folder is missing or not writable, DoesNotFit where the disk is full.
    """
    refuse_bad_file_name(path)
    part = path.with_name(f".{path.name[:_SHORT]}.{os.getpid()}.part")
    try:
        with explained(path):
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(part, path)
            fsync_directory(path.parent)
    except BaseException:
        with suppress(OSError):  # the trouble that is under way is the one to tell
            part.unlink()
        raise


def refuse_bad_file_name(path: Path) -> None:
    """Raise BadUsage where `path` names no file that can be replaced: a folder, a device, a pipe."""
    with explained(path):
        if path.name in ("", "..") or path.is_dir():
            raise BadUsage(f"{path} is a folder, a file is to be written", hint="name a file, e.g. with -o")
        if path.exists() and not path.is_file():
            raise BadUsage(f"{path} is a device or a pipe, no file", hint="name a file, e.g. with -o")


def check_output_file(path: Path, *, sources: Iterable[Path] = ()) -> None:
    """Find out before the work whether the file `path` can be written after it.

    Raises BadUsage where its folder is missing, where it is no file, and where it would overwrite something that is
    read: one of `sources` or, where that is a folder, any file in it. Raises KtplanError where the folder is not
    writable.
    """
    refuse_bad_file_name(path)
    folder = path.parent
    with explained(path):
        if not folder.is_dir():
            raise BadUsage(
                f"{path} cannot be written: {folder} is not a folder that exists",
                hint="make it first, or name another file with -o",
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise KtplanError(f"{folder} is not writable", hint="name another file with -o")
        for source in sources:
            if path.exists() and source.exists() and (path.samefile(source) or folder.samefile(source)):
                raise BadUsage(
                    f"{path} is read by this command ({source}) and would be overwritten",
                    hint="name another file with -o",
                )


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by `data` at once; see `replacing` for what it raises."""
    with replacing(path) as part:
        part.write_bytes(data)


def json_bytes(kind: str, version: int, body: Mapping[str, Any]) -> bytes:
    """The text of a JSON artefact: same body, same bytes."""
    whole = {**body, "kind": kind, "version": version, "made_by": f"ktplan {__version__}"}
    return (json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def write_json(path: Path, kind: str, version: int, body: Mapping[str, Any]) -> None:
    """Write a JSON artefact whole."""
    write_whole(path, json_bytes(kind, version, body))


def read_json(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Read a JSON artefact of `kind` and exactly `version`.

    Raises BadInput when the file is missing, is not JSON, is something else, or is of another version.
    """
    body = read_json_object(path)
    found = body.get("kind")
    if found != kind:
        raise BadInput(
            f"{path} is not a {kind}: it says kind {found!r}",
            hint=f"give the file that ktplan wrote as a {kind}",
        )
    if body.get("version") != version:
        raise BadInput(
            f"{path} has version {body.get('version')!r} of {kind}, this program reads version {version}",
            hint=f"use the program that wrote it ({body.get('made_by', 'unknown')}) or make the file again",
        )
    return body


def parsed(path: Path, read: Callable[[Any], T], body: Any, hint: str) -> T:
    """`read(body)`; what it trips over in a file of the right kind is damage: raises BadInput naming `path`."""
    try:
        return read(body)
    except BadInput as fault:
        raise BadInput(f"{path} is damaged: {fault.message}", hint=fault.hint or hint) from None
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise BadInput(f"{path} is damaged: {type(fault).__name__} {fault}", hint=hint) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Any JSON file that holds one object. Raises BadInput naming the file and the place of the fault."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist", hint="check the path") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a folder, a file is expected", hint="check the path") from None
    except OSError as fault:
        raise BadInput(f"{path} cannot be read: {fault.strerror}", hint="check its permissions") from None
    except json.JSONDecodeError as fault:
        raise BadInput(
            f"{path} is not JSON: {fault.msg} at line {fault.lineno}",
            hint="make the file again; it may be cut off",
        ) from None
    except (ValueError, RecursionError):  # no UTF-8; a number of thousands of digits; brackets without end
        raise BadInput(f"{path} is not JSON text", hint="make the file again") from None
    if not isinstance(body, dict):
        raise BadInput(
            f"{path} holds a {type(body).__name__}, a JSON object is expected", hint="check the path"
        )
    return body


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the operating system's errors about writing `path` into one line with a remedy."""
    try:
        yield
    except OSError as fault:
        raise cannot_write(path, fault) from fault


def cannot_write(path: Path, fault: OSError) -> KtplanError:
    """What to tell about an OSError that came up while writing `path`."""
    if fault.errno in _FULL:
        return DoesNotFit(
            f"no space left to write {path}", hint="free space there or choose another output with -o"
        )
    reason = fault.strerror or str(fault)
    return KtplanError(
        f"{path} cannot be written: {reason}", hint="choose an output that you may write to, with -o"
    )


def os_trouble(fault: OSError) -> KtplanError:
    """What to tell about an OSError of which nothing is known but itself."""
    reason = fault.strerror or str(fault) or type(fault).__name__
    what = f"{os.fsdecode(fault.filename)}: " if isinstance(fault.filename, (str, bytes)) else ""
    if fault.errno in _FULL:
        return DoesNotFit(f"{what}{reason}", hint="free space there, or raise the limit on file sizes")
    hints = {
        errno.EACCES: "check the permissions of the path",
        errno.EPERM: "check the permissions of the path",
        errno.EROFS: "choose a place that you may write to",
        errno.ENAMETOOLONG: "give a shorter path",
        errno.ELOOP: "a symbolic link there leads back to itself",
        errno.EMFILE: "raise the limit on open files: ulimit -n",
        errno.EIO: "check the disk",
    }
    return KtplanError(f"{what}{reason}", hint=hints.get(fault.errno or 0, "check the path"))


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Create the folder `path` for one job; if the job fails or is interrupted, remove all that it made.

    `path` must not exist or be an empty folder that no other job fills, else BadUsage names it: nothing foreign is ever
    overwritten or removed.
    """
    made: list[Path] = []
    try:
        with explained(path):
            _make_folder(path, made)
            with locked_folder(path):
                if any(path.iterdir()):
                    raise BadUsage(
                        f"{path} exists and is not empty",
                        hint="name a new folder with -o, or remove that one first",
                    )
                try:
                    yield path
                    fsync_directory(path)
                    fsync_directory(path.parent)
                except BaseException:
                    _empty(path)
                    raise
    except BaseException:
        for folder in reversed(made):
            with suppress(OSError):  # another job may have put something there
                folder.rmdir()
        raise


def _make_folder(path: Path, made: list[Path]) -> None:
    """Make `path` and the folders above it; those that were not there are appended to `made`."""
    if path.exists() and not path.is_dir():
        raise BadUsage(f"{path} exists and is a file", hint="name a new folder with -o")
    for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        folder.mkdir(exist_ok=True)
        made.append(folder)
    probe = path / f".{os.getpid()}.part"
    probe.touch()
    probe.unlink()


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Keep other jobs out of `path`; BadUsage where one is in it. The lock goes with the process, however it ends."""
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadUsage(
                f"another ktplan is writing {path}", hint="wait for it, or name another folder with -o"
            ) from None
        yield
    finally:
        os.close(handle)


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
