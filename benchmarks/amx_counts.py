"""How many AMX instructions an expert costs: counted, by running the machine code in the trap emulator of the tests.

    python benchmarks/amx_counts.py
    python benchmarks/amx_counts.py --shape qwen3-30b --tokens 16 32 96 --formats int8 int4-g128

Counts do not depend on the machine that runs this (it needs AVX-512 VNNI and a C++ compiler); speed on AMX hardware is
not predicted by it. One expert gets all tokens. Of the columns, all but the first are for each tile product (16 x 16
sums over 64 bytes of inputs): loads of activations (A), of weights (B) and of waiting sums (C), stores of sums. A full
product takes the tile unit 16 cycles, in which a core loads 2 tiles from its first-level cache and 3/4 from the second.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from ktplan import kernels
from ktplan.kernels import ExpertLayer, PackedExpert, Pool

SHAPES = {"qwen3-30b": (2048, 768), "dsv2-lite": (2048, 1408), "dsv3": (7168, 2048)}  # hidden, intermediate
FORMATS = {
    "int8": (8, None),
    "int4": (4, None),
    "int4-g32": (4, 32),
    "int4-g64": (4, 64),
    "int4-g128": (4, 128),
}
TRAP = Path(__file__).parents[1] / "tests" / "native" / "amx_trap.cc"


def emulator() -> ctypes.CDLL:
    """The trap, compiled and installed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "amx_trap.so"
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O3", "-fPIC", "-shared", "-pthread"]
        subprocess.run([*command, "-o", str(out), str(TRAP), "-ldl"], check=True)
        library = ctypes.CDLL(str(out), mode=ctypes.RTLD_GLOBAL)
    library.amx_trap_count.restype = ctypes.c_int64
    if library.amx_trap_install() != 0:
        raise SystemExit("SIGILL cannot be handled here")
    return library


def expert(hidden: int, inner: int, bits: int, group: int | None) -> PackedExpert:
    random = np.random.default_rng(0)
    arrays = []
    for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner)):
        arrays.append(random.integers(0, 256, rows * columns * bits // 8, np.uint8))
        shape = rows if group is None else (rows // 32, columns // group, 32)
        scale = np.full(shape, 2.0**-12, np.float32)
        arrays.append(scale if group is None else (scale.view(np.uint32) >> 16).astype(np.uint16))
    return PackedExpert(*arrays)


def line(trap: ctypes.CDLL, shape: str, tokens: int, form: str, activation_bits: int) -> str:
    hidden, inner = SHAPES[shape]
    bits, group = FORMATS[form]
    layer = ExpertLayer(
        [[expert(hidden, inner, bits, group)]], hidden=hidden, intermediate=inner, bits=bits, group=group,
        isa="amx-int8", activation_bits=activation_bits, threads_pool=Pool(1),
    )  # fmt: skip
    x = np.random.default_rng(1).standard_normal((tokens, hidden)).astype(np.float32)
    trap.amx_trap_reset()
    layer.forward(x, np.zeros((tokens, 1), np.int64), np.ones((tokens, 1), np.float32))

    def count(name: str) -> int:
        return int(trap.amx_trap_count(name.encode()))

    products = count("tdpbssd")
    a, b, c, stores = (
        count(name) / products for name in ("load for a", "load for b", "load for c", "tilestored")
    )
    configured = count("ldtilecfg") / products
    return (
        f"{shape:10} {form:9} a{activation_bits:<3} {tokens:6} {products:10} {a:6.3f} {b:6.3f} {c:6.3f} {stores:6.3f}"
        f" {configured:8.4f} {1 / (a + b + c):10.3f} {1 / b:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 96])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int8", "int4-g64"])
    arguments = parser.parse_args()
    trap = emulator()
    if kernels.tile_state().permitted:
        raise SystemExit("this processor executes AMX itself: nothing is trapped, so nothing is counted")
    print(f"{'shape':10} {'weights':9} {'act':4} {'tokens':>6} {'products':>10} {'A':>6} {'B':>6} {'C':>6}"
          f" {'stores':>6} {'configs':>8} {'per load':>10} {'per B':>8}")  # fmt: skip
    for shape in arguments.shape:
        for form in arguments.formats:
            for activation_bits in (8, 16):
                for tokens in arguments.tokens:
                    print(line(trap, shape, tokens, form, activation_bits), flush=True)


if __name__ == "__main__":
    main()
