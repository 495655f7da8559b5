"""Texts in: what is a document, what is skipped and told, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktplan.errors import BadInput, BadUsage
from ktplan.profile import Document, documents, read_corpus
from ktplan.profile.corpus import digest, source_names

MIXED = (
    '{"text": "one"}\n\n{"text": "broken\n{"text": "two"}\n{"prompt": "no text key"}\n{"text": ""}\n'
    '{"text": "three"}\n'
)


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_a_text_file_is_one_document_and_a_jsonl_line_is_one(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "first\nsecond\n")
    lines = write(tmp_path / "b.jsonl", '{"id": "mine", "text": "x"}\n{"text": "y", "id": 7}')
    assert list(documents([text, lines])) == [
        Document("a.txt", "first\nsecond\n", "a.txt"),
        Document("mine", "x", "b.jsonl"),
        Document("b.jsonl:2", "y", "b.jsonl"),
    ]


def test_unusable_lines_are_counted_and_named(tmp_path: Path) -> None:
    corpus = read_corpus([write(tmp_path / "mixed.jsonl", MIXED)])
    assert [document.text for document in corpus.documents] == ["one", "two", "three"]
    assert [(row.line, row.why) for row in corpus.skipped] == [
        (3, "not JSON"),
        (5, "no 'text'"),
        (6, "'text' is empty"),
    ]
    warning = corpus.warning()
    assert warning is not None and "skipped 3 unusable lines" in warning and "mixed.jsonl line 3" in warning


def test_a_long_list_of_skipped_lines_is_cut_with_a_count(tmp_path: Path) -> None:
    corpus = read_corpus([write(tmp_path / "a.jsonl", '{"text": "x"}\n' + "nonsense\n" * 20)])
    assert str(corpus.warning()).endswith("and 12 more")


def test_strict_refuses_the_first_unusable_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="line 3 cannot be used: not JSON"):
        read_corpus([write(tmp_path / "mixed.jsonl", MIXED)], strict=True)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("[1, 2]", "not a JSON object"),
        ('{"text": 3}', "'text' is no text"),
        ('{"text": null}', "'text' is no text"),
        ('{"text": " \\n "}', "'text' is empty"),
        ('{"text": "\\ud83d"}', "'text' has half a surrogate pair"),
        ("[" * 100_000, "not JSON"),
        ('{"text": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_every_kind_of_bad_row_has_a_reason(tmp_path: Path, row: str, why: str) -> None:
    corpus = read_corpus([write(tmp_path / "a.jsonl", f'{{"text": "good"}}\n{row}\n')])
    assert [skipped.why for skipped in corpus.skipped] == [why]


@pytest.mark.parametrize("data", ["", "\n\n  \n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_an_empty_file_is_an_error(tmp_path: Path, name: str, data: str) -> None:
    with pytest.raises(BadInput, match="is empty"):
        read_corpus([write(tmp_path / name, data)])


def test_a_file_without_the_field_says_which_fields_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "nokey.jsonl", '{"instruction": "a", "output": "b"}\n' * 3)
    with pytest.raises(BadInput, match="no line of 3 .* instruction, output") as fault:
        read_corpus([path])
    assert "--text-field" in str(fault.value.hint)
    assert [document.text for document in read_corpus([path], "output").documents] == ["b", "b", "b"]


def test_bytes_that_are_not_utf8_are_named_by_line_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "ok"}\n{"text": "\xff\xfe"}\n')
    with pytest.raises(BadInput, match=r"not UTF-8: byte 0xff at offset 25, line 2"):
        read_corpus([path])
    with pytest.raises(BadInput, match=r"not UTF-8: byte 0xe9 at offset 5, line 2"):
        read_corpus([write(tmp_path / "b.txt", b"one\nt\xe9\xe8\n")])


def test_byte_order_mark_and_windows_lines_are_no_trouble(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "x"}\r\n\r\n{"text": "y"}\r\n')
    assert [document.text for document in documents([path])] == ["x", "y"]


def test_other_kinds_of_file_no_file_and_the_same_file_twice_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.xml", "x")
    with pytest.raises(BadUsage, match="neither text"):
        list(documents([path]))
    with pytest.raises(BadUsage, match="no text given"):
        list(documents([]))
    text = write(tmp_path / "a.txt", "x")
    with pytest.raises(BadUsage, match="named twice"):
        list(documents([text, text]))
    with pytest.raises(BadInput, match="No such file"):
        list(documents([tmp_path / "absent.txt"]))


def test_files_of_one_name_are_told_apart_by_their_folder(tmp_path: Path) -> None:
    paths = [tmp_path / "en" / "a.txt", tmp_path / "de" / "a.txt", tmp_path / "b.txt"]
    assert list(source_names(paths).values()) == ["en/a.txt", "de/a.txt", "b.txt"]


def test_the_digest_of_a_corpus_follows_its_bytes_and_order(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.txt", "x"), write(tmp_path / "b.txt", "y")
    before = digest([first, second])
    assert before == digest([first, second]) != digest([second, first])
    write(second, "z")
    assert digest([first, second]) != before


@given(
    st.lists(
        st.text(alphabet=st.characters(codec="utf-8"), min_size=1).filter(str.strip), min_size=1, max_size=6
    )
)
def test_any_text_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    write(path, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    assert [document.text for document in documents([path])] == texts


def test_a_data_set_in_the_hugging_face_cache_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktplan.cli.profile_files import named_files

    cache = tmp_path / "hub" / "datasets--org--name"
    for snapshot in ("old", "new"):
        data = cache / "snapshots" / snapshot / "data"
        data.mkdir(parents=True)
        blob = write(tmp_path / f"blob-{snapshot}", '{"text": "' + snapshot + '"}\n')
        (data / "train.jsonl").symlink_to(blob)
        write(data.parent / "README.md", "about the data")
    os.utime(cache / "snapshots" / "old", (1, 1))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    found = named_files(("web=hf:org/name",))
    assert [(path.name, name) for path, name in found.items()] == [("train.jsonl", "web")]
    assert [row.text for row in read_corpus(list(found)).documents] == ["new"]
    with pytest.raises(BadUsage, match="not in the Hugging Face cache"):
        named_files(("hf:org/other",))
