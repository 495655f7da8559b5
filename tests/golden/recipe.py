"""The inputs of the files that kt-kernel wrote: integer arithmetic only, the same bits on every machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_GAMMA, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64


@dataclass(frozen=True)
class Case:
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    parts: int
    seed: int


CASES = {
    "base": Case(experts=4, top_k=2, hidden=256, intermediate=128, parts=1, seed=1000),
    "edge": Case(experts=1, top_k=1, hidden=256, intermediate=128, parts=1, seed=2000),
    "numa2": Case(experts=2, top_k=1, hidden=256, intermediate=256, parts=2, seed=3000),
    "kblock": Case(experts=1, top_k=1, hidden=3712, intermediate=128, parts=1, seed=4000),
}


def words(seed: int, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
        return z ^ (z >> np.uint64(31))


def bell(seed: int, shape: tuple[int, ...], power: int) -> np.ndarray:
    """Sums of four 16-bit numbers about zero, times 2**power: exact in float32 and nearly normal."""
    random = words(seed, int(np.prod(shape)))
    total = sum(((random >> np.uint64(16 * n)) & np.uint64(0xFFFF)).astype(np.int64) for n in range(4))
    return ((2 * total - 4 * 65535).astype(np.float32) * np.float32(2.0**power)).reshape(shape)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bit patterns, nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def expert_bits(name: str, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """bfloat16 bit patterns of gate [I, H], up [I, H] and down [H, I]."""
    case, seed = CASES[name], CASES[name].seed + 10 * expert
    wide, tall = (case.intermediate, case.hidden), (case.hidden, case.intermediate)
    matrices = tuple(bf16_bits(bell(seed + n, shape, -21)) for n, shape in enumerate((wide, wide, tall)))
    if name == "edge":
        for matrix in matrices:
            _odd_rows(matrix)
    return matrices


def expert(name: str, number: int) -> list[np.ndarray]:
    """gate, up and down as float32."""
    return [bf16_values(bits) for bits in expert_bits(name, number)]


def _odd_rows(matrix: np.ndarray) -> None:
    columns = matrix.shape[1]
    matrix[0] = 0
    matrix[1] = 0x8000  # minus zero
    matrix[2] = 0x3F80  # 1.0
    matrix[3] = 0
    matrix[3, columns // 2] = 0xC2C8  # -100.0
    matrix[4, ::2], matrix[4, 1::2] = 0x0001, 0x8001  # denormals
    matrix[5] = 0x7F00  # 2**127
    matrix[5, ::3] = 0xFF00
    matrix[6] = bf16_bits((np.arange(columns) % 255 - 127).astype(np.float32))  # every int8 level
    matrix[7] = bf16_bits(
        (np.arange(columns) % 225 - 112).astype(np.float32)
    )  # every step before int4's second rounding
    matrix[8] = bf16_bits((np.arange(columns) % 127).astype(np.float32) / 2 - 31.5)  # halves
    matrix[9, 0] = 0x0080  # the smallest normal number


def tokens(name: str, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs of the forward pass: bfloat16 bits [tokens, H], expert ids int64 [tokens, k], router weights float32."""
    case, seed = CASES[name], CASES[name].seed + 500 + count
    hidden = bf16_bits(bell(seed, (count, case.hidden), -18))
    order = words(seed + 100000, count * case.experts).reshape(count, case.experts)
    ids = np.argsort(order, axis=1, kind="stable")[:, : case.top_k].astype(np.int64)
    weights = (words(seed + 200000, count * case.top_k) >> np.uint64(40)).astype(np.float32) * np.float32(
        2.0**-24
    )
    return hidden, ids, weights.reshape(count, case.top_k)
