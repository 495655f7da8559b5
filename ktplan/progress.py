"""Progress is an argument, not a global: long functions take one and report to it.

The command line passes a bar or timed lines; tests and libraries pass nothing and get SILENT.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One long piece of work under way."""

    def advance(self, amount: float = 1) -> None:
        """`amount` more units are done."""

    def note(self, text: str) -> None:
        """A short remark beside the bar, e.g. the error so far; replaces the last one."""


class Progress(Protocol):
    """Where a long function tells how far it is."""

    def task(self, label: str, total: float | None, unit: str = "") -> AbstractContextManager[Task]:
        """Begin a piece of work of `total` units (None: not known). `unit` "B" prints GB/s, else units/s."""


class _SilentTask:
    def advance(self, amount: float = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _Silent:
    @contextmanager
    def task(self, label: str, total: float | None, unit: str = "") -> Iterator[Task]:
        yield _SilentTask()


SILENT: Progress = _Silent()
