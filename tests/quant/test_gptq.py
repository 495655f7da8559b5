"""GPTQ: never worse than rounding to nearest, much better where inputs are correlated, and quiet about dead inputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan.errors import KtplanError
from ktplan.quant.gptq import (
    Effort,
    SecondMoments,
    output_error,
    quantize,
    round_to_nearest,
    search_scales,
    shrink,
)
from ktplan.quant.gptq_format import GptqScheme

PLAIN = Effort(polish=0)
W4 = GptqScheme(4, 32)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def weights(seed: int, outputs: int = 24, inputs: int = 96) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05


def correlated(seed: int, inputs: int = 96, tokens: int = 400, rank: int = 12) -> torch.Tensor:
    """Inputs [tokens, K] that live near a few directions, as a network's do."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, rank, generator=generator) @ torch.randn(rank, inputs, generator=generator)
    return hidden + 0.2 * torch.randn(tokens, inputs, generator=generator)


def moments(inputs: torch.Tensor) -> torch.Tensor:
    found = SecondMoments(inputs.shape[1])
    found.add(inputs)
    return found.mean()


def errors(
    weight: torch.Tensor, hessian: torch.Tensor, scheme: GptqScheme, effort: Effort
) -> tuple[float, float]:
    """(GPTQ, rounding to nearest) from the same scales."""
    scales = search_scales(weight, scheme, hessian.diagonal(), signed=effort.signed_scales)
    fitted = quantize(weight, hessian, scales, scheme, effort)
    nearest = round_to_nearest(weight, scales, scheme)
    return output_error(weight, fitted.weight(), hessian), output_error(weight, nearest.weight(), hessian)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([4, 8]), st.sampled_from([32, 64]), st.booleans())
def test_never_worse_than_rounding_to_nearest_and_much_better_on_correlated_inputs(
    seed: int, bits: int, group_size: int, signed: bool
) -> None:
    hessian = moments(correlated(seed, inputs=128))
    fitted, nearest = errors(
        weights(seed, inputs=128), hessian, GptqScheme(bits, group_size), Effort(signed_scales=signed)
    )
    assert fitted < 0.5 * nearest


def test_what_was_fitted_holds_on_other_inputs() -> None:
    weight, inputs = weights(1), correlated(1, tokens=1200)
    fit, other = moments(inputs[:800]), moments(inputs[800:])
    scales = search_scales(weight, W4, fit.diagonal())
    fitted = quantize(weight, fit, scales, W4, Effort())
    nearest = round_to_nearest(weight, scales, W4)
    assert output_error(weight, fitted.weight(), other) < 0.6 * output_error(weight, nearest.weight(), other)


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_without_correlation_leave_nothing_to_pay_back(bits: int) -> None:
    scheme, weight = GptqScheme(bits, 32), weights(2)
    for hessian in (torch.eye(96), torch.diag(torch.rand(96) + 0.1), torch.zeros(96, 96)):
        scales = search_scales(weight, scheme)
        fitted = quantize(weight, hessian, scales, scheme, PLAIN)
        assert torch.equal(fitted.codes, round_to_nearest(weight, scales, scheme).codes)


def test_dead_inputs_keep_their_weight_and_do_no_harm() -> None:
    weight, inputs = weights(3), correlated(3)
    dead = torch.tensor([0, 17, 95])
    inputs[:, dead] = 0
    hessian = moments(inputs)
    scales = search_scales(weight, W4, hessian.diagonal())
    fitted = quantize(weight, hessian, scales, W4, PLAIN)
    nearest = round_to_nearest(weight, scales, W4)
    assert torch.equal(fitted.codes[:, dead], nearest.codes[:, dead])
    assert output_error(weight, fitted.weight(), hessian) < output_error(weight, nearest.weight(), hessian)
    assert fitted.weight().isfinite().all()


def test_zero_groups_come_back_as_zeros() -> None:
    weight, hessian = weights(4), moments(correlated(4))
    weight[:, :32] = 0
    weight[5] = 0
    scales = search_scales(weight, W4, hessian.diagonal())
    for rounded in (quantize(weight, hessian, scales, W4, Effort()), round_to_nearest(weight, scales, W4)):
        assert not rounded.weight()[:, :32].any()
        assert not rounded.weight()[5].any()
        assert rounded.weight().isfinite().all()


