"""The texts that a profile was recorded on, found again: a profile names its files and their digests, no folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ktplan.artifact import sha256_file
from ktplan.errors import BadInput
from ktplan.model.embedded import PARTS, corpus_files
from ktplan.profile.profile import ActivationProfile


def texts_of(profile: ActivationProfile, folders: Sequence[Path]) -> list[Path]:
    """The files of `profile.files`, looked for in `folders` by name and among the embedded texts; digests must agree.

    Raises BadInput for a profile that names no texts (imported counts), and naming the first text that is nowhere, or
    that is there with other content.
    """
    if not profile.files:
        raise BadInput(
            "the profile says how often experts are used but not on which texts",
            hint="give --calibration the texts themselves (.txt, .jsonl, corpus:profile)",
        )
    embedded = {path.name: path for part in PARTS for path in corpus_files(part)}
    found: list[Path] = []
    for name, digest in profile.files:
        places = [folder / name for folder in folders]
        places += [embedded[name]] if name in embedded else []
        there = [place for place in places if place.is_file()]
        same = next((place for place in there if sha256_file(place) == digest), None)
        if same is None:
            what = f"{there[0]} is another text by now" if there else f"it is in none of {_listed(folders)}"
            raise BadInput(
                f"the profile was recorded on {name}: {what}",
                hint="run the command where the texts are, or give --calibration the texts themselves",
            )
        found.append(same)
    return found


def _listed(folders: Sequence[Path]) -> str:
    return ", ".join(dict.fromkeys(str(folder) for folder in folders))
