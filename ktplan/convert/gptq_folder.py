"""The folder that convert-gpu writes: which tensor goes into which file, and what config.json says about it.

A complete model has everything that the source has, in the source's types, with the quantized layers' weights replaced
by GPTQ tensors. A partial folder has some routed experts and nothing else; ktplan reads it beside the source model.

While the work goes on files carry the suffix `.part`; config.json, the index and gpu-experts.json come last, so that a
folder that was left unfinished does not look like a model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktplan.artifact import read_json_object, write_json, write_whole
from ktplan.convert.tensor_file import Entry, TensorFile, WrittenFile, file_bytes
from ktplan.errors import BadInput
from ktplan.experts import ExpertSet
from ktplan.model import WeightSource
from ktplan.model.families import family_of
from ktplan.model.source import PROJECTIONS
from ktplan.quant.gptq_format import F16, I32, GptqScheme, PackedLinear
from ktplan.version import __version__

KIND = "ktplan-gpu-experts"
VERSION = 1
RECORD_FILE = "gpu-experts.json"
INDEX_FILE = "model.safetensors.index.json"

_DENSE_SHARD_BYTES = 4 << 30
_MATRIX = re.compile(r"\.(weight|weight_packed|qweight)$")  # what follows a layer's name
_PIECE = 16 << 20
# Everything that belongs to a model beside weights and config.json; code never does.
_COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "*.tiktoken", "spiece.model", "chat_template*", "preprocessor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
# Modules that engines make one of several of a checkpoint's: what excludes the parts must exclude the whole.
_MERGED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}


@dataclass(frozen=True, slots=True)
class Linear:
    """A layer to quantize: its name without `.weight` as written, outputs N and inputs K."""

    name: str
    outputs: int
    inputs: int

    def entries(self, scheme: GptqScheme) -> list[Entry]:
        """Its four tensors in file order."""
        groups, per_word = self.inputs // scheme.group_size, scheme.codes_per_word
        return [
            Entry(f"{self.name}.qweight", "I32", (self.inputs // per_word, self.outputs)),
            Entry(f"{self.name}.qzeros", "I32", (groups, self.outputs // per_word)),
            Entry(f"{self.name}.scales", "F16", (groups, self.outputs)),
            Entry(f"{self.name}.g_idx", "I32", (self.inputs,)),
        ]


def expert_linears(source: WeightSource, layer: int, expert: int) -> dict[str, Linear]:
    """Projection to the layer to write: always one tensor an expert.

    Names are the checkpoint's own where it stores one matrix an expert, else those that its family publishes.
    """
    spec = source.spec
    family = family_of(spec.family)
    assert family is not None, spec.family  # the source was opened by it
    names = source.expert_names(layer, expert)
    if spec.fused or names["gate"] == names["up"]:
        names = {role: name.format(layer=layer, expert=expert) for role, name in family.names.items()}
    hidden, inner = spec.hidden, spec.moe_intermediate
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {
        projection: Linear(_MATRIX.sub("", names[projection]), *shapes[projection])
        for projection in PROJECTIONS
    }


def written_name(source: WeightSource, name: str) -> str:
    """The name under which a dense tensor is written.

    Where a fused checkpoint calls the block that holds the experts by another name than the published per-expert one
    (Mixtral: mlp, block_sparse_moe), the router follows its experts.
    """
    family = family_of(source.spec.family)
    assert family is not None, source.spec.family
    found = re.match(r".*?layers\.(\d+)\.", name)
    layer = int(found.group(1)) if found else -1
    if not source.spec.fused or layer not in source.spec.moe_layers:
        return name
    fused = family.experts_module.format(layer=layer).removesuffix("experts")
    published = family.names["gate"].format(layer=layer, expert=0).split("experts.")[0]
    return published + name.removeprefix(fused) if name.startswith(fused) else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file to write: a layer's quantized tensors, or copies of dense ones, in the order of `entries`."""

    name: str
    entries: tuple[Entry, ...]
    layer: int | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPlan:
    """Every file of the folder; `experts` are the routed experts that are quantized, `linears` the other layers."""

    scheme: GptqScheme
    experts: ExpertSet
    linears: Mapping[int, tuple[Linear, ...]]  # by decoder layer
    shards: tuple[Shard, ...]
    complete: bool

    @property
    def bytes(self) -> int:
        """Size of all files of tensors."""
        return sum(file_bytes(shard.entries, self.facts) for shard in self.shards)

    @property
    def facts(self) -> dict[str, str]:
        """What every file says of itself."""
        return {"format": "pt", "made_by": f"ktplan {__version__}", "scheme": self.scheme.name}

    def shard_of(self, layer: int) -> Shard | None:
        """The file with a layer's quantized tensors."""
        return next((shard for shard in self.shards if shard.layer == layer), None)


