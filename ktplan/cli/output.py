"""What people and programs see: tables and text on stdout, notes and progress on stderr.

Commands print through `Output` alone, so `--json`, `-q`, pipes and NO_COLOR are handled once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ktplan.progress import SILENT, Progress, Task
from ktplan.units import format_rate, format_seconds
from ktplan.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY_S = 30.0  # progress where there is no terminal: one line at this interval


class Output:
    """The only way a command speaks."""

    def __init__(self, *, json_mode: bool = False, quiet: bool = False) -> None:
        self.json_mode = json_mode
        self.quiet = quiet

    def report(self, kind: str, body: Mapping[str, Any], render: Callable[[], None]) -> None:
        """The command's result: one JSON object with `--json`, else whatever `render` prints."""
        if self.json_mode:
            whole = {**body, "kind": kind, "version": 1, "made_by": f"ktplan {__version__}"}
            click.echo(json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False))
        else:
            render()

    def line(self, text: str = "") -> None:
        """A line of the answer."""
        click.echo(text)

    def write(self, text: str) -> None:
        """A piece of the answer as it comes, e.g. of generated text."""
        click.echo(text, nl=False)
        sys.stdout.flush()

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        title: str | None = None,
        right: Iterable[int] = (),
    ) -> None:
        """A table on stdout; `right` lists the column numbers to align right (numbers)."""
        from rich.table import Table

        if title is not None:
            click.secho(title, bold=True)
        flush_right = set(right)
        table = Table(box=None, show_header=any(columns), pad_edge=False, padding=(0, 2, 0, 0))
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number in flush_right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        self._console(sys.stdout).print(table)

    def note(self, text: str) -> None:
        """Something good to know, on stderr."""
        if not self.quiet:
            click.echo(text, err=True)

    def warn(self, text: str) -> None:
        """Something that may be wrong, on stderr even with -q."""
        click.echo(f"warning: {text}", err=True)

    def hint(self, text: str) -> None:
        """The next step, on stderr."""
        self.note(f"next: {text}")

    def progress(self) -> Progress:
        """A bar on a terminal, a line now and then elsewhere, nothing with -q."""
        if self.quiet:
            return SILENT
        return _Bars(self._console(sys.stderr)) if sys.stderr.isatty() else _Lines()

    @staticmethod
    def _console(stream: Any) -> Console:
        from rich.console import Console

        # A pipe must not cut tables: give it room; a terminal keeps its own width.
        width = None if stream.isatty() or os.environ.get("COLUMNS") else 200
        return Console(file=stream, width=width, highlight=False)


class _BarTask:
    def __init__(self, progress: Any, task_id: Any) -> None:
        self._progress, self._task = progress, task_id

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)

    def note(self, text: str) -> None:
        self._progress.update(self._task, note=text)


class _Bars:
    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def task(self, label: str, total: float | None, unit: str = "") -> Iterator[Task]:
        from rich import progress as bars

        size: list[Any] = (
            [bars.DownloadColumn(binary_units=True), bars.TransferSpeedColumn()]
            if unit == "B"
            else [bars.MofNCompleteColumn(), bars.TextColumn("{task.fields[speed]}")]
        )
        with bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=24),
            *size,
            bars.TextColumn("{task.fields[note]}"),
            bars.TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
        ) as progress:
            started = time.monotonic()
            task_id = progress.add_task(label, total=total, note="", speed="")

            class WithSpeed(_BarTask):
                def advance(self, amount: float = 1) -> None:
                    super().advance(amount)
                    done = progress.tasks[0].completed
                    if unit and unit != "B":
                        progress.update(
                            task_id, speed=f"{done / (time.monotonic() - started + 1e-9):,.0f} {unit}/s"
                        )

            yield WithSpeed(progress, task_id)


class _LineTask:
    def __init__(self, label: str, total: float | None, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0.0
        self._note = ""
        self._started = self._printed = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._printed >= LINE_EVERY_S:
            self._printed = now
            click.echo(self._state(now), err=True)

    def note(self, text: str) -> None:
        self._note = text

    def _state(self, now: float) -> str:
        speed = self._done / (now - self._started)
        rate = format_rate(speed) if self._unit == "B" else f"{speed:,.1f} {self._unit or 'items'}/s"
        if not self._total:
            return f"{self._label}: {rate} {self._note}".rstrip()
        left = (self._total - self._done) / speed if speed else 0.0
        share = 100 * self._done / self._total
        return f"{self._label}: {share:.0f} %, {rate}, {format_seconds(left)} left {self._note}".rstrip()


class _Lines:
    @contextmanager
    def task(self, label: str, total: float | None, unit: str = "") -> Iterator[Task]:
        yield _LineTask(label, total, unit)
