"""What a rule file, anybody's, does to a model: every rule's takings, gaps, overlaps, dead rules, bytes of each device.

Nothing is refused here that can be told: the walk is the injector's, but a rule that takes nothing is a finding.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ktplan.experts import format_ranges
from ktplan.network import experts_modules, layer_of
from ktplan.rules import DEFAULT, HYBRID, KT_EXPERTS, KT_EXPERTS_V2, Rule, Rules, digit_ranges, expert_ids
from ktplan.runtime.devices import canonical
from ktplan.runtime.inject import ExpertBytes, is_a
from ktplan.units import format_bytes

_FOR_EXPERTS = (HYBRID, KT_EXPERTS, KT_EXPERTS_V2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to say about a rule (or about the file, `rule` None). Errors make the check fail."""

    level: Literal["error", "warning"]
    rule: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleReport:
    """What one rule takes. `matches` counts modules that it would match if it came first."""

    where: str
    pattern: str
    replaces: str
    modules: int
    matches: int
    layers: str
    experts_layers: str  # layers whose routed experts it takes
    bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """The whole report."""

    rules: tuple[RuleReport, ...]
    findings: tuple[Finding, ...]
    bytes: Mapping[str, int]

    @property
    def errors(self) -> int:
        return sum(finding.level == "error" for finding in self.findings)


def lint(
    model: nn.Module,
    rules: Rules,
    *,
    device: str = "gpu",
    expert_bytes: ExpertBytes | None = None,
    limits: Mapping[str, int] | None = None,
) -> Lint:
    """Check `rules` against a skeleton. `limits` are bytes that a device has; "gpu" stands for every GPU."""
    return _Linter(model, rules, device, expert_bytes, limits or {}).run()


