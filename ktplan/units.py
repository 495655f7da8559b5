"""Bytes, tokens and rates as people write them: the only place that parses or prints them."""

from __future__ import annotations

import re

from ktplan.errors import BadUsage

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_TOKEN_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}


def parse_bytes(text: str) -> int:
    """`"18GiB"`, `"18G"` (binary), `"18GB"` (decimal) or a plain number of bytes.

    Raises BadUsage for anything else, negative amounts included.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _BYTE_UNITS.get(found.group(2).lower()) if found else None
    if found is None or unit is None:
        raise BadUsage(f"'{text}' is not an amount of memory", hint="write it like 18GiB, 18GB or 512MiB")
    return _whole(found.group(1), unit)


def parse_tokens(text: str) -> int:
    """`"16k"` is 16,000 and `"16K"` 16,384 tokens. Raises BadUsage for anything else."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmM]?)\s*", text)
    if found is None:
        raise BadUsage(
            f"'{text}' is not a number of tokens", hint="write it like 4096, 16k (16,000) or 16K (16,384)"
        )
    return _whole(found.group(1), _TOKEN_UNITS[found.group(2)])


def _whole(number: str, unit: int) -> int:
    # 2**63 bytes are more than any machine has; numbers of hundreds of digits would overflow a float.
    amount = float(number) * unit
    if amount >= 2**63:
        raise BadUsage(f"'{number[:20]}…' is too large", hint="give a smaller number")
    return int(amount)


def format_bytes(count: int | float) -> str:
    """Three significant digits in binary units: `"1.50 GiB"`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{int(value)} B" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def format_count(count: int | float) -> str:
    """`"28.99 B"`, `"8.15 M"`, `"16.4 k"`, `"512"`: parameters and the like, decimal."""
    value = float(count)
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{count:g}"


def format_seconds(seconds: float) -> str:
    """`"0.42 s"`, `"9.1 s"`, `"5:54"`, `"2:03:10"`."""
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_rate(bytes_per_second: float) -> str:
    """Decimal gigabytes a second, as memory and disks are sold: `"78.3 GB/s"`."""
    if bytes_per_second >= 1e8:
        return f"{_three_digits(bytes_per_second / 1e9)} GB/s"
    return f"{_three_digits(bytes_per_second / 1e6)} MB/s"


def format_percent(fraction: float) -> str:
    """`"81.4 %"`."""
    return f"{100 * fraction:.1f} %"


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
