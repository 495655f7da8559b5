"""What quantization and placement cost: a model as it runs against the unquantized one, on text.

Several candidates share one pass of the reference: it is the slowest and its logits are too large to keep.
Documents are cut into stretches of a fixed length that never cross a border; each is one sequence, and every
token after the first is predicted. The intervals come from resampling documents, since tokens of one document
are not independent (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ktplan.errors import BadInput
from ktplan.profile.corpus import Corpus
from ktplan.profile.recorder import Encode, choose_passages
from ktplan.progress import SILENT, Progress
from ktplan.runtime.moe import PREFILL, RouteCounters

SEED = 42
_RESAMPLES = 2000
_INTERVAL = 95.0  # percent

Floats = npt.NDArray[np.float64]
Logits = Callable[[Sequence[int]], torch.Tensor]  # ids [T] to float32 [T, V]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tokens with its 95 % interval from resampled documents; None with a single document."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Figures for some text, in nats a token; the last three need a reference."""

    tokens: int  # predicted
    documents: int
    loss: Estimate
    loss_change: Estimate | None  # against the reference, token by token
    kl: Estimate | None  # KL(reference || this model)
    agreement: Estimate | None  # share of tokens where both find the same token likeliest

    @property
    def perplexity(self) -> Estimate:
        return _exponential(self.loss)

    def to_dict(self) -> dict[str, Any]:
        """Flat figures, their intervals beside them."""
        figures = {
            "loss": self.loss, "perplexity": self.perplexity, "loss_change": self.loss_change, "kl": self.kl,
            "top1_agreement": self.agreement,
        }  # fmt: skip
        intervals = {name: [f.low, f.high] for name, f in figures.items() if f and f.low is not None}
        values = {name: f.value if f else None for name, f in figures.items()}
        return {"tokens": self.tokens, "documents": self.documents, **values, "intervals": intervals}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One model on all text, and on each file of it by name; the speed is that of whole stretches."""

    overall: Quality
    by_source: dict[str, Quality]
    tokens_per_s: float
    gpu_hit_rate: float | None

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.overall.to_dict(),
            "by_source": {name: quality.to_dict() for name, quality in self.by_source.items()},
            "tokens_per_s": self.tokens_per_s,
            "gpu_hit_rate": self.gpu_hit_rate,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model to judge: from the ids of one sequence [T] to float32 logits [T, V], and what counts its routes."""

    logits: Logits
    counters: RouteCounters | None = None


def evaluate(
    corpus: Corpus,
    *,
    encode: Encode,
    candidates: Sequence[Candidate],
    reference: Logits | None = None,
    chunk: int = 256,
    max_tokens: int | None = None,
    progress: Progress = SILENT,
) -> tuple[Measured | None, list[Measured]]:
    """Run text through the reference, when given, and every candidate: figures of the one, then of the others.

    Raises BadInput for text in which nothing can be predicted.
    """
    passages = choose_passages(corpus.documents, encode, chunk, max_tokens, progress)
    models = [candidate.logits for candidate in candidates]
    tallies = [_Tally() for _ in candidates]
    reference_tally = _Tally()
    for candidate in candidates:
        if candidate.counters:
            candidate.counters.clear()
            candidate.counters.phase = PREFILL
    with progress.task("evaluating", sum(len(p.tokens) for p in passages), "tokens") as task:
        for passage in passages:
            ids, first = [*passage.prefix, *passage.tokens.tolist()], max(1, len(passage.prefix))
            theirs = reference_tally.timed(reference, ids) if reference else None
            if theirs is not None:
                reference_tally.add(passage.document, _compare(ids, first, theirs, None))
            for logits, tally in zip(models, tallies, strict=True):
                tally.add(passage.document, _compare(ids, first, tally.timed(logits, ids), theirs))
            task.advance(len(passage.tokens))
    against = reference is not None
    measured = [
        tally.measured(corpus, candidate.counters, against)
        for candidate, tally in zip(candidates, tallies, strict=True)
    ]
    return reference_tally.measured(corpus, None, False) if against else None, measured


