"""Counting real routing: what each layer's router hands to its experts, token by token.

The hooks sit at the input of the experts modules, where every family of transformers models passes the chosen
ids, so what is counted is what is computed. A token counts for the document that owns it; padding and special
tokens have no owner. Nothing here imports torch: the modules and the `forward` that drives them are handed
in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadInput, BadUsage, KtplanError
from ktplan.model import ModelSpec
from ktplan.profile.corpus import Corpus, Document
from ktplan.profile.profile import ActivationProfile
from ktplan.progress import SILENT, Progress

if TYPE_CHECKING:
    from ktplan.profile.tally import Tally

NOBODY: Final = -1  # owner of a token that does not count
BATCH_TOKENS: Final = 2048  # run at once: twice as fast as single stretches of 256 on the CPU

Tokens = npt.NDArray[np.int64]


class Encoded(NamedTuple):
    """A text as the tokenizer gives it: special tokens that it puts before the text, and the text's own tokens."""

    prefix: tuple[int, ...]
    tokens: Tokens  # int64 [n]


Encode = Callable[[str], Encoded]
# Feeds ids [rows, n] after what it was fed before and gives the most likely next id of each row, int64 [rows].
Decoder = Callable[[Tokens], Tokens]
Forward = Callable[
    [Tokens], object
]  # runs the model over sequences, ids int64 [rows, n], for its routing alone


class Seen(NamedTuple):
    """The routing of one pass. `ids` is there when it was asked for."""

    counts: npt.NDArray[np.int64]  # [documents, layers, experts, choices]: by gate rank
    ids: npt.NDArray[np.uint16] | None  # [layers, counted tokens, choices], in gate order


