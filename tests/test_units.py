"""Bytes and tokens as people write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ktplan.errors import BadUsage
from ktplan.units import format_bytes, format_count, format_rate, format_seconds, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("18GiB", 18 * 2**30),
        ("18G", 18 * 2**30),
        ("18GB", 18 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("512", 512),
        ("0", 0),
    ],
)
def test_bytes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "3 parsecs", "1e9"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match="not an amount of memory"):
        parse_bytes(text)


@pytest.mark.parametrize("read", [parse_bytes, parse_tokens])
def test_an_amount_without_end_is_refused(read: Callable[[str], int]) -> None:
    with pytest.raises(BadUsage, match="is too large"):
        read("9" * 400)


def test_small_k_is_a_thousand_tokens_and_large_k_1024() -> None:
    assert (parse_tokens("16k"), parse_tokens("16K"), parse_tokens("4096")) == (16_000, 16_384, 4096)


def test_figures_are_printed_with_three_digits() -> None:
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(13.9 * 2**30) == "13.9 GiB"
    assert format_bytes(512) == "512 B"
    assert format_count(28_990_000_000) == "29.0 B"
    assert format_rate(78_300_000_000) == "78.3 GB/s"
    assert format_seconds(354) == "5:54"
    assert format_seconds(7390) == "2:03:10"
