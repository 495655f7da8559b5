"""Where group-wise INT4, its scales and bfloat16 lie, and what a store says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktplan.convert.cpu import convert_cpu
from ktplan.errors import BadInput
from ktplan.model import open_source
from ktplan.quant import Bfloat16Rows, Scheme, dequantize_stored, quantize_groups
from ktplan.quant.groups import narrow, widen
from ktplan.store import LAYOUTS, ExpertStore, StoreShape, legal_parts, pack
from ktplan.store.layout import layout_for, pack_scales, padded, unpack_bfloat16, unpack_scales
from ktplan.store.manifest import expert_bytes_as

SCHEMES = [Scheme(4, 32), Scheme(4, 64), Scheme(4, 128), Scheme(16, rounding="nearest")]


@pytest.fixture(scope="module", params=SCHEMES, ids=lambda scheme: scheme.name)
def made(request: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Scheme, Path]:
    scheme: Scheme = request.param
    folder = tmp_path_factory.mktemp("store") / scheme.name
    convert_cpu(open_source(tiny), folder, scheme)
    return scheme, folder


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (96, 1824), (160, 3616)])
def test_bfloat16_values_lie_where_the_tiles_say(rows: int, columns: int) -> None:
    values = np.random.default_rng(rows).integers(0, 1 << 16, (rows, columns), dtype=np.uint16)
    packed = pack(values, 16)
    assert np.array_equal(unpack_bfloat16(packed, rows, columns), values)
    words = packed.view(np.uint16)
    for row, column in (
        (0, 0),
        (0, 1),
        (1, 0),
        (15, 31),
        (16, 0),
        (31, columns - 1),
        (rows - 1, columns - 1),
    ):
        block_rows = min(64, rows - row // 64 * 64)
        width = min(1792, columns - column // 1792 * 1792)
        offset = row // 64 * 64 * columns + column // 1792 * 1792 * block_rows + row % 64 // 32 * 32 * width
        offset += column % 1792 // 32 * 1024 + row % 32 // 16 * 512
        offset += column % 32 // 2 * 32 + row % 16 * 2 + column % 2
        assert words[offset] == values[row, column], (row, column)


def test_scales_of_32_rows_and_one_group_make_a_line() -> None:
    scale = np.arange(96 * 5, dtype=np.uint16).reshape(96, 5)
    lines = pack_scales(scale)
    for row, group in ((0, 0), (31, 0), (0, 4), (33, 2), (95, 4)):
        assert lines[(row // 32 * 5 + group) * 32 + row % 32] == scale[row, group]
    assert np.array_equal(unpack_scales(lines, 96), scale)
    assert np.array_equal(unpack_scales(lines.reshape(3, 5, 32), 96), scale)


def test_layouts_by_name_and_what_they_ask_of_a_model() -> None:
    assert set(LAYOUTS) == {
        "amx-int8-v1", "amx-int4-v1", "int4-g32-v1", "int4-g64-v1", "int4-g128-v1", "bf16-v1",
    }  # fmt: skip
    assert layout_for(4, 64).name == "int4-g64-v1" and layout_for(16).name == "bf16-v1"

    class Sizes:
        hidden, moe_intermediate = 2880, 96

    assert legal_parts(Sizes, 16) == (1, 3) and legal_parts(Sizes, 4) == ()
    assert padded(96, 16) == 96 and padded(97, 16) == 128
    assert expert_bytes_as(Sizes, 4, 32) is None
    assert expert_bytes_as(Sizes, 16) == 2 * 3 * 2880 * 96


@pytest.mark.parametrize(("group", "size"), [(None, 0.5), (32, 0.5625), (64, 0.53125), (128, 0.515625)])
def test_bytes_of_an_expert_are_exact(group: int | None, size: float) -> None:
    shape = StoreShape(bits=4, group=group, parts=1, experts=2, hidden=2048, intermediate=768)
    weights = 3 * 2048 * 768
    scales = 4 * (2 * 768 + 2048) if group is None else 0
    assert shape.plain_bytes(4) == weights * size + scales
    assert shape.plain_bytes(4) == sum(tensor.bytes for tensor in shape.tensors(0, 0, 0))
    assert shape.plain_bytes(8) == weights + 4 * (2 * 768 + 2048)


def test_a_store_gives_back_what_the_specification_rounds_to(made: tuple[Scheme, Path], tiny: Path) -> None:
    scheme, folder = made
    store = ExpertStore.open(folder)
    store.verify()
    exact = open_source(tiny).expert(2, 5)
    for given, found in zip(exact, store.expert(2, 5), strict=True):
        wanted = Bfloat16Rows(narrow(given)) if scheme.group is None else quantize_groups(given, scheme.group)
        assert np.array_equal(found, dequantize_stored(wanted))
    if scheme.bits == 16:  # the checkpoint is bfloat16: nothing is lost
        assert np.array_equal(store.expert(2, 5).up, exact.up)


def test_a_store_says_its_format_and_holds_what_it_says(made: tuple[Scheme, Path]) -> None:
    scheme, folder = made
    manifest = ExpertStore.open(folder).manifest
    assert (manifest.scheme, manifest.bits, manifest.group) == (scheme.name, scheme.bits, scheme.group)
    assert manifest.layout == ("bf16-v1" if scheme.bits == 16 else f"{scheme.name}-v1")
    weights = 3 * 256 * 128
    per_weight = 2 if scheme.group is None else 0.5 + 2 / scheme.group
    assert manifest.bytes_per_expert == weights * per_weight
    body = json.loads((folder / "store.json").read_text())
    assert body.get("group_size") == scheme.group
    from safetensors import safe_open

    with safe_open(folder / manifest.files[0].name, framework="np") as shard:
        names = list(shard.keys())
    assert all(name.startswith("own.blk.") for name in names)  # kt-kernel must not find them
    assert len(names) == 16 * (3 if scheme.bits == 16 else 6)


def test_packed_arrays_are_what_kernels_take(made: tuple[Scheme, Path]) -> None:
    scheme, folder = made
    packed = ExpertStore.open(folder).packed(1, 2)
    assert packed.down.ctypes.data % 64 == 0
    if scheme.group is None:
        assert packed.gate_scale is packed.up_scale is packed.down_scale is None
        return
    assert packed.gate_scale is not None and packed.gate_scale.dtype == np.uint16
    assert packed.gate_scale.shape == (128 // 32, 256 // scheme.group, 32)
    assert packed.down_scale is not None and packed.down_scale.shape == (256 // 32, 128 // scheme.group, 32)
    assert packed.down_scale.ctypes.data % 64 == 0 and np.isfinite(widen(packed.down_scale)).all()


def test_the_runtime_computes_what_the_stored_weights_say(made: tuple[Scheme, Path]) -> None:
    torch = pytest.importorskip("torch")
    from ktplan.kernels import Pool
    from ktplan.runtime.cpu_experts import CpuExperts

    store = ExpertStore.open(made[1])
    experts = CpuExperts(store, 1, ids=range(16), pool=Pool(1), activation_bits=16)
    assert experts.bytes == 16 * store.manifest.bytes_per_expert
    random = np.random.default_rng(1)
    hidden = torch.from_numpy(random.standard_normal((5, 256), np.float32)).bfloat16()
    index = torch.from_numpy(random.integers(0, 16, (5, 4)))
    expected = np.zeros((5, 256), np.float32)
    for token in range(5):
        for expert in index[token].tolist():
            own, x = store.expert(1, expert), hidden[token].float().numpy()
            gate = own.gate @ x
            expected[token] += 0.25 * (own.down @ (gate / (1 + np.exp(-gate)) * (own.up @ x)))
    found = experts.forward(hidden, index, torch.full((5, 4), 0.25)).numpy()
    # bfloat16 weights are multiplied with bfloat16 activations: between gate/up and down these are rounded
    limit = 1e-2 if made[0].bits == 16 else 1e-3
    assert np.abs(found - expected).max() < limit * np.abs(expected).max()


def test_an_unknown_layout_is_not_called_damage(made: tuple[Scheme, Path], tmp_path: Path) -> None:
    text = (made[1] / "store.json").read_text()
    name = ExpertStore.open(made[1]).manifest.layout
    (tmp_path / "store.json").write_text(text.replace(name, "int3-g32-v9"))
    with pytest.raises(BadInput, match="layout 'int3-g32-v9', which this version does not know") as found:
        ExpertStore.open(tmp_path)
    assert found.value.hint is not None and "int4-g32-v1" in found.value.hint


def test_a_layout_that_contradicts_its_bits_is_damage(made: tuple[Scheme, Path], tmp_path: Path) -> None:
    body = json.loads((made[1] / "store.json").read_text())
    body["bits"] = 8
    (tmp_path / "store.json").write_text(json.dumps(body))
    with pytest.raises(BadInput, match="does not hold 8-bit levels"):
        ExpertStore.open(tmp_path)
