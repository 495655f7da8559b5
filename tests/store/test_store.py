"""Opening a store: what is checked, what is mapped, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktplan.convert.cpu import convert_cpu
from ktplan.errors import BadInput, KtplanError
from ktplan.model import open_source, read_spec
from ktplan.quant import Scheme, dequantize, quantize_rows
from ktplan.store import ExpertStore


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "int8-2"
    convert_cpu(open_source(tiny), folder, Scheme(8), numa_parts=2)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(BadInput) as found:
        ExpertStore.open(folder)
    for word in words:
        assert word in found.value.message
    assert found.value.hint


def test_the_manifest_says_what_the_store_is(made: Path, tiny: Path) -> None:
    manifest = ExpertStore.open(made).manifest
    spec = read_spec(tiny)
    assert (manifest.scheme, manifest.bits, manifest.rounding, manifest.layout) == (
        "int8-row",
        8,
        "mse",
        "amx-int8-v1",
    )
    assert (manifest.parts, manifest.layers, manifest.experts) == (2, (0, 1, 2, 3), 16)
    assert (manifest.hidden, manifest.intermediate, manifest.activation) == (256, 128, "silu")
    assert (manifest.model, manifest.family, manifest.fingerprint) == ("tiny", "qwen3_moe", spec.fingerprint)
    assert manifest.total_bytes == sum(file.stat().st_size for file in made.glob("*.safetensors"))
    assert ExpertStore.open(made).bytes == manifest.total_bytes
    assert 3 * 256 * 128 < manifest.bytes_per_expert < 1.05 * 3 * 256 * 128


def test_packed_arrays_are_aligned_read_only_views_of_the_file(made: Path) -> None:
    store = ExpertStore.open(made)
    for part in range(2):
        packed = store.packed(3, 15, part)
        sizes = [(array.dtype, array.size) for array in packed]
        assert sizes == [("uint8", 64 * 256), ("float32", 64)] * 2 + [("uint8", 256 * 64), ("float32", 256)]
        for array in packed:
            assert array.ctypes.data % 64 == 0
            assert not array.flags.writeable and not array.flags.owndata
            assert type(array) is np.ndarray
    assert np.shares_memory(store.packed(3, 15, 1).gate, store.packed(3, 15, 1).gate)


def test_tensor_data_starts_on_a_page(made: Path) -> None:
    for file in made.glob("*.safetensors"):
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
        assert (8 + length) % 4096 == 0
        facts = header["__metadata__"]
        assert (facts["format"], facts["layout"], facts["scheme"], facts["parts"]) == (
            "ktplan-expert-store",
            "amx-int8-v1",
            "int8-row",
            "2",
        )
        assert facts["fingerprint"].startswith("sha256:")


def test_parts_put_together_are_the_source_quantized_part_by_part(made: Path, tiny: Path) -> None:
    store, exact = ExpertStore.open(made), open_source(tiny).expert(2, 5)
    found = store.expert(2, 5)

    def rounded(matrix: np.ndarray) -> np.ndarray:
        return dequantize(quantize_rows(matrix, Scheme(8)))

    assert np.array_equal(found.gate, rounded(exact.gate))
    assert np.array_equal(found.up, rounded(exact.up))
    # Each part's down scale comes from its own columns.
    assert np.array_equal(found.down, np.hstack([rounded(exact.down[:, :64]), rounded(exact.down[:, 64:])]))


def test_the_recorded_errors_are_the_real_ones(made: Path, tiny: Path) -> None:
    store, source = ExpertStore.open(made), open_source(tiny)
    for layer, expert in ((0, 0), (3, 15)):
        for name, exact, found in zip(
            ("gate", "up", "down"), source.expert(layer, expert), store.expert(layer, expert), strict=True
        ):
            error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
            assert store.manifest.errors[layer][name][expert] == pytest.approx(error, rel=1e-3)
    worst = store.manifest.worst(1)[0]
    assert worst.error == max(found.error for found in store.manifest.each_error())


def test_another_model_is_refused_with_both_fingerprints(
    made: Path, family_checkpoint: Callable[..., Path], tiny: Path
) -> None:
    store = ExpertStore.open(made)
    store.check_model(read_spec(tiny))
    other = read_spec(family_checkpoint("mixtral"))
    with pytest.raises(BadInput) as found:
        store.check_model(other)
    assert (
        store.manifest.fingerprint[:19] in found.value.message
        and other.fingerprint[:19] in found.value.message
    )


@pytest.mark.parametrize(("layer", "expert", "part"), [(4, 0, 0), (0, 16, 0), (0, -1, 0), (0, 0, 2)])
def test_what_the_store_does_not_hold_is_refused(made: Path, layer: int, expert: int, part: int) -> None:
    with pytest.raises(BadInput):
        ExpertStore.open(made).packed(layer, expert, part)


def test_a_folder_without_a_manifest_is_unfinished(copy: Path) -> None:
    (copy / "store.json").unlink()
    refused(copy, "not a finished expert store", "no store.json")


def test_things_that_are_no_store_are_named(tmp_path: Path, tiny: Path) -> None:
    refused(tmp_path / "nowhere", "does not exist")
    file = tmp_path / "file"
    file.write_text("x")
    refused(file, "is not a folder")
    refused(tiny, "not a finished expert store")


def test_a_cut_or_missing_shard_is_named_with_its_sizes(copy: Path) -> None:
    shard = copy / "model-00002-of-00004.safetensors"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 100)
    refused(copy, shard.name, f"{size - 100:,}", f"{size:,}")
    shard.unlink()
    refused(copy, shard.name, "missing")


def test_shards_that_changed_places_are_found_out(copy: Path) -> None:
    one, two = copy / "model-00001-of-00004.safetensors", copy / "model-00002-of-00004.safetensors"
    spare = copy / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    with pytest.raises(BadInput, match=r"blk\.0\.ffn_gate_exps\.0\.numa\.0\.weight is missing"):
        ExpertStore.open(copy).packed(0, 0)


def test_a_flipped_byte_is_found_by_verify(copy: Path) -> None:
    store = ExpertStore.open(copy)
    store.verify()
    with (copy / "model-00003-of-00004.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(BadInput, match="model-00003-of-00004"):
        store.verify()


def test_a_newer_version_names_the_program_that_wrote_it(copy: Path) -> None:
    manifest = copy / "store.json"
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**body, "version": 99, "made_by": "ktplan 9.0"}))
    with pytest.raises(BadInput, match="version 99") as found:
        ExpertStore.open(copy)
    assert "ktplan 9.0" in str(found.value.hint)


def test_a_manifest_survives_writing_and_reading(made: Path, tmp_path: Path) -> None:
    manifest = ExpertStore.open(made).manifest
    manifest.save(tmp_path)
    assert type(manifest).load(tmp_path) == manifest
    assert (tmp_path / "store.json").read_bytes() == (made / "store.json").read_bytes()


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_manifest_is_refused_in_words(
    made: Path, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    body = json.loads((made / "store.json").read_text())
    key = data.draw(st.sampled_from(sorted(set(body) - {"made_by", "summary"})))
    value = data.draw(junk)
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "store.json").write_text(json.dumps({**body, key: value}))
    with pytest.raises(KtplanError) as found:  # the shards are missing too, so every such folder is refused
        ExpertStore.open(folder)
    assert str(folder) in found.value.message


def test_a_file_name_may_not_leave_the_folder(made: Path, tmp_path: Path) -> None:
    manifest = ExpertStore.open(made).manifest
    away = replace(manifest, files=(replace(manifest.files[0], name="../x.safetensors"), *manifest.files[1:]))
    away.save(tmp_path)
    refused(tmp_path, "leaves the folder")
