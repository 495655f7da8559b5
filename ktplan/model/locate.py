"""From what a user types to a folder or file on this machine. Nothing is ever downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ktplan.errors import BadInput
from ktplan.model.embedded import TINY

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def locate(argument: str) -> Path:
    """`tiny`, a folder, a file, or a Hugging Face id (`org/name`, `org/name@revision`) that is in the local cache.

    Raises BadInput naming what was looked for and where. A folder called `tiny` here can be named as `./tiny`.
    """
    if argument == "tiny":
        return TINY
    try:
        path = Path(argument).expanduser()
    except RuntimeError:  # ~name of a user whom this machine does not know
        path = Path(argument)
    try:
        if argument and path.exists():
            return path
    except OSError as fault:
        raise BadInput(
            f"the model {argument} cannot be looked at: {fault.strerror}",
            hint="check the path and its permissions",
        ) from None
    if _HUB_ID.fullmatch(argument) and not argument.startswith("."):
        return _in_hub_cache(argument)
    raise BadInput(
        f"no model at {argument or 'an empty name'}",
        hint="give a folder with config.json, an id in the Hugging Face cache, or 'tiny'",
    )


def hub_cache() -> Path:
    """Where Hugging Face libraries keep downloads: HF_HUB_CACHE, HF_HOME/hub, or ~/.cache/huggingface/hub."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path("~/.cache/huggingface").expanduser()) / "hub"


def _in_hub_cache(argument: str) -> Path:
    name, _, revision = argument.partition("@")
    folder = hub_cache() / ("models--" + name.replace("/", "--"))
    get_it = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    if not folder.is_dir():
        raise BadInput(f"{name} is neither a path nor in the Hugging Face cache {hub_cache()}", hint=get_it)
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit if commit else None
    if snapshot is None or not snapshot.is_dir():
        raise BadInput(f"{folder} has no snapshot for {revision or 'main'}", hint=get_it)
    return snapshot
