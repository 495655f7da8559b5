"""Building networks and tokenizers with transformers, without its noise and without foreign code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ktplan.errors import BadInput
from ktplan.model.families import layers
from ktplan.model.gguf import gguf_files
from ktplan.model.safetensors import read_config

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
# What transformers raises where a config or tokenizer has a value that it did not expect: it checks few of them.
_REFUSALS = (
    OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, ImportError, ArithmeticError, AssertionError,
    RuntimeError, StrictDataclassError,
)  # fmt: skip
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """`"bfloat16"` to `torch.bfloat16`. Raises BadInput for a type that cannot be computed in."""
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in _DTYPES.values():
        raise BadInput(f"'{dtype}' is not a type to compute in", hint=f"use one of {', '.join(_DTYPES)}")
    return found


def layer_of(name: str) -> int | None:
    """The layer that a dotted name lies in: 3 for `model.layers.3.mlp`; None outside layers."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


@contextmanager
def quiet() -> Iterator[None]:
    """Run a piece of transformers without its bars and log lines; what matters is reported as errors."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def skeleton(model_path: Path, dtype: str | torch.dtype = torch.float32) -> Any:
    """The transformers network of `model_path` on the meta device, in eval mode.

    Only config.json is read: names, classes and shapes are right, weights are not there. Raises BadInput when
    the config is missing, unknown to transformers, or would need code from the checkpoint.
    """
    if gguf_files(model_path):
        raise BadInput(
            f"{model_path} is a GGUF model, whose dense weights cannot be computed with",
            hint="give the safetensors version of the model; inspect and convert-cpu read GGUF",
        )
    folder = _folder(model_path)
    read_config(folder, model_path)
    with quiet(), _explained(model_path):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        layers(config.get_text_config().to_dict())  # a count that no model has would be built for hours
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=as_dtype(dtype), trust_remote_code=False)
    return model.eval().requires_grad_(False)


def experts_modules(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Layer number to (dotted name, module) of the routed experts, in layer order.

    Such a module computes `forward(hidden_states [T, H], top_k_index int64 [T, k], top_k_weights [T, k])` to
    [T, H] and holds `gate_up_proj [E, 2I, H]` and `down_proj [E, H, I]`, or both transposed (gpt-oss); an index of E
    means "no expert". Raises BadInput when there are none or when they are laid out in another way.
    """
    found = find_experts(model)
    if not found:
        raise BadInput(
            f"{type(model).__name__} has no routed experts", hint="ktplan is for Mixture-of-Experts models"
        )
    return found


def find_experts(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """As `experts_modules`, but none is no error: once injected, they are no longer transformers' own."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        fused, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        layer = layer_of(name)
        if layer is None or not isinstance(fused, torch.Tensor) or not isinstance(down, torch.Tensor):
            continue
        experts, hidden, inner = down.shape
        expected = (experts, 2 * inner, hidden)
        if getattr(module, "is_transposed", False):
            experts, inner, hidden = down.shape
            expected = (experts, hidden, 2 * inner)
        if tuple(fused.shape) != expected:
            raise BadInput(
                f"{name} ({type(module).__name__}) lays its experts out in a way that is not supported: "
                f"gate_up_proj {tuple(fused.shape)}, down_proj {tuple(down.shape)}",
                hint="supported are [E, 2I, H] and [E, H, I], or both transposed",
            )
        found[layer] = (name, module)
    return dict(sorted(found.items()))


def load_whole(
    model_path: Path, dtype: str | torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Any:
    """The model as transformers' own from_pretrained loads it, experts included: the reference."""
    with quiet(), _explained(model_path):
        model = AutoModelForCausalLM.from_pretrained(
            _folder(model_path), dtype=as_dtype(dtype), trust_remote_code=False, local_files_only=True
        )
    for name, tensor in model.named_parameters():
        refuse_not_finite(tensor, name, model_path)
    return model.to(device).eval().requires_grad_(False)


def refuse_not_finite(tensor: torch.Tensor, name: str, where: Path) -> None:
    """Raise BadInput naming the tensor and its first place where a weight is NaN or infinite."""
    finite = torch.isfinite(tensor)
    if bool(finite.all()):
        return
    place = (~finite).nonzero()[0].tolist()
    raise BadInput(
        f"{where}: {name} holds {int((~finite).sum()):,} values that are NaN or infinite, the first is "
        f"{float(tensor[tuple(place)])} at {place}",
        hint="the checkpoint is damaged, badly merged or too large for --dtype float16: get it again, or use float32",
    )


def tokenizer(model_path: Path) -> Any:
    """The model's tokenizer, with its chat template where it has one. Raises BadInput when there is none."""
    with quiet(), _explained(model_path):
        found = AutoTokenizer.from_pretrained(
            _folder(model_path), trust_remote_code=False, local_files_only=True
        )
    # Where there are no files, transformers makes up a tokenizer that knows its special tokens and no others.
    if len(found) <= len(found.all_special_ids):
        raise BadInput(
            f"{model_path} has no tokenizer",
            hint="put the model's tokenizer.json and tokenizer_config.json there",
        )
    return found


def _folder(model_path: Path) -> Path:
    """Where config.json and tokenizer lie: a model may be named by its .safetensors file."""
    return model_path.parent if model_path.is_file() else model_path


@contextmanager
def _explained(model_path: Path) -> Iterator[None]:
    try:
        yield
    except _REFUSALS as fault:
        lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
        first_line = " ".join(lines[:2]).split(" Model type should be one of")[0] or type(fault).__name__
        raise BadInput(
            f"transformers cannot use {model_path}: {first_line}",
            hint="check config.json and the tokenizer files; code that comes with a checkpoint is not run",
        ) from fault
