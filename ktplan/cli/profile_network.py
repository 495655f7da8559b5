"""The model that is profiled: its text, its forward pass, its next token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from ktplan import network
from ktplan.artifact import sha256_bytes, sha256_file
from ktplan.cli.output import Output
from ktplan.errors import BadInput, DoesNotFit
from ktplan.profile.recorder import Decoder, Encoded, Forward, Tokens
from ktplan.profile.rows import Messages, plain_chat
from ktplan.units import format_bytes

if TYPE_CHECKING:
    from ktplan.model import ModelSpec
    from ktplan.profile import ActivationProfile, Corpus
    from ktplan.profile.recorder import Wishes

_WIDTH: Final = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes
_MEMORY_SHARE: Final = 0.6  # of free memory that weights may take: loading and computing need room
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


class Text:
    """The model's tokenizer, loaded at first use."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._loaded: Any = None

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            self._loaded = network.tokenizer(self._model)
        return self._loaded

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that never count: padding, begin, end, and what a chat template puts between messages."""
        return frozenset(int(number) for number in self._tokenizer.all_special_ids)

    @property
    def digest(self) -> str:
        """Of the tokenizer's files."""
        files = [self._model / name for name in _TOKENIZER_FILES if (self._model / name).is_file()]
        return sha256_bytes("".join(f"{sha256_file(file)} {file.name}\n" for file in files).encode())

    def encode(self, text: str) -> Encoded:
        """See `ktplan.network.text_encoder`."""
        return network.text_encoder(self._tokenizer)(text)

    def chat(self, messages: Messages) -> str:
        """Messages through the model's own template; one after another where it has none."""
        if not getattr(self._tokenizer, "chat_template", None):
            return plain_chat(messages)
        from jinja2 import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError as fault:
            raise BadInput(
                f"the model's chat template refuses a row: {fault}", hint="mend the row, or leave it out"
            ) from None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the recorder needs of a network."""

    modules: dict[int, tuple[str, Any]]
    forward: Forward
    decoder: Callable[[], Decoder]
    how: dict[str, str]


class Way(NamedTuple):
    """How to compute: the type of expert weights, and whether one layer at a time is loaded."""

    dtype: str
    by_layer: bool


def choose_way(spec: ModelSpec, asked: str, by_layer: bool, out: Output) -> Way:
    """What to compute in, whole or layer by layer, with what is free on this machine (None is read as enough)."""
    from ktplan.hardware import available_memory

    free = available_memory()
    way = way_for(spec, asked, by_layer, free)
    if way.by_layer and not by_layer:
        out.note(
            f"the model does not fit into {format_bytes(free or 0)} of memory: one layer at a time is loaded"
        )
    elif asked == "auto" and way.dtype != "float32":
        what = "a layer" if way.by_layer else "the model"
        out.note(f"computing in {way.dtype}: {what} as float32 would not fit into {format_bytes(free or 0)}")
    return way


def way_for(spec: ModelSpec, asked: str, by_layer: bool, free: int | None) -> Way:
    """The widest type that fits, the whole model before single layers. Raises DoesNotFit where not even a layer does.

    float32 holds any stored weight exactly, so routing is the model's own; half types round every layer anew.
    """
    wanted = ("float32", spec.dtype) if asked == "auto" else (asked,)
    params = spec.dense_params + spec.expert_params
    for dtype in () if by_layer else wanted:
        if free is None or params * _WIDTH.get(dtype, 2) < _MEMORY_SHARE * free:
            return Way(dtype, False)
    experts = spec.experts * spec.params_per_expert
    dense = _WIDTH["float32"] * max(spec.dense_params // spec.layers, spec.vocab * spec.hidden)
    need = 0
    for dtype in wanted:
        need = experts * _WIDTH.get(dtype, 2) + dense
        if free is None or need < _MEMORY_SHARE * free:
            return Way(dtype, True)
    assert free is not None
    raise DoesNotFit(
        f"one layer of {spec.name} as {wanted[-1]} needs {format_bytes(need)} of memory, {format_bytes(free)} are free",
        hint="convert the experts with 'ktplan convert-cpu' and give that with --store",
    )


def load(model: Path, store: Path | None, dtype: str, out: Output) -> Loaded:
    """The network with its experts from the checkpoint or a store."""
    modules: dict[int, tuple[str, Any]]
    if store:
        from ktplan.runtime import engine

        loaded = engine.load(model, store=store, dtype=dtype, progress=out.progress()).network
        whole = loaded.model
        modules = {layer: (module.place.name, module) for layer, module in loaded.experts.items()}
        how = {"dtype": str(loaded.dtype).removeprefix("torch."), "experts": "store"}
    else:
        with out.progress().task("loading the model", None):
            whole = network.load_whole(model, dtype)
        network.fit_torch_threads(whole)
        modules = dict(network.experts_modules(whole))
        how = {"dtype": dtype, "experts": "checkpoint"}
    device = whole.get_input_embeddings().weight.device
    parameters = inspect.signature(whole.forward).parameters
    memory = "cache" if "cache" in parameters else "past_key_values"  # transformers < 5.24

    def forward(ids: Tokens) -> object:
        with torch.inference_mode():
            return whole.base_model(input_ids=torch.from_numpy(ids).to(device), use_cache=False)

    def decoder() -> Decoder:
        state: dict[str, Any] = {}

        def step(ids: Tokens) -> Tokens:
            with torch.inference_mode():
                answer = whole(
                    input_ids=torch.from_numpy(np.ascontiguousarray(ids)).to(device),
                    use_cache=True,
                    logits_to_keep=1,
                    **{memory: state.get("cache")},
                )
            state["cache"] = answer.past_key_values
            following: Tokens = answer.logits[:, -1].argmax(dim=-1).cpu().numpy()
            return following

        return step

    return Loaded(modules, forward, decoder, how)


def record(
    model: Path,
    spec: ModelSpec,
    corpus: Corpus,
    way: Way,
    store: Path | None,
    out: Output,
    *,
    text: Text,
    wishes: Wishes,
    settings: dict[str, Any],
    output: Path,
) -> ActivationProfile:
    """The routing of a corpus, by the whole model or layer by layer; unfinished work lies beside `output`."""
    from ktplan.profile import recorder

    about: dict[str, Any] = {
        "encode": text.encode,
        "wishes": wishes,
        "tokenizer": text.digest,
        "checkpoint": output.with_name(f"{output.name}.unfinished"),
        "progress": out.progress(),
    }
    if way.by_layer:
        from ktplan.model import open_safetensors
        from ktplan.runtime.by_layer import record_by_layer

        source = open_safetensors(model)
        source.spec.check_experts()
        how = {**settings, "dtype": way.dtype, "experts": "checkpoint", "by_layer": True}
        return record_by_layer(
            model,
            source,
            corpus,
            dtype=network.as_dtype(way.dtype),
            settings=how,
            folder=output.parent,
            **about,
        )
    net = load(model, store, way.dtype, out)
    return recorder.record(
        spec,
        corpus,
        modules=net.modules,
        forward=net.forward,
        decoder=net.decoder,
        settings={**settings, **net.how},
        **about,
    )
