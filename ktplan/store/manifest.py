"""What a store says about itself: `store.json`, written last, so that a folder without it is unfinished by definition.

Nothing in it depends on when, where or how fast the store was made: the same job gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ktplan.artifact import read_json, write_json
from ktplan.errors import BadInput
from ktplan.experts import ExpertId, ExpertSet
from ktplan.model.source import PROJECTIONS
from ktplan.store.layout import AMX_INT4, AMX_INT8, LAYOUTS, Layout, Sizes, layout_for, legal_parts, padded

KIND = "ktplan-expert-store"
KT_LAYOUTS = (AMX_INT8.name, AMX_INT4.name)  # those that kt-kernel reads
VERSION = 1
MANIFEST_FILE = "store.json"
JOB_FILE = "job.json"  # there while a conversion is under way or was stopped
_WORST = 5
_WORDS = ("model", "family", "fingerprint", "scheme", "rounding", "layout", "activation")
_UNKNOWN = ("family", "fingerprint", "rounding", "activation")  # None in a store made from a foreign folder
_NUMBERS = ("bits", "parts", "experts", "hidden", "intermediate")


class Tensor(NamedTuple):
    """One tensor of a shard: its name, "I8", "F32" or "BF16", its number of elements and bytes."""

    name: str
    dtype: str
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShape:
    """The sizes that fix every tensor of a store. `wide` experts have 8 bits and a scale for each row in any case.

    The last `padding` of the `intermediate` rows and columns are zeros, which the model does not have.
    """

    bits: int
    parts: int
    experts: int
    hidden: int
    intermediate: int
    wide: ExpertSet = ExpertSet()
    padding: int = 0
    group: int | None = None  # inputs that share a scale; None: a whole row

    def layout_of(self, layer: int, expert: int) -> Layout:
        """How an expert's weights and scales lie."""
        return self.layout(self.bits_of(layer, expert))

    def layout(self, bits: int) -> Layout:
        """The layout of this store's experts of that width."""
        return layout_for(bits, self.group if bits == self.bits else None)

    def bits_of(self, layer: int, expert: int) -> int:
        """Width of an expert's weights."""
        return 8 if ExpertId(layer, expert) in self.wide else self.bits

    def rows_and_columns(self, projection: str) -> tuple[int, int]:
        """N and K of one part of a projection."""
        share = self.intermediate // self.parts
        return (self.hidden, share) if projection == "down" else (share, self.hidden)

    def tensors(self, layer: int, expert: int, part: int) -> list[Tensor]:
        """One part of one expert in file order: three packed weights, then their scales if the layout has some."""
        weights, scales = [], []
        layout = self.layout_of(layer, expert)
        own = self._prefix
        for projection in PROJECTIONS:
            rows, columns = self.rows_and_columns(projection)
            size, count = rows * layout.row_bytes(columns), layout.scales(rows, columns)
            weight = own + tensor_name(layer, projection, expert, part, "weight")
            weights.append(Tensor(weight, "I8", size, size))
            if count:
                scale = own + tensor_name(layer, projection, expert, part, "scale")
                scales.append(Tensor(scale, layout.scale_dtype, count, layout.scale_bytes(rows, columns)))
        return weights + scales

    @property
    def _prefix(self) -> str:
        """What goes before the names of tensors that kt-kernel must not find.

        It would take every expert for equally large, as wide as config.json says, and with one scale a row.
        """
        if self.wide:
            return "mixed."
        if self.padding:
            return "padded."
        return "" if self.layout(self.bits).name in KT_LAYOUTS else "own."

    def layer_tensors(self, layer: int) -> Iterator[Tensor]:
        """All tensors of a layer's shard in file order: expert by expert, part by part."""
        for expert in range(self.experts):
            for part in range(self.parts):
                yield from self.tensors(layer, expert, part)

    def expert_bytes(self, layer: int, expert: int) -> int:
        """Bytes of one expert, all parts and scales."""
        return self.parts * sum(tensor.bytes for tensor in self.tensors(layer, expert, 0))

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer's experts."""
        usual, wide = self.plain_bytes(self.bits), len(self.wide.layer(layer))
        return (self.experts - wide) * usual + wide * self.plain_bytes(8)

    def plain_bytes(self, bits: int) -> int:
        """Bytes of an expert of that width, all parts and scales."""
        layout, total = self.layout(bits), 0
        for projection in PROJECTIONS:
            rows, columns = self.rows_and_columns(projection)
            total += rows * layout.row_bytes(columns) + layout.scale_bytes(rows, columns)
        return self.parts * total


