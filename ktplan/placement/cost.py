"""What a decode step costs: machine figures and a model in, seconds of a layer out.

    N, H        distinct experts of a layer that a step needs from the CPU, from the GPU
    layer(N,H)  attention + max(g * H, 0 if N == 0 else hop + c * N)
    step        head + sum over layers

`c` and `g` are bytes over bandwidth (or the measured curve of the real kernel), `hop` what touching the CPU costs
at all. The maximum is why the distribution of N is kept: the layer's time at the mean N is up to a fifth too low.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ktplan.placement.machine import HardwareSpec

Floats = npt.NDArray[np.float64]

_KERNELS_PER_LAYER: Final = 12  # attention, norms, router, shared experts: launches that a step cannot hide


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds. `cpu_curve[n]` is the CPU's time for n distinct experts, without the hop; n beyond it goes on
    straight.
    """

    hop: float
    cpu: float  # per distinct expert on the CPU
    gpu: float  # per distinct expert on the GPU
    attention: float  # of a layer: everything that is no routed expert
    head: float  # of a step: embedding, last norm, output layer
    copy: float = 0.0  # one expert from host to device
    cpu_curve: tuple[float, ...] = ()

    def cpu_time(self, distinct: npt.NDArray[Any]) -> Floats:
        """Seconds of the CPU side for so many distinct experts, hop included; 0 for none."""
        n = np.asarray(distinct, dtype=np.float64)
        if self.cpu_curve:
            grid = np.arange(len(self.cpu_curve), dtype=np.float64)
            beyond = np.maximum(n - grid[-1], 0) * self.cpu
            work = np.interp(n, grid, np.array(self.cpu_curve)) + beyond
        else:
            work = self.cpu * n
        return np.where(n > 0, self.hop + work, 0.0)

    def experts_time(self, cpu: npt.NDArray[Any], gpu: npt.NDArray[Any]) -> Floats:
        """Seconds of a layer's routed experts: both sides run at once."""
        return np.maximum(self.gpu * np.asarray(gpu, dtype=np.float64), self.cpu_time(cpu))

    def table(self, choices: int) -> Floats:
        """float64 [choices + 1]: a layer's expert time with n of `choices` experts on the CPU, the others on the
        GPU.
        """
        n = np.arange(choices + 1)
        return self.experts_time(n, choices - n)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "cpu_curve": list(self.cpu_curve)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that a step moves: one routed expert on either side, and all else, which the GPU reads once a step."""

    cpu_expert: int
    gpu_expert: int
    layers: int  # all layers
    dense: int  # weights outside routed experts
    head: int  # of those, what belongs to no layer
    kv: int = 0  # cache read by a step


def costs(machine: HardwareSpec, sizes: Sizes) -> Costs:
    """The constants of a machine for a model. Without a GPU everything runs on the CPU and no hop is paid twice."""
    gpu = min(machine.gpus, key=lambda one: one.bandwidth.value) if machine.gpus else None
    bandwidth = gpu.bandwidth.value if gpu else machine.total_cpu_bandwidth
    launch = gpu.launch.value if gpu else 0.0
    curve = _curve(machine, sizes.cpu_expert)
    slope = curve[-1] - curve[-2] if len(curve) > 1 else sizes.cpu_expert / machine.total_cpu_bandwidth
    dense = max(0, sizes.dense - sizes.head) / max(1, sizes.layers)
    return Costs(
        hop=machine.hop.value,
        cpu=slope,
        gpu=sizes.gpu_expert / bandwidth + launch / 8,
        attention=(dense + sizes.kv / max(1, sizes.layers)) / bandwidth + launch * _KERNELS_PER_LAYER,
        head=sizes.head / bandwidth + launch,
        copy=sizes.gpu_expert / gpu.copy.value if gpu else 0.0,
        cpu_curve=curve,
    )


def _curve(machine: HardwareSpec, expert: int) -> tuple[float, ...]:
    """The measured curve, scaled to experts of other bytes and made to rise; empty where nothing was measured."""
    if not machine.cpu_experts or not machine.cpu_expert_bytes:
        return ()
    at = np.array([0, *(n for n, _ in machine.cpu_experts)], dtype=np.float64)
    seconds = np.array([0.0, *(figure.value for _, figure in machine.cpu_experts)])
    scaled = np.maximum.accumulate(seconds) * (expert / machine.cpu_expert_bytes)
    return tuple(float(value) for value in np.interp(np.arange(int(at[-1]) + 1), at, scaled))
