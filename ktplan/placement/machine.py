"""HardwareSpec: the figures of a machine that a plan depends on, each with where it came from and its spread.

Bytes and seconds. A figure is `measured` here, `read` from the system, or `given` by a person or the table of known
devices. The file is hardware.json; `ktplan doctor --measure` writes one, and a person may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ktplan.artifact import parsed, read_json, write_json
from ktplan.errors import BadInput

KIND: Final = "hardware"
VERSION: Final = 1
ORIGINS: Final = ("measured", "read", "given")
_AGAIN = "measure again with 'ktplan doctor --measure', or mend the file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number with its 5 and 95 % bounds. `origin` is one of ORIGINS, `how` says it in words."""

    value: float
    low: float
    high: float
    origin: str
    how: str = ""

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise BadInput(f"origin '{self.origin}' is none of {', '.join(ORIGINS)}", hint=_AGAIN)
        if not 0 <= self.low <= self.value <= self.high < float("inf"):
            raise BadInput(f"the figure {self.low} .. {self.value} .. {self.high} is no range", hint=_AGAIN)

    @classmethod
    def given(cls, value: float, how: str, spread: float = 0.0) -> Figure:
        """A figure that was not measured; `spread` is the relative half-width to assume."""
        return cls(value=value, low=value * (1 - spread), high=value * (1 + spread), origin="given", how=how)

    @classmethod
    def measured(cls, samples: Sequence[float], how: str) -> Figure:
        """The median of repeated measurements, with their 5 and 95 % quantiles."""
        ranked = sorted(samples)
        last = len(ranked) - 1

        def at(share: float) -> float:
            return ranked[round(share * last)]

        return cls(value=at(0.5), low=at(0.05), high=at(0.95), origin="measured", how=how)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "origin": self.origin,
            "how": self.how,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU. `bandwidth` and `copy` (host to device) in bytes a second, `launch` seconds a kernel."""

    name: str
    memory: int  # bytes
    bandwidth: Figure
    copy: Figure
    launch: Figure
    flops: Figure  # half-precision, dense


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """A machine. `cpu_experts` holds measured (distinct experts, seconds) of the real kernel for experts of
    `cpu_expert_bytes`; without it the CPU's time is bytes over `cpu_bandwidth`."""

    name: str
    cpu_bandwidth: tuple[Figure, ...]  # bytes a second that all cores read, of each NUMA node
    cpu_flops: Figure  # of expert products with many tokens
    memory: int  # bytes of RAM
    hop: Figure  # seconds that a layer pays for touching the CPU at all
    gpus: tuple[GpuSpec, ...]
    cpu_experts: tuple[tuple[int, Figure], ...] = ()
    cpu_expert_bytes: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def total_cpu_bandwidth(self) -> float:
        """All NUMA nodes together, each reading its own part of every expert."""
        return sum(figure.value for figure in self.cpu_bandwidth)

    def to_dict(self) -> dict[str, Any]:
        """The file's body."""
        return {
            "name": self.name,
            "cpu": {
                "bandwidth": [figure.to_dict() for figure in self.cpu_bandwidth],
                "flops": self.cpu_flops.to_dict(),
                "expert_bytes": self.cpu_expert_bytes,
                "experts": [{"distinct": n, "seconds": figure.to_dict()} for n, figure in self.cpu_experts],
            },
            "memory": self.memory,
            "hop": self.hop.to_dict(),
            "gpus": [
                {
                    "name": gpu.name,
                    "memory": gpu.memory,
                    "bandwidth": gpu.bandwidth.to_dict(),
                    "copy": gpu.copy.to_dict(),
                    "launch": gpu.launch.to_dict(),
                    "flops": gpu.flops.to_dict(),
                }
                for gpu in self.gpus
            ],
            "notes": list(self.notes),
        }

    def save(self, path: Path) -> None:
        """Write hardware.json, whole or not at all."""
        write_json(path, KIND, VERSION, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> HardwareSpec:
        """Read and check hardware.json. Raises BadInput for a missing, damaged, foreign or newer file."""
        return parsed(path, _parse, read_json(path, KIND, VERSION), _AGAIN)


def _parse(body: Mapping[str, Any]) -> HardwareSpec:
    cpu = body["cpu"]
    bandwidth = tuple(_figure(entry) for entry in cpu["bandwidth"])
    if not bandwidth or any(figure.value <= 0 for figure in bandwidth):
        raise BadInput("the CPU has no memory bandwidth", hint=_AGAIN)
    return HardwareSpec(
        name=str(body["name"]),
        cpu_bandwidth=bandwidth,
        cpu_flops=_figure(cpu["flops"]),
        memory=_bytes(body["memory"]),
        hop=_figure(body["hop"]),
        gpus=tuple(
            GpuSpec(
                name=str(entry["name"]),
                memory=_bytes(entry["memory"]),
                bandwidth=_positive(entry["bandwidth"]),
                copy=_positive(entry["copy"]),
                launch=_figure(entry["launch"]),
                flops=_positive(entry["flops"]),
            )
            for entry in body["gpus"]
        ),
        cpu_experts=tuple((int(row["distinct"]), _figure(row["seconds"])) for row in cpu["experts"]),
        cpu_expert_bytes=None if cpu["expert_bytes"] is None else _bytes(cpu["expert_bytes"]),
        notes=tuple(map(str, body["notes"])),
    )


def _figure(entry: Mapping[str, Any]) -> Figure:
    return Figure(
        value=float(entry["value"]),
        low=float(entry["low"]),
        high=float(entry["high"]),
        origin=str(entry["origin"]),
        how=str(entry["how"]),
    )


def _positive(entry: Mapping[str, Any]) -> Figure:
    figure = _figure(entry)
    if figure.value <= 0:
        raise BadInput("a speed of a GPU is 0", hint=_AGAIN)
    return figure


def _bytes(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadInput(f"{value!r} is no number of bytes", hint=_AGAIN)
    return value
