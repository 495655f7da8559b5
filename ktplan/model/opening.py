"""From a path to a WeightSource: the container is told from the files."""

from __future__ import annotations

from pathlib import Path

from ktplan.model.gguf import gguf_files, open_gguf
from ktplan.model.safetensors import open_safetensors
from ktplan.model.source import WeightSource
from ktplan.model.spec import ModelSpec


def open_source(path: Path) -> WeightSource:
    """Open a checkpoint: a folder with config.json and safetensors, a .safetensors file, GGUF files or their folder.

    Everything is checked before this returns: files present and whole, every expert there with its right shape,
    config and names in agreement. Raises BadInput naming the file, tensor and value otherwise.
    """
    if files := gguf_files(path):
        return open_gguf(path, files)
    return open_safetensors(path)


def read_spec(path: Path) -> ModelSpec:
    """Describe the model at `path` from its headers alone. Raises BadInput as `open_source` does."""
    return open_source(path).spec
