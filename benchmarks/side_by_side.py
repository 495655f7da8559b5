"""What the kernel benchmarks share: shapes, routings, and time in blocks that know whether they were disturbed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

OTHERS = 0.08  # share of the machine that other processes may take in a quiet block


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    @property
    def weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.intermediate

    def operations(self, tokens: int) -> int:
        """Multiplications and additions of a layer."""
        return 2 * self.weights * tokens * self.top_k


SHAPES = {
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "dsv2-lite": Shape(2048, 1408, 64, 6),
    "dsv3": Shape(7168, 2048, 32, 8),  # 32 of its 256 experts
}


class Routing:
    """Endless random routings of a number of tokens; one token walks through all experts before any comes back."""

    def __init__(self, tokens: int, shape: Shape, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.calls: list[np.ndarray] = []
        for _ in range(16):
            order = rng.permutation(shape.experts)
            if tokens == 1:
                starts = range(0, shape.experts - shape.top_k + 1, shape.top_k)
                rows = [order[i : i + shape.top_k][None] for i in starts]
            else:
                rows = [np.stack([rng.permutation(shape.experts)[: shape.top_k] for _ in range(tokens)])]
            self.calls += [r.astype(np.int64) for r in rows]
        self.next = 0

    def __call__(self) -> np.ndarray:
        self.next += 1
        return self.calls[self.next % len(self.calls)]

    @property
    def experts_hit(self) -> float:
        """Mean number of distinct experts a call."""
        return statistics.mean(len(np.unique(call)) for call in self.calls)


def machine_seconds() -> float:
    """Processor seconds that everyone used since the machine started."""
    fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Block:
    """Some calls one after the other."""

    seconds: float  # a call
    cpu_seconds: float  # of this process, a call
    others: float  # share of the machine that others took

    @property
    def quiet(self) -> bool:
        return self.others <= OTHERS


def block(call: Callable[[], object], *, seconds: float = 0.2, calls: int = 1) -> Block:
    """Calls for so long, and at least so often."""
    machine, own, start = machine_seconds(), time.process_time(), time.perf_counter()
    done = 0
    while time.perf_counter() - start < seconds or done < calls:
        call()
        done += 1
    elapsed = time.perf_counter() - start
    used = time.process_time() - own
    others = max(0.0, machine_seconds() - machine - used) / elapsed / (os.cpu_count() or 1)
    return Block(elapsed / done, used / done, others)


@dataclass
class Series:
    """The blocks of one candidate. Medians are over quiet ones; over all, marked "~", where fewer than three were."""

    blocks: list[Block] = field(default_factory=list)
    one_thread: bool = False  # then processor time stands in for wall time where it was not quiet: "c"

    @property
    def quiet(self) -> list[Block]:
        return [b for b in self.blocks if b.quiet]

    @property
    def disturbed(self) -> bool:
        return len(self.quiet) < min(3, len(self.blocks))

    @property
    def seconds(self) -> float:
        if not self.disturbed:
            return statistics.median(b.seconds for b in self.quiet)
        return statistics.median(
            b.cpu_seconds if self.one_thread and not b.quiet else b.seconds for b in self.blocks
        )

    @property
    def mark(self) -> str:
        return "" if not self.disturbed else "c" if self.one_thread else "~"

    @property
    def others(self) -> float:
        return statistics.median(b.others for b in self.blocks)
