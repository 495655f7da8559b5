"""Questions about machines one might buy: every combination, monotone answers."""

from __future__ import annotations

import pytest

from ktplan.errors import BadUsage, DoesNotFit
from ktplan.placement.sweep import is_question, parse, sweep


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
