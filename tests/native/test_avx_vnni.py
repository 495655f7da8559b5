"""The AVX-VNNI kernels' own machine code, executed by the trap emulator where the processor lacks it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ktplan import kernels
from ktplan.kernels import PackTask, Pool, pack_weights
from ktplan.quant.rounding import multipliers

from ..kernels.formats import BF16, INTEGERS, Fill, Format, experts, projection, same_bits
from .conftest import Trap

MISSING = {"avx2", "fma"} - set(kernels.cpu_features())
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"AVX-VNNI is emulated, {' '.join(sorted(MISSING))} is not"
)
NAME = "avx-vnni"


@pytest.fixture(autouse=True)
def _executed(trap: Trap) -> Iterator[None]:
    """AVX-VNNI is there during the test, and gone before others choose their kernels."""
    yield
    trap.library.amx_trap_remove()
    assert NAME in trap.native or NAME not in kernels.available_isas()


@pytest.mark.parametrize("form", INTEGERS, ids=str)
@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "fill"),
    [
        (96, 384, 7, "random"),
        (32, 128, 1, "lowest"),
        (64, 128, 6, "highest"),
        (160, 128, 5, "mixed"),
        (32, 3712, 2, "random"),
    ],
)
def test_products_have_the_scalar_kernels_bits(
    trap: Trap, form: Format, activation_bits: int, rows: int, columns: int, tokens: int, fill: Fill
) -> None:
    """Each number of rows that a call takes, tails of blocks; and all products counted: none went another way."""
    bits, group = form
    random = np.random.default_rng(rows)
    weights = projection(random, rows, columns, form, fill)
    x = random.standard_normal((tokens, columns)).astype(np.float32)
    x[0] = random.choice(np.array([-2, 2], np.float32), columns)  # every level at its limit
    if tokens > 3:
        x[1, 3], x[2] = np.nan, 0
    for count in range(1, tokens + 1):
        ours, expected = (
            kernels.project_rows(
                x[:count], weights.packed, weights.scale, rows, bits, activation_bits, isa=isa, group=group
            )
            for isa in (NAME, "scalar")
        )
        same_bits(ours, expected)
    if NAME not in trap.native:
        # 32 products a lane of 8 columns, for each row and byte of its levels
        each = rows // 8 * columns // 4 * activation_bits // 8
        assert trap.count("vpdpbusd") == each * tokens * (tokens + 1) // 2


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("activation_bits", [16, 8])
def test_the_largest_sums_do_not_overflow(trap: Trap, bits: int, activation_bits: int) -> None:
    """Every weight at -128 (-8), every level at its limit, over the widest rows of today's models."""
    columns = 18432
    packed = np.full(32 * columns * bits // 8, 0x80 if bits == 8 else 0x88, np.uint8)
    x = np.ones((2, columns), np.float32)
    x[1] = -1
    dots = kernels.dot_products(x, packed, 32, bits, activation_bits, isa=NAME)
    top = {8: 127, 16: 32639}[activation_bits] * 128 * columns
    np.testing.assert_array_equal(dots, np.repeat([[-top], [top]], 32, axis=1))
    assert trap.count("vpdpbusd") > 0 or NAME in trap.native


@pytest.mark.parametrize("form", INTEGERS, ids=str)
def test_layers_have_the_scalar_kernels_bits(trap: Trap, form: Format) -> None:
    some = experts(2, 128, 128, form)
    call = some.routed(4)
    for activation_bits in (8, 16):
        ours, expected = (
            some.layer(isa=isa, activation_bits=activation_bits, threads_pool=Pool(2)).forward(*call)
            for isa in (NAME, "scalar")
        )
        assert np.isfinite(expected).all() and np.abs(expected).max() > 0.01
        same_bits(ours, expected)
    assert trap.count("vpdpbusd") > 1000 or NAME in trap.native


@pytest.mark.parametrize("activation_bits", [16, 8])
def test_bfloat16_products_are_those_of_avx2(trap: Trap, activation_bits: int) -> None:
    random = np.random.default_rng(5)
    weights = projection(random, 96, 1824, BF16)
    x = random.standard_normal((5, 1824)).astype(np.float32)
    ours, expected = (
        kernels.project_rows(x, weights.packed, None, 96, 16, activation_bits, isa=isa)
        for isa in (NAME, "avx2")
    )
    same_bits(ours, expected)


def test_conversion_finds_a_quantizer_for_it(trap: Trap) -> None:
    matrix = np.random.default_rng(6).standard_normal((32, 128)).astype(np.float32)
    written = []
    for isa in (NAME, "scalar"):
        task = PackTask(matrix, np.zeros(32 * 128, np.uint8), np.zeros(32, np.float32))
        (outcome,) = pack_weights([task], 8, "mse", multipliers(127), isa=isa, pool=Pool(1))
        assert outcome.finite
        written.append((task.packed.tobytes(), task.scale.tobytes(), outcome))
    assert written[0] == written[1]


def test_it_is_emulated_only_when_asked_for(trap: Trap) -> None:
    if NAME in trap.native:
        pytest.skip("this processor executes AVX-VNNI itself")
    assert kernels.isa().value != NAME and NAME not in kernels.available_isas()
    assert "emulated" in kernels.isa(NAME).why
    trap.library.amx_trap_remove()
    with pytest.raises(kernels.MachineLacks, match="'avx-vnni' cannot run .*: the processor has no avx_vnni"):
        kernels.isa(NAME)
