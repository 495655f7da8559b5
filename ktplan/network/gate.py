"""What an expert computes between its matrices, in torch: the model's own activation of gate and up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from ktplan.errors import BadInput
from ktplan.model import ModelSpec

Gate = Callable[[Tensor, Tensor], Tensor]


def gate_of(spec: ModelSpec) -> Gate:
    """gate [..., I] and up [..., I] to what the down projection takes.

    Raises BadInput for an activation that is not known.
    """
    if spec.activation == "swiglu-oai":
        return _oai(spec.activation_alpha or 1.702, spec.activation_limit or float("inf"))
    if spec.activation == "swiglu-clamped":
        return _clamped(spec.activation_limit or float("inf"))
    if spec.activation not in ACT2FN:
        raise BadInput(
            f"config.json says hidden_act '{spec.activation}', which is not known", hint="check config.json"
        )
    activation: Callable[[Tensor], Tensor] = ACT2FN[spec.activation]
    return lambda gate, up: activation(gate) * up


def _oai(alpha: float, limit: float) -> Gate:
    def computed(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate * alpha) * (up + 1)

    return computed


def _clamped(limit: float) -> Gate:
    return lambda gate, up: functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
