"""`ktplan repartition`: parts are cut and joined without loss where that is possible, and refused where it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ktplan.convert.cpu import convert_cpu
from ktplan.convert.repartition import repartition
from ktplan.errors import BadUsage
from ktplan.model import open_source, read_spec
from ktplan.quant import Scheme
from ktplan.store import ExpertStore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_model(tmp_path_factory.mktemp("model") / "wide")


def wide_model(folder: Path, width: int = 384) -> Path:
    """Experts wide enough for six parts in INT8 and three in INT4."""
    import json

    folder.mkdir()
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 3, "num_experts_per_tok": 2,
        "hidden_size": 128, "moe_intermediate_size": width, "num_attention_heads": 4, "vocab_size": 8,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    values = np.random.default_rng(5)
    shapes = {"gate": (width, 128), "up": (width, 128), "down": (128, width)}
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": values.standard_normal(
            shape, np.float32
        )
        for layer in range(2)
        for expert in range(3)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def same_weights(first: Path, second: Path) -> bool:
    stores = [ExpertStore.open(path) for path in (first, second)]
    manifest = stores[0].manifest
    return all(
        np.array_equal(a, b)
        for layer in manifest.layers
        for expert in range(manifest.experts)
        for a, b in zip(*(store.expert(layer, expert) for store in stores), strict=True)
    )


def shards(folder: Path) -> list[bytes]:
    return [file.read_bytes()[-1000:] for file in sorted(folder.glob("*.safetensors"))]


@pytest.mark.parametrize(("bits", "parts"), [(8, (1, 2, 6)), (8, (1, 3)), (4, (1, 3))])
def test_cutting_loses_nothing_and_joining_gives_the_first_store_back(
    bits: int, parts: tuple[int, ...], model: Path, tmp_path: Path
) -> None:
    first = tmp_path / "0"
    convert_cpu(open_source(model), first, Scheme(bits), parts[0])
    path = first
    for number, count in enumerate([*parts[1:], *reversed(parts[:-1])], start=1):
        done = repartition(ExpertStore.open(path), tmp_path / str(number), count)
        assert done.lossless and done.error == 0
        path = tmp_path / str(number)
        store = ExpertStore.open(path)
        store.verify()
        store.check_model(read_spec(model))
        assert store.manifest.parts == count
        assert same_weights(first, path)
    assert shards(path) == shards(first)


def test_parts_that_neither_divide_go_through_their_common_scales(model: Path, tmp_path: Path) -> None:
    convert_cpu(open_source(model), tmp_path / "1", Scheme(8))
    repartition(ExpertStore.open(tmp_path / "1"), tmp_path / "2", 2)
    assert repartition(ExpertStore.open(tmp_path / "2"), tmp_path / "3", 3).lossless
    assert same_weights(tmp_path / "1", tmp_path / "3")


def test_gate_and_up_are_then_the_bytes_of_a_fresh_conversion(model: Path, tmp_path: Path) -> None:
    convert_cpu(open_source(model), tmp_path / "1", Scheme(4, rounding="kt"))
    convert_cpu(open_source(model), tmp_path / "3", Scheme(4, rounding="kt"), 3)
    repartition(ExpertStore.open(tmp_path / "1"), tmp_path / "cut", 3)
    fresh, cut = ExpertStore.open(tmp_path / "3"), ExpertStore.open(tmp_path / "cut")
    for part in range(3):
        for one, other in zip(fresh.packed(1, 2, part)[:4], cut.packed(1, 2, part)[:4], strict=True):
            assert one.tobytes() == other.tobytes()


def test_joining_parts_with_scales_of_their_own_needs_consent(
    cli: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    convert_cpu(open_source(model), tmp_path / "2", Scheme(4, rounding="kt"), 3)
    with pytest.raises(BadUsage, match="down scales differ"):
        repartition(ExpertStore.open(tmp_path / "2"), tmp_path / "1", 1)
    assert not (tmp_path / "1").exists()
    cli("repartition", tmp_path / "2", "-o", tmp_path / "1", "--numa-parts", "1").refused(2, "--requantize")
    done = cli("repartition", tmp_path / "2", "-o", tmp_path / "1", "--numa-parts", "1", "--requantize").ok()
    assert "down weights were rounded again: they changed by 0." in done.stderr
    first, second = (ExpertStore.open(tmp_path / name) for name in "21")
    assert np.array_equal(first.expert(0, 1).gate, second.expert(0, 1).gate)
    before, after = first.expert(0, 1).down, second.expert(0, 1).down
    assert 0 < np.linalg.norm(after - before) < 0.2 * np.linalg.norm(before)
    assert second.manifest.mean_error is None and "down rounded again" in (second.manifest.rounding or "")


def test_illegal_parts_and_used_folders_are_refused(model: Path, tmp_path: Path) -> None:
    convert_cpu(open_source(model), tmp_path / "1", Scheme(4))
    store = ExpertStore.open(tmp_path / "1")
    with pytest.raises(BadUsage, match="2 NUMA parts make 192 each"):
        repartition(store, tmp_path / "x", 2)
    with pytest.raises(BadUsage, match="not empty"):
        repartition(store, tmp_path / "1", 3)
    assert not (tmp_path / "x").exists()


def test_kt_kernels_own_folders_can_be_repartitioned(model: Path, tmp_path: Path) -> None:
    convert_cpu(open_source(model), tmp_path / "1", Scheme(8, rounding="kt"))
    (tmp_path / "foreign").mkdir()
    for file in (tmp_path / "1").glob("*.safetensors"):
        save_file(load_file(file), tmp_path / "foreign" / file.name)
    repartition(ExpertStore.open(tmp_path / "foreign"), tmp_path / "2", 2)
    store = ExpertStore.open(tmp_path / "2")
    assert not store.foreign and store.manifest.fingerprint is None and store.manifest.parts == 2
    assert same_weights(tmp_path / "1", tmp_path / "2")
