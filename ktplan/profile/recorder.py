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
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadInput, BadUsage, KtplanError
from ktplan.model import ModelSpec
from ktplan.profile.corpus import Corpus, Document
from ktplan.profile.profile import ActivationProfile
from ktplan.progress import SILENT, Progress

NOBODY: Final = -1  # owner of a token that does not count
BATCH_TOKENS: Final = 2048  # run at once: twice as fast as single stretches of 256 on the CPU

Tokens = npt.NDArray[np.int64]


class Encoded(NamedTuple):
    """A text as the tokenizer gives it: special tokens that it puts before the text, and the text's own tokens."""

    prefix: tuple[int, ...]
    tokens: Tokens  # int64 [n]


Encode = Callable[[str], Encoded]
Forward = Callable[
    [Tokens], object
]  # runs the model over sequences, ids int64 [rows, n], for its routing alone


class Recorder:
    """Counts choices at the experts modules it is attached to.

    `modules` maps a MoE layer to (name, module); a module must offer `register_forward_pre_hook` and be
    called with `(hidden_states, top_k_index [tokens, k], top_k_weights)`. Ids below 0 or at `experts` and
    above mean "no expert".
    """

    def __init__(self, modules: Mapping[int, tuple[str, Any]], *, experts: int) -> None:
        self._modules = dict(sorted(modules.items()))
        self._experts = experts
        self._owners: Tokens | None = None
        self._documents = 0
        self._seen: dict[int, npt.NDArray[np.int64]] = {}

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
        """Counts of one `run` of the model: int64 [documents, layers, experts].

        `owners` int64 [tokens] gives the document of each token in the order in which the experts see them
        (row after row of a batch), NOBODY for those that do not count. Raises KtplanError when a layer was
        not reached, was reached twice, or saw another number of tokens.
        """
        self._owners = np.asarray(owners, dtype=np.int64).ravel()
        self._documents = int(self._owners.max(initial=NOBODY)) + 1
        self._seen = {}
        run()
        absent = [name for layer, (name, _) in self._modules.items() if layer not in self._seen]
        if absent:
            raise KtplanError(f"{absent[0]} was never called: its routing cannot be recorded")
        self._owners = None
        return np.stack([self._seen[layer] for layer in self._modules], axis=1)

    def _hook(self, layer: int) -> Callable[..., None]:
        name = self._modules[layer][0]

        def hook(module: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            if self._owners is None:
                return
            chosen = named["top_k_index"] if "top_k_index" in named else arguments[1]
            ids = np.asarray(chosen.detach().to("cpu").numpy(), dtype=np.int64)
            if len(ids) != len(self._owners):
                raise KtplanError(
                    f"{name} saw {len(ids):,} tokens, {len(self._owners):,} were given to the model"
                )
            if layer in self._seen:
                raise KtplanError(f"{name} was called twice in one pass: its routing cannot be attributed")
            owners = np.broadcast_to(self._owners[:, None], ids.shape)
            counted = (owners != NOBODY) & (ids >= 0) & (ids < self._experts)
            cells = owners[counted] * self._experts + ids[counted]
            self._seen[layer] = np.bincount(cells, minlength=self._documents * self._experts).reshape(
                self._documents, self._experts
            )

        return hook


class Passage(NamedTuple):
    """A stretch of a document that the model sees at once, after the tokenizer's own prefix."""

    document: int
    start: int
    prefix: tuple[int, ...]
    tokens: Tokens


def record(
    spec: ModelSpec,
    corpus: Corpus,
    *,
    modules: Mapping[int, tuple[str, Any]],
    encode: Encode,
    forward: Forward,
    chunk: int = 256,
    max_tokens: int | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = SILENT,
) -> ActivationProfile:
    """Run the model over a corpus and count its routing.

    Documents are cut into stretches of at most `chunk` tokens (the tokenizer's prefix included) and each
    stretch is a sequence of its own; only stretches of equal length run together, so there is no padding at
    all. With `max_tokens` the files take turns, the one that gave fewest tokens next, and inside a file the
    documents do, so that few tokens still come from many documents.

    Raises BadUsage for a chunk that the model cannot see, BadInput for texts without a single token,
    KtplanError when the model's experts cannot be watched.
    """
    if not 1 <= chunk <= spec.context:
        raise BadUsage(
            f"chunks of {chunk:,} tokens are out of range",
            hint=f"give 1 to {spec.context:,}, the context of {spec.name}",
        )
    if max_tokens is not None and max_tokens < 1:
        raise BadUsage(f"{max_tokens:,} tokens is no amount to profile", hint="give --max-tokens 1 or more")
    if tuple(sorted(modules)) != spec.moe_layers:
        raise KtplanError(
            f"the network has experts in layers {sorted(modules)}, the checkpoint in {list(spec.moe_layers)}"
        )
    passages = choose_passages(corpus.documents, encode, chunk, max_tokens, progress)
    used = sorted({passage.document for passage in passages})
    place = {document: number for number, document in enumerate(used)}
    counts = np.zeros((len(used), len(spec.moe_layers), spec.experts), dtype=np.int64)
    tokens = np.zeros(len(used), dtype=np.int64)
    recorder = Recorder(modules, experts=spec.experts)
    total = sum(len(passage.tokens) for passage in passages)
    with recorder.attached(), progress.task("profiling", total, "tokens") as task:
        for batch in _batches(passages):
            ids = np.stack(
                [np.concatenate([np.array(row.prefix, dtype=np.int64), row.tokens]) for row in batch]
            )
            owners = np.repeat(np.arange(len(batch))[:, None], ids.shape[1], axis=1)
            owners[:, : len(batch[0].prefix)] = NOBODY
            for row, seen in zip(batch, recorder.count(owners, partial(forward, ids)), strict=True):
                counts[place[row.document]] += seen
                tokens[place[row.document]] += len(row.tokens)
                task.advance(len(row.tokens))
    return ActivationProfile(
        counts=counts,
        tokens=tokens,
        document_ids=tuple(corpus.documents[document].id for document in used),
        sources=tuple(corpus.documents[document].source for document in used),
        layers=spec.moe_layers,
        top_k=spec.top_k,
        fingerprint=spec.fingerprint,
        model=spec.name,
        family=spec.family,
        files=corpus.files,
        settings={"chunk": chunk, "max_tokens": max_tokens, **(settings or {})},
    )


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


def _batches(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    """Passages of equal length together, so that a batch needs no padding; a few thousand tokens at a time."""
    waiting: dict[tuple[int, int], list[Passage]] = {}
    for passage in passages:
        shape = len(passage.prefix), len(passage.tokens)
        batch = waiting.setdefault(shape, [])
        batch.append(passage)
        if (len(batch) + 1) * sum(shape) > BATCH_TOKENS:
            yield waiting.pop(shape)
    yield from waiting.values()


def _cut(document: int, text: Encoded, start: int, chunk: int, left: int | None) -> Passage:
    room = chunk - len(text.prefix)
    if room < 1:
        raise BadUsage(
            f"chunks of {chunk} tokens have no room after the tokenizer's {len(text.prefix)} special tokens",
            hint=f"give --chunk {len(text.prefix) + 1} or more",
        )
    end = start + (room if left is None else min(room, left))
    return Passage(document, start, text.prefix, text.tokens[start:end])
