"""--threads beyond the cores there are: a warning, not a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktplan.hardware import usable_cores


def test_more_threads_than_cores_are_warned_about(cli: Callable[..., Any], tmp_path: Path) -> None:
    most = usable_cores().most
    many = cli("convert-cpu", "tiny", "-o", tmp_path / "store", "--dry-run", "--threads", most + 1).ok()
    assert f"warning: {most + 1} threads wait for each other on {most} cores" in many.stderr
    few = cli("convert-cpu", "tiny", "-o", tmp_path / "store", "--dry-run", "--threads", most).ok()
    assert "warning" not in few.stderr
