"""Parquet files: a document a row, texts and chats; damage and a missing reader in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ktplan.errors import BadInput, MachineLacks
from ktplan.profile import read_corpus

pytest.importorskip("pyarrow")


def write(path: Path, columns: dict[str, list[object]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_row_is_a_document_and_rows_without_text_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["one", None, "three", ""], "id": ["x", "y", None, "z"]})
    corpus = read_corpus([path])
    assert [(row.id, row.text) for row in corpus.documents] == [("x", "one"), ("a.parquet:3", "three")]
    assert [(row.line, row.why) for row in corpus.skipped] == [(2, "no 'text'"), (4, "'text' is empty")]


def test_chats_and_groups(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = write(tmp_path / "a.parquet", {"messages": [chat, chat], "kind": ["code", "talk"]})
    corpus = read_corpus([path], group_by="kind")
    assert [row.text for row in corpus.documents] == ["hi\n\nhello"] * 2
    assert [row.dataset for row in corpus.documents] == ["code", "talk"]


def test_many_rows_come_in_order(tmp_path: Path) -> None:
    texts = [f"text {n}" for n in range(2500)]
    corpus = read_corpus([write(tmp_path / "a.parquet", {"text": list(texts)})])
    assert [row.text for row in corpus.documents] == texts


def test_damage_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["one"] * 50})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match="a.parquet is no parquet file, or damaged"):
        read_corpus([path])
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(BadInput, match="b.parquet is no parquet file"):
        read_corpus([tmp_path / "b.parquet"])


def test_without_a_reader_the_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["one"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MachineLacks, match="'pyarrow' is needed") as fault:
        read_corpus([path])
    assert fault.value.hint == "pip install 'ktplan[parquet]'"
