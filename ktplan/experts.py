"""Names of routed experts and sets of them.

A layer is always the model's own layer number, never "the n-th MoE layer".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ktplan.errors import BadInput

_NUMBER = re.compile(
    r"[0-9]{1,6}"
)  # longer ones are no expert ids, and "0-99999999999" would fill the memory


class ExpertId(NamedTuple):
    """One routed expert; sorts by layer, then by id."""

    layer: int
    expert: int


class ExpertSet:
    """An immutable set of experts, iterated in order, written per layer as ranges: `{"3": "0-3,17"}`."""

    __slots__ = ("_by_layer", "_size")

    def __init__(self, experts: Iterable[ExpertId] = ()) -> None:
        by_layer: dict[int, set[int]] = {}
        for layer, expert in experts:
            by_layer.setdefault(layer, set()).add(expert)
        self._by_layer: dict[int, tuple[int, ...]] = {
            layer: tuple(sorted(by_layer[layer])) for layer in sorted(by_layer)
        }
        self._size = sum(map(len, self._by_layer.values()))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have at least one expert here, ascending."""
        return tuple(self._by_layer)

    def layer(self, layer: int) -> tuple[int, ...]:
        """The expert ids of one layer, ascending; empty when there are none."""
        return self._by_layer.get(layer, ())

    def to_ranges(self) -> dict[str, str]:
        """Layer number to range string, for JSON and YAML."""
        return {str(layer): format_ranges(ids) for layer, ids in self._by_layer.items()}

    @classmethod
    def from_ranges(cls, ranges: Mapping[str, str]) -> ExpertSet:
        """Inverse of `to_ranges`. Raises BadInput for text that is no range."""
        experts: list[ExpertId] = []
        for layer, text in ranges.items():
            if not str(layer).isdecimal():
                raise BadInput(f"'{layer}' is not a layer number", hint="write layers as 0, 1, 2 ...")
            experts += [ExpertId(int(layer), expert) for expert in parse_ranges(text)]
        return cls(experts)

    def __contains__(self, item: object) -> bool:
        return isinstance(item, tuple) and len(item) == 2 and item[1] in self._by_layer.get(item[0], ())

    def __iter__(self) -> Iterator[ExpertId]:
        return (ExpertId(layer, expert) for layer, ids in self._by_layer.items() for expert in ids)

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertSet) and self._by_layer == other._by_layer

    def __hash__(self) -> int:
        return hash(tuple(self._by_layer.items()))

    def __or__(self, other: ExpertSet) -> ExpertSet:
        return ExpertSet([*self, *other])

    def __and__(self, other: ExpertSet) -> ExpertSet:
        return ExpertSet(expert for expert in self if expert in other)

    def __sub__(self, other: ExpertSet) -> ExpertSet:
        return ExpertSet(expert for expert in self if expert not in other)

    def __repr__(self) -> str:
        return f"ExpertSet({self.to_ranges()})"


def format_ranges(ids: Iterable[int]) -> str:
    """`[0, 1, 2, 3, 17]` becomes `"0-3,17"`."""
    runs: list[list[int]] = []
    for number in sorted(set(ids)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_ranges(text: str) -> tuple[int, ...]:
    """`"0-3,17"` becomes `(0, 1, 2, 3, 17)`; empty text is no expert. Raises BadInput for anything else."""
    ids: set[int] = set()
    for run in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = run.partition("-")
        if _NUMBER.fullmatch(first) is None or (
            dash and (_NUMBER.fullmatch(last) is None or int(last) < int(first))
        ):
            raise BadInput(f"'{run}' in '{text}' is not a range of expert ids", hint="write ids like 0-3,17")
        ids.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(ids))
