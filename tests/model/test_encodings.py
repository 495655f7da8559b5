"""Every way to store a matrix, against formulas written out here value by value and against independent readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktplan.errors import BadInput
from ktplan.model import open_source
from ktplan.model.encodings import Hints, Part, Piece, decode, recognise
from ktplan.model.encodings.gptq import stored_zero_is_less_one
from ktplan.model.encodings.pieces import e2m1, e4m3, e5m2, exponents, unpack

Write = Callable[..., Path]
Stored = Mapping[str, tuple[str, np.ndarray]]
LUT = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


class Keeper:
    """Wraps an encoder that returns (stored, values): remembers the values that a reader has to see."""

    def __init__(self, encode: Callable[[np.random.Generator, int, int], tuple[Stored, np.ndarray]]) -> None:
        self._encode, self.values = encode, {}

    def __call__(self, expert: int, role: str, rows: int, columns: int) -> Stored:
        generator = np.random.default_rng([expert, len(role)])
        stored, self.values[expert, role] = self._encode(generator, rows, columns)
        return stored

    def check(self, folder: Path, dtype: str, rtol: float = 0) -> None:
        source = open_source(folder)
        assert source.spec.dtype == dtype
        for (expert, role), wanted in self.values.items():
            found = getattr(source.expert(0, expert), role)
            assert found.dtype == np.float32 and found.flags.c_contiguous
            np.testing.assert_allclose(found, wanted.astype(np.float32), rtol=rtol, atol=0)


# ---------------------------------------------------------------- tables and packing


def test_tables_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    for table, dtype in (
        (e4m3(), torch.float8_e4m3fn),
        (e5m2(), torch.float8_e5m2),
        (exponents(np.arange(256)), torch.float8_e8m0fnu),
    ):
        np.testing.assert_array_equal(table, codes.view(dtype).float().numpy())
    assert e2m1().tolist() == LUT


@given(st.integers(1, 8), st.lists(st.integers(0, 255), min_size=1, max_size=70))
def test_unpacking_words_undoes_dense_packing(bits: int, values: list[int]) -> None:
    codes = [value % (1 << bits) for value in values]
    stream = sum(code << (bits * place) for place, code in enumerate(codes))
    words = np.frombuffer(stream.to_bytes(-(-len(codes) * bits // 32) * 4, "little"), "<i4")
    assert unpack(words[None], bits, len(codes))[0].tolist() == codes


# ---------------------------------------------------------------- plain and FP8


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_plain_floats_are_widened_exactly(name: str, checkpoint: Write) -> None:
    torch = pytest.importorskip("torch")
    held = {
        "bfloat16": ("BF16", torch.int16),
        "float16": ("F16", torch.int16),
        "float32": ("F32", torch.int32),
    }[name]

    def encode(generator: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        tensor = torch.from_numpy(generator.normal(size=(rows, columns))).to(getattr(torch, name))
        return {".weight": (held[0], tensor.view(held[1]).numpy())}, tensor.float().numpy()

    keeper = Keeper(encode)
    keeper.check(checkpoint(keeper), name)


def fp8_codes(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    codes = generator.integers(0, 256, shape, np.uint8)
    codes[(codes & 127) == 127] = 0  # no NaN
    return codes


@pytest.mark.parametrize("scale_dtype", ["F32", "BF16", "F8_E8M0", "U8"])
@pytest.mark.parametrize("block", [(16, 16), (24, 20), (128, 128)])
@pytest.mark.parametrize("suffix", [".weight_scale_inv", ".weight_scale", ".scale"])
def test_fp8_blocks_with_padded_edges(
    scale_dtype: str, block: tuple[int, int], suffix: str, checkpoint: Write
) -> None:
    def encode(generator: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        shape = -(-rows // block[0]), -(-columns // block[1])
        exponent = generator.integers(120, 130, shape).astype(np.uint8)
        number = np.exp2(exponent.astype(np.float64) - 127)
        scale: tuple[str, np.ndarray] = (scale_dtype, exponent)
        if scale_dtype == "F32":
            number = generator.normal(size=shape).astype(np.float32)
            scale = ("F32", number)
        elif scale_dtype == "BF16":
            scale = ("BF16", (number.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
        codes = fp8_codes(generator, (rows, columns))
        values = np.empty((rows, columns), np.float32)
        for n in range(rows):
            for k in range(columns):
                values[n, k] = np.float32(number[n // block[0], k // block[1]]) * e4m3()[codes[n, k]]
        return {".weight": ("F8_E4M3", codes), suffix: scale}, values

    keeper = Keeper(encode)
    said = {"quant_method": "fp8", "weight_block_size": list(block)}
    # all scales in another file, as published models may have them
    folder = checkpoint(keeper, said, shard_of=lambda name: int("scale" in name))
    keeper.check(folder, "float8 per block" if block < (128, 128) else "float8 per tensor")


@pytest.mark.parametrize("kind", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("flat", [True, False])
def test_fp8_per_channel_and_per_tensor(kind: str, dtype: str, flat: bool, checkpoint: Write) -> None:
    def encode(generator: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        codes = fp8_codes(generator, (rows, columns)) & (0xFF if dtype == "F8_E4M3" else 0xFB)
        scale = generator.normal(size=(rows if kind == "channel" else 1, 1)).astype(np.float32)
        values = (e4m3() if dtype == "F8_E4M3" else e5m2())[codes] * scale
        shape = (-1,) if kind == "channel" else ()
        return {
            ".weight": (dtype, codes),
            ".weight_scale": ("F32", scale.reshape(shape) if flat else scale),
            ".input_scale": ("F32", np.ones((), np.float32)),
        }, values

    keeper = Keeper(encode)
    keeper.check(checkpoint(keeper, {"quant_method": "compressed-tensors"}), f"float8 per {kind}")


def test_a_scale_grid_of_another_block_size_is_refused_before_work(checkpoint: Write) -> None:
    def encode(expert: int, role: str, rows: int, columns: int) -> Stored:
        shape = (3, 5)
        return {
            ".weight": ("F8_E4M3", np.zeros((rows, columns), np.uint8)),
            ".weight_scale_inv": ("F32", np.ones(shape, np.float32)),
        }

    with pytest.raises(
        BadInput, match=r"experts\.0\.gate_proj\.weight_scale_inv has shape \[3, 5\].*blocks of \[128"
    ):
        open_source(checkpoint(encode, {"quant_method": "fp8"}))


@pytest.mark.filterwarnings("ignore")
def test_fp8_and_fp4_equal_transformers_dequantizer() -> None:
    torch = pytest.importorskip("torch")
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    theirs = finegrained.Fp8Dequantize(None)
    generator = np.random.default_rng(0)
    codes, scale = fp8_codes(generator, (256, 384)), generator.normal(size=(2, 3)).astype(np.float32)
    wanted = theirs._dequantize_one(
        torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scale)
    )
    pieces = {"weight": Piece("F8_E4M3", codes), "scale": Piece("F32", scale)}
    np.testing.assert_array_equal(decoded(pieces, 256, 384), wanted.numpy())
    pairs = generator.integers(-128, 128, (64, 48), np.int8)  # DeepSeek-V4's experts
    exponent = generator.integers(110, 130, (64, 3)).astype(np.uint8)
    wanted = theirs._dequantize_one(torch.from_numpy(pairs), torch.from_numpy(exponent), torch.float32)
    pieces = {"weight": Piece("I8", pairs), "scale": Piece("F8_E8M0", exponent)}
    np.testing.assert_array_equal(decoded(pieces, 64, 96), wanted.numpy())


def decoded(pieces: dict[str, Piece], rows: int, columns: int, hints: Hints | None = None) -> np.ndarray:
    parts = {name: Part(piece.dtype, piece.data.shape, name) for name, piece in pieces.items()}
    hints = hints or Hints()
    return decode(recognise(parts, rows, columns, hints), pieces, rows, columns, hints)


# ---------------------------------------------------------------- FP4


def nibble_values(pairs: np.ndarray) -> np.ndarray:
    flat = pairs.view(np.uint8)
    values = np.empty((flat.shape[0], flat.shape[1] * 2), np.float64)
    for n in range(flat.shape[0]):
        for i, byte in enumerate(flat[n].tolist()):
            values[n, 2 * i], values[n, 2 * i + 1] = LUT[byte & 15], LUT[byte >> 4]
    return values


@pytest.mark.parametrize("style", ["deepseek", "compressed-tensors"])
def test_mxfp4_of_single_experts(style: str, checkpoint: Write) -> None:
    def encode(generator: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        pairs = generator.integers(0, 256, (rows, columns // 2), np.uint8)
        exponent = generator.integers(110, 130, (rows, columns // 32)).astype(np.uint8)
        values = nibble_values(pairs) * np.repeat(np.exp2(exponent.astype(float) - 127), 32, axis=1)
        if style == "deepseek":
            return {".weight": ("I8", pairs.view(np.int8)), ".scale": ("F8_E8M0", exponent)}, values
        return {".weight_packed": ("U8", pairs), ".weight_scale": ("U8", exponent)}, values

    keeper = Keeper(encode)
    keeper.check(checkpoint(keeper), "mxfp4")


@pytest.mark.parametrize("style", ["compressed-tensors", "modelopt"])
def test_nvfp4_divides_or_multiplies_by_the_global_scale(style: str, checkpoint: Write) -> None:
    def encode(generator: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        pairs = generator.integers(0, 256, (rows, columns // 2), np.uint8)
        scale = fp8_codes(generator, (rows, columns // 16)) & 0x7F
        number = np.float32(generator.uniform(100, 3000))
        local = nibble_values(pairs) * np.repeat(e4m3()[scale].astype(float), 16, axis=1)
        if style == "modelopt":
            factor = np.float32(1) / number
            return {
                ".weight": ("U8", pairs), ".weight_scale": ("F8_E4M3", scale),
                ".weight_scale_2": ("F32", np.array(factor)), ".input_scale": ("F32", np.array(factor)),
            }, local * float(factor)  # fmt: skip
        return {
            ".weight_packed": ("U8", pairs), ".weight_scale": ("F8_E4M3", scale),
            ".weight_global_scale": ("F32", np.array([number])), ".input_global_scale": ("F32", np.array([number])),
        }, local / float(number)  # fmt: skip

    keeper = Keeper(encode)
    keeper.check(
        checkpoint(keeper, {"quant_method": style}), "nvfp4"
    )  # rounded once: equal to double, rounded


@pytest.mark.filterwarnings("ignore")
def test_gpt_oss_blocks_equal_transformers_dequantizer(
    tmp_path: Path, write_safetensors: Callable[..., None]
) -> None:
    """`_blocks` and `_scales`, interleaved gate and up rows, biases; compared with transformers' own function."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    import json

    generator = np.random.default_rng(3)
    count, hidden, inner, stem = 4, 64, 96, "model.layers.0.mlp.experts."
    stored, wanted = {}, {}
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        blocks = generator.integers(0, 256, (count, rows, columns // 32, 16), np.uint8)
        scales = generator.integers(110, 130, (count, rows, columns // 32)).astype(np.uint8)
        bias = generator.normal(size=(count, rows)).astype(np.float32)
        stored |= {stem + name + "_blocks": ("U8", blocks), stem + name + "_scales": ("U8", scales)}
        stored[stem + name + "_bias"] = ("F32", bias)
        theirs = mxfp4.convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        )
        wanted[name], wanted[name + "_bias"] = theirs.numpy(), bias  # [expert, inputs, outputs]
    config = {
        "model_type": "gpt_oss", "num_hidden_layers": 1, "num_local_experts": count, "num_experts_per_tok": 2,
        "hidden_size": hidden, "intermediate_size": inner, "vocab_size": 8, "num_attention_heads": 2,
        "max_position_embeddings": 64, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", stored)
    source = open_source(tmp_path)
    assert (source.spec.dtype, source.spec.activation, source.spec.expert_bias) == (
        "mxfp4",
        "swiglu-oai",
        True,
    )
    for expert in range(count):
        ours = source.expert(0, expert)
        both, bias = wanted["gate_up_proj"][expert].T, wanted["gate_up_proj_bias"][expert]
        np.testing.assert_array_equal(ours.gate, both[::2])
        np.testing.assert_array_equal(ours.up, both[1::2])
        np.testing.assert_array_equal(ours.down, wanted["down_proj"][expert].T)
        np.testing.assert_array_equal(ours.gate_bias, bias[::2])
        np.testing.assert_array_equal(ours.up_bias, bias[1::2])
        np.testing.assert_array_equal(ours.down_bias, wanted["down_proj_bias"][expert])


# ---------------------------------------------------------------- integers


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, count] to 32-bit words along the second axis, low bits first, written bit by bit."""
    count = -(-codes.shape[1] * bits // 32)
    found = np.zeros((codes.shape[0], count), np.uint64)
    for k in range(codes.shape[1]):
        value = codes[:, k].astype(np.uint64) << np.uint64(k * bits % 32)
        found[:, k * bits // 32] |= value & np.uint64(0xFFFFFFFF)
        if k * bits // 32 + 1 < count:
            found[:, k * bits // 32 + 1] |= value >> np.uint64(32)
    return found.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("group", [16, 32])
def test_awq_packs_outputs_in_its_own_order(group: int, checkpoint: Write) -> None:
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # position i of a word holds output 8c + order[i]

    def packed(codes: np.ndarray) -> np.ndarray:  # [k, n] -> [k, n/8]
        return words(codes.reshape(codes.shape[0], -1, 8)[..., order].reshape(codes.shape), 4)

    def encode(generator: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        codes, groups = generator.integers(0, 16, (columns, rows)), columns // group
        zeros = generator.integers(0, 16, (groups, rows))
        scales = generator.normal(size=(groups, rows)).astype(np.float16)
        values = np.empty((rows, columns))
        for k in range(columns):
            values[:, k] = scales[k // group].astype(float) * (codes[k] - zeros[k // group])
        return {
            ".qweight": ("I32", packed(codes)), ".qzeros": ("I32", packed(zeros)), ".scales": ("F16", scales),
        }, values  # fmt: skip

    keeper = Keeper(encode)
    keeper.check(checkpoint(keeper, {"quant_method": "awq", "bits": 4, "version": "gemm"}), "awq int4")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq(bits: int, symmetric: bool, version: int, act_order: bool, checkpoint: Write) -> None:
    group = 16

    def encode(generator: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        codes, groups = generator.integers(0, 1 << bits, (rows, columns)), columns // group
        zeros = np.full((groups, rows), 1 << (bits - 1))
        if not symmetric:
            zeros = generator.integers(0, 1 << bits, (groups, rows))
        scales = generator.normal(size=(groups, rows)).astype(np.float16)
        index = np.arange(columns) // group
        index = generator.permutation(index) if act_order else index
        values = np.empty((rows, columns))
        for k in range(columns):
            values[:, k] = scales[index[k]].astype(float) * (codes[:, k] - zeros[index[k]])
        held = zeros if version == 2 else (zeros - 1) % (1 << bits)
        stored = {
            ".qweight": ("I32", words(codes, bits).T), ".qzeros": ("I32", words(held, bits)),
            ".scales": ("F16", scales), ".g_idx": ("I32", index.astype(np.int32)),
        }  # fmt: skip
        if not act_order:
            del stored[".g_idx"]
        return stored, values

    keeper = Keeper(encode)
    said: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "sym": symmetric}
    wrong_label_is_seen_in_the_words = symmetric and bits != 3
    label = version if not wrong_label_is_seen_in_the_words else 3 - version
    said["checkpoint_format"] = "gptq_v2" if label == 2 else "gptq"
    keeper.check(checkpoint(keeper, said), f"gptq int{bits}")


def test_gptq_versions_are_told_from_the_words_where_they_can() -> None:
    def told(word: int, bits: int, **settings: Any) -> bool:
        return stored_zero_is_less_one(
            np.full((2, 3), word, np.uint32).view(np.int32), bits, Hints("gptq", settings)
        )

    assert told(0x77777777, 4, checkpoint_format="gptq_v2") and not told(
        0x88888888, 4, checkpoint_format="gptq"
    )
    assert told(0x7F7F7F7F, 8) and not told(0x80808080, 8)
    assert not told(0x77777777, 4, sym=False, checkpoint_format="gptq_v2")
    assert told(0x12345678, 4)


def pack_quantized(bits: int, asymmetric: bool, act_order: bool) -> Callable[..., Any]:
    def encode(generator: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        group, middle = 16, 1 << (bits - 1)
        codes = generator.integers(-middle, middle, (rows, columns))
        scale = generator.normal(size=(rows, columns // group)).astype(np.float16)
        zeros = np.zeros((rows, columns // group), int)
        stored = {
            ".weight_packed": ("I32", words(codes + middle, bits)), ".weight_scale": ("F16", scale),
            ".weight_shape": ("I64", np.array([rows, columns])),
        }  # fmt: skip
        if asymmetric:
            zeros = generator.integers(-middle, middle, zeros.shape)
            stored[".weight_zero_point"] = ("I32", words((zeros + middle).T, bits).T)
        index = np.arange(columns) // group
        if act_order:
            index = generator.permutation(index)
            stored[".weight_g_idx"] = ("I32", index.astype(np.int32))
        values = np.empty((rows, columns))
        for k in range(columns):
            values[:, k] = scale[:, index[k]].astype(float) * (codes[:, k] - zeros[:, index[k]])
        return stored, values

    return encode


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("asymmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_pack_quantized(bits: int, asymmetric: bool, act_order: bool, checkpoint: Write) -> None:
    keeper = Keeper(pack_quantized(bits, asymmetric, act_order))
    folder = checkpoint(keeper, {"quant_method": "compressed-tensors", "format": "pack-quantized"})
    keeper.check(folder, f"int{bits} pack-quantized")


@pytest.mark.parametrize("asymmetric", [True, False])
@pytest.mark.parametrize("group", [0, 16])
def test_int_quantized(asymmetric: bool, group: int, checkpoint: Write) -> None:
    def encode(generator: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        codes = generator.integers(-128, 128, (rows, columns), np.int8)
        groups = columns // group if group else 1
        scale = generator.normal(size=(rows, groups)).astype(np.float32)
        zero = (
            generator.integers(-128, 128, (rows, groups), np.int8) if asymmetric else np.zeros((rows, groups))
        )
        values = (codes - np.repeat(zero, columns // groups, 1).astype(float)) * np.repeat(
            scale, columns // groups, 1
        )
        stored = {".weight": ("I8", codes), ".weight_scale": ("F32", scale)}
        return stored | ({".weight_zero_point": ("I8", zero)} if asymmetric else {}), values

    keeper = Keeper(encode)
    keeper.check(checkpoint(keeper, {"quant_method": "compressed-tensors"}), "int8")


def test_experts_may_be_stored_in_different_ways(checkpoint: Write) -> None:
    packed = pack_quantized(4, False, False)

    def encode(generator: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        if rows > columns:  # the down projections stay float
            values = generator.normal(size=(rows, columns)).astype(np.float32)
            return {".weight": ("F32", values)}, values
        return packed(generator, rows, columns)

    keeper = Keeper(encode)
    keeper.check(checkpoint(keeper, {"quant_method": "compressed-tensors"}), "float32 + int4 pack-quantized")


# ---------------------------------------------------------------- refusals


def gptq_parts(rows: int, columns: int) -> Stored:
    return {
        ".qweight": ("I32", np.zeros((columns // 8, rows), np.int32)),
        ".qzeros": ("I32", np.zeros((1, rows // 8), np.int32)),
        ".scales": ("F16", np.ones((1, rows), np.float16)),
    }


def awq_parts(rows: int, columns: int) -> Stored:
    return {**gptq_parts(rows, columns), ".qweight": ("I32", np.zeros((columns, rows // 8), np.int32))}


def bitsandbytes_parts(rows: int, columns: int) -> Stored:
    return {
        ".weight": ("U8", np.zeros((rows * columns // 2, 1), np.uint8)),
        ".weight.absmax": ("F32", np.ones(4, np.float32)),
    }


@pytest.mark.parametrize(
    ("parts", "said", "words_"),
    [
        (bitsandbytes_parts, {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        (bitsandbytes_parts, None, r"not known.*weight\.absmax F32.*weight U8"),
        (awq_parts, {"quant_method": "awq", "version": "gemv"}, "AWQ version 'gemv'"),
        (
            gptq_parts,
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "GPTQ checkpoint_format 'marlin'",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    parts: Callable[[int, int], Stored], said: Any, words_: str, checkpoint: Write
) -> None:
    with pytest.raises(BadInput, match=words_):
        open_source(checkpoint(lambda expert, role, rows, columns: parts(rows, columns), said))


def test_a_part_that_is_missing_is_noticed(checkpoint: Write) -> None:
    def encode(expert: int, role: str, rows: int, columns: int) -> Stored:
        stored = dict(gptq_parts(rows, columns))
        if (expert, role) == (1, "up"):
            del stored[".scales"]
        return stored

    with pytest.raises(BadInput, match=r"experts\.1\.up_proj\.qweight"):
        open_source(checkpoint(encode))


def test_fp8_whose_scale_is_lost_is_not_taken_for_plain_numbers(checkpoint: Write) -> None:
    def encode(expert: int, role: str, rows: int, columns: int) -> Stored:
        stored = {
            ".weight": ("F8_E4M3", np.zeros((rows, columns), np.uint8)),
            ".weight_scale_inv": ("F32", np.ones((1, 1), np.float32)),
        }
        if (expert, role) == (2, "down"):
            del stored[".weight_scale_inv"]
        return stored

    with pytest.raises(BadInput, match=r"experts\.2\.down_proj\.weight is FP8.*its scale is missing"):
        open_source(checkpoint(encode, {"quant_method": "fp8"}))


def test_an_act_order_index_that_points_nowhere_is_refused_when_read(checkpoint: Write) -> None:
    def encode(expert: int, role: str, rows: int, columns: int) -> Stored:
        return {**gptq_parts(rows, columns), ".g_idx": ("I32", np.full(columns, 9, np.int32))}

    source = open_source(checkpoint(encode))
    with pytest.raises(BadInput, match="g_idx points to group 9 of 1"):
        source.expert(0, 0)


def test_deepseek_v4_as_it_is_published(tmp_path: Path, write_safetensors: Callable[..., None]) -> None:
    """Names without `model.`, FP4 experts with E8M0 scales, prediction under `mtp.N`."""
    import json

    generator, hidden, inner = np.random.default_rng(1), 64, 32
    stored, wanted = {}, {}
    for stem in ("layers.0.ffn.experts.{}.", "layers.1.ffn.experts.{}.", "mtp.0.ffn.experts.{}."):
        for expert in range(3):
            for name, rows, columns in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
                pairs = generator.integers(-128, 128, (rows, columns // 2), np.int8)
                exponent = generator.integers(110, 130, (rows, columns // 32)).astype(np.uint8)
                key = stem.format(expert) + name
                stored |= {key + ".weight": ("I8", pairs), key + ".scale": ("F8_E8M0", exponent)}
                wanted[key] = nibble_values(pairs) * np.repeat(
                    np.exp2(exponent.astype(float) - 127), 32, axis=1
                )
    config = {
        "model_type": "deepseek_v4", "num_hidden_layers": 2, "n_routed_experts": 3, "num_experts_per_tok": 2,
        "hidden_size": hidden, "moe_intermediate_size": inner, "vocab_size": 8, "num_attention_heads": 2,
        "max_position_embeddings": 64, "swiglu_limit": 10.0, "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", stored)
    source = open_source(tmp_path)
    assert (source.spec.dtype, source.spec.activation) == ("mxfp4", "swiglu-clamped")
    assert len(source.beyond_names()) == 18 and source.dense_names() == []
    for layer in range(2):
        for expert in range(3):
            found = source.expert(layer, expert)
            for field, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                key = f"layers.{layer}.ffn.experts.{expert}.{name}"
                np.testing.assert_array_equal(getattr(found, field), wanted[key].astype(np.float32))
