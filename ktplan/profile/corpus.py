"""Texts to profile and calibrate with: files in, numbered documents out.

    .txt, .md      the whole file is one document
    .jsonl         one document a line, an object with a text field; blank lines are nothing
    .json          a list of such objects, or an object with one such list
    .csv, .tsv     a heading, then one document a row
    .parquet       one document a row (needs pyarrow)

A row without the text field that has chat `messages` (role, content) or ShareGPT `conversations` (from, value) is a
document too. A row that cannot be used is told to the caller, never dropped in silence; a file without a single
usable document is an error. This file does not know what a token is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ktplan.artifact import sha256_bytes, sha256_file
from ktplan.errors import BadInput, BadUsage
from ktplan.profile.rows import Messages, Rows, chat_of, plain_chat, table_rows

TEXT_SUFFIXES = (".txt", ".md")
LINES_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".json", ".csv", ".tsv", ".parquet")
SUFFIXES = (*TEXT_SUFFIXES, *LINES_SUFFIXES, *TABLE_SUFFIXES)
NAMED_LINES = 8  # a warning names so many lines and counts the rest


class Document(NamedTuple):
    """One text. `id` is the row's own "id" or `file:line`; `source` is the file it came from, by name.

    `dataset` is the group it was given to be told apart from others; empty where none was named.
    """

    id: str
    text: str
    source: str
    dataset: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How rows become documents. `chat` writes messages as the model's own template does."""

    text_field: str = "text"
    strict: bool = False
    group_by: str | None = None  # a field whose value is the document's data set
    chat: Callable[[Messages], str] = plain_chat


class Skipped(NamedTuple):
    """A line of a jsonl file that gave no document, and why."""

    file: str
    line: int
    why: str


class CorpusFile(NamedTuple):
    """A file of a corpus: its name, unique in the corpus and free of folders, and the digest of its bytes."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Everything that some files hold: documents in file order, and the lines that gave none."""

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]
    files: tuple[CorpusFile, ...]

    def warning(self) -> str | None:
        """One sentence that counts and names the skipped lines; None when there are none."""
        if not self.skipped:
            return None
        named = [f"{row.file} line {row.line} ({row.why})" for row in self.skipped[:NAMED_LINES]]
        rest = len(self.skipped) - len(named)
        more = f" and {rest:,} more" if rest else ""
        return f"skipped {len(self.skipped):,} unusable line{'s'[: len(self.skipped) > 1]}: {', '.join(named)}{more}"


def read_corpus(
    paths: Sequence[Path],
    text_field: str = "text",
    *,
    strict: bool = False,
    datasets: Mapping[Path, str] | None = None,
    group_by: str | None = None,
    chat: Callable[[Messages], str] = plain_chat,
) -> Corpus:
    """All documents of `paths` with the lines that were skipped; see `documents` for what it raises.

    `datasets` names the data set of each file; `group_by` a field of a row that does so instead.
    """
    skipped: list[Skipped] = []
    how = Reading(text_field=text_field, strict=strict, group_by=group_by, chat=chat)
    found = tuple(documents(paths, how=how, datasets=datasets or {}, on_skip=skipped.append))
    names = source_names(paths)
    files = tuple(CorpusFile(names[path], sha256_file(path)) for path in names)
    return Corpus(documents=found, skipped=tuple(skipped), files=files)


def documents(
    paths: Iterable[Path],
    text_field: str = "text",
    *,
    strict: bool = False,
    on_skip: Callable[[Skipped], None] | None = None,
    how: Reading | None = None,
    datasets: Mapping[Path, str] | None = None,
) -> Iterator[Document]:
    """The documents of some files, in order.

    Rows that are no object or have neither text under `text_field` nor chat messages are reported to `on_skip`; with
    `strict` the first one raises instead. Raises BadInput for a file that is empty, is not UTF-8 (with line and byte
    offset) or holds no usable document, BadUsage for no file at all or an unknown kind of file, MachineLacks for a
    parquet file where nothing reads them.
    """
    how = how or Reading(text_field=text_field, strict=strict)
    for path, name in source_names(paths).items():
        suffix = path.suffix.lower()
        if suffix not in SUFFIXES:
            raise BadUsage(
                f"{path} is neither text (.txt) nor documents (.jsonl, .json, .csv, .parquet)",
                hint='a .txt file is one document; a .jsonl file has one object a line, {"text": "..."}',
            )
        group = (datasets or {}).get(path, "")
        if suffix in TEXT_SUFFIXES:
            yield _whole_file(path, name)._replace(dataset=group)
            continue
        rows = _lines(path) if suffix in LINES_SUFFIXES else _table(path, suffix)
        yield from _documents(path, name, group, rows, how, on_skip or (lambda row: None))


