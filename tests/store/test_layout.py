"""Where each level lies: the tiles that kt-kernel's and our kernels read in place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan.errors import BadInput, BadUsage
from ktplan.store import AMX_INT4, AMX_INT8, LAYOUTS, legal_parts, pack, packed_bytes, unpack
from ktplan.store.layout import check_parts, layout_for, padded


@dataclass(frozen=True)
class Sizes:
    hidden: int
    moe_intermediate: int


@st.composite
def packable(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """bits, N, K, seed; K on both sides of one block of 3584."""
    bits = draw(st.sampled_from([8, 4, 2]))
    unit = layout_for(bits).unit
    rows = 32 * draw(st.integers(1, 9))
    columns = unit * draw(st.one_of(st.integers(1, 6), st.integers(3584 // unit - 1, 3584 // unit + 2)))
    return bits, rows, columns, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=60, deadline=None)
@given(packable())
def test_unpacking_gives_the_levels_back(case: tuple[int, int, int, int]) -> None:
    bits, rows, columns, seed = case
    top = {8: 127, 4: 7, 2: 1}[bits]
    levels = np.random.default_rng(seed).integers(-top, top + 1, (rows, columns), dtype=np.int8)
    packed = pack(levels, bits)
    assert packed.shape == (packed_bytes(rows, columns, bits),)
    assert np.array_equal(unpack(packed, rows, columns, bits), levels)
    assert np.array_equal(unpack(packed.view(np.int8), rows, columns, bits), levels)


def test_int8_bytes_lie_where_the_tiles_say() -> None:
    levels = np.arange(64 * 128, dtype=np.int64).reshape(64, 128).astype(np.int8)
    packed = pack(levels, 8).view(np.int8)
    for row, column in (
        (0, 0),
        (0, 3),
        (0, 4),
        (1, 0),
        (15, 63),
        (16, 0),
        (31, 63),
        (0, 64),
        (32, 0),
        (63, 127),
    ):
        offset = row // 32 * 32 * 128 + column // 64 * 64 * 32 + row % 32 // 16 * 1024
        offset += column % 64 // 4 * 64 + row % 16 * 4 + column % 4
        assert packed[offset] == levels[row, column], (row, column)


def test_int4_pairs_levels_that_are_64_apart_low_nibble_first() -> None:
    levels = np.zeros((32, 128), np.int8)
    levels[0, 0], levels[0, 64] = -7, 3
    packed = pack(levels, 4)
    assert packed[0] == (3 << 4 | (-7 & 15))
    assert not packed[1:].any()


def test_a_transposed_view_packs_like_its_copy() -> None:
    levels = np.random.default_rng(1).integers(-7, 8, (128, 256), dtype=np.int8)
    assert np.array_equal(pack(np.asfortranarray(levels), 4), pack(levels, 4))


def test_bits_choose_the_layout() -> None:
    assert [layout_for(bits) for bits in (8, 4, 2)] == [AMX_INT8, AMX_INT4, AMX_INT4]
    assert LAYOUTS["amx-int8-v1"] is AMX_INT8 and LAYOUTS["amx-int4-v1"] is AMX_INT4


@pytest.mark.parametrize(
    ("model", "bits", "parts"),
    [
        (Sizes(2048, 768), 4, (1, 2, 3, 6)),  # Qwen3-30B-A3B
        (Sizes(7168, 2048), 4, (1, 2, 4, 8, 16)),  # DeepSeek-V3
        (Sizes(2048, 512), 4, (1, 2, 4)),  # Qwen3-Next
        (Sizes(2880, 2880), 4, ()),  # gpt-oss
        (Sizes(2880, 2880), 8, (1, 3, 5, 9, 15, 45)),
        (Sizes(256, 128), 8, (1, 2)),
        (Sizes(128, 96), 8, (1, 2)),  # 32 columns of zeros make it 128
        (Sizes(128, 160), 8, (1, 3)),
    ],
)
def test_the_legal_numbers_of_parts(model: Sizes, bits: int, parts: tuple[int, ...]) -> None:
    assert legal_parts(model, bits) == parts
    for number in range(-1, 50):
        if number in parts:
            check_parts(model, bits, number)
        else:
            with pytest.raises((BadUsage, BadInput)):
                check_parts(model, bits, number)


def test_an_illegal_split_is_refused_with_the_numbers_and_the_legal_ones() -> None:
    with pytest.raises(BadUsage, match=r"2560 wide; 8 NUMA parts make 320 each.*multiple of 128") as found:
        check_parts(Sizes(2560, 2560), 4, 8)
    assert (
        found.value.hint == "for this model --numa-parts may be 1, 2, 4, 5, 10, 20, or convert with --bits 8"
    )


def test_widths_are_filled_up_to_what_the_layout_needs() -> None:
    assert [padded(width, 8) for width in (64, 65, 96, 128)] == [64, 128, 128, 128]
    assert [padded(width, 4) for width in (64, 96, 768)] == [128, 128, 768]
    with pytest.raises(BadUsage, match=r"160 wide, 192 with padding; 2 NUMA parts make 96 each"):
        check_parts(Sizes(128, 160), 8, 2)


def test_a_model_that_fits_in_no_way_is_refused_with_the_rule() -> None:
    with pytest.raises(BadInput, match=r"multiple of 128; this model has 2880") as found:
        check_parts(Sizes(2880, 2880), 4, 1)
    assert found.value.hint is not None and "--bits 8" in found.value.hint
    with pytest.raises(BadInput, match=r"multiple of 64; this model has 144"):
        check_parts(Sizes(144, 80), 8, 1)
