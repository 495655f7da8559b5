"""A checkpoint in GGUF: described from headers alone, experts dequantized one at a time by gguf-py's own formulas.

GGUF names are the same in every architecture: `blk.L.ffn_gate_exps.weight` is the stack of a layer's gate matrices,
`blk.L.ffn_gate.E.weight` one of them (older files), `ffn_gate_up_exps` gate rows above up rows. gguf-py is imported
where it is needed: it costs 0.3 s, and other checkpoints do without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ktplan.errors import BadInput
from ktplan.model.families import Family, family_of
from ktplan.model.fingerprint import Run, fingerprint, packed_runs, sampled_experts
from ktplan.model.header import TensorInfo, read_bytes
from ktplan.model.safetensors import display_name
from ktplan.model.source import Array, Biases, ExpertWeights
from ktplan.model.spec import ModelSpec

# llama.cpp's architecture to transformers' model_type (gguf-py's MODEL_ARCH_NAMES, llama.cpp's converter).
ARCHITECTURES = {
    "afmoe": "afmoe", "bailingmoe": "bailing_moe", "bailingmoe2": "bailing_moe_v2", "deepseek": "deepseek_v2",
    "deepseek2": "deepseek_v3", "deepseek2-ocr": "deepseek_ocr2", "dots1": "dots1", "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe", "gemma4": "gemma4_text", "glm-dsa": "glm_moe_dsa", "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss", "granitehybrid": "granitemoehybrid", "granitemoe": "granitemoe",
    "hunyuan-moe": "hunyuan_v1_moe", "jamba": "jamba", "kimi-linear": "kimi_linear", "lfm2moe": "lfm2_moe",
    "llada-moe": "qwen2_moe", "llama": "mixtral", "llama4": "llama4_text", "mimo2": "mimo_v2_flash",
    "minimax-m2": "minimax_m2", "mistral4": "mistral4", "nemotron_h_moe": "nemotron_h", "olmoe": "olmoe",
    "phimoe": "phimoe", "qwen2moe": "qwen2_moe", "qwen35moe": "qwen3_5_moe_text", "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next", "qwen3vlmoe": "qwen3_vl_moe", "step35": "step3p7",
}  # fmt: skip

_NAME = re.compile(r"blk\.(\d+)\.ffn_(gate_up|gate|up|down)(?:_exps|\.(\d+))\.(weight|bias)")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MISMATCH = "the file is damaged, or its metadata belongs to another model"
_EXTRA = {"projector", "clip", "mmproj"}  # companions of a multimodal model: no language model in them

Roles = dict[str, TensorInfo]


def gguf_files(path: Path) -> list[Path]:
    """The GGUF files that `path` stands for; none where it is another kind of checkpoint."""
    if path.is_file():
        if path.suffix == ".gguf" or _magic(path):
            return [path]
        return []
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return []
    return sorted(path.glob("*.gguf"))


def _magic(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix != ".safetensors" and file.read(4) == b"GGUF"


def open_gguf(path: Path, files: list[Path]) -> GgufSource:
    """Open a GGUF model: one file, any part of a split one, or a folder that holds one model.

    Everything is checked before this returns. Raises BadInput naming file, tensor and value.
    """
    from ktplan.model.gguf_header import read_gguf_header

    headers = [read_gguf_header(file) for file in _parts(path, files)]
    first = next((header for header in headers if "general.architecture" in header.values), None)
    if first is None:
        raise BadInput(f"{headers[0].file}: general.architecture is missing", hint="the first part is needed")
    count = first.values.get("split.count", len(headers))
    if count not in (0, len(headers)):
        raise BadInput(
            f"{first.file} says that it is one of {count} parts, {len(headers)} are there; others are missing",
            hint="put all parts into one folder under their own names",
        )
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                raise BadInput(
                    f"{name} is in {tensors[name].file} and in {info.file}",
                    hint="keep one model in the folder",
                )
            tensors[name] = info
    promised = first.values.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise BadInput(
            f"{first.file} promises {promised} tensors in all parts, there are {len(tensors)}",
            hint="download it again",
        )
    return GgufSource(path, first.values, tensors)


def _parts(path: Path, files: list[Path]) -> list[Path]:
    """All parts of the one model, in order."""
    if path.is_file():
        found = _PART.fullmatch(path.name)
        return _every_part(path.parent, found) if found else files
    models: dict[str, list[Path]] = {}
    for file in files:
        found = _PART.fullmatch(file.name)
        models.setdefault(found[1] if found else file.name, []).append(file)
    language = {
        stem: group for stem, group in models.items() if not any(word in stem.lower() for word in _EXTRA)
    }
    if len(language or models) > 1:
        raise BadInput(
            f"{path} holds several models: {', '.join(group[0].name for group in (language or models).values())}",
            hint="name the file",
        )
    group = next(iter((language or models).values()))
    found = _PART.fullmatch(group[0].name)
    return _every_part(path, found) if found else group


def _every_part(folder: Path, found: re.Match[str]) -> list[Path]:
    count = int(found[3])
    files = [folder / f"{found[1]}-{n:05d}-of-{found[3]}.gguf" for n in range(1, count + 1)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise BadInput(
            f"{folder}: {len(absent)} of {count} parts are missing: {', '.join(absent[:5])}",
            hint="download the missing files",
        )
    return files


class GgufSource:
    """A WeightSource over GGUF files."""

    def __init__(self, path: Path, values: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
        self._path, self._values, self._tensors = path, values, tensors
        self._arch = str(values["general.architecture"])
        self._stacks, self._singles = _classify(tensors)
        self._experts = self._integer("expert_count", default=0)
        if not self._experts or not (self._stacks or self._singles):
            raise BadInput(
                f"{path} is a dense model: it has no routed experts (architecture '{self._arch}')",
                hint="ktplan works on Mixture-of-Experts models",
            )
        self._family = self._find_family()
        self._layers = self._integer("block_count") - self._integer("nextn_predict_layers", default=0)
        self._hidden = self._integer("moe_latent_size", "embedding_length")
        self._intermediate = self._integer("expert_feed_forward_length", "feed_forward_length")
        held = sorted(set(self._stacks) | {layer for layer, _ in self._singles})
        self._moe_layers = tuple(layer for layer in held if layer < self._layers)
        self._names = self._inventory()

    @property
    def root(self) -> Path:
        return self._path if self._path.is_dir() else self._path.parent

    @cached_property
    def spec(self) -> ModelSpec:
        dense = [self._tensors[name] for name in self.dense_names()]
        experts = [self._tensors[name] for name in self._names]
        vocab = self._vocabulary()
        computed = self._activation()
        alpha, limit = self._family.activation_numbers(computed)
        facts = [
            self._arch,
            self._layers,
            self._moe_layers,
            self._experts,
            self._hidden,
            self._intermediate,
            vocab,
        ]
        return ModelSpec(
            name=str(self._values.get("general.name") or "")
            or display_name(self._path).removesuffix(".gguf"),
            family=self._family.name,
            model_type=self._arch,
            layers=self._layers,
            moe_layers=self._moe_layers,
            experts=self._experts,
            top_k=self._integer("expert_used_count"),
            shared_experts=self._shared(),
            hidden=self._hidden,
            moe_intermediate=self._intermediate,
            vocab=vocab,
            context=self._integer("context_length", default=0),
            activation=self._family.activation(computed),
            dtype=" + ".join(sorted({info.dtype for info in experts if not info.name.endswith(".bias")})),
            tied_embeddings="output.weight" not in self._tensors,
            fused=bool(self._stacks),
            dense_params=sum(prod(info.shape) for info in dense),
            expert_params=len(self._moe_layers) * self._experts * self._one_expert(),
            dense_bytes=sum(info.bytes for info in dense),
            expert_bytes=sum(info.bytes for info in experts),
            kv_bytes_per_token=self._kv_bytes(),
            experts_module=self._family.experts_module,
            expert_bias=any(name.endswith(".bias") for name in self._names),
            activation_alpha=alpha,
            activation_limit=limit,
            fingerprint=fingerprint(facts, dense, self._runs()),
        )

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        roles = self._roles(layer, expert)
        found = {role: self._read(info, expert) for role, info in roles.items() if not role.endswith("_bias")}
        if (both := found.pop("gate_up", None)) is not None:
            found |= {"gate": both[: self._intermediate], "up": both[self._intermediate :]}
        gate = found.get("gate", np.empty((0, self._hidden), np.float32))
        return ExpertWeights(gate, found["up"], found["down"], *self.expert_biases(layer, expert))

    def expert_biases(self, layer: int, expert: int) -> Biases:
        roles = self._roles(layer, expert)
        found = (roles.get(f"{role}_bias") for role in ("gate", "up", "down"))
        return Biases(*(None if info is None else self._read(info, expert) for info in found))

    def expert_names(self, layer: int, expert: int) -> dict[str, str]:
        names: dict[str, str] = {}
        for role, info in self._roles(layer, expert).items():
            if role == "gate_up":
                names |= dict.fromkeys(("gate", "up"), info.name)
            elif not role.endswith("_bias"):
                names[role] = info.name
        return names

    def dense_names(self) -> list[str]:
        return sorted(name for name in self._tensors if name not in self._names and not self._beyond(name))

    def beyond_names(self) -> list[str]:
        """Tensors of layers behind the model's own: multi-token prediction; left out everywhere."""
        return sorted(filter(self._beyond, self._tensors))

    def file_of(self, name: str) -> Path:
        return self._tensors[name].file

    def info(self, name: str) -> TensorInfo:
        """Type, shape and place of a tensor."""
        return self._tensors[name]

    def _roles(self, layer: int, expert: int) -> Roles:
        return self._stacks[layer] if layer in self._stacks else self._singles[layer, expert]

    def _runs(self) -> list[Run]:
        """Where samples of some experts lie, the same for stacks and single matrices; see `fingerprint`."""
        runs: list[Run] = []
        for layer in self._moe_layers:
            for expert in sampled_experts(self._experts):
                for role, info in sorted(self._roles(layer, expert).items()):
                    size = info.bytes // (self._experts if layer in self._stacks else 1)
                    start = info.start + (expert * size if layer in self._stacks else 0)
                    runs += packed_runs(info, start, size, 2 if "gate_up" in role else 1)
        return runs

    def _read(self, info: TensorInfo, expert: int) -> Array:
        stacked = not re.search(r"\.\d+\.(weight|bias)$", info.name)
        shape = info.shape[1:] if stacked else info.shape
        size = info.bytes // (info.shape[0] if stacked else 1)
        raw = read_bytes(info, info.start + (expert * size if stacked else 0), size)
        return _dequantize(raw, info.dtype, shape)

    def _integer(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self._values.get(f"{self._arch}.{key}")
            if isinstance(value, list) and value and len(set(value)) == 1:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            if value is not None and not isinstance(value, list):
                raise BadInput(
                    f"{self._path}: {self._arch}.{key} is {value!r}", hint="the metadata is damaged"
                )
        if default is None:
            raise BadInput(f"{self._path} lacks {self._arch}.{keys[-1]}", hint="the metadata is damaged")
        return default

    def _find_family(self) -> Family:
        model_type = ARCHITECTURES.get(self._arch)
        family = family_of(model_type) if model_type else None
        if family is None:
            found = sorted({re.sub(r"\d+", "N", name) for name in self._tensors if "_exps" in name})
            raise BadInput(
                f"{self._path}: architecture '{self._arch}' is not known; its expert-like tensors: "
                f"{', '.join(found[:8])}",
                hint="docs/models.md lists the known ones; ask for the family with this message",
            )
        return family

    def _inventory(self) -> dict[str, None]:
        """The names of all expert tensors, each checked."""
        leading = self._integer("leading_dense_block_count", default=0)
        missing = [n for n in range(leading, self._layers) if n not in self._moe_layers]
        step = self._integer("interleave_moe_layer_step", "moe_every_n_layers", default=1)
        if (
            leading
            and step == 1
            and self._arch != "nemotron_h_moe"
            and (missing or self._moe_layers[0] < leading)
        ):
            at = missing[0] if missing else self._moe_layers[0]
            raise BadInput(
                f"{self._path}: {self._arch}.leading_dense_block_count is {leading}, "
                f"the tensors of layer {at} disagree",
                hint=_MISMATCH,
            )
        names: dict[str, None] = {}
        for layer in self._moe_layers:
            for expert in range(1 if layer in self._stacks else self._experts):
                for info in self._check(layer, expert):
                    names[info.name] = None
        for layer, expert in self._singles:
            if expert >= self._experts:
                raise BadInput(
                    f"{self._path}: layer {layer} holds expert {expert}, {self._arch}.expert_count is {self._experts}",
                    hint=_MISMATCH,
                )
        return names

    def _check(self, layer: int, expert: int) -> list[TensorInfo]:
        stacked = layer in self._stacks
        roles = self._stacks[layer] if stacked else self._singles.get((layer, expert), {})
        wanted = {"down", "gate_up"} if "gate_up" in roles else {"gate", "up", "down"}
        if not self._family.gated:
            wanted = {"up", "down"}
        for role in sorted(wanted - set(roles)):
            name = f"blk.{layer}.ffn_{role}{'_exps' if stacked else f'.{expert}'}.weight"
            raise BadInput(
                f"{self._path}: {name} is missing (layer {layer}, expert {expert}, {role} projection)",
                hint="the download is incomplete",
            )
        for role, info in roles.items():
            self._check_shape(role, info, stacked)
        return list(roles.values())

    def _check_shape(self, role: str, info: TensorInfo, stacked: bool) -> None:
        rows = (
            self._hidden if role.startswith("down") else self._intermediate * (2 if "gate_up" in role else 1)
        )
        columns = self._intermediate if role == "down" else self._hidden
        shape = ((self._experts,) if stacked else ()) + (
            (rows,) if role.endswith("_bias") else (rows, columns)
        )
        if info.shape != shape:
            raise BadInput(
                f"{info.file}: {info.name} has shape {list(info.shape)}, the metadata asks for {list(shape)}",
                hint=_MISMATCH,
            )
        if not _readable(info.dtype):
            raise BadInput(
                f"{info.file}: {info.name} has type {info.dtype}, which cannot be dequantized",
                hint="give another quantization of the model",
            )

    def _one_expert(self) -> int:
        return sum(
            prod(info.shape) // (self._experts if self._moe_layers[0] in self._stacks else 1)
            for info in self._roles(self._moe_layers[0], 0).values()
        )

    def _vocabulary(self) -> int:
        tokens = self._values.get("tokenizer.ggml.tokens")
        count = getattr(tokens, "count", None) or (len(tokens) if isinstance(tokens, list) else 0)
        embedding = self._tensors.get("token_embd.weight")
        return self._integer("vocab_size", default=embedding.shape[0] if embedding else int(count))

    def _shared(self) -> int:
        there = any("_shexp" in name for name in self._tensors)
        return self._integer("expert_shared_count", default=0) or int(there)

    def _activation(self) -> dict[str, Any]:
        """What a config.json would say of what an expert computes."""
        act = {"gemma4": "gelu_pytorch_tanh", "nemotron_h_moe": "relu2"}.get(self._arch, "silu")
        limited = self._values.get(f"{self._arch}.swiglu_clamp_exp")
        return {"hidden_act": act, "swiglu_limit": limited}

    def _kv_bytes(self) -> int:
        if rank := self._integer("attention.kv_lora_rank", default=0):
            return (rank + self._integer("rope.dimension_count", default=64)) * 2 * self._layers
        heads = self._values.get(f"{self._arch}.attention.head_count_kv", 0)
        each = heads if isinstance(heads, list) else [heads] * self._layers
        head_count = max(1, self._integer("attention.head_count", default=1))
        default = self._integer("embedding_length") // head_count
        length = self._integer("attention.key_length", default=default)
        return (
            sum(each[: self._layers]) * (length + self._integer("attention.value_length", default=length)) * 2
        )

    def _beyond(self, name: str) -> bool:
        found = re.match(r"blk\.(\d+)\.", name)
        return found is not None and int(found[1]) >= self._layers


def _classify(tensors: Mapping[str, TensorInfo]) -> tuple[dict[int, Roles], dict[tuple[int, int], Roles]]:
    """Stacks by layer, and single matrices by layer and expert: role ("gate", "gate_bias" ...) to tensor."""
    stacks: dict[int, Roles] = {}
    singles: dict[tuple[int, int], Roles] = {}
    for name, info in tensors.items():
        if found := _NAME.fullmatch(name):
            role = found[2] + ("_bias" if found[4] == "bias" else "")
            if found[3] is None:
                stacks.setdefault(int(found[1]), {})[role] = info
            else:
                singles.setdefault((int(found[1]), int(found[3])), {})[role] = info
    return stacks, singles


def _readable(dtype: str) -> bool:
    from gguf.quants import _type_traits  # the types that dequantize() has a formula for

    return dtype in {"F32", "F16"} | {kind.name for kind in _type_traits}


def _dequantize(raw: bytes, dtype: str, shape: tuple[int, ...]) -> Array:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[dtype]
    if dtype in ("F32", "F16"):
        return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32).reshape(shape)
    rows = np.frombuffer(raw, np.uint8).reshape(*shape[:-1], -1)
    with np.errstate(
        all="ignore"
    ):  # damaged scales give infinities, which whoever uses the weights has to refuse
        found: Array = dequantize(rows, kind).astype(np.float32, copy=False)
    return np.ascontiguousarray(found.reshape(shape))
