"""Routing that other people measured on real models: a profile pays on documents that it did not see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktplan.placement import compare
from ktplan.profile import ActivationProfile


def profile_of_trace(
    ids: np.ndarray, lengths: np.ndarray, spec: Any, sources: tuple[str, ...]
) -> ActivationProfile:
    """`ids` uint8 [layers, tokens, k], documents one after another along the tokens."""
    ends = np.cumsum(lengths)
    counts = np.zeros((len(lengths), ids.shape[0], spec.experts), np.int64)
    for document, end in enumerate(ends):
        part = ids[:, end - lengths[document] : end]
        for layer in range(ids.shape[0]):
            counts[document, layer] = np.bincount(part[layer].ravel(), minlength=spec.experts)
    return ActivationProfile(
        counts=counts,
        tokens=np.asarray(lengths, np.int64),
        document_ids=tuple(map(str, range(len(lengths)))),
        sources=sources,
        layers=spec.moe_layers,
        top_k=spec.top_k,
        fingerprint=spec.fingerprint,
        model=spec.name,
        family=spec.family,
    )


def check(spec: Any, profile: ActivationProfile, least_gain: float) -> None:
    for ratio in (0.1, 0.3, 0.5):
        rows = {row.strategy: row for row in compare(spec, profile, (ratio,))}
        best = rows["frequency"]
        assert best.held_out is not None and best.held_out_low is not None
        for other in ("random", "uniform", "front-loading"):
            held_out = rows[other].held_out
            assert held_out is not None and best.held_out_low > held_out + least_gain * (1 - ratio), (
                ratio,
                other,
            )
        assert best.in_sample >= best.held_out


def test_deepseek_v2_lite(reference: Path, spec_of: Callable[..., Any]) -> None:
    file = reference / "data" / "activation" / "deepseek-v2-lite_esft_prefill_topk.npz"
    if not file.is_file():
        pytest.skip("no trace of DeepSeek-V2-Lite in the reference data")
    spec = spec_of(layers=27, experts=64, moe_layers=tuple(range(1, 27)), top_k=6, family="deepseek_v3")
    tasks = ("intent", "law", "summary", "translation")
    with np.load(file, allow_pickle=False) as trace:
        ids = np.concatenate([trace[f"{task}_ids"] for task in tasks], axis=1)
        lengths = [trace[f"{task}_seq_lens"].astype(np.int64) for task in tasks]
    sources = tuple(task for task, part in zip(tasks, lengths, strict=True) for _ in part)
    check(spec, profile_of_trace(ids, np.concatenate(lengths), spec, sources), least_gain=0.08)


def test_gpt_oss_20b(reference: Path, spec_of: Callable[..., Any]) -> None:
    file = reference / "data" / "activation" / "gpt-oss-20b_decode_topk.npz"
    if not file.is_file():
        pytest.skip("no trace of gpt-oss-20b in the reference data")
    spec = spec_of(layers=24, experts=32, top_k=4)
    with np.load(file, allow_pickle=False) as trace:
        ids, lengths = trace["ids"], trace["seq_lens"].astype(np.int64)
        sources = tuple(str(domain).partition("/")[0] for domain in trace["domain"])
    check(spec, profile_of_trace(ids, lengths, spec, sources), least_gain=0.08)
