"""Profiling layer by layer: the same counts as the whole model gives, in the memory of one layer, resumable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from ktplan import network
from ktplan.cli.profile_network import Way, way_for
from ktplan.errors import DoesNotFit
from ktplan.model import open_safetensors
from ktplan.model.embedded import corpus_files
from ktplan.profile import ActivationProfile, Corpus, read_corpus
from ktplan.profile import tally as tally_module
from ktplan.profile.recorder import Wishes, record
from ktplan.runtime.by_layer import record_by_layer


def corpus() -> Corpus:
    return read_corpus(corpus_files("profile"))


def whole(model: Path, wishes: Wishes, encode: Any) -> ActivationProfile:
    net = network.load_whole(model)

    def forward(ids: Any) -> object:
        with torch.inference_mode():
            return net.base_model(input_ids=torch.from_numpy(ids), use_cache=False)

    spec = open_safetensors(model).spec
    modules = dict(network.experts_modules(net))

    def decoder() -> Any:
        cache = DynamicCache(config=net.config)

        def step(ids: Any) -> Any:
            with torch.inference_mode():
                answer = net(
                    input_ids=torch.from_numpy(np.ascontiguousarray(ids)), cache=cache, use_cache=True
                )
            return answer.logits[:, -1].argmax(dim=-1).numpy()

        return step

    return record(
        spec, corpus(), modules=modules, encode=encode, forward=forward, decoder=decoder, wishes=wishes
    )


@pytest.fixture
def encode(tiny: Path) -> Any:
    return network.text_encoder(network.tokenizer(tiny))


def test_counts_ranks_and_trace_are_those_of_the_whole_model(tiny: Path, encode: Any) -> None:
    wishes = Wishes(max_tokens=3000, trace_tokens=2500)
    by_layer = record_by_layer(tiny, open_safetensors(tiny), corpus(), encode=encode, wishes=wishes)
    expected = whole(tiny, wishes, encode)
    assert np.array_equal(by_layer.counts, expected.counts) and by_layer.token_count == 3000
    assert by_layer.ranked is not None and expected.ranked is not None
    assert np.array_equal(by_layer.ranked, expected.ranked)
    assert by_layer.trace is not None and expected.trace is not None
    assert by_layer.trace.tokens == 2500
    for ours, theirs in zip(by_layer.trace, expected.trace, strict=True):
        assert np.array_equal(ours, theirs)


def test_generated_tokens_are_counted_apart(tiny: Path, encode: Any) -> None:
    wishes = Wishes(chunk=64, max_tokens=600, generate=3)
    by_layer = record_by_layer(tiny, open_safetensors(tiny), corpus(), encode=encode, wishes=wishes)
    expected = whole(tiny, wishes, encode)
    assert by_layer.decode_counts is not None and expected.decode_counts is not None
    assert np.array_equal(by_layer.tokens, expected.tokens)
    assert np.array_equal(by_layer.counts - by_layer.decode_counts, expected.counts - expected.decode_counts)
    # A cache rounds otherwise than a whole sequence does: a close call may fall to another expert.
    moved = np.abs(by_layer.decode_counts - expected.decode_counts).sum() / 2 / expected.decode_counts.sum()
    assert moved < 0.01


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen2_moe"])
def test_other_families_and_dense_layers(
    family: str, family_checkpoint: Callable[..., Path], encode: Any
) -> None:
    model = family_checkpoint(family)

    def small(text: str) -> Any:
        found = encode(text)
        return found._replace(tokens=found.tokens % 264)

    wishes = Wishes(chunk=32, max_tokens=400)
    by_layer = record_by_layer(model, open_safetensors(model), corpus(), encode=small, wishes=wishes)
    expected = whole(model, wishes, small)
    assert np.array_equal(by_layer.counts, expected.counts)


class _Stopped(Exception):
    pass


class _StopAt:
    """Ends the work after so many layers."""

    def __init__(self, layers: int) -> None:
        self._left = layers
        self.advanced: list[int] = []

    def task(self, what: str, total: int | None, unit: str = "") -> Any:
        outer = self

        class Counting:
            def advance(self, amount: float = 1) -> None:
                if what != "profiling":
                    return
                outer.advanced.append(int(amount))
                outer._left -= int(amount)
                if outer._left == 0:
                    raise _Stopped

        return nullcontext(Counting())


def test_interrupted_work_goes_on_at_the_layer_where_it_stopped(
    tiny: Path, encode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally_module, "_EVERY_S", 0.0)
    wishes = Wishes(max_tokens=1500, trace_tokens=1500)
    source, checkpoint = open_safetensors(tiny), tmp_path / "p.safetensors.unfinished"
    expected = record_by_layer(tiny, source, corpus(), encode=encode, wishes=wishes)
    with pytest.raises(_Stopped):
        record_by_layer(
            tiny, source, corpus(), encode=encode, wishes=wishes, checkpoint=checkpoint, progress=_StopAt(3)
        )
    # Written after the second layer; the third was not noted any more.
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.name, f"{checkpoint.name}.2"]
    again = _StopAt(-1)
    found = record_by_layer(
        tiny, source, corpus(), encode=encode, wishes=wishes, checkpoint=checkpoint, progress=again
    )
    assert again.advanced == [2, 1, 1]
    assert found.to_bytes() == expected.to_bytes() and not list(tmp_path.iterdir())


def test_rows_that_are_gone_or_cut_mean_a_new_start(
    tiny: Path, encode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally_module, "_EVERY_S", 0.0)
    wishes = Wishes(max_tokens=600)
    source, checkpoint = open_safetensors(tiny), tmp_path / "p.unfinished"
    with pytest.raises(_Stopped):
        record_by_layer(
            tiny, source, corpus(), encode=encode, wishes=wishes, checkpoint=checkpoint, progress=_StopAt(2)
        )
    rows = tmp_path / "p.unfinished.1"
    rows.write_bytes(rows.read_bytes()[:-4])
    again = _StopAt(-1)
    found = record_by_layer(
        tiny, source, corpus(), encode=encode, wishes=wishes, checkpoint=checkpoint, progress=again
    )
    assert again.advanced == [0, 1, 1, 1, 1] and found.token_count == 600


def test_the_whole_model_before_single_layers_before_nothing(spec_like: Any) -> None:
    spec = spec_like
    spec = replace(spec, layers=40, moe_layers=tuple(range(40)), expert_params=10 * spec.expert_params)
    params = spec.dense_params + spec.expert_params
    assert way_for(spec, "auto", False, None) == Way("float32", False)
    assert way_for(spec, "auto", False, 8 * params) == Way("float32", False)
    assert way_for(spec, "auto", False, 4 * params) == Way("bfloat16", False)
    assert way_for(spec, "auto", False, 2 * params) == Way("float32", True)
    assert way_for(spec, "auto", True, 8 * params) == Way("float32", True)
    assert way_for(spec, "bfloat16", False, params) == Way("bfloat16", True)
    with pytest.raises(DoesNotFit, match="one layer of tiny"):
        way_for(spec, "auto", False, 1000)


@pytest.fixture
def spec_like(tiny: Path) -> Any:
    return open_safetensors(tiny).spec


_CHILD = """
import re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from ktplan.model import open_safetensors
from ktplan.profile import Document
from ktplan.profile.corpus import Corpus
from ktplan.profile.recorder import Encoded, Wishes
from ktplan.runtime.by_layer import record_by_layer
import numpy as np
model = Path(sys.argv[1])
texts = Corpus(documents=tuple(Document(str(n), "x" * 40, "a") for n in range(4)), skipped=(), files=())
encode = lambda text: Encoded((), np.arange(len(text), dtype=np.int64))
record_by_layer(model, open_safetensors(model), texts, encode=encode, wishes=Wishes())
print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])
"""


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    """Six layers of 24 MiB take no more than two."""
    import transformers

    peak = []
    for layers in (2, 6):
        config = transformers.Qwen3MoeConfig(
            vocab_size=264, hidden_size=256, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, moe_intermediate_size=512, num_experts=16,
            num_experts_per_tok=2, intermediate_size=256,
        )  # fmt: skip
        folder = tmp_path / str(layers)
        transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        told = subprocess.run(
            [sys.executable, "-c", _CHILD, str(folder)], capture_output=True, text=True, check=True
        )
        peak.append(int(told.stdout) << 10)
    assert peak[1] - peak[0] < 40 << 20, [size >> 20 for size in peak]
