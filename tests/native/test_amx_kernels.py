"""The AMX kernels' own machine code, executed by the trap emulator where the processor lacks AMX.

Exact integers, layers with the scalar kernels' bits, kt-kernel's outputs; and counts, so that nothing passes by taking
another way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from ktplan import kernels
from ktplan.kernels import ExpertLayer, PackedExpert, Pool

from .conftest import Trap

NEEDED = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
MISSING = NEEDED - set(kernels.cpu_features())
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"AMX is emulated, {' '.join(sorted(MISSING))} is not")
GOLDEN = Path(__file__).parents[1] / "golden"
AMX = "amx-int8"


@pytest.fixture(autouse=True)
def _executed(trap: Trap) -> Iterator[None]:
    """AMX is there during the test, and gone before others choose their kernels."""
    yield
    trap.library.amx_trap_remove()
    assert "amx" in trap.native or AMX not in kernels.available_isas()


def weights_of(
    random: np.random.Generator, rows: int, columns: int, bits: int, group: int | None
) -> list[Any]:
    """Random packed bytes, every one legal, and scales that keep results near one."""
    packed = random.integers(0, 256, rows * columns * bits // 8, np.uint8)
    size = 1 / (64 * np.sqrt(columns))
    if bits == 16:
        values = random.standard_normal(rows * columns).astype(np.float32) / np.float32(np.sqrt(columns))
        return [(values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8), None]
    if group is None:
        return [packed, (random.uniform(0.5, 1.5, rows) * size).astype(np.float32)]
    scale = (random.uniform(8, 24, (rows // 32, columns // group, 32)) * size).astype(np.float32)
    return [packed, (scale.view(np.uint32) >> 16).astype(np.uint16)]


def experts(
    count: int, hidden: int, inner: int, bits: int, group: int | None = None, seed: int = 0
) -> list[Any]:
    random = np.random.default_rng(seed)
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return [
        PackedExpert(*(array for shape in shapes for array in weights_of(random, *shape, bits, group)))
        for _ in range(count)
    ]


def layer_of(
    held: list[Any], hidden: int, inner: int, bits: int, isa: str, threads: int = 1, **how: Any
) -> ExpertLayer:
    return ExpertLayer(
        [held], hidden=hidden, intermediate=inner, bits=bits, isa=isa, threads_pool=Pool(threads), **how
    )


def routed(hidden: int, counts: list[int], seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A token for each place: expert e gets counts[e] of them; some choose a second expert too."""
    random = np.random.default_rng(seed)
    first = random.permutation(np.repeat(np.arange(len(counts)), counts))
    ids = np.stack([first, np.full(len(first), -1)], axis=1)
    x = random.standard_normal((len(first), hidden)).astype(np.float32)
    return x, ids, random.random((len(first), 2)).astype(np.float32)


def products(trap: Trap) -> int:
    return trap.count("tdpbssd")


