"""What if: predicted speed over ranges of GPU memory, context and batch.

`vram=16..48,ctx=8k..128k,batch=1..16`: ranges are walked in a few steps (doubling for context and batch), every
combination is one row. More memory is never slower and more context never faster: a plan that uses less is always
allowed, and the table says the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from ktplan.errors import BadUsage, DoesNotFit
from ktplan.units import parse_bytes, parse_tokens

_STEPS: Final = 5
_KEYS: Final = ("vram", "ctx", "batch")


class Question(NamedTuple):
    """Values to try; empty ones are not varied."""

    vram: tuple[int, ...]  # bytes
    ctx: tuple[int, ...]
    batch: tuple[int, ...]


class Answer(NamedTuple):
    """One combination. `decode` is None where it does not fit; `why` says which line is too large."""

    vram: int
    ctx: int
    batch: int
    slots: int
    decode: float | None
    low: float | None
    high: float | None
    why: str | None


def is_question(text: str) -> bool:
    """True for text like `vram=16..48`, false for the description of a machine."""
    return "=" in text


def parse(text: str) -> Question:
    """Raises BadUsage naming the part that is not understood."""
    found: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, _, value = part.partition("=")
        if key not in _KEYS or not value or key in found:
            raise BadUsage(
                f"'{part}' is no question", hint="write --what-if vram=16..48,ctx=8k..128k,batch=1..16"
            )
        read = _vram if key == "vram" else parse_tokens
        low, dots, high = value.partition("..")
        first = read(low)
        last = read(high) if dots else first
        if last < first or (key != "ctx" and first < 1):
            raise BadUsage(f"'{part}' is no range", hint="write the smaller end first, e.g. vram=16..48")
        found[key] = _even(first, last) if key == "vram" else _doubling(first, last)
    return Question(*(found.get(key, ()) for key in _KEYS))


def _vram(text: str) -> int:
    """A plain number is GiB."""
    return parse_bytes(f"{text}GiB" if text.strip().replace(".", "", 1).isdigit() else text)


def _even(first: int, last: int) -> tuple[int, ...]:
    if first == last:
        return (first,)
    return tuple(round(first + (last - first) * step / (_STEPS - 1)) for step in range(_STEPS))


def _doubling(first: int, last: int) -> tuple[int, ...]:
    values, value = [], max(first, 1)
    while value < last:
        values.append(value)
        value *= 2
    values.append(last)
    if len(values) > _STEPS + 1:
        keep = {round(step * (len(values) - 1) / _STEPS) for step in range(_STEPS + 1)}
        values = [value for place, value in enumerate(values) if place in keep]
    return tuple(dict.fromkeys(values))


Ask = Callable[[int, int, int], tuple[int, float, float, float]]


def sweep(question: Question, ask: Ask, *, vram: int, ctx: int, batch: int) -> list[Answer]:
    """Every combination, asked by `ask(vram, ctx, batch)` -> (slots, decode, low, high), which may raise DoesNotFit.

    Speeds are made monotone: with more memory or less context at least what less memory or more context allows, since
    the smaller plan may be used there, too.
    """
    found: list[Answer] = []
    for sequences in question.batch or (batch,):
        for memory in question.vram or (vram,):
            for tokens in question.ctx or (ctx,):
                try:
                    slots, decode, low, high = ask(memory, tokens, sequences)
                    found.append(Answer(memory, tokens, sequences, slots, decode, low, high, None))
                except DoesNotFit as fault:
                    found.append(Answer(memory, tokens, sequences, 0, None, None, None, fault.message))
    return [_best(row, found) for row in found]


def _best(row: Answer, rows: list[Answer]) -> Answer:
    if row.decode is None:
        return row
    allowed = [
        other
        for other in rows
        if other.decode is not None
        and other.batch == row.batch
        and other.vram <= row.vram
        and other.ctx >= row.ctx
    ]
    top = max(allowed, key=lambda other: other.decode or -math.inf)
    if (top.decode or 0) <= row.decode:
        return row
    return row._replace(slots=top.slots, decode=top.decode, low=top.low, high=top.high)
