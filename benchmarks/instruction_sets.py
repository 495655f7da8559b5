"""Every set of kernels that runs here, in every format: what a layer reaches with one token and with many.

    python benchmarks/instruction_sets.py
    python benchmarks/instruction_sets.py --formats int4-g128 bf16 --tokens 1 64 --rounds 15

Qwen3-30B-A3B's experts (2048 x 768), one thread. With one token the experts take turns over more memory than a cache
holds: gigabytes of weights a second. With more, one expert takes them all: thousand million operations (a product and
its addition are two) a second. Seconds are those of the thread's own processor time, which other processes disturb
less. The sets take turns within a round; figures are medians over rounds, beside each its ratio to the last set.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from ktplan import kernels
from ktplan.kernels import ExpertLayer, PackedExpert, Pool

HIDDEN, INNER = 2048, 768
FORMATS = {
    "int8": (8, None),
    "int4": (4, None),
    "int4-g32": (4, 32),
    "int4-g64": (4, 64),
    "int4-g128": (4, 128),
    "bf16": (16, None),
}
COLD_BYTES = 160 << 20


def experts(bits: int, group: int | None) -> list[PackedExpert]:
    random = np.random.default_rng(0)
    count = COLD_BYTES // (3 * HIDDEN * INNER * bits // 8)
    held = []
    for _ in range(count):
        arrays: list[np.ndarray | None] = []
        for rows, columns in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)):
            packed = random.integers(0, 256, rows * columns * bits // 8, np.uint8)
            if bits == 16:
                packed[1::2] = 0x3C + (packed[1::2] & 0x80)  # about a hundredth in size
            shape = rows if group is None else (rows // 32, columns // group, 32)
            scale = np.full(shape, 2.0**-12, np.float32)
            halves = (scale.view(np.uint32) >> 16).astype(np.uint16)
            arrays += [packed, None if bits == 16 else scale if group is None else halves]
        held.append(PackedExpert(*arrays))
    return held


def seconds(layer: ExpertLayer, tokens: int, first: int, calls: int) -> float:
    """Of one call; with one token each call takes the next expert."""
    x = np.random.default_rng(tokens).standard_normal((tokens, HIDDEN), np.float32)
    weights, out = np.ones((tokens, 1), np.float32), np.empty_like(x)
    start = time.thread_time()
    for call in range(calls):
        expert = (first + call) % layer.experts if tokens == 1 else 0
        layer.forward(x, np.full((tokens, 1), expert), weights, out)
    return (time.thread_time() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 64])
    parser.add_argument(
        "--isas", nargs="+", default=[name for name in kernels.available_isas() if name != "scalar"]
    )
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    pool = Pool(1)
    print(f"{'format':<10} {'act.':>4} {'tokens':>6}  " + "".join(f"{name:>22}" for name in args.isas))
    for name in args.formats:
        bits, group = FORMATS[name]
        held = experts(bits, group)
        for activation_bits in (8, 16):
            layers = [
                ExpertLayer([held], hidden=HIDDEN, intermediate=INNER, bits=bits, group=group,
                            activation_bits=activation_bits, isa=isa, threads_pool=pool)
                for isa in args.isas
            ]  # fmt: skip
            for tokens in args.tokens:
                amount = 3 * HIDDEN * INNER * (bits / 8 if tokens == 1 else 2 * tokens) / 1e9
                calls = 12 if tokens == 1 else max(1, 32 // tokens)
                rounds = [
                    [
                        amount / seconds(layer, tokens, calls * (turn + i), calls)
                        for i, layer in enumerate(layers)
                    ]
                    for turn in range(args.rounds)
                ]
                reached = [statistics.median(column) for column in zip(*rounds, strict=True)]
                unit = "GB/s" if tokens == 1 else "GOP/s"
                cells = (f"{rate:.1f} {unit} {rate / reached[-1]:5.2f}" for rate in reached)
                print(
                    f"{name:<10} {activation_bits:>4} {tokens:>6}  "
                    + "".join(f"{cell:>22}" for cell in cells)
                )


if __name__ == "__main__":
    main()
