"""Rules applied to a network: which module goes where, found out on the skeleton before anything is loaded.

The walk is KTransformers' own: pre-order from the root (its name is ""), rules from the top, the first
that matches wins; a rule with `recursive: false` hides what is inside the module; a matched parent does
not keep its children from matching other rules. A module that no rule takes stays on the default device.
Routed experts that no rule places lie on the CPU where a store is given, else on the default device.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ktplan.errors import BadInput
from ktplan.experts import ExpertId, ExpertSet, format_ranges
from ktplan.network import experts_modules, layer_of
from ktplan.rules import DEFAULT, HYBRID, KT_EXPERTS, KT_EXPERTS_V2, Rule, Rules, digit_ranges, expert_ids
from ktplan.runtime.devices import canonical

_EXAMPLES = 3
_FOR_EXPERTS = (HYBRID, KT_EXPERTS, KT_EXPERTS_V2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExperts:
    """Where the routed experts of one layer go: those in `gpu` to `gpu_device`, the others to the CPU."""

    layer: int
    name: str  # of the experts module
    experts: int
    gpu: tuple[int, ...]
    gpu_device: str

    @property
    def cpu(self) -> tuple[int, ...]:
        on_gpu = set(self.gpu)
        return tuple(expert for expert in range(self.experts) if expert not in on_gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one rule took. `bytes` counts weights by device name, experts included."""

    where: str  # file, line and number of the rule, or why there is none
    class_name: str
    modules: int
    layers: tuple[int, ...]
    examples: tuple[str, ...]
    bytes: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "where": self.where, "class": self.class_name, "modules": self.modules,
            "layers": format_ranges(self.layers), "examples": list(self.examples), "bytes": dict(self.bytes),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The outcome for a whole network. Device names are canonical: cpu, cuda:0, cuda:1 ..."""

    experts: tuple[LayerExperts, ...]
    modules: Mapping[str, str]  # dotted name to device, for every module outside routed experts
    taken: tuple[Taken, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def bytes(self) -> dict[str, int]:
        """Weights on each device."""
        total: dict[str, int] = defaultdict(int)
        for taken in self.taken:
            for device, size in taken.bytes.items():
                total[device] += size
        return dict(sorted(total.items()))

    @property
    def devices(self) -> frozenset[str]:
        """Every device that something is placed on."""
        return frozenset(self.modules.values()) | {found.gpu_device for found in self.experts if found.gpu}

    @property
    def gpu_experts(self) -> ExpertSet:
        return ExpertSet(ExpertId(place.layer, expert) for place in self.experts for expert in place.gpu)

    def device_of(self, tensor: str) -> str:
        """The device of a parameter or buffer by its dotted name."""
        return self.modules[tensor.rpartition(".")[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBytes:
    """Size of one routed expert on either side."""

    gpu: int
    cpu: int


def place(
    model: nn.Module,
    rules: Rules | None,
    *,
    device: str,
    experts_on_gpu: bool,
    expert_bytes: ExpertBytes | None = None,
) -> Placement:
    """Apply `rules` to a skeleton whose experts are still transformers' own.

    `device` is the default device, `experts_on_gpu` whether routed experts that no rule takes lie there
    or on the CPU. `expert_bytes` defaults to the size of the skeleton's own experts on both sides.

    Raises BadInput naming file, line and rule when a rule matches nothing and is not optional, when
    expert ids do not exist, or when an experts class is put in the place of something else.
    """
    rules = rules if rules is not None else Rules(())
    routed = {name: layer for layer, (name, _) in experts_modules(model).items()}
    verdicts = dict(_walk(model, rules))
    tally = _Tally(model, rules, device)
    experts: list[LayerExperts] = []
    modules: dict[str, str] = {}
    for name, module in model.named_modules():
        number = verdicts.get(name)
        rule = rules.rules[number] if number is not None else None
        if name in routed:
            found = _experts_place(name, routed[name], module, rule, rules, number, device, experts_on_gpu)
            experts.append(found)
            tally.experts(number, name, found, expert_bytes or own_bytes(module))
        elif not name.startswith(tuple(f"{path}." for path in routed)):
            if rule is not None and rule.replace.class_name in _FOR_EXPERTS:
                raise BadInput(
                    f"{rules.where(number or 0)} takes {name or 'the root'} ({type(module).__name__}), "
                    f"which is no experts module; {rule.replace.class_name} cannot stand there",
                    hint=f"match experts modules only, e.g. ^{re.escape(next(iter(routed)))}$",
                )
            modules[name] = _device(rule, device)
            tally.module(number, name, module, modules[name])
    tally.refuse_idle()
    return Placement(
        experts=tuple(experts),
        modules=modules,
        taken=tally.taken(),
        notes=tuple(_notes(rules)),
        warnings=tuple(_suspicious(rules, tally)),
    )


def _walk(model: nn.Module, rules: Rules) -> Iterator[tuple[str, int | None]]:
    """(dotted name, number of the rule that decides) in pre-order; a closed module decides for its inside."""
    compiled = [re.compile(rule.match.name) if rule.match.name is not None else None for rule in rules]

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, int | None]]:
        number = _first_match(name, module, rules, compiled)
        yield name, number
        closed = number is not None and not rules.rules[number].recursive
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if closed:
                yield path, number
                yield from ((f"{path}.{inner}", number) for inner, _ in child.named_modules() if inner)
            else:
                yield from visit(child, path)

    yield from visit(model, "")


def _first_match(
    name: str, module: nn.Module, rules: Rules, compiled: list[re.Pattern[str] | None]
) -> int | None:
    for number, rule in enumerate(rules):
        pattern, class_name = compiled[number], rule.match.class_name
        if pattern is not None and pattern.search(name) is None:
            continue
        if class_name is not None and not is_a(module, class_name):
            continue
        return number
    return None


def is_a(module: nn.Module, class_name: str) -> bool:
    """Whether `module` is of a class called so or derived from it. Names are compared, nothing is imported.

    `torch.nn.Linear` means torch.nn.modules.linear.Linear; a class of KTransformers' copies of modelling
    files (`ktransformers.models.modeling_x.Y`) means transformers' Y in modeling_x.
    """
    tail = ".".join(class_name.split(".")[-2:]) if class_name.startswith("ktransformers.models.") else None
    for base in type(module).__mro__:
        full = f"{base.__module__}.{base.__qualname__}"
        if full == class_name or (tail is not None and full.endswith("." + tail)):
            return True
        if base.__module__.startswith("torch.nn.modules.") and class_name == f"torch.nn.{base.__qualname__}":
            return True
    return False


def _device(rule: Rule | None, default: str) -> str:
    if rule is None:
        return canonical(default)
    return canonical(str(rule.replace.kwargs.get("generate_device", default)))


def _experts_place(
    name: str, layer: int, module: Any, rule: Rule | None, rules: Rules, number: int | None,
    device: str, experts_on_gpu: bool,
) -> LayerExperts:  # fmt: skip
    count = int(module.down_proj.shape[0])
    everything = tuple(range(count))
    if rule is None:
        gpu = everything if experts_on_gpu and canonical(device) != "cpu" else ()
        return LayerExperts(layer=layer, name=name, experts=count, gpu=gpu, gpu_device=canonical(device))
    kwargs = rule.replace.kwargs
    if rule.replace.class_name == HYBRID:
        gpu_device, on_gpu = str(kwargs.get("gpu_device", "gpu")), kwargs.get("gpu_experts", "")
    else:
        # A device rule, KTransformers' experts class included: the whole layer lies on one side, unless
        # gpu_experts says which part of it lies on the GPU.
        default = "cpu" if rule.replace.class_name in _FOR_EXPERTS else device
        word = str(kwargs.get("generate_device", default))
        on_gpu = kwargs.get("gpu_experts", "" if word == "cpu" else "all")
        gpu_device = "gpu" if word == "cpu" else word
    chosen = expert_ids(on_gpu)
    ids = everything if chosen is None else chosen
    if ids and ids[-1] >= count:
        raise BadInput(
            f"{rules.where(number or 0)}: expert {ids[-1]} of {name} is placed, there are only 0-{count - 1}",
            hint="the rules were made for another model",
        )
    return LayerExperts(layer=layer, name=name, experts=count, gpu=ids, gpu_device=canonical(gpu_device))


def own_bytes(module: Any) -> ExpertBytes:
    """An expert as the skeleton's own experts module holds it, biases included."""
    size = sum(parameter.nbytes for parameter in module.parameters()) // len(module.down_proj)
    return ExpertBytes(gpu=size, cpu=size)


