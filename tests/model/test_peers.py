"""The same tiny quantized checkpoints through other people's readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktplan.model import open_source

torch = pytest.importorskip("torch")


def assert_equal_to(source: Any, modules: dict[str, Any], tolerance: float = 0) -> None:
    from tiny_architectures import rows_of

    for layer in source.spec.moe_layers:
        module = modules[source.spec.experts_module_name(layer)]
        for expert in range(source.spec.experts):
            ours = source.expert(layer, expert)
            for role, theirs in rows_of(module, expert).items():
                np.testing.assert_allclose(
                    getattr(ours, role), theirs.detach().float().numpy(), rtol=tolerance, atol=0
                )


@pytest.mark.filterwarnings("ignore")
def test_fp8_blocks_loaded_by_transformers(tmp_path: Path, write_safetensors: Callable[..., None]) -> None:
    """A whole Qwen3-MoE with fine-grained FP8 experts, loaded with dequantize=True on the CPU."""
    pytest.importorskip("accelerate", reason="transformers loads FP8 through accelerate")
    from tiny_architectures import experts_modules, tiny_model
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    block = [16, 16]
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", "self_attn", "gate"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        weight = tensors.pop(name).float()
        rows, columns = (size // 16 for size in weight.shape)
        scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.5
        grid = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
        tensors[name] = (weight / grid).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scale
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=block),
    )
    assert_equal_to(open_source(tmp_path), dict(experts_modules(theirs)))


@pytest.mark.filterwarnings("ignore")
def test_mxfp4_loaded_by_transformers(tmp_path: Path, write_safetensors: Callable[..., None]) -> None:
    """A whole gpt-oss with packed experts, loaded with dequantize=True on the CPU (to bfloat16: exact for FP4)."""
    from safetensors.torch import load_file, save_file
    from tiny_architectures import experts_modules, tiny_model
    from transformers import AutoModelForCausalLM, Mxfp4Config

    tiny_model("gpt_oss").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                            "model.embed_tokens", "lm_head"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape  # transformers keeps [expert, inputs, outputs]
        shape = (experts, rows, columns // 32)
        tensors[name + "_blocks"] = torch.randint(
            0, 256, (*shape, 16), generator=generator, dtype=torch.uint8
        )
        tensors[name + "_scales"] = torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    assert_equal_to(open_source(tmp_path), dict(experts_modules(theirs)))


@pytest.mark.peer
def test_awq_unpacked_by_autoawq(checkpoint: Callable[..., Path]) -> None:
    import importlib.util

    package = importlib.util.find_spec("awq")
    if package is None or not package.submodule_search_locations:
        pytest.skip("AutoAWQ is not installed")
    file = Path(package.submodule_search_locations[0]) / "utils" / "packing_utils.py"
    described = importlib.util.spec_from_file_location(
        "packing_utils", file
    )  # the package itself wants a GPU
    assert described is not None and described.loader is not None
    theirs = importlib.util.module_from_spec(described)
    described.loader.exec_module(theirs)
    wanted: dict[tuple[int, str], np.ndarray] = {}

    def encode(expert: int, role: str, rows: int, columns: int) -> dict[str, tuple[str, np.ndarray]]:
        generator = np.random.default_rng([expert, len(role)])
        qweight = generator.integers(-(2**31), 2**31, (columns, rows // 8)).astype(np.int32)
        qzeros = generator.integers(-(2**31), 2**31, (columns // 16, rows // 8)).astype(np.int32)
        scales = generator.normal(size=(columns // 16, rows)).astype(np.float16)
        arguments = (torch.from_numpy(qweight), torch.from_numpy(qzeros), torch.from_numpy(scales).float())
        wanted[expert, role] = theirs.dequantize_gemm(*arguments, 4, 16).T.numpy()
        return {".qweight": ("I32", qweight), ".qzeros": ("I32", qzeros), ".scales": ("F16", scales)}

    source = open_source(checkpoint(encode, {"quant_method": "awq"}))
    for (expert, role), values in wanted.items():
        np.testing.assert_array_equal(getattr(source.expert(0, expert), role), values)


# ---------------------------------------------------------------- compressed-tensors' own compressors

INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "W4A16 g16": ("pack-quantized", {**INT, "num_bits": 4, "strategy": "group", "group_size": 16}),
    "W4A16 asymmetric": (
        "pack-quantized",
        {**INT, "symmetric": False, "num_bits": 4, "strategy": "group", "group_size": 32},
    ),
    "W8A16 channel": ("pack-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "W3A16 g32": ("pack-quantized", {**INT, "num_bits": 3, "strategy": "group", "group_size": 32}),
    "W8A8": ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "FP8 channel": ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "channel"}),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {
            **FLOAT,
            "num_bits": 4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        {**FLOAT, "num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_compresses_and_we_read(scheme: str, checkpoint: Callable[..., Path]) -> None:
    pytest.importorskip("compressed_tensors")
    form, settings = SCHEMES[scheme]
    wanted: dict[tuple[int, str], np.ndarray] = {}

    def encode(expert: int, role: str, rows: int, columns: int) -> dict[str, tuple[str, np.ndarray]]:
        stored, wanted[expert, role] = _compressed(form, settings, rows, columns, seed=expert * 3 + len(role))
        return stored

    folder = checkpoint(encode, {"quant_method": "compressed-tensors", "format": form})
    source = open_source(folder)
    tolerance = 4e-3 if scheme == "NVFP4" else 3e-7  # it decompresses NVFP4 to bfloat16
    for (expert, role), values in wanted.items():
        np.testing.assert_allclose(getattr(source.expert(0, expert), role), values, rtol=tolerance, atol=0)


def _compressed(form: str, settings: dict[str, Any], rows: int, columns: int, seed: int) -> Any:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    generator = torch.Generator().manual_seed(seed)
    arguments = QuantizationArgs(**settings)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    group = settings.get("group_size") or columns
    local = weight.view(rows, -1, group)
    top = {"int": 2 ** (arguments.num_bits - 1) - 1, "float": 448.0 if arguments.num_bits == 8 else 6.0}[
        arguments.type
    ]
    scale = local.abs().amax(-1) / top
    state = {"weight": weight}
    if form.startswith("nvfp4"):
        number = torch.tensor([448.0 * 6.0]) / weight.abs().max()
        state["weight_global_scale"] = number
        scale = (scale * number).to(torch.float8_e4m3fn).float()
    if form.startswith("mxfp4"):
        scale = torch.exp2(torch.floor(torch.log2(local.abs().amax(-1))) - 2)
    state["weight_scale"] = scale
    if not arguments.symmetric:
        state["weight_zero_point"] = torch.randint(-8, 8, scale.shape, generator=generator, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=form)
    small = compressor.compress({key: value.clone() for key, value in state.items()}, scheme)
    large = compressor.decompress({key: value.clone() for key, value in small.items()}, scheme)
    names = {torch.int32: "I32", torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32", torch.int64: "I64",
             torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float16: "F16"}  # fmt: skip
    stored = {}
    for key, tensor in small.items():
        bits = (
            tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()])
            if tensor.is_floating_point() and tensor.element_size() < 4
            else tensor
        )
        stored["." + key] = names[tensor.dtype], bits.contiguous().numpy()
    return stored, large["weight"].float().numpy()
