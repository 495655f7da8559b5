"""What may come in: values that are no numbers, experts that do not exist, and arrays that are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktplan import kernels
from ktplan.kernels import ExpertLayer, PackedExpert, Pool

ISAS = kernels.available_isas()
FORMATS: dict[str, dict[str, int]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "int4-g32": {"bits": 4, "group": 32},
    "bf16": {"bits": 16},
}
HIDDEN, INNER, EXPERTS = 256, 128, 4
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def layer(form: str = "int8", **how: Any) -> ExpertLayer:
    random = np.random.default_rng(3)
    bits, group = FORMATS[form]["bits"], FORMATS[form].get("group")

    def projection(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray | None]:
        if bits == 16:
            values = (random.standard_normal(rows * columns) * 0.05).astype(np.float32)
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8), None
        packed = random.integers(0, 256, rows * columns * bits // 8, np.uint8)
        if group:
            return packed, np.full((rows // 32, columns // group, 32), 0x3B80, np.uint16)
        return packed, np.full(rows, 1e-3, np.float32)

    experts = [
        PackedExpert(*projection(INNER, HIDDEN), *projection(INNER, HIDDEN), *projection(HIDDEN, INNER))
        for _ in range(EXPERTS)
    ]
    sizes = {"hidden": HIDDEN, "intermediate": INNER, **FORMATS[form]}
    return ExpertLayer([experts], **{"threads_pool": Pool(2), **how}, **sizes)  # type: ignore[arg-type]


def routed(tokens: int = 6, choices: int = 2) -> Arrays:
    random = np.random.default_rng(4)
    x = random.standard_normal((tokens, HIDDEN), np.float32)
    ids = np.argsort(random.random((tokens, EXPERTS)), axis=1)[:, :choices].astype(np.int64)
    return x, ids, random.random((tokens, choices), np.float32)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation_bits", [16, 8])
def test_what_is_no_number_makes_its_own_token_nan(isa: str, form: str, activation_bits: int) -> None:
    try:
        one = layer(form, isa=isa, activation_bits=activation_bits)
    except ValueError as refusal:
        assert isa not in ("scalar", ISAS[0])
        pytest.skip(str(refusal))
    x, ids, weights = routed(9)
    ids[:] = ids[0]  # all tokens share their experts, so that they are multiplied together
    clean = one.forward(x, ids, weights)
    assert np.isfinite(clean).all()
    for token, poison in ((1, np.nan), (4, np.inf), (8, -np.inf)):
        x[token, 77] = poison
    out = one.forward(x, ids, weights)
    poisoned = [1, 4, 8]
    assert np.isnan(out[poisoned]).all()
    np.testing.assert_array_equal(np.delete(out, poisoned, 0), np.delete(clean, poisoned, 0))


@pytest.mark.parametrize("pattern", [0x7FC0, 0xFF80, 0x7F80, 0x7F81])
def test_bfloat16_patterns_that_are_no_numbers_do_too(pattern: int) -> None:
    x, ids, weights = routed()
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    clean = layer().forward(bits, ids, weights)
    bits[3, 0] = pattern
    out = layer().forward(bits, ids, weights)
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize("missing", [-1, EXPERTS, EXPERTS + 1, 2**63 - 1, -(2**63)])
def test_ids_of_no_expert_are_skipped_whatever_their_weight(missing: int) -> None:
    x, ids, weights = routed()
    ids[2, 1], ids[4] = missing, missing
    weights[2, 1], weights[4, 0] = np.nan, np.inf
    out = layer().forward(x, ids, weights)
    one = layer().forward(x[2:3], ids[2:3, :1].copy(), weights[2:3, :1].copy())
    np.testing.assert_array_equal(out[2], one[0])
    assert not out[4].any() and not np.isnan(out).any()


def test_a_token_without_experts_is_zero_even_if_it_is_no_number() -> None:
    x, ids, weights = routed()
    x[1], ids[1] = np.nan, -1
    assert not layer().forward(x, ids, weights)[1].any()


@pytest.mark.parametrize("shape", [(0, 2), (5, 0), (0, 0)])
def test_nothing_to_do_gives_zeros(shape: tuple[int, int]) -> None:
    tokens, choices = shape
    x = np.ones((tokens, HIDDEN), np.float32)
    out = layer().forward(x, np.zeros(shape, np.int64), np.ones(shape, np.float32))
    assert out.shape == (tokens, HIDDEN) and not out.any()


def test_no_expert_hit_gives_zeros_also_into_a_given_array() -> None:
    x, ids, weights = routed()
    out = np.full((6, HIDDEN), 7, np.float32)
    assert not layer().forward(x, np.full_like(ids, -1), weights, out=out).any()


@pytest.mark.parametrize("form", FORMATS)
def test_all_tokens_on_one_expert_equal_each_alone(form: str) -> None:
    one = layer(form)
    x, ids, weights = routed(45, 1)
    ids[:] = 2
    whole = one.forward(x, ids, weights)
    for token in (0, 22, 44):
        at = slice(token, token + 1)
        np.testing.assert_array_equal(whole[at], one.forward(x[at], ids[at], weights[at]))


def test_weights_of_zero_give_zero() -> None:
    x, ids, weights = routed()
    assert not layer().forward(x, ids, np.zeros_like(weights)).any()


def between(array: np.ndarray) -> np.ndarray:
    """The same numbers one byte further on."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    memory[1:] = array.view(np.uint8).ravel()
    return memory[1:].view(array.dtype).reshape(array.shape)


