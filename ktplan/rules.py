"""Injection rules: which module of a network goes where, in KTransformers' YAML grammar.

    - match:                          # at least one of the two; both given must both hold
        name: ^model\\.layers\\.3\\.mlp\\.experts$     # re.search on the dotted module name, "" for the root
        class: torch.nn.Linear                     # the module's class or one it derives from
      replace:
        class: ktplan.runtime.moe.HybridExperts    # or "default", which only says the device
        kwargs: {gpu_device: gpu, gpu_experts: "0-3,17"}
      recursive: false                # do not look inside the module; default true
      optional: true                  # may match nothing (ours; KTransformers ignores the key)

Rules are tried from the top, the first that matches wins. Reading is strict: what KTransformers would ignore
(a misspelt key, a wrong indent, an unknown argument) is an error here that names file, line and what was
expected. Nothing in a file is ever imported or executed. Needs no torch: applying rules is
`ktplan.runtime.inject`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ktplan.artifact import write_whole
from ktplan.errors import BadInput
from ktplan.experts import parse_ranges

DEFAULT = "default"
HYBRID = "ktplan.runtime.moe.HybridExperts"
KT_EXPERTS = "ktransformers.operators.experts.KTransformersExperts"
KT_EXPERTS_V2 = "ktransformers.operators.experts.KTransformersExpertsV2"

_RULE_KEYS = ("match", "replace", "recursive", "optional")
_MATCH_KEYS = ("name", "class")
_REPLACE_KEYS = ("class", "kwargs")

_DEVICES = ("generate_device", "prefill_device")
_KT_EXPERTS_KWARGS = (*_DEVICES, "generate_op", "prefill_op", "out_device", "backend", "gpu_experts")
# Arguments of KTransformers' other operators (its optimize_rules/*.yaml); those say how, we take only where.
_KT_OPERATOR_KWARGS = (
    *_DEVICES, "generate_op", "prefill_op", "out_device", "absorb_for_prefill", "transfer_map",
    "per_layer_prefill_intput_threshold",
)  # fmt: skip
_CLASS_RANGE = re.compile(r"\[[^\]]*?(\d+)-(\d+)[^\]]*\]")
_KT_OPERATOR = re.compile(r"ktransformers\.operators\.\w+\.\w+")

REPLACEMENTS: Mapping[str, tuple[str, ...]] = {
    DEFAULT: _DEVICES,
    HYBRID: ("gpu_device", "gpu_experts"),
    KT_EXPERTS: _KT_EXPERTS_KWARGS,
    KT_EXPERTS_V2: _KT_EXPERTS_KWARGS,
}


class DigitRange(NamedTuple):
    """`[0-15]` in a pattern: a class of the characters 0 to 1 and 5, where someone meant numbers."""

    text: str
    low: int
    high: int

    @property
    def spelt_out(self) -> str:
        """What was meant, as a pattern."""
        low, high = sorted((self.low, self.high))
        numbers = [str(number) for number in range(low, high + 1)]
        shown = numbers if len(numbers) <= 24 else [*numbers[:3], "...", numbers[-1]]
        return f"(?:{'|'.join(shown)})"


def digit_ranges(pattern: str) -> list[DigitRange]:
    """Classes of characters in a pattern that look like ranges of numbers beyond 9."""
    found = (
        DigitRange(match.group(), int(match.group(1)), int(match.group(2)))
        for match in _CLASS_RANGE.finditer(pattern)
    )
    return [one for one in found if max(one.low, one.high) > 9]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a rule takes: a regex searched in the dotted name, a class, or both."""

    name: str | None = None
    class_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """What becomes of it: a known class (`REPLACEMENTS`) and its arguments."""

    class_name: str = DEFAULT
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One block of a rule file. `line` is where it began, None when it was not read from a file."""

    match: Match
    replace: Replace
    recursive: bool = True
    optional: bool = False
    line: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules in the order they are tried. `origin` names the file they came from, for messages."""

    rules: tuple[Rule, ...]
    origin: str = field(default="rules", compare=False)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def where(self, number: int) -> str:
        """Rule `number` (from 0) as a person finds it: `rules.yaml, line 12 (rule 3)`."""
        line = self.rules[number].line
        return f"{self.origin}, " + (f"line {line} (rule {number + 1})" if line else f"rule {number + 1}")

    def dump(self, heading: str = "") -> str:
        """YAML that `parse` reads back equal and KTransformers' loader understands; `heading` as comments."""
        comments = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
        blocks = [
            yaml.safe_dump([_plain(rule)], sort_keys=False, width=10**6, allow_unicode=True) for rule in self
        ]
        return comments + ("\n".join(blocks) if blocks else "[]\n")

    def save(self, path: Path, heading: str = "") -> None:
        """Write `dump` to a file, whole."""
        write_whole(path, self.dump(heading).encode())


