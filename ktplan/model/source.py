"""Reading weights without saying where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from ktplan.model.header import TensorInfo
from ktplan.model.spec import ModelSpec

Array = npt.NDArray[np.float32]

PROJECTIONS = ("gate", "up", "down")


class _Matrices(NamedTuple):
    gate: Array  # [intermediate, hidden]
    up: Array  # [intermediate, hidden]
    down: Array  # [hidden, intermediate]


class ExpertWeights(_Matrices):
    """One routed expert, float32, rows are outputs: y = down @ (silu(gate @ x) * (up @ x)).

    A triple of matrices. Biases lie beside it and are None but in families whose spec says `expert_bias`. An ungated
    expert (spec.activation "relu2-ungated": down @ relu(up @ x)^2) has a gate without rows.
    """

    gate_bias: Array | None = None  # [intermediate]
    up_bias: Array | None = None  # [intermediate]
    down_bias: Array | None = None  # [hidden]

    def __new__(
        cls,
        gate: Array,
        up: Array,
        down: Array,
        gate_bias: Array | None = None,
        up_bias: Array | None = None,
        down_bias: Array | None = None,
    ) -> Self:
        made = super().__new__(cls, gate, up, down)
        made.gate_bias, made.up_bias, made.down_bias = gate_bias, up_bias, down_bias
        return made


class Biases(NamedTuple):
    """One expert's biases, float32; None in families without."""

    gate: Array | None  # [intermediate]
    up: Array | None  # [intermediate]
    down: Array | None  # [hidden]


class Place(NamedTuple):
    """Where a matrix lies as plain numbers, row after row: `dtype` is "BF16", "F16" or "F32"."""

    file: Path
    start: int
    dtype: str
    rows: int
    columns: int


class WeightSource(Protocol):
    """A checkpoint: its description, its experts one at a time, and where everything else lies."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def root(self) -> Path: ...

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """The expert's projections, widened exactly to float32."""

    def expert_biases(self, layer: int, expert: int) -> Biases:
        """The expert's biases alone."""

    def expert_names(self, layer: int, expert: int) -> dict[str, str]:
        """Projection to tensor name; in a fused checkpoint gate and up share a name."""

    def dense_names(self) -> list[str]:
        """The names of all tensors but routed experts and layers beyond the model's own (MTP), sorted."""

    def beyond_names(self) -> list[str]:
        """Tensors of layers that the config does not count: multi-token prediction; left out everywhere."""

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor."""


class PlacedSource(WeightSource, Protocol):
    """A checkpoint that may hold experts as plain numbers, which a reader then takes from the file itself."""

    def expert_places(self, layer: int, expert: int) -> tuple[Place, Place, Place] | None:
        """Where gate, up and down lie; None where they are stored in another form."""
