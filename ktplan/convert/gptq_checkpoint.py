"""Reading the routed experts of a GPTQ checkpoint back: convert-gpu's own folders, complete or partial, and others'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktplan.artifact import read_json, read_json_object
from ktplan.convert.gptq_folder import INDEX_FILE, KIND, RECORD_FILE, VERSION
from ktplan.errors import BadInput
from ktplan.experts import ExpertId, ExpertSet, format_ranges
from ktplan.model import ExpertWeights, ModelSpec
from ktplan.model.header import TensorInfo, read_header
from ktplan.model.safetensors import widen
from ktplan.model.source import PROJECTIONS
from ktplan.quant.gptq_format import SUFFIXES, GptqSettings, dequantize, read_settings

_EXPERT = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.(?:.+\.)?(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(qweight|qzeros|scales|g_idx)"
)
_PROJECTION = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_FLOATS = ("F16", "BF16", "F32")

Parts = dict[str, dict[str, TensorInfo]]  # projection -> suffix -> tensor


class GptqCheckpoint:
    """The routed experts of a GPTQ folder: which there are, and each as float32 weights."""

    def __init__(
        self,
        root: Path,
        config: Mapping[str, Any],
        settings: GptqSettings,
        tensors: Mapping[ExpertId, Parts],
        record: Mapping[str, Any] | None,
    ) -> None:
        self.root = root
        self.config = config  # quantization_config as it stands in the folder
        self.settings = settings
        self.experts = ExpertSet(tensors)
        self._tensors, self._record = tensors, record

    @classmethod
    def open(cls, folder: Path) -> GptqCheckpoint:
        """Find and check the experts of `folder`; only headers are read.

        Raises BadInput when the folder is no GPTQ checkpoint, has no routed experts, or an expert lacks a tensor or
        has shapes that contradict each other.
        """
        if not folder.is_dir():
            raise BadInput(
                f"{folder} is not a folder", hint="give the folder that 'ktplan convert-gpu' wrote"
            )
        config = _config(folder)
        settings = read_settings(config, f"{folder}: quantization_config")
        record = read_json(folder / RECORD_FILE, KIND, VERSION) if (folder / RECORD_FILE).is_file() else None
        tensors: dict[ExpertId, Parts] = {}
        for name, info in _tensors(folder).items():
            found = _EXPERT.fullmatch(name)
            if found:
                expert = ExpertId(int(found.group(1)), int(found.group(2)))
                parts = tensors.setdefault(expert, {})
                parts.setdefault(_PROJECTION[found.group(3)], {})[found.group(4)] = info
        if not tensors:
            raise BadInput(
                f"{folder} has no routed experts in GPTQ form",
                hint="give a checkpoint that has tensors like model.layers.0.mlp.experts.0.gate_proj.qweight",
            )
        for expert, parts in tensors.items():
            _check_expert(folder, expert, parts, settings)
        checkpoint = cls(folder, config, settings, dict(sorted(tensors.items())), record)
        checkpoint._check_against_record()
        return checkpoint

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the model it was made from; None where the folder does not say."""
        return None if self._record is None else str(self._record.get("fingerprint"))

    @property
    def complete(self) -> bool:
        """Whether the folder is a model of its own: a partial one has experts and no config.json."""
        return (self.root / "config.json").is_file()

    @property
    def bytes(self) -> int:
        """Size of all expert tensors, as stored."""
        return sum(
            info.bytes for parts in self._tensors.values() for own in parts.values() for info in own.values()
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(hidden, intermediate) of the experts."""
        return next(iter(self._shapes()))

    def to_dict(self) -> dict[str, Any]:
        """What it is, in plain values."""
        hidden, intermediate = self.shape
        return {
            "bits": self.settings.bits,
            "group_size": self.settings.group_size,
            "experts": len(self.experts),
            "by_layer": self.experts.to_ranges(),
            "hidden": hidden,
            "intermediate": intermediate,
            "bytes": self.bytes,
            "complete": self.complete,
            "fingerprint": self.fingerprint,
        }

    def has(self, layer: int, expert: int) -> bool:
        """Whether this expert is here."""
        return ExpertId(layer, expert) in self._tensors

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """One expert's weights, float32. Raises BadInput when it is not here or its words are damaged."""
        parts = self._tensors.get(ExpertId(layer, expert))
        if parts is None:
            raise BadInput(
                f"{self.root} does not hold expert {expert} of layer {layer}; of that layer it holds "
                f"{format_ranges(self.experts.layer(layer)) or 'none'}",
                hint="convert again with a plan that has this expert, or use the plan it was made with",
            )
        return ExpertWeights(*(self._weight(parts[projection]) for projection in PROJECTIONS))

    def check_model(self, spec: ModelSpec) -> None:
        """Raise BadInput unless these experts belong to the model of `spec`.

        By fingerprint where the folder has one; otherwise by shapes, layers and expert numbers.
        """
        if self.fingerprint is not None and self.fingerprint != spec.fingerprint:
            raise BadInput(
                f"{self.root} was made from another model: {self.fingerprint}, {spec.name} is {spec.fingerprint}",
                hint=f"convert {spec.name} with 'ktplan convert-gpu'",
            )
        foreign = [ex for ex in self.experts if ex.layer not in spec.moe_layers or ex.expert >= spec.experts]
        if foreign:
            raise BadInput(
                f"{self.root} holds expert {foreign[0].expert} of layer {foreign[0].layer}; {spec.name} has "
                f"{spec.experts} experts in layers {format_ranges(spec.moe_layers)}",
                hint="give the GPTQ checkpoint of this model",
            )
        wanted = (spec.hidden, spec.moe_intermediate)
        other = next((shape for shape in self._shapes() if shape != wanted), None)
        if other is not None:
            raise BadInput(
                f"{self.root} holds experts of hidden size {other[0]} and intermediate size {other[1]}, "
                f"{spec.name} has {wanted[0]} and {wanted[1]}",
                hint="give the GPTQ checkpoint of this model",
            )

    def _shapes(self) -> set[tuple[int, int]]:
        per_word = 32 // self.settings.bits
        found = set()
        for parts in self._tensors.values():
            words, intermediate = parts["gate"]["qweight"].shape
            found.add((words * per_word, intermediate))
        return found

    def _weight(self, tensors: Mapping[str, TensorInfo]) -> npt.NDArray[np.float32]:
        qweight, qzeros = (_read_words(tensors[suffix]) for suffix in ("qweight", "qzeros"))
        scales = widen(_read(tensors["scales"]), tensors["scales"].dtype).reshape(tensors["scales"].shape)
        inputs = qweight.shape[0] * (32 // self.settings.bits)
        if "g_idx" in tensors:
            g_idx = _read_words(tensors["g_idx"])
        else:
            g_idx = (np.arange(inputs) // (inputs // scales.shape[0])).astype(np.int32)
        try:
            return dequantize(
                qweight,
                qzeros,
                scales,
                g_idx,
                self.settings.bits,
                checkpoint_format=self.settings.checkpoint_format,
                symmetric=self.settings.symmetric,
            )
        except BadInput as fault:
            name = tensors["qweight"].name.removesuffix(".qweight")
            raise BadInput(f"{tensors['qweight'].file}: {name}: {fault.message}", hint=fault.hint) from None

    def _check_against_record(self) -> None:
        if self._record is None:
            return
        promised = ExpertSet.from_ranges(self._record.get("experts") or {})
        if promised != self.experts:
            raise BadInput(
                f"{self.root} holds {len(self.experts)} experts, its {RECORD_FILE} promises {len(promised)}",
                hint="the folder is incomplete; convert or copy it again",
            )


def _config(folder: Path) -> Mapping[str, Any]:
    if (folder / "quantize_config.json").is_file():
        return read_json_object(folder / "quantize_config.json")
    if (folder / "config.json").is_file():
        found = read_json_object(folder / "config.json").get("quantization_config")
        if isinstance(found, dict):
            return found
    raise BadInput(
        f"{folder} is no GPTQ checkpoint: it has neither quantize_config.json nor a quantization_config in config.json",
        hint="give a folder that 'ktplan convert-gpu' wrote, or another GPTQ checkpoint",
    )


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX_FILE
    if index.is_file():
        places = read_json_object(index).get("weight_map")
        if not isinstance(places, dict):
            raise BadInput(f"{index} has no weight_map", hint="copy the file again")
        files = sorted({folder / str(name) for name in places.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(
            f"{folder} has no safetensors files", hint="the conversion was not finished; do it again"
        )
    return {name: info for file in files for name, info in read_header(file).tensors.items()}


def _check_expert(folder: Path, expert: ExpertId, parts: Parts, settings: GptqSettings) -> None:
    where = f"{folder}: layer {expert.layer}, expert {expert.expert}"
    per_word = 32 // settings.bits
    sizes: dict[str, tuple[int, int]] = {}
    for projection in PROJECTIONS:
        own = parts.get(projection, {})
        absent = [suffix for suffix in SUFFIXES if suffix not in own and suffix != "g_idx"]
        if absent:
            raise BadInput(
                f"{where} lacks {absent[0]} of its {projection} projection",
                hint="the checkpoint is incomplete",
            )
        if (
            own["qweight"].dtype != "I32"
            or own["qzeros"].dtype != "I32"
            or own["scales"].dtype not in _FLOATS
        ):
            raise BadInput(
                f"{where}: {own['qweight'].name} is not stored as int32 words with float scales",
                hint="give a checkpoint in the plain GPTQ format",
            )
        words, outputs = own["qweight"].shape
        sizes[projection] = (outputs, words * per_word)
        inputs, groups = words * per_word, own["scales"].shape[0]
        size = inputs if settings.group_size == -1 else settings.group_size
        if own["scales"].shape != (groups, outputs) or groups != -(-inputs // size):
            raise BadInput(
                f"{where}: {own['scales'].name} is {list(own['scales'].shape)}, a layer of {inputs} inputs and "
                f"{outputs} outputs in groups of {size} needs {[-(-inputs // size), outputs]}",
                hint="the checkpoint is damaged, or its quantization_config has the wrong bits or group_size",
            )
    if sizes["gate"] != sizes["up"] or sizes["down"] != sizes["gate"][::-1]:
        raise BadInput(
            f"{where}: gate, up and down have shapes {sizes} that do not fit",
            hint="the checkpoint is damaged",
        )


def _read(info: TensorInfo) -> bytes:
    with info.file.open("rb") as file:
        file.seek(info.start)
        data = file.read(info.bytes)
    if len(data) != info.bytes:
        raise BadInput(f"{info.file} became shorter while it was read ({info.name})", hint="check the disk")
    return data


def _read_words(info: TensorInfo) -> npt.NDArray[np.int32]:
    return np.frombuffer(_read(info), "<i4").astype(np.int32, copy=False).reshape(info.shape)
