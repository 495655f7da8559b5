"""Packed projections and experts in every format, with what they stand for in float64: for the tests of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ktplan.kernels import Activation, ExpertLayer, PackedExpert
from ktplan.store.layout import pack, unpack

Format = tuple[int, int | None]  # bits, inputs that share a scale
INTEGERS: list[Format] = [(8, None), (4, None), (4, 32), (4, 64), (4, 128)]
BF16: Format = (16, None)
Fill = Literal["random", "lowest", "highest", "mixed"]
BYTES = {"lowest": (0x80, 0x88), "highest": (0x7F, 0x77), "mixed": (0x80, 0x7F, 0x87, 0x78)}

ACTIVATIONS = [Activation("silu"), Activation("gelu"), Activation("gelu-tanh"), Activation("silu", limit=1.5),
               Activation("swiglu-oai", alpha=1.702, limit=1.25), Activation("swiglu-oai", alpha=0.9)]  # fmt: skip


def in_torch(activation: Activation, gate: Any, up: Any) -> Any:
    """The activation as torch computes it, in the tensors' own precision."""
    import torch
    from torch.nn import functional

    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    match activation.kind:
        case "silu":
            return functional.silu(gate) * up
        case "gelu":
            return functional.gelu(gate) * up
        case "gelu-tanh":
            return functional.gelu(gate, approximate="tanh") * up
        case "swiglu-oai":
            return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Projection:
    packed: np.ndarray
    scale: np.ndarray | None
    dense: np.ndarray  # float64 [rows, columns]


def projection(
    random: np.random.Generator,
    rows: int,
    columns: int,
    form: Format,
    fill: Fill = "random",
    padding: int = 0,
) -> Projection:
    """Every byte is legal; scales have either sign; the last `padding` rows are zeros, as their scales."""
    bits, group = form
    size = 1 / np.sqrt(columns)
    live = np.arange(rows) < rows - padding
    if bits == 16:
        halves = bf16_bits(random.standard_normal((rows, columns)) * size * live[:, None])
        return Projection(pack(halves.view(np.int8), 8), None, bf16_values(halves).astype(np.float64))
    count = rows * columns * bits // 8
    if fill == "random":
        packed = random.integers(0, 256, count, np.uint8)
    else:
        packed = random.choice(np.array(BYTES[fill], np.uint8), count)
    # a level of int8 is about 74 wide, a nibble 4.6; row scales of int4 are for 16 times the nibble
    levels = unpack(packed, rows, columns, bits) * live[:, None].astype(np.int8)
    packed = pack(levels, bits)
    width = random.uniform(0.5, 1.5, (rows, columns // (group or columns))) * size
    width /= 74 if bits == 8 or group is None else 4.6
    width *= random.choice([-1, 1], width.shape) * live[:, None]
    if group is None:
        scale = width[:, 0].astype(np.float32)
        return Projection(
            packed, scale, levels.astype(np.float64) * scale[:, None] * (16 if bits == 4 else 1)
        )
    halves = bf16_bits(width)
    dense = levels.astype(np.float64) * np.repeat(bf16_values(halves).astype(np.float64), group, axis=1)
    # [rows, groups] to [rows / 32, groups, 32]
    return Projection(
        packed, np.ascontiguousarray(halves.reshape(rows // 32, 32, -1).transpose(0, 2, 1)), dense
    )


@dataclass(frozen=True)
class Experts:
    """Some experts with biases; the last `padding` of their `inner` products are zeros."""

    packed: list[PackedExpert]
    dense: list[tuple[np.ndarray, ...]]  # gate, up, down, and their biases, float64
    hidden: int
    inner: int
    form: Format

    def layer(self, **how: Any) -> ExpertLayer:
        bits, group = self.form
        return ExpertLayer(
            [self.packed], hidden=self.hidden, intermediate=self.inner, bits=bits, group=group, **how
        )

    def routed(self, tokens: int, choices: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        random = np.random.default_rng(tokens)
        x = random.standard_normal((tokens, self.hidden), np.float32)
        ids = random.integers(0, len(self.packed), (tokens, choices))
        return x, ids, random.random((tokens, choices), np.float32)


def experts(count: int, hidden: int, inner: int, form: Format, padding: int = 0, seed: int = 0) -> Experts:
    random = np.random.default_rng(seed)
    packed, dense = [], []
    for _ in range(count):
        gate, up = (projection(random, inner, hidden, form, padding=padding) for _ in range(2))
        down = projection(random, hidden, inner, form)
        biases = [(random.standard_normal(n) / 4).astype(np.float32) for n in (inner, inner, hidden)]
        for bias in biases[:2]:
            bias[inner - padding :] = 0
        three = (gate, up, down)
        packed.append(
            PackedExpert(gate.packed, gate.scale, up.packed, up.scale, down.packed, down.scale, *biases)
        )
        dense.append((*(one.dense for one in three), *(bias.astype(np.float64) for bias in biases)))
    return Experts(packed, dense, hidden, inner, form)


def same_bits(ours: np.ndarray, theirs: np.ndarray, message: str = "") -> None:
    """NaN may be any NaN."""
    numbers = ~np.isnan(theirs)
    np.testing.assert_array_equal(~np.isnan(ours), numbers, err_msg=message)
    np.testing.assert_array_equal(
        ours[numbers].view(np.uint32), theirs[numbers].view(np.uint32), err_msg=message
    )
