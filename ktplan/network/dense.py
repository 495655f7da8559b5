"""Weights into a skeleton, part by part.

Names in a checkpoint are not always names in the network (`block_sparse_moe.gate` is `mlp.gate`); renaming,
fusing and the types that must stay float32 are transformers' own rules, applied by transformers' own loader.
What is done here is to choose which tensors it sees, on which device they land, and to prove that nothing was
left out.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import nn
from transformers import initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from ktplan.errors import BadInput
from ktplan.model import WeightSource
from ktplan.network.skeleton import as_dtype, find_experts, quiet, refuse_not_finite
from ktplan.progress import SILENT, Progress

_OPEN_SHARDS = 16  # mapped at a time: models come in hundreds of shards, the limit on open files may be 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLoad:
    """What `load_dense` did: tensors read, bytes now held, checkpoint tensors without a place in the network."""

    tensors: int
    bytes: int
    unused: tuple[str, ...]


def load_dense(
    model: Any,
    source: WeightSource,
    *,
    device_of: Callable[[str], torch.device | str] = lambda name: "cpu",
    dtype: str | torch.dtype = torch.float32,
    only: str | Iterable[str] | None = None,
    progress: Progress = SILENT,
) -> DenseLoad:
    """Load all but the routed experts of `model`, a skeleton, injected or not, from a checkpoint.

    `device_of(parameter or buffer name)` says where each goes. `only` limits the work to one or several
    dotted prefixes, e.g. "model.layers.3" or "model.embed_tokens". Tied weights are tied, non-persistent
    buffers (rotary frequencies) rebuilt, and what transformers keeps in float32 whatever the dtype stays
    so.

    Raises BadInput naming the parameter when one is missing in the checkpoint, has another shape, or is
    stored in a type that cannot be read.
    """
    prefixes = (only,) if isinstance(only, str) else None if only is None else tuple(only)
    wanted, unused = _select(model, source, prefixes)
    shards = _Shards(source)
    by_device: dict[torch.device, dict[str, _LazyTensor]] = defaultdict(dict)
    state = model.state_dict()
    for name, target in wanted.items():
        lazy = _LazyTensor(shards, name, not state[target].is_floating_point())
        by_device[torch.device(device_of(target))][name] = lazy
    with progress.task("loading dense weights", len(wanted)) as task:
        for device, tensors in by_device.items():
            _load(model, tensors, device, as_dtype(dtype))
            task.advance(len(tensors))
    _tie(model)
    _rebuild_buffers(model, prefixes, device_of)
    _check_complete(model, prefixes)
    model.requires_grad_(False)
    held = sum(tensor.nbytes for _, tensor in _tensors(model, prefixes) if not tensor.is_meta)
    return DenseLoad(tensors=len(wanted), bytes=held, unused=tuple(unused))


def load_experts(
    module: Any,
    source: WeightSource,
    layer: int,
    *,
    dtype: str | torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Fill transformers' experts module of one layer: `gate_up_proj [E, 2I, H]`, `down_proj [E, H, I]`.

    As the class says of itself: transposed, gate and up in turns, with biases. Tensors of that type and device that the
    module has already are written over.
    """
    names = ["gate_up_proj", "down_proj"]
    if source.expert_biases(layer, 0).down is not None:
        names += ["gate_up_proj_bias", "down_proj_bias"]
    kept: dict[str, torch.Tensor] = {}
    for name in names:
        held = getattr(module, name).data
        same = (held.dtype, held.device) == (as_dtype(dtype), torch.device(device))
        kept[name] = held if same else torch.empty(held.shape, dtype=as_dtype(dtype), device=device)
    in_turns = not getattr(module, "is_concatenated", True)
    transposed = getattr(module, "is_transposed", False)
    for expert in range(len(kept["down_proj"])):
        weights = source.expert(layer, expert)
        both, down = _joined(weights.gate, weights.up, in_turns), tensor_of(weights.down)
        kept["gate_up_proj"][expert] = both.T if transposed else both
        kept["down_proj"][expert] = down.T if transposed else down
        if weights.gate_bias is not None and weights.up_bias is not None and weights.down_bias is not None:
            kept["gate_up_proj_bias"][expert] = _joined(weights.gate_bias, weights.up_bias, in_turns)
            kept["down_proj_bias"][expert] = tensor_of(weights.down_bias)
    for name, tensor in kept.items():
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))


def _joined(gate: npt.NDArray[np.float32], up: npt.NDArray[np.float32], in_turns: bool) -> torch.Tensor:
    """Rows of gate and then those of up, or one of each in turns."""
    pair = (tensor_of(gate), tensor_of(up))
    return torch.stack(pair, dim=1).flatten(0, 1) if in_turns else torch.cat(pair)


def tensor_of(array: npt.NDArray[np.float32]) -> torch.Tensor:
    """A float32 array as a tensor, without a copy where the array may be written to, as torch demands."""
    return torch.from_numpy(np.require(array, np.float32, ["C", "W"]))


