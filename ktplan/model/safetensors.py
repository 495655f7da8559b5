"""A checkpoint in safetensors: found, checked and described from headers; experts read one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ktplan.artifact import read_json_object
from ktplan.errors import BadInput
from ktplan.model import families
from ktplan.model.encodings import METHODS, NUMPY, OTHER_VERSION, Hints, Piece, decode, floats
from ktplan.model.families import Family, family_in, text_config
from ktplan.model.fingerprint import Run, fingerprint, packed_runs, plain_runs, sampled_experts
from ktplan.model.header import ITEM_BYTES, TensorInfo, read_bytes, refuse_lfs_pointer
from ktplan.model.layout import Experts, Sizes, expert_like
from ktplan.model.shards import find_tensors
from ktplan.model.source import PROJECTIONS, Array, Biases, ExpertWeights, Place
from ktplan.model.spec import ModelSpec

PLAIN = ("BF16", "F16", "F32")  # numbers as they are
_MAIN = ("weight", "qweight", "packed")  # the part that names a matrix


class SafetensorsSource:
    """A WeightSource over safetensors shards, one tensor an expert or fused, in any encoding of `encodings`."""

    def __init__(
        self, root: Path, config: Mapping[str, Any], family: Family, tensors: Mapping[str, TensorInfo]
    ) -> None:
        self._root, self._config, self._family, self._tensors = root, config, family, tensors
        self._text = text_config(config)
        self._hints = _hints(config, root)
        self._sizes = _sizes(self._text, root)
        self._experts = Experts(family, self._sizes, self._hints, tensors, str(root))

    @property
    def root(self) -> Path:
        return self._root

    @cached_property
    def spec(self) -> ModelSpec:
        dense = [self._tensors[name] for name in self.dense_names()]
        experts = [self._tensors[name] for name in self._experts.names]
        text, sizes = self._text, self._sizes
        alpha, limit = self._family.activation_numbers(text)
        return ModelSpec(
            name=display_name(self._root),
            family=self._family.name,
            model_type=str(self._config["model_type"]),
            layers=sizes.layers,
            moe_layers=sizes.moe_layers,
            experts=sizes.experts,
            top_k=families.top_k(text),
            shared_experts=families.shared_experts(text),
            hidden=sizes.hidden,
            moe_intermediate=sizes.intermediate,
            vocab=families.integer({**self._config, **text}, "vocab_size"),
            context=families.context(text),
            activation=self._family.activation(text),
            dtype=" + ".join(sorted(self._experts.encodings)),
            tied_embeddings=bool(
                self._config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
            ),
            fused=self._experts.stacked,
            dense_params=sum(_elements(tensor) for tensor in dense),
            expert_params=self._expert_params(),
            dense_bytes=sum(tensor.bytes for tensor in dense),
            expert_bytes=sum(tensor.bytes for tensor in experts),
            kv_bytes_per_token=families.kv_bytes(text),
            experts_module=self._family.experts_module,
            expert_bias=self._experts.has_bias,
            activation_alpha=alpha,
            activation_limit=limit,
            fingerprint=self._fingerprint(dense),
        )

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        roles = self._experts.roles(layer, expert)
        matrices = self._split({role: self._matrix(layer, expert, role) for role in roles}, layer)
        gate = matrices.get("gate", np.empty((0, self._sizes.hidden), np.float32))
        return ExpertWeights(gate, matrices["up"], matrices["down"], *self.expert_biases(layer, expert))

    def expert_biases(self, layer: int, expert: int) -> Biases:
        biases = {
            role: self._bias(parts["bias"], layer, expert)
            for role, parts in self._experts.roles(layer, expert).items()
            if "bias" in parts
        }
        found = self._split(biases, layer)
        return Biases(found.get("gate"), found.get("up"), found.get("down"))

    def _split(self, found: dict[str, Array], layer: int) -> dict[str, Array]:
        """Gate and up apart, where a checkpoint keeps them in one."""
        if (both := found.pop("gate_up", None)) is not None:
            half, interleaved = len(both) // 2, self._experts.interleaved(layer)
            found["gate"] = np.ascontiguousarray(both[::2]) if interleaved else both[:half]
            found["up"] = np.ascontiguousarray(both[1::2]) if interleaved else both[half:]
        return found

    def expert_places(self, layer: int, expert: int) -> tuple[Place, Place, Place] | None:
        """Where gate, up and down lie as plain rows: gate and up of a fused tensor are its first and second half."""
        places: dict[str, Place] = {}
        for role, parts in self._experts.roles(layer, expert).items():
            matrix = self._experts.matrix(layer, expert, role)
            info = matrix.parts.get("weight")
            plain = info is not None and set(parts) == {"weight"} and not matrix.transposed
            if info is None or not plain or info.dtype not in PLAIN:
                return None
            start = info.start + (expert * (info.bytes // info.shape[0]) if matrix.stacked else 0)
            place = Place(info.file, start, info.dtype, matrix.rows, matrix.columns)
            if role != "gate_up":
                places[role] = place
                continue
            if self._experts.interleaved(layer):
                return None
            half = matrix.rows // 2
            places["gate"] = place._replace(rows=half)
            size = half * matrix.columns * ITEM_BYTES[info.dtype]
            places["up"] = place._replace(rows=half, start=start + size)
        return (places["gate"], places["up"], places["down"]) if "gate" in places else None

    def expert_names(self, layer: int, expert: int) -> dict[str, str]:
        names: dict[str, str] = {}
        for role, parts in self._experts.roles(layer, expert).items():
            name = next(parts[part].name for part in _MAIN if part in parts)
            names |= dict.fromkeys(("gate", "up"), name) if role == "gate_up" else {role: name}
        return names

    def dense_names(self) -> list[str]:
        return sorted(
            name
            for name in self._tensors
            if name not in self._experts.names and not self._experts.beyond(name)
        )

    def beyond_names(self) -> list[str]:
        """Tensors of layers that the config does not count: multi-token prediction; left out everywhere."""
        return sorted(filter(self._experts.beyond, self._tensors))

    def file_of(self, name: str) -> Path:
        return self._tensors[name].file

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor."""
        return self._tensors[name]

    def _expert_params(self) -> int:
        sizes = self._sizes
        matrices = 3 if self._family.gated else 2
        biases = (2 * sizes.intermediate + sizes.hidden) if self._experts.has_bias else 0
        one = matrices * sizes.hidden * sizes.intermediate + biases
        return len(sizes.moe_layers) * sizes.experts * one

    def _matrix(self, layer: int, expert: int, role: str) -> Array:
        matrix = self._experts.matrix(layer, expert, role)
        index = expert if matrix.stacked else None
        pieces = {name: read_piece(info, index) for name, info in matrix.parts.items()}
        with np.errstate(
            all="ignore"
        ):  # whoever uses the weights has to look for numbers that are not finite
            found = decode(matrix.encoding, pieces, matrix.rows, matrix.columns, self._hints)
        return np.ascontiguousarray(found.T) if matrix.transposed else found

    def _bias(self, info: TensorInfo, layer: int, expert: int) -> Array:
        return floats(read_piece(info, expert if len(info.shape) > 1 else None))

    def _fingerprint(self, dense: Iterable[TensorInfo]) -> str:
        sizes = self._sizes
        facts = [
            self._family.name, sizes.layers, sizes.moe_layers, sizes.experts, sizes.hidden, sizes.intermediate,
            families.top_k(self._text), families.integer({**self._config, **self._text}, "vocab_size"),
            sorted(self._experts.encodings), self._experts.has_bias,
        ]  # fmt: skip
        runs = [
            run
            for layer in sizes.moe_layers
            for expert in sampled_experts(sizes.experts)
            for run in self._runs(layer, expert)
        ]
        return fingerprint(facts, dense, runs)

    def _runs(self, layer: int, expert: int) -> Iterator[Run]:
        """Where samples of an expert lie: the same bytes in every form that holds the same weights."""
        roles = self._experts.roles(layer, expert)
        for projection in PROJECTIONS:
            role = projection if projection in roles else "gate_up"
            if role not in roles:  # an ungated expert has no gate
                continue
            matrix = self._experts.matrix(layer, expert, role)
            second = int(role == "gate_up" and projection == "up")
            halves = 2 if role == "gate_up" else 1
            info = matrix.parts.get("weight")
            if info is not None and info.dtype in PLAIN and len(matrix.parts) == 1:
                rows, columns = self._sizes.shape(projection)
                start, _ = _slice(info, expert if matrix.stacked else None)
                row = rows // 2
                row = (
                    2 * row + second
                    if halves == 2 and self._experts.interleaved(layer)
                    else second * rows + row
                )
                yield from plain_runs(
                    info.file, start, ITEM_BYTES[info.dtype], rows, columns,
                    row=row, total_rows=halves * rows, transposed=matrix.transposed,
                )  # fmt: skip
                continue
            for _, info in sorted(matrix.parts.items()):
                found = list(packed_runs(info, *_slice(info, expert if matrix.stacked else None), halves))
                yield found[second]


