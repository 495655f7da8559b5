"""What a profile says: how unevenly experts are used, and how much was never seen."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ktplan.profile.profile import SLOTS_PER_EXPERT, ActivationProfile, Counts

SHARES = (0.10, 0.25, 0.50)  # of the experts of a layer, busiest first
UNSEEN_LIMIT = 0.01  # an estimated share of unseen choices above this deserves a word


class LayerUse(NamedTuple):
    """How one layer's experts are used. Shares are fractions of the layer's routed slots."""

    layer: int
    slots: int  # tokens x top-k
    used: int  # experts chosen at least once
    unseen: int  # experts never chosen
    busiest_shares: tuple[float, ...]  # served by the busiest 10, 25 and 50 % of the experts, in-sample
    busiest_over_mean: float
    entropy: float  # 1: all alike, 0: one expert takes all
    unseen_mass: (
        float  # chance that the next choice is an expert not yet seen (Good 1953: singletons / slots)
    )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        shares = {
            f"busiest_{round(100 * share)}": got
            for share, got in zip(SHARES, self.busiest_shares, strict=True)
        }
        return {**{key: value for key, value in self._asdict().items() if key != "busiest_shares"}, **shares}


def layer_use(profile: ActivationProfile) -> list[LayerUse]:
    """One row a MoE layer."""
    return [_one_layer(layer, row) for layer, row in zip(profile.layers, profile.total(), strict=True)]


def _one_layer(layer: int, counts: Counts) -> LayerUse:
    experts, slots = len(counts), int(counts.sum())
    ranked = np.sort(counts)[::-1]
    # At least one expert: a tenth of eight experts is still the busiest one.
    shares = tuple(float(ranked[: max(1, round(share * experts))].sum() / slots) for share in SHARES)
    used = int(np.count_nonzero(counts))
    chances = ranked[:used] / slots
    entropy = float(-(chances * np.log(chances)).sum() / np.log(experts)) if experts > 1 else 1.0
    return LayerUse(
        layer=layer,
        slots=slots,
        used=used,
        unseen=experts - used,
        busiest_shares=shares,
        busiest_over_mean=float(ranked[0] * experts / slots),
        entropy=max(0.0, entropy),
        unseen_mass=int(np.count_nonzero(counts == 1)) / slots,
    )


def single_document_mass(profile: ActivationProfile) -> float:
    """Share of all choices that went to experts which one document alone chose.

    The Good-Turing estimate with documents in place of tokens: tokens of a document choose alike, so a large value says
    that another text would use other experts even where the counts look ample.
    """
    chosen_by = np.count_nonzero(profile.counts, axis=0)  # [layers, experts]
    return float(profile.total()[chosen_by == 1].sum() / profile.counts.sum())


def warnings(profile: ActivationProfile) -> list[str]:
    """Sentences about a corpus that is too small to trust; empty when it is not."""
    found = []
    rows = layer_use(profile)
    worst = max(rows, key=lambda row: row.unseen_mass)
    # Fifty choices an expert, and so many that singletons are no more than the limit of all.
    enough = SLOTS_PER_EXPERT * profile.experts // profile.top_k
    wanted = max(enough, -(-int(profile.token_count * worst.unseen_mass / UNSEEN_LIMIT) // 100) * 100)
    if worst.unseen_mass > UNSEEN_LIMIT:
        found.append(
            f"in layer {worst.layer} about {100 * worst.unseen_mass:.1f} % of further choices would be experts that "
            f"this text never reached (Good-Turing): profile {wanted:,} tokens or more"
        )
    elif rows[0].slots < SLOTS_PER_EXPERT * profile.experts:
        found.append(
            f"{rows[0].slots:,} choices in each layer for {profile.experts:,} experts are few; the order of experts is "
            f"partly chance: profile {enough:,} tokens or more"
        )
    lonely = single_document_mass(profile)
    if profile.documents > 1 and lonely > UNSEEN_LIMIT:
        found.append(
            f"{100 * lonely:.1f} % of choices went to experts that a single document chose: profile more documents"
        )
    if profile.documents < 2:
        found.append("one document only: nothing can be said about other texts (no held-out hit rate)")
    return found
