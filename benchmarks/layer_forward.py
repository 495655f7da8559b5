"""One MoE layer: ktplan's kernels against torch's bf16 experts, side by side in one process.

    python benchmarks/layer_forward.py --shape qwen3-30b --tokens 1 4 16 64 256 --threads 2 --json result.json

Weights are random and larger than any cache; tokens are routed at random, at one token so that no expert comes back
before all the others were read. The candidates take turns in blocks of about a fifth of a second; a block counts as
quiet when other processes used at most 8 % of the machine in it, and medians are over quiet blocks (over all, marked
"~", where too few were). With one thread, a busy block counts by the processor time it took (marked "c"). Bandwidth is
measured over the very same packed weights, between the blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ktplan import hardware, kernels

SHAPES = {  # hidden, intermediate, experts, top-k
    "qwen3-30b": (2048, 768, 128, 8),
    "dsv2-lite": (2048, 1408, 64, 6),
    "dsv3": (7168, 2048, 32, 8),
}
BLOCK_SECONDS = 0.2
OTHERS = 0.08


@dataclass
class Series:
    """Seconds a call, block by block."""

    busy_mark: str
    quiet: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.quiet if len(self.quiet) >= 3 else self.quiet + self.busy)

    @property
    def mark(self) -> str:
        return "" if len(self.quiet) >= 3 else self.busy_mark


def machine_ticks() -> tuple[float, float]:
    """(processor seconds used by everyone, by this process)."""
    fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    used = sum(fields) - fields[3] - fields[4]
    return used / os.sysconf("SC_CLK_TCK"), time.process_time()


def block(call: Callable[[], None], series: Series, cores: int) -> None:
    """Runs `call` for a block and files its mean time."""
    time.sleep(0.02)  # the other candidate's threads stop spinning
    call()
    all_before, own_before = machine_ticks()
    start = time.perf_counter()
    calls = 0
    while (elapsed := time.perf_counter() - start) < BLOCK_SECONDS or calls < 3:
        call()
        calls += 1
    elapsed = time.perf_counter() - start
    all_after, own_after = machine_ticks()
    others = max(0.0, (all_after - all_before) - (own_after - own_before)) / elapsed / cores
    if others <= OTHERS:
        series.quiet.append(elapsed / calls)
    else:
        series.busy.append((own_after - own_before if series.busy_mark == "c" else elapsed) / calls)


class Routing:
    """Endless random routings of a number of tokens; one token walks through all experts before any comes back."""

    def __init__(self, tokens: int, experts: int, top_k: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.calls = []
        for _ in range(16):
            order = rng.permutation(experts)
            if tokens == 1:
                rows = [order[i : i + top_k][None] for i in range(0, experts - top_k + 1, top_k)]
            else:
                rows = [np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])]
            self.calls += [r.astype(np.int64) for r in rows]
        self.next = 0

    def __call__(self) -> np.ndarray:
        self.next += 1
        return self.calls[self.next % len(self.calls)]


def packed_layer(
    shape: tuple[int, int, int, int], bits: int, rng: np.random.Generator
) -> list[kernels.PackedExpert]:
    hidden, inter, experts, _ = shape
    size = hidden * inter * bits // 8
    memory = rng.integers(0, 256, experts * 3 * size, np.uint8)  # one stretch, as a mapped file is
    scales = np.full(max(hidden, inter), 1e-4, np.float32)

    def expert(e: int) -> kernels.PackedExpert:
        gate, up, down = (memory[(3 * e + i) * size : (3 * e + i + 1) * size] for i in range(3))
        return kernels.PackedExpert(gate, scales[:inter], up, scales[:inter], down, scales[:hidden])

    return [expert(e) for e in range(experts)]


def torch_layer(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, inter, experts, _ = shape
    gate_up = torch.empty(experts, 2 * inter, hidden, dtype=torch.bfloat16).normal_(0, 0.02)
    down = torch.empty(experts, hidden, inter, dtype=torch.bfloat16).normal_(0, 0.02)
    return gate_up, down


@torch.no_grad()
def torch_forward(
    weights: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """As transformers runs experts: a loop over those that were hit."""
    gate_up, down = weights
    out = torch.zeros_like(x)
    for expert in torch.unique(ids).tolist():
        token, choice = torch.where(ids == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[expert]) * w[token, choice, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


def candidates(
    shape: tuple[int, int, int, int], layers: int, pool: kernels.Pool, tokens: int, made: dict[object, object]
) -> Iterator[tuple[str, Callable[[], None]]]:
    hidden, inter, experts, top_k = shape
    rng = np.random.default_rng(7)
    x = rng.standard_normal((tokens, hidden), np.float32)
    w = np.full((tokens, top_k), 1 / top_k, np.float32)
    x16 = torch.from_numpy(x).bfloat16()
    w16 = torch.from_numpy(w).bfloat16()
    for bits, activation_bits in ((8, 16), (8, 8), (4, 16), (4, 8)):
        stack = made[(bits, activation_bits)]
        routing, out = Routing(tokens, experts, top_k, 1), np.empty((tokens, hidden), np.float32)
        counter = iter(range(1 << 60))

        def call(stack=stack, routing=routing, out=out, counter=counter) -> None:
            stack[next(counter) % layers].forward(x16, routing(), w, out)

        yield f"int{bits} a{activation_bits}", call
    if "torch" in made:
        routing_t = Routing(tokens, experts, top_k, 1)
        counter_t = iter(range(1 << 60))

        def call_torch() -> None:
            torch_forward(made["torch"][next(counter_t) % layers], x16, torch.from_numpy(routing_t()), w16)

        yield "torch bf16", call_torch


def hit_bytes(shape: tuple[int, int, int, int], tokens: int, bits: int) -> float:
    """Mean bytes of the distinct experts' weights a call."""
    hidden, inter, experts, top_k = shape
    routing = Routing(tokens, experts, top_k, 1)
    hit = statistics.mean(len(np.unique(r)) for r in routing.calls)
    return hit * 3 * hidden * inter * bits / 8


