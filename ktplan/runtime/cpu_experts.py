"""Experts computed by the native engine straight from the mapped store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ktplan.kernels import ExpertLayer, PackedExpert, Pool
from ktplan.store import ExpertStore
from ktplan.store.layout import LAYOUTS

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
        usual = manifest.shape.layout(manifest.bits)
        by_layout: dict[str, set[int]] = {}
        for expert in ids:
            by_layout.setdefault(manifest.shape.layout_of(layer, expert).name, set()).add(expert)
        # In a mixed store one native layer for each layout; the other's experts are absent there.
        self._layers = [
            ExpertLayer(
                [
                    [
                        PackedExpert(*store.packed(layer, expert, part)) if expert in held else None
                        for expert in range(manifest.experts)
                    ]
                    for part in range(manifest.parts)
                ],
                hidden=manifest.hidden,
                intermediate=manifest.intermediate,
                bits=LAYOUTS[name].tile_bits,
                group=LAYOUTS[name].group,
                threads_pool=pool,
                activation_bits=activation_bits,
            )
            for name, held in sorted(by_layout.items()) or [(usual.name, set[int]())]
        ]

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self._layers)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum over the experts held here, float32 [T, H].

        hidden [T, H], index int64 [T, k] (-1: skipped), weights float32 [T, k]; all on the CPU.
        """
        inputs = _readable(hidden, index, weights)
        total, *others = [layer.forward(*inputs) for layer in self._layers]
        for other in others:
            total += other
        return torch.from_numpy(total)

    def submit(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """As `forward`, by other threads; calling the answer waits for it."""
        inputs = _readable(hidden, index, weights)
        pending = [layer.submit(*inputs) for layer in self._layers]

        def result(kept: object = inputs) -> torch.Tensor:  # the engine reads the inputs until it is done
            total, *others = [one.result() for one in pending]
            for other in others:
                total += other
            return torch.from_numpy(total)

        return result


def _readable(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors as the native engine takes them: without gradient, in order, states float32 or bfloat16."""
    states = hidden if hidden.dtype in _NATIVE else hidden.float()
    return states.detach().contiguous(), index.contiguous(), weights.detach().contiguous()
