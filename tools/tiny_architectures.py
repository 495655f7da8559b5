"""Tiny random models of every architecture in transformers that has routed experts.

Used to derive ktplan/data/architectures.json and to test that every architecture is read exactly. Needs torch and
transformers; the package itself does not import this.
"""

from __future__ import annotations

import os
import re
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto import modeling_auto

HIDDEN, INTERMEDIATE, EXPERTS = 64, 48, 4

# Every key of these that a configuration class knows is set. Sizes differ so that no two axes can be confused.
_SIZES: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": HIDDEN, "intermediate_size": 96, "moe_intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 4, "num_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
    "tie_word_embeddings": False, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "shared_expert_intermediate_size": 48, "shared_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48,
    "intermediate_size_mlp": 96, "dense_intermediate_size": 96, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48,
    "enable_moe_block": True, "share_expert_dim": 48, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "kv_channels": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "moe_hidden_size": HIDDEN, "router_hidden_size": 32, "index_n_heads": 2,
    "index_head_dim": 32, "index_topk": 32, "out_hidden_size": 64, "depth": 2, "num_heads": 4, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 16, "mamba_num_heads": 8, "ssm_state_size": 16, "mamba_expand": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "vocab_size_per_layer_input": 264,
    "hidden_size_per_layer_input": 16, "num_global_key_value_heads": 2, "global_head_dim": 16,
    "shared_experts_intermediate_size": 48, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_channels": 3, "image_size": 28, "patch_size": 14,
    "decoder_sparse_step": 1, "attention_heads": 4, "zero_expert_num": 2, "d_ff": 96, "d_kv": 16,
    "unpadded_vocab_size": 260, "n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2,
    "loop_layer_index_end": 4, "sconv_kernel_size": 2,
    "projector_hidden_size": 64, "video_temporal_patch_size": 2,
}  # fmt: skip

# What a configuration class insists on beyond that.
_DOTS = {"num_key_value_heads": 4}
_QSA = {"indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0},
        "ffn_config": {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 96,
            "moe_num_experts": EXPERTS,
            "moe_top_k": 2,
        },
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}},
    "dots3_note_text": _DOTS,
    "dots3_note": {
        "text_config": _DOTS,
        "vision_config": {
            "num_hidden_layers": 2,
            "mlp_layer_types": ["dense", "dense"],
            "per_layer_config": {},
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
        },
        "audio_config": {"adapter_input_size": 64, "adapter_output_size": 64},
    },
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [48, 24]}},
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "qk_rope_head_dim": 0}},
    "hy_v4_vl": {"text_config": {"qk_rope_head_dim": 64}},
    "hy_v4_vl_text": {"qk_rope_head_dim": 64},
    "inkling2": {"vision_config": {"text_hidden_size": HIDDEN}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": HIDDEN}},
    "kolibri1": {"head_dim": 32},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "zaya": {"num_experts_per_tok": 1},
}

# The text model of multimodal configurations that name none by default.
_TEXT = {"kimi_k25": "deepseek_v3"}

_CLASSES = (
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)


def candidates() -> list[str]:
    """Model types whose configuration speaks of experts and that have a class with a language-model head."""
    found = []
    for model_type in sorted(CONFIG_MAPPING):
        if model_class(model_type) is None:
            continue
        try:
            said = str(CONFIG_MAPPING[model_type]().to_dict())
        except Exception:  # a configuration that cannot be made without arguments is no candidate
            continue
        if re.search(r"expert", said):
            found.append(model_type)
    return found


def model_class(model_type: str) -> Any:
    for mapping in _CLASSES:
        if name := mapping.get(model_type):
            return getattr(transformers, name if isinstance(name, str) else name[0], None)
    return None


def tiny_config(model_type: str, **changes: Any) -> Any:
    values = _values(CONFIG_MAPPING[model_type])
    if text := _TEXT.get(model_type):
        values["text_config"] = {"model_type": text, **_values(CONFIG_MAPPING[text])}
    _merge(values, _OWN.get(model_type, {}))
    _merge(values, changes)
    return CONFIG_MAPPING[model_type](**values)


def tiny_model(model_type: str, device: str = "cpu", **changes: Any) -> Any:
    """A random bfloat16 model; on "meta" without values."""
    torch.manual_seed(7)
    with torch.device(device):
        model = model_class(model_type)(tiny_config(model_type, **changes))
    if device == "cpu":
        model = model.to(torch.bfloat16)
        with torch.no_grad():
            for _, module in experts_modules(model):
                for parameter in module.parameters():
                    parameter.normal_(0.0, 0.05)
    return model


def experts_modules(model: Any) -> list[tuple[str, Any]]:
    """The modules that hold routed experts as stacked parameters, by name; shared experts are left out."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "down_proj", None), torch.nn.Parameter)
        and module.down_proj.dim() == 3
        and "shared" not in name
    ]


def rows_of(module: Any, expert: int) -> dict[str, torch.Tensor]:
    """gate, up, down of an expert as [out, in], biases as gate_bias ..., from transformers' stacked parameters.

    Independent of what is tested: it follows the flags that transformers sets on the module.
    """
    transposed = getattr(module, "is_transposed", "Llama4" in type(module).__name__)
    fused = getattr(module, "gate_up_proj", None)
    turn = (lambda matrix: matrix.T) if transposed else (lambda matrix: matrix)
    found = {"down": turn(module.down_proj[expert])}
    if fused is None:
        return {**found, "up": turn(module.up_proj[expert])}
    both, half = turn(fused[expert]), fused[expert].shape[1 if transposed else 0] // 2
    concatenated = getattr(module, "is_concatenated", True)
    gate, up = (slice(0, half), slice(half, None)) if concatenated else (slice(0, None, 2), slice(1, None, 2))
    found |= {"gate": both[gate], "up": both[up]}
    if getattr(module, "has_bias", False):
        bias = module.gate_up_proj_bias[expert]
        found |= {"gate_bias": bias[gate], "up_bias": bias[up], "down_bias": module.down_proj_bias[expert]}
    return found


def _values(kind: Any) -> dict[str, Any]:
    known = kind().to_dict()
    values = {
        key: value
        for key, value in _SIZES.items()
        if key in known or (key in kind.attribute_map and kind.attribute_map[key] not in _SIZES)
    }
    for key, sub in (getattr(kind, "sub_configs", None) or {}).items():
        model_type = sub.model_type if sub is not AutoConfig and hasattr(sub, "model_type") else None
        if model_type is None and isinstance(known.get(key), dict):
            model_type = known[key].get("model_type")
        chosen = sub
        if sub is AutoConfig:  # the mapping is lazy: only indexing loads a class, get() finds none
            chosen = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401
        if model_type and chosen:
            values[key] = {"model_type": model_type, **_values(chosen)}
    return values


def _merge(values: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value
