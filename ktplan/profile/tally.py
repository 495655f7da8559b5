"""What was counted so far: a profile in the making, and its checkpoint on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ktplan.artifact import sha256_bytes
from ktplan.errors import BadInput
from ktplan.model import ModelSpec
from ktplan.profile.corpus import Corpus
from ktplan.profile.profile import ActivationProfile
from ktplan.profile.recorder import NOBODY, Passage, Seen, Tokens, Wishes
from ktplan.profile.trace import Trace

_EVERY_S: Final = 60.0  # between checkpoints: a write costs far less than the minute it saves
_KEY: Final = "unfinished"


class Tally:
    """Counts of the chosen passages, by document, phase, layer, expert and gate rank."""

    def __init__(
        self,
        spec: ModelSpec,
        corpus: Corpus,
        passages: Sequence[Passage],
        wishes: Wishes,
        settings: Mapping[str, Any],
        tokenizer: str | None,
    ) -> None:
        self._spec, self._corpus, self._wishes = spec, corpus, wishes
        self._settings, self._tokenizer = dict(settings), tokenizer
        self._used = sorted({passage.document for passage in passages})
        self._place = {document: number for number, document in enumerate(self._used)}
        phases = 2 if wishes.generate else 1
        shape = (len(self._used), phases, len(spec.moe_layers), spec.experts, spec.top_k)
        self._ranked = np.zeros(shape, dtype=np.uint32)
        self._tokens = np.zeros((len(self._used), phases), dtype=np.int64)
        self._pieces: list[Trace] = []
        self._kept = 0
        self._written: dict[int, int] = {}  # layer by layer: tokens of the trace that a layer has
        self.inputs = self._inputs(passages)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that never count."""
        return self._wishes.special_ids

    def add(self, batch: Sequence[Passage], owners: Tokens, seen: Seen, phase: int) -> None:
        """Take the routing of a pass over `batch`; `owners` [rows, n] are rows of it or NOBODY."""
        for row, (passage, counts) in enumerate(zip(batch, seen.counts, strict=False)):
            document = self._place[passage.document]
            self._ranked[document, phase] += counts.astype(np.uint32)
            self._tokens[document, phase] += int((owners[row] != NOBODY).sum())
        if seen.ids is not None and self._kept < self._wishes.trace_tokens:
            self._take(batch, owners, seen.ids[:, : self._wishes.trace_tokens - self._kept], phase)

    def _take(
        self, batch: Sequence[Passage], owners: Tokens, ids: npt.NDArray[np.uint16], phase: int
    ) -> None:
        flat = owners.ravel()
        rows = flat[flat != NOBODY][: ids.shape[1]]
        places = np.array([self._place[passage.document] for passage in batch], dtype=np.int32)
        phases = np.full(len(rows), phase, dtype=np.uint8)
        self._pieces.append(Trace(ids, places[rows], phases, True))
        self._kept += len(rows)

    def add_layer(self, place: int, batch: Sequence[Passage], owners: Tokens, seen: Seen, phase: int) -> None:
        """As `add`, for the MoE layer at `place` alone; every batch goes through layer 0 first."""
        for row, (passage, counts) in enumerate(zip(batch, seen.counts, strict=False)):
            document = self._place[passage.document]
            self._ranked[document, phase, place] += counts[0].astype(np.uint32)
            if not place:
                self._tokens[document, phase] += int((owners[row] != NOBODY).sum())
        if seen.ids is None:
            return
        first = place == 0
        begin = self._kept if first else self._written.get(place, 0)
        count = min(seen.ids.shape[1], (self._wishes.trace_tokens if first else self._kept) - begin)
        if count <= 0:
            return
        if first:
            empty = np.zeros((len(self._spec.moe_layers), count, seen.ids.shape[2]), dtype=np.uint16)
            self._take(batch, owners, empty, phase)
        if len(self._pieces) > 1 and not first:
            self._pieces = [_joined(self._pieces)]
        trace = self._pieces[-1]
        start = 0 if first else begin
        trace.ids[place, start : start + count] = seen.ids[0, :count]
        self._written[place] = begin + count

    def profile(self) -> ActivationProfile:
        """All that was counted; documents without a counted token are left out. Raises BadInput when none is left."""
        made = self._whole()
        kept = np.flatnonzero(self._tokens.sum(axis=1))
        if not len(kept):
            raise BadInput(
                "the texts have no token that counts", hint="check the files and the model's tokenizer"
            )
        if len(kept) < len(self._used):
            made = made.select(kept)
        return replace(made, exact=True)

    def restore(self, profile: ActivationProfile) -> None:
        """Take the counts of an unfinished profile with the same inputs."""
        assert profile.ranked is not None
        self._ranked = profile.ranked.copy()
        decoded = np.zeros_like(profile.tokens) if profile.decode_tokens is None else profile.decode_tokens
        empty = profile.settings[_KEY]["empty"]
        self._tokens[:, 0] = profile.tokens - decoded
        self._tokens[empty, 0] = 0
        if self._tokens.shape[1] > 1:
            self._tokens[:, 1] = decoded
        if profile.trace:
            self._pieces, self._kept = [profile.trace], profile.trace.tokens

    def layers_done(self, layers: int) -> None:
        """Layer by layer, after `restore`: all texts went through so many decoder layers."""
        self._written = {
            place: self._kept for place, layer in enumerate(self._spec.moe_layers) if layer < layers
        }

    def unfinished(self, batches: int) -> ActivationProfile:
        """The state as a profile that says how far it is."""
        empty = np.flatnonzero(self._tokens.sum(axis=1) == 0).tolist()
        state = {"batches": batches, "inputs": self.inputs, "empty": empty}
        return replace(self._whole(), settings={**self._settings, _KEY: state})

    def _whole(self) -> ActivationProfile:
        spec, documents = self._spec, [self._corpus.documents[document] for document in self._used]
        by_phase = self._ranked.sum(axis=4, dtype=np.int64)
        decoded = self._tokens.shape[1] > 1
        return ActivationProfile(
            counts=by_phase.sum(axis=1),
            tokens=np.maximum(self._tokens.sum(axis=1), 1),
            document_ids=tuple(document.id for document in documents),
            sources=tuple(document.source for document in documents),
            datasets=tuple(document.dataset or document.source for document in documents)
            if any(document.dataset for document in documents)
            else (),
            layers=spec.moe_layers,
            top_k=spec.top_k,
            fingerprint=spec.fingerprint,
            model=spec.name,
            family=spec.family,
            files=self._corpus.files,
            settings=self._settings,
            decode_counts=by_phase[:, 1] if decoded else None,
            decode_tokens=self._tokens[:, 1] if decoded else None,
            ranked=self._ranked,
            trace=_joined(self._pieces) if self._pieces else None,
            tokenizer=self._tokenizer,
            exact=False,
        )

    def _inputs(self, passages: Sequence[Passage]) -> str:
        """A digest of all that decides the outcome."""
        about = [self._spec.fingerprint, self._settings, self._tokenizer, self._wishes.trace_tokens]
        digest = [json.dumps(about, sort_keys=True, default=str)]
        digest += [
            f"{row.document} {row.start} {row.prefix} {sha256_bytes(row.tokens.tobytes())}"
            for row in passages
        ]
        return sha256_bytes("\n".join(digest).encode())


