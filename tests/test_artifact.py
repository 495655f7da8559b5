"""Files appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ktplan.artifact import (
    check_output_file,
    new_directory,
    os_trouble,
    read_json,
    replacing,
    write_json,
    write_whole,
)
from ktplan.errors import BadInput, BadUsage, KtplanError


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_json_file_says_what_it_is_and_is_the_same_twice(tmp_path: Path) -> None:
    for name in "ab":
        write_json(tmp_path / name, "thing", 1, {"z": 1, "a": [1.5, "é"]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    body = read_json(tmp_path / "a", "thing", 1)
    assert body["z"] == 1 and body["kind"] == "thing" and body["made_by"].startswith("ktplan ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"kind": "other", "version": 1}', "is not a thing"),
        ('{"kind": "thing", "version": 2}', "version 2 of thing, this program reads version 1"),
        ('{"kind": "thing", ', "is not JSON"),
        ("[1]", "holds a list"),
        ("\udcff", "is not JSON text"),
    ],
)
def test_foreign_newer_and_damaged_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "f").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInput, match=says):
        read_json(tmp_path / "f", "thing", 1)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "f", b"old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "f") as part:
        part.write_bytes(b"half")
        raise RuntimeError
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


def test_writing_into_a_folder_that_is_not_there_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(KtplanError, match=r"missing.*cannot be written: No such file"):
        write_whole(tmp_path / "missing" / "f", b"x")


def test_a_failed_job_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "a" / "b") as folder:
        (folder / "half").write_text("x")
        (folder / "deep").mkdir()
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_an_empty_folder_of_the_users_is_kept_when_a_job_fails(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(RuntimeError), new_directory(tmp_path / "mine") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert names(tmp_path / "mine") == []


def test_what_is_already_there_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text(json.dumps({}))
    with pytest.raises(BadUsage, match="not empty"), new_directory(tmp_path):
        pass
    with pytest.raises(BadUsage, match="is a file"), new_directory(tmp_path / "precious"):
        pass
    assert names(tmp_path) == ["precious"]


def test_two_jobs_never_share_a_folder(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out") as folder:
        with pytest.raises(BadUsage, match="another ktplan is writing"), new_directory(folder):
            pass
        (folder / "whole").write_text("x")
    assert names(tmp_path / "out") == ["whole"]


@pytest.mark.parametrize("name", ["", ".", "..", "/", "folder", "pipe"])
def test_what_is_no_file_is_never_replaced_by_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadUsage, match="a file is to be written|no file"):
        write_whole(Path(name), b"x")
    assert names(tmp_path) == ["folder", "pipe"] and (tmp_path / "pipe").is_fifo()


def test_the_longest_name_that_a_folder_allows_can_be_written(tmp_path: Path) -> None:
    write_whole(tmp_path / ("n" * 255), b"x")
    with pytest.raises(KtplanError, match="cannot be written: File name too long"):
        write_whole(tmp_path / ("n" * 256), b"x")
    assert names(tmp_path) == ["n" * 255]


def test_a_file_that_a_command_reads_is_no_output_of_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "plan.json").write_text("{}")
    sources = (tmp_path / "model", tmp_path / "plan.json")
    for output in ("plan.json", "model/config.json", "model/../plan.json"):
        with pytest.raises(BadUsage, match="is read by this command"):
            check_output_file(tmp_path / output, sources=sources)
    for output in ("rules.yaml", "model/new.json"):
        check_output_file(tmp_path / output, sources=sources)
    with pytest.raises(BadUsage, match="is not a folder that exists"):
        check_output_file(tmp_path / "nowhere" / "x.json")


def test_json_with_a_number_without_end_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "f").write_text('{"kind": "thing", "version": ' + "9" * 5000 + "}")
    with pytest.raises(BadInput, match="is not JSON text"):
        read_json(tmp_path / "f", "thing", 1)


@pytest.mark.parametrize(
    ("number", "code", "hint"), [(13, 1, "permissions"), (28, 3, "free space"), (24, 1, "ulimit")]
)
def test_an_unforeseen_error_of_the_system_names_its_path_and_a_remedy(
    number: int, code: int, hint: str
) -> None:
    trouble = os_trouble(OSError(number, os.strerror(number), "/a/b"))
    assert trouble.exit_code == code
    assert trouble.message == f"/a/b: {os.strerror(number)}" and hint in str(trouble.hint)
