"""The GPTQ safetensors format: codes packed into int32 words, and back.

For a linear layer with weight [N, K] (N outputs, K inputs), `bits` b, group size g and p = 32 / b codes a word:

    qweight  int32   [K/p, N]    along K: the code of input k sits at bits b*(k mod p) of row k // p
    qzeros   int32   [K/g, N/p]  along N, same order of bits; version 1 stores zero - 1, version 2 stores zero
    scales   float16 [K/g, N]
    g_idx    int32   [K]         group of each input: k // g in natural order

    weight[n, k] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])

Layout as AutoGPTQ introduced it and GPTQModel, vLLM, SGLang and transformers read it. The two versions differ in
qzeros alone and files are often labelled wrongly, so symmetric zeros are recognized from the words themselves.
numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadInput, BadUsage

F32 = npt.NDArray[np.float32]
F16 = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float16] | npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

BITS = (4, 8)
GROUP_SIZES = (128, 64, 32)  # what Marlin kernels take (vllm marlin_utils.py), largest first
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """Symmetric codes of `bits` bits, one float16 scale for `group_size` neighbouring inputs of an output.

    Codes are 0 .. 2^bits - 1 and stand for the levels code - zero, with zero = 2^(bits - 1). Raises BadUsage for a
    width or group size that fast GPU kernels do not take.
    """

    bits: int
    group_size: int = 128

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise BadUsage(f"{self.bits} bits are not supported for the GPU", hint="use --bits 4 or --bits 8")
        if self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise BadUsage(
                f"groups of {self.group_size} are not supported for the GPU", hint=f"use --group-size {sizes}"
            )

    @property
    def name(self) -> str:
        """`"w4a16-g128"`."""
        return f"w{self.bits}a16-g{self.group_size}"

    @property
    def zero(self) -> int:
        """The code that stands for 0."""
        return 1 << (self.bits - 1)

    @property
    def codes_per_word(self) -> int:
        """Codes in one int32."""
        return 32 // self.bits

    def bytes(self, outputs: int, inputs: int) -> int:
        """Size of one layer's four tensors."""
        groups = inputs // self.group_size
        return (
            outputs * inputs * self.bits // 8
            + groups * outputs * self.bits // 8
            + 2 * groups * outputs
            + 4 * inputs
        )

    def misfit(self, outputs: int, inputs: int) -> str | None:
        """Why a layer of this shape cannot be stored, or None."""
        if inputs % self.group_size:
            return f"its {inputs} inputs are not a multiple of the group size {self.group_size}"
        if outputs % self.codes_per_word:
            return f"its {outputs} outputs are not a multiple of {self.codes_per_word}"
        return None


class PackedLinear(NamedTuple):
    """The four tensors of one layer, as stored."""

    qweight: I32  # [K/p, N]
    qzeros: I32  # [K/g, N/p]
    scales: F16  # [K/g, N]
    g_idx: I32  # [K]


