"""torch: a loop over the experts that were hit, in bf16 as transformers has it, or in int8 by `torch._int_mm`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from side_by_side import Routing, Shape


class Engine:
    def __init__(self, shape: Shape, form: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.shape, self.form = shape, form
        h, i, e = shape.hidden, shape.intermediate, shape.experts
        if form == "bf16":
            self.bytes_per_weight = 2.0
            self.gate_up = torch.empty(e, 2 * i, h, dtype=torch.bfloat16).normal_(0, 0.02)
            self.down = torch.empty(e, h, i, dtype=torch.bfloat16).normal_(0, 0.02)
            self.linear = F.linear
        else:
            self.bytes_per_weight = 1.0
            self.gate_up = torch.randint(-127, 128, (e, 2 * i, h), dtype=torch.int8)
            self.down = torch.randint(-127, 128, (e, h, i), dtype=torch.int8)
            self.linear = int8_linear

    @torch.no_grad()
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in torch.unique(ids).tolist():
            token, choice = torch.where(ids == expert)
            gate, up = self.linear(x[token], self.gate_up[expert]).chunk(2, dim=-1)
            y = self.linear(F.silu(gate) * up, self.down[expert]) * weights[token, choice, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def prepare(self, tokens: int) -> Callable[[], None]:
        kind = torch.bfloat16 if self.form == "bf16" else torch.float32
        x = torch.randn(tokens, self.shape.hidden).to(kind)
        weights = torch.full((tokens, self.shape.top_k), 1 / self.shape.top_k, dtype=kind)
        routing = [torch.from_numpy(call) for call in Routing(tokens, self.shape).calls]
        turn = iter(range(1 << 60))

        def call() -> None:
            self.forward(x, routing[next(turn) % len(routing)], weights)

        return call


def int8_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of x quantized to int8 as they come; one scale a row on both sides."""
    scale = x.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
    levels = torch.round(x / scale).to(torch.int8)
    return torch._int_mm(levels, weight.t()).float() * (scale * 1e-4)


def make(shape: Shape, form: str, threads: int) -> Engine:
    return Engine(shape, form, threads)
