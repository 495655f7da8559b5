"""Figures of quality against hand-made predictions, and INT8 on held-out text against its bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ktplan import network
from ktplan.errors import BadInput
from ktplan.model.embedded import corpus_files
from ktplan.profile import read_corpus
from ktplan.profile.corpus import Corpus, Document
from ktplan.profile.recorder import Encoded
from ktplan.runtime.engine import load
from ktplan.runtime.evaluate import Candidate, Logits, Measured, evaluate, model_logits

VOCABULARY = 4


def corpus(*texts: str, sources: Sequence[str] = ()) -> Corpus:
    named = sources or ["a"] * len(texts)
    found = tuple(Document(str(n), text, named[n]) for n, text in enumerate(texts))
    return Corpus(documents=found, skipped=(), files=())


def digits(text: str) -> Encoded:
    return Encoded((), np.array([int(c) for c in text], dtype=np.int64))


def uniform(ids: Sequence[int]) -> torch.Tensor:
    return torch.zeros(len(ids), VOCABULARY)


def sure_of_repetition(ids: Sequence[int]) -> torch.Tensor:
    """Gives three quarters to the token just seen."""
    logits = torch.full((len(ids), VOCABULARY), math.log(1 / 12))
    logits[torch.arange(len(ids)), torch.tensor(ids)] = math.log(3 / 4)
    return logits


def both(
    texts: Corpus, ours: Logits, theirs: Logits | None = None, chunk: int = 8
) -> tuple[Measured | None, Measured]:
    reference, found = evaluate(
        texts, encode=digits, candidates=[Candidate(logits=ours)], reference=theirs, chunk=chunk
    )
    return reference, found[0]


def measured(texts: Corpus, ours: Logits, theirs: Logits | None = None, chunk: int = 8) -> Measured:
    return both(texts, ours, theirs, chunk)[1]


def test_loss_perplexity_kl_and_agreement_by_hand() -> None:
    reference, candidate = both(corpus("00", "11", "12"), uniform, sure_of_repetition)
    found = candidate.overall
    assert (found.tokens, found.documents) == (3, 3)
    assert found.loss.value == pytest.approx(math.log(4))
    assert found.perplexity.value == pytest.approx(4)
    assert reference is not None and found.loss_change is not None
    assert found.kl is not None and found.agreement is not None
    expected = (2 * math.log(4 / 3) + math.log(12)) / 3
    assert reference.overall.loss.value == pytest.approx(expected)
    assert reference.overall.kl is None
    assert found.loss_change.value == pytest.approx(math.log(4) - expected)
    assert found.kl.value == pytest.approx(0.75 * math.log(3) + 0.25 * math.log(1 / 3))
    assert found.agreement.value == pytest.approx(1 / 3)  # ties of the uniform model go to token 0


def test_candidates_share_one_pass_of_the_reference() -> None:
    passes = 0

    def counted(ids: Sequence[int]) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return uniform(ids)

    texts = corpus("0123", "0000")
    models = [Candidate(logits=uniform), Candidate(logits=sure_of_repetition)]
    reference, found = evaluate(texts, encode=digits, candidates=models, reference=counted)
    assert passes == 2
    assert reference is not None and reference.overall.loss == found[0].overall.loss
    assert [one.overall.loss for one in found] == [measured(texts, m.logits).overall.loss for m in models]


def test_a_model_agrees_with_itself() -> None:
    found = measured(corpus("0123", "3210"), sure_of_repetition, sure_of_repetition).overall
    assert found.kl is not None and found.agreement is not None
    assert found.kl.value == pytest.approx(0, abs=1e-9)
    assert found.agreement.value == 1.0


def test_nothing_is_predicted_across_documents_or_stretches() -> None:
    seen: list[list[int]] = []

    def watching(ids: Sequence[int]) -> torch.Tensor:
        seen.append(list(ids))
        return uniform(ids)

    found = measured(corpus("012301", "22"), watching, chunk=4)
    assert sorted(seen) == [[0, 1], [0, 1, 2, 3], [2, 2]]
    assert found.overall.tokens == 3 + 1 + 1


def test_files_are_told_apart() -> None:
    found = measured(corpus("00", "11", "12", sources=["a", "a", "b"]), sure_of_repetition)
    assert found.by_source["a"].loss.value == pytest.approx(math.log(4 / 3))
    assert found.by_source["b"].loss.value == pytest.approx(math.log(12))
    assert found.by_source["b"].loss.low is None
    assert found.overall.kl is None and both(corpus("00"), uniform)[0] is None


def test_the_interval_covers_the_spread_of_documents() -> None:
    same = measured(corpus(*["00"] * 30), sure_of_repetition).overall.loss
    assert same.low == pytest.approx(same.value) and same.high == pytest.approx(same.value)
    mixed = measured(corpus(*["00", "01"] * 30), sure_of_repetition).overall.loss
    half_width = 1.96 * (math.log(12) - math.log(4 / 3)) / 2 / math.sqrt(60)
    assert mixed.low == pytest.approx(mixed.value - half_width, rel=0.1)
    assert mixed.high == pytest.approx(mixed.value + half_width, rel=0.1)
    assert measured(corpus(*["00", "01"] * 30), sure_of_repetition).overall.loss == mixed


def test_text_without_a_prediction_is_refused() -> None:
    with pytest.raises(BadInput, match="too short"):
        measured(corpus("0", "1"), uniform)


def test_int8_keeps_99_percent_of_the_likeliest_tokens_on_held_out_text(
    tiny: Path, store_of: Callable[..., Path]
) -> None:
    engine = load(tiny, store=store_of(tiny), dtype="float32", threads=1)
    _, [found] = evaluate(
        read_corpus(corpus_files("test")),
        encode=network.text_encoder(engine.tokenizer),
        candidates=[Candidate(logits=engine.logits, counters=engine.network.counters)],
        reference=model_logits(network.load_whole(tiny)),
        max_tokens=8000,
    )
    assert sorted(found.by_source) == [
        f"{name}.test.jsonl" for name in ("chinese", "code", "english", "maths")
    ]
    assert found.overall.agreement is not None and found.overall.kl is not None
    assert found.overall.agreement.value >= 0.99
    assert found.overall.kl.value < 0.001
    assert found.gpu_hit_rate == 0.0
