"""Rows to levels and scales: what the rules promise, on odd rows and on distributions like real weights."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan.errors import BadUsage
from ktplan.quant import QuantizedRows, Scheme, dequantize, quantize_rows, squared_error

MSE = [Scheme(8), Scheme(4), Scheme(2)]
KT = [Scheme(8, rounding="kt"), Scheme(4, rounding="kt")]
NORMAL = 2.0**-126

# Largest relative RMS error allowed: just above the best that one scale a row can do (15 levels: 0.113 on a Gaussian).
QUALITY = {
    ("gauss", 8): 0.0084, ("gauss", 4): 0.1135, ("gauss", 2): 0.437,
    ("student", 8): 0.0185, ("student", 4): 0.195, ("student", 2): 0.53,
}  # fmt: skip


def weights(kind: str, rows: int = 256, columns: int = 2048) -> np.ndarray:
    random = np.random.default_rng(7)
    values = (
        random.standard_normal((rows, columns)) if kind == "gauss" else random.standard_t(5, (rows, columns))
    )
    return (values * 0.02).astype(np.float32)


def relative_error(exact: np.ndarray, rows: QuantizedRows) -> float:
    error, energy = squared_error(exact, rows)
    return (error / energy) ** 0.5


def row_errors(exact: np.ndarray, rows: QuantizedRows) -> np.ndarray:
    return np.square(dequantize(rows).astype(np.float64) - exact).sum(axis=1)


@pytest.mark.parametrize("scheme", MSE, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("kind", ["gauss", "student"])
def test_the_searched_scale_is_near_the_best_possible(kind: str, scheme: Scheme) -> None:
    exact = weights(kind)
    assert relative_error(exact, quantize_rows(exact, scheme)) < QUALITY[kind, scheme.bits]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["gauss", "student"])
def test_no_row_is_worse_than_with_kt_kernels_rule(kind: str, bits: int) -> None:
    exact = weights(kind)
    exact = np.concatenate([exact, exact[:32] * (1 + 100 * (np.arange(2048) == 5)).astype(np.float32)])
    exact = exact.view(np.uint32)
    exact = (exact & np.uint32(0xFFFF0000)).view(
        np.float32
    )  # bfloat16, so that both rules see the same values
    searched = row_errors(exact, quantize_rows(exact, Scheme(bits)))
    kt = row_errors(exact, quantize_rows(exact, Scheme(bits, rounding="kt")))
    assert (searched <= kt * (1 + 1e-5)).all()


def test_the_search_finds_what_trying_every_scale_finds() -> None:
    exact = weights("student", rows=16, columns=768)
    found = row_errors(exact, quantize_rows(exact, Scheme(4)))
    best = np.full(len(exact), np.inf)
    for ratio in np.geomspace(0.05, 1, 1000):
        step = (np.abs(exact).max(axis=1) * ratio / 7)[:, None]
        tried = np.clip(np.rint(exact / step), -7, 7) * step
        best = np.minimum(best, np.square(tried - exact).sum(axis=1))
    assert (found <= 1.02 * best).all()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """Rows of very different magnitude, with repeated values, zeros and outliers."""
    columns = draw(st.sampled_from([1, 3, 64, 200]))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        values = draw(st.lists(finite, min_size=1, max_size=6))
        picks = draw(st.lists(st.integers(0, len(values) - 1), min_size=columns, max_size=columns))
        rows.append([values[pick] for pick in picks])
    return np.array(rows, np.float32)


@settings(max_examples=200, deadline=None)
@given(matrices(), st.sampled_from([*MSE, *KT]))
def test_whatever_the_values_levels_and_results_stay_in_range(exact: np.ndarray, scheme: Scheme) -> None:
    rows = quantize_rows(exact, scheme)
    top = {8: 127, 4: 7, 2: 1}[scheme.bits]
    assert rows.levels.dtype == np.int8 and np.abs(rows.levels.astype(int)).max() <= top
    assert np.isfinite(rows.scale).all() and (rows.scale >= 0).all()
    assert np.isfinite(dequantize(rows)).all()
    assert ((rows.scale == 0) | (rows.scale >= NORMAL)).all()  # kernels flush denormal scales to zero
    assert not rows.levels[rows.scale == 0].any()
    # A level never has the other sign than its weight.
    assert (np.sign(rows.levels) * np.sign(exact) >= 0).all()


@settings(max_examples=200, deadline=None)
@given(matrices(), st.sampled_from([8, 4]))
def test_whatever_the_values_the_search_is_never_worse_than_the_largest_magnitude(
    exact: np.ndarray, bits: int
) -> None:
    exact = (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    searched = row_errors(exact, quantize_rows(exact, Scheme(bits)))
    kt = row_errors(exact, quantize_rows(exact, Scheme(bits, rounding="kt")))
    energy = np.square(exact.astype(np.float64)).sum(axis=1)
    assert (searched <= kt * (1 + 1e-4) + 1e-12 * energy).all()


@pytest.mark.parametrize("scheme", [*MSE, *KT], ids=lambda scheme: f"{scheme.name}-{scheme.rounding}")
def test_zeros_come_back_as_zeros_and_leave_other_rows_alone(scheme: Scheme) -> None:
    exact = weights("gauss", rows=8, columns=128)
    alone = quantize_rows(exact, scheme)
    exact[3] = 0
    exact[5, :64] = 0
    rows = quantize_rows(exact, scheme)
    back = dequantize(rows)
    assert rows.scale[3] == 0 and not back[3].any() and not back[5, :64].any()
    others = [0, 1, 2, 4, 6, 7]
    assert np.array_equal(rows.levels[others], alone.levels[others])
    assert np.array_equal(rows.scale[others], alone.scale[others])


@pytest.mark.parametrize("scheme", [*MSE, *KT], ids=lambda scheme: f"{scheme.name}-{scheme.rounding}")
def test_a_row_does_not_depend_on_the_rows_around_it(scheme: Scheme) -> None:
    exact = weights("student", rows=300, columns=1024)  # more than one block
    whole = quantize_rows(exact, scheme)
    one = quantize_rows(exact[287:288], scheme)
    assert np.array_equal(whole.levels[287:288], one.levels) and whole.scale[287] == one.scale[0]


@pytest.mark.parametrize(
    "scheme", [Scheme(8), Scheme(4), *KT], ids=lambda scheme: f"{scheme.name}-{scheme.rounding}"
)
def test_magnitude_is_no_matter(scheme: Scheme) -> None:
    exact = weights("gauss", rows=4, columns=512)
    near, far = quantize_rows(exact, scheme), quantize_rows(exact * np.float32(2.0**90), scheme)
    assert np.array_equal(near.levels, far.levels)
    assert np.array_equal(near.scale * np.float32(2.0**90), far.scale)
    assert relative_error(exact * np.float32(2.0**90), far) == pytest.approx(relative_error(exact, near))


def test_int4_scales_belong_to_sixteen_times_the_level() -> None:
    exact = np.array([[-7.0, 3.0, 0.0, 7.0]], np.float32)
    for rounding in ("mse", "kt"):
        mode: Literal["mse", "kt"] = "mse" if rounding == "mse" else "kt"
        rows = quantize_rows(exact, Scheme(4, rounding=mode))
        assert rows.levels.tolist() == [[-7, 3, 0, 7]]
        assert rows.scale.tolist() == [1 / 16]
        assert np.array_equal(dequantize(rows), exact)


def test_kt_rounds_int4_twice_and_the_search_once() -> None:
    # 0.47 of a step: nearest is level 0; kt-kernel first rounds 16 * 0.47 to 8, then 8/16 away from zero to 1.
    exact = np.array([[7.0, 0.47]], np.float32)
    assert quantize_rows(exact, Scheme(4, rounding="kt")).levels.tolist() == [[7, 1]]
    assert quantize_rows(exact, Scheme(4)).levels.tolist() == [[7, 0]]


def test_schemes_have_names_and_impossible_ones_are_refused() -> None:
    assert [Scheme(bits).name for bits in (8, 4, 2)] == ["int8-row", "int4-row", "int2-row"]
    with pytest.raises(BadUsage, match="3 bits"):
        Scheme(3)
    with pytest.raises(BadUsage, match="no 2-bit format"):
        Scheme(2, rounding="kt")
    assert [Scheme(4, group).name for group in (32, 64, 128)] == ["int4-g32", "int4-g64", "int4-g128"]
    assert Scheme(16, rounding="nearest").name == "bf16"
    for impossible, words in (
        ({"bits": 4, "group": 16}, "groups of 16 weights"),
        ({"bits": 8, "group": 32}, "8 bits have no scales for groups of 32"),
        ({"bits": 4, "group": 32, "rounding": "kt"}, "one scale for each row, so groups of 32"),
        ({"bits": 16}, "16 bits cannot have rounding 'mse'"),
        ({"bits": 4, "rounding": "nearest"}, "4 bits cannot have rounding 'nearest'"),
    ):
        with pytest.raises(BadUsage, match=words):
            Scheme(**impossible)
    with pytest.raises(BadUsage, match="'rtn' is not known"):
        Scheme(4, rounding="rtn")  # type: ignore[arg-type]
