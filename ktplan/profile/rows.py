"""Rows of tables and chats: csv, json and parquet files, and messages as text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ktplan.errors import BadInput, MachineLacks

Rows = Iterable[tuple[int, dict[str, Any] | str]]  # number in the file, and the row or what is wrong with it
Messages = list[dict[str, str]]  # role and content

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


def table_rows(path: Path, suffix: str, text: str) -> Rows:
    """The rows of a .json, .csv, .tsv (all given as `text`) or .parquet file (read from `path`)."""
    if suffix == ".json":
        return _json_rows(path, text)
    if suffix == ".parquet":
        return _parquet_rows(path)
    return _csv_rows(path, text, "\t" if suffix == ".tsv" else ",")


def chat_of(row: dict[str, Any]) -> Messages | str | None:
    """The row's chat; what is wrong with it; None where it has none. Content in parts gives its texts."""
    for key, role_key, content_key in (
        ("messages", "role", "content"),
        ("conversations", "from", "value"),
        ("conversation", "role", "content"),
    ):
        if key not in row:
            continue
        found: Messages = []
        turns = row[key]
        if not isinstance(turns, list) or not turns:
            return f"'{key}' is no list of messages"
        for turn in turns:
            role, content = (
                (turn.get(role_key), turn.get(content_key)) if isinstance(turn, dict) else (None, None)
            )
            if isinstance(content, list):
                content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
            if not isinstance(role, str) or not isinstance(content, str):
                return f"'{key}' has a message without {role_key} or {content_key}"
            found.append({"role": _SHAREGPT_ROLES.get(role, role), "content": content})
        return found
    return None


def plain_chat(messages: Messages) -> str:
    """Messages one after another, for a model without a chat template."""
    return "\n\n".join(message["content"] for message in messages)


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as fault:
        line = f", line {fault.lineno}" if isinstance(fault, json.JSONDecodeError) else ""
        raise BadInput(f"{path} is not JSON{line}", hint="one object a line is .jsonl; name it so") from None
    if isinstance(whole, dict):
        lists = [value for value in whole.values() if isinstance(value, list)]
        whole = lists[0] if len(lists) == 1 and chat_of(whole) is None else [whole]
    if not isinstance(whole, list):
        raise BadInput(f"{path} holds no list of documents", hint='write [{"text": "..."}, ...]')
    for number, row in enumerate(whole, start=1):
        yield number, row if isinstance(row, dict) else "not a JSON object"


def _csv_rows(path: Path, text: str, mark: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    csv.field_size_limit(2**27)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=mark)
    try:
        for row in reader:
            if None in row:
                yield reader.line_num, "more fields than the heading has"
            else:
                yield reader.line_num, {key: value for key, value in row.items() if value is not None}
    except csv.Error as fault:
        raise BadInput(f"{path} line {reader.line_num}: {fault}", hint="check its quotes") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise MachineLacks(
            f"{path}: the package 'pyarrow' is needed to read parquet", hint="pip install 'ktplan[parquet]'"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {key: value for key, value in row.items() if value is not None}
    except (OSError, ValueError, ArrowException) as fault:
        what = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise BadInput(f"{path} is no parquet file, or damaged: {what}", hint="download it again") from None
