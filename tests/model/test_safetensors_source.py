"""A checkpoint is described from headers, checked before work, and read exactly."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktplan.errors import BadInput
from ktplan.model import open_source, read_spec

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "olmoe")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """The embedded model, to be damaged."""
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def shard(folder: Path, pieces: int) -> list[Path]:
    """Split model.safetensors into `pieces` files with an index, as big models are published."""
    from safetensors.numpy import save_file

    from ktplan.model.header import read_header

    whole = folder / "model.safetensors"
    tensors: dict[str, Any] = {}
    for name, info in read_header(whole).tensors.items():
        with whole.open("rb") as file:
            file.seek(info.start)
            tensors[name] = np.frombuffer(file.read(info.bytes), np.int16).reshape(info.shape)
    whole.unlink()
    files, places = [], {}
    for piece in range(pieces):
        file = folder / f"model-{piece + 1:05d}-of-{pieces:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[piece::pieces]}
        save_file(part, file)
        # numpy has no bfloat16: the bytes are right, the label is put back (same length, so offsets hold)
        raw = file.read_bytes()
        file.write_bytes(raw.replace(b'"dtype":"I16",', b'"dtype":"BF16",')[8:])
        body = file.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0] + len(part)
        file.write_bytes(struct.pack("<Q", length) + body)
        files.append(file)
        places |= dict.fromkeys(part, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return files


def test_the_embedded_model_is_described_from_its_headers(tiny: Path) -> None:
    spec = read_spec(tiny)
    assert (spec.family, spec.layers, spec.moe_layers, spec.experts, spec.top_k) == (
        "qwen3_moe",
        4,
        (0, 1, 2, 3),
        16,
        2,
    )
    assert (spec.hidden, spec.moe_intermediate, spec.vocab, spec.context) == (256, 128, 4096, 1024)
    assert spec.dense_params + spec.expert_params == 8_145_664
    assert spec.expert_params == 6_291_456
    assert spec.expert_bytes == 2 * spec.expert_params
    assert spec.kv_bytes_per_token == 4 * 2 * 2 * 64 * 2  # layers, key and value, 2 heads of 64, 2 bytes
    assert spec.tied_embeddings


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", [False, True])
def test_experts_equal_those_in_transformers(
    family: str, fused: bool, family_checkpoint: Callable[..., Path]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = family_checkpoint(family, fused)
    source = open_source(path)
    assert source.spec.fused is fused
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    modules = dict(model.named_modules())
    for layer in source.spec.moe_layers:
        theirs = modules[source.spec.experts_module_name(layer)]
        for expert in range(source.spec.experts):
            ours = source.expert(layer, expert)
            gate, up = theirs.gate_up_proj[expert].float().detach().numpy().reshape(2, *ours.gate.shape)
            np.testing.assert_array_equal(ours.gate, gate)
            np.testing.assert_array_equal(ours.up, up)
            np.testing.assert_array_equal(ours.down, theirs.down_proj[expert].float().detach().numpy())
    assert source.spec.dense_params + source.spec.expert_params == sum(
        tensor.numel() for tensor in model.state_dict().values()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_both_ways_of_storing_experts_read_alike(family: str, family_checkpoint: Callable[..., Path]) -> None:
    single, fused = open_source(family_checkpoint(family)), open_source(family_checkpoint(family, True))
    layer = single.spec.moe_layers[-1]
    for a, b in zip(single.expert(layer, 5), fused.expert(layer, 5), strict=True):
        np.testing.assert_array_equal(a, b)


def test_shards_read_like_one_file(copy: Path, tiny: Path) -> None:
    shard(copy, 3)
    np.testing.assert_array_equal(open_source(copy).expert(2, 9).down, open_source(tiny).expert(2, 9).down)
    assert read_spec(copy).fingerprint == read_spec(tiny).fingerprint


def test_the_index_decides_and_a_stray_file_is_left_alone(copy: Path, tiny: Path) -> None:
    shard(copy, 2)
    stray = bytearray((tiny / "model.safetensors").read_bytes())
    stray[-1000:] = bytes(1000)
    (copy / "model.safetensors").write_bytes(stray)
    (copy / "original").mkdir()
    shutil.copy(tiny / "model.safetensors", copy / "original" / "model-00001-of-00002.safetensors")
    np.testing.assert_array_equal(open_source(copy).expert(3, 15).up, open_source(tiny).expert(3, 15).up)


def test_a_missing_shard_is_named(copy: Path) -> None:
    gone = shard(copy, 3)[1]
    gone.unlink()
    with pytest.raises(BadInput, match=gone.name):
        open_source(copy)


def test_a_truncated_file_gives_both_sizes(copy: Path) -> None:
    file = copy / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size * 6 // 10)
    with pytest.raises(BadInput, match=f"cut off.*{size * 6 // 10:,} bytes.*promises {size:,}"):
        open_source(copy)


def test_a_git_lfs_pointer_is_called_one(copy: Path) -> None:
    (copy / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 16317808\n"
    )
    with pytest.raises(BadInput, match="Git LFS pointer") as refusal:
        open_source(copy)
    assert "git lfs pull" in (refusal.value.hint or "")


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (struct.pack("<Q", 2**40) + b"{}", "announces 1,099,511,627,776 bytes"),
        (struct.pack("<Q", 4) + b"nope", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (b"", "cut off"),
        (struct.pack("<Q", 20) + b'{"__metadata__":[1]}', "metadata in its header"),
    ],
)
def test_a_broken_header_is_refused(copy: Path, header: bytes, says: str) -> None:
    (copy / "model.safetensors").write_bytes(header)
    with pytest.raises(BadInput, match=says):
        open_source(copy)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "BF16", "shape": [128, 128], "data_offsets": [0, 64]}, r"BF16 \[128, 128\].*span 64"),
        ({"dtype": "BF16", "shape": [-1], "data_offsets": [0, 64]}, "damaged"),
        ({"dtype": "BF16", "shape": [32]}, "damaged"),
        ({"dtype": "BF16", "shape": [32], "data_offsets": [8, 72]}, "hole"),
        ({"dtype": ["BF16"], "shape": [32], "data_offsets": [0, 64]}, "damaged"),
        ({"dtype": "BF16", "shape": [True, 32], "data_offsets": [0, 64]}, "damaged"),
        ({"dtype": "new", "shape": [4], "data_offsets": [8, 4]}, "damaged"),
    ],
)
def test_a_header_that_contradicts_itself_names_the_tensor(copy: Path, entry: Any, says: str) -> None:
    text = json.dumps({"w": entry}).encode()
    (copy / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(72))
    with pytest.raises(BadInput, match=says) as refusal:
        open_source(copy)
    assert "w" in refusal.value.message


def test_a_missing_expert_is_named_by_layer_expert_and_projection(copy: Path) -> None:
    edit_config(copy, num_local_experts=17)
    with pytest.raises(BadInput, match="layer 0, expert 16, gate projection"):
        open_source(copy)


def test_experts_that_the_config_does_not_count_are_a_disagreement(copy: Path) -> None:
    edit_config(copy, num_local_experts=8)
    with pytest.raises(BadInput, match=r"experts\.\d+\..*config.json does not count"):
        open_source(copy)


def test_layers_beyond_the_models_own_are_left_out(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=3)
    source = open_source(copy)
    assert source.spec.moe_layers == (0, 1, 2)
    assert {name.split(".")[2] for name in source.beyond_names()} == {"3"}
    assert not [name for name in source.dense_names() if ".layers.3." in name]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 512}, r"shape \[128, 256\], config.json asks for \[128, 512\]"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers is 'four'"),
        ({"model_type": "llama", "num_local_experts": None}, "dense model"),
        ({"model_type": "wonder_moe"}, "model_type 'wonder_moe' is not known.*experts.N.gate_proj"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method 'bitsandbytes'"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "dense model"),
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1, a list"),
        ({"mlp_layer_types": 1}, "mlp_layer_types is 1, a list"),
        ({"quantization_config": "gptq"}, "quantization_config is 'gptq', an object"),
        ({"num_experts_per_tok": 0}, "a token chooses 0 of 16 experts"),
        ({"num_experts_per_tok": 17}, "a token chooses 17 of 16 experts"),
        ({"num_hidden_layers": 10**12}, "counts 1,000,000,000,000 layers"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(
    copy: Path, changes: dict[str, Any], says: str
) -> None:
    edit_config(copy, **changes)
    with pytest.raises(BadInput, match=says):
        open_source(copy)


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no config.json"):
        open_source(tmp_path)


def test_the_fingerprint_tells_fine_tunes_apart(copy: Path, tiny: Path) -> None:
    from ktplan.model.header import read_header

    info = read_header(copy / "model.safetensors").tensors["model.layers.2.mlp.gate.weight"]
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(info.start)
        file.write(bytes(info.bytes))
    assert read_spec(copy).fingerprint != read_spec(tiny).fingerprint


@pytest.mark.parametrize("how", ["plain", "transposed", "interleaved", "biased"])
def test_experts_are_read_in_place_only_where_their_rows_lie_as_they_are(
    how: str, tiny: Path, tmp_path: Path
) -> None:
    """What a reader takes straight from the file is what `expert` gives; stacks of another order go through it."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny / "model.safetensors")
    family = "gpt_oss" if how in ("interleaved", "biased") else "qwen3_moe"
    config = {**json.loads((tiny / "config.json").read_text()), "model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in range(4):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([weights[f"{at}.{expert}.{name}_proj.weight"] for expert in range(16)])
            for name in ("gate", "up", "down")
        )
        both = torch.cat([gate, up], dim=1)
        if family == "gpt_oss":
            both = torch.stack([gate, up], dim=2).flatten(1, 2)
        if how == "biased":
            kept[f"{at}.gate_up_proj_bias"] = torch.arange(16 * 256).reshape(16, 256).bfloat16()
            kept[f"{at}.down_proj_bias"] = torch.ones(16, 256).bfloat16()
        if how == "transposed":
            both, down = both.mT, down.mT
        kept |= {f"{at}.gate_up_proj": both.contiguous(), f"{at}.down_proj": down.contiguous()}
    save_file(kept, tmp_path / "model.safetensors")
    source, exact = open_source(tmp_path), open_source(tiny).expert(2, 5)
    for found, wanted in zip(source.expert(2, 5), exact, strict=True):
        np.testing.assert_array_equal(found, wanted)
    places = source.expert_places(2, 5)
    assert (places is not None) == (how == "plain")
    for place, wanted in zip(places or (), exact, strict=False):
        raw = place.file.read_bytes()[place.start : place.start + 2 * place.rows * place.columns]
        widened = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(widened.reshape(place.rows, place.columns), wanted)
    if how == "biased":
        biases = source.expert(2, 5)
        whole = torch.arange(5 * 256, 6 * 256).bfloat16().float().numpy()
        np.testing.assert_array_equal(biases.gate_bias, whole[::2])
        np.testing.assert_array_equal(biases.up_bias, whole[1::2])
        np.testing.assert_array_equal(biases.down_bias, np.ones(256, np.float32))


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_models_that_differ_in_experts_alone_have_fingerprints_of_their_own(
    copy: Path, tiny: Path, projection: str
) -> None:
    from ktplan.model.header import read_header

    name = f"model.layers.2.mlp.experts.15.{projection}_proj.weight"
    info = read_header(copy / "model.safetensors").tensors[name]
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(info.start)
        file.write(bytes(info.bytes))
    assert read_spec(copy).fingerprint != read_spec(tiny).fingerprint


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_fingerprint_is_that_of_the_weights_however_they_are_stored(
    tiny: Path, tmp_path: Path, transposed: bool, interleaved: bool
) -> None:
    """Single matrices, and the same ones stacked, transposed, with gate and up rows in turns."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny / "model.safetensors")
    config = json.loads((tiny / "config.json").read_text())
    family = "gpt_oss" if interleaved else "qwen3_moe"
    prints = set()
    for form in ("single", "stacked"):
        folder = tmp_path / form
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "model_type": family}))
        kept = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
        for layer in range(4):
            at = f"model.layers.{layer}.mlp.experts"
            each = [[weights[f"{at}.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")] for e in range(16)]
            if form == "single":
                kept |= {name: tensor for name, tensor in weights.items() if name.startswith(at)}
                continue
            both = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
            if interleaved:
                both = torch.stack([torch.stack([gate, up], 1).flatten(0, 1) for gate, up, _ in each])
            down = torch.stack([matrix for _, _, matrix in each])
            turned = (both.mT, down.mT) if transposed else (both, down)
            kept |= {f"{at}.gate_up_proj": turned[0].contiguous(), f"{at}.down_proj": turned[1].contiguous()}
        save_file(kept, folder / "model.safetensors")
        source = open_source(folder)
        np.testing.assert_array_equal(source.expert(1, 3).up, open_source(tiny).expert(1, 3).up)
        prints.add(source.spec.fingerprint)
    assert len(prints) == 1


def test_sparse_steps_and_exceptions_decide_which_layers_are_moe() -> None:
    from ktplan.model.families import moe_layers

    config = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert moe_layers(config) == (1, 5)
    assert moe_layers({"num_hidden_layers": 2, "mlp_only_layers": None}) == (0, 1)


# ---------------------------------------------------------------- names and config.json together


def rename(folder: Path, change: Callable[[str], str | list[str]], **config: Any) -> None:
    """Give the embedded model's tensors other names; a list of names stores a tensor several times."""
    raw = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    entries = json.loads(raw[8 : 8 + length])
    entries.pop("__metadata__", None)
    header: dict[str, Any] = {}
    body, place = [], 0
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        changed = change(name)
        for new in [changed] if isinstance(changed, str) else changed:
            header[new] = {**entry, "data_offsets": [place, place + end - begin]}
            body.append(raw[8 + length + begin : 8 + length + end])
            place += end - begin
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(body))
    edit_config(folder, **config)


