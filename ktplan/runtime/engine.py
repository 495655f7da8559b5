"""Prompt in, text out: prefill, decode, a cache that follow-up prompts reuse, and figures about the run.

The engine knows tokens and text; where experts live and how they are computed was settled by the loader.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from ktplan import network
from ktplan.artifact import read_json_object
from ktplan.errors import BadInput, BadUsage, DoesNotFit
from ktplan.progress import SILENT, Progress
from ktplan.rules import Rules
from ktplan.runtime.evaluate import model_logits
from ktplan.runtime.loader import Network, build, check_memory, open_sources, prepare, rules_of_plan
from ktplan.runtime.moe import DECODE, PREFILL
from ktplan.runtime.sampling import Sampler, Sampling
from ktplan.runtime.text import StopStrings, TextStream

if TYPE_CHECKING:
    from ktplan.placement import PlacementPlan

_PREFILL_CHUNK = 512  # tokens at once: bounds the memory of a long prompt, is enough to fill the kernels


class PromptTooLong(DoesNotFit):
    """The prompt does not fit into the model's context; it is never cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """Figures of one generation; None where nothing was measured."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, kept from the last generation
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    prefill_hit_rate: float | None  # share of expert routes that the GPU served
    decode_hit_rate: float | None

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens computed a second."""
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else None


class Engine:
    """A loaded model that writes text. One generation at a time."""

    def __init__(self, loaded: Network, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        self.network, self.tokenizer, self.stop_ids = loaded, tokenizer, stop_ids
        self._model = loaded.model
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"  # transformers < 5.24
        self._input_device = self._model.get_input_embeddings().weight.device
        self._cache: Any = None
        self._cached: list[int] = []

    @property
    def context(self) -> int:
        """The longest sequence, prompt and answer together, in tokens."""
        return self.network.source.spec.context

    def encode(self, text: str) -> list[int]:
        """Ids of a text to continue, after the special tokens that the tokenizer puts before a text.

        Raises BadUsage for text that is not Unicode, e.g. bytes of a file in another encoding.
        """
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise BadUsage(
                f"the text is not valid UTF-8 at character {fault.start}", hint="convert it to UTF-8 first"
            ) from None
        encoded = network.text_encoder(self.tokenizer)(text)
        return [*encoded.prefix, *encoded.tokens.tolist()]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [T, V] on the CPU: the prediction after every token of one sequence, without a cache."""
        self._check_ids(ids)
        return model_logits(self._model)(ids)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Begin a generation; iterate over it for text. Raises PromptTooLong, a prompt is never cut.

        It ends at the model's own end token, before any text of `stop`, or at a limit: `max_new_tokens`
        or the model's context.
        """
        self._check_ids(prompt)
        if len(prompt) >= self.context:
            raise PromptTooLong(
                f"the prompt has {len(prompt):,} tokens, the context of this model is {self.context:,} "
                "for prompt and answer together",
                hint="shorten the prompt",
            )
        if max_new_tokens < 1:
            raise BadUsage(f"{max_new_tokens} new tokens is nothing to do", hint="ask for 1 or more")
        limit = min(max_new_tokens, self.context - len(prompt))
        return Generation(self, list(prompt), limit, Sampler(sampling or Sampling()), StopStrings(stop))

    def _check_ids(self, ids: Sequence[int]) -> None:
        vocab = self._model.get_input_embeddings().weight.shape[0]
        if not ids:
            raise BadUsage("the prompt is empty", hint="give a text")
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise BadUsage(
                f"token id {max(ids)} is outside the model's vocabulary of {vocab:,}",
                hint="the tokenizer belongs to another model",
            )

    def _step(self, ids: Sequence[int]) -> torch.Tensor:
        """Feed tokens after those in the cache; logits [V] after the last."""
        inputs = torch.tensor([list(ids)], device=self._input_device)
        arguments = {self._cache_argument: self._cache, "use_cache": True, "logits_to_keep": 1}
        try:
            logits: torch.Tensor = self._model(input_ids=inputs, **arguments).logits[0, -1]
        except BaseException:  # interrupted: some layers hold the new tokens, others do not
            self._cache, self._cached = None, []
            raise
        self._cached += ids
        return logits

    def _reuse(self, prompt: list[int]) -> int:
        """Cut the cache back to what it shares with `prompt`; returns how many tokens that is."""
        shared = 0
        for old, new in zip(self._cached, prompt[:-1], strict=False):
            if old != new:
                break
            shared += 1
        surplus = len(self._cached) - shared
        if self._cache is None or (surplus and any(getattr(self._cache, "is_sliding", ()))):
            self._cache, self._cached = DynamicCache(config=self._model.config), []
            return 0
        if surplus:
            self._cache.crop(-surplus)  # negative: how many tokens to remove
            del self._cached[shared:]
        return shared


class Generation:
    """Text pieces as they become certain; afterwards the tokens, the reason of the end, and figures."""

    def __init__(
        self, engine: Engine, prompt: list[int], limit: int, sampler: Sampler, stop: StopStrings
    ) -> None:
        self._engine, self._prompt, self._limit = engine, prompt, limit
        self._sampler, self._stop = sampler, stop
        self._cached = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self.tokens: list[int] = []  # those chosen, the ending one included
        self.finish_reason: str | None = None  # "stop": the model ended; "length": a limit was reached

    def __iter__(self) -> Iterator[str]:
        stream = TextStream(self._engine.tokenizer)
        for token in self._tokens():
            if piece := self._stop.push(stream.push(token)):
                yield piece
            if self._stop.found:
                self.finish_reason = "stop"
                return
        if piece := self._stop.push(stream.flush()) + self._stop.flush():
            yield piece

    @property
    def stats(self) -> RunStats:
        counters = self._engine.network.counters
        return RunStats(
            prompt_tokens=len(self._prompt),
            cached_tokens=self._cached,
            new_tokens=len(self.tokens),
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            prefill_hit_rate=counters.hit_rate(PREFILL),
            decode_hit_rate=counters.hit_rate(DECODE),
        )

    def _tokens(self) -> Iterator[int]:
        """Tokens to show; the one that ends the text is recorded, not shown."""
        self._engine.network.counters.clear()
        token = self._prefill()
        while True:
            self.tokens.append(token)
            if token in self._engine.stop_ids:
                self.finish_reason = "stop"
                return
            yield token
            if len(self.tokens) >= self._limit:
                self.finish_reason = "length"
                return
            token = self._decode(token)

    def _prefill(self) -> int:
        engine, started = self._engine, time.perf_counter()
        engine.network.counters.phase = PREFILL
        with torch.inference_mode():
            self._cached = engine._reuse(self._prompt)
            rest = self._prompt[self._cached :]
            for start in range(0, len(rest), _PREFILL_CHUNK):
                logits = engine._step(rest[start : start + _PREFILL_CHUNK])
            token = self._sampler(logits, self._prompt)
        self._prefill_seconds = time.perf_counter() - started
        return token

    def _decode(self, token: int) -> int:
        engine, started = self._engine, time.perf_counter()
        engine.network.counters.phase = DECODE
        with torch.inference_mode():
            following = self._sampler(engine._step([token]), [*self._prompt, *self.tokens])
        self._decode_seconds += time.perf_counter() - started
        return following


def load(
    model: Path,
    *,
    store: Path | None = None,
    gpu_weights: Path | None = None,
    rules: Rules | None = None,
    plan: PlacementPlan | None = None,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    activation_bits: int = 16,
    gpu_memory: int | None = None,
    progress: Progress = SILENT,
) -> Engine:
    """Load a model with its experts placed by `rules` or `plan`.

    Without either all experts are on the CPU from the `store`, or on `device` when there is no store.
    `threads` bounds torch and the CPU engine. Raises BadInput, DoesNotFit, MachineLacks as the parts do.
    """
    if plan is not None and rules is not None:
        raise BadUsage("a plan and rules are both given", hint="leave one out")
    if plan is not None:
        rules = rules_of_plan(plan, model)
    sources = open_sources(model, store, gpu_weights)
    prepared = check_memory(prepare(sources, rules=rules, dtype=dtype, device=device), gpu_memory)
    return start(build(prepared, threads=threads, activation_bits=activation_bits, progress=progress))


def start(loaded: Network, tokenizer: Any = None) -> Engine:
    """An engine over a loaded network, with the model's own tokenizer and stop tokens."""
    tokenizer = tokenizer or network.tokenizer(loaded.source.root)
    return Engine(loaded, tokenizer, stop_ids(loaded.source.root, loaded.model.config, tokenizer))


def stop_ids(model: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text, from generation_config.json, config.json and the tokenizer together."""
    found: set[int] = set()
    file = model / "generation_config.json"
    written = read_json_object(file).get("eos_token_id") if file.is_file() else None
    for ids in (written, getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(isinstance(number, int) for number in listed):
            raise BadInput(
                f"{file}: eos_token_id is {ids!r}, a token id or a list of them is expected",
                hint="correct it",
            )
        found.update(listed)
    return frozenset(found)
