"""Large batches are cut up inside; nobody may notice. Nor what other libraries set in the processor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ktplan.kernels import ExpertLayer, PackedExpert, Pool


def random_layer(
    hidden: int, inner: int, experts: int, bits: int = 8, parts: int = 1, threads: int = 2
) -> ExpertLayer:
    random = np.random.default_rng(11)

    def expert() -> PackedExpert:
        arrays = []
        for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner)):
            arrays += [
                random.integers(0, 256, rows * columns * bits // 8, np.uint8),
                random.uniform(0.5, 1.5, rows).astype(np.float32)
                / (64 * np.sqrt(columns)).astype(np.float32),
            ]
        return PackedExpert(*arrays)

    held = [[expert() for _ in range(experts)] for _ in range(parts)]
    return ExpertLayer(held, hidden=hidden, intermediate=inner * parts, bits=bits, threads_pool=Pool(threads))


def routed(layer: ExpertLayer, tokens: int, choices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(12)
    x = random.standard_normal((tokens, layer.hidden), np.float32)
    ids = random.integers(0, layer.experts, (tokens, choices))
    return x, ids, random.random((tokens, choices), np.float32)


@pytest.mark.parametrize(
    ("hidden", "inner", "tokens", "choices", "parts"),
    [
        (1024, 64, 1500, 8, 1),  # the down projection goes by groups of columns
        (192, 64, 9000, 4, 2),  # the last group is narrower
        (64, 64, 130_000, 2, 1),  # the tokens go in several batches
    ],
)
def test_a_large_batch_equals_its_tokens(
    hidden: int, inner: int, tokens: int, choices: int, parts: int
) -> None:
    layer = random_layer(hidden, inner, 5, parts=parts)
    x, ids, weights = routed(layer, tokens, choices)
    whole = layer.forward(x, ids, weights)
    for start in (0, tokens // 3, tokens - 7):
        some = slice(start, start + 7)
        np.testing.assert_array_equal(whole[some], layer.forward(x[some], ids[some], weights[some]))


@pytest.mark.parametrize("tokens", [1, 3, 95, 96, 97, 193])
def test_one_expert_takes_any_number_of_tokens(tokens: int) -> None:
    layer = random_layer(128, 64, 1)
    x, ids, weights = routed(layer, tokens, 1)
    whole = layer.forward(x, ids, weights)
    for token in range(0, tokens, 13):
        one = slice(token, token + 1)
        np.testing.assert_array_equal(whole[one], layer.forward(x[one], ids[one], weights[one]))


def test_an_expert_may_be_chosen_twice_by_a_token() -> None:
    layer = random_layer(128, 64, 2)
    x, _, _ = routed(layer, 1, 1)
    twice = layer.forward(x, np.array([[1, 1]]), np.array([[0.25, 0.5]], np.float32))
    once = layer.forward(x, np.array([[1]]), np.array([[0.75]], np.float32))
    np.testing.assert_allclose(twice, once, rtol=1e-5, atol=1e-6)


def test_the_output_may_be_given() -> None:
    layer = random_layer(128, 64, 3)
    call = routed(layer, 4, 2)
    out = np.full((4, 128), np.nan, np.float32)
    assert layer.forward(*call, out=out) is out
    np.testing.assert_array_equal(out, layer.forward(*call))
    out.flags.writeable = False
    with pytest.raises(TypeError, match="out"):
        layer.forward(*call, out=out)


def test_weights_need_no_alignment_and_are_not_copied() -> None:
    layer = random_layer(128, 64, 1)
    size = 64 * 128
    memory = np.random.default_rng(3).integers(0, 256, 3 * size + 1, np.uint8)
    scales = np.full(128, 0.01, np.float32)

    def view(offset: int) -> PackedExpert:
        gate, up, down = (memory[offset + i * size : offset + (i + 1) * size] for i in range(3))
        return PackedExpert(gate, scales[:64], up, scales[:64], down, scales)

    odd = ExpertLayer([[view(1)]], hidden=128, intermediate=64, bits=8)
    call = routed(layer, 3, 1)
    first = odd.forward(*call)
    even = ExpertLayer(
        [[PackedExpert(*(array.copy() for array in view(1)[:6]))]], hidden=128, intermediate=64, bits=8
    )
    np.testing.assert_array_equal(first, even.forward(*call))
    memory[1:] = 0
    assert not odd.forward(*call).any()


def test_read_touches_every_byte() -> None:
    layer = random_layer(256, 128, 3, bits=4)
    assert layer.read() == 3 * 3 * 256 * 128 // 2


def test_layers_without_experts_give_zeros() -> None:
    layer = ExpertLayer([[None, None]], hidden=256, intermediate=128, bits=8)
    x = np.ones((2, 256), np.float32)
    assert not layer.forward(x, np.array([[0], [1]]), np.ones((2, 1), np.float32)).any()
    assert layer.bytes == 0


def test_flushed_denormals_of_the_caller_change_nothing() -> None:
    """Another library may have set flush-to-zero; the kernels use the default and put back what they found."""
    show = """
import numpy as np, sys, torch
sys.path.insert(0, {folder!r})
from test_batches import random_layer, routed
layer = random_layer(128, 64, 2); call = routed(layer, 5, 2)
tiny = (call[0], call[1], call[2] * np.float32(1e-40))
before = layer.forward(*tiny).view(np.uint32)
assert torch.set_flush_denormal(True)
after = layer.forward(*tiny).view(np.uint32)
flushing = not (torch.tensor([1e-40]) * 1).any()
print(np.array_equal(before, after), bool(before.any()), bool(flushing))
"""
    done = subprocess.run(
        [sys.executable, "-c", show.format(folder=str(Path(__file__).parent))], capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "True", "True"], done.stderr
