"""The routed experts of one layer on both sides: some on the GPU through torch, the others on the CPU.

`HybridExperts` stands where transformers' own experts module stood and computes the same function. The inputs
of the CPU side are fetched first and its threads start; the GPU's work is queued while they compute; the two
sums meet in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import nn

from ktplan.runtime.device_experts import DeviceExperts
from ktplan.runtime.inject import LayerExperts

PREFILL, DECODE = "prefill", "decode"


class CpuPart(Protocol):
    """Experts whose inputs and results are on the CPU: the native engine's, or torch's."""

    @property
    def bytes(self) -> int: ...

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum, float32 [T, H]; index -1 is skipped."""

    def submit(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Start the weighted sum; calling the answer waits for it."""


@dataclass(slots=True)
class RouteCounters:
    """Routes (token times chosen expert) of all layers, by the GPU and in all; the engine sets `phase`."""

    phase: str = PREFILL
    _gpu: dict[str, torch.Tensor] = field(default_factory=dict)
    _all: dict[str, int] = field(default_factory=dict)

    def add(self, served: torch.Tensor, routes: int) -> None:
        """`served` stays on its device, so that counting never waits for the GPU."""
        held = self._gpu.get(self.phase)
        self._gpu[self.phase] = served if held is None else held.to(served.device) + served
        self._all[self.phase] = self._all.get(self.phase, 0) + routes

    def hit_rate(self, phase: str) -> float | None:
        """Share of routes that the GPU served; None before any."""
        routes = self._all.get(phase, 0)
        return float(self._gpu[phase]) / routes if routes else None

    def totals(self) -> Mapping[str, tuple[int, int]]:
        """Phase to (routes served by the GPU, routes)."""
        return {phase: (int(self._gpu[phase]), routes) for phase, routes in self._all.items()}

    def clear(self) -> None:
        self._gpu.clear()
        self._all.clear()


class HybridExperts(nn.Module):
    """In place of a transformers experts module; either side may be absent."""

    def __init__(
        self,
        place: LayerExperts,
        *,
        gpu_side: DeviceExperts | None,
        cpu_side: CpuPart | None,
        counters: RouteCounters,
    ) -> None:
        super().__init__()
        self.place, self.counters = place, counters
        self.gpu_side, self.cpu_side = gpu_side, cpu_side
        ids = torch.arange(place.experts + 1)
        on_gpu = torch.isin(ids, torch.tensor(place.gpu, dtype=torch.int64))
        on_cpu = torch.isin(ids, torch.tensor(place.cpu, dtype=torch.int64))
        # -1 where the CPU has nothing to do: experts of the GPU, and index E, transformers' "no expert".
        self._cpu_ids = torch.where(on_cpu, ids, -1)
        self._on_gpu = on_gpu.to(gpu_side.device if gpu_side else "cpu")

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, H], top_k_index int64 [T, k] in 0..E, top_k_weights [T, k] to [T, H]."""
        self._count(top_k_index)
        pending = self._start_cpu(hidden_states, top_k_index, top_k_weights)
        total: torch.Tensor | None = None
        if self.gpu_side is not None:
            here = self.gpu_side.device
            inputs = (hidden_states.to(here), top_k_index.to(here), top_k_weights.to(here))
            total = self.gpu_side.forward(*inputs).to(hidden_states.device)
        if pending is not None:
            part = pending().to(hidden_states.device)
            total = part if total is None else total.add_(part)
        if total is None:
            raise ValueError(f"{self.place.name} has experts on neither side")
        return total.to(hidden_states.dtype)

    def _start_cpu(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], torch.Tensor] | None:
        """What gives the CPU side's sum: already under way where a GPU works meanwhile, else when it is called."""
        if self.cpu_side is None:
            return None
        inputs = (hidden.cpu(), self._cpu_ids[index.cpu()], weights.float().cpu())
        if self.gpu_side is not None and self.gpu_side.concurrent:
            return self.cpu_side.submit(*inputs)
        # Handing the work to other threads costs more than it gives where this one would only wait.
        return partial(self.cpu_side.forward, *inputs)

    def extra_repr(self) -> str:
        return f"{len(self.place.gpu)} experts on {self.place.gpu_device}, {len(self.place.cpu)} on the cpu"

    def _count(self, index: torch.Tensor) -> None:
        if self.gpu_side is None:
            served = torch.zeros((), dtype=torch.int64)
        elif self.cpu_side is None:
            served = torch.tensor(index.numel())
        else:
            served = self._on_gpu[index.to(self._on_gpu.device)].sum()
        self.counters.add(served, index.numel())
