"""GGUF: every type that gguf-py dequantizes, split and stacked in every way, damage refused by name."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Q  # noqa: E402
from gguf import quants  # noqa: E402

from ktplan.errors import BadInput  # noqa: E402
from ktplan.model import open_source, read_spec  # noqa: E402

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 3, 256, 512
TYPES = sorted({"F32", "F16"} | {kind.name for kind in quants._type_traits})
Tensors = list[tuple[str, np.ndarray, Any]]


def raw(kind: Any, *shape: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a type; small bytes, so that scales are finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng([seed, *shape])
    if kind in (Q.F32, Q.F16):
        return generator.normal(size=shape).astype(np.float32 if kind == Q.F32 else np.float16)
    return generator.integers(0, 0x3C, (*shape[:-1], shape[-1] // block * size), np.uint8)


def values(data: np.ndarray, kind: Any) -> np.ndarray:
    if kind in (Q.F32, Q.F16):
        return data.astype(np.float32)
    with np.errstate(all="ignore"):
        return quants.dequantize(data, kind)


def model(
    kinds: Callable[[int, str], Any] = lambda layer, role: Q.F32, layers: range = range(LAYERS)
) -> Tensors:
    tensors: Tensors = [("token_embd.weight", np.ones((8, HIDDEN), np.float32), Q.F32)]
    for layer in layers:
        for role, shape in (
            ("gate", (INTERMEDIATE, HIDDEN)),
            ("up", (INTERMEDIATE, HIDDEN)),
            ("down", (HIDDEN, INTERMEDIATE)),
        ):
            kind = kinds(layer, role)
            data = raw(kind, EXPERTS, *shape, seed=layer * 3 + len(role))
            tensors.append((f"blk.{layer}.ffn_{role}_exps.weight", data, kind))
    return tensors


def write(
    file: Path,
    tensors: Tensors,
    arch: str = "qwen3moe",
    split: tuple[int, int, int] | None = None,
    alignment: int = 0,
    endian: Any = gguf.GGUFEndian.LITTLE,
    **metadata: Any,
) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(file), arch, endianess=endian)
    said = {
        "block_count": LAYERS, "embedding_length": HIDDEN, "expert_feed_forward_length": INTERMEDIATE,
        "feed_forward_length": 64, "expert_count": EXPERTS, "expert_used_count": 2, "context_length": 128,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
    } | metadata  # fmt: skip
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in said.items():
        if value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_token_list([f"t{n}" for n in range(5000)])
    if split:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
        writer.add_int32("split.tensors.count", split[2])
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=None if kind in (Q.F32, Q.F16) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def assert_reads(path: Path, tensors: Tensors) -> None:
    source = open_source(path)
    held = {name: (data, kind) for name, data, kind in tensors}
    for layer in source.spec.moe_layers:
        for expert in range(EXPERTS):
            found = source.expert(layer, expert)
            for role in ("gate", "up", "down"):
                data, kind = held[f"blk.{layer}.ffn_{role}_exps.weight"]
                np.testing.assert_array_equal(getattr(found, role), values(data[expert], kind), err_msg=role)


@pytest.mark.parametrize("name", TYPES)
def test_every_type_of_gguf_py(name: str, tmp_path: Path) -> None:
    tensors = model(lambda layer, role: Q[name], range(1))
    file = write(tmp_path / "m.gguf", tensors, block_count=1)
    assert read_spec(file).dtype == name
    assert_reads(file, tensors)


def test_q8_0_and_mxfp4_by_their_formulas(tmp_path: Path) -> None:
    """Written out here, independent of gguf-py."""
    kinds = {"gate": Q.Q8_0, "up": Q.Q4_0, "down": Q.MXFP4}
    tensors = model(lambda layer, role: kinds[role], range(1))
    found = open_source(write(tmp_path / "m.gguf", tensors, block_count=1)).expert(0, 1)
    by_name = {name: data[1] for name, data, _ in tensors[1:]}
    row = by_name["blk.0.ffn_gate_exps.weight"][7].reshape(-1, 34)
    scale = row[:, :2].copy().view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found.gate[7], (scale * row[:, 2:].view(np.int8)).reshape(-1))
    row = by_name["blk.0.ffn_up_exps.weight"][7].reshape(-1, 18)
    scale = row[:, :2].copy().view(np.float16).astype(np.float32)
    codes = np.concatenate([row[:, 2:] & 15, row[:, 2:] >> 4], axis=1).astype(np.float32) - 8
    np.testing.assert_array_equal(found.up[7], (scale * codes).reshape(-1))
    row = by_name["blk.0.ffn_down_exps.weight"][7].reshape(-1, 17)
    table = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32) / 2
    codes = table[np.concatenate([row[:, 1:] & 15, row[:, 1:] >> 4], axis=1)]
    np.testing.assert_array_equal(
        found.down[7], (np.exp2(row[:, :1] - 127.0) * codes).reshape(-1).astype(np.float32)
    )


def test_types_may_differ_by_layer_and_projection(tmp_path: Path) -> None:
    mixed = [Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_XS, Q.IQ2_XXS, Q.BF16]
    tensors = model(lambda layer, role: mixed[3 * layer + ("gate", "up", "down").index(role)])
    file = write(tmp_path / "m.gguf", tensors)
    assert read_spec(file).dtype == "BF16 + IQ2_XXS + IQ4_XS + Q4_K + Q5_K + Q6_K"
    assert_reads(file, tensors)


def test_the_description_comes_from_the_metadata(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path / "m.gguf", model()))
    assert (spec.family, spec.model_type, spec.layers, spec.moe_layers) == (
        "qwen3_moe",
        "qwen3moe",
        2,
        (0, 1),
    )
    assert (spec.experts, spec.top_k, spec.hidden, spec.moe_intermediate) == (
        EXPERTS,
        2,
        HIDDEN,
        INTERMEDIATE,
    )
    assert (spec.vocab, spec.context, spec.tied_embeddings, spec.fused) == (8, 128, True, True)
    assert spec.expert_params == 2 * EXPERTS * spec.params_per_expert
    assert spec.kv_bytes_per_token == 2 * 2 * (64 + 64) * 2
    assert spec.experts_module_name(1) == "model.layers.1.mlp.experts"
    assert spec.dense_params == 8 * HIDDEN


@pytest.mark.parametrize("alignment", [64, 1024])
def test_another_alignment_is_honoured(alignment: int, tmp_path: Path) -> None:
    tensors = model(lambda layer, role: Q.Q5_1)
    assert_reads(write(tmp_path / "m.gguf", tensors, alignment=alignment), tensors)


def split_in(folder: Path, tensors: Tensors, parts: int = 3) -> list[Path]:
    files = []
    for n in range(parts):
        file = folder / f"m-{n + 1:05d}-of-{parts:05d}.gguf"
        keep = {} if n == 0 else {key: None for key in ("block_count", "embedding_length", "expert_count")}
        files.append(write(file, tensors[n::parts], split=(n, parts, len(tensors)), **keep))
    return files


def test_any_part_of_a_split_model_names_the_whole(tmp_path: Path) -> None:
    tensors = model()
    files = split_in(tmp_path, tensors)
    for path in (*files, tmp_path):
        assert_reads(path, tensors)
    assert len({read_spec(path).fingerprint for path in (*files, tmp_path)}) == 1


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    files = split_in(tmp_path, model())
    files[1].unlink()
    for path in (files[0], tmp_path):
        with pytest.raises(BadInput, match="1 of 3 parts are missing: m-00002-of-00003.gguf"):
            open_source(path)


def test_a_part_under_another_name_is_not_taken_for_the_model(tmp_path: Path) -> None:
    file = split_in(tmp_path, model())[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(BadInput, match="one of 3 parts, 1 are there"):
        open_source(file)


def test_several_models_in_a_folder_are_listed_and_a_projector_is_none(tmp_path: Path) -> None:
    tensors = model()
    write(tmp_path / "a.gguf", tensors)
    write(tmp_path / "mmproj-a.gguf", [("v.weight", np.ones(4, np.float32), Q.F32)], arch="clip")
    assert_reads(tmp_path, tensors)
    write(tmp_path / "b.gguf", tensors)
    with pytest.raises(BadInput, match=r"several models: a\.gguf, b\.gguf"):
        open_source(tmp_path)
    assert_reads(tmp_path / "b.gguf", tensors)


def test_one_tensor_an_expert_as_older_files_have_it(tmp_path: Path) -> None:
    stacked = model(lambda layer, role: Q.Q4_1)
    single = [stacked[0]]
    for name, data, kind in stacked[1:]:
        single += [(name.replace("_exps", f".{n}"), data[n], kind) for n in range(EXPERTS)]
    file = write(tmp_path / "m.gguf", single, arch="llama")
    assert (read_spec(file).family, read_spec(file).fused) == ("mixtral", False)
    assert_reads(file, stacked)
    whole = write(tmp_path / "stacked.gguf", stacked, arch="llama")
    assert read_spec(file).fingerprint == read_spec(whole).fingerprint
    lost = [entry for entry in single if entry[0] != "blk.1.ffn_up.2.weight"]
    with pytest.raises(BadInput, match=r"blk\.1\.ffn_up\.2\.weight is missing \(layer 1, expert 2, up"):
        open_source(write(tmp_path / "lost.gguf", lost, arch="llama"))


def test_gate_above_up_in_one_tensor(tmp_path: Path) -> None:
    stacked = model()
    both = [stacked[0]]
    for layer in range(LAYERS):
        gate, up, down = stacked[1 + 3 * layer : 4 + 3 * layer]
        name = f"blk.{layer}.ffn_gate_up_exps.weight"
        both += [(name, np.concatenate([gate[1], up[1]], axis=1), Q.F32), down]
    file = write(tmp_path / "m.gguf", both, arch="qwen3next")
    assert_reads(file, stacked)
    assert set(open_source(file).expert_names(0, 0)) == {"gate", "up", "down"}
    apart = write(tmp_path / "apart.gguf", stacked, arch="qwen3next")
    assert read_spec(file).fingerprint == read_spec(apart).fingerprint


def test_gpt_oss_has_biases_and_its_own_activation(tmp_path: Path) -> None:
    tensors = model(lambda layer, role: Q.MXFP4)
    biases = {}
    for layer in range(LAYERS):
        for role, size in (("gate", INTERMEDIATE), ("up", INTERMEDIATE), ("down", HIDDEN)):
            name = f"blk.{layer}.ffn_{role}_exps.bias"
            biases[name] = raw(Q.F32, EXPERTS, size, seed=layer)
            tensors.append((name, biases[name], Q.F32))
    source = open_source(write(tmp_path / "m.gguf", tensors, arch="gpt-oss"))
    assert (source.spec.activation, source.spec.expert_bias) == ("swiglu-oai", True)
    found = source.expert(1, 2)
    np.testing.assert_array_equal(found.up_bias, biases["blk.1.ffn_up_exps.bias"][2])
    np.testing.assert_array_equal(found.down_bias, biases["blk.1.ffn_down_exps.bias"][2])
    np.testing.assert_array_equal(found.gate, values(tensors[4][1][2], Q.MXFP4))


def test_dense_layers_first_and_prediction_layers_last(tmp_path: Path) -> None:
    tensors = model(layers=range(1, 3))  # layer 0 dense, layer 2 predicts the token after the next
    metadata = {"block_count": 3, "leading_dense_block_count": 1, "nextn_predict_layers": 1}
    source = open_source(write(tmp_path / "m.gguf", tensors, arch="glm4moe", **metadata))
    assert (source.spec.layers, source.spec.moe_layers) == (2, (1,))
    assert len(source.beyond_names()) == 3
    with pytest.raises(BadInput, match="leading_dense_block_count is 2.*layer 1 disagree"):
        open_source(
            write(tmp_path / "n.gguf", tensors, arch="glm4moe", block_count=3, leading_dense_block_count=2)
        )


# ---------------------------------------------------------------- refusals


def test_a_cut_file_names_tensor_and_both_sizes(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", model())
    size = file.stat().st_size
    os.truncate(file, size * 6 // 10)
    with pytest.raises(
        BadInput, match=rf"m\.gguf is cut off.*blk\.1\.ffn_\w+_exps.*{size * 6 // 10:,} bytes"
    ):
        open_source(file)
    os.truncate(file, 200)
    with pytest.raises(BadInput, match="ends inside its header at 200 bytes"):
        open_source(file)
    os.truncate(file, 10)
    with pytest.raises(BadInput, match="10 bytes, less than a GGUF header"):
        open_source(file)


def test_big_endian_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="big-endian"):
        open_source(write(tmp_path / "m.gguf", model(), endian=gguf.GGUFEndian.BIG))


def test_an_unknown_type_names_its_tensor(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", model())
    data = bytearray(file.read_bytes())
    name = b"blk.0.ffn_up_exps.weight"
    place = data.index(name) + len(name) + 4 + 3 * 8
    data[place : place + 4] = struct.pack("<I", 200)
    file.write_bytes(data)
    with pytest.raises(BadInput, match=r"blk\.0\.ffn_up_exps\.weight has the unknown type 200"):
        open_source(file)


@pytest.mark.parametrize(
    ("arch", "metadata", "says"),
    [
        ("qwen3moe", {"expert_count": 0}, "dense model"),
        ("wonder", {}, r"architecture 'wonder' is not known.*blk\.N\.ffn_down_exps"),
        (
            "qwen3moe",
            {"expert_count": 4},
            r"ffn_gate_exps\.weight has shape \[3, 512, 256\].*\[4, 512, 256\]",
        ),
        ("qwen3moe", {"embedding_length": None}, "lacks qwen3moe.embedding_length"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    arch: str, metadata: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=says):
        open_source(write(tmp_path / "m.gguf", model(), arch=arch, **metadata))


def test_a_type_without_formula_is_refused_for_experts(tmp_path: Path) -> None:
    tensors = model()
    data = np.zeros((EXPERTS, INTERMEDIATE, HIDDEN), np.int8)
    tensors[1] = ("blk.0.ffn_gate_exps.weight", data, Q.I8)
    with pytest.raises(BadInput, match=r"blk\.0\.ffn_gate_exps\.weight has type I8"):
        open_source(write(tmp_path / "m.gguf", tensors))


def test_a_terabyte_is_described_in_a_moment(tmp_path: Path) -> None:
    """A sparse file: its header promises 0.6 TB; describing reads the header and samples of dense tensors only."""
    file = write(tmp_path / "m.gguf", model())
    data = bytearray(file.read_bytes())
    factor = 1_000_000
    for layer in range(LAYERS):  # more experts, each stack behind the other
        for number, role in enumerate(("gate", "up", "down")):
            name = f"blk.{layer}.ffn_{role}_exps.weight".encode()
            place = data.index(name) + len(name) + 4
            offset = 8192 + (3 * layer + number) * factor * HIDDEN * INTERMEDIATE * 4
            data[place + 16 : place + 24] = struct.pack("<Q", factor)
            data[place + 28 : place + 36] = struct.pack("<Q", offset)
    key = b"qwen3moe.expert_count"
    place = data.index(key) + len(key) + 4
    data[place : place + 4] = struct.pack("<I", factor)
    file.write_bytes(data)
    os.truncate(file, len(data) + 6 * factor * HIDDEN * INTERMEDIATE * 4 + 8192)
    assert read_spec(file).expert_bytes == 6 * factor * HIDDEN * INTERMEDIATE * 4
