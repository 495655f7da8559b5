"""`ktplan profile` as a user runs it, on the embedded model and text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktplan.model import read_spec
from ktplan.profile import ActivationProfile

Cli = Callable[..., Any]
MIXED = '{"text": "one"}\n\n{"text": "broken\n{"text": "two words"}\n{"prompt": "x"}\n{"text": ""}\n{"text": "three"}\n'


def test_the_embedded_text_gives_a_profile_a_picture_and_a_table(
    cli: Cli, tiny: Path, tmp_path: Path
) -> None:
    output = tmp_path / "p.safetensors"
    result = cli("profile", "tiny", "--dataset", "corpus:profile", "--max-tokens", "1500", "-o", output).ok()
    profile = ActivationProfile.load(output).for_model(read_spec(tiny))
    assert profile.token_count == 1500 and profile.settings["chunk"] == 256
    assert {file.name for file in profile.files} == {
        f"{d}.profile.jsonl" for d in ("english", "code", "chinese", "maths")
    }
    # The four files share the tokens, so each has documents in the profile.
    assert set(profile.sources) == {file.name for file in profile.files}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "1,500 tokens" in result.stdout and "unseen mass" in result.stdout
    assert "next: ktplan place" in result.stderr


def test_text_files_bad_lines_and_json(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mixed.jsonl").write_text(MIXED)
    (tmp_path / "a.txt").write_text("one line\nanother line\n")
    output = tmp_path / "p.safetensors"
    texts = (tmp_path / "mixed.jsonl", tmp_path / "a.txt")
    result = cli(
        "profile", "tiny", "--dataset", *texts, "-o", output, "--json", "--plot", tmp_path / "heat.png"
    ).ok()
    body = result.json()
    assert (body["kind"], body["documents"], body["plot"]) == (
        "profile-report",
        4,
        str(tmp_path / "heat.png"),
    )
    assert [row["line"] for row in body["skipped"]] == [3, 5, 6]
    assert (
        "mixed.jsonl line 3 (not JSON)" in result.stderr
        and "a.txt: each text file is one document" in result.stderr
    )
    assert len(body["layers"]) == 4 and all(layer["slots"] == 2 * body["tokens"] for layer in body["layers"])
    assert ActivationProfile.load(output).document_ids[-1] == "a.txt"
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["a.txt", "heat.png", "mixed.jsonl", "p.safetensors"]
    cli("profile", "tiny", "--dataset", *texts, "-o", tmp_path / "q.safetensors", "--strict").refused(
        4, "line 3 cannot be used"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_an_expert_store_routes_like_the_checkpoint(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The state of the Union is strong, and so is the sea in Moby Dick.\n" * 4)
    cli("convert-cpu", "tiny", "--bits", "8", "-o", tmp_path / "store").ok()
    asked = ("profile", "tiny", "--dataset", tmp_path / "a.txt", "--no-plot", "-o")
    cli(*asked, tmp_path / "whole.safetensors").ok()
    cli(*asked, tmp_path / "stored.safetensors", "--store", tmp_path / "store").ok()
    whole, stored = (ActivationProfile.load(tmp_path / f"{name}.safetensors") for name in ("whole", "stored"))
    assert (whole.settings["experts"], stored.settings["experts"]) == ("checkpoint", "store")
    moved = abs(whole.counts - stored.counts).sum() / 2 / whole.counts.sum()
    # INT8 experts change hidden states by a part in a hundred: a few close calls fall to another expert.
    assert stored.token_count == whole.token_count and moved < 0.02


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["is empty"]),
        (b'{"instruction": "a", "output": "b"}\n', ["instruction, output", "--text-field"]),
        (b'{"text": "ok"}\n{"text": "\xff"}\n', ["not UTF-8", "line 2"]),
    ],
)
def test_unusable_files_are_refused_and_nothing_is_left(
    cli: Cli, tmp_path: Path, data: bytes, words: list[str]
) -> None:
    (tmp_path / "bad.jsonl").write_bytes(data)
    cli("profile", "tiny", "--dataset", tmp_path / "bad.jsonl", "-o", tmp_path / "p.safetensors").refused(
        4, *words
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]


def test_outputs_that_cannot_be_are_refused_before_any_work(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text")
    cli("profile", "tiny", "--dataset", text, "-o", tmp_path).refused(2, "is a folder")
    cli("profile", "tiny", "--dataset", text, "-o", tmp_path / "none" / "p.safetensors").refused(
        2, "not a folder that exists"
    )
    cli("profile", "tiny", "--dataset", text, "-o", text).refused(2, "would be overwritten")
    cli("profile", "tiny", "--dataset", text, "--plot", "x.png", "--no-plot").refused(2, "exclude each other")
    assert text.read_text() == "some text"
