"""One MoE layer: ktplan against kt-kernel, ggml and torch, side by side, and against the limits of the machine.

    python benchmarks/layer_forward.py --json layer.json                 # everything; about 15 minutes, quiet machine
    python benchmarks/layer_forward.py --json layer.json --shape dsv3 --tokens 1 4 --engine ours kt
    python benchmarks/layer_forward.py --json layer.json --bars          # what was reached, from the file alone

A layer is routed experts only: gate, up, SiLU x up, down, weighted sum. Weights are random and larger than any cache;
tokens are routed at random, one token so that no expert comes back before all the others were read. Each engine runs in
a process of its own and takes turns, in blocks of `--seconds`, with ktplan's in the format that compares with it; a
block counts as quiet when other processes took at most 8 % of the machine in it. Times are medians over quiet blocks;
"~": over all, because fewer than three were quiet; "c": the same with one thread, by processor time. "of limit" is the
least time by reading (m; measured over the same weights, between the blocks) or by arithmetic (c; a loop of the
fastest instruction) over the time taken. Peers may live in other environments: --kt-python, --ggml-python.
With --json, points already in the file are not taken again.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from peers.bars import verdicts
from peers.ours import FORMATS
from peers.results import HEADER, Point, Results
from peers.session import PEERS, EngineFailed, Peer, Worker, lacks
from side_by_side import SHAPES

from ktplan import hardware, kernels

TOKENS = (1, 4, 16, 32, 64, 256, 1024)


def rounds(tokens: int, given: int | None) -> int:
    return given or (5 if tokens <= 64 else 3 if tokens <= 256 else 2)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(rows: list[list[str]], header: tuple[str, ...]) -> None:
    widths = [max(len(row[i]) for row in [list(header), *rows]) for i in range(len(header))]
    for row in (list(header), ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def take_limits(args: argparse.Namespace, results: Results, shape: str) -> None:
    """Peaks and read bandwidth, with one thread and with all."""
    form = args.format[0]
    for threads in sorted({1, args.threads}):
        if f"int8 {threads}" in results.limits:
            continue
        ours = Worker(sys.executable, "ours", form, shape, threads)
        with contextlib.closing(ours):
            for kind in ("int8", "bf16", "fp32"):
                results.limits[f"{kind} {threads}"] = ours.ask(limit=kind)
            for _ in range(5):
                results.add(
                    Point(shape, 0, threads, f"read {form}"), ours.block(0, args.seconds, f"{form} read")
                )
        results.save()


def take_turns(
    args: argparse.Namespace, results: Results, shape: str, ours: Worker, peer: Peer | None, form: str
) -> None:
    """Our format, and the peer if there is one, for every number of tokens."""
    threads = args.threads
    wanted = [t for t in args.tokens if peer is None or t <= peer.most_tokens]
    left = [
        t
        for t in wanted
        if not (peer and Point(shape, t, peer.threads or threads, peer.name) in results.points)
    ]
    if peer is None:
        left = [t for t in wanted if Point(shape, t, threads, f"ktplan {form} a8") not in results.points]
    if not left:
        return
    theirs = None
    if peer is not None:
        try:
            theirs = Worker(
                args.python[peer.engine], peer.engine, peer.format, shape, peer.threads or threads
            )
        except EngineFailed as failure:
            note(f"{peer.name} does not run {shape}: {failure}")
            return
        results.bytes[peer.name] = theirs.bytes_per_weight
    with contextlib.closing(theirs) if theirs else contextlib.nullcontext():
        for tokens in left:
            begun = time.perf_counter()
            for _ in range(rounds(tokens, args.rounds)):
                if theirs is not None and peer is not None:
                    point = Point(shape, tokens, peer.threads or threads, peer.name)
                    results.add(point, theirs.block(tokens, args.seconds))
                    time.sleep(0.08)  # some engines' threads spin for 50 ms
                for bits in ("a16", "a8"):
                    mine = Point(shape, tokens, threads, f"ktplan {form} {bits}")
                    results.add(mine, ours.block(tokens, args.seconds, f"{form} {bits}"))
                if tokens <= 4:
                    reading = Point(shape, tokens, threads, f"read {form}")
                    results.add(reading, ours.block(tokens, args.seconds, f"{form} read"))
            results.save()
            name = peer.name if peer else f"ktplan {form} alone"
            note(f"{shape}, {tokens} tokens, {name}: {time.perf_counter() - begun:.1f} s")


def measure(args: argparse.Namespace, results: Results, shape: str) -> None:
    peers = [p for p in PEERS if p.engine in args.python and p.against in args.format]
    take_limits(args, results, shape)
    ours = Worker(sys.executable, "ours", ",".join(args.format), shape, args.threads)
    with contextlib.closing(ours):
        for form in args.format:
            for peer in [p for p in peers if p.against == form] or [None]:
                try:
                    take_turns(args, results, shape, ours, peer, form)
                except EngineFailed as failure:
                    note(f"{peer.name if peer else form}: {failure}")


def report(args: argparse.Namespace, results: Results) -> None:
    print(results.machine.get("words", ""))
    for name, limit in sorted(results.limits.items()):
        kind, threads = name.split()
        print(f"{kind}, {threads} threads: {limit['rate'] / 1e9:.0f} GOP/s ({limit['name']})")
    for shape in args.shape:
        for form in args.format:
            for threads in sorted({1, args.threads}):
                rate = results.read_rate(shape, threads, form)
                if rate:
                    print(f"reading {shape}'s {form} weights, {threads} threads: {rate / 1e9:.1f} GB/s")
    if args.bars:
        table(
            list(verdicts(results, args.shape, args.threads)),
            ("shape", "activations", "what", "bar", "is", ""),
        )
    else:
        table(list(results.rows(args.shape, args.tokens, args.threads)), HEADER)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument(
        "--format", nargs="+", default=["int8", "int4", "int4-g32", "bf16"], choices=list(FORMATS)
    )
    parser.add_argument("--engine", nargs="+", default=["ours", "kt", "ggml", "torch"])
    parser.add_argument("--threads", type=int, default=hardware.usable_cores().usable)
    parser.add_argument("--rounds", type=int, help="blocks of each; default 5, and fewer with many tokens")
    parser.add_argument("--seconds", type=float, default=0.12, help="of a block, at least")
    parser.add_argument("--kt-python", default=sys.executable, help="a Python that has kt-kernel")
    parser.add_argument("--ggml-python", default=sys.executable, help="a Python that has llama-cpp-python")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--bars", action="store_true", help="say what is reached, from what the file has")
    parser.add_argument("--json", type=Path, help="where points are kept")
    args = parser.parse_args()
    pythons = {"kt": args.kt_python, "ggml": args.ggml_python, "torch_experts": args.torch_python}
    args.python = {}
    for engine, python in pythons.items():
        if args.bars or engine.removesuffix("_experts") not in args.engine:
            continue
        command = lacks(python, engine)
        if command is None:
            args.python[engine] = python
        else:
            note(f"without {engine.removesuffix('_experts')}, which {python} does not have: {command}")
    return args


def main() -> None:
    args = arguments()
    results = Results(args.json)
    if not args.bars:
        chosen = kernels.isa()
        words = f"{hardware.detect().cpu_name}, {args.threads} threads, {chosen.value} ({chosen.why})"
        results.machine = {"words": words, "threads": args.threads, "isa": chosen.value}
        for shape in args.shape:
            measure(args, results, shape)
    report(args, results)


if __name__ == "__main__":
    main()
