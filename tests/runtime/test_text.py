"""Streamed text never shows half a character and never shows what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan import network
from ktplan.runtime.text import StopStrings, TextStream


class Bytes:
    """A tokenizer with one token a byte, as byte-level ones are at their worst."""

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return bytes(ids).decode("utf-8", "replace")


def pieces(ids: Sequence[int], tokenizer: object = None) -> list[str]:
    stream = TextStream(tokenizer or Bytes())
    found = [stream.push(token) for token in ids]
    return [*found, stream.flush()]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=20))
def test_every_character_arrives_whole(text: str) -> None:
    found = pieces(text.encode())
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


def test_an_unfinished_character_waits_for_its_last_byte() -> None:
    assert pieces("é😀".encode()) == ["", "é", "", "", "", "😀", ""]


def test_a_character_that_is_cut_at_the_end_is_told_once() -> None:
    assert pieces("Hi😀".encode()[:-1]) == ["H", "i", "", "", "", "\ufffd"]


def test_bytes_that_are_no_text_do_not_hold_the_stream_for_ever() -> None:
    found = pieces(b"\x80" * 40)
    assert "".join(found) == "\ufffd" * 40
    assert any(found[:20])


@pytest.mark.parametrize(
    "text", ["The President of the United States", "床前明月光,疑是地上霜。", "  def f(x):\n\treturn 😀\n"]
)
def test_the_embedded_tokenizer_streams_its_own_text(tiny: Path, text: str) -> None:
    tokenizer = network.tokenizer(tiny)
    found = pieces(tokenizer(text)["input_ids"], tokenizer)
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


@given(
    st.text(alphabet="abU:\n", max_size=40),
    st.lists(st.text(alphabet="abU:\n", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_text_ends_before_the_first_stop_however_it_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    watch = StopStrings(stops)
    shown = ""
    for first, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += watch.push(text[first:end])
        if watch.found:
            break
    else:
        shown += watch.flush()
    # A stop is seen when its last character comes; of those that are complete then, the earliest ends the text.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert watch.found == bool(ends)
    if ends:
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
    else:
        assert shown == text
