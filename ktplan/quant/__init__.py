"""Numbers to codes and back: formats, the rule that picks a scale, and error measures."""

from __future__ import annotations

from ktplan.quant.rounding import QuantizedRows, dequantize, quantize_rows, squared_error
from ktplan.quant.scheme import Scheme

__all__ = ["QuantizedRows", "Scheme", "dequantize", "quantize_rows", "squared_error"]
