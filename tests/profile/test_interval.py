"""Intervals for other text: as wide as documents, few of them, and a placement that follows them make it."""

from __future__ import annotations

import numpy as np
import pytest

from ktplan.profile.interval import interval, student


@pytest.mark.parametrize(("degrees", "value"), [(5, -2.015), (9, -1.833), (29, -1.699), (120, -1.658)])
def test_students_quantile(degrees: int, value: float) -> None:
    assert student(0.05, degrees) == pytest.approx(value, abs=2e-3)


def test_documents_alike_leave_no_doubt_and_one_says_nothing() -> None:
    low, high = interval(np.full(10, 3), np.full(10, 4))
    assert low == pytest.approx(0.75) and high == pytest.approx(0.75)
    assert interval(np.array([3]), np.array([4])) == (0.75, 0.75)


def test_weightless_documents_take_no_part() -> None:
    values, weights = np.array([1.0, 2.0, 3.0, 9.0]), np.array([4.0, 4.0, 4.0, 0.0])
    assert interval(values, weights) == interval(values[:3], weights[:3])


def test_the_interval_is_the_wider_the_fewer_documents_there_are() -> None:
    draw = np.random.default_rng(1)
    hits = draw.binomial(100, 0.5 + 0.1 * draw.standard_normal(400).clip(-2, 2))
    widths = []
    for documents in (5, 20, 100, 400):
        low, high = interval(hits[:documents], np.full(documents, 100))
        widths.append(float(high - low))
    assert widths == sorted(widths, reverse=True)
    # 400 documents whose rates vary by s: 2 x 1.645 x s x sqrt(2 / 400).
    spread = float((hits / 100).std())
    assert widths[-1] == pytest.approx(2 * 1.645 * spread * np.sqrt(2 / 400), rel=0.1)


def test_fresh_documents_fall_inside_nine_times_in_ten() -> None:
    """Rates of documents vary; half are seen, half are to come."""
    inside = 0
    for turn in range(300):
        draw = np.random.default_rng(turn)
        rates = draw.beta(4, 4, 60)
        hits = draw.binomial(200, rates)
        low, high = interval(hits[:30], np.full(30, 200), seed=turn)
        inside += low <= hits[30:].mean() / 200 <= high
    assert 0.87 * 300 <= inside <= 0.95 * 300
