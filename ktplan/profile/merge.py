"""Several profiles of one model as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm
from typing import Final

import numpy as np

from ktplan.errors import BadInput, BadUsage
from ktplan.profile.profile import ActivationProfile, Counts
from ktplan.profile.trace import Trace

_FINEST: Final = 1000  # weights are rounded to fractions with such a denominator at most


def merge(
    profiles: Sequence[ActivationProfile],
    *,
    weights: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
) -> ActivationProfile:
    """All documents of all profiles. A weight multiplies a profile's counts; counts stay whole numbers.

    `names` are data set names for the profiles. The same document in two profiles counts twice. Raises BadInput where
    models differ, BadUsage for weights that are no positive numbers.
    """
    if len(profiles) < 2:
        raise BadUsage("one profile cannot be merged", hint="name two or more")
    if names is not None and len(names) != len(profiles):
        raise BadUsage(f"{len(names)} names for {len(profiles)} profiles", hint="give one name each")
    first = profiles[0]
    for other in profiles[1:]:
        _check_same(first, other)
    times = _whole_weights(weights, len(profiles))
    parts = [_scaled(profile, factor) for profile, factor in zip(profiles, times, strict=True)]
    datasets: tuple[str, ...] = ()
    if names is not None:
        datasets = tuple(name for name, part in zip(names, parts, strict=True) for _ in range(part.documents))
    elif any(part.datasets for part in parts):
        datasets = tuple(name for part in parts for name in part.dataset_of)
    decoded = any(part.decode_counts is not None for part in parts)
    ranked = None
    if all(part.ranked is not None for part in parts):
        ranked = np.concatenate([_both_phases(part, decoded) for part in parts])
    return replace(
        first,
        counts=np.concatenate([part.counts for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        document_ids=tuple(name for part in parts for name in part.document_ids),
        sources=tuple(name for part in parts for name in part.sources),
        datasets=datasets,
        files=tuple(dict.fromkeys(file for part in parts for file in part.files)),
        settings={"merged": [dict(part.settings) for part in parts], "weights": list(times)},
        decode_counts=np.concatenate([_decoded(part.decode_counts, part.counts) for part in parts])
        if decoded
        else None,
        decode_tokens=np.concatenate([_decoded(part.decode_tokens, part.tokens) for part in parts])
        if decoded
        else None,
        ranked=ranked,
        trace=_traces(parts) if len(set(times)) == 1 else None,
        exact=all(part.exact for part in parts),
        phases_known=all(part.phases_known for part in parts),
        fingerprint=next((part.fingerprint for part in profiles if part.fingerprint), ""),
    )


def _check_same(first: ActivationProfile, other: ActivationProfile) -> None:
    same = (first.layers, first.experts, first.top_k) == (other.layers, other.experts, other.top_k)
    marks = {first.fingerprint, other.fingerprint} - {""}
    if same and len(marks) < 2:
        return
    raise BadInput(
        f"the profiles are of different models: {first.model} ({len(first.layers)} MoE layers x {first.experts}, top-"
        f"{first.top_k}, {first.fingerprint or 'no fingerprint'}) and {other.model} ({len(other.layers)} MoE layers x "
        f"{other.experts}, top-{other.top_k}, {other.fingerprint or 'no fingerprint'})",
        hint="merge profiles of one model",
    )


def _whole_weights(weights: Sequence[float] | None, count: int) -> tuple[int, ...]:
    if weights is None:
        return (1,) * count
    if len(weights) != count:
        raise BadUsage(f"{len(weights)} weights for {count} profiles", hint="give one weight each")
    if any(not 0 < weight < float("inf") for weight in weights):
        raise BadUsage(
            "a weight must be a positive number", hint="leave a profile out instead of weighing it 0"
        )
    parts = [Fraction(weight).limit_denominator(_FINEST) for weight in weights]
    if any(part <= 0 for part in parts):
        raise BadUsage("a weight is below one thousandth", hint="give weights like 1,2 or 0.5,1")
    whole = lcm(*(part.denominator for part in parts))
    return tuple(int(part * whole) for part in parts)


def _scaled(profile: ActivationProfile, factor: int) -> ActivationProfile:
    if factor == 1:
        return profile
    return replace(
        profile,
        counts=profile.counts * factor,
        tokens=profile.tokens * factor,
        decode_counts=None if profile.decode_counts is None else profile.decode_counts * factor,
        decode_tokens=None if profile.decode_tokens is None else profile.decode_tokens * factor,
        ranked=None if profile.ranked is None else (profile.ranked * np.uint32(factor)).astype(np.uint32),
        trace=None,
    )


def _decoded(own: Counts | None, like: Counts) -> Counts:
    return np.zeros_like(like) if own is None else own


def _both_phases(part: ActivationProfile, decoded: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    assert part.ranked is not None
    if not decoded or part.ranked.shape[1] == 2:
        return part.ranked
    return np.concatenate([part.ranked, np.zeros_like(part.ranked)], axis=1)


def _traces(parts: Sequence[ActivationProfile]) -> Trace | None:
    if any(part.trace is None for part in parts):
        return None
    starts = np.cumsum([0, *(part.documents for part in parts)])
    traces = [part.trace for part in parts if part.trace is not None]
    return Trace(
        np.concatenate([trace.ids for trace in traces], axis=1),
        np.concatenate(
            [trace.owners + np.int32(start) for trace, start in zip(traces, starts, strict=False)]
        ),
        np.concatenate([trace.phases for trace in traces]),
        all(trace.ranked for trace in traces),
    )
