"""What a model takes on the GPU beside routed experts: dense weights by kind, the cache by attention, workspace.

Cache bytes of a token and layer: 2 x key-value heads x head size x width for multi-head and grouped attention; (latent
rank + rotary part) x width for latent attention (DeepSeek-V2, section 2.1); at most the window for sliding layers; a
constant state for each sequence in linear layers (Qwen3-Next's gated delta rule: value heads x key size x value size).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from ktplan.errors import BadInput
from ktplan.model import ModelSpec

_WIDTH: Final = 2  # bytes of a cached value
_STATE_WIDTH: Final = 4  # linear attention keeps its state in float32
_CHUNK: Final = 512  # prompt tokens at once


class Line(NamedTuple):
    """Bytes with a word for a person."""

    what: str
    bytes: int
    remark: str = ""


class _Headers(Protocol):
    """A weight source that knows its tensors."""

    def dense_names(self) -> list[str]: ...

    def info(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Dense weights by kind, and by layer for models on several GPUs."""

    lines: tuple[Line, ...]
    by_layer: Mapping[int, int]  # layer to bytes
    embedding: int
    head: int  # output layer and last norm; 0 for the part that is tied to the embedding

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)


def anatomy(source: _Headers) -> Anatomy:
    """Sorted by tensor names, which the families share in spirit."""
    kinds = {"attention": 0, "shared experts": 0, "routers": 0, "dense feed-forward": 0, "norms and other": 0}
    by_layer: dict[int, int] = {}
    embedding = head = 0
    for name in source.dense_names():
        size = int(source.info(name).bytes)
        found = re.search(r"\b(?:layers|blk)\.(\d+)\.", name)
        if found is None:
            if "embed" in name:
                embedding += size
            else:
                head += size
            continue
        layer = int(found.group(1))
        by_layer[layer] = by_layer.get(layer, 0) + size
        kinds[_kind(name)] += size
    lines = [Line("embedding", embedding), Line("output layer", head)]
    lines += [Line(kind, size) for kind, size in kinds.items()]
    return Anatomy(
        lines=tuple(line for line in lines if line.bytes), by_layer=by_layer, embedding=embedding, head=head
    )


def _kind(name: str) -> str:
    if "attn" in name or "attention" in name:
        return "attention"
    if "shared_expert" in name or "_shexp" in name:
        return "shared experts"
    if re.search(r"\.(gate|router)\.(weight|bias|e_score)|\.gate\.", name):
        return "routers"
    return "dense feed-forward" if ".mlp." in name or "_proj" in name else "norms and other"


class Cache(NamedTuple):
    """The cache of `batch` sequences of `context` tokens, in bytes."""

    bytes: int
    per_token: int  # of one more token of one sequence, where windows are full: what grows
    kind: str  # for people: "grouped-query, 2 of 4 heads"


def cache(config: Mapping[str, Any], layers: int, context: int, batch: int = 1, width: int = _WIDTH) -> Cache:
    """From config.json (a nested text_config is unwrapped). Raises BadInput for counts that are no numbers."""
    config = config.get("text_config") or config
    kinds = _layer_kinds(config, layers)
    full, sliding, linear = (kinds.count(kind) for kind in ("full", "sliding", "linear"))
    per_layer, word = _per_token(config, width)
    window = _int(config, "sliding_window", 0) or 0
    held = full * per_layer * context + sliding * per_layer * min(context, window or context)
    state = linear * _linear_state(config)
    words = [word]
    if sliding:
        words.append(f"{sliding} of {layers} layers within {window:,} tokens")
    if linear:
        words.append(f"{linear} of {layers} layers with a constant state")
    grows = full * per_layer + (sliding * per_layer if context < window else 0)
    return Cache(batch * (held + state), grows, ", ".join(words))


def workspace(spec: ModelSpec, batch: int = 1, chunk: int = _CHUNK) -> int:
    """Activations of a prompt chunk and logits: residual stream, attention, expert inputs and outputs in 16 bits."""
    tokens = max(chunk, batch)
    return 2 * tokens * (8 * spec.hidden + 3 * spec.top_k * spec.moe_intermediate) + 4 * batch * spec.vocab


def _layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    names = config.get("layer_types")
    if isinstance(names, list) and len(names) == layers:
        words = {"sliding_attention": "sliding", "chunked_attention": "sliding", "linear_attention": "linear"}
        return [words.get(str(name), "full") for name in names]
    every = config.get("full_attention_interval")
    if isinstance(every, int) and every > 1 and "linear_num_value_heads" in config:
        return ["full" if (layer + 1) % every == 0 else "linear" for layer in range(layers)]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        first = _int(config, "max_window_layers", 0) if "use_sliding_window" in config else 0
        return ["sliding" if layer >= (first or 0) else "full" for layer in range(layers)]
    return ["full"] * layers


def _per_token(config: Mapping[str, Any], width: int) -> tuple[int, str]:
    if config.get("kv_lora_rank"):
        rank, rope = _int(config, "kv_lora_rank"), _int(config, "qk_rope_head_dim")
        return (rank + rope) * width, f"latent attention, {rank} + {rope} values a token and layer"
    heads = _int(config, "num_attention_heads")
    kv_heads = _int(config, "num_key_value_heads", heads)
    size = _int(config, "head_dim", 0) or _int(config, "hidden_size") // heads
    word = "multi-head" if kv_heads == heads else "multi-query" if kv_heads == 1 else "grouped-query"
    return 2 * kv_heads * size * width, f"{word} attention, {kv_heads} x {size} keys and values"


def _linear_state(config: Mapping[str, Any]) -> int:
    values, keys = _int(config, "linear_num_value_heads", 0), _int(config, "linear_num_key_heads", 0)
    key_size, value_size = _int(config, "linear_key_head_dim", 0), _int(config, "linear_value_head_dim", 0)
    kernel = _int(config, "linear_conv_kernel_dim", 4)
    convolution = (2 * keys * key_size + values * value_size) * kernel  # transformers keeps as many columns
    return values * key_size * value_size * _STATE_WIDTH + convolution * _WIDTH


def _int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadInput(
            f"config.json: {key} is {value!r}, a whole number is expected", hint="check config.json"
        )
    return value
