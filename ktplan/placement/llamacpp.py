"""A plan for llama.cpp: whole layers, because it keeps the experts of a layer in one tensor a projection.

Layers are chosen by the share of all choices that they serve for their bytes (equal here), as many as the plan's
experts would fill; the loss against the plan is stated.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ktplan.placement.plan import PlacementPlan
from ktplan.profile.profile import ActivationProfile

_TENSORS: Final = r"ffn_(up|down|gate|gate_up)_(ch|)exps"


class LlamaCpp(NamedTuple):
    """Words of a command line; which layers have their experts on the GPU; what whole layers cost."""

    flags: tuple[str, ...]
    layers: tuple[int, ...]
    served: float | None  # share of choices by whole layers; None without a profile
    planned: float | None  # by the plan
    notes: tuple[str, ...]


def to_llamacpp(plan: PlacementPlan, profile: ActivationProfile | None = None) -> LlamaCpp:
    """Flags for the plan's budget. Every routed token meets each layer once, so whole layers serve equal shares:
    any set of so many serves the same, and the one the plan fills most is taken. Raises BadInput for a foreign
    profile."""
    shape = plan.shape
    room = len(plan.gpu) // shape.experts
    fill = np.array([len(plan.gpu.layer(layer)) for layer in shape.moe_layers])
    order = np.argsort(-fill, kind="stable")[:room]
    layers = tuple(sorted(shape.moe_layers[place] for place in order.tolist()))
    on_cpu = tuple(layer for layer in shape.moe_layers if layer not in layers)
    cells = len(shape.moe_layers) * shape.experts
    served = room * shape.experts / cells if profile is None else _share(profile, layers)
    planned = plan.hit_rate
    notes = [
        f"llama.cpp places whole layers: {len(layers)} of {len(shape.moe_layers)}, {room * shape.experts:,} experts, "
        f"for the plan's {len(plan.gpu):,} experts"
    ]
    if planned is not None:
        notes.append(f"they serve {100 * served:.1f} % of the routed choices, the plan {100 * planned:.1f} %")
    if not on_cpu:
        return LlamaCpp(("-ngl", "999", "--fit", "off"), layers, served, planned, tuple(notes))
    if on_cpu == shape.moe_layers[: len(on_cpu)] and _counts_from_zero(plan, on_cpu):
        flags = ("-ngl", "999", "--fit", "off", "--n-cpu-moe", str(on_cpu[-1] + 1))
        return LlamaCpp(flags, layers, served, planned, tuple(notes))
    pattern = rf"blk\.({'|'.join(map(str, on_cpu))})\.{_TENSORS}=CPU"
    return LlamaCpp(("-ngl", "999", "--fit", "off", "-ot", pattern), layers, served, planned, tuple(notes))


def _counts_from_zero(plan: PlacementPlan, on_cpu: tuple[int, ...]) -> bool:
    """`--n-cpu-moe N` means layers below N, dense ones included, where it does nothing."""
    return all(layer in on_cpu or layer not in plan.shape.moe_layers for layer in range(on_cpu[-1] + 1))


def _share(profile: ActivationProfile, layers: tuple[int, ...]) -> float:
    rows = [place for place, layer in enumerate(profile.layers) if layer in layers]
    total = profile.total()
    return float(total[rows].sum() / total.sum())