def load(path: Path) -> Rules:
    """Read a rule file. Raises BadInput naming file, line and what was expected there."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text", hint="give a YAML file with a list of rules") from None
    except OSError as fault:
        raise BadInput(f"{path} cannot be read: {fault.strerror}", hint="check the path") from None
    return parse(text, str(path))


def parse(text: str, origin: str = "rules") -> Rules:
    """Rules from YAML text; `origin` stands for the file in messages. Raises BadInput as `load` does."""
    return _Reader(origin).read(text)


def known_class(name: str) -> tuple[str, ...] | None:
    """The arguments that a replacement class takes; None for a class that is not known."""
    if name in REPLACEMENTS:
        return REPLACEMENTS[name]
    return _KT_OPERATOR_KWARGS if _KT_OPERATOR.fullmatch(name) else None


def expert_ids(value: Any) -> tuple[int, ...] | None:
    """`gpu_experts` as ids: `"0-3,17"`, `[0, 1]`, `5`; None stands for `"all"`. Raises BadInput otherwise."""
    if value == "all":
        return None
    if isinstance(value, str):
        return parse_ranges(value)
    ids = [value] if isinstance(value, int) else value
    if isinstance(ids, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in ids):
        return tuple(sorted(set(ids)))
    raise BadInput(f"gpu_experts is {value!r}", hint="write ids like 0-3,17, a list of ids, or all")


def _plain(rule: Rule) -> dict[str, Any]:
    match = {"name": rule.match.name, "class": rule.match.class_name}
    replace: dict[str, Any] = {"class": rule.replace.class_name}
    if rule.replace.kwargs:
        replace["kwargs"] = dict(rule.replace.kwargs)
    block: dict[str, Any] = {
        "match": {key: value for key, value in match.items() if value is not None},
        "replace": replace,
    }
    if not rule.recursive:
        block["recursive"] = False
    if rule.optional:
        block["optional"] = True
    return block


class _Reader:
    """From YAML nodes, which know their lines, to rules."""

    def __init__(self, origin: str) -> None:
        self._origin = origin

    def read(self, text: str) -> Rules:
        try:
            loader = yaml.SafeLoader(text)
        except yaml.YAMLError as fault:  # a character that YAML does not allow
            raise self._unreadable(fault) from None
        try:
            root = loader.get_single_node()
            if not isinstance(root, yaml.SequenceNode):
                raise self._error(root, "a list of rules was expected", "begin each rule with '- match:'")
            rules = tuple(self._rule(node, loader) for node in root.value)
        except yaml.MarkedYAMLError as fault:
            mark = fault.problem_mark or fault.context_mark
            where = f", line {mark.line + 1}" if mark else ""
            raise BadInput(
                f"{self._origin}{where}: not valid YAML: {fault.problem or fault.context}",
                hint="begin every rule with '- match:' in the same column, what belongs to it two further",
            ) from None
        except (yaml.YAMLError, RecursionError) as fault:
            raise self._unreadable(fault) from None
        finally:
            loader.dispose()
        return Rules(rules, self._origin)

    def _unreadable(self, fault: Exception) -> BadInput:
        reason = " ".join(str(fault).split())
        return BadInput(
            f"{self._origin}: not valid YAML: {reason}", hint="give a YAML file with a list of rules"
        )

    def _rule(self, node: yaml.Node, loader: yaml.SafeLoader) -> Rule:
        entries = self._mapping(node, _RULE_KEYS, "a rule")
        for key in ("match", "replace"):
            if key not in entries:
                raise self._error(node, f"the rule has no '{key}'", f"add '{key}:' to it")
        return Rule(
            match=self._match(entries["match"]),
            replace=self._replace(entries["replace"], loader),
            recursive=self._flag(entries, "recursive", default=True),
            optional=self._flag(entries, "optional", default=False),
            line=node.start_mark.line + 1,
        )

    def _match(self, node: yaml.Node) -> Match:
        entries = self._mapping(node, _MATCH_KEYS, "match")
        if not entries:
            raise self._error(node, "match says nothing", "give it a 'name' (a regex), a 'class', or both")
        name = self._text(entries["name"], "name") if "name" in entries else None
        if name is not None:
            try:
                re.compile(name)
            except (re.error, OverflowError, RecursionError) as fault:
                wrong = digit_ranges(name)
                remedy = "write \\. for a dot, \\d+ for a number"
                if wrong:
                    remedy = f"{wrong[0].text} is a set of single characters: write {wrong[0].spelt_out}"
                raise self._error(
                    entries["name"], f"name is no regular expression: {fault}", remedy
                ) from None
        class_name = self._class(entries["class"]) if "class" in entries else None
        return Match(name=name, class_name=class_name)

    def _replace(self, node: yaml.Node, loader: yaml.SafeLoader) -> Replace:
        entries = self._mapping(node, _REPLACE_KEYS, "replace")
        class_name = self._class(entries["class"]) if "class" in entries else DEFAULT
        allowed = known_class(class_name)
        if allowed is None:
            raise self._error(
                entries["class"],
                f"the replacement class {class_name} is not known",
                f"known are {', '.join(REPLACEMENTS)} and the operators ktransformers.operators.*",
            )
        kwargs: dict[str, Any] = {}
        if "kwargs" in entries:
            values = self._mapping(entries["kwargs"], allowed, f"kwargs of {class_name}")
            for key, value in values.items():
                kwargs[key] = self._value(key, value, loader)
                self._check_argument(key, kwargs[key], value)
        if class_name == DEFAULT and "generate_device" not in kwargs:
            raise self._error(
                node, "a default rule says no device", "give kwargs a generate_device: cpu, gpu, cuda:0"
            )
        return Replace(class_name=class_name, kwargs=kwargs)

    def _value(self, key: str, node: yaml.Node, loader: yaml.SafeLoader) -> Any:
        try:
            return loader.construct_document(node)
        except ValueError as fault:  # what looks like a date or a number and is none
            raise self._error(node, f"{key} cannot be read: {fault}", "put it in quotes") from None

    def _check_argument(self, key: str, value: Any, node: yaml.Node) -> None:
        if key == "gpu_experts":
            try:
                expert_ids(value)
            except BadInput as fault:
                raise self._error(node, fault.message, fault.hint or "") from None
        if key in (*_DEVICES, "gpu_device", "out_device") and not is_device(value):
            raise self._error(node, f"{key} is {value!r}", "write cpu, gpu, cuda, or cuda:0, cuda:1 ...")

    def _mapping(self, node: yaml.Node, keys: Iterable[str], what: str) -> dict[str, yaml.Node]:
        keys = tuple(keys)
        expected = f"{what} takes {', '.join(keys)}"
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
            raise self._error(node, f"{what} is empty", f"{expected}; indent them below it")
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, f"{what} is {_kind(node)}, keys were expected", expected)
        entries: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = str(key_node.value)
            if key not in keys:
                raise self._error(key_node, f"'{key}' is not a key of {what}", _suggest(key, keys, expected))
            if key in entries:
                raise self._error(key_node, f"'{key}' is given twice", "keep one of the two")
            entries[key] = value
        return entries

    def _flag(self, entries: Mapping[str, yaml.Node], key: str, *, default: bool) -> bool:
        node = entries.get(key)
        if node is None:
            return default
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:bool":
            raise self._error(node, f"{key} is {_kind(node)}", "write true or false")
        return str(node.value).lower() in ("true", "yes", "on")

    def _text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:str":
            raise self._error(node, f"{what} is {_kind(node)}, text was expected", "put it in quotes")
        return str(node.value)

    def _class(self, node: yaml.Node) -> str:
        name = self._text(node, "class")
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name):
            raise self._error(node, f"'{name}' is not the name of a class", "write it like torch.nn.Linear")
        return name

    def _error(self, node: yaml.Node | None, message: str, hint: str) -> BadInput:
        line = f", line {node.start_mark.line + 1}" if node is not None else ""
        return BadInput(f"{self._origin}{line}: {message}", hint=hint)


def is_device(value: Any) -> bool:
    """True for what a rule may call a device: cpu, gpu, cuda, cuda:N."""
    return isinstance(value, str) and re.fullmatch(r"cpu|gpu|cuda(:[0-9]{1,3})?", value) is not None


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "empty" if node.tag == "tag:yaml.org,2002:null" else f"'{node.value}'"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a block of keys"


def _suggest(key: str, keys: tuple[str, ...], expected: str) -> str:
    close = difflib.get_close_matches(key, keys, n=1)
    if close:
        return f"did you mean '{close[0]}'? {expected}"
    if key == "kwargs":
        return f"kwargs belong inside replace: indent them below it; {expected}"
    return expected
