"""Reading GPTQ folders: our own and others', in both versions, and what damaged or foreign ones get told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ktplan.convert.gpu import GptqCheckpoint, GpuOptions, convert_gpu
from ktplan.errors import BadInput
from ktplan.experts import ExpertSet
from ktplan.model import open_source

Tensors = dict[str, np.ndarray[Any, Any]]
GATE = "model.layers.0.mlp.experts.0.gate_proj"


@pytest.fixture(scope="module")
def small(family_checkpoint: Callable[..., Path]) -> Path:
    return family_checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def part(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts of the small model, rounded at 4 bits."""
    out = tmp_path_factory.mktemp("part") / "gpu"
    experts = ExpertSet.from_ranges({"0": "0,5"})
    convert_gpu(open_source(small), out, GpuOptions(bits=4, method="rtn"), experts=experts)
    return out


@pytest.fixture
def foreign(part: Path, tmp_path: Path) -> Callable[..., Path]:
    """The same folder as another tool might have written it: without our record, tensors and settings changed."""

    def make(change: Callable[[Tensors], None] = lambda tensors: None, **settings: Any) -> Path:
        folder = tmp_path / "foreign"
        shutil.copytree(part, folder)
        (folder / "gpu-experts.json").unlink()
        file = next(folder.glob("*.safetensors"))
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        config = json.loads((folder / "quantize_config.json").read_text()) | settings
        (folder / "quantize_config.json").write_text(json.dumps(config))
        return folder

    return make


def second_version(tensors: Tensors) -> None:
    for name in tensors:
        if name.endswith(".qzeros"):
            tensors[name] = np.full_like(tensors[name].view(np.uint32), 0x88888888).view(np.int32)


def without(suffix: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(suffix)]:
            del tensors[name]

    return change


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("change", [lambda tensors: None, second_version, without(".g_idx")])
def test_either_version_under_either_label(
    change: Callable[[Tensors], None], label: str, part: Path, foreign: Callable[..., Path]
) -> None:
    ours = GptqCheckpoint.open(part)
    theirs = GptqCheckpoint.open(foreign(change, checkpoint_format=label))
    assert theirs.experts == ours.experts
    assert theirs.fingerprint is None
    for found, wanted in zip(theirs.expert(0, 5), ours.expert(0, 5), strict=True):
        assert np.array_equal(found, wanted)


def test_what_it_says_of_itself(part: Path, small: Path) -> None:
    checkpoint = GptqCheckpoint.open(part)
    spec = open_source(small).spec
    assert checkpoint.to_dict() == {
        "bits": 4,
        "group_size": 128,
        "experts": 2,
        "by_layer": {"0": "0,5"},
        "hidden": 128,
        "intermediate": 128,
        "bytes": 2 * 3 * (128 * 128 // 2 + 128 // 2 + 2 * 128 + 4 * 128),
        "complete": False,
        "fingerprint": spec.fingerprint,
    }


def test_the_experts_of_another_model_are_refused(
    part: Path, small: Path, foreign: Callable[..., Path]
) -> None:
    spec = open_source(small).spec
    with pytest.raises(BadInput, match=f"sha256:other.*|.*{spec.fingerprint}") as caught:
        GptqCheckpoint.open(part).check_model(replace(spec, fingerprint="sha256:other"))
    assert spec.fingerprint in caught.value.message
    theirs = GptqCheckpoint.open(foreign())
    theirs.check_model(spec)  # no fingerprint: shapes agree
    with pytest.raises(BadInput, match="expert 5 of layer 0; .* has 4 experts"):
        theirs.check_model(replace(spec, experts=4))
    with pytest.raises(BadInput, match="hidden size 128 and intermediate size 128, .* has 256 and 128"):
        theirs.check_model(replace(spec, hidden=256))


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (without("up_proj.scales"), {}, "lacks scales of its up projection"),
        (without("qweight"), {}, "lacks qweight"),
        (without("s"), {"bits": 8}, "lacks"),
        (lambda tensors: None, {"group_size": 64}, "in groups of 64 needs"),
        (lambda tensors: None, {"bits": 8}, "do not fit|needs"),
        (lambda tensors: None, {"quant_method": "awq"}, "quant_method 'awq'"),
        (lambda tensors: tensors.update({f"{GATE}.scales": tensors[f"{GATE}.g_idx"]}), {}, "int32 words"),
        (lambda tensors: tensors.clear() or tensors.update({"a": np.zeros(1)}), {}, "no routed experts"),
    ],
)
def test_damaged_folders_are_refused_when_opened(
    change: Callable[[Tensors], None], settings: dict[str, Any], words: str, foreign: Callable[..., Path]
) -> None:
    with pytest.raises(BadInput, match=words):
        GptqCheckpoint.open(foreign(change, **settings))


def test_damaged_zeros_are_named_when_read(foreign: Callable[..., Path]) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{GATE}.qzeros"][0, 0] = 0x12345678

    checkpoint = GptqCheckpoint.open(foreign(spoil))
    checkpoint.expert(0, 5)
    with pytest.raises(BadInput, match=r"layers\.0\.mlp\.experts\.0\.gate_proj: .* its zeros are 1 to 8"):
        checkpoint.expert(0, 0)


def test_folders_that_are_something_else(tmp_path: Path, tiny: Path, part: Path) -> None:
    with pytest.raises(BadInput, match="is not a folder"):
        GptqCheckpoint.open(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="neither quantize_config.json nor a quantization_config"):
        GptqCheckpoint.open(tmp_path)
    with pytest.raises(BadInput, match="neither"):
        GptqCheckpoint.open(tiny)
    shutil.copy(part / "quantize_config.json", tmp_path)
    with pytest.raises(BadInput, match="no safetensors"):
        GptqCheckpoint.open(tmp_path)


def test_a_folder_that_lost_a_file_is_incomplete(small: Path, tmp_path: Path) -> None:
    experts = ExpertSet.from_ranges({"0": "1", "2": "1"})
    convert_gpu(open_source(small), tmp_path / "a", GpuOptions(bits=8, method="rtn"), experts=experts)
    (tmp_path / "a" / "experts-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadInput, match=r"holds 1 experts, its gpu-experts\.json promises 2"):
        GptqCheckpoint.open(tmp_path / "a")
