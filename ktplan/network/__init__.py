"""The model as a transformers network: built empty, filled part by part.

    skeleton         the network on the meta device, from config.json alone: names and shapes, no weights
    experts_modules  where the routed experts of each layer are
    load_dense       everything but the routed experts, from the checkpoint
    load_experts     the routed experts of one layer, from a weight source, into transformers' own module
    unload           forget the weights of a module again
    gate_of          what an expert computes between its matrices
    load_whole       the whole model by transformers itself: the reference that all else is compared with
    tokenizer        the model's own; text_encoder tells its special tokens from the text's

It knows nothing of stores, placement or kernels, and never runs code that comes with a checkpoint.
"""

from __future__ import annotations

from ktplan.errors import MachineLacks

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as missing:
    raise MachineLacks(
        f"the package '{missing.name}' is needed to compute with a model", hint="pip install 'ktplan[run]'"
    ) from missing

from ktplan.network.dense import DenseLoad, load_dense, load_experts, tensor_of, unload
from ktplan.network.encoding import text_encoder
from ktplan.network.gate import Gate, gate_of
from ktplan.network.skeleton import (
    as_dtype,
    experts_modules,
    layer_of,
    load_whole,
    quiet,
    refuse_not_finite,
    skeleton,
    tokenizer,
)
from ktplan.network.threads import fit_torch_threads, torch_threads

__all__ = [
    "DenseLoad",
    "Gate",
    "as_dtype",
    "experts_modules",
    "fit_torch_threads",
    "gate_of",
    "layer_of",
    "load_dense",
    "load_experts",
    "load_whole",
    "quiet",
    "refuse_not_finite",
    "skeleton",
    "tensor_of",
    "text_encoder",
    "tokenizer",
    "torch_threads",
    "unload",
]
