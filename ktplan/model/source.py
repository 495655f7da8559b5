"""Reading weights without saying where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ktplan.model.spec import ModelSpec

Array = npt.NDArray[np.float32]

PROJECTIONS = ("gate", "up", "down")


class ExpertWeights(NamedTuple):
    """One routed expert, float32, rows are outputs: y = down @ (silu(gate @ x) * (up @ x))."""

    gate: Array  # [intermediate, hidden]
    up: Array  # [intermediate, hidden]
    down: Array  # [hidden, intermediate]


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

    def expert_names(self, layer: int, expert: int) -> dict[str, str]:
        """Projection to tensor name; in a fused checkpoint gate and up share a name."""

    def dense_names(self) -> list[str]:
        """The names of all tensors but routed experts and layers beyond the model's own (MTP), sorted."""

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""


class PlacedSource(WeightSource, Protocol):
    """A checkpoint that may hold experts as plain numbers, which a reader then takes from the file itself."""

    def expert_places(self, layer: int, expert: int) -> tuple[Place, Place, Place] | None:
        """Where gate, up and down lie; None where they are stored in another form."""
