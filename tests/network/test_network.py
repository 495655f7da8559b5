"""A network filled part by part is, tensor for tensor, the one that transformers loads whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from ktplan import network
from ktplan.errors import BadInput
from ktplan.model import open_source

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "olmoe")


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def filled(path: Path, dtype: str) -> Any:
    model, source = network.skeleton(path, dtype), open_source(path)
    network.load_dense(model, source, dtype=dtype)
    for layer, (_, module) in network.experts_modules(model).items():
        network.load_experts(module, source, layer, dtype=dtype)
    return model


def rewritten(checkpoint: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a single-file checkpoint with its tensors changed."""
    shutil.copytree(checkpoint, folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    change(stored)
    save_file(stored, file)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_the_one_transformers_loads(
    family_checkpoint: Callable[..., Path], family: str, dtype: str
) -> None:
    path = family_checkpoint(family)
    reference, ours = network.load_whole(path, dtype), filled(path, dtype)
    expected, found = tensors(reference), tensors(ours)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, reference(ids).logits)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_fused_checkpoint_gives_the_same_network(
    family_checkpoint: Callable[..., Path], family: str
) -> None:
    one, other = (filled(family_checkpoint(family, fused=fused), "bfloat16") for fused in (False, True))
    for name, tensor in tensors(one).items():
        assert torch.equal(tensors(other)[name], tensor), name


def test_tied_embeddings_are_one_tensor(tiny: Path) -> None:
    model = network.skeleton(tiny)
    load = network.load_dense(model, open_source(tiny))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert load.unused == ()
    assert load.bytes == sum(tensor.nbytes for _, tensor in tensors(model).items() if not tensor.is_meta)