class Checkpoint:
    """Unfinished work in a file: written now and then, taken up by the next run with the same inputs, then removed."""

    def __init__(self, path: Path, tally: Tally) -> None:
        self._path, self._tally = path, tally
        self._written = time.monotonic()

    def resume(self, usable: Callable[[int], bool] = lambda batches: True) -> int:
        """Batches that an earlier run has done; 0 where its inputs were others, its file is damaged, or what else it
        left is not `usable`.
        """
        if not self._path.is_file():
            return 0
        try:
            found = ActivationProfile.load(self._path)
        except BadInput:
            return 0
        state = found.settings.get(_KEY)
        if not isinstance(state, dict) or state.get("inputs") != self._tally.inputs:
            return 0
        done = int(state["batches"])
        if not usable(done):
            return 0
        self._tally.restore(found)
        return done

    @property
    def due(self) -> bool:
        """Whether the last time is long enough ago."""
        return time.monotonic() - self._written >= _EVERY_S

    def note(self, batches: int) -> None:
        """So many batches are done; writes when it is due."""
        if self.due:
            self._tally.unfinished(batches).save(self._path)
            self._written = time.monotonic()

    def forget(self) -> None:
        """Remove the file: the work is done."""
        self._path.unlink(missing_ok=True)


def _joined(pieces: Sequence[Trace]) -> Trace:
    ids: npt.NDArray[np.uint16] = np.concatenate([piece.ids for piece in pieces], axis=1)
    owners: npt.NDArray[np.int32] = np.concatenate([piece.owners for piece in pieces])
    phases: npt.NDArray[np.uint8] = np.concatenate([piece.phases for piece in pieces])
    return Trace(ids, owners, phases, all(piece.ranked for piece in pieces))
