"""A model is named by a path, an id in the local cache, or `tiny`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktplan.errors import BadInput, BadUsage
from ktplan.model import locate, read_spec
from ktplan.model.embedded import corpus_files


def test_tiny_is_the_embedded_model(tiny: Path) -> None:
    assert locate("tiny") == tiny


def test_a_hub_id_is_found_in_the_cache_with_its_links(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--org--small"
    snapshot = folder / "snapshots" / "abc123"
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc123")
    snapshot.mkdir(parents=True)
    for file in tiny.iterdir():
        (folder / "blobs" / f"blob-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob-{file.name}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert locate("org/small") == locate("org/small@abc123") == snapshot
    assert read_spec(snapshot).name == "org/small"


def test_an_id_that_is_not_there_tells_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match="org/absent") as refusal:
        locate("org/absent")
    assert refusal.value.hint == "hf download org/absent"


def test_a_path_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInput, match="no model at ./nowhere"):
        locate("./nowhere")


def test_the_embedded_text_has_two_disjoint_parts() -> None:
    import json

    ids = [
        {
            json.loads(line)["text"]
            for file in corpus_files(part)
            for line in file.read_text("utf-8").splitlines()
        }
        for part in ("profile", "test")
    ]
    assert len(ids[0]) > 50 and len(ids[1]) > 50 and not ids[0] & ids[1]
    with pytest.raises(BadUsage, match="corpus:train"):
        corpus_files("train")


@pytest.mark.parametrize("argument", ["~nosuchuser/model", "", "x" * 5000])
def test_what_cannot_be_a_path_is_refused_in_words(argument: str) -> None:
    with pytest.raises(BadInput, match="no model at|cannot be looked at: File name too long"):
        locate(argument)