def expert_bytes_as(sizes: Sizes, bits: int, group: int | None = None) -> int | None:
    """Bytes that one expert of a model takes in a store of that format, undivided; None where it does not fit."""
    if not legal_parts(sizes, bits):
        return None
    width = padded(sizes.moe_intermediate, bits)
    shape = StoreShape(bits=bits, group=group, parts=1, experts=1, hidden=sizes.hidden, intermediate=width)
    return shape.plain_bytes(bits)


def tensor_name(layer: int, projection: str, expert: int, part: int, what: str) -> str:
    """kt-kernel's key, e.g. `blk.3.ffn_gate_exps.17.numa.0.weight`; `what` is "weight" or "scale"."""
    return f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.{part}.{what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFile:
    """One shard: the experts of one layer. `sha256` None: not known, in a folder that kt-kernel wrote."""

    name: str
    layer: int
    bytes: int
    sha256: str | None


class WeightError(NamedTuple):
    """How far one projection of one expert is from the source: RMS of the difference over RMS of the weights."""

    layer: int
    expert: int
    projection: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreManifest:
    """All facts about a store; `errors[layer][projection]` holds one relative RMS weight error for each expert.

    None, or no entry, is what a folder that another program wrote does not tell. `output_errors` are like `errors`, for
    the outputs on calibration text. `wide` experts have 8 bits in a store of fewer.
    """

    model: str
    family: str | None
    fingerprint: str | None
    scheme: str
    bits: int
    rounding: str | None
    layout: str
    parts: int
    layers: tuple[int, ...]
    experts: int
    hidden: int
    intermediate: int
    activation: str | None
    files: tuple[StoreFile, ...]
    errors: Mapping[int, Mapping[str, tuple[float, ...]]]
    output_errors: Mapping[int, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    wide: ExpertSet = ExpertSet()
    padding: int = 0  # of `intermediate`: zeros behind the model's own width

    @property
    def shape(self) -> StoreShape:
        return StoreShape(
            bits=self.bits,
            parts=self.parts,
            experts=self.experts,
            hidden=self.hidden,
            intermediate=self.intermediate,
            wide=self.wide,
            padding=self.padding,
            group=self.group,
        )

    @property
    def group(self) -> int | None:
        """Inputs of a row that share a scale; None: all of them."""
        return LAYOUTS[self.layout].group

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards as files."""
        return sum(file.bytes for file in self.files)

    @property
    def bytes_per_expert(self) -> int:
        """Weights and scales of one expert, all parts; in a mixed store, of one that is not wide."""
        return self.shape.plain_bytes(self.bits)

    @property
    def mean_error(self) -> float | None:
        """Mean relative RMS weight error over all projections of all experts; None where errors are not known."""
        every = [found.error for found in self.each_error()]
        return sum(every) / len(every) if every else None

    def each_error(self) -> Iterator[WeightError]:
        """The error table as a list, in order of layer and expert."""
        for layer, table in self.errors.items():
            for expert in range(self.experts):
                for projection in PROJECTIONS:
                    yield WeightError(layer, expert, projection, table[projection][expert])

    def worst(self, count: int = _WORST) -> list[WeightError]:
        """The projections with the largest error, worst first; ties in order of layer and expert."""
        return sorted(self.each_error(), key=lambda found: -found.error)[:count]

    def save(self, folder: Path) -> None:
        """Write `store.json` whole."""
        body = {name: getattr(self, name) for name in (*_WORDS, *_NUMBERS, "layers")}
        if self.group is not None:
            body["group_size"] = self.group
        body["files"] = [asdict(file) for file in self.files]
        body["errors"] = {str(layer): dict(table) for layer, table in self.errors.items()}
        if self.output_errors:
            body["output_errors"] = {str(layer): dict(table) for layer, table in self.output_errors.items()}
        if self.wide:
            body["wide_experts"] = self.wide.to_ranges()
        if self.padding:
            body["padding"] = self.padding
        body["total_bytes"] = self.total_bytes
        body["bytes_per_expert"] = self.bytes_per_expert
        body["summary"] = {
            "mean_error": self.mean_error,
            "worst": [found._asdict() for found in self.worst()],
        }
        write_json(folder / MANIFEST_FILE, KIND, VERSION, body)

    @classmethod
    def load(cls, folder: Path) -> StoreManifest:
        """Read and check `store.json`. Raises BadInput where it is absent, foreign, too new or contradicts itself."""
        path = folder / MANIFEST_FILE
        body = read_json(path, KIND, VERSION)
        if isinstance(layout := body.get("layout"), str) and layout not in LAYOUTS:
            raise BadInput(
                f"{path} has layout '{layout}', which this version does not know",
                hint=f"known are {', '.join(LAYOUTS)}; a newer version may know more",
            )
        try:
            manifest = cls._from_body(body)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as fault:
            raise BadInput(f"{path} is damaged: {fault!r}", hint="convert the model again") from None
        return manifest

    @classmethod
    def _from_body(cls, body: Mapping[str, Any]) -> StoreManifest:
        words = {key: None if body[key] is None and key in _UNKNOWN else str(body[key]) for key in _WORDS}
        plain: dict[str, Any] = words | {key: int(body[key]) for key in _NUMBERS}
        manifest = cls(
            **plain,
            output_errors=errors_from_json(body.get("output_errors", {})),
            wide=ExpertSet.from_ranges(body.get("wide_experts", {})),
            padding=int(body.get("padding", 0)),
            layers=tuple(int(layer) for layer in body["layers"]),
            files=tuple(StoreFile(**file) for file in body["files"]),
            errors=errors_from_json(body["errors"]),
        )
        manifest._check()
        return manifest

    def _check(self) -> None:
        if self.bits not in (16, 8, 4, 2) or self.shape.layout(self.bits).name != self.layout:
            raise ValueError(f"layout {self.layout} does not hold {self.bits}-bit levels")
        unit = layout_for(self.bits).unit
        if min(self.parts, self.experts, self.hidden, self.intermediate) < 1:
            raise ValueError("sizes must be positive")
        if self.hidden % unit or self.intermediate % (unit * self.parts):
            raise ValueError(
                f"sizes {self.hidden} x {self.intermediate} in {self.parts} parts do not fit {self.layout}"
            )
        if not 0 <= self.padding < unit:
            raise ValueError(f"padding {self.padding} is not part of a unit of {unit}")
        if tuple(file.layer for file in self.files) != self.layers:
            raise ValueError("files and layers differ")
        if any(tuple(table) not in ((), self.layers) for table in (self.errors, self.output_errors)):
            raise ValueError("errors and layers differ")
        if any(layer not in self.layers or not 0 <= expert < self.experts for layer, expert in self.wide):
            raise ValueError("an expert with 8 bits is not in the store")
        if any(Path(file.name).name != file.name for file in self.files):
            raise ValueError("a file name leaves the folder")
        if any(
            len(table[projection]) != self.experts
            for table in (*self.errors.values(), *self.output_errors.values())
            for projection in PROJECTIONS
        ):
            raise ValueError(f"the error table does not hold {self.experts} experts a layer")


def errors_from_json(body: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[str, tuple[float, ...]]]:
    """The error table as JSON keeps it (layers are strings there), in order of layers."""
    return {
        int(layer): {projection: tuple(map(float, table[projection])) for projection in PROJECTIONS}
        for layer, table in sorted(body.items(), key=lambda item: int(item[0]))
    }