def test_every_round_of_polish_lowers_the_error() -> None:
    weight, hessian = weights(5), moments(correlated(5))
    scales = search_scales(weight, W4, hessian.diagonal())
    found = [
        output_error(weight, quantize(weight, hessian, scales, W4, Effort(polish=rounds)).weight(), hessian)
        for rounds in range(4)
    ]
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.95 * found[0]


def test_the_result_does_not_depend_on_the_block() -> None:
    weight, hessian = weights(6), moments(correlated(6))
    scales = search_scales(weight, W4, hessian.diagonal())
    whole = quantize(weight, hessian, scales, W4, Effort(block=96))
    for block in (1, 7, 32):
        parts = quantize(weight, hessian, scales, W4, Effort(block=block))
        assert (parts.codes != whole.codes).float().mean() < 0.01  # rounding of sums decides near ties


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([4, 8]), st.booleans(), st.floats(-4, 4))
def test_searched_scales_are_stored_exactly_and_beat_the_largest_weight(
    seed: int, bits: int, signed: bool, magnitude: float
) -> None:
    scheme, weight = GptqScheme(bits, 32), weights(seed) * 10**magnitude
    scales = search_scales(weight, scheme, signed=signed)
    assert torch.equal(scales.half().float(), scales)
    assert signed and bits == 4 or bool((scales > 0).all())
    usual = weight.reshape(24, 3, 32).abs().amax(-1) / (scheme.zero - 0.5)
    usual = usual.clamp(2.0**-24, 65504).half().float()

    def rest(scales: torch.Tensor) -> float:
        return float((round_to_nearest(weight, scales, scheme).weight() - weight).square().sum())

    assert rest(scales) <= rest(usual) * 1.001


def test_signed_scales_use_the_level_that_positive_ones_leave() -> None:
    weight = torch.full((1, 32), -0.1)
    weight[0, 3] = 0.8
    rounded = round_to_nearest(weight, search_scales(weight, W4), W4)
    assert rounded.scales.item() < 0
    assert rounded.codes[0, 3] == 0
    torch.testing.assert_close(rounded.weight(), weight, rtol=1e-3, atol=0)


def test_important_inputs_decide_the_scale() -> None:
    weight = weights(7, outputs=8, inputs=32)
    importance = torch.full((32,), 1e-3)
    importance[4] = 1.0
    even, weighed = search_scales(weight, W4), search_scales(weight, W4, importance)
    rest_even = (round_to_nearest(weight, even, W4).weight() - weight)[:, 4].abs().mean()
    rest_weighed = (round_to_nearest(weight, weighed, W4).weight() - weight)[:, 4].abs().mean()
    assert rest_weighed < rest_even


def test_moments_add_up_and_shrink_towards_the_layer() -> None:
    inputs = correlated(8)
    parts = SecondMoments(96)
    for piece in inputs.split(37):
        parts.add(piece)
    torch.testing.assert_close(parts.mean(), moments(inputs))
    layer = torch.eye(96)
    torch.testing.assert_close(shrink(SecondMoments(96), layer, 100), layer)
    torch.testing.assert_close(shrink(parts, layer, 0), parts.mean())
    torch.testing.assert_close(shrink(parts, layer, 400), (parts.mean() + layer) / 2)
    assert not shrink(SecondMoments(96), layer, 0).any()


def test_few_tokens_need_no_care_thanks_to_damping() -> None:
    weight, inputs = weights(9), correlated(9)[:2]
    hessian = moments(inputs)  # rank 2 of 96
    fitted, nearest = errors(weight, hessian, W4, Effort(damp=1e-9))
    assert fitted <= nearest


def test_moments_that_are_not_finite_are_an_error() -> None:
    hessian = torch.eye(32)
    hessian[3, 3] = torch.nan
    with pytest.raises(KtplanError, match="no inverse"):
        quantize(weights(10, inputs=32), hessian, torch.ones(24, 1), W4, Effort())
