"""What was measured, point by point, kept in a file that a later run goes on with; and the tables made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from side_by_side import SHAPES, Block, Routing, Series

from peers.ours import FORMATS, bytes_per_weight

ALIKE = 1.13  # so much larger weights still count as "no more bytes": 0.5625 against 0.5


class Point(NamedTuple):
    shape: str
    tokens: int
    threads: int
    name: str  # "ktplan int8 a16", "read int8", or a peer's


class Results:
    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.points: dict[Point, Series] = {}
        self.bytes: dict[str, float] = {f"ktplan {form}": bytes_per_weight(form) for form in FORMATS}
        self.limits: dict[str, Any] = {}
        self.machine: dict[str, Any] = {}
        if path is not None and path.exists():
            held = json.loads(path.read_text())
            self.limits, self.machine = held["limits"], held["machine"]
            self.bytes |= held["bytes"]
            for entry in held["points"]:
                series = Series([Block(*b) for b in entry["blocks"]], entry["threads"] == 1)
                self.points[Point(*(entry[f] for f in Point._fields))] = series

    def add(self, point: Point, found: Block) -> None:
        self.points.setdefault(point, Series(one_thread=point.threads == 1)).blocks.append(found)

    def seconds(self, shape: str, tokens: int, threads: int, name: str) -> float | None:
        series = self.points.get(Point(shape, tokens, threads, name))
        return None if series is None else series.seconds

    def save(self) -> None:
        if self.path is None:
            return
        points = [
            {**point._asdict(), "ms": series.seconds * 1e3, "mark": series.mark,
             "blocks": [tuple(asdict(b).values()) for b in series.blocks]}
            for point, series in self.points.items()
        ]  # fmt: skip
        body = {"machine": self.machine, "limits": self.limits, "bytes": self.bytes, "points": points}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(body, indent=1))
        os.replace(partial, self.path)

    def size(self, name: str) -> float:
        """Bytes a weight of a candidate."""
        return self.bytes[name.rsplit(" a", 1)[0] if name.startswith("ktplan") else name]

    def read_rate(self, shape: str, threads: int, form: str) -> float | None:
        """Bytes a second of reading the weights alone: the median over all turns with this format."""
        blocks = [
            b for p, s in self.points.items() for b in s.blocks
            if (p.shape, p.threads, p.name) == (shape, threads, f"read {form}")
        ]  # fmt: skip
        if not blocks:
            return None
        packed = FORMATS[form]["bits"] / 8 * SHAPES[shape].weights * SHAPES[shape].experts
        return packed / Series(blocks, threads == 1).seconds

    def best_peer(self, shape: str, tokens: int, threads: int, size: float) -> tuple[str, float] | None:
        """The fastest peer whose weights take no more bytes, and its seconds; whatever its number of threads."""
        found = [
            (series.seconds, point.name)
            for point, series in self.points.items()
            if (point.shape, point.tokens) == (shape, tokens)
            and not point.name.startswith(("ktplan", "read"))
            and point.threads in (threads, 1)
            and self.size(point.name) <= size * ALIKE
        ]
        return (min(found)[1], min(found)[0]) if found else None

    def floors(self, shape: str, tokens: int, threads: int, name: str) -> tuple[float | None, float | None]:
        """Seconds that reading the experts hit, and multiplying, take at least."""
        form = name.split()[1]
        read = self.read_rate(shape, threads, form)
        peak = self.limits.get(f"{'bf16' if form == 'bf16' else 'int8'} {threads}", {}).get("rate")
        hit = Routing(tokens, SHAPES[shape]).experts_hit * SHAPES[shape].weights * self.size(name)
        return hit / read if read else None, SHAPES[shape].operations(tokens) / peak if peak else None

    def rows(self, shapes: Iterable[str], tokens: Iterable[int], threads: int) -> Iterable[list[str]]:
        for shape in shapes:
            for count in tokens:
                mine = {p.name: s for p, s in self.points.items()
                        if (p.shape, p.tokens) == (shape, count) and not p.name.startswith("read")
                        and p.threads in (threads, 1)}  # fmt: skip
                hit = Routing(count, SHAPES[shape]).experts_hit * SHAPES[shape].weights
                for name, series in sorted(mine.items(), key=lambda item: item[1].seconds):
                    yield [shape, str(count), *self._row(shape, count, threads, name, series, hit)]

    def _row(self, shape: str, count: int, threads: int, name: str, series: Series, hit: float) -> list[str]:
        seconds, size = series.seconds, self.size(name)
        of_limit = against = ""
        if name.startswith("ktplan"):
            floors = self.floors(shape, count, threads, name)
            if None not in floors:
                memory, compute = floors
                of_limit = f"{max(floors) / seconds:.2f} {'m' if memory > compute else 'c'}"
            best = self.best_peer(shape, count, threads, size)
            if best is not None:
                against = f"{best[1] / seconds:.2f} x {best[0]}"
        return [
            name,
            f"{size:.2f}",
            f"{seconds * 1e3:.3f}{series.mark}",
            f"{hit * size / seconds / 1e9:.1f}",
            f"{SHAPES[shape].operations(count) / seconds / 1e9:.0f}",
            of_limit,
            against,
            f"{series.others:.0%}",
        ]


HEADER = (
    "shape",
    "tokens",
    "engine",
    "B/weight",
    "ms",
    "GB/s",
    "GOP/s",
    "of limit",
    "best peer / ours",
    "others",
)
