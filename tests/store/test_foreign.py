"""Folders that kt-kernel 0.7.2 wrote open as stores: merged safetensors and the tree of .kt files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ktplan.convert.cpu import convert_cpu
from ktplan.errors import BadInput
from ktplan.model import open_source, read_spec
from ktplan.quant import Scheme
from ktplan.store import ExpertStore

GOLDEN = Path(__file__).parents[1] / "golden" / "kt-kernel-0.7.2"


def merged(name: str, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(GOLDEN / f"{name}.safetensors", folder / "model-00001-of-00001.safetensors")
    return folder


def tree(tensors: dict[str, np.ndarray], tag: str, folder: Path) -> Path:
    """The files that kt-kernel leaves with --no-merge-safetensor."""
    for name, array in tensors.items():
        _, layer, projection, expert, _, part, what = name.replace("_exps", "").replace("ffn_", "").split(".")
        place = folder / f"_layer_{layer}" / f"_numa_{part}"
        place.mkdir(parents=True, exist_ok=True)
        kind = "quant" if what == "weight" else "scale"
        (place / f"{tag}_{projection}_{expert}_{array.nbytes}Byte_{kind}_.kt").write_bytes(array.tobytes())
    return folder


@pytest.mark.parametrize("name", ["base.int8", "base.int4", "numa2.int8", "numa2.int4"])
def test_what_kt_kernel_wrote_opens_with_the_sizes_that_its_tensors_tell(name: str, tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    bits = int(name[-1])
    opened = [
        ExpertStore.open(merged(name, tmp_path / "merged")),
        ExpertStore.open(tree(tensors, f"INT{bits}", tmp_path / "tree")),
    ]
    for store in opened:
        manifest = store.manifest
        assert store.foreign and manifest.fingerprint is None and manifest.mean_error is None
        assert (manifest.bits, manifest.parts) == (bits, 2 if name.startswith("numa2") else 1)
        assert store.bytes == sum(array.nbytes for array in tensors.values())
        for expert in range(manifest.experts):
            for part in range(manifest.parts):
                packed = store.packed(0, expert, part)._asdict()
                for field, found in packed.items():
                    projection, _, scale = field.partition("_")
                    key = f"blk.0.ffn_{projection}_exps.{expert}.numa.{part}.{'scale' if scale else 'weight'}"
                    assert found.tobytes() == tensors[key].tobytes() and not found.flags.writeable
    for first, second in zip(opened[0].expert(0, 0), opened[1].expert(0, 0), strict=True):
        assert np.array_equal(first, second)


def test_the_same_model_converted_by_both_is_the_same_to_the_reader(tiny: Path, tmp_path: Path) -> None:
    convert_cpu(open_source(tiny), tmp_path / "store", Scheme(4))
    ours = ExpertStore.open(tmp_path / "store")
    expected = ours.expert(2, 3)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for file in (tmp_path / "store").glob("*.safetensors"):
        save_file(load_file(file), theirs / file.name)
    store = ExpertStore.open(theirs)
    for first, second in zip(expected, store.expert(2, 3), strict=True):
        assert np.array_equal(first, second)
    store.check_model(read_spec(tiny))  # the model is not known, but it could be this one


def test_a_foreign_folder_of_other_sizes_is_refused_with_both(tiny: Path, tmp_path: Path) -> None:
    store = ExpertStore.open(merged("base.int8", tmp_path / "merged"))
    with pytest.raises(
        BadInput, match=r"holds layers 0 of \d+ experts, .* tiny has layers 0-3 of 16 experts"
    ):
        store.check_model(read_spec(tiny))


def test_gaps_and_cut_files_are_errors_and_not_the_end(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "base.int8.safetensors")
    last = max(int(name.split(".")[3]) for name in tensors)
    cases = {
        f"blk.0.ffn_gate_exps.{last}.numa.0.scale": "lacks",
        "blk.0.ffn_up_exps.0.numa.0.weight": "but not blk.0.ffn_up_exps.0",
    }
    if last > 1:
        cases["blk.0.ffn_up_exps.1.numa.0.weight"] = "is beyond the 1 experts"
    for number, (gone, words) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({name: array for name, array in tensors.items() if name != gone}, folder / "a.safetensors")
        with pytest.raises(BadInput, match=words):
            ExpertStore.open(folder)
    whole = tree(tensors, "INT8", tmp_path / "tree")
    short = next(whole.rglob("*quant_.kt"))
    short.write_bytes(short.read_bytes()[:-1])
    with pytest.raises(BadInput, match="its name says"):
        ExpertStore.open(whole)


def test_a_folder_of_other_safetensors_is_no_store(tiny: Path) -> None:
    with pytest.raises(BadInput, match="not a finished expert store"):
        ExpertStore.open(tiny)


def test_inspect_and_verify_say_that_the_model_is_not_known(cli: Callable[..., Any], tmp_path: Path) -> None:
    folder = merged("base.int8", tmp_path / "merged")
    done = cli("verify", folder).ok()
    assert "no digests to check" in done.stdout and "does not name its model" in done.stderr
    assert cli("verify", folder, "--json", "-q").ok().json()["foreign"] is True
