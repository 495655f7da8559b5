"""Device words of rules to what this machine has, and tensors carried across device borders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ktplan.errors import MachineLacks
from ktplan.network import layer_of


def canonical(word: str) -> str:
    """The name reports use: `gpu` and `cuda` are `cuda:0`."""
    return "cuda:0" if word in ("gpu", "cuda") else word


def best_device() -> str:
    """`cuda:0` where torch sees a GPU, else `cpu`."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def resolve(words: Iterable[str]) -> tuple[dict[str, torch.device], list[str]]:
    """Each word's torch device, and notes about what stands in for what.

    Where torch sees no GPU at all, the CPU through torch stands in for it: the same code, said in a note.
    Raises MachineLacks for a GPU beyond those that are there.
    """
    resolved: dict[str, torch.device] = {}
    notes: list[str] = []
    for word in sorted(set(words)):
        name = canonical(word)
        if name != "cpu" and not torch.cuda.is_available():
            resolved[word] = torch.device("cpu")
            notes.append(f"no GPU found: torch on the CPU stands in for {name}")
            continue
        device = torch.device(name)
        if device.type == "cuda" and device.index >= torch.cuda.device_count():
            raise MachineLacks(
                f"{name} is asked for, this machine has {torch.cuda.device_count()} GPU(s)",
                hint="change the device in the rules",
            )
        resolved[word] = device
    return resolved, sorted(set(notes))


def connect(model: nn.Module, skip: Iterable[nn.Module] = ()) -> int:
    """Make a network whose weights lie on several devices runnable; returns how many hooks that took.

    A decoder layer pulls its inputs to where its first weight lies; any other module with weights of its
    own pulls its inputs to them and hands its output back to where the inputs came from, so that residual
    sums meet on one device. Modules in `skip` see to it themselves. One device alone needs no hook.
    """
    ignored = {id(module) for module in skip}
    owners = [
        (name, module, device)
        for name, module in model.named_modules()
        if id(module) not in ignored and (device := _own_device(module)) is not None
    ]
    if len({device for _, _, device in owners}) < 2:
        return 0
    hooks = 0
    layers: dict[str, torch.device] = {}
    for name, module, device in owners:
        if (layer := _layer_name(name)) is not None:
            layers.setdefault(layer, device)
        module.register_forward_pre_hook(_pull_and_remember(device), with_kwargs=True)
        module.register_forward_hook(_hand_back, with_kwargs=True)
        hooks += 2
    for name, device in layers.items():
        model.get_submodule(name).register_forward_pre_hook(_pull(device), with_kwargs=True)
        hooks += 1
    return hooks


def _own_device(module: nn.Module) -> torch.device | None:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return next((tensor.device for tensor in tensors if tensor is not None), None)


def _layer_name(name: str) -> str | None:
    layer = layer_of(name)
    if layer is None:
        return None
    head, _, _ = name.partition(f"layers.{layer}")
    return f"{head}layers.{layer}"


def _pull(device: torch.device) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _moved(args, device), _moved(kwargs, device)

    return hook


def _pull_and_remember(device: torch.device) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        module._came_from = _first_device((args, kwargs))
        return _moved(args, device), _moved(kwargs, device)

    return hook


def _hand_back(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    origin = module._came_from
    return output if origin is None else _moved(output, origin)


def _first_device(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.device
    inner = (
        values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple | list) else ()
    )
    return next((device for value in inner if (device := _first_device(value)) is not None), None)


def _moved(values: Any, device: Any) -> Any:
    """Tensors inside tuples, lists and dictionaries moved; caches and other objects left as they are."""
    if isinstance(values, torch.Tensor):
        return values.to(device)
    if type(values) in (tuple, list):
        return type(values)(_moved(value, device) for value in values)
    if type(values) is dict:
        return {key: _moved(value, device) for key, value in values.items()}
    return values
