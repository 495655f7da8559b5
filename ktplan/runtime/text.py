"""Token ids to text as they come, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"
_LONGEST_WAIT = 8  # tokens: a UTF-8 character has 4 bytes, so after 8 tokens the bytes are simply no text


class TextStream:
    """Decodes a growing list of tokens; text that may still change is held back until it cannot.

    A byte-level tokenizer spreads a character over several tokens; decoding them singly gives U+FFFD.
    Decoding starts a few tokens back, since many tokenizers write a word's first token in another way
    alone.
    """

    def __init__(self, tokenizer: Any, *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._ids: list[int] = []
        self._start = 0  # where decoding begins
        self._shown = 0  # tokens whose text was handed out

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._ids.append(token)
        before, now = self._decode(self._start, self._shown), self._decode(self._start, len(self._ids))
        if now.endswith(_UNFINISHED) and len(self._ids) - self._shown < _LONGEST_WAIT:
            return ""
        return self._hand_out(before, now)

    def flush(self) -> str:
        """What is still held back, at the end: a cut character appears once, as U+FFFD."""
        before, now = self._decode(self._start, self._shown), self._decode(self._start, len(self._ids))
        return self._hand_out(before, now)

    def _hand_out(self, before: str, now: str) -> str:
        self._start, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def _decode(self, first: int, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[first:end], skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
        )
        return text


class StopStrings:
    """Watches streamed text for strings that end it; text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The part of `text` that can be shown; once `found`, nothing more."""
        if self.found:
            return ""
        held = self._held + text
        ends = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return held[: min(ends)]
        keep = max((self._overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