class _Tally:
    """Counts what each rule took; key None is for modules that no rule took."""

    def __init__(self, model: nn.Module, rules: Rules, device: str) -> None:
        self._rules, self._device = rules, device
        self._names: dict[int | None, list[str]] = defaultdict(list)
        self._bytes: dict[int | None, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._seen: set[int] = set()  # tied weights are one tensor

    def module(self, number: int | None, name: str, module: nn.Module, device: str) -> None:
        self._names[number].append(name)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self._bytes[number][device] += tensor.nbytes

    def experts(self, number: int | None, name: str, found: LayerExperts, size: ExpertBytes) -> None:
        self._names[number].append(name)
        if found.gpu:
            self._bytes[number][found.gpu_device] += len(found.gpu) * size.gpu
        if found.cpu:
            self._bytes[number]["cpu"] += len(found.cpu) * size.cpu

    def layers(self, number: int | None) -> tuple[int, ...]:
        return tuple(sorted({layer for name in self._names[number] if (layer := layer_of(name)) is not None}))

    def refuse_idle(self) -> None:
        for number, rule in enumerate(self._rules):
            if not self._names[number] and not rule.optional:
                raise BadInput(
                    f"{self._rules.where(number)} matches no module: {_matcher(rule)}",
                    hint="correct the pattern, move the rule above the one that takes its modules, "
                    "or mark it 'optional: true'",
                )

    def taken(self) -> tuple[Taken, ...]:
        numbers: list[int | None] = [*range(len(self._rules))]
        if self._names[None]:
            numbers.append(None)
        return tuple(self._taken(number) for number in numbers)

    def _taken(self, number: int | None) -> Taken:
        names = self._names[number]
        return Taken(
            where=self._rules.where(number) if number is not None else f"no rule (default: {self._device})",
            class_name=self._rules.rules[number].replace.class_name if number is not None else DEFAULT,
            modules=len(names),
            layers=self.layers(number),
            examples=tuple(name or "(root)" for name in names[:_EXAMPLES]),
            bytes=dict(sorted(self._bytes[number].items())),
        )


def _matcher(rule: Rule) -> str:
    parts = {"name": rule.match.name, "class": rule.match.class_name}
    return " and ".join(f"{key} {value}" for key, value in parts.items() if value is not None)


def _notes(rules: Rules) -> Iterator[str]:
    operators = sorted({rule.replace.class_name for rule in rules if _is_foreign_operator(rule)})
    if operators:
        yield f"only the device is taken from {', '.join(operators)}; transformers' own modules compute"
    if any("prefill_device" in rule.replace.kwargs for rule in rules):
        yield "prefill_device is not used: prompts are computed where generate_device says"


def _is_foreign_operator(rule: Rule) -> bool:
    return rule.replace.class_name not in (DEFAULT, *_FOR_EXPERTS)


def _suspicious(rules: Rules, tally: _Tally) -> Iterator[str]:
    """`[0-15]` is a class of single characters: 0, 1 and 5. Say what the rule took in truth."""
    for number, rule in enumerate(rules):
        for found in digit_ranges(rule.match.name or "")[:1]:
            layers = ", ".join(map(str, tally.layers(number))) or "none"
            yield (
                f"{rules.where(number)}: {found.text} is a set of single characters, no range of numbers; "
                f"the rule takes layers {layers}"
            )
