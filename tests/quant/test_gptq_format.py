"""The words of a GPTQ file: packing, the two versions of zeros, and what a damaged file gets told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktplan.errors import BadInput, BadUsage
from ktplan.quant.gptq_format import (
    GptqScheme,
    dequantize,
    pack_linear,
    pack_words,
    read_settings,
    unpack_words,
    zero_points,
)

bits = st.sampled_from([4, 8])


@given(bits, st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_packing_comes_back(bits: int, words: int, columns: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (words * 32 // bits, columns), dtype=np.uint8)
    packed = pack_words(codes, bits)
    assert packed.dtype == np.int32
    assert packed.shape == (words, columns)
    assert np.array_equal(unpack_words(packed, bits), codes)


def test_the_first_code_of_a_word_is_in_its_lowest_bits() -> None:
    nibbles = np.arange(8, dtype=np.uint8)[:, None]
    assert pack_words(nibbles, 4).view(np.uint32).item() == 0x76543210
    assert pack_words(np.array([[1], [2], [3], [255]], np.uint8), 8).view(np.uint32).item() == 0xFF030201


@given(
    st.builds(GptqScheme, bits, st.sampled_from([32, 64, 128])),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)
def test_a_layer_comes_back(scheme: GptqScheme, groups: int, eights: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    outputs, inputs = 8 * eights, groups * scheme.group_size
    codes = rng.integers(0, 2**scheme.bits, (outputs, inputs), dtype=np.uint8)
    scales = rng.normal(0, 1, (outputs, groups)).astype(np.float16)
    packed = pack_linear(codes, scales, scheme)
    weight = dequantize(*packed, scheme.bits)
    wanted = np.repeat(scales.astype(np.float32), scheme.group_size, axis=1) * (
        codes.astype(np.float32) - scheme.zero
    )
    assert np.array_equal(weight, wanted)
    assert weight.flags.c_contiguous
    assert sum(tensor.nbytes for tensor in packed) == scheme.bytes(outputs, inputs)


@pytest.mark.parametrize(("bits", "word"), [(4, 0x77777777), (8, 0x7F7F7F7F)])
def test_symmetric_zeros_are_written_less_one(bits: int, word: int) -> None:
    packed = pack_linear(np.zeros((16, 128), np.uint8), np.ones((16, 1), np.float16), GptqScheme(bits))
    assert packed.qzeros.shape == (1, 16 * bits // 32)
    assert set(packed.qzeros.view(np.uint32).ravel()) == {word}
    assert np.array_equal(packed.g_idx, np.zeros(128, np.int32))


@pytest.mark.parametrize(
    ("bits", "word", "zero"), [(4, 0x88888888, 8), (8, 0x80808080, 128), (4, 0x77777777, 8)]
)
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_the_words_decide_which_version_a_symmetric_file_is(
    bits: int, word: int, zero: int, label: str
) -> None:
    qzeros = np.full((2, 3), word, np.uint32).view(np.int32)
    zeros = zero_points(qzeros, bits, checkpoint_format=label)
    assert zeros.shape == (2, 3 * 32 // bits)
    assert set(zeros.ravel()) == {zero}


def test_asymmetric_zeros_follow_the_label() -> None:
    stored = np.array([[0x0F]], np.uint32).view(np.int32)
    first = zero_points(stored, 4, checkpoint_format="gptq", symmetric=False)
    second = zero_points(stored, 4, checkpoint_format="gptq_v2", symmetric=False)
    assert first.ravel().tolist() == [0, 1, 1, 1, 1, 1, 1, 1]  # 15 + 1 wraps to 0
    assert second.ravel().tolist() == [15, 0, 0, 0, 0, 0, 0, 0]


def test_mixed_zeros_of_a_symmetric_file_are_refused() -> None:
    with pytest.raises(BadInput, match="its zeros are 7 to 8"):
        zero_points(np.array([[0x77777778]], np.uint32).view(np.int32), 4)


def test_scattered_groups_are_followed() -> None:
    packed = pack_linear(np.full((8, 64), 9, np.uint8), np.array([[1, 2]] * 8, np.float16), GptqScheme(4, 32))
    g_idx = np.tile(np.array([1, 0], np.int32), 32)
    weight = dequantize(packed.qweight, packed.qzeros, packed.scales, g_idx, 4)
    assert np.array_equal(weight[0], np.tile([2.0, 1.0], 32))


def test_contradicting_shapes_are_named() -> None:
    packed = pack_linear(np.zeros((8, 64), np.uint8), np.ones((8, 2), np.float16), GptqScheme(4, 32))
    with pytest.raises(BadInput, match=r"g_idx \[64\], it is \[32\]"):
        dequantize(packed.qweight, packed.qzeros, packed.scales, packed.g_idx[:32], 4)
    with pytest.raises(BadInput, match="needs qzeros"):
        dequantize(packed.qweight, packed.qzeros, packed.scales, packed.g_idx, 8)
    with pytest.raises(BadInput, match="groups 0 to 5, there are 2"):
        dequantize(packed.qweight, packed.qzeros, packed.scales, packed.g_idx * 5, 4)


@pytest.mark.parametrize(("bits", "group_size"), [(3, 128), (4, 48), (8, 256)])
def test_formats_that_gpus_do_not_take_are_refused(bits: int, group_size: int) -> None:
    with pytest.raises(BadUsage, match="not supported for the GPU"):
        GptqScheme(bits, group_size)


def test_layers_that_do_not_fit_say_why() -> None:
    assert GptqScheme(4).misfit(64, 192) == "its 192 inputs are not a multiple of the group size 128"
    assert GptqScheme(4).misfit(1, 128) == "its 1 outputs are not a multiple of 8"
    assert GptqScheme(8).misfit(4, 128) is None


def test_old_and_new_spellings_of_the_settings_are_read() -> None:
    old = read_settings({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "x")
    new = read_settings(
        {"method": "gptq", "format": "gptq_v2", "bits": 8, "group_size": -1, "sym": False}, "x"
    )
    assert old == (4, 128, True, "gptq")
    assert new == (8, -1, False, "gptq_v2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"bits": 3}, "bits 3"),
        ({"group_size": None}, "group_size None"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ],
)
def test_other_settings_are_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_settings(
            {"quant_method": "gptq", "bits": 4, "group_size": 128, **change}, "quantize_config.json"
        )
