"""A checkpoint in safetensors: found, checked and described from headers; experts read one at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ktplan.artifact import read_json_object
from ktplan.errors import BadInput
from ktplan.model.families import FAMILIES, Family, family_of, integer
from ktplan.model.header import ITEM_BYTES, TensorInfo, read_header, refuse_lfs_pointer
from ktplan.model.source import PROJECTIONS, Array, ExpertWeights, Place
from ktplan.model.spec import ModelSpec

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_SAMPLE_BYTES = 64  # of each dense tensor, into the fingerprint


def read_spec(path: Path) -> ModelSpec:
    """Describe the model at `path` from its headers alone. Raises BadInput as `open_source` does."""
    return open_source(path).spec


def open_source(path: Path) -> SafetensorsSource:
    """Open a folder with config.json and safetensors, or one .safetensors file with config.json beside it.

    Everything is checked before this returns: files present and whole, every expert there with its right shape,
    config and names in agreement. Raises BadInput naming the file, tensor and value otherwise.
    """
    root = path if path.is_dir() else path.parent
    config = _read_config(root, path)
    family = _family(config, root)
    tensors = _tensors(path, root)
    return SafetensorsSource(root, config, family, tensors)


class SafetensorsSource:
    """A WeightSource over safetensors shards, one tensor an expert or fused."""

    def __init__(
        self, root: Path, config: Mapping[str, Any], family: Family, tensors: Mapping[str, TensorInfo]
    ) -> None:
        self._root, self._config, self._family, self._tensors = root, config, family, tensors
        self._layers = integer(config, "num_hidden_layers")
        self._moe_layers = family.moe_layers(config)
        self._experts = integer(config, *family.expert_keys)
        self._hidden = integer(config, "hidden_size")
        self._intermediate = integer(config, *family.intermediate_keys)
        self._expert_tensors = self._inventory()

    @property
    def root(self) -> Path:
        return self._root

    @cached_property
    def spec(self) -> ModelSpec:
        dense = [self._tensors[name] for name in self.dense_names()]
        experts = [self._tensors[name] for name in self._expert_tensors]
        config = self._config
        return ModelSpec(
            name=_display_name(self._root),
            family=self._family.name,
            model_type=config["model_type"],
            layers=self._layers,
            moe_layers=self._moe_layers,
            experts=self._experts,
            top_k=integer(config, "num_experts_per_tok"),
            shared_experts=self._family.shared_experts(config),
            hidden=self._hidden,
            moe_intermediate=self._intermediate,
            vocab=integer(config, "vocab_size"),
            context=integer(config, "max_position_embeddings"),
            activation=str(config.get("hidden_act", "silu")),
            dtype=_DTYPES[experts[0].dtype],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            fused=self._fused,
            dense_params=sum(prod(tensor.shape) for tensor in dense),
            expert_params=sum(prod(tensor.shape) for tensor in experts),
            dense_bytes=sum(tensor.bytes for tensor in dense),
            expert_bytes=sum(tensor.bytes for tensor in experts),
            kv_bytes_per_token=self._family.kv_bytes(config),
            experts_module=self._family.experts_module,
            fingerprint=self._fingerprint(dense, experts),
        )

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        names = self.expert_names(layer, expert)
        if not self._fused:
            return ExpertWeights(
                *(self._read(self._tensors[names[projection]]) for projection in PROJECTIONS)
            )
        gate_up = self._read(self._tensors[names["gate"]], expert)
        down = self._read(self._tensors[names["down"]], expert)
        return ExpertWeights(gate_up[: self._intermediate], gate_up[self._intermediate :], down)

    def expert_places(self, layer: int, expert: int) -> tuple[Place, Place, Place] | None:
        """Where gate, up and down lie: gate and up of a fused tensor are its first and second half."""
        infos = [self._tensors[name] for name in self.expert_names(layer, expert).values()]
        places = []
        for number, info in enumerate(infos):
            rows, columns = (
                (self._hidden, self._intermediate) if number == 2 else (self._intermediate, self._hidden)
            )
            start = info.start
            if self._fused:
                start += expert * (info.bytes // self._experts)
                start += rows * columns * ITEM_BYTES[info.dtype] if number == 1 else 0
            places.append(Place(info.file, start, info.dtype, rows, columns))
        return places[0], places[1], places[2]

    def expert_names(self, layer: int, expert: int) -> dict[str, str]:
        names = self._family.fused_names if self._fused else self._family.names
        return {projection: name.format(layer=layer, expert=expert) for projection, name in names.items()}

    def dense_names(self) -> list[str]:
        routed = set(self._expert_tensors)
        return sorted(name for name in self._tensors if name not in routed and not self._beyond(name))

    def beyond_names(self) -> list[str]:
        """Tensors of layers that the config does not count: multi-token prediction; left out everywhere."""
        return sorted(filter(self._beyond, self._tensors))

    def file_of(self, name: str) -> Path:
        return self._tensors[name].file

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor."""
        return self._tensors[name]

    @cached_property
    def _fused(self) -> bool:
        down = self._family.fused_names["down"]
        return any(down.format(layer=layer) in self._tensors for layer in self._moe_layers)

    def _beyond(self, name: str) -> bool:
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return found is not None and int(found.group(1)) >= self._layers

    def _inventory(self) -> list[str]:
        """The names of all routed expert tensors, each checked; config and names must agree on what is MoE."""
        if not self._moe_layers or not self._experts:
            raise _dense_model(self._root)
        hidden, inner, count = self._hidden, self._intermediate, self._experts
        inner_by_hidden: tuple[int, ...] = (count, 2 * inner, hidden) if self._fused else (inner, hidden)
        hidden_by_inner: tuple[int, ...] = (count, hidden, inner) if self._fused else (hidden, inner)
        shapes = {"gate": inner_by_hidden, "up": inner_by_hidden, "down": hidden_by_inner}
        names: dict[str, None] = {}
        for layer in self._moe_layers:
            for expert in range(1 if self._fused else count):
                for projection, name in self.expert_names(layer, expert).items():
                    self._check(name, shapes[projection], layer, expert, projection)
                    names[name] = None
        self._refuse_uncounted(names)
        return list(names)

    def _check(self, name: str, shape: tuple[int, ...], layer: int, expert: int, projection: str) -> None:
        info = self._tensors.get(name)
        if info is None:
            raise BadInput(
                f"{self._root}: {name} is missing (layer {layer}, expert {expert}, {projection} projection)",
                hint="the download is incomplete, or config.json belongs to another model",
            )
        if info.shape != shape:
            raise BadInput(
                f"{info.file}: {name} has shape {list(info.shape)}, config.json asks for {list(shape)}",
                hint="config.json and weights belong to different models",
            )
        if info.dtype not in _DTYPES:
            raise BadInput(
                f"{info.file}: {name} is stored as {info.dtype}; experts are read from {', '.join(_DTYPES)}",
                hint="give the bfloat16 version of the model",
            )

    def _refuse_uncounted(self, counted: Mapping[str, None]) -> None:
        forms = [*self._family.names.values(), *self._family.fused_names.values()]
        pattern = "|".join(re.sub(r"\\\{(layer|expert)\\\}", r"\\d+", re.escape(form)) for form in forms)
        for name in self._tensors:
            if name not in counted and not self._beyond(name) and re.fullmatch(pattern, name):
                raise BadInput(
                    f"{self._tensors[name].file}: {name} is a routed expert that config.json does not count "
                    f"(MoE layers {self._moe_layers[0]}-{self._moe_layers[-1]}, {self._experts} experts each)",
                    hint="config.json and weights belong to different models",
                )

    def _read(self, info: TensorInfo, index: int | None = None) -> Array:
        """A whole tensor, or entry `index` of its first axis, as float32. Reads just those bytes."""
        shape = info.shape if index is None else info.shape[1:]
        size = info.bytes if index is None else info.bytes // info.shape[0]
        with info.file.open("rb") as file:
            file.seek(info.start + (index or 0) * size)
            raw = file.read(size)
        if len(raw) != size:
            raise BadInput(
                f"{info.file} became shorter while it was read ({info.name})", hint="check the disk"
            )
        return widen(raw, info.dtype).reshape(shape)

    def _fingerprint(self, dense: Iterable[TensorInfo], experts: Iterable[TensorInfo]) -> str:
        """Config, headers, and 64 bytes from the middle of every dense tensor: fine-tunes of one model differ too."""
        digest = hashlib.sha256()
        facts = [
            self._family.name, self._layers, self._moe_layers, self._experts, self._hidden, self._intermediate,
            integer(self._config, "num_experts_per_tok"), integer(self._config, "vocab_size"),
        ]  # fmt: skip
        digest.update(json.dumps(facts).encode())
        for info in sorted([*dense, *experts], key=lambda tensor: tensor.name):
            digest.update(f"{info.name} {info.dtype} {info.shape}\n".encode())
        samples: dict[str, bytes] = {}
        for file, infos in _by_file(dense).items():
            with file.open("rb") as handle:
                for info in infos:
                    handle.seek(info.start + max(0, info.bytes - _SAMPLE_BYTES) // 2)
                    samples[info.name] = handle.read(min(info.bytes, _SAMPLE_BYTES))
        for name in sorted(samples):  # by name: the same model in other shards is the same model
            digest.update(samples[name])
        return "sha256:" + digest.hexdigest()


def widen(raw: bytes, dtype: str) -> Array:
    """BF16, F16 or F32 bytes to float32, exactly."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32)


def _by_file(tensors: Iterable[TensorInfo]) -> dict[Path, list[TensorInfo]]:
    files: dict[Path, list[TensorInfo]] = {}
    for info in sorted(tensors, key=lambda tensor: tensor.name):
        files.setdefault(info.file, []).append(info)
    return files


def _display_name(root: Path) -> str:
    root = root.resolve()
    if root.parent.name == "snapshots":  # the Hugging Face cache: models--org--name/snapshots/<commit>
        return root.parent.parent.name.removeprefix("models--").replace("--", "/")
    return root.name


def _read_config(root: Path, path: Path) -> dict[str, Any]:
    file = root / "config.json"
    if not file.is_file():
        raise BadInput(
            f"{path} is not a model: there is no config.json in {root}",
            hint="give the folder that holds config.json and the safetensors files",
        )
    refuse_lfs_pointer(file)
    return read_json_object(file)


def _family(config: Mapping[str, Any], root: Path) -> Family:
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        raise BadInput(
            f"{root} is already quantized: config.json says quant_method '{method}'",
            hint="give the bfloat16 version of the model",
        )
    model_type = config.get("model_type")
    family = family_of(str(model_type))
    if family is not None:
        return family
    if not any(
        config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "text_config")
    ):
        raise _dense_model(root)
    raise BadInput(
        f"{root}: model_type '{model_type}' is not known; known are {', '.join(f.name for f in FAMILIES)}"
        + _looks_like_experts(root),
        hint="ask for the family with this message",
    )


def _looks_like_experts(root: Path) -> str:
    names: set[str] = set()
    for file in sorted(root.glob("*.safetensors"))[:1]:
        names |= {re.sub(r"\d+", "N", name) for name in read_header(file).tensors if "expert" in name}
    return f"; its expert-like tensors: {', '.join(sorted(names)[:8])}" if names else ""


def _dense_model(root: Path) -> BadInput:
    return BadInput(
        f"{root} is a dense model: it has no routed experts", hint="ktplan works on Mixture-of-Experts models"
    )


def _tensors(path: Path, root: Path) -> dict[str, TensorInfo]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise BadInput(
                f"{path} is not a safetensors file", hint="give a model folder or a .safetensors file"
            )
        return read_header(path).tensors
    index = root / _INDEX
    if index.is_file():
        return _indexed(root, index)
    if (root / _SINGLE).is_file():
        return read_header(root / _SINGLE).tensors
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise BadInput(f"{root} has no safetensors files", hint="give the folder that holds the weights")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).tensors.items():
            if name in tensors:
                raise BadInput(
                    f"{root}: {name} is in {tensors[name].file.name} and in {file.name}, and there is no {_INDEX}",
                    hint="keep one model in the folder, or add its index",
                )
            tensors[name] = info
    return tensors


def _indexed(root: Path, index: Path) -> dict[str, TensorInfo]:
    """The index decides which file holds a tensor; other files in the folder are left alone."""
    refuse_lfs_pointer(index)
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise BadInput(f"{index} has no weight_map", hint="download it again")
    wanted = sorted(set(places.values()))
    absent = [name for name in wanted if not (root / name).is_file()]
    if absent:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise BadInput(
            f"{root}: {len(absent)} of {len(wanted)} files named in {_INDEX} are missing: "
            f"{', '.join(absent[:5])}{more}",
            hint="download the missing files",
        )
    headers = {name: read_header(root / name).tensors for name in wanted}
    tensors: dict[str, TensorInfo] = {}
    for name, file in places.items():
        info = headers[file].get(name)
        if info is None:
            raise BadInput(
                f"{root / file} lacks {name}, which {_INDEX} places there", hint="download the file again"
            )
        tensors[name] = info
    return tensors
