"""Counts equal what transformers itself routes; padding and special tokens have no part in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktplan import network
from ktplan.errors import BadInput, BadUsage, KtplanError
from ktplan.model import read_spec
from ktplan.profile import Corpus, Document
from ktplan.profile.recorder import NOBODY, Encoded, Recorder, choose_passages, record

TEXTS = (
    "The quick brown fox",
    "def f(x):\n    return x + 1\n" * 9,
    "Call me Ishmael. Some years ago",
    "1 + 1 = 2",
)


@pytest.fixture(scope="module")
def whole(tiny: Path) -> Any:
    torch.set_num_threads(1)
    return network.load_whole(tiny, "float32")


@pytest.fixture(scope="module")
def tokens(tiny: Path) -> list[list[int]]:
    tokenizer = network.tokenizer(tiny)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def routed_by_transformers(whole: Any, ids: list[int], skip: int = 0) -> np.ndarray:
    """int64 [layers, experts] of one sequence, from the router logits that the model returns."""
    with torch.inference_mode():
        logits = whole(
            input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False
        ).router_logits
    rows = []
    for layer in logits:
        chosen = layer.reshape(len(ids), -1).float().softmax(-1).topk(2).indices[skip:]
        rows.append(np.bincount(chosen.flatten().numpy(), minlength=16))
    return np.stack(rows)


def forward_of(whole: Any) -> Callable[[Any], object]:
    def forward(ids: Any) -> object:
        with torch.inference_mode():
            return whole.base_model(input_ids=torch.from_numpy(ids), use_cache=False)

    return forward


def corpus_of(texts: tuple[str, ...]) -> Corpus:
    found = tuple(Document(f"d{n}", text, f"{n % 2}.jsonl") for n, text in enumerate(texts))
    return Corpus(documents=found, skipped=(), files=())


def encoder(tokens: list[list[int]], prefix: tuple[int, ...] = ()) -> Callable[[str], Encoded]:
    return lambda text: Encoded(prefix, np.array(tokens[TEXTS.index(text)], np.int64))


def test_counts_are_those_of_the_models_own_router(tiny: Path, whole: Any, tokens: list[list[int]]) -> None:
    profile = record(
        read_spec(tiny),
        corpus_of(TEXTS),
        modules=network.experts_modules(whole),
        encode=encoder(tokens),
        forward=forward_of(whole),
    )
    assert profile.tokens.tolist() == [len(ids) for ids in tokens]
    for document, ids in enumerate(tokens):
        assert np.array_equal(profile.counts[document], routed_by_transformers(whole, ids)), TEXTS[document]
    assert profile.layers == (0, 1, 2, 3) and profile.document_ids == ("d0", "d1", "d2", "d3")


def test_special_tokens_of_the_tokenizer_are_seen_but_not_counted(
    tiny: Path, whole: Any, tokens: list[list[int]]
) -> None:
    profile = record(
        read_spec(tiny),
        corpus_of(TEXTS[:1]),
        modules=network.experts_modules(whole),
        encode=encoder(tokens, prefix=(0,)),
        forward=forward_of(whole),
    )
    assert profile.token_count == len(tokens[0])
    assert np.array_equal(profile.counts[0], routed_by_transformers(whole, [0, *tokens[0]], skip=1))


def test_long_documents_are_cut_into_sequences_of_their_own(
    tiny: Path, whole: Any, tokens: list[list[int]]
) -> None:
    profile = record(
        read_spec(tiny),
        corpus_of(TEXTS[1:2]),
        modules=network.experts_modules(whole),
        encode=encoder(tokens),
        forward=forward_of(whole),
        chunk=20,
    )
    pieces = [tokens[1][start : start + 20] for start in range(0, len(tokens[1]), 20)]
    assert len(pieces) > 2
    assert np.array_equal(profile.counts[0], sum(routed_by_transformers(whole, piece) for piece in pieces))


def test_equal_lengths_run_together_and_stay_apart_in_the_counts(
    tiny: Path, whole: Any, tokens: list[list[int]]
) -> None:
    shapes = []

    def forward(ids: Any) -> object:
        shapes.append(ids.shape)
        return forward_of(whole)(ids)

    length = min(map(len, tokens))
    profile = record(
        read_spec(tiny),
        corpus_of(TEXTS),
        modules=network.experts_modules(whole),
        encode=lambda text: Encoded((), np.array(tokens[TEXTS.index(text)][:length], np.int64)),
        forward=forward,
    )
    assert shapes == [(len(TEXTS), length)]
    for document, ids in enumerate(tokens):
        assert np.array_equal(profile.counts[document], routed_by_transformers(whole, ids[:length]))


def test_padding_of_a_batch_never_counts(whole: Any, tokens: list[list[int]]) -> None:
    length = max(map(len, tokens))
    batch = torch.zeros((len(tokens), length), dtype=torch.int64)
    mask = torch.zeros_like(batch)
    owners = np.full((len(tokens), length), NOBODY)
    for row, ids in enumerate(tokens):
        batch[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
        owners[row, : len(ids)] = row
    recorder = Recorder(network.experts_modules(whole), experts=16)
    with recorder.attached(), torch.inference_mode():
        counts = recorder.count(
            owners, lambda: whole.base_model(input_ids=batch, attention_mask=mask, use_cache=False)
        )
    for document, ids in enumerate(tokens):
        assert np.array_equal(counts[document], routed_by_transformers(whole, ids))


def test_hooks_are_gone_afterwards(whole: Any) -> None:
    modules = network.experts_modules(whole)
    with Recorder(modules, experts=16).attached():
        assert all(module._forward_pre_hooks for _, module in modules.values())
    assert not any(module._forward_pre_hooks for _, module in modules.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "olmoe"])
def test_every_family_can_be_recorded(family_checkpoint: Callable[..., Path], family: str) -> None:
    path = family_checkpoint(family)
    spec = read_spec(path)
    model = network.load_whole(path, "float32")
    corpus = Corpus(documents=(Document("d", "x", "a"), Document("e", "y", "a")), skipped=(), files=())
    ids = {"x": np.arange(40, dtype=np.int64), "y": np.arange(7, dtype=np.int64)}
    profile = record(
        spec,
        corpus,
        modules=network.experts_modules(model),
        encode=lambda text: Encoded((), ids[text]),
        forward=forward_of(model),
        chunk=16,
    )
    assert profile.layers == spec.moe_layers
    assert (profile.counts.sum(axis=2) == profile.tokens[:, None] * spec.top_k).all()


def test_files_share_a_limit_and_documents_take_turns() -> None:
    texts = {
        f"{source}{n}": np.arange(length) for source, length in (("a", 100), ("b", 10)) for n in range(6)
    }
    found = [Document(name, name, name[0]) for name in texts]
    passages = choose_passages(found, lambda text: Encoded((), texts[text]), 20, 160)
    given = {name: 0 for name in texts}
    for passage in passages:
        given[found[passage.document].id] += len(passage.tokens)
    assert sum(given.values()) == 160
    # File b has 60 tokens only; file a gives the rest, a stretch of each document before a second one of any.
    assert [given[f"b{n}"] for n in range(6)] == [10] * 6
    assert [given[f"a{n}"] for n in range(6)] == [20, 20, 20, 20, 20, 0]


def test_a_limit_is_hit_to_the_token() -> None:
    found = [Document("d", "d", "s")]
    passages = choose_passages(found, lambda text: Encoded((9,), np.arange(100)), 16, 37)
    assert [len(passage.tokens) for passage in passages] == [15, 15, 7]
    assert [passage.start for passage in passages] == [0, 15, 30]


def test_settings_out_of_range_and_texts_without_tokens_are_refused(tiny: Path, whole: Any) -> None:
    def attempt(**more: Any) -> None:
        given: dict[str, Any] = {"encode": lambda text: Encoded((), np.arange(3)), **more}
        record(
            read_spec(tiny),
            corpus_of(TEXTS),
            modules=network.experts_modules(whole),
            forward=forward_of(whole),
            **given,
        )

    with pytest.raises(BadUsage, match="out of range"):
        attempt(chunk=0)
    with pytest.raises(BadUsage, match="out of range"):
        attempt(chunk=1025)
    with pytest.raises(BadUsage, match="no amount"):
        attempt(max_tokens=0)
    with pytest.raises(BadUsage, match="no room"):
        attempt(chunk=1, encode=lambda text: Encoded((1,), np.arange(3)))
    with pytest.raises(BadInput, match="no token at all"):
        attempt(encode=lambda text: Encoded((), np.arange(0)))


def test_a_model_that_cannot_be_watched_is_told(whole: Any) -> None:
    modules = network.experts_modules(whole)
    recorder = Recorder(modules, experts=16)
    with recorder.attached(), torch.inference_mode():
        with pytest.raises(KtplanError, match="never called"):
            recorder.count(np.zeros(3, np.int64), lambda: None)
        with pytest.raises(KtplanError, match="saw 4 tokens, 3 were given"):
            recorder.count(np.zeros(3, np.int64), lambda: forward_of(whole)(np.arange(4)[None]))
