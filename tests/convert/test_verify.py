"""`ktplan verify` finds what is wrong with a store, names it, and says so with its exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktplan.convert.cpu import convert_cpu
from ktplan.model import open_source
from ktplan.quant import Scheme


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "int4"
    convert_cpu(open_source(tiny), folder, Scheme(4))
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def test_a_whole_store_is_told_worst_tensors_first(cli: Callable[..., Any], made: Path) -> None:
    text = cli("verify", made).ok().stdout
    assert "64 experts, int4-row, whole; digests agree" in text
    body = cli("verify", made, "--against", "tiny", "--json", "-q").ok().json()
    errors = [tensor["error"] for tensor in body["tensors"]]
    assert len(errors) == 64 * 3 and errors == sorted(errors, reverse=True) and not body["damages"]
    assert all(abs(t["error"] - t["recorded"]) <= 0.002 * t["recorded"] for t in body["tensors"])


def test_an_error_above_the_bound_exits_with_1_and_names_the_tensor(
    cli: Callable[..., Any], made: Path
) -> None:
    done = cli("verify", made, "--against", "tiny", "--max-error", "0.05")
    done.refused(1, "differs by 0.1", "more than --max-error 0.05")
    assert "relative weight error: mean 0.1" in done.stdout
    cli("verify", made, "--against", "tiny", "--max-error", "nan").refused(2, "'nan' is not a finite number")


def test_one_changed_byte_is_found(cli: Callable[..., Any], copy: Path) -> None:
    shard = copy / "model-00002-of-00004.safetensors"
    data = bytearray(shard.read_bytes())
    data[-2000] ^= 0x10
    shard.write_bytes(data)
    done = cli("verify", copy)
    done.refused(4, "model-00002-of-00004.safetensors: its digest differs")
    assert "damaged" in done.stdout


def test_weights_that_are_not_the_models_are_found_even_with_right_digests(
    cli: Callable[..., Any], copy: Path
) -> None:
    # As if a converter had written the wrong expert: everything agrees with itself, only the model tells.
    import hashlib

    shard = copy / "model-00003-of-00004.safetensors"
    data = bytearray(shard.read_bytes())
    size = (len(data) - 8 - int.from_bytes(data[:8], "little")) // 16
    data[-size:] = data[-2 * size : -size]
    shard.write_bytes(data)
    body = json.loads((copy / "store.json").read_text())
    body["files"][2]["sha256"] = "sha256:" + hashlib.sha256(data).hexdigest()
    (copy / "store.json").write_text(json.dumps(body))
    cli("verify", copy, "-q").ok()
    cli("verify", copy, "--against", "tiny").refused(
        4, "layer 2, expert 15, gate: differs from the model by 1."
    )


def test_another_model_is_refused(
    cli: Callable[..., Any], made: Path, family_checkpoint: Callable[..., Path]
) -> None:
    cli("verify", made, "--against", family_checkpoint("olmoe")).refused(4, "was made from tiny")
