"""Experts computed by the native engine straight from the mapped store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from ktplan.errors import BadUsage
from ktplan.kernels import SILU, Activation, ExpertLayer, PackedExpert, Pool
from ktplan.model import ModelSpec
from ktplan.model.source import Biases, WeightSource
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
        source: WeightSource | None = None,
    ) -> None:
        """`source` is the model's own checkpoint: biases and the numbers of its activation are there, not in the store.

        Without it experts are silu(gate) * up; raises BadUsage for a store of others.
        """
        manifest = store.manifest
        if source is None and manifest.activation not in (None, "silu", "swish"):
            raise BadUsage(
                f"{store.path} holds experts with the activation '{manifest.activation}'",
                hint="give the model too",
            )
        biased = source if source is not None and source.spec.expert_bias else None
        usual = manifest.shape.layout(manifest.bits)
        by_layout: dict[str, set[int]] = {}
        for expert in ids:
            by_layout.setdefault(manifest.shape.layout_of(layer, expert).name, set()).add(expert)
        # In a mixed store one native layer for each layout; the other's experts are absent there.
        self._layers = [
            ExpertLayer(
                [
                    [
                        _packed(store, layer, expert, part, biased) if expert in held else None
                        for expert in range(manifest.experts)
                    ]
                    for part in range(manifest.parts)
                ],
                hidden=manifest.hidden,
                intermediate=manifest.intermediate,
                bits=LAYOUTS[name].tile_bits,
                group=LAYOUTS[name].group,
                activation=SILU if source is None else _activation(source.spec),
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


_KINDS: dict[str, Literal["silu", "gelu", "gelu-tanh", "swiglu-oai"]] = {
    "silu": "silu",
    "swish": "silu",
    "swiglu-clamped": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "swiglu-oai": "swiglu-oai",
}


def _activation(spec: ModelSpec) -> Activation:
    return Activation(
        _KINDS[spec.activation],
        alpha=spec.activation_alpha or SILU.alpha,
        limit=spec.activation_limit or SILU.limit,
    )


def _packed(
    store: ExpertStore, layer: int, expert: int, part: int, biased: WeightSource | None
) -> PackedExpert:
    arrays = store.packed(layer, expert, part)
    if biased is None:
        return PackedExpert(*arrays)
    biases = biased.expert_biases(layer, expert)
    shape = store.manifest.shape
    share = shape.intermediate // shape.parts
    own = slice(part * share, (part + 1) * share)
    return PackedExpert(
        *arrays,
        gate_bias=_padded(biases.gate, shape.intermediate)[own],
        up_bias=_padded(biases.up, shape.intermediate)[own],
        down_bias=_down_bias(biases, part),
    )


def _down_bias(biases: Biases, part: int) -> npt.NDArray[np.float32] | None:
    """Added once, by the first of an expert's parts."""
    return None if biases.down is None or part != 0 else np.ascontiguousarray(biases.down)


def _padded(bias: npt.NDArray[np.float32] | None, width: int) -> npt.NDArray[np.float32]:
    whole = np.zeros(width, np.float32)
    if bias is not None:
        whole[: len(bias)] = bias
    return whole


def _readable(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors as the native engine takes them: without gradient, in order, states float32 or bfloat16."""
    states = hidden if hidden.dtype in _NATIVE else hidden.float()
    return states.detach().contiguous(), index.contiguous(), weights.detach().contiguous()
