"""Models and profiles of any size, made from numbers: planning needs no weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktplan.model import ModelSpec
from ktplan.profile import ActivationProfile

FINGERPRINT = "sha256:" + "cd" * 32


@pytest.fixture(scope="session")
def spec_of() -> Callable[..., ModelSpec]:
    """`spec_of(layers=4, experts=8, moe_layers=None, **fields)`: a model that exists on paper."""

    def make(
        layers: int = 4, experts: int = 8, moe_layers: tuple[int, ...] | None = None, **more: Any
    ) -> ModelSpec:
        moe = tuple(range(layers)) if moe_layers is None else moe_layers
        size = 3 * 256 * 128
        given: dict[str, Any] = {
            "name": "paper", "family": "qwen3_moe", "model_type": "qwen3_moe", "layers": layers, "moe_layers": moe,
            "experts": experts, "top_k": 2, "shared_experts": 0, "hidden": 256, "moe_intermediate": 128, "vocab": 1000,
            "context": 4096, "activation": "silu", "dtype": "bfloat16", "tied_embeddings": True, "fused": False,
            "dense_params": 10**6, "expert_params": size * len(moe) * experts, "dense_bytes": 2 * 10**6,
            "expert_bytes": 2 * size * len(moe) * experts, "kv_bytes_per_token": 512,
            "experts_module": "model.layers.{layer}.mlp.experts", "fingerprint": FINGERPRINT,
        }  # fmt: skip
        return ModelSpec(**{**given, **more})

    return make


@pytest.fixture(scope="session")
def profile_of() -> Callable[..., ActivationProfile]:
    """`profile_of(spec, documents=12, skew=0.3, seed=0)`: documents that share favourites and have their own."""

    def make(spec: ModelSpec, documents: int = 12, skew: float = 0.3, seed: int = 0) -> ActivationProfile:
        draw = np.random.default_rng(seed)
        tokens = draw.integers(40, 200, documents)
        counts = np.zeros((documents, len(spec.moe_layers), spec.experts), np.int64)
        for layer in range(len(spec.moe_layers)):
            shared = draw.dirichlet(np.full(spec.experts, skew)) + 1e-6
            for document in range(documents):
                own = draw.dirichlet(4 * shared * spec.experts + 0.05) + 1e-9
                scores = np.log(own) + draw.gumbel(size=(tokens[document], spec.experts))
                chosen = np.argsort(-scores, axis=1)[:, : spec.top_k]
                counts[document, layer] = np.bincount(chosen.ravel(), minlength=spec.experts)
        return ActivationProfile(
            counts=counts,
            tokens=tokens,
            document_ids=tuple(f"d{n}" for n in range(documents)),
            sources=tuple("ab"[n % 2] for n in range(documents)),
            layers=spec.moe_layers,
            top_k=spec.top_k,
            fingerprint=spec.fingerprint,
            model=spec.name,
            family=spec.family,
        )

    return make