@pytest.mark.parametrize(
    "prefix", ["model.", "", "model.language_model.", "language_model.model.", "thinker.model."]
)
def test_the_prefix_of_the_language_model_is_found(prefix: str, copy: Path, tiny: Path) -> None:
    rename(copy, lambda name: prefix + name.removeprefix("model."))
    source = open_source(copy)
    np.testing.assert_array_equal(source.expert(1, 2).gate, open_source(tiny).expert(1, 2).gate)
    assert all(name.startswith(prefix) for name in source.expert_names(3, 0).values())


def test_towers_with_the_same_names_are_left_alone(copy: Path, tiny: Path) -> None:
    tower = "model.visual.layers"
    rename(copy, lambda name: [name, name.replace("model.layers", tower)] if ".layers.1." in name else name)
    source = open_source(copy)
    assert source.spec.expert_params == open_source(tiny).spec.expert_params
    assert any(name.startswith(tower) and ".experts." in name for name in source.dense_names())


def test_prediction_layers_beside_the_model_are_beyond_it(copy: Path) -> None:
    rename(
        copy,
        lambda name: [name, name.replace("model.layers.1", "mtp.layers.0")] if ".layers.1." in name else name,
    )
    source = open_source(copy)
    assert source.beyond_names() and all(name.startswith("mtp.") for name in source.beyond_names())


