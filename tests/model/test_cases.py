"""Inputs that broke other tools (reference data beside the checkout): read rightly, or refused in words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktplan.errors import BadInput
from ktplan.model import open_source

pytest.importorskip("gguf")

READING = [
    "B01", "B02", "B03", "B05", "B07", "B09", "B10", "B12", "B13", "B14", "B17", "B18",
    "B20", "B22", "B23", "B24", "B25", "B27", "B28", "B29", "B31", "B33", "B34", "B36",
    "B38", "B39", "B40", "B41", "B44", "B45", "B47",
]  # fmt: skip


@pytest.fixture(scope="module")
def cases(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    command = [sys.executable, str(reference / "cases" / "build_cases.py"), str(folder), "--only", *READING]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", READING)
def test_case(name: str, cases: Path) -> None:
    case = json.loads((cases / name / "case.json").read_text("utf-8"))
    model = cases / name / (case["args"].get("model") or "model")
    expected = case["expect"]
    if expected["exit"] == "nonzero":
        with pytest.raises(BadInput) as refusal:
            open_source(model)
        _assert_mentions(refusal.value, expected)
        return
    if name == "B17":  # big-endian GGUF: the one case that allows either and that we refuse
        with pytest.raises(BadInput) as refusal:
            open_source(model)
        _assert_mentions(refusal.value, expected["if_nonzero"])
        return
    source = open_source(model)
    if "moe_layers" in expected:
        assert list(source.spec.moe_layers) == expected["moe_layers"]
    _assert_equals_reference(source, cases / name / "ref" / "experts.safetensors")


def _assert_mentions(refusal: BadInput, expected: Any) -> None:
    said = f"{refusal.message} {refusal.hint}"
    for pattern in expected["mentions"]:
        assert re.search(pattern, said, re.IGNORECASE), f"{pattern!r} is not in {said!r}"


def _assert_equals_reference(source: Any, file: Path) -> None:
    from safetensors.numpy import load_file

    wanted = load_file(file)
    assert len(source.spec.moe_layers) * source.spec.experts * 3 <= len(wanted)
    for key, values in wanted.items():
        _, layer, _, expert, role = key.split(".")
        field = role.replace("_proj", "")
        np.testing.assert_array_equal(
            getattr(source.expert(int(layer), int(expert)), field), values, err_msg=key
        )