class _Linter:
    def __init__(
        self, model: nn.Module, rules: Rules, device: str, size: ExpertBytes | None, limits: Mapping[str, int]
    ) -> None:
        self._model, self._rules, self._device, self._size, self._limits = model, rules, device, size, limits
        self._routed = {name: layer for layer, (name, _) in experts_modules(model).items()}
        self._patterns = [
            re.compile(rule.match.name) if rule.match.name is not None else None for rule in rules
        ]
        self._taken: dict[int | None, list[str]] = defaultdict(list)
        self._matched: dict[int, list[str]] = defaultdict(list)
        self._hidden: dict[int, int] = defaultdict(int)
        self._bytes: dict[int | None, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._seen: set[int] = set()
        self._findings: list[Finding] = []

    def run(self) -> Lint:
        self._visit(self._model, "", None)
        for number, rule in enumerate(self._rules):
            self._findings += self._about(number, rule)
        gaps = [layer for name, layer in self._routed.items() if name in set(self._taken[None])]
        if gaps and len(self._rules):
            self._say("warning", None, f"no rule takes the routed experts of layers {format_ranges(gaps)}")
        total: dict[str, int] = defaultdict(int)
        for held in self._bytes.values():
            for device, size in held.items():
                total[device] += size
        for device, size in sorted(total.items()):
            limit = self._limits.get(device, self._limits.get("gpu") if device != "cpu" else None)
            if limit is not None and size > limit:
                self._say(
                    "error",
                    None,
                    f"{device} gets {format_bytes(size)} of weights, which exceeds its memory of {format_bytes(limit)}",
                )
        reports = tuple(self._report(number, rule) for number, rule in enumerate(self._rules))
        return Lint(rules=reports, findings=tuple(self._findings), bytes=dict(sorted(total.items())))

    def _visit(self, module: nn.Module, name: str, closed: int | None) -> None:
        all_matching = [n for n, rule in enumerate(self._rules) if self._matches(n, rule, name, module)]
        for number in all_matching:
            if number != closed:  # what lies inside a module that the rule itself closed is no second match
                self._matched[number].append(name)
        decider = closed if closed is not None else (all_matching[0] if all_matching else None)
        if closed is not None:
            for other in all_matching:
                if other != closed:
                    self._hidden[other] += 1
        self._take(decider, name, module, inside=closed is not None)
        closes = decider is not None and not self._rules.rules[decider].recursive
        inner = decider if closes else closed
        for child_name, child in module.named_children():
            self._visit(child, f"{name}.{child_name}" if name else child_name, inner)

    def _matches(self, number: int, rule: Rule, name: str, module: nn.Module) -> bool:
        pattern = self._patterns[number]
        if pattern is not None and pattern.search(name) is None:
            return False
        return rule.match.class_name is None or is_a(module, rule.match.class_name)

    def _take(self, number: int | None, name: str, module: Any, *, inside: bool) -> None:
        rule = self._rules.rules[number] if number is not None else None
        if not inside:
            self._taken[number].append(name)
        if name in self._routed:
            self._take_experts(number, rule, name, module)
            return
        if any(name.startswith(f"{path}.") for path in self._routed):
            return
        if rule is not None and not inside and rule.replace.class_name in _FOR_EXPERTS:
            self._say("error", number, f"takes {name or 'the root'}, which is no experts module; "
                      f"{rule.replace.class_name.rpartition('.')[2]} cannot stand there")  # fmt: skip
        where = canonical(
            str(rule.replace.kwargs.get("generate_device", self._device)) if rule else self._device
        )
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self._bytes[number][where] += tensor.nbytes

    def _take_experts(self, number: int | None, rule: Rule | None, name: str, module: Any) -> None:
        count = int(module.down_proj.shape[0])
        own = 3 * module.down_proj.shape[1] * module.down_proj.shape[2] * module.down_proj.element_size()
        size = self._size or ExpertBytes(gpu=own, cpu=own)
        device = "gpu"
        ids: tuple[int, ...] = ()
        if rule is not None:
            kwargs = rule.replace.kwargs
            default = "cpu" if rule.replace.class_name in _FOR_EXPERTS else self._device
            word = str(
                kwargs.get("gpu_device", "gpu")
                if rule.replace.class_name == HYBRID
                else kwargs.get("generate_device", default)
            )
            device = "gpu" if word == "cpu" else word
            plain = "" if rule.replace.class_name == HYBRID or word == "cpu" else "all"
            found = expert_ids(kwargs.get("gpu_experts", plain))
            ids = tuple(range(count)) if found is None else found
            beyond = [expert for expert in ids if expert >= count]
            if beyond:
                self._say(
                    "error", number, f"places expert {beyond[0]} of {name}, there are only 0-{count - 1}"
                )
        on_gpu = len(ids)
        if on_gpu:
            self._bytes[number][canonical(device)] += on_gpu * size.gpu
        if count > on_gpu:
            self._bytes[number]["cpu"] += (count - on_gpu) * size.cpu

    def _about(self, number: int, rule: Rule) -> Iterator[Finding]:
        taken, matched = set(self._taken[number]), self._matched[number]
        if not matched:
            yield Finding(level="error", rule=number, text="matches no module of this model")
        elif not taken:
            why = (
                "inside modules that earlier rules close (recursive: false)"
                if self._hidden[number] == len(matched)
                else "all taken by earlier rules"
            )
            yield Finding(
                level="error", rule=number, text=f"is unreachable: its {len(matched)} modules are {why}"
            )
        lost = len(matched) - len(taken)
        last = number == len(self._rules) - 1
        if taken and lost and not last and rule.replace.class_name != DEFAULT:
            yield Finding(
                level="warning",
                rule=number,
                text=f"overlaps: {lost} of the {len(matched)} modules it matches go to earlier rules",
            )
        pattern = rule.match.name or ""
        for wrong in digit_ranges(pattern):
            layers = format_ranges(self._layers(self._taken[number])) or "none"
            yield Finding(
                level="warning", rule=number,
                text=f"{wrong.text} is a set of single characters, no range {wrong.low} to {wrong.high}: it takes "
                f"layers {layers}; write {wrong.spelt_out}",
            )  # fmt: skip
        yield from self._loose(number, pattern)

    def _loose(self, number: int, pattern: str) -> Iterator[Finding]:
        """`layers.1` or `layers.1.*` takes 10 to 19, too; a bare dot takes any character."""
        for found in re.finditer(r"layers\\?\.(\d+)(?=$|\.\*|\.(?!\w))", pattern):
            layer = found.group(1)
            taken = self._layers(self._taken[number])
            others = [n for n in taken if str(n) != layer and str(n).startswith(layer)]
            if others:
                text = f"does not end layer {layer}: layers {format_ranges(others)} are taken, too; write '{layer}\\.'"
                yield Finding(level="warning", rule=number, text=text)
        if re.search(r"(?<!\\)\.(?=layers|mlp|experts|self_attn|\d)", pattern):
            text = "has a dot that is not escaped: '.' is any character, write '\\.'"
            yield Finding(level="warning", rule=number, text=text)

    def _layers(self, names: list[str]) -> list[int]:
        return sorted({layer for name in names if (layer := layer_of(name)) is not None})

    def _report(self, number: int, rule: Rule) -> RuleReport:
        names = self._taken[number]
        pattern = " and ".join(
            f"{key} {value}"
            for key, value in (("name", rule.match.name), ("class", rule.match.class_name))
            if value
        )
        return RuleReport(
            where=self._rules.where(number),
            pattern=pattern,
            replaces=rule.replace.class_name,
            modules=len(names),
            matches=len(self._matched[number]),
            layers=format_ranges(self._layers(names)),
            experts_layers=format_ranges([self._routed[name] for name in names if name in self._routed]),
            bytes=dict(sorted(self._bytes[number].items())),
        )

    def _say(self, level: Literal["error", "warning"], rule: int | None, text: str) -> None:
        finding = Finding(level=level, rule=rule, text=text)
        if finding not in self._findings:
            self._findings.append(finding)