def test_two_models_in_one_checkpoint_are_refused(copy: Path) -> None:
    rename(copy, lambda name: [name, "other." + name])
    source = open_source(copy)  # the prefix that transformers writes decides
    assert source.expert_names(0, 0)["up"].startswith("model.layers")
    rename(copy, lambda name: name if name.startswith("other.") else "second." + name)
    with pytest.raises(BadInput, match=r"under 'other\.model\.' and under 'second\.model\.'"):
        open_source(copy)


def test_a_layer_that_config_json_calls_dense_but_has_experts_is_a_disagreement(copy: Path) -> None:
    edit_config(copy, mlp_only_layers=[2])
    with pytest.raises(BadInput, match=r"layers\.2\.mlp\.experts.*config\.json does not count"):
        open_source(copy)


def test_a_layer_that_config_json_calls_moe_but_has_no_experts_is_a_disagreement(copy: Path) -> None:
    rename(copy, lambda name: name.replace("layers.2.mlp.experts", "layers.2.mlp.parts"))
    with pytest.raises(
        BadInput, match=r"layers\.2\.mlp\.experts\.0\.gate_proj is missing \(layer 2, expert 0, gate"
    ):
        open_source(copy)


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "hash_moe", "moe"]}, (1, 2, 3)),
        ({"first_k_dense_replace": 2}, (2, 3)),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, (0, 2)),
        ({"moe_layer_freq": [0, 1, 0, 1]}, (1, 3)),
        ({"moe_layers": [1, 3]}, (1, 3)),
        ({"moe_layers_enum": "0,3"}, (0, 3)),
        ({"interleave_moe_layer_step": 2}, (1, 3)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1}, (1, 2)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, (1, 2, 3)),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3)),
        ({"num_dense_layers": 1}, (1, 2, 3)),
        ({"moe_layer_num_skipped": 1}, (1, 2, 3)),
        ({"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}, (1, 3)),
        ({"layers_block_type": ["mamba", "attention", "mamba", "attention"]}, (0, 1, 2, 3)),
        ({"hybrid_override_pattern": "ME*E"}, (1, 3)),
    ],
)
def test_every_way_of_config_json_to_say_which_layers_are_moe(
    config: dict[str, Any], chosen: tuple[int, ...]
) -> None:
    from ktplan.model.families import moe_layers

    assert moe_layers({"num_hidden_layers": 4, **config}) == chosen


