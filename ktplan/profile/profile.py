"""ActivationProfile: how often each routed expert was chosen, document by document.

Documents stay apart because tokens of one document choose alike: whatever is said about another text
(held-out hit rates, their intervals) must leave whole documents out. Prompt and generated tokens stay apart
because they choose differently and a placement exists for the latter; gate ranks because a deferred expert is
worth less than an immediate one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ktplan.artifact import sha256_bytes, write_whole
from ktplan.errors import BadInput
from ktplan.model import ModelSpec
from ktplan.profile.corpus import CorpusFile
from ktplan.profile.trace import Trace

AGAIN: Final = "record it again with 'ktplan profile'"
PHASES: Final = ("prefill", "decode")
SLOTS_PER_EXPERT: Final = 50  # fewer choices an expert than this leave the order of experts to chance
Phase = Literal["prefill", "decode"]

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActivationProfile:
    """Counts of routed slots. A token fills `top_k` slots in each MoE layer, so every row's sum is known.

    `counts[d, m, e]`: slots of document d in MoE layer `layers[m]` that chose expert e; `tokens[d]`: real
    tokens, neither padding nor special tokens. `decode_*` is the part of both that generated tokens have; without
    it every token is of a prompt, or (imported counts, `phases_known` false) nobody knows. `ranked[d, p, m, e, r]`
    splits the counts by phase and gate rank. Imported counts may break the sum (`exact` false): then `tokens` is the
    least number of tokens that explains them. Raises BadInput when the parts contradict each other.
    """

    counts: Counts  # int64 [documents, MoE layers, experts]
    tokens: Counts  # int64 [documents]
    document_ids: tuple[str, ...]
    sources: tuple[str, ...]  # the corpus file of each document, by name
    layers: tuple[int, ...]  # the model's own numbers of its MoE layers
    top_k: int
    fingerprint: str  # "" where the importer's source names no model
    model: str
    family: str
    files: tuple[CorpusFile, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # how it was recorded
    decode_counts: Counts | None = None
    decode_tokens: Counts | None = None
    ranked: npt.NDArray[np.uint32] | None = None  # [documents, phases present, MoE layers, experts, top_k]
    trace: Trace | None = None
    tokenizer: str | None = None  # digest of the tokenizer's files
    datasets: tuple[str, ...] = ()  # the data set of each document; empty: one for each source
    exact: bool = True
    phases_known: bool = True

    def __post_init__(self) -> None:
        fault = self._fault() or self._phase_fault()
        if fault is None and self.trace is not None:
            fault = self.trace.fault(self.documents, len(self.layers), self.experts, self.top_k)
        if fault:
            raise BadInput(f"the activation profile contradicts itself: {fault}", hint=AGAIN)

    def _fault(self) -> str | None:
        documents = len(self.document_ids)
        shape = self.counts.shape
        if self.counts.ndim != 3 or shape[:2] != (documents, len(self.layers)) or 0 in shape:
            return f"counts have shape {list(shape)}, {documents} documents and {len(self.layers)} layers are named"
        if self.tokens.shape != (documents,) or len(self.sources) != documents:
            return f"{documents} documents, {self.tokens.size} token totals, {len(self.sources)} sources"
        if self.datasets and len(self.datasets) != documents:
            return f"{documents} documents, {len(self.datasets)} data sets"
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            return f"layer numbers {list(self.layers)} do not ascend"
        if not 1 <= self.top_k <= self.experts:
            return f"top-{self.top_k} of {self.experts} experts"
        if self.counts.min() < 0 or self.tokens.min() < 1:
            return "a count is negative or a document has no token"
        return _slots_fault(self) if self.exact else None

    def _phase_fault(self) -> str | None:
        if (self.decode_counts is None) != (self.decode_tokens is None):
            return "generated tokens without their counts"
        if self.decode_counts is not None and self.decode_tokens is not None:
            if self.decode_counts.shape != self.counts.shape or self.decode_tokens.shape != self.tokens.shape:
                return "the counts of generated tokens have another shape"
            if self.decode_counts.min() < 0 or np.any(self.decode_counts > self.counts):
                return "more choices of generated tokens than of all tokens"
        if self.ranked is not None:
            phases = 1 if self.decode_counts is None else 2
            wanted = (self.documents, phases, len(self.layers), self.experts, self.top_k)
            if self.ranked.shape != wanted:
                return f"the counts by gate rank have shape {list(self.ranked.shape)}, {list(wanted)} is expected"
            if not np.array_equal(self.ranked.sum(axis=(1, 4), dtype=np.int64), self.counts):
                return "the counts by gate rank do not sum up to the counts"
        return None

    @property
    def experts(self) -> int:
        """Routed experts in each MoE layer."""
        return int(self.counts.shape[2])

    @property
    def documents(self) -> int:
        """How many documents were counted."""
        return len(self.document_ids)

    @property
    def token_count(self) -> int:
        """Real tokens in all documents."""
        return int(self.tokens.sum())

    @property
    def decode_token_count(self) -> int:
        """Generated tokens among them."""
        return 0 if self.decode_tokens is None else int(self.decode_tokens.sum())

    @property
    def dataset_of(self) -> tuple[str, ...]:
        """The data set of each document: as named when it was recorded, else its file."""
        return self.datasets or self.sources

    def total(self) -> Counts:
        """int64 [MoE layers, experts]: counts over all documents."""
        return np.asarray(self.counts.sum(axis=0), dtype=np.int64)

    def slots(self) -> Counts:
        """int64 [documents]: routed slots of each document in all layers."""
        return np.asarray(self.counts.sum(axis=(1, 2)), dtype=np.int64)

    def by_rank(self) -> npt.NDArray[np.int64] | None:
        """int64 [MoE layers, experts, top_k] over all documents and phases; None where ranks were not kept."""
        return None if self.ranked is None else self.ranked.sum(axis=(0, 1), dtype=np.int64)

    def for_model(self, spec: ModelSpec) -> ActivationProfile:
        """This profile, when it was recorded on the model of `spec`; raises BadInput showing both otherwise.

        Imported counts that name no model are taken when their shape fits.
        """
        own, other = (len(self.layers), self.experts), (len(spec.moe_layers), spec.experts)
        same = self.fingerprint == spec.fingerprint or not self.fingerprint
        if same and self.layers == spec.moe_layers and own == other and self.top_k == spec.top_k:
            return self
        raise BadInput(
            f"the profile was recorded on another model: {self.model} ({self.family}, {own[0]} MoE layers x {own[1]} "
            f"experts, {self.fingerprint or 'no fingerprint'}), this one is {spec.name} ({spec.family}, {other[0]} MoE "
            f"layers x {other[1]} experts, {spec.fingerprint})",
            hint="record a profile on this model with 'ktplan profile'",
        )

    def select(self, documents: Sequence[int] | npt.NDArray[np.intp]) -> ActivationProfile:
        """The profile of some documents, by position."""
        chosen = [int(document) for document in documents]
        return replace(
            self,
            counts=self.counts[chosen],
            tokens=self.tokens[chosen],
            document_ids=tuple(self.document_ids[document] for document in chosen),
            sources=tuple(self.sources[document] for document in chosen),
            datasets=tuple(self.datasets[document] for document in chosen) if self.datasets else (),
            decode_counts=None if self.decode_counts is None else self.decode_counts[chosen],
            decode_tokens=None if self.decode_tokens is None else self.decode_tokens[chosen],
            ranked=None if self.ranked is None else self.ranked[chosen],
            trace=None if self.trace is None else self.trace.of(chosen),
        )

    def phase(self, phase: Phase) -> ActivationProfile | None:
        """The part of prompts or of generated tokens alone; None where no document has any, or phases are not known."""
        if phase == "prefill" and self.decode_counts is None and self.phases_known:
            return self
        if self.decode_counts is None or self.decode_tokens is None:
            return None
        number = PHASES.index(phase)
        tokens = self.decode_tokens if number else self.tokens - self.decode_tokens
        kept = np.flatnonzero(tokens)
        if not len(kept):
            return None
        part = replace(
            self,
            counts=self.decode_counts if number else self.counts - self.decode_counts,
            tokens=np.maximum(tokens, 1),
            decode_counts=None,
            decode_tokens=None,
            ranked=None if self.ranked is None else self.ranked[:, number : number + 1],
            trace=None if self.trace is None else self.trace.of(list(range(self.documents)), number),
            exact=False,
        )
        return replace(part.select(kept), exact=self.exact)

    def planning(self) -> ActivationProfile:
        """What a placement is for: the generated tokens where there are enough to rank experts by, else all."""
        decoded = self.phase("decode")
        enough = decoded is not None and decoded.token_count * self.top_k >= SLOTS_PER_EXPERT * self.experts
        return decoded if decoded is not None and enough else self

    def folds(self, folds: int) -> npt.NDArray[np.int64]:
        """The fold of each document, int64 [documents]: 0 .. folds - 1.

        Documents are ordered by source, inside a source by a hash of their id, and dealt out in turn: each
        fold gets a like share of each source, and the same documents give the same folds whatever their order
        in the files.
        """
        keys = [
            (source, sha256_bytes(name.encode()), position)
            for position, (source, name) in enumerate(zip(self.sources, self.document_ids, strict=True))
        ]
        dealt = np.empty(self.documents, dtype=np.int64)
        for place, (_, _, position) in enumerate(sorted(keys)):
            dealt[position] = place % folds
        return dealt

    def split(self, fold: int, folds: int) -> tuple[ActivationProfile, ActivationProfile]:
        """(the other folds, the documents of `fold`). Raises BadInput when there are fewer documents than folds."""
        if folds < 2 or self.documents < folds:
            raise BadInput(
                f"{self.documents} document(s) cannot be split into {folds} folds",
                hint="profile more documents",
            )
        dealt = self.folds(folds)
        return self.select(np.flatnonzero(dealt != fold)), self.select(np.flatnonzero(dealt == fold))

    def digest(self) -> str:
        """`sha256:` digest of the file that `save` writes."""
        return sha256_bytes(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The whole file; same profile, same bytes."""
        from ktplan.profile.file import to_bytes

        return to_bytes(self)

    def save(self, path: Path) -> None:
        """Write the profile, whole or not at all."""
        write_whole(path, self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> ActivationProfile:
        """Read and check a profile. Raises BadInput for a missing, damaged, foreign or newer file."""
        from ktplan.profile.file import load

        return load(path)


def _slots_fault(profile: ActivationProfile) -> str | None:
    if np.any(profile.counts.max(axis=2) > profile.tokens[:, None]):
        return "an expert was chosen more often than there are tokens"
    wrong = np.argwhere(profile.counts.sum(axis=2) != profile.tokens[:, None] * profile.top_k)
    if len(wrong):
        document, layer = wrong[0]
        return (
            f"document {profile.document_ids[document]} has {int(profile.counts[document, layer].sum()):,} routed "
            f"slots in layer {profile.layers[layer]}, {profile.tokens[document]:,} tokens x top-{profile.top_k} are "
            "expected"
        )
    return None
