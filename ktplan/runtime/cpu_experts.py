"""Experts computed by the native engine straight from the mapped store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ktplan.kernels import ExpertLayer, PackedExpert, Pool
from ktplan.store import ExpertStore
from ktplan.store.layout import layout_for

_NATIVE = (torch.float32, torch.bfloat16)


class CpuExperts:
    """Some routed experts of one layer in the store's number format; pages of others are never touched."""

    def __init__(
        self,
        store: ExpertStore,
        layer: int,
        *,
        ids: Sequence[int],
        pool: Pool,
        activation_bits: int,
    ) -> None:
        manifest = store.manifest
        held = set(ids)
        parts = [
            [
                PackedExpert(*store.packed(layer, expert, part)) if expert in held else None
                for expert in range(manifest.experts)
            ]
            for part in range(manifest.parts)
        ]
        self._layer = ExpertLayer(
            parts,
            hidden=manifest.hidden,
            intermediate=manifest.intermediate,
            bits=layout_for(manifest.bits).tile_bits,
            threads_pool=pool,
            activation_bits=activation_bits,
        )

    @property
    def bytes(self) -> int:
        return self._layer.bytes

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum over the experts held here, float32 [T, H].

        hidden [T, H], index int64 [T, k] (-1: skipped), weights float32 [T, k]; all on the CPU.
        """
        return torch.from_numpy(self._layer.forward(*_readable(hidden, index, weights)))

    def submit(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """As `forward`, by other threads; calling the answer waits for it."""
        inputs = _readable(hidden, index, weights)
        pending = self._layer.submit(*inputs)

        def result(kept: object = inputs) -> torch.Tensor:  # the engine reads the inputs until it is done
            return torch.from_numpy(pending.result())

        return result


def _readable(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors as the native engine takes them: without gradient, in order, states float32 or bfloat16."""
    states = hidden if hidden.dtype in _NATIVE else hidden.float()
    return states.detach().contiguous(), index.contiguous(), weights.detach().contiguous()
