"""One record a model family: which config keys say what, and what its expert tensors are called.

A new family is a record here and nothing elsewhere. Names are those of the published checkpoints and of what
transformers 5 writes when it saves the fused form it keeps in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ktplan.errors import BadInput

Config = Mapping[str, Any]

_QWEN_NAMES = {
    "gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}


def integer(config: Config, *keys: str, default: int | None = None) -> int:
    """The first of `keys` that config.json has. Raises BadInput naming them all where none is a positive integer."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        if value is not None:
            raise BadInput(
                f"config.json: {key} is {value!r}, a whole number is expected", hint="check config.json"
            )
    if default is None:
        raise BadInput(f"config.json lacks {' or '.join(keys)}", hint="is this the model's own config.json?")
    return default


def _every_layer(config: Config) -> tuple[int, ...]:
    return tuple(range(integer(config, "num_hidden_layers")))


def _qwen_moe_layers(config: Config) -> tuple[int, ...]:
    # Qwen counts from one: with step 2 the layers 1, 3, 5 ... are MoE; null means no exception.
    step = integer(config, "decoder_sparse_step", default=1)
    dense = set(config.get("mlp_only_layers") or ())
    return tuple(n for n in _every_layer(config) if step and (n + 1) % step == 0 and n not in dense)


def _deepseek_moe_layers(config: Config) -> tuple[int, ...]:
    first = integer(config, "first_k_dense_replace", default=0)
    every = integer(config, "moe_layer_freq", default=1)
    return tuple(n for n in _every_layer(config) if n >= first and n % every == 0)


def _grouped_kv_bytes(config: Config) -> int:
    heads = integer(config, "num_attention_heads")
    head_dim = integer(config, "head_dim", default=integer(config, "hidden_size") // heads)
    kv_heads = integer(config, "num_key_value_heads", default=heads)
    return 2 * kv_heads * head_dim * 2 * integer(config, "num_hidden_layers")


def _latent_kv_bytes(config: Config) -> int:
    # Latent attention caches one compressed vector and the rotary part of the key (DeepSeek-V2 paper, section 2.1).
    per_layer = integer(config, "kv_lora_rank") + integer(config, "qk_rope_head_dim")
    return per_layer * 2 * integer(config, "num_hidden_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read one family of checkpoints."""

    name: str
    model_types: tuple[str, ...]
    names: Mapping[str, str] = field(
        default_factory=lambda: dict(_QWEN_NAMES)
    )  # projection -> tensor, one an expert
    # The module and the two tensors that transformers 5 keeps: gate_up [E, 2I, H] (gate rows first), down [E, H, I].
    experts_module: str = "model.layers.{layer}.mlp.experts"
    expert_keys: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    intermediate_keys: tuple[str, ...] = ("moe_intermediate_size",)
    moe_layers: Callable[[Config], tuple[int, ...]] = _every_layer
    shared_experts: Callable[[Config], int] = lambda config: 0
    kv_bytes: Callable[[Config], int] = _grouped_kv_bytes

    @property
    def fused_names(self) -> dict[str, str]:
        """Projection to the name, with {layer}, of the fused tensor that holds it."""
        gate_up, down = f"{self.experts_module}.gate_up_proj", f"{self.experts_module}.down_proj"
        return {"gate": gate_up, "up": gate_up, "down": down}


FAMILIES: tuple[Family, ...] = (
    Family(name="qwen3_moe", model_types=("qwen3_moe",), moe_layers=_qwen_moe_layers),
    Family(
        name="qwen2_moe",
        model_types=("qwen2_moe",),
        moe_layers=_qwen_moe_layers,
        shared_experts=lambda config: int(bool(config.get("shared_expert_intermediate_size"))),
    ),
    Family(
        name="mixtral",
        model_types=("mixtral",),
        names={
            "gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
            "up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
            "down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
        },
        expert_keys=("num_local_experts", "num_experts"),
        intermediate_keys=("intermediate_size",),
    ),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3",),
        expert_keys=("n_routed_experts", "num_experts", "num_local_experts"),
        moe_layers=_deepseek_moe_layers,
        shared_experts=lambda config: integer(config, "n_shared_experts", default=0),
        kv_bytes=_latent_kv_bytes,
    ),
    Family(
        name="olmoe",
        model_types=("olmoe",),
        intermediate_keys=("moe_intermediate_size", "intermediate_size"),
    ),
)


def family_of(model_type: str) -> Family | None:
    """The record for config.json's `model_type`, or None."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