def pack_linear(codes: U8, scales: F16, scheme: GptqScheme) -> PackedLinear:
    """Codes [N, K] and scales [N, K/g] to the stored form: version 1, natural order."""
    outputs, inputs = codes.shape
    groups = inputs // scheme.group_size
    # Version 1 stores zero - 1 in every field: words 0x77777777 (4 bit) and 0x7F7F7F7F (8 bit).
    zeros = np.full((groups, outputs), scheme.zero - 1, np.uint8)
    return PackedLinear(
        qweight=pack_words(np.ascontiguousarray(codes.T), scheme.bits),
        qzeros=np.ascontiguousarray(pack_words(np.ascontiguousarray(zeros.T), scheme.bits).T),
        scales=np.ascontiguousarray(scales.T),
        g_idx=(np.arange(inputs) // scheme.group_size).astype(np.int32),
    )


def pack_words(codes: U8, bits: int) -> I32:
    """Codes uint8 [R, C] to int32 [R/p, C]: p consecutive rows to a word, the first in the lowest bits."""
    per_word = 32 // bits
    rows, columns = codes.shape
    if rows % per_word:
        raise ValueError(f"{rows} rows are not a multiple of {per_word}")
    fields = codes.reshape(rows // per_word, per_word, columns)
    words = np.zeros((rows // per_word, columns), np.uint32)
    for place in range(per_word):
        words |= fields[:, place].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def unpack_words(words: I32, bits: int) -> U8:
    """Inverse of `pack_words`: int32 [R, C] to uint8 [R*p, C]."""
    per_word = 32 // bits
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    codes = np.empty((words.shape[0], per_word, words.shape[1]), np.uint8)
    for place in range(per_word):
        codes[:, place] = (unsigned >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1)
    return codes.reshape(-1, words.shape[1])


def zero_points(
    qzeros: I32, bits: int, *, checkpoint_format: str = "gptq", symmetric: bool = True
) -> npt.NDArray[np.int16]:
    """The zero of every group and output, int16 [K/g, N].

    Where the layer is symmetric, the words decide: all fields 2^(b-1) - 1 are version 1, all 2^(b-1) version 2,
    whatever `checkpoint_format` says. Otherwise the label decides: "gptq" (version 1) or "gptq_v2".
    Raises BadInput for another label, or for symmetric zeros that are neither.
    """
    stored = np.ascontiguousarray(unpack_words(np.ascontiguousarray(qzeros.T), bits).T)
    middle = 1 << (bits - 1)
    if symmetric:
        lowest, highest = int(stored.min(initial=middle)), int(stored.max(initial=0))
        if lowest != highest or highest not in (middle - 1, middle):
            raise BadInput(
                f"the checkpoint says it is symmetric, but its zeros are {lowest} to {highest} instead of "
                f"{middle - 1} or {middle}",
                hint="the checkpoint is damaged, or its quantization_config has the wrong 'sym'",
            )
        return np.full(stored.shape, middle, np.int16)
    if checkpoint_format == "gptq":
        # zero - 1 was stored modulo 2^bits, so a zero of 0 comes back from the largest code.
        return (stored.astype(np.int16) + 1) & np.int16((1 << bits) - 1)
    if checkpoint_format == "gptq_v2":
        return stored.astype(np.int16)
    raise BadInput(
        f"checkpoint_format '{checkpoint_format}' of the GPTQ checkpoint is not known",
        hint="known are 'gptq' and 'gptq_v2'",
    )


def dequantize(
    qweight: I32,
    qzeros: I32,
    scales: Floats,
    g_idx: I32,
    bits: int,
    *,
    checkpoint_format: str = "gptq",
    symmetric: bool = True,
) -> F32:
    """The float32 weight [N, K] of one stored layer, C-contiguous. See `zero_points` for the two versions.

    Raises BadInput when the four shapes contradict each other or a group number is out of range.
    """
    inputs, outputs = qweight.shape[0] * (32 // bits), qweight.shape[1]
    groups = scales.shape[0]
    expected = {"qzeros": (groups, outputs * bits // 32), "scales": (groups, outputs), "g_idx": (inputs,)}
    for name, tensor in (("qzeros", qzeros), ("scales", scales), ("g_idx", g_idx)):
        if tensor.shape != expected[name]:
            raise BadInput(
                f"qweight {list(qweight.shape)} of {bits} bits needs {name} {list(expected[name])}, "
                f"it is {list(tensor.shape)}",
                hint="the checkpoint is damaged, or its quantization_config has the wrong 'bits'",
            )
    if g_idx.size and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
        raise BadInput(
            f"g_idx names groups {int(g_idx.min())} to {int(g_idx.max())}, there are {groups} groups of scales",
            hint="the checkpoint is damaged",
        )
    zeros = zero_points(qzeros, bits, checkpoint_format=checkpoint_format, symmetric=symmetric)
    levels = unpack_words(qweight, bits).astype(np.float32)
    levels -= zeros.astype(np.float32)[g_idx]
    levels *= scales.astype(np.float32)[g_idx]
    return np.ascontiguousarray(levels.T)


class GptqSettings(NamedTuple):
    """What a reader needs of a checkpoint's `quantization_config`."""

    bits: int
    group_size: int  # -1: one group for all inputs
    symmetric: bool
    checkpoint_format: str


def read_settings(config: Mapping[str, Any], where: str) -> GptqSettings:
    """Read a `quantization_config` (or quantize_config.json); `where` names it in errors.

    Older and newer spellings are known: checkpoint_format / format, quant_method / method.
    Raises BadInput when it is another method or has a width that is not read here.
    """
    method = config.get("quant_method", config.get("method", "gptq"))
    if method != "gptq":
        raise BadInput(f"{where} says quant_method '{method}', not 'gptq'", hint="give a GPTQ checkpoint")
    bits = config.get("bits")
    if bits not in BITS:
        raise BadInput(
            f"{where} says bits {bits!r}; 4 and 8 are read", hint="give a 4- or 8-bit GPTQ checkpoint"
        )
    group_size = config.get("group_size")
    if not isinstance(group_size, int) or (group_size != -1 and group_size <= 0):
        raise BadInput(f"{where} says group_size {group_size!r}", hint="a whole number, or -1 for one group")
    label = config.get("checkpoint_format", config.get("format")) or "gptq"
    if label not in ("gptq", "gptq_v2"):
        raise BadInput(
            f"{where} says checkpoint_format '{label}'; 'gptq' and 'gptq_v2' are read",
            hint="repacked layouts (marlin, bitblas) are for one engine alone; give the plain checkpoint",
        )
    return GptqSettings(int(bits), group_size, bool(config.get("sym", True)), str(label))