CHANGES: list[tuple[str, str, Callable[[np.ndarray], Any]]] = [
    ("hidden", "float32 or bfloat16", lambda x: x.astype(np.float64)),
    ("hidden", "float32 or bfloat16", lambda x: x.astype(np.float16)),
    ("hidden", "contiguous", lambda x: np.asfortranarray(x)),
    ("hidden", "contiguous", lambda x: np.repeat(x, 2, axis=1)[:, ::2]),
    ("hidden", "contiguous", lambda x: x[:, ::-1]),
    ("hidden", "shape", lambda x: x[:, :-64].copy()),
    ("hidden", "shape", lambda x: x[0]),
    ("hidden", "shape", lambda x: x[None]),
    ("hidden", "multiple of 4 bytes", between),
    ("hidden", "expected an array", lambda x: x.tolist()),
    ("hidden", "expected an array", lambda x: None),
    ("top_k_index", "expected an array", lambda i: None),
    ("top_k_weights", "expected an array", lambda w: "heavy"),
    ("top_k_index", "int64", lambda i: i.astype(np.int32)),
    ("top_k_index", "int64", lambda i: i.astype(np.uint64)),
    ("top_k_index", "int64", lambda i: i.astype(np.float32)),
    ("top_k_index", "shape", lambda i: i[:3].copy()),
    ("top_k_index", "shape", lambda i: i.ravel()),
    ("top_k_index", "contiguous", lambda i: np.asfortranarray(i)),
    ("top_k_index", "multiple of 8 bytes", between),
    ("top_k_weights", "float32", lambda w: w.astype(np.float64)),
    ("top_k_weights", "shape", lambda w: w[:, :1].copy()),
    ("top_k_weights", "contiguous", lambda w: np.asfortranarray(w)),
    ("top_k_weights", "multiple of 4 bytes", between),
    ("out", "float32", lambda o: o.astype(np.float64)),
    ("out", "shape", lambda o: o[:-1].copy()),
    ("out", "contiguous", lambda o: np.asfortranarray(o)),
    ("out", "multiple of 4 bytes", between),
]


@pytest.mark.parametrize(("name", "says", "change"), CHANGES)
def test_arrays_are_refused_by_name(name: str, says: str, change: Callable[[np.ndarray], Any]) -> None:
    x, ids, weights = routed()
    given: dict[str, Any] = {
        "hidden": x,
        "top_k_index": ids,
        "top_k_weights": weights,
        "out": np.empty_like(x),
    }
    given[name] = change(given[name])
    one = layer()
    for call in (one.forward, one.submit):
        with pytest.raises((ValueError, TypeError), match=f"^{name}: .*{says}"):
            call(**given)


def test_a_read_only_output_is_refused_by_name() -> None:
    x, ids, weights = routed()
    out = np.empty_like(x)
    out.flags.writeable = False
    with pytest.raises(TypeError, match=r"^out: .*read-only"):
        layer().forward(x, ids, weights, out=out)


def test_a_tensor_without_memory_is_refused_by_name() -> None:
    import torch

    x, ids, weights = routed()
    with pytest.raises((TypeError, ValueError), match=r"^hidden: expected an array"):
        layer().forward(torch.empty(x.shape, device="meta"), ids, weights)


def test_packed_weights_may_lie_anywhere_but_their_scales_may_not() -> None:
    one = PackedExpert(
        np.ones(64 * 64, np.uint8), np.ones(64, np.float32),
        np.ones(64 * 64, np.uint8), np.ones(64, np.float32),
        np.ones(64 * 64, np.uint8), np.ones(64, np.float32),
    )  # fmt: skip
    sizes = {"hidden": 64, "intermediate": 64, "bits": 8}
    ExpertLayer([[one._replace(up=between(one.up))]], **sizes)  # type: ignore[arg-type]
    odd = one._replace(up_scale=between(one.up_scale))
    with pytest.raises(ValueError, match=r"^parts\[0\]\[0\]\.up_scale: .*multiple of 4 bytes"):
        ExpertLayer([[odd]], **sizes)  # type: ignore[arg-type]
