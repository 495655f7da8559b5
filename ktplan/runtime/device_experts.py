"""Experts computed by torch, on the GPU or on the CPU that stands in for it.

Only the experts placed here are held, in one buffer a layer. Tokens are sorted by expert so that each
expert is one matrix product over its own tokens; the weighted sum is taken in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from ktplan.model import ExpertWeights
from ktplan.network import Gate, tensor_of


class DeviceExperts:
    """Some experts of one layer: `gate_up [G, 2I, H]`, `down [G, H, I]`, slot g holds expert `ids[g]`.

    Biases, where the model has them: `gate_up_bias [G, 2I]`, `down_bias [G, H]`.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        ids: Sequence[int],
        experts: int,
        gate: Gate,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate
        self._gate_up_bias, self._down_bias = gate_up_bias, down_bias
        # Index `experts` is transformers' word for "no expert", as is any id that lives elsewhere.
        slot = torch.full((experts + 1,), len(ids), dtype=torch.int64)
        slot[torch.tensor(ids, dtype=torch.int64)] = torch.arange(len(ids))
        self._slot = slot.to(gate_up.device)

    @classmethod
    def load(
        cls,
        read: Callable[[int], ExpertWeights],
        *,
        ids: Sequence[int],
        experts: int,
        dtype: torch.dtype,
        device: torch.device,
        gate: Gate,
        each: Callable[[], None] = lambda: None,
    ) -> DeviceExperts:
        """Fill the buffer with `read(expert)` for each id, one at a time; calls `each` after each."""
        gate_up = down = gate_up_bias = down_bias = None
        for slot, expert in enumerate(ids):
            weights = read(expert)
            inner, hidden = weights.gate.shape
            if gate_up is None or down is None:
                gate_up = torch.empty(len(ids), 2 * inner, hidden, dtype=dtype, device=device)
                down = torch.empty(len(ids), hidden, inner, dtype=dtype, device=device)
                if weights.down_bias is not None:
                    gate_up_bias = torch.empty(len(ids), 2 * inner, dtype=dtype, device=device)
                    down_bias = torch.empty(len(ids), hidden, dtype=dtype, device=device)
            gate_up[slot, :inner] = tensor_of(weights.gate)
            gate_up[slot, inner:] = tensor_of(weights.up)
            down[slot] = tensor_of(weights.down)
            if gate_up_bias is not None and down_bias is not None:
                biases = (weights.gate_bias, weights.up_bias, weights.down_bias)
                gate_bias, up_bias, last = (tensor_of(bias) for bias in biases if bias is not None)
                gate_up_bias[slot] = torch.cat((gate_bias, up_bias))
                down_bias[slot] = last
            each()
        if gate_up is None or down is None:
            raise ValueError("no expert is placed on the device")
        return cls(
            gate_up,
            down,
            ids=ids,
            experts=experts,
            gate=gate,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )

    @property
    def device(self) -> torch.device:
        return self._gate_up.device

    @property
    def concurrent(self) -> bool:
        """Whether it computes while the calling thread does something else."""
        return self.device.type != "cpu"

    @property
    def bytes(self) -> int:
        biases = (self._gate_up_bias, self._down_bias)
        held = sum(bias.nbytes for bias in biases if bias is not None)
        return self._gate_up.nbytes + self._down.nbytes + held

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum over the experts held here, float32 [T, H] on this device.

        hidden [T, H], index int64 [T, k] (-1, E or an expert of elsewhere: skipped), weights [T, k], all
        here.
        """
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        if hidden.shape[0] == 0:
            return out
        held, top_k = self._gate_up.shape[0], index.shape[1]
        slots = self._slot[index].reshape(-1)
        slots, order = slots.sort(stable=True)
        # One transfer of the counts decides all slices; what follows is queued without waiting for the
        # device.
        counts = torch.bincount(slots, minlength=held + 1)[:held].tolist()
        served = sum(counts)
        if served == 0:
            return out
        order = order[:served]
        tokens = order // top_k
        states = hidden.to(self._gate_up.dtype)[tokens]
        results = torch.empty(served, hidden.shape[1], dtype=self._gate_up.dtype, device=hidden.device)
        start = 0
        for slot, count in enumerate(counts):
            if count:
                results[start : start + count] = self._one(slot, states[start : start + count])
                start += count
        share = weights.reshape(-1)[order].float()
        return out.index_add_(0, tokens, results.float() * share[:, None])

    def submit(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """As `forward`, computed when the answer is called: this may be the CPU side of a model without a store."""
        return lambda: self.forward(hidden, index, weights)

    def _one(self, slot: int, states: torch.Tensor) -> torch.Tensor:
        rows = states.shape[0]
        states = self._padded(states)
        first = None if self._gate_up_bias is None else self._gate_up_bias[slot]
        last = None if self._down_bias is None else self._down_bias[slot]
        gate, up = functional.linear(states, self._gate_up[slot], first).chunk(2, dim=-1)
        return functional.linear(self._gate(gate, up), self._down[slot], last)[:rows]

    def _padded(self, states: torch.Tensor) -> torch.Tensor:
        """Few different row counts: torch on the CPU compiles a bfloat16 kernel for each that it meets."""
        rows = states.shape[0]
        if states.dtype == torch.float32 or states.device.type != "cpu":
            return states
        bucket = 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 64) * 64
        return functional.pad(states, (0, 0, 0, bucket - rows)) if bucket > rows else states
