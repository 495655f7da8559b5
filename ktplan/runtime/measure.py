"""The machine's figures, measured: memory bandwidth of each NUMA node, the real kernel's time by distinct experts,
the hop, and what a GPU reads, copies and computes where there is one.

Weights are random and larger than the last cache; every figure is a median of repeats with its 5 to 95 % spread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ktplan.hardware import Hardware, detect
from ktplan.kernels import ExpertLayer, PackedExpert, Pool
from ktplan.placement.known import HOP_S
from ktplan.placement.machine import Figure, GpuSpec, HardwareSpec
from ktplan.progress import SILENT, Progress

HIDDEN: Final = 2048
INTERMEDIATE: Final = 768
DISTINCT: Final = (1, 2, 4, 8, 16)
_LAYER_BYTES: Final = 192 << 20  # beyond the last cache of most machines
_REPEATS: Final = 15
_PREFILL: Final = 256  # tokens of the product that gives the processor's speed


def measure(
    *,
    threads: int | None = None,
    repeats: int = _REPEATS,
    layer_bytes: int = _LAYER_BYTES,
    progress: Progress = SILENT,
) -> HardwareSpec:
    """Measure this machine; takes some seconds and about `layer_bytes` of memory."""
    machine = detect()
    nodes = machine.numa_nodes or ()
    with progress.task("measuring", len(nodes) + 4, "figures") as task:
        bandwidth = []
        for node in nodes or (None,):
            with _on(node.cpus if node else ()):
                layer = _layer(layer_bytes, Pool(threads))
                bandwidth.append(_bandwidth(layer, repeats, f"node {node.index}" if node else "all cores"))
            task.advance()
        layer = _layer(layer_bytes, Pool(threads))
        curve = tuple((n, _experts(layer, n, repeats)) for n in DISTINCT if n <= layer.experts)
        task.advance()
        hop = _hop(layer, repeats)
        task.advance()
        flops = _flops(layer, max(3, repeats // 3))
        task.advance()
        gpus = _gpus(machine, repeats)
    return HardwareSpec(
        name=_name(machine),
        cpu_bandwidth=tuple(bandwidth),
        cpu_flops=flops,
        memory=machine.memory_total or 0,
        hop=hop
        if not gpus
        else Figure.given(max(hop.value, HOP_S), "kernel call measured; with a GPU's copies", 0.3),
        gpus=gpus,
        cpu_experts=curve,
        cpu_expert_bytes=layer.bytes // layer.experts,
        notes=() if gpus else ("no GPU was found: its figures are absent",),
    )


def _layer(size: int, pool: Pool) -> ExpertLayer:
    """Experts of random INT8 weights, as many as make `size` bytes."""
    draw = np.random.default_rng(0)
    one = HIDDEN * INTERMEDIATE
    count = max(2 * max(DISTINCT), size // (3 * one))
    block = draw.integers(-127, 127, one, dtype=np.int8)

    def matrix() -> npt.NDArray[Any]:
        return np.roll(block, int(draw.integers(1, one)))  # a copy of its own for each matrix

    def scale(rows: int) -> npt.NDArray[np.float32]:
        return np.full(rows, 1e-3, np.float32)

    experts = [
        PackedExpert(matrix(), scale(INTERMEDIATE), matrix(), scale(INTERMEDIATE), matrix(), scale(HIDDEN))
        for _ in range(count)
    ]
    return ExpertLayer([experts], hidden=HIDDEN, intermediate=INTERMEDIATE, bits=8, threads_pool=pool)


def _bandwidth(layer: ExpertLayer, repeats: int, where: str) -> Figure:
    rates = [layer.read() / seconds for seconds in _timed(lambda _: layer.read(), repeats)]
    return Figure.measured(rates, f"{where}: all threads read {layer.bytes >> 20} MiB")


def _experts(layer: ExpertLayer, distinct: int, repeats: int) -> Figure:
    hidden = np.random.default_rng(1).standard_normal((1, HIDDEN)).astype(np.float32)
    weights = np.full((1, distinct), 1 / distinct, np.float32)

    def run(turn: int) -> object:
        # Other experts each time, so that none is still in a cache.
        ids = (np.arange(distinct) + turn * distinct) % layer.experts
        return layer.forward(hidden, ids[None].astype(np.int64), weights)

    return Figure.measured(
        _timed(run, repeats), f"{distinct} experts of {HIDDEN} x {INTERMEDIATE}, one token, {layer.isa.value}"
    )


def _hop(layer: ExpertLayer, repeats: int) -> Figure:
    hidden = np.zeros((1, HIDDEN), np.float32)
    ids, weights = np.full((1, 8), -1, np.int64), np.zeros((1, 8), np.float32)
    found = _timed(lambda _: layer.submit(hidden, ids, weights).result(), 4 * repeats)
    return Figure.measured(found, "hand over to the threads and back, no expert to compute")


def _flops(layer: ExpertLayer, repeats: int) -> Figure:
    draw = np.random.default_rng(2)
    hidden = draw.standard_normal((_PREFILL, HIDDEN)).astype(np.float32)
    ids = np.tile(np.arange(8, dtype=np.int64), (_PREFILL, 1))
    weights = np.full((_PREFILL, 8), 0.125, np.float32)
    work = 2.0 * 3 * HIDDEN * INTERMEDIATE * _PREFILL * 8
    rates = [work / seconds for seconds in _timed(lambda _: layer.forward(hidden, ids, weights), repeats)]
    return Figure.measured(rates, f"{_PREFILL} tokens through 8 experts")


def _gpus(machine: Hardware, repeats: int) -> tuple[GpuSpec, ...]:
    if not machine.gpus:
        return ()
    try:
        import torch
    except ModuleNotFoundError:
        return ()
    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(torch, index, repeats) for index in range(torch.cuda.device_count()))


def _gpu(torch: Any, index: int, repeats: int) -> GpuSpec:
    device = torch.device("cuda", index)
    size = 256 << 20
    here = torch.empty(size, dtype=torch.uint8, device=device)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    host = torch.empty(size // 4, dtype=torch.uint8).pin_memory()
    square = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    small = torch.zeros(64, device=device)

    def timed(work: Callable[[], object], times: int = 1) -> list[float]:
        def run(_: int) -> None:
            for _turn in range(times):
                work()
            torch.cuda.synchronize(device)

        return [seconds / times for seconds in _timed(run, repeats)]

    read = [2 * size / seconds for seconds in timed(lambda: there.copy_(here))]
    copy = [
        host.nbytes / seconds for seconds in timed(lambda: here[: host.nbytes].copy_(host, non_blocking=True))
    ]
    launch = timed(lambda: small.add_(1), times=100)
    flops = [2.0 * 4096**3 / seconds for seconds in timed(lambda: square @ square)]
    return GpuSpec(
        name=torch.cuda.get_device_name(device),
        memory=int(torch.cuda.mem_get_info(device)[1]),
        bandwidth=Figure.measured(read, "a copy inside its memory, read and written"),
        copy=Figure.measured(copy, "from pinned memory"),
        launch=Figure.measured(launch, "one of a hundred small kernels"),
        flops=Figure.measured(flops, "bfloat16 product of 4096 x 4096"),
    )


def _timed(work: Callable[[int], object], repeats: int) -> list[float]:
    work(0)
    found = []
    for turn in range(1, repeats + 1):
        started = time.perf_counter()
        work(turn)
        found.append(time.perf_counter() - started)
    return found


@contextmanager
def _on(cpus: Sequence[int]) -> Iterator[None]:
    """Run on some processors, where the system can say so; threads started inside stay there."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    wanted = before & set(cpus)
    if wanted:
        os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _name(machine: Hardware) -> str:
    gpus = ", ".join(gpu.name for gpu in machine.gpus)
    return f"{machine.cpu_name}, {machine.cores.usable} threads" + (f", {gpus}" if gpus else "")
