"""Number formats for expert weights: how many bits, one scale for how many weights, and how that scale is chosen.

What a scheme says is independent of how the codes lie in memory (ktplan.store.layout).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ktplan.errors import BadUsage

Rounding = Literal["mse", "kt", "gptq"]

# The highest level of each width. INT4 leaves -8 unused: kt-kernel's vector kernels negate by a trick that -8 breaks.
_TOP_LEVEL = {8: 127, 4: 7, 2: 1}


@dataclass(frozen=True, slots=True)
class Scheme:
    """A symmetric format with one scale for each output row.

    `bits` 8: levels -127..127. `bits` 4: levels -7..7. `bits` 2: levels -1..1, kept in INT4 tiles; a deliberately
    coarse specimen that makes the cost of quantization visible, not a format to run models in.
    `rounding` "mse": the row's scale is searched for the least squared error. "kt": kt-kernel's rule and bytes.
    "gptq": levels and scales are fitted to calibration text (convert.calibrated); the format is the same.
    Raises BadUsage for a combination that does not exist.
    """

    bits: int
    group: None = None
    rounding: Rounding = "mse"

    def __post_init__(self) -> None:
        if self.bits not in _TOP_LEVEL:
            raise BadUsage(f"{self.bits} bits are not supported for the CPU", hint="use --bits 8, 4 or 2")
        if self.group is not None:
            raise BadUsage(
                f"scales for groups of {self.group} do not exist in this layout, only one for each row",
                hint="use --group-size row",
            )
        if self.rounding not in ("mse", "kt", "gptq"):
            raise BadUsage(f"rounding '{self.rounding}' is not known", hint="use --rounding mse, kt or gptq")
        if self.rounding == "kt" and self.bits == 2:
            raise BadUsage(
                "kt-kernel has no 2-bit format, so --rounding kt cannot be met", hint="use --rounding mse"
            )

    @property
    def name(self) -> str:
        """`"int8-row"`, `"int4-row"`, `"int2-row"`."""
        return f"int{self.bits}-row"

    @property
    def top_level(self) -> int:
        """Levels are integers in -top_level..top_level."""
        return _TOP_LEVEL[self.bits]

    @property
    def tile_bits(self) -> int:
        """Width of a level in memory: 8 or 4."""
        return 8 if self.bits == 8 else 4