def unload(module: nn.Module) -> None:
    """Put every parameter and buffer of `module` back on the meta device and so free its memory."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = buffer.to("meta")


class _Shards:
    """The checkpoint's files, a few of them mapped at a time; several threads read through it."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, name: str, whole_numbers: bool) -> torch.Tensor:
        """`whole_numbers`: the model keeps integers there (DeepSeek-V4's table from token to experts)."""
        path = str(self._source.file_of(name))
        with self._lock:
            shard = self._open.pop(path, None)
            if shard is None:
                shard = safe_open(path, framework="pt", device="cpu")
            self._open[path] = shard
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        tensor: torch.Tensor = shard.get_tensor(name)
        if whole_numbers and not tensor.is_floating_point():
            return tensor
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            stored = str(tensor.dtype).removeprefix("torch.")
            raise BadInput(
                f"{path}: {name} is stored as {stored}; weights are read from float32, bfloat16 and float16",
                hint="give the bfloat16 version of the model",
            )
        refuse_not_finite(tensor, name, Path(path))
        return tensor


class _LazyTensor:
    """Stands for a checkpoint tensor until a thread of transformers' loader takes `[...]` of it."""

    def __init__(self, shards: _Shards, name: str, whole_numbers: bool) -> None:
        self._shards, self._name, self._whole_numbers = shards, name, whole_numbers

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        return self._shards.read(self._name, self._whole_numbers)[index]


def _inside(name: str, prefixes: tuple[str, ...] | None) -> bool:
    return prefixes is None or any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _select(
    model: Any, source: WeightSource, prefixes: tuple[str, ...] | None
) -> tuple[dict[str, str], list[str]]:
    """Checkpoint name to parameter name for the tensors to load; then the names that no parameter takes."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    wanted: dict[str, str] = {}
    unused: list[str] = []
    for name in source.dense_names():
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target = name
        if target not in state:
            unused.append(name)
        elif _inside(target, prefixes):
            wanted[name] = target
    return wanted, unused


def _load(model: Any, tensors: dict[str, _LazyTensor], device: torch.device, dtype: torch.dtype) -> None:
    config = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model),
    )
    with quiet():
        report, _ = convert_and_load_state_dict_in_model(model, tensors, config)
    for name, found, expected in sorted(report.mismatched_keys, key=lambda entry: str(entry[0])):
        raise BadInput(
            f"{name} has shape {list(found)} in the checkpoint, the model's config makes it {list(expected)}",
            hint="config.json and the weights belong to different models",
        )
    for name, fault in sorted(report.conversion_errors.items()):
        raise BadInput(
            f"{name} cannot be made from the checkpoint: {fault}", hint="the checkpoint is incomplete"
        )


def _tie(model: Any) -> None:
    """Give tied parameters one tensor; whichever of the pair the checkpoint held serves both."""
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        first, second = model.get_parameter(source), model.get_parameter(target)
        if first.is_meta == second.is_meta:
            continue  # neither loaded yet, or both stored apart, or tied already
        kept, other = (first, target) if second.is_meta else (second, source)
        parent, _, leaf = other.rpartition(".")
        setattr(model.get_submodule(parent), leaf, kept)


def _rebuild_buffers(
    model: Any, prefixes: tuple[str, ...] | None, device_of: Callable[[str], torch.device | str]
) -> None:
    """Compute the buffers that no checkpoint holds, e.g. rotary frequencies, by transformers' initializer."""
    for path, module in model.named_modules():
        missing = [
            name for name in sorted(module._non_persistent_buffers_set) if _is_meta(module._buffers.get(name))
        ]
        if not missing or not _inside(path, prefixes):
            continue
        for name in missing:
            empty = module._buffers[name]
            # NaN, so that a buffer which the initializer does not know cannot pass for a computed one.
            fill = torch.nan if empty.is_floating_point() else torch.iinfo(empty.dtype).min
            module._buffers[name] = torch.full_like(empty, fill, device=device_of(f"{path}.{name}"))
        with torch.no_grad(), initialization.guard_torch_init_functions():
            model._init_weights(module)
        for name in missing:
            buffer = module._buffers[name]
            unset = buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min
            if bool(unset.any()):
                raise BadInput(
                    f"the buffer {path}.{name} of {type(model).__name__} cannot be rebuilt",
                    hint="this model family needs a newer ktplan",
                )


def _is_meta(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta


def _tensors(model: nn.Module, prefixes: tuple[str, ...] | None) -> list[tuple[str, torch.Tensor]]:
    everything = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in everything if _inside(name, prefixes)]


def _check_complete(model: Any, prefixes: tuple[str, ...] | None) -> None:
    routed = tuple(f"{name}." for name, _ in find_experts(model).values())
    absent = sorted(
        name for name, tensor in _tensors(model, prefixes) if tensor.is_meta and not name.startswith(routed)
    )
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise BadInput(
            f"the checkpoint has no weights for {absent[0]}{more}",
            hint="the checkpoint is incomplete, or its config.json belongs to another model",
        )
