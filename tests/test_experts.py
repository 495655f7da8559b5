"""Sets of experts and the ranges they are written as."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktplan.errors import BadInput
from ktplan.experts import ExpertId, ExpertSet, format_ranges, parse_ranges

experts = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)).map(lambda pair: ExpertId(*pair)))


@given(experts)
def test_ranges_hold_the_set(some: list[ExpertId]) -> None:
    whole = ExpertSet(some)
    assert ExpertSet.from_ranges(whole.to_ranges()) == whole
    assert list(whole) == sorted(set(some))
    assert len(whole) == len(set(some))
    assert all(expert in whole for expert in some)


@given(experts, experts)
def test_set_operations_are_those_of_sets(a: list[ExpertId], b: list[ExpertId]) -> None:
    assert set(ExpertSet(a) | ExpertSet(b)) == set(a) | set(b)
    assert set(ExpertSet(a) & ExpertSet(b)) == set(a) & set(b)
    assert set(ExpertSet(a) - ExpertSet(b)) == set(a) - set(b)
    assert (ExpertSet(a) == ExpertSet(b)) == (set(a) == set(b))


def test_ranges_are_written_short() -> None:
    assert format_ranges([17, 0, 1, 2, 3]) == "0-3,17"
    assert parse_ranges("0-3, 17") == (0, 1, 2, 3, 17)
    assert parse_ranges("") == ()


@pytest.mark.parametrize("text", ["3-", "-3", "5-2", "a", "1;2", "0-99999999999", "\u0663"])
def test_text_that_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="not a range"):
        parse_ranges(text)