def test_a_skeleton_needs_nothing_but_the_config(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    model = network.skeleton(tmp_path)
    assert all(tensor.is_meta for tensor in tensors(model).values())
    experts = network.experts_modules(model)
    assert list(experts) == [0, 1, 2, 3]
    name, module = experts[3]
    assert name == "model.layers.3.mlp.experts"
    assert tuple(module.down_proj.shape) == (16, 256, 128)


def test_experts_are_found_in_moe_layers_only(family_checkpoint: Callable[..., Path]) -> None:
    assert list(network.experts_modules(network.skeleton(family_checkpoint("deepseek_v3")))) == [1, 2]
    assert list(network.experts_modules(network.skeleton(family_checkpoint("qwen3_moe")))) == [0, 2]


def test_one_layer_at_a_time(tiny: Path) -> None:
    """As calibration does it: a layer comes, computes, and goes again."""
    model, source = network.skeleton(tiny), open_source(tiny)
    whole = network.load_whole(tiny)
    network.load_dense(model, source, only=["model.embed_tokens", "model.rotary_emb"])
    ids = torch.arange(20)[None]
    positions = torch.arange(20)[None]
    with torch.inference_mode():
        hidden = model.model.embed_tokens(ids)
        rotary = model.model.rotary_emb(hidden, positions)
        expected = whole.model(ids, output_hidden_states=True).hidden_states
        for number, layer in enumerate(model.model.layers[:2]):
            network.load_dense(model, source, only=f"model.layers.{number}")
            network.load_experts(layer.mlp.experts, source, number)
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
            assert torch.allclose(hidden, expected[number + 1], atol=1e-5)
            network.unload(layer)
            assert all(tensor.is_meta for tensor in layer.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.norm.weight.is_meta


def test_a_missing_weight_is_an_error_that_names_it(tiny: Path, tmp_path: Path) -> None:
    path = rewritten(
        tiny, tmp_path / "model", lambda stored: stored.pop("model.layers.2.input_layernorm.weight")
    )
    with pytest.raises(BadInput, match=r"no weights for model\.layers\.2\.input_layernorm\.weight"):
        network.load_dense(network.skeleton(path), open_source(path))


def test_a_router_bias_cannot_be_left_out(family_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    path = rewritten(family_checkpoint("deepseek_v3"), tmp_path / "model", lambda stored: stored.pop(name))
    with pytest.raises(BadInput, match="e_score_correction_bias"):
        network.load_dense(network.skeleton(path), open_source(path))


def test_a_wrong_shape_is_an_error_with_both_shapes(tiny: Path, tmp_path: Path) -> None:
    path = rewritten(
        tiny, tmp_path / "model", lambda stored: stored.update({"model.norm.weight": torch.ones(128)})
    )
    with pytest.raises(BadInput, match=r"model\.norm\.weight has shape \[128\].*\[256\]"):
        network.load_dense(network.skeleton(path), open_source(path))


def test_a_weight_in_an_unknown_type_is_refused(tiny: Path, tmp_path: Path) -> None:
    def as_integers(stored: dict[str, torch.Tensor]) -> None:
        stored["model.norm.weight"] = stored["model.norm.weight"].to(torch.int8)

    path = rewritten(tiny, tmp_path / "model", as_integers)
    with pytest.raises(BadInput, match=r"model\.norm\.weight is stored as int8"):
        network.load_dense(network.skeleton(path), open_source(path))


def test_layers_beyond_the_last_and_strangers_are_left_out(tiny: Path, tmp_path: Path) -> None:
    def more(stored: dict[str, torch.Tensor]) -> None:
        stored["model.layers.4.eh_proj.weight"] = torch.ones(256, 512)
        stored["model.stranger.weight"] = torch.ones(4)

    path = rewritten(tiny, tmp_path / "model", more)
    load = network.load_dense(network.skeleton(path), open_source(path))
    assert load.unused == ("model.stranger.weight",)


def test_many_shards_need_few_open_files(tiny: Path, tmp_path: Path) -> None:
    network.load_whole(tiny, "bfloat16").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 20
    model, whole = network.skeleton(tmp_path), network.load_whole(tiny)
    network.load_dense(model, open_source(tmp_path))
    assert torch.equal(
        model.model.layers[3].self_attn.q_proj.weight, whole.model.layers[3].self_attn.q_proj.weight
    )


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    config = {
        "model_type": "strange",
        "auto_map": {"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "strange.py").write_text("raise SystemExit('executed')")
    with pytest.raises(BadInput, match="transformers cannot use"):
        network.skeleton(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="transformers cannot use"):
        network.tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_attention_heads", 0), ("vocab_size", None), ("hidden_act", None), ("decoder_sparse_step", 0),
     ("pad_token_id", 99_999), ("rope_scaling", {"type": "spiral"})],
)  # fmt: skip
def test_a_config_that_transformers_stumbles_over_is_bad_input(
    key: str, value: object, tiny: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(BadInput, match="transformers cannot use") as refusal:
        network.skeleton(tmp_path)
    assert "\n" not in refusal.value.message


def test_a_count_of_layers_that_no_model_has_is_refused_at_once(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**12}))
    with pytest.raises(BadInput, match="counts 1,000,000,000,000 layers"):
        network.skeleton(tmp_path)


def test_a_tokenizer_that_knows_no_text_is_none(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(BadInput, match="has no tokenizer|transformers cannot use"):
        network.tokenizer(tmp_path)


def test_special_tokens_are_told_apart(tiny: Path) -> None:
    tokenizer = network.tokenizer(tiny)
    encoded = network.text_encoder(tokenizer)("In the beginning")
    assert tokenizer.decode(encoded.tokens) == "In the beginning"
    assert encoded.prefix == ()
    assert len(network.text_encoder(tokenizer)("").tokens) == 0


def test_quiet_gives_transformers_its_voice_back(tiny: Path) -> None:
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    with network.quiet():
        assert transformers_logging.get_verbosity() == transformers_logging.ERROR
        assert not transformers_logging.is_progress_bar_enabled()
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts", 3),
        ("layers.61.eh_proj", 61),
        ("model.norm", None),
        ("mylayers.3.x", None),
    ],
)
def test_the_layer_of_a_name(name: str, layer: int | None) -> None:
    assert network.layer_of(name) == layer


def test_types_to_compute_in() -> None:
    assert network.as_dtype("bfloat16") is torch.bfloat16
    assert network.as_dtype(torch.float32) is torch.float32
    with pytest.raises(BadInput, match="int4"):
        network.as_dtype("int4")


def test_what_is_no_checkpoint_is_called_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no config.json"):
        network.skeleton(tmp_path)
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(BadInput, match="Git LFS pointer"):
        network.skeleton(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadInput, match="is a GGUF model"):
        network.skeleton(tmp_path / "model.gguf")
