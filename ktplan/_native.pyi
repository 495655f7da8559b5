"""The compiled kernels; see native/python/bindings.cc. Only ktplan.kernels imports it."""

from typing import Any

import numpy as np
import numpy.typing as npt

class Pool:
    def __init__(self, threads: int, spin_us: int) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def spin_us(self) -> int: ...

class Job:
    def wait(self) -> None: ...
    @property
    def done(self) -> bool: ...

class Layer:
    def __init__(
        self,
        parts: list[list[tuple[Any, ...] | None]],
        hidden: int,
        bits: int,
        group: int,
        pool: Pool,
        isa: str,
        activation_bits: int,
        numerics: str,
        activation: str,
        alpha: float,
        limit: float,
    ) -> None: ...
    def forward(self, hidden: Any, top_k_index: Any, top_k_weights: Any, out: Any) -> None: ...
    def submit(self, hidden: Any, top_k_index: Any, top_k_weights: Any, out: Any) -> Job: ...
    def read(self) -> int: ...
    @property
    def intermediate(self) -> list[int]: ...
    @property
    def isa(self) -> str: ...

def tables() -> list[tuple[str, str, str, str]]: ...
def cpu_features() -> list[str]: ...
def quantize(
    isa: str, x: Any, bits: int, numerics: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]: ...
def dots(isa: str, x: Any, packed: Any, n: int, bits: int, activation_bits: int) -> npt.NDArray[np.int64]: ...
def project(
    isa: str, x: Any, packed: Any, scale: Any, n: int, bits: int, group: int, activation_bits: int
) -> npt.NDArray[np.float32]: ...
def activate(
    isa: str, gate: Any, up: Any, activation: str, alpha: float, limit: float
) -> npt.NDArray[np.float32]: ...
def round_bf16(isa: str, x: Any) -> npt.NDArray[np.float32]: ...
def pack_weights(
    isa: str,
    pool: Pool,
    tasks: list[tuple[Any, Any, Any]],
    bits: int,
    rounding: str,
    multipliers: Any,
    group: int,
    shares: Any,
) -> list[tuple[bool, float, float]]: ...
