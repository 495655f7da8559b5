"""Questions about machines one might buy: every combination, monotone answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan.errors import BadUsage, DoesNotFit
from ktplan.placement import fit
from ktplan.placement.decide import decide, setting_of
from ktplan.placement.known import describe
from ktplan.placement.sweep import Question, is_question, parse, sweep

Make = Callable[..., Any]


def test_ranges_are_read() -> None:
    found = parse("vram=16..48,ctx=8k..128k,batch=1..16")
    assert [size >> 30 for size in found.vram] == [16, 24, 32, 40, 48]
    assert found.ctx == (8000, 16000, 32000, 64000, 128000) and found.batch == (1, 2, 4, 8, 16)
    assert parse("vram=18GiB").vram == (18 << 30,)
    assert is_question("vram=16..48") and not is_question("RTX 4090, 2x Xeon 8x DDR5-4800")


@pytest.mark.parametrize("text", ["vram=48..16", "vrom=1..2", "ctx", "batch=0..3", "vram=1,vram=2"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(BadUsage):
        parse(text)


def test_more_memory_is_never_slower_and_more_context_never_faster() -> None:
    def ask(vram: int, ctx: int, batch: int) -> tuple[int, float, float, float]:
        vram >>= 30
        if vram < 2 and ctx > 4:
            raise DoesNotFit("too much")
        noise = 3 * ((vram * 7 + ctx * 3) % 5)  # a plan on held-out documents may be a little worse with more
        speed = float(10 * vram - ctx + noise)
        return vram, speed, speed - 1, speed + 1

    rows = sweep(parse("vram=1..5,ctx=1..8"), ask, vram=1, ctx=1, batch=1)
    by = {(row.vram, row.ctx): row.decode for row in rows}
    assert None in by.values()
    for (vram, ctx), speed in by.items():
        for (other_vram, other_ctx), other in by.items():
            if speed is not None and other is not None and other_vram >= vram and other_ctx <= ctx:
                assert other >= speed


@given(st.integers(0, 2**32 - 1), st.sampled_from(["frequency", "optimal", "uniform"]), st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_real_plans_are_monotone_too(
    spec_of: Make, profile_of: Make, seed: int, strategy: str, batch: int
) -> None:
    """More memory is never slower, more context never faster, whatever was counted."""
    spec = spec_of(layers=3, experts=8, hidden=1024, moe_intermediate=512, kv_bytes_per_token=4096)
    profile = profile_of(spec, documents=6, seed=seed)
    machine = describe("RTX 4090, Xeon 8x DDR5-4800")

    def ask(memory: int, tokens: int, sequences: int) -> tuple[int, float, float, float]:
        budget = fit(spec, card_memory=memory, context=tokens, batch=sequences, margin=0)
        setting = setting_of(spec, budget, machine)
        gpu, _, made = decide(profile, strategy, budget.slots, setting, 42)
        return len(gpu), made.decode, made.decode_low, made.decode_high

    question = Question(vram=tuple(n << 20 for n in (2, 8, 20, 45, 90)), ctx=(0, 1000, 4000), batch=(batch,))
    rows = sweep(question, ask, vram=0, ctx=0, batch=batch)
    by = {(row.vram, row.ctx): row for row in rows}
    assert by[2 << 20, 4000].decode is None and by[90 << 20, 0].slots == 24
    for (vram, ctx), row in by.items():
        for (other_vram, other_ctx), other in by.items():
            if row.decode and other_vram >= vram and other_ctx <= ctx:
                assert other.decode and other.decode >= row.decode
                assert other.low is not None and other.low <= other.decode <= (other.high or 0)
