"""How many threads torch gets on the CPU: small matrices are slower with many, for threads must meet after each."""

from __future__ import annotations

import torch
from torch import nn

from ktplan.network.skeleton import layer_of

# One core reads so much in 0.1 ms; for less, the 10 to 20 us that threads need to meet are not worth it.
_BYTES_PER_THREAD = 1 << 20


def torch_threads(model: nn.Module, threads: int | None = None) -> int:
    """Threads as asked for, or no more than the largest matrix of the layers that is not on a GPU can use.

    A stack of experts [E, N, K] counts as one of its matrices: torch computes them one at a time.
    """
    if threads is not None:
        return threads
    sizes = [
        parameter.nbytes // (parameter.shape[0] if parameter.dim() == 3 else 1)
        for name, parameter in model.named_parameters()
        if layer_of(name) is not None and parameter.device.type != "cuda"
    ]
    return max(1, min(torch.get_num_threads(), max(sizes, default=0) // _BYTES_PER_THREAD))


def fit_torch_threads(model: nn.Module, threads: int | None = None) -> None:
    """Give torch, for the whole process, the threads that suit `model`."""
    torch.set_num_threads(torch_threads(model, threads))