class _Tally:
    """Sums of one model by document, and the time it took."""

    def __init__(self) -> None:
        self._sums: dict[int, Floats] = {}
        self._seconds, self._tokens = 0.0, 0

    def timed(self, logits: Logits, ids: Sequence[int]) -> torch.Tensor:
        started = time.perf_counter()
        found = logits(ids)
        self._seconds += time.perf_counter() - started
        self._tokens += len(ids)
        return found

    def add(self, document: int, row: Floats) -> None:
        self._sums[document] = self._sums.get(document, np.zeros(len(row))) + row

    def measured(self, corpus: Corpus, counters: RouteCounters | None, against: bool) -> Measured:
        sources: dict[str, list[Floats]] = {}
        for document, row in self._sums.items():
            if row[0]:
                sources.setdefault(corpus.documents[document].source, []).append(row)
        if not sources:
            raise BadInput("the texts are too short: no token follows another", hint="give longer texts")
        return Measured(
            overall=_quality([row for rows in sources.values() for row in rows], against),
            by_source={name: _quality(rows, against) for name, rows in sources.items()},
            tokens_per_s=self._tokens / self._seconds,
            gpu_hit_rate=counters.hit_rate(PREFILL) if counters else None,
        )


def _compare(ids: Sequence[int], first: int, ours: torch.Tensor, theirs: torch.Tensor | None) -> Floats:
    """Sums over the predictions of ids[first:]: how many, loss, change of loss, KL, agreements."""
    targets = torch.tensor(ids[first:], dtype=torch.int64)[:, None]
    log_ours = ours[first - 1 : -1].float().log_softmax(-1)
    row = np.zeros(5)
    row[0] = len(targets)
    row[1] = -float(log_ours.gather(1, targets).double().sum())
    if theirs is not None:
        log_theirs = theirs[first - 1 : -1].float().log_softmax(-1)
        row[2] = row[1] + float(log_theirs.gather(1, targets).double().sum())
        row[3] = float((log_theirs.exp() * (log_theirs - log_ours)).double().sum())
        row[4] = int((log_theirs.argmax(-1) == log_ours.argmax(-1)).sum())
    return row


def _quality(rows: list[Floats], against: bool) -> Quality:
    table = np.stack(rows)
    loss, change, kl, agreement = (_estimate(table, column) for column in range(1, 5))
    return Quality(
        tokens=int(table[:, 0].sum()),
        documents=len(rows),
        loss=loss,
        loss_change=change if against else None,
        kl=kl if against else None,
        agreement=agreement if against else None,
    )


def _estimate(table: Floats, column: int) -> Estimate:
    """The ratio of sums, and its spread when whole documents are drawn again with replacement."""
    value = float(table[:, column].sum() / table[:, 0].sum())
    documents = len(table)
    if documents < 2:
        return Estimate(value=value, low=None, high=None)
    generator = np.random.default_rng(SEED)
    draws = generator.multinomial(documents, np.full(documents, 1 / documents), size=_RESAMPLES)
    tokens = draws @ table[:, 0]
    means = (draws @ table[:, column])[tokens > 0] / tokens[tokens > 0]
    low, high = np.percentile(means, [(100 - _INTERVAL) / 2, (100 + _INTERVAL) / 2])
    return Estimate(value=value, low=float(low), high=float(high))


def _exponential(loss: Estimate) -> Estimate:
    return Estimate(
        value=math.exp(loss.value),
        low=None if loss.low is None else math.exp(loss.low),
        high=None if loss.high is None else math.exp(loss.high),
    )


def model_logits(model: Any) -> Logits:
    """A network as a function from the ids of one sequence [T] to float32 logits [T, V] on the CPU."""
    device = model.get_input_embeddings().weight.device

    def logits(ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            inputs = torch.tensor([list(ids)], device=device)
            found: torch.Tensor = model(input_ids=inputs, use_cache=False).logits[0]
            return found.to("cpu", torch.float32)

    return logits