def plan_folder(
    source: WeightSource,
    scheme: GptqScheme,
    experts: ExpertSet,
    linears: Mapping[int, tuple[Linear, ...]],
    *,
    complete: bool,
) -> FolderPlan:
    """Lay out the files. Quantized layers come in the order in which they are made: a layer's linears, then experts."""
    by_layer: dict[int, tuple[Entry, ...]] = {}
    for layer in sorted({*experts.layers, *linears}):
        own = [*linears.get(layer, ())]
        for expert in experts.layer(layer):
            own += expert_linears(source, layer, expert).values()
        by_layer[layer] = tuple(entry for linear in own for entry in linear.entries(scheme))
    groups = _dense_groups(source, linears) if complete else []
    count = len(by_layer) + len(groups)
    stem = "model" if complete else "experts"
    names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    shards = [
        Shard(name=name, entries=entries, layer=layer)
        for name, (layer, entries) in zip(names, by_layer.items(), strict=False)
    ]
    for file, group in zip(names[len(by_layer) :], groups, strict=True):
        entries = tuple(
            Entry(written_name(source, name), source.info(name).dtype, source.info(name).shape)
            for name in group
        )
        shards.append(Shard(name=file, entries=entries, sources=group))
    return FolderPlan(
        scheme=scheme, experts=experts, linears=dict(linears), shards=tuple(shards), complete=complete
    )


def _dense_groups(source: WeightSource, linears: Mapping[int, tuple[Linear, ...]]) -> list[tuple[str, ...]]:
    replaced = {f"{linear.name}.weight" for own in linears.values() for linear in own}
    groups: list[tuple[str, ...]] = []
    group: list[str] = []
    size = 0
    for name in source.dense_names():
        if name in replaced:
            continue
        if group and size + source.info(name).bytes > _DENSE_SHARD_BYTES:
            groups.append(tuple(group))
            group, size = [], 0
        group.append(name)
        size += source.info(name).bytes
    return [*groups, tuple(group)] if group else groups


