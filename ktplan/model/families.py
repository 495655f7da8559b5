"""What each architecture calls its routed experts, and what config.json says about them.

The names come from data/architectures.json, which tools/generate_architectures.py derives from transformers' own
checkpoint conversion; the few architectures that transformers lacks or spells otherwise are ALIASES. Configuration keys
mean the same in every architecture that uses them, so one rule a key suffices; names are the cross-check.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ktplan.errors import BadInput

Config = Mapping[str, Any]

_TABLE = Path(__file__).resolve().parent.parent / "data" / "architectures.json"

# Remote-code architectures and earlier spellings, by the architecture whose names and keys they share.
ALIASES = {
    "bailing_moe": "qwen2_moe",
    "bailing_moe_v2": "bailing_hybrid",
    "bailing_moe_linear": "bailing_hybrid",
    "deepseek_vl_v2": "deepseek_v2",
    "ernie4_5_moe_text": "ernie4_5_moe",
    "glm5_next_text": "glm5_next",
    "hunyuan": "hunyuan_v1_moe",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "llama4_moe": "llama4_text",
    "minimax_m3": "minimax_m3_vl_text",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
    "step3p5": "step3p7",
}

# Architectures with routed experts that are of another kind than one stack of gated MLPs.
UNREADABLE = {
    "diffusion_gemma": "its experts lie in an encoder and in a decoder",
    "doge": "its experts are rows of an embedding, not MLPs",
    "ernie4_5_vl_moe": "its text and vision experts have different sizes",
    "nllb-moe": "it is an encoder-decoder model, its experts have no gate",
    "switch_transformers": "it is an encoder-decoder model, its experts have no gate",
}

_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to store the experts of a layer: role ("gate", "up", "down", "gate_up") to what follows `layers.N.`.

    A name with {expert} is one matrix, a name without is the stack of all. `interleaved`: gate rows are the even ones
    of gate_up, up rows the odd ones; otherwise gate is the first half. `turned`: roles whose matrices are transposed
    against the others'.
    """

    roles: Mapping[str, str]
    interleaved: bool = False
    turned: frozenset[str] = frozenset()

    @property
    def fused(self) -> bool:
        """Whether a tensor holds all experts of a layer."""
        return "{expert}" not in self.roles["down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one architecture stores and computes its routed experts."""

    name: str  # the model_type whose record this is
    experts_module: str  # transformers' module: "model.layers.{layer}.mlp.experts"
    forms: tuple[Form, ...]
    prefixes: tuple[str, ...]  # what transformers writes before `layers.`
    gate: str  # "" is act(gate) * up; else the name of what the experts compute instead
    gated: bool

    @property
    def names(self) -> dict[str, str]:
        """Projection to the name, with {layer} and {expert}, of the tensor that holds one expert's matrix."""
        form = next(form for form in self.forms if not form.fused)
        before = self.experts_module.split("{layer}.")[0]
        return {role: f"{before}{{layer}}.{tail}.weight" for role, tail in form.roles.items()}

    def activation(self, config: Config) -> str:
        """The name of what an expert computes from gate and up."""
        act = next((config[key] for key in _ACTIVATIONS if isinstance(config.get(key), str)), "silu")
        limited = any(config.get(key) for key in ("swiglu_limit", "swiglu_limits"))
        if self.gate == "swiglu-clamped" and not limited:
            return str(act)
        if not self.gated:
            return f"{act}-ungated"
        return self.gate or str(act)

    def activation_numbers(self, config: Config) -> tuple[float | None, float | None]:
        """Alpha and limit of what `activation` names; None where it has none, or none for the whole model.

        gpt-oss's are 1.702 and 7 where its config.json does not say.
        """
        name = self.activation(config)
        if not name.startswith("swiglu-"):
            return None, None
        oai = name == "swiglu-oai"
        limit = config.get("swiglu_limit")
        if limit is None and oai:
            limit = 7.0
        alpha = float(config.get("swiglu_alpha") or 1.702) if oai else None
        return alpha, float(limit) if isinstance(limit, int | float) else None


_ROLES = ("gate", "up", "gate_up", "down")
_ACTIVATIONS = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")


def family_of(model_type: str) -> Family | None:
    """The record for a config.json's `model_type` or a spec's `family`, or None.

    Raises BadInput with the reason for an architecture whose experts are of another kind.
    """
    if model_type in UNREADABLE:
        raise BadInput(
            f"model_type '{model_type}' cannot be read: {UNREADABLE[model_type]}",
            hint="docs/models.md lists what is read",
        )
    table = architectures()
    return next((_family(name) for name in (model_type, ALIASES.get(model_type)) if name in table), None)


def family_in(config: Config) -> Family | None:
    """The record for a config.json: by its model_type, else by that of the text model nested in it."""
    text = text_config(config)
    said, inner = str(config.get("model_type")), str(text.get("model_type"))
    if (family := family_of(said)) is not None or text is config:
        return family
    family = family_of(inner)
    return _nested(family) if family is not None else None


def text_config(config: Config) -> Config:
    """The part of config.json that describes the language model."""
    if isinstance(
        inner := config.get("ffn_config"), Mapping
    ):  # DBRX: "hidden_size" in there is not the model's
        return {
            **{key: inner[key] for key in inner if key in (*_TOP_K, *_EXPERTS, "ffn_hidden_size")},
            **config,
        }
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping) and (any(inner.get(k) for k in _EXPERTS) or _holds_text(inner)):
            return text_config(inner)
    return config


