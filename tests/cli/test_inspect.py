"""inspect says what a thing is, from headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_a_model_with_its_sizes_in_every_format(cli: Callable[..., Any]) -> None:
    body = cli("inspect", "tiny", "--json").ok().json()
    assert body["kind"] == "model" and body["expert_count"] == 64 and body["params_per_expert"] == 98_304
    sizes = body["bytes_per_expert"]
    assert sizes["bf16"] == 2 * 98_304
    assert sizes["int8-row"] == 98_304 + 4 * (128 + 128 + 256)  # a byte a weight, a float32 scale a row
    assert sizes["int4-row"] == 98_304 // 2 + 4 * (128 + 128 + 256)
    assert sizes["int4-g32"] == 98_304 * 9 // 16
    assert body["experts_bytes"]["int8-row"] == 64 * sizes["int8-row"]


def test_the_table_is_for_people(cli: Callable[..., Any]) -> None:
    text = cli("inspect", "tiny").ok().stdout
    assert "4 layers, all MoE" in text and "16 experts, 2 active" in text
    assert "6.29 M" in text and "12.0 MiB" in text
    assert "KV cache 2.00 KiB a token" in text


def test_a_file_of_the_model_is_the_model(cli: Callable[..., Any], tiny: Path) -> None:
    assert cli("inspect", tiny / "model.safetensors", "--json").ok().json()["kind"] == "model"


def test_a_bare_safetensors_file_is_listed(cli: Callable[..., Any], tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "x.safetensors")
    body = cli("inspect", tmp_path / "x.safetensors", "--json").ok().json()
    assert body["tensors"] == {"a": {"dtype": "F32", "shape": [2, 3], "bytes": 24}}


def test_only_headers_are_read(cli: Callable[..., Any], tmp_path: Path) -> None:
    """Sixty sparse shards of 10 GB: no machine here holds 600 GB, and nothing but the headers is there to read."""
    layers, experts, hidden, inner = 60, 4, 16384, 24576
    places = {}
    for layer in range(layers):
        file = f"model-{layer:05d}.safetensors"
        shapes = {
            f"model.layers.{layer}.mlp.experts.{e}.{p}_proj.weight": [hidden, inner]
            if p == "down"
            else [inner, hidden]
            for e in range(experts)
            for p in ("gate", "up", "down")
        }
        header, start = {}, 0
        for name, shape in shapes.items():
            size = 2 * shape[0] * shape[1]
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, start + size]}
            start += size
        text = json.dumps(header).encode()
        with (tmp_path / file).open("wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            handle.truncate(8 + len(text) + start)
        places |= dict.fromkeys(shapes, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 2,
        "hidden_size": hidden, "moe_intermediate_size": inner, "num_attention_heads": 128, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 1000, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    body = cli("inspect", tmp_path, "--json").ok().json()
    assert body["expert_bytes"] == layers * experts * 3 * hidden * inner * 2 > 579 * 10**9
    assert sum(file.stat().st_blocks for file in tmp_path.iterdir()) * 512 < 2_000_000


@pytest.mark.parametrize(("name", "text"), [("x.txt", "hello"), ("x.json", '{"kind": "poem"}')])
def test_what_is_not_ours_is_refused(cli: Callable[..., Any], tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    cli("inspect", tmp_path / name).refused(4, name, "hint:")


def test_a_store_that_is_no_model_and_one_that_is_unfinished_are_called_so(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    cli("convert-cpu", "tiny", "-o", store, "-q").ok()
    cli("run", store, "--prompt", "x").refused(4, "is an expert store, not a model", "--store")
    (store / "store.json").rename(store / "job.json")
    cli("inspect", store).refused(4, "is an unfinished conversion")