def measure(args: argparse.Namespace, name: str) -> dict[str, object]:
    shape = SHAPES[name]
    pool = kernels.Pool(args.threads)
    rng = np.random.default_rng(0)
    made: dict[object, object] = {}
    for bits in (8, 4):
        packed = [packed_layer(shape, bits, rng) for _ in range(args.layers)]
        for activation_bits in (16, 8):
            made[(bits, activation_bits)] = [
                kernels.ExpertLayer(
                    [p],
                    hidden=shape[0],
                    intermediate=shape[1],
                    bits=bits,
                    threads_pool=pool,
                    isa=args.isa,
                    activation_bits=activation_bits,
                )
                for p in packed
            ]
    if not args.no_torch:
        made["torch"] = [torch_layer(shape) for _ in range(args.layers)]
    rows = []
    for tokens in args.tokens:
        mark = "c" if args.threads == 1 else "~"
        series: dict[str, Series] = {}
        bandwidth: dict[int, Series] = {8: Series(mark), 4: Series(mark)}
        runs = list(candidates(shape, args.layers, pool, tokens, made))
        for _ in range(args.rounds):
            for label, call in runs:
                block(call, series.setdefault(label, Series(mark)), os.cpu_count() or 1)
            for bits, read in bandwidth.items():
                layer = made[(bits, 16)][0]
                block(lambda layer=layer: layer.read(), read, os.cpu_count() or 1)
        rows.append(row(shape, tokens, series, bandwidth, made))
        show(name, rows[-1])
    return {"shape": name, "rows": rows}


def row(
    shape: tuple[int, int, int, int],
    tokens: int,
    series: dict[str, Series],
    bandwidth: dict[int, Series],
    made: dict[object, object],
) -> dict[str, object]:
    hidden, inter, _, top_k = shape
    operations = 2 * 3 * hidden * inter * tokens * top_k
    out: dict[str, object] = {"tokens": tokens, "candidates": {}}
    base = series.get("torch bf16")
    for label, s in series.items():
        entry = {
            "ms": s.seconds * 1e3,
            "mark": s.mark,
            "gops": operations / s.seconds / 1e9,
            "blocks": [*s.quiet, *s.busy],
        }
        if label.startswith("int"):
            bits = int(label[3])
            read = made[(bits, 16)][0].read() / bandwidth[bits].seconds
            rate = hit_bytes(shape, tokens, bits) / s.seconds
            entry |= {"bytes_per_s": rate, "of_read": rate / read, "read_bytes_per_s": read}
        if base is not None:
            entry["times_torch"] = base.seconds / s.seconds
        out["candidates"][label] = entry
    return out


def show(name: str, entry: dict[str, object]) -> None:
    for label, c in entry["candidates"].items():
        cells = [
            name,
            f"{entry['tokens']:4d}",
            f"{label:10s}",
            f"{c['ms']:9.3f}{c['mark']:1s} ms",
            f"{c['gops']:6.1f} GOP/s",
        ]
        if "times_torch" in c:
            cells.append(f"{c['times_torch']:5.2f} x torch")
        if "of_read" in c:
            cells.append(f"{c['bytes_per_s'] / 1e9:5.1f} GB/s")
            cells.append(f"{c['of_read'] * 100:5.1f} % of {c['read_bytes_per_s'] / 1e9:.1f} GB/s read")
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["qwen3-30b", "dsv2-lite"], choices=sorted(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--threads", type=int, default=hardware.usable_cores().usable)
    parser.add_argument("--layers", type=int, default=2, help="layers of weights to rotate over")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each candidate")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = hardware.detect()
    chosen = kernels.isa(args.isa)
    print(
        f"{machine.cpu_name}, {args.threads} threads, {chosen.value} ({chosen.why}), torch {torch.__version__}",
        flush=True,
    )
    results = [measure(args, name) for name in args.shape]
    if args.json:
        args.json.write_text(
            json.dumps(
                {"cpu": machine.cpu_name, "isa": chosen.value, "threads": args.threads, "results": results},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
