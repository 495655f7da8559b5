"""Number formats for expert weights: how many bits, one scale for how many weights, and how that scale is chosen.

What a scheme says is independent of how the codes lie in memory (ktplan.store.layout).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ktplan.errors import BadUsage

Rounding = Literal["mse", "kt", "gptq", "nearest"]

# The highest level of each width. Rows of INT4 leave -8 unused: kt-kernel's vector kernels negate by a trick that -8
# breaks.
TOP_LEVEL = {16: 0, 8: 127, 4: 7, 2: 1}  # 0: no levels
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format without zero points: levels and scales, or bfloat16.

    `group` None: one scale for each output row. `bits` 8: levels -127..127. `bits` 4: levels -7..7. `bits` 2: levels
    -1..1, kept in INT4 tiles; a deliberately coarse specimen that makes the cost of quantization visible, not a format
    to run models in. `bits` 4 with `group` 32, 64 or 128: levels -8..7, a scale for so many inputs of a row.
    `offsets`: a group's scale also chooses an offset for its levels (quant.groups), which fits all weights better but
    those that were plain groups before. `bits` 16: bfloat16, no scales.
    `rounding` "mse": each scale is searched for the least squared error. "kt": kt-kernel's rule and bytes. "gptq":
    levels and scales are fitted to calibration text (convert.calibrated); the format is the same. "nearest": bfloat16.
    Raises BadUsage for a combination that does not exist.
    """

    bits: int
    group: int | None = None
    rounding: Rounding = "mse"
    offsets: bool = False

    def __post_init__(self) -> None:
        if self.bits not in TOP_LEVEL:
            raise BadUsage(
                f"{self.bits} bits are not supported for the CPU",
                hint="use --bits 8, 4 or 2, or --dtype bf16",
            )
        if self.group is not None and self.bits != 4:
            raise BadUsage(
                f"{self.bits} bits have no scales for groups of {self.group}; only 4 bits have groups",
                hint="use --bits 4, or leave out --group-size",
            )
        if self.group is not None and self.group not in GROUPS:
            raise BadUsage(
                f"groups of {self.group} weights do not exist", hint="use --group-size 32, 64, 128 or row"
            )
        if self.offsets and self.group is None:
            raise BadUsage("only groups have offsets", hint="use --group-size 32, 64 or 128")
        if self.rounding not in ("mse", "kt", "gptq", "nearest"):
            raise BadUsage(f"rounding '{self.rounding}' is not known", hint="use --rounding mse, kt or gptq")
        if (self.rounding == "nearest") != (self.bits == 16):
            raise BadUsage(
                f"{self.bits} bits cannot have rounding '{self.rounding}': bfloat16 has the nearest value, all others "
                "have scales to choose",
                hint="leave out --rounding for --dtype bf16",
            )
        if self.rounding == "kt" and self.group is not None:
            raise BadUsage(
                f"kt-kernel's formats have one scale for each row, so groups of {self.group} cannot be had with "
                "--rounding kt",
                hint="leave out --group-size, or use --rounding mse",
            )
        if self.rounding == "gptq" and self.bits == 2:
            raise BadUsage(
                "three levels leave calibration nothing to work with: weights got worse in what was measured",
                hint="use --rounding mse with --bits 2, or --bits 4",
            )
        if self.rounding == "kt" and self.bits == 2:
            raise BadUsage(
                "kt-kernel has no 2-bit format, so --rounding kt cannot be met", hint="use --rounding mse"
            )

    @property
    def name(self) -> str:
        """`"int8-row"`, `"int4-row"`, `"int2-row"`, `"int4-g32"` (64, 128), `"bf16"`."""
        return scheme_name(self.bits, self.group)

    @property
    def top_level(self) -> int:
        """Levels of a row are integers in -top_level..top_level; 0 for bfloat16."""
        return TOP_LEVEL[self.bits]

    @property
    def tile_bits(self) -> int:
        """Width of a weight in memory: 16, 8 or 4."""
        return self.bits if self.bits in (16, 8) else 4


def scheme_name(bits: int, group: int | None) -> str:
    """What a format is called; see `Scheme.name`."""
    return "bf16" if bits == 16 else f"int{bits}-{'row' if group is None else f'g{group}'}"
