"""How the threads behave: what a call costs besides its arithmetic, and what other programs cost it.

python benchmarks/pool_behaviour.py                  # all of it, two minutes
python benchmarks/pool_behaviour.py --only overhead idle

overhead  one token through experts that fit the second-level cache, for several widths: the time at no width at all
idle      processor time used after a call
scaling   two threads (or all) against one, with many tokens
beside    the same with another process busy on one core, for each way of pinning
pages     weights mapped from a file, in small pages, and copied
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from side_by_side import SHAPES, Routing, Series, Shape, block

from ktplan import hardware, kernels


def layer_over(packed: np.ndarray, shape: Shape, pool: kernels.Pool, **how: object) -> kernels.ExpertLayer:
    """INT8 experts side by side in `packed`."""
    size = shape.hidden * shape.intermediate
    scales = np.full(max(shape.hidden, shape.intermediate), 1e-4, np.float32)
    inner, outer = scales[: shape.intermediate], scales[: shape.hidden]

    def expert(e: int) -> kernels.PackedExpert:
        gate, up, down = (packed[(3 * e + i) * size : (3 * e + i + 1) * size] for i in range(3))
        return kernels.PackedExpert(gate, inner, up, inner, down, outer)

    experts = [expert(e) for e in range(shape.experts)]
    sizes = {"hidden": shape.hidden, "intermediate": shape.intermediate, "bits": 8}
    return kernels.ExpertLayer([experts], **sizes, threads_pool=pool, **how)


def random_bytes(shape: Shape) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape.weights * shape.experts, np.uint8)


def forward(layer: kernels.ExpertLayer, shape: Shape, tokens: int) -> Callable[[], object]:
    routing = Routing(tokens, shape)
    x = np.random.default_rng(7).standard_normal((tokens, shape.hidden), np.float32)
    weights = np.full((tokens, shape.top_k), 1 / shape.top_k, np.float32)
    out = np.empty_like(x)
    return lambda: layer.forward(x, routing(), weights, out)


def in_turns(calls: dict[str, Callable[[], object]], rounds: int, seconds: float = 0.2) -> dict[str, Series]:
    """Blocks of each in turn."""
    found = {name: Series() for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            found[name].blocks.append(block(call, seconds=seconds, calls=3))
    return found


def overhead(threads: int) -> Iterator[dict[str, object]]:
    """Least squares over widths: microseconds = overhead + slope * width."""
    widths = (64, 128, 192, 256)
    for bits in (16, 8):
        for count in sorted({1, threads}):
            pool = kernels.Pool(count)
            calls = {}
            for width in widths:
                shape = Shape(128, width, 8, 8)
                layer = layer_over(random_bytes(shape), shape, pool, activation_bits=bits)
                calls[str(width)] = forward(layer, shape, 1)
            series = in_turns(calls, 9, 0.05)
            micros = [min(b.seconds for b in series[str(w)].blocks) * 1e6 for w in widths]
            slope, start = np.polyfit(widths, micros, 1)
            yield {
                "what": f"overhead, a{bits}, {count} threads",
                "value": f"{start:.1f} us",
                "bar": "<= 15 us",
                "met": bool(start <= 15),
                "detail": ", ".join(f"{w}: {m:.1f}" for w, m in zip(widths, micros, strict=True)),
            }


def idle(threads: int) -> Iterator[dict[str, object]]:
    shape = Shape(2048, 768, 16, 8)
    layer = layer_over(random_bytes(shape), shape, kernels.Pool(max(2, threads)))
    call = forward(layer, shape, 1)
    burnt = []
    for _ in range(15):
        call()
        before = time.process_time()
        time.sleep(0.05)
        burnt.append((time.process_time() - before) * 1e3)
    value = statistics.median(burnt)
    yield {
        "what": f"processor time after a call, {layer.pool.threads} threads",
        "value": f"{value:.2f} ms",
        "bar": "<= 1 ms",
        "met": value <= 1,
        "detail": f"worst {max(burnt):.2f}",
    }


def scaling(threads: int) -> Iterator[dict[str, object]]:
    shape = Shape(2048, 768, 64, 8)
    memory = random_bytes(shape)
    many = max(2, threads)
    layers = {n: layer_over(memory, shape, kernels.Pool(n)) for n in (1, many)}
    for tokens in (1, 64, 256):
        series = in_turns({str(n): forward(layer, shape, tokens) for n, layer in layers.items()}, 9)
        one, all_ = series["1"], series[str(many)]
        ratio = one.seconds / all_.seconds
        bar = 1.8 if tokens == 256 else 1.0
        yield {
            "what": f"{many} threads against 1, {tokens} tokens",
            "value": f"{ratio:.2f} x{one.mark or all_.mark}",
            "bar": f">= {bar}",
            "met": ratio >= bar,
            "detail": f"{one.seconds * 1e3:.2f} -> {all_.seconds * 1e3:.2f} ms, others {all_.others:.0%}",
        }


@contextmanager
def busy_neighbour(count: int) -> Iterator[None]:
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(0.3 if count else 0)
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def beside(threads: int) -> Iterator[dict[str, object]]:
    """Mean times here: what a user waits includes the calls that were held up."""
    shape = Shape(2048, 768, 64, 8)
    memory = random_bytes(shape)
    many = max(2, threads)
    layers = {"1 thread": layer_over(memory, shape, kernels.Pool(1))}
    for pin in ("node", "core", "none"):
        layers[f"{many} threads, {pin}"] = layer_over(memory, shape, kernels.Pool(many, pin=pin))
    for tokens in (1, 16, 256):
        calls = {name: forward(layer, shape, tokens) for name, layer in layers.items()}
        means: dict[int, dict[str, float]] = {}
        others: dict[int, float] = {}
        for hogs in (0, 1):
            with busy_neighbour(hogs):
                series = in_turns(calls, 7, 0.4)
            means[hogs] = {k: statistics.median(b.seconds for b in s.blocks) * 1e3 for k, s in series.items()}
            others[hogs] = statistics.median(s.others for s in series.values())
        for name in calls:
            alone, held = means[0][name], means[1][name]
            against = held / means[1]["1 thread"]
            yield {
                "what": f"{name}, {tokens} tokens, a core taken",
                "value": f"{held / alone:.2f} x its time alone, {against:.2f} x one thread's there",
                "bar": "<= 1.1 x one thread's" if name != "1 thread" else "",
                "met": against <= 1.1,
                "detail": f"{alone:.2f} -> {held:.2f} ms, others {others[0]:.0%} -> {others[1]:.0%}",
            }


def pages(threads: int) -> Iterator[dict[str, object]]:
    shape = SHAPES["qwen3-30b"]._replace(experts=64)
    content = random_bytes(shape)
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        content.tofile(file.name)
        descriptor = os.open(file.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        mapped = np.memmap(file.name, dtype=np.uint8, mode="r")
        mapped._mmap.madvise(mmap.MADV_HUGEPAGE)
        small = mmap.mmap(-1, content.nbytes)
        small.madvise(mmap.MADV_NOHUGEPAGE)
        small.write(content)
        pool = kernels.Pool(threads)
        sources = {
            "mapped": layer_over(mapped.view(np.ndarray), shape, pool),
            "4 KiB pages": layer_over(np.frombuffer(small, np.uint8), shape, pool),
            "copied": layer_over(mapped.view(np.ndarray), shape, pool, memory="copied"),
        }
        for what in ("1 token", "4 tokens", "read"):
            calls: dict[str, Callable[[], object]] = {
                name: layer.read if what == "read" else forward(layer, shape, int(what[0]))
                for name, layer in sources.items()
            }
            series = in_turns(calls, 9)
            base = series["mapped"].seconds
            for name, one in series.items():
                yield {
                    "what": f"{what}, {name}",
                    "value": f"{one.seconds / base:.2f} x mapped{one.mark}",
                    "bar": "",
                    "met": True,
                    "detail": f"{one.seconds * 1e3:.2f} ms, others {one.others:.0%}",
                }


PARTS = {"overhead": overhead, "idle": idle, "scaling": scaling, "beside": beside, "pages": pages}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--threads", type=int, default=hardware.usable_cores().usable)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for part in args.only:
        for row in PARTS[part](args.threads):
            rows.append({"part": part, **row})
            verdict = "" if not row["bar"] else "met" if row["met"] else "NOT met"
            cells = (part, row["what"], row["value"], row["bar"], verdict, row["detail"])
            print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
