"""Which format `convert-cpu` writes: its options to a scheme, and those that contradict each other refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktplan.errors import BadUsage
from ktplan.quant.scheme import Rounding, Scheme

_BEST_GROUP = 32


def chosen_scheme(options: Mapping[str, Any]) -> Scheme:
    """The scheme that `--dtype`, `--bits`, `--group-size`, `--rounding` and `--target` ask for (None: not given).

    What is not asked for becomes the best that ktplan's own runtime can use, 4 bits in groups of 32; for kt-kernel
    INT8. Raises BadUsage for a contradiction.
    """
    rounding: Rounding | None = options["rounding"]
    if options["dtype"] == "bf16":
        return _bfloat16(options)
    if options["target"] == "kt-kernel" or rounding == "kt":
        return _for_kt_kernel(options)
    bits = int(options["bits"] or 4)
    size = options["group_size"]
    group = _BEST_GROUP if size is None and bits == 4 else None if size in (None, "row") else int(size)
    return Scheme(bits, group, rounding or "mse")


def _bfloat16(options: Mapping[str, Any]) -> Scheme:
    for name in ("bits", "group_size", "rounding", "mixed"):
        if options[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise BadUsage(
                f"--dtype bf16 keeps weights as they are, so {option} {options[name]} has nothing to decide",
                hint=f"leave out {option}, or --dtype",
            )
    if options["target"] == "kt-kernel":
        raise BadUsage(
            "kt-kernel does not read packed bfloat16, so --dtype bf16 and --target kt-kernel exclude each other",
            hint="kt-kernel runs a bfloat16 checkpoint as it is; or leave out one of the two",
        )
    return Scheme(16, rounding="nearest")


def _for_kt_kernel(options: Mapping[str, Any]) -> Scheme:
    why = "--target kt-kernel" if options["target"] == "kt-kernel" else "--rounding kt"
    if options["target"] == "ktplan":
        raise BadUsage(
            "--rounding kt writes kt-kernel's own bytes, --target ktplan asks for our format",
            hint="leave out --target, or use --rounding mse",
        )
    if options["group_size"] not in (None, "row"):
        raise BadUsage(
            f"{why} needs one scale for each row, so --group-size {options['group_size']} cannot be had",
            hint=f"leave out --group-size, or {why}",
        )
    if options["mixed"] is not None:
        raise BadUsage(
            f"{why} needs all experts in one width, so --mixed cannot be had",
            hint=f"leave out --mixed, or {why}",
        )
    return Scheme(int(options["bits"] or 8), rounding=options["rounding"] or "mse")