class Recorder:
    """Counts choices at the experts modules it is attached to.

    `modules` maps a MoE layer to (name, module); a module must offer `register_forward_pre_hook` and be
    called with `(hidden_states, top_k_index [tokens, k], top_k_weights)`. Ids below 0 or at `experts` and
    above mean "no expert". Gate rank 0 is the choice of the largest weight.
    """

    def __init__(
        self, modules: Mapping[int, tuple[str, Any]], *, experts: int, keep_ids: bool = False
    ) -> None:
        self._modules = dict(sorted(modules.items()))
        self._experts = experts
        self._keep_ids = keep_ids
        self._owners: Tokens | None = None
        self._documents = 0
        self._seen: dict[int, npt.NDArray[np.int64]] = {}
        self._ids: dict[int, npt.NDArray[np.uint16]] = {}

    @contextmanager
    def attached(self) -> Iterator[Recorder]:
        """Hook the modules for the length of the block."""
        handles = [
            module.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer, (_, module) in self._modules.items()
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def count(self, owners: Tokens, run: Callable[[], object]) -> npt.NDArray[np.int64]:
        """Counts of one `run` of the model: int64 [documents, layers, experts]; see `watch`."""
        return np.asarray(self.watch(owners, run).counts.sum(axis=3), dtype=np.int64)

    def watch(self, owners: Tokens, run: Callable[[], object]) -> Seen:
        """The routing of one `run` of the model.

        `owners` int64 [tokens] gives the document of each token in the order in which the experts see them
        (row after row of a batch), NOBODY for those that do not count. Raises KtplanError when a layer was
        not reached, was reached twice, or saw another number of tokens.
        """
        self._owners = np.asarray(owners, dtype=np.int64).ravel()
        self._documents = int(self._owners.max(initial=NOBODY)) + 1
        self._seen, self._ids = {}, {}
        run()
        absent = [name for layer, (name, _) in self._modules.items() if layer not in self._seen]
        if absent:
            raise KtplanError(f"{absent[0]} was never called: its routing cannot be recorded")
        self._owners = None
        counts = np.stack([self._seen[layer] for layer in self._modules], axis=1)
        ids = np.stack([self._ids[layer] for layer in self._modules]) if self._keep_ids else None
        return Seen(counts, ids)

    def _hook(self, layer: int) -> Callable[..., None]:
        name = self._modules[layer][0]

        def hook(module: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            if self._owners is None:
                return
            chosen = named["top_k_index"] if "top_k_index" in named else arguments[1]
            weights = named.get("top_k_weights", arguments[2] if len(arguments) > 2 else None)
            ids = np.asarray(chosen.detach().to("cpu").numpy(), dtype=np.int64)
            if len(ids) != len(self._owners):
                raise KtplanError(
                    f"{name} saw {len(ids):,} tokens, {len(self._owners):,} were given to the model"
                )
            if layer in self._seen:
                raise KtplanError(f"{name} was called twice in one pass: its routing cannot be attributed")
            if weights is not None:
                ids = _by_weight(ids, weights.detach().to("cpu").float().numpy())
            choices = ids.shape[1]
            owners = self._owners[:, None]
            counted = (owners != NOBODY) & (ids >= 0) & (ids < self._experts)
            cells = (owners * self._experts + ids) * choices + np.arange(choices)
            size = self._documents * self._experts * choices
            self._seen[layer] = np.bincount(cells[counted], minlength=size).reshape(
                self._documents, self._experts, choices
            )
            if self._keep_ids:
                self._ids[layer] = ids[self._owners != NOBODY].astype(np.uint16)

        return hook


def _by_weight(ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Ids by falling gate weight; most routers hand them over like that, some (DeepSeek's) do not."""
    if np.all(weights[:, :-1] >= weights[:, 1:]):
        return ids
    return np.take_along_axis(ids, np.argsort(-weights, axis=1, kind="stable"), axis=1)


class Passage(NamedTuple):
    """A stretch of a document that the model sees at once, after the tokenizer's own prefix."""

    document: int
    start: int
    prefix: tuple[int, ...]
    tokens: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How much to record. `generate` tokens follow every prompt; the trace keeps at most `trace_tokens` tokens."""

    chunk: int = 256
    max_tokens: int | None = None
    generate: int = 0
    trace_tokens: int = 0
    special_ids: frozenset[int] = frozenset()  # never count, wherever in a text they stand

    def check(self, spec: ModelSpec) -> None:
        """Raises BadUsage for what the model cannot do."""
        if not 1 <= self.chunk <= spec.context:
            raise BadUsage(
                f"chunks of {self.chunk:,} tokens are out of range",
                hint=f"give 1 to {spec.context:,}, the context of {spec.name}",
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadUsage(
                f"{self.max_tokens:,} tokens is no amount to profile", hint="give --max-tokens 1 or more"
            )
        if self.generate < 0 or self.chunk + self.generate > spec.context:
            raise BadUsage(
                f"{self.generate:,} generated tokens after {self.chunk:,} do not fit",
                hint=f"chunk and generated tokens together may be {spec.context:,}, the context of {spec.name}",
            )


def record(
    spec: ModelSpec,
    corpus: Corpus,
    *,
    modules: Mapping[int, tuple[str, Any]],
    encode: Encode,
    forward: Forward,
    chunk: int = 256,
    max_tokens: int | None = None,
    wishes: Wishes | None = None,
    decoder: Callable[[], Decoder] | None = None,
    settings: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    checkpoint: Path | None = None,
    progress: Progress = SILENT,
) -> ActivationProfile:
    """Run the model over a corpus and count its routing.

    Documents are cut into stretches of at most `chunk` tokens (the tokenizer's prefix included) and each
    stretch is a sequence of its own; only stretches of equal length run together, so there is no padding at
    all. With `max_tokens` the files take turns, the one that gave fewest tokens next, and inside a file the
    documents do, so that few tokens still come from many documents. With `generate` the model continues the first
    stretch of every document by so many tokens, greedily; those are the profile's decode tokens.

    `checkpoint` is a file to which unfinished work goes now and then; a later call with the same inputs goes on from
    there. Raises BadUsage for a chunk that the model cannot see, BadInput for texts without a single token,
    KtplanError when the model's experts cannot be watched.
    """
    wishes = wishes or Wishes(chunk=chunk, max_tokens=max_tokens)
    wishes.check(spec)
    if tuple(sorted(modules)) != spec.moe_layers:
        raise KtplanError(
            f"the network has experts in layers {sorted(modules)}, the checkpoint in {list(spec.moe_layers)}"
        )
    passages = choose_passages(corpus.documents, encode, wishes.chunk, wishes.max_tokens, progress)
    how = {"chunk": wishes.chunk, "max_tokens": wishes.max_tokens, "generate": wishes.generate}
    from ktplan.profile.tally import Checkpoint, Tally

    tally = Tally(spec, corpus, passages, wishes, {**how, **(settings or {})}, tokenizer)
    work = Checkpoint(checkpoint, tally) if checkpoint else None
    done = work.resume() if work else 0
    recorder = Recorder(modules, experts=spec.experts, keep_ids=wishes.trace_tokens > 0)
    total = sum(len(passage.tokens) for passage in passages)
    with recorder.attached(), progress.task("profiling", total, "tokens") as task:
        for number, batch in enumerate(batches(passages)):
            if number >= done:
                _prompt(recorder, tally, batch, forward, wishes)
                if wishes.generate and decoder is not None:
                    _generate(recorder, tally, batch, decoder(), wishes.generate)
                if work:
                    work.note(number + 1)
            task.advance(sum(len(row.tokens) for row in batch))
    profile = tally.profile()
    if work:
        work.forget()
    return profile


def _prompt(recorder: Recorder, tally: Tally, batch: list[Passage], forward: Forward, wishes: Wishes) -> None:
    ids, owners = ids_of(batch), owners_of(batch, wishes)
    tally.add(batch, owners, recorder.watch(owners, partial(forward, ids)), 0)


def owners_of(batch: Sequence[Passage], wishes: Wishes) -> Tokens:
    """int64 [rows, n]: the row of each token that counts, NOBODY for special ones."""
    ids = ids_of(batch)
    owners = np.repeat(np.arange(len(batch))[:, None], ids.shape[1], axis=1)
    owners[:, : len(batch[0].prefix)] = NOBODY
    if wishes.special_ids:
        owners[np.isin(ids, list(wishes.special_ids))] = NOBODY
    return owners


def _generate(recorder: Recorder, tally: Tally, batch: list[Passage], decoder: Decoder, tokens: int) -> None:
    """Continue the stretches that begin a document; the tokens that end a text count no more than other special
    ones.
    """
    first = [row for row in batch if row.start == 0]
    if not first:
        return
    following = decoder(ids_of(first))
    alive = np.ones(len(first), dtype=bool)
    for _ in range(tokens):
        alive &= ~np.isin(following, list(tally.special_ids))
        if not alive.any():
            return
        owners = np.where(alive, np.arange(len(first)), NOBODY)
        step = following[:, None]
        held: list[Tokens] = []
        seen = recorder.watch(owners, lambda step=step, held=held: held.append(decoder(step)))  # type: ignore[misc]
        tally.add(first, owners[:, None], seen, 1)
        following = held[0]


def ids_of(batch: Sequence[Passage]) -> Tokens:
    """int64 [rows, n]: prefix and tokens of passages of equal length."""
    return np.stack([np.concatenate([np.array(row.prefix, dtype=np.int64), row.tokens]) for row in batch])


def choose_passages(
    documents: Sequence[Document],
    encode: Encode,
    chunk: int,
    max_tokens: int | None = None,
    progress: Progress = SILENT,
) -> list[Passage]:
    """What the model will see, in document order; at most `max_tokens` tokens, see `record` for how they are shared."""
    waiting: dict[str, deque[tuple[int, int]]] = {}
    for number, document in enumerate(documents):
        waiting.setdefault(document.source, deque()).append((number, 0))
    given = dict.fromkeys(waiting, 0)
    texts: dict[int, Encoded] = {}
    chosen: list[Passage] = []
    left = max_tokens
    with progress.task("reading", None, "stretches") as task:
        while waiting and left != 0:
            source = min(waiting, key=lambda name: given[name])
            number, start = waiting[source].popleft()
            if start == 0:
                texts[number] = encode(documents[number].text)
            passage = _cut(number, texts[number], start, chunk, left)
            if len(passage.tokens):
                chosen.append(passage)
            given[source] += len(passage.tokens)
            left = None if left is None else left - len(passage.tokens)
            after = start + len(passage.tokens)
            if after < len(texts[number].tokens):
                waiting[source].append((number, after))
            else:
                del texts[number]
            if not waiting[source]:
                del waiting[source]
            task.advance()
    if not chosen:
        raise BadInput("the texts have no token at all", hint="check the files and the model's tokenizer")
    return sorted(chosen, key=lambda passage: (passage.document, passage.start))


def batches(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    """Passages of equal length together, so that a batch needs no padding; a few thousand tokens at a time.

    Long ones first: only the last stretch of a document is shorter than a chunk, so each is read in order.
    """
    alike: dict[tuple[int, int], list[Passage]] = {}
    for passage in passages:
        alike.setdefault((len(passage.prefix) + len(passage.tokens), len(passage.prefix)), []).append(passage)
    for shape in sorted(alike, reverse=True):
        together = max(1, BATCH_TOKENS // shape[0])
        for first in range(0, len(alike[shape]), together):
            yield alike[shape][first : first + together]


def _cut(document: int, text: Encoded, start: int, chunk: int, left: int | None) -> Passage:
    room = chunk - len(text.prefix)
    if room < 1:
        raise BadUsage(
            f"chunks of {chunk} tokens have no room after the tokenizer's {len(text.prefix)} special tokens",
            hint=f"give --chunk {len(text.prefix) + 1} or more",
        )
    end = start + (room if left is None else min(room, left))
    return Passage(document, start, text.prefix, text.tokens[start:end])