class FolderWriter:
    """Writes the files of a plan into `folder`, layer by layer, and names them at the end."""

    def __init__(self, folder: Path, plan: FolderPlan) -> None:
        self._folder, self._plan = folder, plan
        self._files: list[WrittenFile] = []

    def layer(self, layer: int, packed: Iterable[tuple[Linear, PackedLinear]]) -> None:
        """The file of one layer; `packed` gives its layers in plan order, one at a time."""
        shard = self._plan.shard_of(layer)
        if shard is None:
            for _ in packed:
                raise AssertionError(f"layer {layer} has nothing to write")
            return
        with TensorFile(self._part(shard), shard.entries, self._plan.facts) as file:
            for linear, tensors in packed:
                for entry, tensor in zip(linear.entries(self._plan.scheme), _arrays(tensors), strict=True):
                    file.put(entry.name, [tensor.tobytes()])
            self._files.append(file.finish(shard.name))

    def copy_dense(self, source: WeightSource) -> Iterator[int]:
        """Copy all other tensors byte for byte; yields the bytes of every piece copied."""
        for shard in self._plan.shards:
            if shard.layer is not None:
                continue
            with TensorFile(self._part(shard), shard.entries, self._plan.facts) as file:
                for entry, name in zip(shard.entries, shard.sources, strict=True):
                    file.put(entry.name, pieces(source, name))
                    yield entry.bytes
                self._files.append(file.finish(shard.name))

    def publish(self, source: WeightSource, settings: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Give the files their names and add everything else that the folder needs."""
        for shard in self._plan.shards:
            os.replace(self._part(shard), self._folder / shard.name)
        _write_plain(self._folder / "quantize_config.json", settings)
        if self._plan.complete:
            for file in _companions(source.root):
                shutil.copyfile(file, self._folder / file.name)
            self._write_index()
            config = {**read_json_object(source.root / "config.json"), "quantization_config": dict(settings)}
            _write_plain(self._folder / "config.json", config)
        files = [file._asdict() for file in sorted(self._files)]
        write_json(self._folder / RECORD_FILE, KIND, VERSION, {**record, "files": files})

    def _part(self, shard: Shard) -> Path:
        return self._folder / f"{shard.name}.part"

    def _write_index(self) -> None:
        places = {entry.name: shard.name for shard in self._plan.shards for entry in shard.entries}
        size = sum(entry.bytes for shard in self._plan.shards for entry in shard.entries)
        body = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        _write_plain(self._folder / INDEX_FILE, body)


def companions_bytes(root: Path) -> int:
    """Size of the tokenizer and other files that are copied along."""
    return sum(file.stat().st_size for file in _companions(root))


def _companions(root: Path) -> list[Path]:
    found = {file for pattern in _COPIED for file in root.glob(pattern) if file.is_file()}
    return sorted(file for file in found if file.suffix not in (".py", ".safetensors"))


def pieces(source: WeightSource, name: str) -> Iterator[bytes]:
    """The stored bytes of a dense tensor, a few at a time."""
    info = source.info(name)
    left = info.bytes
    try:
        file = info.file.open("rb")
        file.seek(info.start)
    except OSError as fault:
        raise unreadable(info.file, fault) from fault
    with file:
        while left:
            try:
                piece = file.read(min(left, _PIECE))
            except OSError as fault:
                raise unreadable(info.file, fault) from fault
            if not piece:
                raise BadInput(
                    f"{info.file} became shorter while it was read ({name})", hint="check the disk"
                )
            yield piece
            left -= len(piece)


def unreadable(file: Path, fault: OSError) -> BadInput:
    """What to tell when a file of the source, not of the output, fails."""
    return BadInput(
        f"{file} cannot be read: {fault.strerror or fault}",
        hint="check the disk and the permissions of the model's files",
    )


def _arrays(packed: PackedLinear) -> tuple[I32 | F16, ...]:
    return packed.qweight, packed.qzeros, packed.scales, packed.g_idx


def _write_plain(path: Path, body: Mapping[str, Any]) -> None:
    # Other programs' formats: no kind, no version of ours.
    write_whole(path, (json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def quantization_config(
    source: WeightSource, plan: FolderPlan, *, method: str, damp: float, details: Mapping[str, Any]
) -> dict[str, Any]:
    """What config.json and quantize_config.json say, in the words that GPTQModel, vLLM and SGLang read."""
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": plan.scheme.bits,
        "group_size": plan.scheme.group_size,
        "sym": True,
        "desc_act": False,
        "static_groups": True,
        "true_sequential": True,
        "lm_head": False,
        "pack_dtype": "int32",
        "damp_percent": damp,
        "dynamic": dict.fromkeys(exclusions(source, plan), {}),
        "meta": {"quantizer": [f"ktplan:{__version__}"], "method": method, **details},
    }


def unquantized(source: WeightSource, plan: FolderPlan) -> list[str]:
    """Names, as written and without `.weight`, of the matrices in layers (and the head) that keep their weights."""
    replaced = {linear.name for own in plan.linears.values() for linear in own}
    names = []
    for name in source.dense_names():
        module = written_name(source, name).removesuffix(".weight")
        shape = source.info(name).shape
        if name.endswith(".weight") and len(shape) == 2 and "embed" not in name:
            names += [] if module in replaced else [module]
    return names


def exclusions(source: WeightSource, plan: FolderPlan) -> list[str]:
    """`dynamic` keys "-:REGEX" that exclude every unquantized module, alone or merged with others, and no other.

    Without them engines look for qweight where there is a plain weight: at the router first of all.
    """
    quantized = {linear.name for own in plan.linears.values() for linear in own}
    kept: dict[tuple[str, str], set[int]] = {}
    patterns: set[str] = set()
    for name in unquantized(source, plan):
        found = re.fullmatch(r"(.*layers)\.(\d+)\.(.+)", name)
        if not found:
            # A head, or towers beside the language model: one pattern for all their numbered blocks.
            patterns.add("-:.*" + re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) + "$")
            continue
        for leaf in _with_merged(found.group(3)):
            kept.setdefault((found.group(1), leaf), set()).add(int(found.group(2)))
    for (_, rest), layers in kept.items():
        everywhere = not any(re.fullmatch(rf".*layers\.\d+\.{re.escape(rest)}", name) for name in quantized)
        numbers = r"\d+" if everywhere else f"(?:{'|'.join(map(str, sorted(layers)))})"
        patterns.add(rf"-:.*layers\.{numbers}\.{re.escape(rest)}$")
    return sorted(patterns)


def _with_merged(rest: str) -> Sequence[str]:
    parent, _, leaf = rest.rpartition(".")
    merged = _MERGED.get(leaf)
    return (rest, f"{parent}.{merged}") if merged else (rest,)