def open_safetensors(path: Path) -> SafetensorsSource:
    """Open a folder with config.json and safetensors, or one .safetensors file with config.json beside it.

    Everything is checked before this returns: files present and whole, every expert there with its right shape,
    config and names in agreement. Raises BadInput naming the file, tensor and value otherwise.
    """
    root = path if path.is_dir() else path.parent
    config = read_config(root, path)
    family = _family(config, path, root)
    return SafetensorsSource(root, config, family, find_tensors(path, root))


def widen(raw: bytes, dtype: str) -> Array:
    """BF16, F16 or F32 bytes to float32, exactly."""
    return floats(Piece(dtype, np.frombuffer(raw, NUMPY[dtype])))


def read_piece(info: TensorInfo, index: int | None = None) -> Piece:
    """A whole tensor, or entry `index` of its first axis, in its stored type. Reads just those bytes."""
    if not info.shape:
        index = None  # one number for the whole stack
    shape = info.shape if index is None else info.shape[1:]
    start, size = _slice(info, index)
    raw = read_bytes(info, start, size)
    return Piece(info.dtype, np.frombuffer(raw, NUMPY[info.dtype]).reshape(shape))


def _slice(info: TensorInfo, index: int | None) -> tuple[int, int]:
    """Where a tensor's bytes begin and how many there are, or those of entry `index` of its first axis."""
    if index is None or not info.shape:
        return info.start, info.bytes
    size = info.bytes // info.shape[0]
    return info.start + index * size, size


