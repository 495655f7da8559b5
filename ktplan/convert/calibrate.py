"""The model run over calibration text one decoder layer at a time.

Only the layer at hand has weights. What enters it is kept for all tokens in a buffer (in memory, or in a file that
has no name and so cannot be left behind); its output replaces the input. A MoE layer is run twice: once up to its
experts, to see which tokens they get; and, when the caller has computed what the experts give, once through.

The network's own forward does the work, whatever the family: other layers are made to hand on their input, and the
run is stopped where nothing more is wanted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ktplan import network
from ktplan.artifact import replacing
from ktplan.errors import BadInput, KtplanError
from ktplan.model import WeightSource
from ktplan.profile import Corpus
from ktplan.profile.recorder import Passage, choose_passages
from ktplan.progress import SILENT, Progress

_BATCH_TOKENS = 2048
_HELD_OUT_EVERY = 8
_FEW_DOCUMENTS = 16  # with fewer, passages are held out instead of whole documents


class Text(NamedTuple):
    """Calibration text as the model sees it: sequences of token ids, and which of them are held out."""

    sequences: tuple[tuple[int, ...], ...]
    held_out: tuple[bool, ...]
    documents: int

    @property
    def tokens(self) -> int:
        """All tokens, special ones included."""
        return sum(map(len, self.sequences))


def read_text(
    model_path: Path, corpus: Corpus, *, chunk: int, max_tokens: int, progress: Progress = SILENT
) -> Text:
    """Cut a corpus into sequences of at most `chunk` tokens; files share `max_tokens` evenly.

    Every eighth document is held out for judging what was fitted on the others; with few documents every eighth
    sequence, with fewer than eight none. Raises BadInput for texts without a token.
    """
    encode = network.text_encoder(network.tokenizer(model_path))
    passages = choose_passages(corpus.documents, encode, chunk, max_tokens, progress)
    sequences = tuple((*passage.prefix, *passage.tokens.tolist()) for passage in passages)
    return Text(sequences, tuple(_held_out(passages)), len({passage.document for passage in passages}))


def _held_out(passages: Sequence[Passage]) -> list[bool]:
    documents = sorted({passage.document for passage in passages})
    if len(documents) < _FEW_DOCUMENTS:
        return [number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1 for number in range(len(passages))]
    chosen = set(documents[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY])
    return [passage.document in chosen for passage in passages]


class Activations:
    """One row of floats for each calibration token: [rows, width], float32 or bfloat16.

    With `folder` the rows lie in an unnamed file there, mapped into memory; its space is freed when the process ends,
    however it ends.
    """

    def __init__(self, rows: int, width: int, *, dtype: torch.dtype, folder: Path | None = None) -> None:
        self.width = width
        if folder is None:
            self._rows = torch.zeros(rows, width, dtype=dtype)
            return
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".activations.") as file:
            file.truncate(rows * width * dtype.itemsize)
            flat = torch.from_file(file.name, shared=True, size=rows * width, dtype=dtype)
        self._rows = flat.view(rows, width)

    def read(self, rows: slice | Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Some rows as float32 on `device`."""
        return self._rows[rows].to(device, torch.float32)

    def write(self, rows: slice, values: Tensor) -> None:
        """Replace rows."""
        self._rows[rows] = values.to("cpu", self._rows.dtype)

    def add(self, rows: Tensor, values: Tensor) -> None:
        """Add to rows; `rows` names each at most once."""
        self._rows[rows] = (self._rows[rows].float() + values.cpu()).to(self._rows.dtype)

    def clear(self) -> None:
        """All rows to zero."""
        self._rows.zero_()

    @property
    def bytes(self) -> int:
        """Size of all rows."""
        return self._rows.nbytes

    def save(self, path: Path) -> None:
        """All rows as a plain file, whole or not at all."""
        with replacing(path) as part:
            self._rows.view(torch.uint8).numpy().tofile(part)

    def restore(self, path: Path) -> bool:
        """Take rows that `save` wrote; False, and nothing is changed, where the file is absent or of another size."""
        if not path.is_file() or path.stat().st_size != self.bytes:
            return False
        self._rows.view(torch.uint8).numpy()[:] = np.fromfile(path, np.uint8).reshape(len(self._rows), -1)
        return True


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences of one length that go through a layer together; `rows` is their place in every buffer."""

    rows: slice
    ids: Tensor  # int64 [sequences, length]


class Routing(NamedTuple):
    """Who goes where in one layer: for every expert the rows of its tokens and their weights."""

    rows: tuple[Tensor, ...]  # int64 [n], ascending
    weights: tuple[Tensor, ...]  # float32 [n]


class _Enough(Exception):
    """The run has given what was wanted of it."""


class LayerByLayer:
    """A model whose layers exist one at a time.

    `boundary` holds what enters the layer at hand, `inputs` what its experts see, `outputs` (written by the caller)
    what they give; rows are tokens in the same order, and `held_out` bool [rows] marks those not to be fitted on.
    """

    def __init__(
        self,
        model_path: Path,
        source: WeightSource,
        text: Text,
        *,
        dtype: torch.dtype = torch.float32,
        folder: Path | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._source, self._device = source, torch.device(device)
        self._model = network.skeleton(model_path, torch.float32)
        network.fit_torch_threads(self._model)
        self._experts = network.experts_modules(self._model)
        # The stack of layers that holds the experts, in whatever it is nested: "model", "model.language_model" ...
        self._prefix = next(iter(self._experts.values()))[0].split(".layers.")[0]
        self._base: Any = self._model.get_submodule(self._prefix)
        self._batches = _batches(text)
        self.held_out = _held_out_rows(text, self._batches)
        rows, width = text.tokens, source.spec.hidden
        self.boundary = Activations(rows, width, dtype=dtype, folder=folder)
        self.inputs = Activations(rows, width, dtype=dtype, folder=folder)
        self.outputs = Activations(rows, width, dtype=dtype, folder=folder)
        self._embed()

    @property
    def network(self) -> Any:
        """The whole network, of which one layer at a time has weights."""
        return self._model

    def layer(self, layer: int) -> Any:
        """The network's module of a decoder layer."""
        return self._base.layers[layer]

    def module(self, name: str) -> nn.Module:
        """A module by its dotted name."""
        found: nn.Module = self._model.get_submodule(name)
        return found

    @contextmanager
    def loaded(self, layer: int) -> Iterator[None]:
        """Give a layer its dense weights, in float32, for the length of the block."""
        self._load(f"{self._prefix}.layers.{layer}")
        try:
            yield
        finally:
            network.unload(self.layer(layer))

    def route(self, layer: int) -> Routing:
        """Run a MoE layer up to its experts: fills `inputs` and says who goes where."""
        chosen: list[Tensor] = []
        weights: list[Tensor] = []
        place = iter(self._batches)

        def capture(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            self.inputs.write(next(place).rows, hidden)
            chosen.append(top_k_index.cpu())
            weights.append(top_k_weights.float().cpu())
            raise _Enough

        with self._experts_giving(layer, capture):
            for batch in self._batches:
                self._run(layer, batch)
        return _routing(torch.cat(chosen), torch.cat(weights), self._source.spec.experts)

    def advance(self, layer: int) -> None:
        """Run a layer through, its experts giving `outputs`, so that `boundary` is what enters the next one."""
        place = iter(self._batches)

        def give(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return self.outputs.read(next(place).rows, hidden.device).to(hidden.dtype)

        with self._experts_giving(layer, give):
            for _ in self.through(layer):
                pass

    def through(self, layer: int) -> Iterator[Tensor]:
        """Run a layer over all tokens, experts as they are now, and put what it gives in `boundary`.

        Yields the ids of each batch, int64 [sequences, length], before that batch is run.
        """
        for batch in self._batches:
            yield batch.ids
            output = self._run(layer, batch)
            if output is None:
                raise KtplanError(f"layer {layer} gave no output")
            if not bool(output.isfinite().all()):
                raise BadInput(
                    f"layer {layer} turns the text into values that are not finite",
                    hint="the checkpoint is damaged, or its weights overflow; check it with 'ktplan eval'",
                )
            self.boundary.write(batch.rows, output.reshape(-1, output.shape[-1]))

    @contextmanager
    def experts_in(self, layer: int, dtype: torch.dtype) -> Iterator[None]:
        """Compute a layer's experts, loaded in `dtype`, amid a layer in float32."""
        module = self._experts[layer][1]
        compute = module.forward

        def cast(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            found: Tensor = compute(hidden.to(dtype), top_k_index, top_k_weights.to(dtype))
            return found.to(hidden.dtype)

        if dtype == torch.float32:
            yield
            return
        with self._experts_giving(layer, cast):
            yield

    def following(self) -> Iterator[Tensor]:
        """After the last layer: the most likely token after each sequence, int64 [sequences], batch by batch."""
        heads = [self._model.get_input_embeddings(), self._model.get_output_embeddings()]
        for name, module in list(self._model.named_modules()):
            if any(module is head for head in heads):
                self._load(name)
        layers = list(self._base.layers)
        try:
            for batch in self._batches:
                rows = self.boundary.read(batch.rows, self._device).view(*batch.ids.shape, -1)[:, -1:]
                for module in layers:
                    module.forward = partial(_instead, rows)
                with torch.no_grad():
                    answer = self._model(inputs_embeds=rows, use_cache=False, logits_to_keep=1)
                yield answer.logits[:, -1].argmax(dim=-1).cpu()
        finally:
            for module in layers:
                del module.forward
            for head in heads:
                if head is not None:
                    network.unload(head)

    def stages(self, layer: int, names: Sequence[str]) -> list[list[str]]:
        """The linear modules `names` of a layer in the order in which they run; those with one input together."""
        seen: list[tuple[int, str]] = []
        kept: list[Tensor] = []  # so that no two inputs share an address

        def hook(name: str) -> Callable[..., None]:
            def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
                kept.append(arguments[0])
                seen.append((arguments[0].data_ptr(), name))

            return note

        with self._hooked({name: hook(name) for name in names}), self._experts_giving(layer, _nothing):
            self._run(layer, self._batches[0])
        stages: dict[int, list[str]] = {}
        for address, name in seen:
            stages.setdefault(address, []).append(name)
        absent = sorted(set(names) - {name for _, name in seen})
        if absent:
            raise KtplanError(f"{absent[0]} was never called: its inputs cannot be seen")
        return list(stages.values())

    def observe(self, layer: int, name: str, see: Callable[[Tensor, Tensor], None]) -> None:
        """Run a layer as far as the linear module `name`; `see(inputs [n, K], held_out bool [n])` for every batch."""
        for batch in self._batches:
            held_out = self.held_out[batch.rows]

            def look(module: nn.Module, arguments: tuple[Any, ...], held_out: Tensor = held_out) -> None:
                see(arguments[0].reshape(len(held_out), -1), held_out)
                raise _Enough

            with self._hooked({name: look}), self._experts_giving(layer, _nothing):
                self._run(layer, batch)

    def _embed(self) -> None:
        for name, _ in self._base.named_children():
            if name != "layers":
                self._load(f"{self._prefix}.{name}")
        for batch in self._batches:
            with torch.no_grad():
                embedded = self._base.get_input_embeddings()(batch.ids.to(self._device))
            self.boundary.write(batch.rows, embedded.reshape(-1, embedded.shape[-1]))
        network.unload(self._base.get_input_embeddings())
        if self._model.get_output_embeddings() is not None:  # tied: the same weights by another name
            network.unload(self._model.get_output_embeddings())

    def _load(self, prefix: str) -> None:
        network.load_dense(
            self._model, self._source, device_of=lambda name: self._device, dtype=torch.float32, only=prefix
        )

    def _run(self, layer: int, batch: _Batch) -> Tensor | None:
        """One batch through one layer: its output [sequences, length, hidden], None if it was stopped on the way."""
        hidden = self.boundary.read(batch.rows, self._device).view(*batch.ids.shape, -1)
        found: list[Tensor] = []
        with self._only(layer, hidden, found), torch.no_grad(), suppress(_Enough):
            self._base(inputs_embeds=hidden, use_cache=False)
        return found[0] if found else None

    @contextmanager
    def _only(self, layer: int, hidden: Tensor, found: list[Tensor]) -> Iterator[None]:
        """Make every other layer hand on its input, and end the run after this one."""
        own = self.layer(layer)
        compute = own.forward

        def run(given: Tensor, *arguments: Any, **named: Any) -> Tensor:
            # Not `given`: a network may scale its embeddings before the first layer, which was done long ago.
            output = compute(hidden, *arguments, **named)
            found.append(output[0] if isinstance(output, tuple) else output)
            raise _Enough

        own.forward = run
        others = [module for number, module in enumerate(self._base.layers) if number != layer]
        for module in others:
            module.forward = _hand_on
        try:
            yield
        finally:
            for module in (own, *others):
                del module.forward  # the class's own method shows again

    @contextmanager
    def _experts_giving(
        self, layer: int, function: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Iterator[None]:
        """Replace what a layer's experts module computes; does nothing in a dense layer."""
        if layer not in self._experts:
            yield
            return
        module = self._experts[layer][1]
        module.forward = function
        try:
            yield
        finally:
            del module.forward

    @contextmanager
    def _hooked(self, hooks: dict[str, Callable[..., None]]) -> Iterator[None]:
        handles = [self.module(name).register_forward_pre_hook(hook) for name, hook in hooks.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _instead(rows: Tensor, hidden: Tensor, *arguments: Any, **named: Any) -> Tensor:
    return rows


def _hand_on(hidden: Tensor, *arguments: Any, **named: Any) -> Tensor:
    return hidden


def _nothing(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return torch.zeros_like(hidden)


def _batches(text: Text) -> list[_Batch]:
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for sequence in text.sequences:
        by_length.setdefault(len(sequence), []).append(sequence)
    batches: list[_Batch] = []
    start = 0
    for length, sequences in sorted(by_length.items(), reverse=True):
        together = max(1, _BATCH_TOKENS // length)
        for first in range(0, len(sequences), together):
            ids = torch.tensor(sequences[first : first + together])
            batches.append(_Batch(slice(start, start + ids.numel()), ids))
            start += ids.numel()
    return batches


def _held_out_rows(text: Text, batches: Sequence[_Batch]) -> Tensor:
    """Which rows are held out. Sequences were sorted by length, stably, so the marks are sorted alike."""
    order = sorted(range(len(text.sequences)), key=lambda number: -len(text.sequences[number]))
    marks = [torch.full((len(text.sequences[number]),), text.held_out[number]) for number in order]
    rows = torch.cat(marks)
    assert len(rows) == batches[-1].rows.stop
    return rows


def _routing(chosen: Tensor, weights: Tensor, experts: int) -> Routing:
    """Rows and weights by expert; ids outside 0..experts-1 mean "no expert"."""
    top_k = chosen.shape[1]
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat[(flat >= 0) & (flat < experts)], minlength=experts).tolist()
    start = int((flat < 0).sum())
    rows: list[Tensor] = []
    own: list[Tensor] = []
    for count in counts:
        places = order[start : start + count]
        rows.append(places // top_k)
        own.append(weights.reshape(-1)[places])
        start += count
    return Routing(tuple(rows), tuple(own))
