"""Which tensors of a checkpoint are routed experts: found by name, checked against config.json, refused in words.

A tensor name is prefix + `layers.N.` + a name of the family's + a suffix of the encoding. The prefix tells the language
model from vision towers with names of the same shape and from multi-token prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ktplan.errors import BadInput
from ktplan.model.encodings import IGNORED, SUFFIXES, Encoding, Hints, Part, recognise
from ktplan.model.families import Family, Form
from ktplan.model.header import TensorInfo

MISMATCH = "config.json and weights belong to different models"
_LAYERS = r"(?:layers|blocks|h)"
_OTHER_TOWERS = re.compile(r"visual|vision|vit\b|audio|speech|image|talker|code2wav|encoder\.layers")
_PREDICTION = re.compile(r"(^|\.)(mtp\w*|nextn\w*|eagle\w*|draft\w*)(\.|$)")
_ORDER = ("gate", "gate_up", "up", "down")  # in which missing tensors are named

Parts = dict[str, TensorInfo]  # part ("weight", "scale" ...) to tensor
Roles = dict[str, Parts]  # role ("gate", "up", "down", "gate_up") to parts


@dataclass(frozen=True, slots=True)
class Sizes:
    """What config.json says of the experts."""

    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    hidden: int
    intermediate: int
    idle: int = 0  # experts without weights that some files stack behind the real ones (LongCat)

    def shape(self, role: str) -> tuple[int, int]:
        """Rows and columns of a matrix; rows are outputs."""
        if role == "down":
            return self.hidden, self.intermediate
        return (2 if role == "gate_up" else 1) * self.intermediate, self.hidden


@dataclass(slots=True)
class Layer:
    """The expert tensors of one layer: of each expert, or under None the stacks of all."""

    form: Form
    experts: dict[int | None, Roles] = field(default_factory=dict)
    transposed: bool = False  # stacks of [inputs, outputs]: gpt-oss, Llama-4, Qwen3-VL-MoE's own files


class Matrix(NamedTuple):
    """One stored matrix of an expert, recognised."""

    parts: Mapping[str, TensorInfo]
    encoding: Encoding
    rows: int
    columns: int
    transposed: bool
    stacked: bool


class Experts:
    """All routed experts of a checkpoint. Raises BadInput where names, shapes and config.json disagree."""

    def __init__(
        self, family: Family, sizes: Sizes, hints: Hints, tensors: Mapping[str, TensorInfo], where: str
    ) -> None:
        self._family, self.sizes, self._hints, self._where = family, sizes, hints, where
        self._recognised: dict[object, Encoding] = {}
        found = _classify(family, tensors)
        self.prefix = self._choose_prefix(found)
        self._layers = found.get(self.prefix, {})
        self.encodings: dict[str, None] = {}
        self.names: dict[str, None] = {}
        self.has_bias = False
        self._inventory()

    @property
    def stacked(self) -> bool:
        """Whether a tensor holds all experts of a layer."""
        return any(self._layers[layer].form.fused for layer in self.sizes.moe_layers)

    def interleaved(self, layer: int) -> bool:
        return self._layers[layer].form.interleaved

    def roles(self, layer: int, expert: int) -> Roles:
        held = self._layers[layer]
        return held.experts[None if held.form.fused else expert]

    def matrix(self, layer: int, expert: int, role: str) -> Matrix:
        """One matrix of an expert, its encoding known and its shapes checked."""
        held = self._layers[layer]
        rows, columns = self.sizes.shape(role)
        transposed, stacked = held.transposed != (role in held.form.turned), held.form.fused
        if transposed:
            rows, columns = columns, rows
        parts = {name: info for name, info in self.roles(layer, expert)[role].items() if name != "bias"}
        described = {name: self._part(info, stacked, role) for name, info in parts.items()}
        key = (
            role,
            transposed,
            *((name, part.dtype, part.shape) for name, part in sorted(described.items())),
        )
        encoding = self._recognised.get(key)
        if encoding is None:
            encoding = self._recognised[key] = recognise(described, rows, columns, self._hints)
            self.encodings[encoding.name(described, rows, columns)] = None
        return Matrix(parts, encoding, rows, columns, transposed, stacked)

    def beyond(self, name: str) -> bool:
        """Whether a tensor belongs to a layer that config.json does not count (multi-token prediction)."""
        found = re.match(rf"{re.escape(self.prefix)}{_LAYERS}\.(\d+)\.", name)
        if found is not None:
            return int(found.group(1)) >= self.sizes.layers
        return _PREDICTION.search(name) is not None

    def _part(self, info: TensorInfo, stacked: bool, role: str) -> Part:
        shape, name = info.shape, f"{info.file}: {info.name}"
        if stacked and shape:
            counts = {self.sizes.experts, self.sizes.experts + (self.sizes.idle if role != "down" else 0)}
            if shape[0] not in counts:
                wanted = [self.sizes.experts, *self.sizes.shape(role)]
                raise BadInput(
                    f"{name} has shape {list(shape)}, config.json asks for {wanted}", hint=MISMATCH
                )
            shape = shape[1:]
        return Part(info.dtype, shape, name)

    def _choose_prefix(self, found: Mapping[str, Mapping[int, Layer]]) -> str:
        text = [p for p in found if not _OTHER_TOWERS.search(p) and not _PREDICTION.search(p)]
        text = [p for p in text if p in self._family.prefixes] or text
        if len(text) > 1:
            raise BadInput(
                f"{self._where}: routed experts lie under {' and under '.join(repr(p) for p in sorted(text))}",
                hint="keep one model in the folder",
            )
        return text[0] if text else self._family.prefixes[0]

    def _inventory(self) -> None:
        for layer in self.sizes.moe_layers:
            self._check_layer(layer)
        for layer, held in self._layers.items():
            if layer >= self.sizes.layers:
                continue
            for expert, roles in held.experts.items():
                if (
                    layer not in self.sizes.moe_layers
                    or (expert or 0) >= self.sizes.experts + self.sizes.idle
                ):
                    self._refuse_uncounted(roles)

    def _check_layer(self, layer: int) -> None:
        held = self._layers.get(layer)
        if held is not None and held.form.fused:
            self._split_flat(held)
        if held is None:
            form = next(iter(self._layers.values())).form if self._layers else self._family.forms[0]
            raise self._missing(form, layer, 0, min(form.roles, key=_ORDER.index))
        held.transposed = held.form.fused and self._is_transposed(held)
        for expert in range(1 if held.form.fused else self.sizes.experts):
            roles = held.experts.get(None if held.form.fused else expert, {})
            for role in sorted(held.form.roles, key=_ORDER.index):
                if set(roles.get(role, ())) <= {"bias"}:
                    raise self._missing(held.form, layer, expert, role)
                self.matrix(layer, expert, role)
                self._check_bias(roles[role].get("bias"), role, held.form.fused)
                for info in roles[role].values():
                    self.names[info.name] = None

    def _split_flat(self, held: Layer) -> None:
        """Stacks that are one matrix, the experts one below the other (DBRX), get an axis for the experts."""
        for parts in held.experts.get(None, {}).values():
            for part, info in parts.items():
                rows, left = divmod(info.shape[0] if len(info.shape) == 2 else 1, self.sizes.experts)
                if not left and part == "weight":
                    parts[part] = replace(info, shape=(self.sizes.experts, rows, info.shape[1]))

    def _check_bias(self, info: TensorInfo | None, role: str, stacked: bool) -> None:
        if info is None:
            return
        self.has_bias = True
        rows = self.sizes.shape(role)[0]
        wanted = [self.sizes.experts, rows] if stacked else [rows]
        if list(info.shape) != wanted:
            raise BadInput(
                f"{info.file}: {info.name} has shape {list(info.shape)}, config.json asks for {wanted}",
                hint=MISMATCH,
            )

    def _is_transposed(self, held: Layer) -> bool:
        """Whether stacks are [inputs, outputs]: at least one of the two shapes can be read in one way only."""
        votes, turned = set(), held.form.turned
        for role, parts in held.experts.get(None, {}).items():
            info, (rows, columns) = parts.get("weight"), self.sizes.shape(role)
            if info is not None and rows != columns and info.shape[1:] in ((rows, columns), (columns, rows)):
                votes.add((info.shape[1:] == (columns, rows)) != (role in turned))
        return votes == {True}

    def _missing(self, form: Form, layer: int, expert: int, role: str) -> BadInput:
        name = f"{self.prefix}layers.{layer}.{form.roles[role].format(expert=expert)}"
        who = f"layer {layer}, expert {expert}, {role} projection"
        return BadInput(
            f"{self._where}: {name} is missing ({who})",
            hint="the download is incomplete, or config.json belongs to another model",
        )

    def _refuse_uncounted(self, roles: Roles) -> None:
        info = next(info for parts in roles.values() for info in parts.values())
        counted = self.sizes.moe_layers
        raise BadInput(
            f"{info.file}: {info.name} is a routed expert that config.json does not count "
            f"(MoE layers {counted[0]}-{counted[-1]}, {self.sizes.experts} experts each)",
            hint=MISMATCH,
        )


def _classify(family: Family, tensors: Mapping[str, TensorInfo]) -> dict[str, dict[int, Layer]]:
    """Prefix to layer to the expert tensors in it."""
    pattern, meaning = _pattern(family)
    found: dict[str, dict[int, Layer]] = {}
    for name, info in tensors.items():
        match = pattern.fullmatch(name)
        if match is None or match["suffix"] in IGNORED:
            continue
        kind = match.lastgroup if match.lastgroup != "suffix" else None
        kind = kind or next(group for group in meaning if match[group] is not None)
        form, role = meaning[kind]
        expert = None if form.fused else int(match[kind + "_expert"])
        layers = found.setdefault(match["prefix"], {})
        layer = layers.setdefault(int(match["layer"]), Layer(form))
        if layer.form is not form:
            raise BadInput(
                f"{info.file}: {name} is one of two ways in which layer {match['layer']} stores its experts",
                hint="keep one version of the model in the folder",
            )
        part = SUFFIXES.get(match["suffix"], match["suffix"])
        parts = layer.experts.setdefault(expert, {}).setdefault(role, {})
        if part in parts:
            raise BadInput(
                f"{info.file}: {name} and {parts[part].name} both claim to be the {part} of one matrix",
                hint="keep one version of the model in the folder",
            )
        parts[part] = info
    return found


def _pattern(family: Family) -> tuple[re.Pattern[str], dict[str, tuple[Form, str]]]:
    meaning, choices = {}, []
    for number, form in enumerate(family.forms):
        for role, tail in form.roles.items():
            group = f"f{number}_{role}"
            meaning[group] = form, role
            text = re.escape(tail).replace(r"\{expert\}", rf"(?P<{group}_expert>\d+)")
            choices.append(f"(?P<{group}>{text})")
    whole = rf"(?P<prefix>(?:\w+\.)*?){_LAYERS}\.(?P<layer>\d+)\.(?:{'|'.join(choices)})(?P<suffix>|[._].+)"
    return re.compile(whole), meaning


def expert_like(tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Tensor names that speak of experts, numbers replaced by N, each once."""
    seen = {re.sub(r"\d+", "N", name) for name in tensors if re.search(r"expert|moe", name)}
    yield from sorted(seen)
