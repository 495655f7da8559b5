"""`--rounding kt` gives the bytes that kt-kernel 0.7.2 itself wrote, and a store is a folder that it can read."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from ktplan.convert.cpu import convert_cpu, quantize_expert
from ktplan.model import ExpertWeights, open_source
from ktplan.quant import Scheme
from ktplan.store import StoreShape

HERE = Path(__file__).parent
FILES = HERE / "kt-kernel-0.7.2"


def _load_recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_recipe", HERE / "recipe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["golden_recipe"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


recipe = _load_recipe()


def converted(name: str, bits: int) -> dict[str, np.ndarray]:
    """What ktplan stores for a case, by kt-kernel's names."""
    case = recipe.CASES[name]
    shape = StoreShape(
        bits=bits, parts=case.parts, experts=case.experts, hidden=case.hidden, intermediate=case.intermediate
    )
    arrays: list[Any] = []
    for expert in range(case.experts):
        weights = ExpertWeights(*recipe.expert(name, expert))
        arrays += quantize_expert(weights, Scheme(bits, rounding="kt"), case.parts)[0]
    return {tensor.name: array for tensor, array in zip(shape.layer_tensors(0), arrays, strict=True)}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["base", "edge", "numa2"])
def test_every_byte_equals_what_kt_kernel_wrote(name: str, bits: int) -> None:
    theirs = load_file(FILES / f"{name}.int{bits}.safetensors")
    ours = converted(name, bits)
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        assert array.tobytes() == theirs[key].tobytes(), key


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_longer_than_one_block_of_k_have_its_digests(bits: int) -> None:
    theirs = json.loads((FILES / "kblock.sha256.json").read_text())[f"kblock.int{bits}"]
    ours = {
        key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in converted("kblock", bits).items()
    }
    assert ours == theirs


@pytest.mark.parametrize("bits", [8, 4])
def test_it_rounds_to_bfloat16_first_as_kt_kernel_does(bits: int) -> None:
    case = recipe.CASES["base"]
    exact = [matrix + np.float32(2.0**-12) * np.abs(matrix) for matrix in recipe.expert("base", 0)]
    rounded = [recipe.bf16_values(recipe.bf16_bits(matrix)) for matrix in exact]
    scheme = Scheme(bits, rounding="kt")
    first = quantize_expert(ExpertWeights(*exact), scheme, case.parts)[0]
    second = quantize_expert(ExpertWeights(*rounded), scheme, case.parts)[0]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def test_kt_kernels_way_of_finding_experts_and_parts_works_on_a_store(store_of_two_parts: Path) -> None:
    """Its loader walks the folder for *.safetensors and counts upwards until a name is missing."""
    places = {}
    for file in sorted(store_of_two_parts.rglob("*.safetensors")):
        with safe_open(file, framework="np") as shard:
            places.update(dict.fromkeys(shard.keys(), file))
    experts = parts = 0
    while f"blk.0.ffn_up_exps.{experts}.numa.0.weight" in places:
        experts += 1
    while f"blk.0.ffn_up_exps.0.numa.{parts}.weight" in places:
        parts += 1
    assert (experts, parts) == (16, 2)
    index = json.loads((store_of_two_parts / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {key: file.name for key, file in places.items()}
    size = 0
    for file in set(places.values()):
        size += sum(array.nbytes for array in load_file(file).values())
    assert index["metadata"]["total_size"] == size


@pytest.fixture(scope="module")
def store_of_two_parts(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "int8"
    convert_cpu(open_source(tiny), folder, Scheme(8, rounding="kt"), numa_parts=2)
    return folder