def _holds_text(config: Config) -> bool:
    return any(isinstance(config.get(key), Mapping) for key in _NESTED)


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """The records of data/architectures.json by model_type."""
    body = json.loads(_TABLE.read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = body["architectures"]
    return found


@cache
def _family(name: str) -> Family:
    entry, forms = architectures()[name], []
    for said in entry["forms"]:
        roles = {role: text for role, text in said.items() if role in _ROLES}
        turned = frozenset(said.get("turned", ()))
        forms.append(Form(roles=roles, interleaved=bool(said.get("interleaved")), turned=turned))
    gated = not {"gate", "gate_up"}.isdisjoint(forms[-1].roles)
    # Quantized derivatives of stacked models are stored one matrix an expert, under the stack's own name.
    tail = entry["module"].split("{layer}.")[1]
    single = {
        role: f"{tail}.{{expert}}.{role}_proj" for role in ("gate", "up", "down") if gated or role != "gate"
    }
    if all(form.roles != single for form in forms):
        forms.append(Form(roles=single))
    return Family(
        name=name,
        experts_module=entry["module"],
        forms=tuple(forms),
        prefixes=tuple(entry["prefixes"]),
        gate=entry["activation"] + ("+post-norm" if entry["post_norm"] else ""),
        gated=gated,
    )


def _nested(family: Family) -> Family:
    """The same family inside a multimodal model, as transformers nests it."""
    tail = family.experts_module.split("layers.{layer}.")[1]
    return replace(family, experts_module=f"model.language_model.layers.{{layer}}.{tail}")


# ---------------------------------------------------------------- configuration keys

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
_MOST_LAYERS = 10_000
_CONTEXT = ("max_position_embeddings", "model_max_length", "max_seq_len", "seq_length")


def integer(config: Config, *keys: str, default: int | None = None) -> int:
    """The first of `keys` that config.json has; a list of equal numbers counts as one.

    Raises BadInput naming them all where none is a whole number.
    """
    for key in keys:
        value = config.get(key)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        if value is not None:
            raise BadInput(
                f"config.json: {key} is {value!r}, a whole number is expected", hint="check config.json"
            )
    if default is None:
        raise BadInput(f"config.json lacks {' or '.join(keys)}", hint="is this the model's own config.json?")
    return default


def layers(config: Config) -> int:
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    default = len(kinds) if isinstance(kinds, (list, str)) else None
    count = integer(config, "num_hidden_layers", "num_layers", "n_layers", default=default)
    if count > _MOST_LAYERS:
        raise BadInput(f"config.json counts {count:,} layers; no model has so many", hint="check config.json")
    return count


def _numbers(config: Config, key: str) -> set[int]:
    """A list of layer numbers, or text like "1,2,3"; absent and null are none. Raises BadInput for anything else."""
    said = config.get(key) or ()
    entries = said.split(",") if isinstance(said, str) else said
    try:
        return {int(entry) for entry in entries}
    except (TypeError, ValueError):
        raise BadInput(
            f"config.json: {key} is {said!r}, a list of layer numbers is expected", hint="check config.json"
        ) from None


def experts(config: Config) -> int:
    """Routed experts in each MoE layer; 0 where config.json does not speak of experts."""
    return integer(config, *_EXPERTS, default=0)


def top_k(config: Config) -> int:
    return integer(config, *_TOP_K)


def hidden(config: Config) -> int:
    """The width of the experts' inputs."""
    own = next((key for key in ("moe_hidden_size", "moe_latent_size") if config.get(key)), "hidden_size")
    return integer(config, own, "d_model")


def intermediate(config: Config) -> int:
    return integer(config, *_INTERMEDIATE)


def context(config: Config) -> int:
    return integer(config, *_CONTEXT, default=0)


def shared_experts(config: Config) -> int:
    """Shared experts in each MoE layer, as far as config.json tells."""
    count = integer(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)
    sizes = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
    return count or int(any(config.get(key) for key in sizes))


def moe_layers(config: Config) -> tuple[int, ...]:
    """The layers that config.json makes MoE: by the first of the known keys that it has, else every layer."""
    every = tuple(range(layers(config)))
    for key, rule in _RULES:
        said = config.get(key)
        if said is not None and (key != "layers_block_type" or "moe" in said):
            chosen = rule(config)
            return tuple(n for n in every if chosen(n))
    return every


Chooser = Callable[[int], bool]


def _typed(key: str) -> Callable[[Config], Chooser]:
    dense = {"dense", "mlp", "linear_attention", "full_attention", "sliding_attention", "mamba", "attention"}

    def rule(config: Config) -> Chooser:
        kinds = config[key]
        if not isinstance(kinds, list):
            raise BadInput(
                f"config.json: {key} is {kinds!r}, a list with one word a layer is expected",
                hint="check config.json",
            )
        return lambda n: n < len(kinds) and kinds[n] not in dense

    return rule


def _pattern(config: Config) -> Chooser:
    # Nemotron-H spells its layers M (Mamba), * (attention), - (MLP), E (experts).
    pattern = config["hybrid_override_pattern"]
    return lambda n: pattern[n : n + 1] == "E"


def _listed(key: str) -> Callable[[Config], Chooser]:
    def rule(config: Config) -> Chooser:
        chosen = _numbers(config, key)
        return lambda n: n in chosen

    return rule


def _llama_step(config: Config) -> Chooser:
    step = integer(config, "interleave_moe_layer_step")
    return lambda n: bool(step) and (n + 1) % step == 0


def _frequency(config: Config) -> Chooser:
    first, every = integer(config, "first_k_dense_replace", default=0), config.get("moe_layer_freq", 1)
    if isinstance(every, list):  # one flag a layer (MiMo, MiniMax)
        return lambda n: n < len(every) and bool(every[n])
    step = integer(config, "moe_layer_freq", default=1)
    return lambda n: n >= first and bool(step) and n % step == 0


def _interval(config: Config) -> Chooser:
    start, step = integer(config, "moe_layer_start_index"), integer(config, "moe_layer_interval", default=1)
    said = config.get("moe_layer_end_index")
    end = said if isinstance(said, int) and said >= 0 else layers(config) - 1
    return lambda n: start <= n <= end and bool(step) and (n + 1) % step == 0


def _period(config: Config) -> Chooser:
    period, offset = integer(config, "expert_layer_period"), integer(config, "expert_layer_offset", default=0)
    return lambda n: bool(period) and n % period == offset


def _after(key: str) -> Callable[[Config], Chooser]:
    def rule(config: Config) -> Chooser:
        first = integer(config, key)
        return lambda n: n >= first

    return rule


def _qwen(config: Config) -> Chooser:
    # Qwen counts from one: with step 2 the layers 1, 3, 5 ... are MoE; null means no exception.
    step, dense = integer(config, "decoder_sparse_step", default=1), _numbers(config, "mlp_only_layers")
    return lambda n: bool(step) and (n + 1) % step == 0 and n not in dense


_RULES: tuple[tuple[str, Callable[[Config], Chooser]], ...] = (
    ("mlp_layer_types", _typed("mlp_layer_types")),
    ("layers_block_type", _typed("layers_block_type")),
    ("hybrid_override_pattern", _pattern),
    ("moe_layers_enum", _listed("moe_layers_enum")),
    ("moe_layers", _listed("moe_layers")),
    ("interleave_moe_layer_step", _llama_step),
    ("moe_layer_start_index", _interval),
    ("expert_layer_period", _period),
    ("first_k_dense_replace", _frequency),
    ("moe_layer_freq", _frequency),
    ("num_dense_layers", _after("num_dense_layers")),
    ("moe_layer_num_skipped", _after("moe_layer_num_skipped")),
    ("decoder_sparse_step", _qwen),
    ("mlp_only_layers", _qwen),
)


_NO_CACHE = (
    "linear",
    "mamba",
    "conv",
    "recurrent",
    "moe",
    "mlp",
)  # in the names of layers without a growing cache


def kv_bytes(config: Config) -> int:
    """Bytes of a token's cache over all layers, 2 bytes an element; layers of linear attention keep no such cache."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    counted = layers(config)
    if isinstance(kinds, list):
        counted = sum(not any(word in str(kind) for word in _NO_CACHE) for kind in kinds[:counted])
    if integer(config, "kv_lora_rank", default=0):
        # Latent attention caches one compressed vector and the rotary part of the key (DeepSeek-V2, section 2.1).
        return (integer(config, "kv_lora_rank") + integer(config, "qk_rope_head_dim")) * 2 * counted
    heads = integer(config, "num_attention_heads", "n_heads", default=0)
    if not heads:
        return 0
    width = integer(config, "hidden_size", "d_model")
    head_dim = integer(config, "head_dim", "kv_channels", default=width // heads)
    return 2 * integer(config, "num_key_value_heads", default=heads) * head_dim * 2 * counted
