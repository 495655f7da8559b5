"""Checkpoints written byte by byte: a Qwen3-MoE of one layer whose experts are stored as a test likes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 3

Tensors = Mapping[str, tuple[str, np.ndarray]]  # name to safetensors dtype and the values that hold its bits


def write_file(path: Path, tensors: Tensors) -> None:
    header, place = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [place, place + array.nbytes],
        }
        place += array.nbytes
    text = json.dumps(header).encode()
    body = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_checkpoint(
    folder: Path,
    encode: Callable[[int, str, int, int], Mapping[str, tuple[str, np.ndarray]]],
    quantization: Mapping[str, Any] | None = None,
    shard_of: Callable[[str], int] | None = None,
    **config: Any,
) -> Path:
    """`encode(expert, role, rows, columns)` gives suffix to dtype and values of one matrix."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, intermediate = (
        config.get("hidden_size", HIDDEN),
        config.get("moe_intermediate_size", INTERMEDIATE),
    )
    said = {
        "model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "hidden_size": hidden, "moe_intermediate_size": intermediate, "vocab_size": 8, "num_attention_heads": 2,
        "max_position_embeddings": 64, **config,
    }  # fmt: skip
    if quantization is not None:
        said["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(said))
    tensors: dict[str, tuple[str, np.ndarray]] = {"lm_head.weight": ("F32", np.ones((8, hidden), np.float32))}
    for expert in range(EXPERTS):
        for role in ("gate", "up", "down"):
            rows, columns = (hidden, intermediate) if role == "down" else (intermediate, hidden)
            stem = f"model.layers.0.mlp.experts.{expert}.{role}_proj"
            for suffix, stored in encode(expert, role, rows, columns).items():
                tensors[stem + suffix] = stored
    if shard_of is None:
        write_file(folder / "model.safetensors", tensors)
        return folder
    places = {name: f"part-{shard_of(name)}.safetensors" for name in tensors}
    for file in set(places.values()):
        write_file(folder / file, {name: tensors[name] for name in tensors if places[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    return lambda encode, *args, **kwargs: write_checkpoint(tmp_path / "model", encode, *args, **kwargs)


@pytest.fixture
def write_safetensors() -> Callable[[Path, Tensors], None]:
    return write_file
