"""The emulator itself: what the manual says of each instruction, restated in numpy, for every shape and extreme."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import Trap

SIGNS = {"tdpbssd": (np.int8, np.int8), "tdpbsud": (np.int8, np.uint8), "tdpbusd": (np.uint8, np.int8),
         "tdpbuud": (np.uint8, np.uint8)}  # fmt: skip


class Product(ctypes.Structure):
    _fields_ = [("config", ctypes.c_void_p), ("c", ctypes.c_void_p), ("c_stride", ctypes.c_int64),
                ("a", ctypes.c_void_p), ("a_stride", ctypes.c_int64),
                ("b", ctypes.c_void_p), ("b_stride", ctypes.c_int64)]  # fmt: skip


def config(*shapes: tuple[int, int], start_row: int = 0) -> np.ndarray:
    """TILECFG for tiles of (rows, colsb)."""
    out = np.zeros(64, np.uint8)
    out[0], out[1] = 1, start_row
    for tile, (rows, colsb) in enumerate(shapes):
        out[16 + 2 * tile], out[48 + tile] = colsb, rows
    return out


def product(shape: np.ndarray, c: np.ndarray, a: np.ndarray, b: np.ndarray) -> Any:
    pointers = (shape.ctypes.data, c.ctypes.data, c.strides[0], a.ctypes.data, a.strides[0], b.ctypes.data)
    return ctypes.byref(Product(*pointers, b.strides[0]))


def integers(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """c + a @ b with b's four inputs a word side by side; int32 that wraps."""
    words, columns = len(b), b.shape[1] // 4
    plain = b.reshape(words, columns, 4).transpose(0, 2, 1).reshape(4 * words, columns)
    exact = c.astype(np.int64) + a.astype(np.int64) @ plain.astype(np.int64)
    return exact.astype(np.uint64).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("name", SIGNS)
@pytest.mark.parametrize("fill", ["random", "lowest", "all ones", "extremes"])
def test_integer_products_of_every_shape(probe: ctypes.CDLL, trap: Trap, name: str, fill: str) -> None:
    random = np.random.default_rng(0)

    def bytes_of(rows: int, stride: int) -> np.ndarray:
        if fill == "random":
            return random.integers(0, 256, (rows, stride), np.uint8)
        if fill == "extremes":
            return random.choice(np.array([0, 1, 127, 128, 129, 255], np.uint8), (rows, stride))
        return np.full((rows, stride), 0x80 if fill == "lowest" else 0xFF, np.uint8)

    left, right = SIGNS[name]
    for rows in range(1, 17):
        for columns in range(1, 17):
            words = int(random.integers(1, 17))
            a = bytes_of(rows, 4 * words + 3 * rows).view(left)[:, : 4 * words]
            b = bytes_of(words, 4 * columns + 5).view(right)[:, : 4 * columns]
            wide = random.integers(-(2**31), 2**31, (rows, columns + 2)).astype(np.int32)
            wide[:, 0] = 2**31 - 1  # the next positive product wraps
            before, c = wide.copy(), wide[:, :columns]
            expected = integers(c, a, b)
            shape = config((rows, 4 * columns), (rows, 4 * words), (words, 4 * columns))
            getattr(probe, name)(product(shape, c, a, b))
            np.testing.assert_array_equal(c, expected, err_msg=f"{rows} x {4 * words} x {columns}")
            np.testing.assert_array_equal(wide[:, columns:], before[:, columns:])


def test_sums_wrap_exactly(probe: ctypes.CDLL, trap: Trap) -> None:
    """-128 * -128 over 262144 inputs is 2^32: twice round and back at 0; one product less is 2^14 * 64 short."""
    a, b = np.full((16, 64), -128, np.int8), np.full((16, 64), -128, np.int8)
    for times, expected in ((4096, 0), (4095, -(2**20)), (2048, -(2**31)), (2047, 2**31 - 2**20)):
        c = np.ones((16, 16), np.int32)
        probe.repeat_tdpbssd(product(config(*[(16, 64)] * 3), c, a, b), ctypes.c_int64(times))
        assert (c == expected).all(), times


