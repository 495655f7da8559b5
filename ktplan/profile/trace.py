"""Trace: what each token chose in each layer, kept beside the counts so that placements can be replayed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Trace(NamedTuple):
    """Chosen experts token by token. Column r of `ids` is the choice of gate rank r where `ranked` says so.

    Token t is the same token in every layer. Tokens of one document and phase are in reading order.
    """

    ids: npt.NDArray[np.uint16]  # [MoE layers, tokens, top-k]
    owners: npt.NDArray[np.int32]  # [tokens]: the document, by position in the profile
    phases: npt.NDArray[np.uint8]  # [tokens]: 0 prompt, 1 generated
    ranked: bool  # False: the source kept no gate order

    @property
    def tokens(self) -> int:
        """Tokens that were kept."""
        return int(self.ids.shape[1])

    def of(self, documents: npt.NDArray[np.int64] | list[int], phase: int | None = None) -> Trace:
        """The tokens of some documents, renumbered by their place in `documents`; of one phase when given."""
        chosen = np.asarray(documents, dtype=np.int64)
        top = int(max(self.owners.max(initial=-1), chosen.max(initial=-1))) + 1
        place = np.full(top, -1, dtype=np.int32)
        place[chosen] = np.arange(len(chosen), dtype=np.int32)
        owners = place[self.owners]
        kept = owners >= 0
        if phase is not None:
            kept &= self.phases == phase
        if kept.all():
            return self._replace(owners=owners)
        return Trace(self.ids[:, kept], owners[kept], self.phases[kept], self.ranked)

    def fault(self, documents: int, layers: int, experts: int, top_k: int) -> str | None:
        """What contradicts the profile it belongs to; None when nothing does."""
        if self.ids.ndim != 3 or self.ids.shape[0] != layers or self.ids.shape[2] != top_k:
            return f"the trace has shape {list(self.ids.shape)}, [{layers}, tokens, {top_k}] is expected"
        if len(self.owners) != self.tokens or len(self.phases) != self.tokens:
            return f"the trace has {self.tokens:,} tokens, {len(self.owners):,} owners, {len(self.phases):,} phases"
        if self.tokens and (
            int(self.ids.max()) >= experts
            or not 0 <= self.owners.min() <= self.owners.max() < documents
            or self.phases.max() > 1
        ):
            return "the trace names an expert, a document or a phase that does not exist"
        return None
