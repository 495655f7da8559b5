"""Prompt to text: the same tokens as transformers' own generation, ends told, nothing cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktplan import network
from ktplan.convert.cpu import convert_cpu
from ktplan.convert.repartition import repartition
from ktplan.convert.verify import verify_store
from ktplan.errors import BadUsage
from ktplan.kernels import Pool
from ktplan.model import open_source
from ktplan.quant.scheme import Scheme
from ktplan.rules import Rules
from ktplan.runtime.chat import Conversation, talk
from ktplan.runtime.cpu_experts import CpuExperts
from ktplan.runtime.engine import Engine, Generation, PromptTooLong, load, stop_ids
from ktplan.runtime.sampling import Sampling
from ktplan.store import ExpertStore

PROMPT = "The President of the United States"


@pytest.fixture(scope="module")
def unquantized(tiny: Path) -> Engine:
    return load(tiny, threads=1)


@pytest.fixture(scope="module")
def int8(tiny: Path, store_of: Callable[..., Path]) -> Engine:
    return load(tiny, store=store_of(tiny), threads=1)


def text_of(engine: Engine, prompt: str, tokens: int, **more: object) -> tuple[str, Generation]:
    generation = engine.generate(engine.encode(prompt), max_new_tokens=tokens, **more)  # type: ignore[arg-type]
    return "".join(generation), generation


def test_greedy_text_is_transformers_own(tiny: Path, unquantized: Engine) -> None:
    ids = torch.tensor([unquantized.encode(PROMPT)])
    with torch.inference_mode():
        expected = network.load_whole(tiny).generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    text, generation = text_of(unquantized, PROMPT, 24)
    assert generation.tokens == expected[0, ids.shape[1] :].tolist()
    assert text == unquantized.tokenizer.decode(generation.tokens)
    assert generation.finish_reason == "length"


def test_a_cached_step_equals_a_whole_forward(int8: Engine) -> None:
    _, generation = text_of(int8, PROMPT, 6)
    ids = int8.encode(PROMPT)
    for token in generation.tokens:
        assert int(int8.logits(ids)[-1].argmax()) == token
        ids.append(token)


def test_a_long_prompt_in_pieces_equals_one_pass(int8: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = text_of(int8, PROMPT * 4, 8)
    monkeypatch.setattr("ktplan.runtime.engine._PREFILL_CHUNK", 5)
    int8._cache = None
    in_pieces, _ = text_of(int8, PROMPT * 4, 8)
    assert in_pieces == whole


def test_a_follow_up_keeps_what_the_prompts_share(int8: Engine) -> None:
    ids = int8.encode(PROMPT)
    first = int8.generate(ids, max_new_tokens=4)
    list(first)
    longer = [*ids, *first.tokens[:2], *int8.encode(" and the Congress")]
    second = int8.generate(longer, max_new_tokens=6)
    kept = "".join(second)
    assert second.stats.cached_tokens == len(ids) + 2
    int8._cache = None
    assert "".join(int8.generate(longer, max_new_tokens=6)) == kept


def test_an_interrupted_step_leaves_no_half_filled_cache(
    int8: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = text_of(int8, PROMPT, 6)
    broken = int8.network.experts[2]
    monkeypatch.setattr(broken, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        text_of(int8, PROMPT + " of America", 6)
    monkeypatch.undo()
    assert text_of(int8, PROMPT, 6)[0] == expected


def test_prompts_beyond_the_context_are_refused_with_both_numbers(unquantized: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"1,024 tokens.*1,024"):
        unquantized.generate([5] * 1024, max_new_tokens=1)
    with pytest.raises(BadUsage, match="empty"):
        unquantized.generate([], max_new_tokens=1)
    with pytest.raises(BadUsage, match=r"4096 is outside .* 4,096"):
        unquantized.generate([4096], max_new_tokens=1)
    with pytest.raises(BadUsage, match="0 new tokens"):
        unquantized.generate([5], max_new_tokens=0)


def test_an_answer_ends_at_the_context(unquantized: Engine) -> None:
    generation = unquantized.generate([5] * 1020, max_new_tokens=50)
    list(generation)
    assert len(generation.tokens) == 4
    assert generation.finish_reason == "length"


def test_the_end_token_ends_and_is_not_shown(unquantized: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    text, generation = text_of(unquantized, PROMPT, 12)
    monkeypatch.setattr(unquantized, "stop_ids", frozenset({generation.tokens[5]}))
    cut = generation.tokens.index(generation.tokens[5])
    shorter, stopped = text_of(unquantized, PROMPT, 12)
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == generation.tokens[: cut + 1]
    assert shorter == unquantized.tokenizer.decode(generation.tokens[:cut])
    assert text.startswith(shorter)


def test_text_ends_before_a_stop_string(unquantized: Engine) -> None:
    text, _ = text_of(unquantized, PROMPT, 24)
    word = text.split()[3]
    shorter, generation = text_of(unquantized, PROMPT, 24, stop=[word])
    assert shorter == text[: text.index(word)]
    assert generation.finish_reason == "stop"
    assert len(generation.tokens) < 24


def test_sampling_with_a_seed_repeats_itself(unquantized: Engine) -> None:
    how = Sampling(temperature=1.5, top_k=40, seed=3)
    assert (
        text_of(unquantized, PROMPT, 12, sampling=how)[0] == text_of(unquantized, PROMPT, 12, sampling=how)[0]
    )


def test_figures_of_a_run(tiny: Path, store_of: Callable[..., Path], hybrid: Callable[[str], Rules]) -> None:
    engine = load(tiny, store=store_of(tiny), rules=hybrid("0-7"), threads=1)
    _, generation = text_of(engine, PROMPT, 8)
    stats = generation.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.new_tokens) == (len(engine.encode(PROMPT)), 0, 8)
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
    assert stats.prefill_rate == stats.prompt_tokens / stats.prefill_seconds
    assert stats.decode_rate == 7 / stats.decode_seconds
    routes = engine.network.counters.totals()
    assert routes["prefill"][1] == 4 * 2 * stats.prompt_tokens
    assert routes["decode"][1] == 4 * 2 * 7
    assert stats.decode_hit_rate == routes["decode"][0] / routes["decode"][1]
    assert 0 < (stats.prefill_hit_rate or 0) < 1


def test_all_stop_tokens_count(tiny: Path, tmp_path: Path) -> None:
    tokenizer = network.tokenizer(tiny)
    config = network.skeleton(tiny).config
    assert stop_ids(tiny, config, tokenizer) == {0}
    shutil.copy(tiny / "generation_config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert stop_ids(tmp_path, config, tokenizer) == {0, 2, 5}


def test_a_plan_and_rules_exclude_each_other(tiny: Path, hybrid: Callable[[str], Rules]) -> None:
    with pytest.raises(BadUsage, match="both given"):
        load(tiny, rules=hybrid("0"), plan=object())  # type: ignore[arg-type]


def conversation(engine: Engine, **more: object) -> Conversation:
    asked = {"system": None, "sampling": Sampling(), "max_new_tokens": 6, **more}
    return Conversation(engine, **asked)  # type: ignore[arg-type]


def test_a_conversation_uses_the_models_template(int8: Engine) -> None:
    talk_ = conversation(int8, system="Be brief.")
    answer = "".join(talk_.ask("Hello"))
    assert int8.tokenizer.decode(talk_.prompt()) == f"Be brief.\nHello\n{answer}\n"
    talk_.reset()
    assert int8.tokenizer.decode(talk_.prompt()) == "Be brief.\n"


def test_without_a_template_turns_are_plain_and_said_so(
    int8: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8.tokenizer, "chat_template", None)
    talk_ = conversation(int8)
    list(talk_.ask("Hello"))
    assert int8.tokenizer.decode(talk_.prompt()).startswith("User: Hello\nAssistant:")
    said: list[str] = []
    talk(talk_, read=lambda: None, write=said.append, say=said.append, figures=str)
    assert "no chat template" in said[0]


def test_a_chat_at_the_terminal(int8: Engine) -> None:
    lines = iter(["Hello", "/stats", "/what", "", "/reset", "x " * 1200, "/quit", "never read"])
    written: list[str] = []
    said: list[str] = []
    talk_ = conversation(int8)
    talk(
        talk_,
        read=lambda: next(lines),
        write=written.append,
        say=said.append,
        figures=lambda generation: f"{len(generation.tokens)} tokens",
    )
    assert "".join(written).endswith("\n")
    assert said[1:4] == ["6 tokens", said[2], "the conversation is forgotten"]
    assert said[2].startswith("/what is not a command")
    assert "/reset starts anew" in said[4]
    assert next(lines) == "never read"


def test_an_interrupt_stops_the_answer_and_not_the_chat(
    int8: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(self: Generation) -> Iterator[str]:
        yield "Once"
        raise KeyboardInterrupt

    monkeypatch.setattr(Generation, "__iter__", broken_off)
    lines = iter(["Hello", None])
    said: list[str] = []
    talk_ = conversation(int8)
    talk(talk_, read=lambda: next(lines), write=lambda text: None, say=said.append, figures=str)
    assert said[-1] == "stopped"
    assert int8.tokenizer.decode(talk_.prompt()) == "Hello\nOnce\n"


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_of_a_width_that_the_layout_lacks_are_padded_and_compute_the_same(
    bits: int, tmp_path: Path
) -> None:
    """96 columns: zeros fill them up to 128; the store gives 96 back, and the sum is that of the 96."""
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, intermediate_size=96,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    source = open_source(tmp_path / "model")
    manifest = convert_cpu(source, tmp_path / "store", Scheme(bits=bits)).manifest
    store = ExpertStore.open(tmp_path / "store")
    assert (manifest.intermediate, manifest.padding, store.manifest.padding) == (128, 32, 32)
    assert not verify_store(store, against=source).damages
    stores = [store]
    if bits == 8:
        repartition(store, tmp_path / "two", 2)
        stores.append(ExpertStore.open(tmp_path / "two"))
    inputs = torch.randn(5, 128)
    ids, weights = torch.tensor([[0, 3]] * 5), torch.full((5, 2), 0.5)
    wanted = torch.zeros(5, 128)
    for expert in (0, 3):
        gate, up, down = (torch.from_numpy(np.array(m)) for m in store.expert(0, expert)[:3])
        assert (gate.shape, down.shape) == ((96, 128), (128, 96))
        wanted += 0.5 * (torch.nn.functional.silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T
    for one in stores:
        experts = CpuExperts(one, 0, ids=range(4), pool=Pool(1), activation_bits=16)
        torch.testing.assert_close(experts.forward(inputs, ids, weights), wanted, rtol=1e-3, atol=1e-4)