def test_every_tile_plays_every_role(probe: ctypes.CDLL, trap: Trap) -> None:
    random = np.random.default_rng(1)
    a, b = (random.integers(-128, 128, (16, 64)).astype(np.int8) for _ in range(2))
    c = np.zeros((8, 16, 16), np.int32)
    each = Product(
        config(*[(16, 64)] * 8).ctypes.data, c.ctypes.data, 64, a.ctypes.data, 64, b.ctypes.data, 64
    )
    shape = config(*[(16, 64)] * 8)
    each.config = shape.ctypes.data
    probe.every_tile(ctypes.byref(each))
    expected = integers(np.zeros((16, 16), np.int32), a, b)
    for tile in range(8):
        np.testing.assert_array_equal(c[tile], expected)


# --- bfloat16 ---


def rounded(exact_high: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """The nearest float32 of exact_high + rest (float64, the first the rounded sum), tiny results flushed to zero.

    To odd first, so that the second rounding cannot go wrong; tiny is judged after rounding, as the processor does.
    """
    bits = exact_high.view(np.int64)
    toward = np.where(rest > 0, np.inf, -np.inf)
    odd = np.where((rest != 0) & (bits & 1 == 0), np.nextafter(exact_high, toward), exact_high)
    with np.errstate(over="ignore", under="ignore"):
        out = odd.astype(np.float32)
    tiny = np.abs(odd) < 2.0**-126 - 2.0**-151
    return np.where(tiny, np.copysign(np.float32(0), out), out)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 result of a + b, both exact in float64: nearest even, tiny results flushed."""
    with np.errstate(invalid="ignore", over="ignore"):
        high = a + b
        part = high - a
        rest = (a - (high - part)) + (b - part)
    return rounded(high, np.where(np.isfinite(high), rest, 0.0))


def flushed(x: np.ndarray) -> np.ndarray:
    """float32 as float64, denormals taken as zero."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(
            np.float64
        )


def widened(x: np.ndarray) -> np.ndarray:
    return flushed((x.astype(np.uint32) << 16).view(np.float32))


