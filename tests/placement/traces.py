"""The two per-token traces of the reference data as profiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ktplan.profile import ActivationProfile
from ktplan.profile.trace import Trace


def profile_of_trace(
    ids: np.ndarray, lengths: np.ndarray, spec: Any, sources: tuple[str, ...]
) -> ActivationProfile:
    """`ids` uint8 [layers, tokens, k], documents one after another along the tokens."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    layers, _, top_k = ids.shape
    counts = np.zeros((len(lengths), layers, spec.experts), np.int64)
    for layer in range(layers):
        cells = owners[:, None] * spec.experts + ids[layer].astype(np.int64)
        size = len(lengths) * spec.experts
        counts[:, layer] = np.bincount(cells.ravel(), minlength=size).reshape(len(lengths), spec.experts)
    return ActivationProfile(
        counts=counts,
        tokens=np.asarray(lengths, np.int64),
        document_ids=tuple(map(str, range(len(lengths)))),
        sources=sources,
        layers=spec.moe_layers,
        top_k=top_k,
        fingerprint=spec.fingerprint,
        model=spec.name,
        family=spec.family,
        trace=Trace(ids.astype(np.uint16), owners.astype(np.int32), np.zeros(len(owners), np.uint8), False),
    )


def deepseek(folder: Path, spec_of: Callable[..., Any]) -> ActivationProfile:
    spec = spec_of(layers=27, experts=64, moe_layers=tuple(range(1, 27)), top_k=6, family="deepseek_v3")
    tasks = ("intent", "law", "summary", "translation")
    with np.load(folder / "deepseek-v2-lite_esft_prefill_topk.npz", allow_pickle=False) as trace:
        ids = np.concatenate([trace[f"{task}_ids"] for task in tasks], axis=1)
        lengths = [trace[f"{task}_seq_lens"].astype(np.int64) for task in tasks]
    sources = tuple(task for task, part in zip(tasks, lengths, strict=True) for _ in part)
    return profile_of_trace(ids, np.concatenate(lengths), spec, sources)


def gpt_oss(folder: Path, spec_of: Callable[..., Any]) -> ActivationProfile:
    spec = spec_of(layers=24, experts=32, top_k=4)
    with np.load(folder / "gpt-oss-20b_decode_topk.npz", allow_pickle=False) as trace:
        ids, lengths = trace["ids"], trace["seq_lens"].astype(np.int64)
        sources = tuple(str(domain).partition("/")[0] for domain in trace["domain"])
    return profile_of_trace(ids, lengths, spec, sources)