# --- exact integers ---


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize("columns", [128, 384, 3584 + 128])
def test_sums_are_exact_for_every_number_of_rows(
    trap: Trap, bits: int, activation_bits: int, columns: int
) -> None:
    """5 to 40 rows, and up to and over what one call takes; inputs over the boundaries of chunks and k-blocks."""
    from ktplan.store.layout import unpack

    random = np.random.default_rng(columns + bits)
    n = 32 if columns > 1000 else 96
    packed = random.integers(0, 256, n * columns * bits // 8, np.uint8)
    weights = unpack(packed, n, columns, bits).astype(np.int64) * (16 if bits == 4 else 1)
    assert weights.min() == -128
    some = (5, 16, 17, 33, 48, 96, 97) if columns > 1000 else (*range(5, 41), 63, 64, 79, 80, 95, 96, 97)
    for rows in some:
        x = (random.standard_normal((rows, columns)) * 10.0 ** random.integers(-3, 4)).astype(np.float32)
        levels, _ = kernels.quantize_rows(x, activation_bits, isa="scalar")
        before = products(trap)
        dots = kernels.dot_products(x, packed, n, bits, activation_bits, isa=AMX)
        np.testing.assert_array_equal(dots, levels.astype(np.int64) @ weights.T, err_msg=f"{rows} rows")
        if "amx" not in trap.native:
            # 97 rows are 96 and one more, which its 16-bit planes or its two columns tiles take like any block
            tiles = sum(-(-part // 16) for part in [96] * (rows // 96) + [rows % 96])
            least = tiles * (activation_bits // 8) * (n // 16) * (columns // 64)
            assert products(trap) - before == least, f"{rows} rows"


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_extreme_levels_do_not_overflow(trap: Trap, bits: int, activation_bits: int) -> None:
    """Every weight at -128 (-8), every activation at its largest, over the widest rows of today's models."""
    columns = 18432
    packed = np.full(32 * columns * bits // 8, 0x80 if bits == 8 else 0x88, np.uint8)
    x = np.ones((6, columns), np.float32)
    x[1] = -1
    top = 127 if activation_bits == 8 else 32639
    expected = np.full((6, 32), -128 * top * columns)
    expected[1] *= -1
    dots = kernels.dot_products(x, packed, 32, bits, activation_bits, isa=AMX)
    np.testing.assert_array_equal(dots, expected)
    assert products(trap) > 0 or "amx" in trap.native


# --- whole layers ---

FORMATS = [(8, None), (4, None), (4, 32), (4, 64), (4, 128)]


@pytest.mark.parametrize(
    ("bits", "group", "offsets"),
    [*((*form, False) for form in FORMATS), (4, 32, True), (4, 64, True), (4, 128, True)],
)
@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (384, 256)])
def test_layers_have_the_scalar_kernels_bits(
    trap: Trap, bits: int, group: int | None, offsets: bool, activation_bits: int, hidden: int, inner: int
) -> None:
    """Experts with few tokens, with a block, with an odd number of blocks, and with more than one call takes."""
    held = experts(6, hidden, inner, bits, group)
    call = routed(hidden, [1, 4, 5, 19, 40, 113] if hidden == 256 else [0, 3, 16, 33, 70, 97])
    how = {"group": group, "offsets": offsets, "activation_bits": activation_bits}
    expected = layer_of(held, hidden, inner, bits, "scalar", **how).forward(*call)
    assert np.isfinite(expected).all() and np.abs(expected).max() > 0.01
    for threads in (1, 3):
        trap.reset()
        ours = layer_of(held, hidden, inner, bits, AMX, threads, **how).forward(*call)
        np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))
        if "amx" not in trap.native:
            assert products(trap) > 1000


@pytest.mark.parametrize("activation_bits", [8, 16])
def test_inputs_over_a_k_block_and_several_parts(trap: Trap, activation_bits: int) -> None:
    hidden, inner = 3584 + 256, 128
    for bits, group in ((8, None), (4, None), (4, 64)):
        parts = [experts(2, hidden, inner, bits, group, seed) for seed in (3, 4)]
        call = routed(hidden, [5, 17])
        out = [
            ExpertLayer(parts, hidden=hidden, intermediate=2 * inner, bits=bits, group=group, isa=isa,
                        offsets=group is not None, activation_bits=activation_bits, threads_pool=Pool(1)).forward(*call)
            for isa in ("avx512-vnni", AMX)
        ]  # fmt: skip
        np.testing.assert_array_equal(out[0].view(np.uint32), out[1].view(np.uint32))
    assert products(trap) > 0 or "amx" in trap.native


def test_a_result_does_not_depend_on_the_others(trap: Trap) -> None:
    """A token's own bits, whether its expert multiplies one row or forty."""
    for bits in (8, 4):
        layer = layer_of(experts(1, 256, 128, bits), 256, 128, bits, AMX)
        x, ids, weights = routed(256, [40])
        whole = layer.forward(x, ids, weights)
        for some in (slice(0, 1), slice(7, 12), slice(3, 36)):
            np.testing.assert_array_equal(layer.forward(x[some], ids[some], weights[some]), whole[some])


def test_what_is_not_finite_stays_in_its_own_token(trap: Trap) -> None:
    layer = layer_of(experts(1, 256, 128, 8), 256, 128, 8, AMX)
    x, ids, weights = routed(256, [21])
    clean = layer.forward(x, ids, weights)
    x[4, 3], x[17, 255] = np.nan, -np.inf
    out = layer.forward(x, ids, weights)
    assert np.isnan(out[[4, 17]]).all()
    kept = [row for row in range(21) if row not in (4, 17)]
    np.testing.assert_array_equal(out[kept], clean[kept])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("case", ["base", "numa2"])
def test_kt_kernels_own_bytes_give_kt_kernels_own_outputs(trap: Trap, case: str, kind: str) -> None:
    """Within a bfloat16 step of what kt-kernel 0.7.2 computed with its AMX kernels; the scalar kernels' bits."""
    recipe = _recipe()
    sizes = recipe.CASES[case]
    stored = load_file(GOLDEN / "kt-kernel-0.7.2" / f"{case}.{kind}.safetensors")
    parts = [
        [
            PackedExpert(
                *(
                    stored[f"blk.0.ffn_{projection}_exps.{expert}.numa.{part}.{what}"]
                    for projection in ("gate", "up", "down")
                    for what in ("weight", "scale")
                )
            )
            for expert in range(sizes.experts)
        ]
        for part in range(sizes.parts)
    ]
    how = {
        "hidden": sizes.hidden,
        "intermediate": sizes.intermediate,
        "bits": int(kind[3:]),
        "activation_bits": 8,
    }
    layers = [
        ExpertLayer(parts, isa=isa, numerics="upstream", threads_pool=Pool(1), **how)
        for isa in (AMX, "scalar")
    ]
    x, ids, weights = recipe.tokens(case, 40)
    with safe_open(GOLDEN / "kt-kernel-0.7.2" / "forward.safetensors", "pt") as file:
        import torch

        theirs = file.get_tensor(f"{case}.{kind.upper()}.q40.amx").view(torch.int16).numpy().view(np.uint16)
    amx, scalar = (layer.forward(x, ids, weights) for layer in layers)
    np.testing.assert_array_equal(amx.view(np.uint32), scalar.view(np.uint32))
    ours = recipe.bf16_bits(kernels.round_bf16(amx, isa="scalar"))
    assert np.abs(_ordered(ours) - _ordered(theirs)).max() <= 1
    assert products(trap) > 0 or "amx" in trap.native


def _recipe() -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("golden_recipe_amx", GOLDEN / "recipe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _ordered(bits: np.ndarray) -> np.ndarray:
    signed = bits.astype(np.int32)
    return np.where(signed & 0x8000, 0x8000 - signed, signed)


# --- bfloat16 weights ---


def bf16_experts(hidden: int, inner: int) -> tuple[list[Any], list[tuple[np.ndarray, ...]]]:
    """Packed, and in float64 as (gate, up, down)."""
    from ktplan.store.layout import pack

    random = np.random.default_rng(8)
    packed, plain = [], []
    for _ in range(4):
        matrices = []
        arrays: list[Any] = []
        for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner)):
            values = (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            arrays += [pack(bits.view(np.int8), 8), None]  # its bytes lie as those of int8
            matrices.append((bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64))
        packed.append(PackedExpert(*arrays))
        plain.append(tuple(matrices))
    return packed, plain


@pytest.mark.parametrize(("activation_bits", "bound"), [(16, 2e-5), (8, 4e-3)])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 96), (3584 // 2 + 32, 64)])
def test_bfloat16_layers_are_right_and_independent_of_the_batch(
    trap: Trap, activation_bits: int, bound: float, hidden: int, inner: int
) -> None:
    if "avx512_bf16" not in kernels.cpu_features():
        pytest.skip("the processor has no avx512_bf16, which prepares the rows")
    held, plain = bf16_experts(hidden, inner)
    layer = layer_of(held, hidden, inner, 16, AMX, activation_bits=activation_bits)
    x, ids, weights = routed(hidden, [1, 3, 20, 49])
    out = layer.forward(x, ids, weights)
    expected = np.zeros_like(out, np.float64)
    for token, row in enumerate(x.astype(np.float64)):
        gate, up, down = plain[ids[token, 0]]
        g = gate @ row
        expected[token] = weights[token, 0] * (down @ (g / (1 + np.exp(-g)) * (up @ row)))
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < bound
    for some in (slice(0, 1), slice(5, 30)):
        np.testing.assert_array_equal(layer.forward(x[some], ids[some], weights[some]), out[some])
    if "amx" not in trap.native:
        assert trap.count("tdpbf16ps") > 0 and trap.count("tdpbssd") == 0
        assert trap.count("tdpbf16ps") >= 0.6 * trap.count("tileloadd")


@pytest.mark.parametrize("case", ["base", "kblock"])
def test_bfloat16_outputs_are_those_of_kt_kernels_amx_kernels(trap: Trap, case: str) -> None:
    """99.5 % to the bit, and more than of what its AVX-512 kernels gave, which add in another order.

    The rest: exponentials of another polynomial, rounded to bfloat16.
    """
    if "avx512_bf16" not in kernels.cpu_features():
        pytest.skip("the processor has no avx512_bf16, which prepares the rows")
    from ktplan.store.layout import pack

    recipe = _recipe()
    sizes = recipe.CASES[case]
    held = [
        PackedExpert(
            *(
                array
                for matrix in recipe.expert_bits(case, expert)
                for array in (pack(matrix.view(np.int8), 8), None)
            )
        )
        for expert in range(sizes.experts)
    ]
    layer = layer_of(held, sizes.hidden, sizes.intermediate, 16, AMX, activation_bits=8, numerics="upstream")
    x, ids, weights = recipe.tokens(case, 40)
    ours = recipe.bf16_bits(layer.forward(x, ids, weights))
    import torch

    with safe_open(GOLDEN / "kt-kernel-0.7.2" / "forward.safetensors", "pt") as file:
        amx, other = (
            file.get_tensor(f"{case}.BF16.q40.{kernel}").view(torch.int16).numpy().view(np.uint16)
            for kernel in ("amx", "avx512")
        )
    ours = ours[: len(amx)]
    assert (ours == amx).mean() > max(0.995, (ours == other).mean())


# --- tiles are the thread's: what others leave there, and what is left to them ---


def test_a_foreign_configuration_before_and_nothing_left_behind(trap: Trap, probe: Any) -> None:
    import ctypes

    shape = np.zeros(64, np.uint8)
    shape[0], shape[16:32:2], shape[48:56] = 1, 4, 1  # eight tiles of one row and one word
    layer = layer_of(experts(1, 256, 128, 4), 256, 128, 4, AMX)
    call = routed(256, [37])
    expected = layer.forward(*call)
    probe.leave_configured(ctypes.c_void_p(shape.ctypes.data))
    assert probe.tiles_are_released() == 0
    np.testing.assert_array_equal(layer.forward(*call), expected)
    assert probe.tiles_are_released() == 1


def test_submitted_work_uses_tiles_on_other_threads(trap: Trap) -> None:
    layer = layer_of(experts(2, 256, 128, 8), 256, 128, 8, AMX, threads=2)
    call = routed(256, [37, 16])
    expected = layer.forward(*call)
    for pending in [layer.submit(*call) for _ in range(3)]:
        np.testing.assert_array_equal(pending.result(), expected)


# --- how many instructions ---


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize("tokens", [32, 48, 80, 96, 192])
def test_loads_serve_enough_products(
    trap: Trap, bits: int, group: int | None, activation_bits: int, tokens: int
) -> None:
    """Of more than one block: at least 0.8 products a load, and two or more for each tile of weights."""
    if "amx" in trap.native:
        pytest.skip("this processor executes AMX itself: nothing is counted")
    hidden, inner = 512, 128
    layer = layer_of(
        experts(1, hidden, inner, bits, group),
        hidden,
        inner,
        bits,
        AMX,
        group=group,
        activation_bits=activation_bits,
    )
    trap.reset()
    layer.forward(*routed(hidden, [tokens]))
    planes, blocks = activation_bits // 8, tokens // 16
    tiles = (
        3 * hidden * inner // 1024 * (2 if group == 32 else 1)
    )  # of weights; groups of 32 inputs fill half of one
    assert trap.count("tdpbssd") == tiles * blocks * planes
    loads = {role: trap.count(f"load for {role}") for role in "abc"}
    assert sum(loads.values()) == trap.count("tileloadd")
    assert trap.count("tdpbssd") >= 0.8 * trap.count("tileloadd")
    assert trap.count("tdpbssd") >= 2 * loads["b"], "a tile of weights serves two products or more"
    assert loads["b"] == tiles * visits(tokens, planes)
    if group is None:
        assert trap.count("tilestored") == trap.count("tilezero") <= trap.count("tdpbssd") / 2


def visits(tokens: int, planes: int) -> int:
    """How often a tile of weights is loaded: once for two blocks or planes, once for the last three; 96 rows a call."""
    calls = [6] * (tokens // 96) + [tokens % 96 // 16]
    return sum(blocks if planes == 2 else blocks // 2 for blocks in calls)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_a_single_block_takes_two_steps_at_a_time(trap: Trap, bits: int, group: int | None) -> None:
    """8-bit rows up to 16: each tile of activations serves four products, so that there are 0.8 a load."""
    if "amx" in trap.native:
        pytest.skip("this processor executes AMX itself: nothing is counted")
    layer = layer_of(experts(1, 512, 128, bits, group), 512, 128, bits, AMX, group=group, activation_bits=8)
    trap.reset()
    layer.forward(*routed(512, [11]))
    assert trap.count("tdpbssd") == 3 * 512 * 128 // 1024 * (2 if group == 32 else 1)
    assert trap.count("tdpbssd") == 0.8 * trap.count("tileloadd") == 4 * trap.count("load for a")


@pytest.mark.parametrize("group", [None, 32, 64, 128])
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_int4_is_expanded_once_for_all_blocks_of_a_call(
    trap: Trap, group: int | None, activation_bits: int
) -> None:
    """The emulator tells whether the memory of a tile of weights was written since it was loaded before."""
    if "amx" in trap.native:
        pytest.skip("this processor executes AMX itself: nothing is counted")
    hidden, inner = 1152, 128  # two chunks
    held = experts(1, hidden, inner, 4, group)
    layer = layer_of(held, hidden, inner, 4, AMX, group=group, activation_bits=activation_bits)
    tiles = 3 * hidden * inner // 1024 * (2 if group == 32 else 1)
    for tokens in (80, 192):
        call = routed(hidden, [tokens])
        expected = layer.forward(*call)
        trap.reset()
        trap.library.amx_trap_watch(1)
        watched = layer.forward(*call)
        trap.library.amx_trap_watch(0)
        np.testing.assert_array_equal(watched, expected)
        calls = -(-tokens // 96)
        assert trap.count("written b") == tiles * calls
        assert trap.count("load for b") >= 2 * tiles * calls


def test_sums_wait_in_memory_only_between_chunks(trap: Trap) -> None:
    """4096 inputs are five chunks; six blocks of rows take turns, and still 0.8 products a load remain."""
    if "amx" in trap.native:
        pytest.skip("this processor executes AMX itself: nothing is counted")
    layer = layer_of(experts(1, 4096, 64, 8), 4096, 64, 8, AMX, activation_bits=8)
    trap.reset()
    layer.forward(*routed(4096, [96]))
    assert 0 < trap.count("load for c") < 0.1 * trap.count("tdpbssd")
    assert trap.count("tdpbssd") >= 0.8 * trap.count("tileloadd")


def test_few_tokens_use_no_tiles(trap: Trap) -> None:
    layer = layer_of(experts(3, 256, 128, 8), 256, 128, 8, AMX)
    layer.forward(*routed(256, [4, 1, 2]))
    assert trap.count("tdpbssd") == 0 and trap.count("ldtilecfg") == 0


# --- asking for it ---


def test_it_is_emulated_only_when_asked_for(trap: Trap) -> None:
    if "amx" in trap.native:
        pytest.skip("this processor executes AMX itself")
    state = kernels.tile_state()
    assert (state.detected, state.permitted, state.emulated) == (False, False, True)
    assert state.missing == "the processor has no amx_tile"
    assert kernels.isa().value != AMX and AMX not in kernels.available_isas()
    chosen = kernels.isa(AMX)
    assert chosen.value == AMX and "emulated" in chosen.why
    trap.library.amx_trap_remove()
    assert not kernels.tile_state().emulated
    with pytest.raises(
        kernels.MachineLacks, match="'amx-int8' cannot run on this machine: the processor has no amx"
    ):
        kernels.isa(AMX)


@pytest.mark.parametrize("said", ["1", "0", None])
def test_the_environment_may_say_that_it_is_emulated(trap: Trap, said: str | None) -> None:
    if "amx" in trap.native:
        pytest.skip("this processor executes AMX itself")
    env = {**os.environ, "KTPLAN_ISA": AMX}
    if said is not None:
        env["KTPLAN_AMX_EMULATED"] = said
    show = "from ktplan import kernels; print(kernels.isa().value)"
    done = subprocess.run([sys.executable, "-c", show], env=env, capture_output=True, text=True)
    if said == "1":
        assert done.stdout.strip() == AMX, done.stderr
    else:
        assert "MachineLacks" in done.stderr


def test_preloaded_it_runs_a_layer_in_a_fresh_process(trap: Trap) -> None:
    show = f"""
import sys, numpy as np, ctypes
sys.path.insert(0, {str(Path(__file__).parent)!r})
from ktplan.kernels import ExpertLayer, PackedExpert, Pool
random = np.random.default_rng(0)
arrays = []
for rows, columns in ((128, 256), (128, 256), (256, 128)):
    arrays += [random.integers(0, 256, rows * columns, np.uint8), np.full(rows, 1e-3, np.float32)]
x, ids = random.standard_normal((20, 256)).astype(np.float32), np.zeros((20, 1), np.int64)
out = [
    ExpertLayer([[PackedExpert(*arrays)]], hidden=256, intermediate=128, bits=8, isa=isa, threads_pool=Pool(2))
    .forward(x, ids, np.ones((20, 1), np.float32)) for isa in (None, "scalar")
]
print(np.array_equal(*out), ctypes.CDLL(None).amx_trap_count(b"tdpbssd") > 0)
"""
    env = {**os.environ, "LD_PRELOAD": str(trap.path), "KTPLAN_ISA": AMX}
    done = subprocess.run([sys.executable, "-c", show], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", str("amx" not in trap.native)], done.stderr