def test_numbered_files_without_index_must_be_complete(copy: Path) -> None:
    files = shard(copy, 3)
    (copy / "model.safetensors.index.json").unlink()
    open_source(copy)
    files[1].unlink()
    with pytest.raises(BadInput, match="1 of 3 numbered files are missing: model-00002-of-00003"):
        open_source(copy)


def test_a_layer_stored_in_two_ways_is_refused(copy: Path) -> None:
    stack = "model.layers.1.mlp.experts.down_proj"
    rename(
        copy, lambda name: [name, stack] if name == "model.layers.1.mlp.experts.0.down_proj.weight" else name
    )
    with pytest.raises(BadInput, match="one of two ways in which layer 1 stores its experts"):
        open_source(copy)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 2 * 2 * 16 * 2 * 4),
        ({"head_dim": 32}, 2 * 2 * 32 * 2 * 4),
        ({"layer_types": ["linear_attention", "full_attention", "conv", "hybrid"]}, 2 * 2 * 16 * 2 * 2),
        ({"kv_lora_rank": 64, "qk_rope_head_dim": 8}, (64 + 8) * 2 * 4),
    ],
)
def test_the_cache_of_a_token_counts_the_layers_that_keep_one(config: dict[str, Any], expected: int) -> None:
    from ktplan.model.families import kv_bytes

    base = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert kv_bytes({**base, **config}) == expected


def test_the_thinker_of_an_omni_model_is_read_and_its_talker_left_alone(copy: Path, tiny: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    rename(copy, lambda name: ["thinker." + name, "talker." + name])
    text = {**config, "model_type": "qwen3_omni_moe_text"}
    omni = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": text}, "talker_config": {}}
    (copy / "config.json").write_text(json.dumps(omni))
    source = open_source(copy)
    assert source.spec.expert_params == open_source(tiny).spec.expert_params
    assert source.expert_names(2, 1)["down"] == "thinker.model.layers.2.mlp.experts.1.down_proj.weight"
    np.testing.assert_array_equal(source.expert(2, 1).down, open_source(tiny).expert(2, 1).down)


def test_bytes_behind_the_last_tensor_are_damage(copy: Path) -> None:
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(BadInput, match="its header describes"):
        open_source(copy)


@pytest.mark.parametrize("file", [5, None, ""])
def test_an_index_that_names_no_file_is_refused(copy: Path, file: object) -> None:
    index = {"weight_map": {"lm_head.weight": file, "model.norm.weight": "model.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match="names no file for lm_head.weight"):
        open_source(copy)
