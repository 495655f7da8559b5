"""Numbers to codes and back: formats, the rule that picks a scale, and error measures."""

from __future__ import annotations

from ktplan.quant.groups import Bfloat16Rows, QuantizedGroups, quantize_groups
from ktplan.quant.rounding import QuantizedRows, dequantize, quantize_rows, squared_error
from ktplan.quant.scheme import Scheme
from ktplan.quant.stored import Stored, dequantize_stored, squared_error_stored

__all__ = [
    "Bfloat16Rows",
    "QuantizedGroups",
    "QuantizedRows",
    "Scheme",
    "Stored",
    "dequantize",
    "dequantize_stored",
    "quantize_groups",
    "quantize_rows",
    "squared_error",
    "squared_error_stored",
]