def digest(paths: Iterable[Path]) -> str:
    """One `sha256:` digest for several files: over their names and digests, in the given order."""
    rows = [f"{sha256_file(path)} {name}\n" for path, name in source_names(paths).items()]
    return sha256_bytes("".join(rows).encode())


def source_names(paths: Iterable[Path]) -> dict[Path, str]:
    """A short unique name for each file: its own name, with parent folders only where two files share it.

    Raises BadUsage when there is no file or one is named twice.
    """
    listed = list(paths)
    if not listed:
        raise BadUsage("no text given", hint="name files with --dataset, e.g. --dataset corpus:profile")
    if len(set(listed)) < len(listed):
        twice = next(path for path in listed if listed.count(path) > 1)
        raise BadUsage(
            f"{twice} is named twice", hint="name each file once: its documents would count double"
        )
    names: dict[Path, str] = {}
    for path in listed:
        depth = 1
        others = [other.parts for other in listed if other != path]
        while depth < len(path.parts) and any(parts[-depth:] == path.parts[-depth:] for parts in others):
            depth += 1
        names[path] = "/".join(path.parts[-depth:])
    return names


def _whole_file(path: Path, name: str) -> Document:
    data = _read(path)
    if not data.strip():
        raise _empty(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = data.count(b"\n", 0, fault.start) + 1
        raise _not_utf8(path, line, fault.start, data[fault.start]) from None
    return Document(name, text, name)


def _documents(
    path: Path, name: str, group: str, rows: Rows, how: Reading, on_skip: Callable[[Skipped], None]
) -> Iterator[Document]:
    usable = count = 0
    keys: set[str] = set()
    for number, row in rows:
        count += 1
        found = _row(row, how, keys) if isinstance(row, dict) else str(row)
        if isinstance(found, str):
            if how.strict:
                raise BadInput(
                    f"{path} line {number} cannot be used: {found}",
                    hint="mend the line, or leave out --strict",
                )
            on_skip(Skipped(name, number, found))
            continue
        usable += 1
        yield Document(found.id or f"{name}:{number}", found.text, name, found.group or group)
    if not count:
        raise _empty(path)
    if not usable:
        have = (
            f"the fields found are: {', '.join(sorted(keys)[:NAMED_LINES])}"
            if keys
            else "no line is a JSON object"
        )
        raise BadInput(
            f"{path} has no usable document: no line of {count:,} has text under '{how.text_field}'; {have}",
            hint="name the field that holds the text with --text-field",
        )


def _lines(path: Path) -> Rows:
    offset = 0
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as fault:
            raise _not_utf8(path, number, offset + fault.start, line[fault.start]) from None
        offset += len(line) + 1
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            yield number, "not JSON"
            continue
        yield number, row if isinstance(row, dict) else "not a JSON object"


def _table(path: Path, suffix: str) -> Rows:
    if suffix == ".parquet":
        return table_rows(path, suffix, "")
    data = _read(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = data.count(b"\n", 0, fault.start) + 1
        raise _not_utf8(path, line, fault.start, data[fault.start]) from None
    if not text.strip():
        raise _empty(path)
    return table_rows(path, suffix, text)


class _Row(NamedTuple):
    id: str | None
    text: str
    group: str | None


def _row(row: dict[str, Any], how: Reading, keys: set[str]) -> _Row | str:
    """The row's text, or what is wrong with it. Adds the field names it saw to `keys`."""
    keys.update(row)
    field = how.text_field
    if field in row:
        text = row[field]
        if not isinstance(text, str):
            return f"'{field}' is no text"
    else:
        messages = chat_of(row)
        if messages is None:
            return f"no '{field}'"
        if isinstance(messages, str):
            return messages
        text = how.chat(messages)
    if not text.strip():
        return f"'{field}' is empty"
    if not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text):
        return f"'{field}' has half a surrogate pair"
    own = row.get("id")
    group = None
    if how.group_by is not None:
        if row.get(how.group_by) in (None, ""):
            return f"no '{how.group_by}' to group by"
        group = str(row[how.group_by])
    return _Row(own if isinstance(own, str) and own else None, text, group)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        raise BadInput(
            f"{path} cannot be read: {fault.strerror}", hint="check the path and its permissions"
        ) from None


def _empty(path: Path) -> BadInput:
    return BadInput(f"{path} is empty", hint="give a file with text, or leave it out")


def _not_utf8(path: Path, line: int, offset: int, byte: int) -> BadInput:
    return BadInput(
        f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}, line {line:,}",
        hint=f"convert it first, e.g. iconv -f LATIN1 -t UTF-8 {path}",
    )
