"""Phases, gate ranks and traces: what is recorded, saved, split and merged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktplan import network
from ktplan.cli.output import Output
from ktplan.cli.profile_network import load
from ktplan.errors import BadInput, BadUsage
from ktplan.model import read_spec
from ktplan.profile import ActivationProfile, Corpus, Document
from ktplan.profile.merge import merge
from ktplan.profile.recorder import Encoded, Wishes, record

TEXTS = {"a": "The quick brown fox jumps over the lazy dog", "b": "def f(x):\n    return x + 1\n" * 4}


@pytest.fixture(scope="module")
def recorded(tiny: Path) -> ActivationProfile:
    return run(tiny, Wishes(chunk=24, generate=6, trace_tokens=10_000))


def run(tiny: Path, wishes: Wishes, **more: Any) -> ActivationProfile:
    torch.set_num_threads(1)
    net = load(tiny, None, "float32", Output(quiet=True))
    tokenizer = network.tokenizer(tiny)
    corpus = Corpus(
        documents=tuple(Document(name, text, f"{name}.txt") for name, text in TEXTS.items()),
        skipped=(),
        files=(),
    )
    return record(
        read_spec(tiny), corpus, modules=net.modules, forward=net.forward, decoder=net.decoder, wishes=wishes,
        encode=lambda text: Encoded((), np.array(tokenizer(text)["input_ids"], np.int64)), **more,
    )  # fmt: skip


def test_generated_tokens_are_the_models_own_greedy_ones(tiny: Path, recorded: ActivationProfile) -> None:
    model = network.load_whole(tiny, "float32")
    ids = network.tokenizer(tiny)(TEXTS["b"])["input_ids"][:24]
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        logits = model(input_ids=whole, output_router_logits=True, use_cache=False).router_logits
    wanted = [
        np.bincount(layer.reshape(30, -1).softmax(-1).topk(2).indices[24:].flatten().numpy(), minlength=16)
        for layer in logits
    ]
    assert recorded.decode_counts is not None and recorded.decode_tokens is not None
    assert np.array_equal(recorded.decode_counts[1], np.stack(wanted)) and recorded.decode_tokens[1] == 6


def test_ranks_trace_and_counts_agree(recorded: ActivationProfile) -> None:
    trace, ranked = recorded.trace, recorded.ranked
    assert trace is not None and ranked is not None and trace.ranked
    assert trace.tokens == recorded.token_count
    for document in range(recorded.documents):
        for phase in (0, 1):
            own = trace.of([document], phase)
            for layer in range(4):
                for rank in range(2):
                    seen = np.bincount(own.ids[layer, :, rank], minlength=16)
                    assert np.array_equal(seen, ranked[document, phase, layer, :, rank])


def test_phases_split_and_come_back(recorded: ActivationProfile, tmp_path: Path) -> None:
    prompt, generated = recorded.phase("prefill"), recorded.phase("decode")
    assert prompt is not None and generated is not None
    assert prompt.token_count + generated.token_count == recorded.token_count
    assert np.array_equal(prompt.total() + generated.total(), recorded.total())
    recorded.save(tmp_path / "p.safetensors")
    back = ActivationProfile.load(tmp_path / "p.safetensors")
    assert back.to_bytes() == recorded.to_bytes()
    assert back.trace is not None and recorded.trace is not None
    assert np.array_equal(back.trace.ids, recorded.trace.ids)
    assert recorded.planning() is recorded  # a dozen generated tokens rank nothing


def test_special_tokens_inside_a_text_never_count(tiny: Path) -> None:
    first = network.tokenizer(tiny)(TEXTS["a"])["input_ids"][0]
    plain = run(tiny, Wishes(chunk=512))
    without = run(tiny, Wishes(chunk=512, special_ids=frozenset([first])))
    assert plain.token_count - without.token_count >= 1
    assert without.counts.sum() == without.token_count * 2 * 4


def test_interrupted_work_goes_on_and_ends_in_the_same_bytes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktplan.profile.tally._EVERY_S", 0.0)
    wishes = Wishes(chunk=10, generate=2, trace_tokens=1000)
    unfinished = tmp_path / "p.unfinished"
    wanted = run(tiny, wishes)

    class Stop:
        def __init__(self) -> None:
            self.left = 2

        def task(self, label: str, total: Any, unit: str = "") -> Any:
            from contextlib import nullcontext

            return nullcontext(self)

        def advance(self, amount: float = 1) -> None:
            if unfinished.is_file():
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt

        def note(self, text: str) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        run(tiny, wishes, checkpoint=unfinished, progress=Stop())
    assert unfinished.is_file()
    again = run(tiny, wishes, checkpoint=unfinished)
    assert again.to_bytes() == wanted.to_bytes() and not unfinished.exists()
    unfinished.write_bytes(b"damaged")
    assert run(tiny, wishes, checkpoint=unfinished).to_bytes() == wanted.to_bytes()


def test_contradictions_are_found(recorded: ActivationProfile) -> None:
    assert recorded.ranked is not None and recorded.decode_counts is not None and recorded.trace is not None
    for change in (
        {"ranked": recorded.ranked + np.uint32(1)},
        {"decode_counts": recorded.counts + 1},
        {"decode_counts": None},
        {"trace": recorded.trace._replace(owners=recorded.trace.owners + 9)},
        {"trace": recorded.trace._replace(ids=recorded.trace.ids[:2])},
        {"datasets": ("one",)},
    ):
        with pytest.raises(BadInput, match="contradicts itself"):
            replace(recorded, **change)  # type: ignore[arg-type]


def test_merging_weighs_and_names(recorded: ActivationProfile) -> None:
    both = merge([recorded, recorded], weights=[2, 0.5], names=["x", "y"])
    assert both.token_count == 5 * recorded.token_count and both.documents == 4
    assert both.dataset_of == ("x", "x", "y", "y") and both.trace is None
    even = merge([recorded, recorded.phase("prefill") or recorded])
    assert even.trace is not None and even.decode_token_count == recorded.decode_token_count
    with pytest.raises(BadUsage, match="positive"):
        merge([recorded, recorded], weights=[1, 0])
    with pytest.raises(BadInput, match="different models"):
        merge([recorded, replace(recorded, fingerprint="sha256:" + "0" * 64)])


def test_more_than_the_context_is_refused(tiny: Path) -> None:
    with pytest.raises(BadUsage, match="do not fit"):
        Wishes(chunk=1000, generate=100).check(read_spec(tiny))
