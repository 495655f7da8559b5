"""Profiling a model that does not fit into memory: all texts through one layer, then through the next.

A layer's weights are read once, used for every text and freed, so memory holds one layer and one row of floats for each
token; a large table of rows lies in a file. Batches are those of the ordinary path, so that the counts are the same.
What is done is written down after a layer, not oftener than once a minute.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from ktplan import network
from ktplan.convert.calibrate import Activations, LayerByLayer, Text
from ktplan.model import WeightSource
from ktplan.profile import ActivationProfile, Corpus
from ktplan.profile.recorder import (
    NOBODY,
    Encode,
    Passage,
    Recorder,
    Wishes,
    batches,
    choose_passages,
    owners_of,
)
from ktplan.profile.tally import Checkpoint, Tally
from ktplan.progress import SILENT, Progress, Task

_IN_MEMORY: Final = 512 << 20  # rows beyond this many bytes lie in a file


def record_by_layer(
    model: Path,
    source: WeightSource,
    corpus: Corpus,
    *,
    encode: Encode,
    wishes: Wishes,
    dtype: torch.dtype = torch.float32,
    settings: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    checkpoint: Path | None = None,
    folder: Path | None = None,
    progress: Progress = SILENT,
) -> ActivationProfile:
    """As `ktplan.profile.recorder.record`, one layer at a time; experts are computed in `dtype`, all else in float32.

    Every generated token is one more pass over all layers (for all documents at once). `folder` takes the rows where
    they are many. Raises what `record` raises.
    """
    spec = source.spec
    wishes.check(spec)
    passages = choose_passages(corpus.documents, encode, wishes.chunk, wishes.max_tokens, progress)
    how = {"chunk": wishes.chunk, "max_tokens": wishes.max_tokens, "generate": wishes.generate}
    tally = Tally(spec, corpus, passages, wishes, {**how, **(settings or {})}, tokenizer)
    work = _Work(checkpoint, tally) if checkpoint else None
    begin = partial(_Pass, model, source, tally, wishes, dtype, folder)
    with progress.task("profiling", (1 + wishes.generate) * spec.layers, "layers") as task:
        one = begin(list(batches(passages)))
        one.walk(task, work)
        growing = {row.document: row for row in passages if row.start == 0}
        for _ in range(wishes.generate):
            following = one.following()
            growing = {
                document: row._replace(tokens=np.append(row.tokens, following[document]))
                for document, row in growing.items()
                if following[document] not in wishes.special_ids
            }
            if not growing:
                break
            one = begin(list(batches(list(growing.values()))), decode=True)
            one.walk(task)
    profile = tally.profile()
    if work:
        work.forget()
    return profile


class _Work:
    """The counts so far and the rows that enter the next layer, both on disk."""

    def __init__(self, path: Path, tally: Tally) -> None:
        self._path, self._tally = path, tally
        self._counts = Checkpoint(path, tally)

    def resume(self, rows: Activations) -> int:
        done = self._counts.resume(lambda layers: rows.restore(self._rows(layers)))
        if done:
            self._tally.layers_done(done)
        return done

    def note(self, layers: int, rows: Activations) -> None:
        if self._counts.due:
            rows.save(self._rows(layers))
            self._counts.note(layers)
            self._remove_rows(but=layers)

    def forget(self) -> None:
        self._counts.forget()
        self._remove_rows()

    def _rows(self, layers: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{layers}")

    def _remove_rows(self, but: int | None = None) -> None:
        for found in self._path.parent.glob(f"{glob.escape(self._path.name)}.*"):
            if found.suffix[1:].isdecimal() and (but is None or found != self._rows(but)):
                found.unlink()


class _Pass:
    """Some texts through all layers. Decoding counts the last token of each text alone."""

    def __init__(
        self,
        model: Path,
        source: WeightSource,
        tally: Tally,
        wishes: Wishes,
        dtype: torch.dtype,
        folder: Path | None,
        texts: list[list[Passage]],
        *,
        decode: bool = False,
    ) -> None:
        self._source, self._tally, self._dtype, self._texts = source, tally, dtype, texts
        self._phase = int(decode)
        self._owners = [owners_of(batch, wishes) for batch in texts]
        if decode:
            for owners in self._owners:
                owners[:, :-1] = NOBODY
        sequences = [(*row.prefix, *row.tokens.tolist()) for batch in texts for row in batch]
        text = Text(tuple(sequences), (False,) * len(sequences), len(sequences))
        large = text.tokens * source.spec.hidden * 4 > _IN_MEMORY
        self._run = LayerByLayer(model, source, text, folder=folder if large else None)
        self._experts = network.experts_modules(self._run.network)
        self._keep_ids = wishes.trace_tokens > 0
        self._weights: tuple[nn.Parameter, nn.Parameter] | None = None

    def walk(self, task: Task, work: _Work | None = None) -> None:
        """Through every layer that was not done before."""
        done = work.resume(self._run.boundary) if work else 0
        task.advance(done)
        for layer in range(done, self._source.spec.layers):
            with self._run.loaded(layer):
                if layer in self._experts:
                    self._watch(layer)
                else:
                    for _ in self._run.through(layer):
                        pass
            task.advance()
            if work:
                work.note(layer + 1, self._run.boundary)

    def following(self) -> dict[int, int]:
        """Document to the most likely token after its text, for texts that begin a document."""
        found: dict[int, int] = {}
        for batch, ids in zip(self._texts, self._run.following(), strict=True):
            found |= {
                row.document: int(token) for row, token in zip(batch, ids, strict=True) if not row.start
            }
        return found

    def _watch(self, layer: int) -> None:
        name, found = self._experts[layer]
        module: Any = found
        if self._weights and all(
            held.shape == own.shape
            for held, own in zip(self._weights, (module.gate_up_proj, module.down_proj), strict=True)
        ):
            # The last layer's memory: freed pieces of some megabytes would not be found again by the allocator.
            module.gate_up_proj, module.down_proj = self._weights
        network.load_experts(module, self._source, layer, dtype=self._dtype)
        self._weights = (module.gate_up_proj, module.down_proj)
        place = self._source.spec.moe_layers.index(layer)
        recorder = Recorder(
            {layer: (name, module)}, experts=self._source.spec.experts, keep_ids=self._keep_ids
        )
        through = self._run.through(layer)
        next(through)
        with recorder.attached(), self._run.experts_in(layer, self._dtype):
            for batch, owners in zip(self._texts, self._owners, strict=True):
                seen = recorder.watch(owners, lambda: next(through, None))
                self._tally.add_layer(place, batch, owners, seen, self._phase)