def bf16_product(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """TDPBF16PS: even and odd products summed apart by fused multiply-add, then added, then added to c."""
    words, columns = len(b), b.shape[1] // 2
    sums = []
    for half in range(2):
        total = np.zeros((len(a), columns), np.float32)
        for k in range(words):
            with np.errstate(invalid="ignore"):
                exact = widened(a[:, 2 * k + half])[:, None] * widened(b[k, half::2])[None]
            total = add(exact, flushed(total))
        sums.append(flushed(total))
    return add(flushed(c), flushed(add(*sums)))


def bf16_case(random: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    sign = random.integers(0, 2, shape) << 15
    if kind == "any bits":
        return random.integers(0, 2**16, shape).astype(np.uint16)
    low, high = {"near one": (117, 137), "whole range": (0, 255), "tiny": (40, 80), "huge": (180, 255)}[kind]
    return (sign | random.integers(low, high, shape) << 7 | random.integers(0, 128, shape)).astype(np.uint16)


@pytest.mark.parametrize("kind", ["near one", "whole range", "tiny", "huge", "any bits"])
def test_bf16_products_round_as_the_manual_says(probe: ctypes.CDLL, trap: Trap, kind: str) -> None:
    random = np.random.default_rng(2)
    seen = 0
    for rows, words, columns in [(16, 16, 16), (1, 1, 1), (7, 3, 5), (16, 1, 16), (2, 16, 11)] * 6:
        a = bf16_case(random, kind, (rows, 2 * words))
        b = bf16_case(random, kind, (words, 2 * columns))
        c = (bf16_case(random, kind, (rows, columns)).astype(np.uint32) << 16).view(np.float32).copy()
        expected = bf16_product(c, a, b)
        shape = config((rows, 4 * columns), (rows, 4 * words), (words, 4 * columns))
        probe.tdpbf16ps(product(shape, c, a, b))
        np.testing.assert_array_equal(np.isnan(c), np.isnan(expected))
        kept = ~np.isnan(expected)
        np.testing.assert_array_equal(c[kept].view(np.uint32), expected[kept].view(np.uint32))
        seen += int(kept.sum())
    assert seen > 500


# --- moving tiles ---


def test_addresses_are_computed_in_every_form(probe: ctypes.CDLL, trap: Trap) -> None:
    memory = np.random.default_rng(3).integers(0, 256, 1 << 16, np.uint8)
    out = np.zeros((16, 1024), np.uint8)
    origin, stride = 4096, 96
    shape = config((16, 64))
    n = probe.addressing(ctypes.c_void_p(shape.ctypes.data), ctypes.c_void_p(memory.ctypes.data + origin),
                         ctypes.c_int64(stride), ctypes.c_void_p(out.ctypes.data))  # fmt: skip
    forms = [
        (0, 1),
        (0, 1),
        (0, 1),
        (64, 1),
        (-64, 1),
        (1024, 1),
        (-1024, 1),
        (0, 2),
        (0, 4),
        (8, 8),
        (0, 0),
        (128, 0),
    ]
    assert n == len(forms)
    for got, (displacement, scale) in zip(out, forms, strict=False):
        rows = [origin + displacement + scale * stride * m for m in range(16)]
        expected = np.stack([memory[at : at + 64] for at in rows])
        np.testing.assert_array_equal(got.reshape(16, 64), expected, err_msg=f"{displacement} {scale}")


@pytest.mark.parametrize("start_row", [0, 1, 4])
def test_loads_and_stores_touch_the_shape_alone(probe: ctypes.CDLL, trap: Trap, start_row: int) -> None:
    """A load that begins later (as after an interrupt) leaves the rows before as they were: zero after LDTILECFG."""
    source = np.arange(1, 1025, dtype=np.uint16).astype(np.uint8).reshape(16, 64)
    target = np.full((16, 64), 77, np.uint8)
    shape = config((0, 0), (0, 0), (0, 0), (5, 24), start_row=start_row)
    arguments = (ctypes.c_void_p(x.ctypes.data) for x in (shape, source, target))
    probe.load_then_store(*arguments)
    expected = np.full((16, 64), 77, np.uint8)
    expected[:5, :24] = source[:5, :24]
    expected[:start_row, :24] = 0
    np.testing.assert_array_equal(target, expected)


def test_the_configuration_can_be_read_back_until_it_is_released(probe: ctypes.CDLL, trap: Trap) -> None:
    shape = config((3, 20), (16, 64), (1, 4))
    stored, released = np.full(64, 9, np.uint8), np.full(64, 9, np.uint8)
    probe.configure_from_data(*(ctypes.c_void_p(x.ctypes.data) for x in (shape, stored, released)))
    np.testing.assert_array_equal(stored, shape)
    assert not released.any()
    nothing = np.zeros(64, np.uint8)  # palette 0 releases too
    probe.leave_configured(ctypes.c_void_p(shape.ctypes.data))
    assert probe.tiles_are_released() == 0
    probe.leave_configured(ctypes.c_void_p(nothing.ctypes.data))
    assert probe.tiles_are_released() == 1


def test_threads_have_tiles_of_their_own(probe: ctypes.CDLL, trap: Trap) -> None:
    random = np.random.default_rng(4)
    threads, times = 8, 20
    a = random.integers(-128, 128, (threads, 16, 64)).astype(np.int8)
    b = random.integers(-128, 128, (16, 64)).astype(np.int8)
    c = np.zeros((threads, 16, 16), np.int32)
    shape = config(*[(16, 64)] * 3)
    one = Product(shape.ctypes.data, c.ctypes.data, 64, a.ctypes.data, 64, b.ctypes.data, 64)
    probe.on_threads(ctypes.byref(one), threads, times)
    for thread in range(threads):
        once = integers(np.zeros((16, 16), np.int32), a[thread], b)
        np.testing.assert_array_equal(c[thread], once * times)
    if "amx" not in trap.native:
        assert trap.count("tdpbssd") == threads * times
        assert trap.count("tileloadd") == 2 * trap.count("tileloaddt1") == 2 * threads * times
        assert trap.count("traps") <= 3 * threads * times, "instructions in a row are one trap"


# --- what must die ---

ILLEGAL = {
    "not configured": (0, config(), "not configured"),
    "no shape": (1, config((16, 64)), "no shape"),
    "rows": (2, config((5, 64), (4, 64), (16, 64)), "C.rows != A.rows"),
    "columns": (3, config((4, 32), (4, 64), (16, 64)), "C.colsb != B.colsb"),
    "depth": (4, config((4, 64), (4, 32), (16, 64)), "A.colsb / 4 != B.rows"),
    "odd columns": (5, config((4, 62), (4, 64), (16, 62)), "no multiple of 4"),
    "same tile": (6, config((16, 64), (16, 64), (16, 64)), "same tile"),
    "start row": (8, config(*[(4, 64)] * 6, start_row=4), "start_row"),
}


def broken(at: int, value: int, *shapes: tuple[int, int]) -> np.ndarray:
    out = config(*shapes)
    out[at] = value
    return out


BAD_CONFIGS = {
    "palette": (broken(0, 2), "palette above 1"),
    "reserved 2": (broken(2, 1), "bytes 2-15"),
    "reserved 15": (broken(15, 1), "bytes 2-15"),
    "reserved 32": (broken(32, 1), "bytes 32-47"),
    "reserved 63": (broken(63, 1), "bytes 56-63"),
    "colsb": (config((16, 65)), "colsb above 64"),
    "rows": (config((17, 64)), "rows above 16"),
    "rows alone": (config((3, 0)), "one of rows and colsb"),
    "colsb alone": (config((0, 8)), "one of rows and colsb"),
}


def run_in_child(
    trap: Trap, probe_path: Path, which: int, shape: np.ndarray
) -> subprocess.CompletedProcess[str]:
    code = f"""
import ctypes
trap = ctypes.CDLL({str(trap.path)!r}, mode=ctypes.RTLD_GLOBAL)
assert trap.amx_trap_install() == 0
ctypes.CDLL(None).syscall(158, 0x1023, 18)
probe = ctypes.CDLL({str(probe_path)!r})
shape = (ctypes.c_uint8 * 64)(*{shape.tolist()})
probe.illegal({which}, shape)
"""
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_uses_die_with_a_reason(trap: Trap, probe_path: Path, case: str) -> None:
    which, shape, words = ILLEGAL[case]
    done = run_in_child(trap, probe_path, which, shape)
    assert done.returncode == -signal.SIGILL
    if "amx" not in trap.native:
        assert done.stderr.startswith("amx_trap: illegal ") and words in done.stderr


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_illegal_configurations_die_with_a_reason(trap: Trap, probe_path: Path, case: str) -> None:
    shape, words = BAD_CONFIGS[case]
    done = run_in_child(trap, probe_path, 7, shape)
    if "amx" in trap.native:
        assert done.returncode == -signal.SIGSEGV  # the processor reports a protection fault
    else:
        assert done.returncode == -signal.SIGILL and words in done.stderr


def test_other_illegal_instructions_still_die(trap: Trap, probe_path: Path) -> None:
    done = run_in_child(trap, probe_path, 9, config())
    assert done.returncode == -signal.SIGILL
    assert "amx_trap" not in done.stderr


# --- AVX-VNNI ---


def vnni(name: str, values: np.ndarray, size: int) -> np.ndarray:
    """values: c, a, b, 32 bytes each. The whole destination register."""
    c, a, b = values[:size].view(np.int32), values[32 : 32 + size], values[64 : 64 + size]
    if name.startswith("vpdpbusd"):
        parts = a.astype(np.int64) * b.view(np.int8).astype(np.int64)
    else:
        parts = a.view(np.int16).astype(np.int64) * b.view(np.int16).astype(np.int64)
    exact = c.astype(np.int64) + parts.reshape(len(c), -1).sum(axis=1)
    if name.endswith("ds"):
        exact = exact.clip(-(2**31), 2**31 - 1)
    out = np.zeros(32, np.uint8)
    out[:size] = exact.astype(np.uint64).astype(np.uint32).view(np.uint8)
    return out


@pytest.mark.parametrize("name", ["vpdpbusd", "vpdpbusds", "vpdpwssd", "vpdpwssds"])
@pytest.mark.parametrize("fill", ["random", "extremes"])
def test_vector_dot_products(probe: ctypes.CDLL, trap: Trap, name: str, fill: str) -> None:
    random = np.random.default_rng(5)
    for turn in range(60):
        values = random.integers(0, 256, 96, np.uint8)
        if fill == "extremes":
            values = random.choice(np.array([0, 127, 128, 255], np.uint8), 96)
            values[3:32:4] = random.choice(np.array([127, 128], np.uint8), 8)
        for form, size in (("ymm", 32), ("ymm_memory", 32), ("xmm", 16), ("xmm_memory", 16)):
            got = np.concatenate([values, np.zeros(32, np.uint8)])
            index = ()
            if (
                form == "ymm_memory"
            ):  # base + 4 * index: the operand lies 32 bytes further on, where the result will be
                got[64:96], got[96:] = 0, values[64:]
                index = (ctypes.c_int64(8),)
            getattr(probe, f"{name}_{form}")(ctypes.c_void_p(got.ctypes.data), *index)
            np.testing.assert_array_equal(got[96:], vnni(name, values, size), err_msg=f"{form} {turn}")
    if "avx-vnni" not in trap.native:
        assert trap.count(name) == 4 * 60


def test_a_vector_result_clears_what_is_above_it(probe: ctypes.CDLL, trap: Trap) -> None:
    flags = Path("/proc/cpuinfo").read_text()
    if "avx512f" not in flags:
        pytest.skip("the processor has no 512-bit registers")
    values = np.full(128, 5, np.uint8)
    probe.above_ymm(ctypes.c_void_p(values.ctypes.data))
    assert not values[96:].any()


def test_registers_never_used_count_as_zero(probe: ctypes.CDLL, trap: Trap) -> None:
    values = np.full(128, 5, np.uint8)
    probe.from_first_state(ctypes.c_void_p(values.ctypes.data))
    assert not values[96:].any()


# --- being there ---


def test_the_trap_says_whether_it_is_there(trap: Trap) -> None:
    assert trap.library.amx_trap_active() == 1 and trap.library.avx_vnni_trap_active() == 1
    assert trap.library.amx_trap_remove() == 0
    assert trap.library.amx_trap_active() == 0
    assert trap.library.amx_trap_install() == 0
    assert trap.library.amx_trap_count(b"no such instruction") == -1


@pytest.mark.parametrize("disabled", [False, True])
def test_preloaded_it_works_beside_faulthandler(trap_path: Path, probe_path: Path, disabled: bool) -> None:
    code = f"""
import ctypes, faulthandler
faulthandler.enable()
probe = ctypes.CDLL({str(probe_path)!r})
print(ctypes.CDLL(None).amx_trap_active(), flush=True)
ctypes.CDLL(None).syscall(158, 0x1023, 18)
print(probe.tiles_are_released(), flush=True)
probe.illegal(9, None)
"""
    env = {**os.environ, "LD_PRELOAD": str(trap_path)}
    if disabled:
        env["AMX_TRAP_DISABLE"] = "1"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGILL
    assert "Fatal Python error: Illegal instruction" in done.stderr
    if not disabled:
        assert done.stdout.split() == ["1", "1"]
    else:
        assert done.stdout.split()[0] == "0"