def display_name(root: Path) -> str:
    """The folder's name; for the Hugging Face cache (models--org--name/snapshots/<commit>) the model's."""
    root = root.resolve()
    if root.parent.name == "snapshots":
        return root.parent.parent.name.removeprefix("models--").replace("--", "/")
    return root.name


def _elements(info: TensorInfo) -> int:
    """Weights in a tensor: packed codes count one by one (4-bit unless it is plain), scales and zeros do not count."""
    if info.name.endswith(
        (".qzeros", ".g_idx", ".scales", "_scale", "_scale_inv", "_scale_2", "_shape", ".scale")
    ):
        return 0
    packed = info.name.endswith((".qweight", ".weight_packed"))
    return prod(info.shape) * ({"I32": 8, "U8": 2}.get(info.dtype, 1) if packed else 1)


def read_config(root: Path, path: Path) -> dict[str, Any]:
    """The config.json in `root`, where the model `path` lies. Raises BadInput saying what is there instead."""
    file = root / "config.json"
    if not file.is_file():
        if (root / "store.json").is_file():
            raise BadInput(
                f"{path} is an expert store, not a model: dense weights and config.json are not in it",
                hint="give the model's own folder, and the store with --store where a command has it",
            )
        raise BadInput(
            f"{path} is not a model: there is no config.json in {root}",
            hint="give the folder that holds config.json and the weights, or a .gguf file",
        )
    refuse_lfs_pointer(file)
    return read_json_object(file)


def _hints(config: Mapping[str, Any], root: Path) -> Hints:
    said = config.get("quantization_config") or text_config(config).get("quantization_config") or {}
    if not isinstance(said, Mapping):
        raise BadInput(
            f"{root / 'config.json'}: quantization_config is {said!r}, an object is expected",
            hint="check config.json",
        )
    method = str(said.get("quant_method") or said.get("method") or "")
    if method and method not in METHODS:
        raise BadInput(
            f"{root}: config.json says quant_method '{method}', which cannot be read; known are "
            f"{', '.join(sorted(METHODS))}",
            hint=OTHER_VERSION,
        )
    return Hints(method, said)


def _sizes(text: Mapping[str, Any], root: Path) -> Sizes:
    layers = families.moe_layers(text)
    count = families.experts(text)
    if not layers or not count:
        raise _dense_model(root)
    if not 1 <= (chosen := families.top_k(text)) <= count:
        raise BadInput(
            f"{root / 'config.json'}: a token chooses {chosen} of {count} experts, 1 to {count} are possible",
            hint="check config.json",
        )
    return Sizes(
        layers=families.layers(text),
        moe_layers=layers,
        experts=count,
        hidden=families.hidden(text),
        intermediate=families.intermediate(text),
        idle=families.integer(text, "zero_expert_num", default=0),
    )


def _family(config: Mapping[str, Any], path: Path, root: Path) -> Family:
    family = family_in(config)
    if family is not None:
        return family
    if not families.experts(text_config(config)):
        raise _dense_model(root)
    names = list(expert_like(find_tensors(path, root)))
    listed = f"; its expert-like tensors: {', '.join(names[:8])}" if names else ""
    raise BadInput(
        f"{root}: model_type '{config.get('model_type')}' is not known{listed}",
        hint="docs/models.md lists the known ones; ask for the family with this message",
    )


def _dense_model(root: Path) -> BadInput:
    return BadInput(
        f"{root} is a dense model: it has no routed experts", hint="ktplan works on Mixture-of-Experts models"
    )
