"""`convert-cpu` in every format: which one options choose, and a store of each from conversion to text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktplan.cli.store_format import chosen_scheme
from ktplan.convert.cpu import convert_cpu, quantize_expert, settled
from ktplan.convert.repartition import repartition
from ktplan.convert.verify import verify_store
from ktplan.errors import BadUsage
from ktplan.kernels import ExpertLayer, PackedExpert, Pool
from ktplan.model import ExpertWeights, open_source
from ktplan.quant import Scheme, dequantize_stored, quantize_groups
from ktplan.store import ExpertStore, StoreShape

NOTHING: Mapping[str, Any] = dict.fromkeys(("bits", "dtype", "group_size", "rounding", "target", "mixed"))
OPTIONS = {
    "int4-g32": (),
    "int4-g64": ("--group-size", "64"),
    "int4-g128": ("--group-size", "128"),
    "bf16": ("--dtype", "bf16"),
}


@pytest.mark.parametrize(
    ("given", "scheme"),
    [
        ({}, Scheme(4, 32)),
        ({"target": "ktplan"}, Scheme(4, 32)),
        ({"bits": "4"}, Scheme(4, 32)),
        ({"group_size": "128"}, Scheme(4, 128)),
        ({"group_size": "row"}, Scheme(4)),
        ({"bits": "8"}, Scheme(8)),
        ({"bits": "8", "group_size": "row"}, Scheme(8)),
        ({"bits": "2"}, Scheme(2)),
        ({"rounding": "gptq"}, Scheme(4, 32, "gptq")),
        ({"dtype": "bf16"}, Scheme(16, rounding="nearest")),
        ({"dtype": "bf16", "target": "ktplan"}, Scheme(16, rounding="nearest")),
        ({"target": "kt-kernel"}, Scheme(8)),
        ({"target": "kt-kernel", "bits": "4"}, Scheme(4)),
        (
            {"target": "kt-kernel", "bits": "4", "group_size": "row", "rounding": "gptq"},
            Scheme(4, None, "gptq"),
        ),
        ({"rounding": "kt"}, Scheme(8, rounding="kt")),
        ({"rounding": "kt", "bits": "4"}, Scheme(4, rounding="kt")),
        ({"rounding": "kt", "target": "kt-kernel"}, Scheme(8, rounding="kt")),
    ],
    ids=str,
)
def test_options_choose_the_format(given: dict[str, Any], scheme: Scheme) -> None:
    assert chosen_scheme({**NOTHING, **given}) == scheme


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rounding": "kt", "target": "ktplan"}, "--rounding kt .* --target ktplan"),
        ({"rounding": "kt", "group_size": "32"}, "--rounding kt needs .* --group-size 32"),
        ({"target": "kt-kernel", "group_size": "64"}, "--target kt-kernel needs .* --group-size 64"),
        ({"target": "kt-kernel", "mixed": 1}, "--target kt-kernel needs .* --mixed"),
        ({"rounding": "kt", "mixed": 1}, "--rounding kt needs .* --mixed"),
        ({"dtype": "bf16", "bits": "8"}, "--dtype bf16 .* --bits 8"),
        ({"dtype": "bf16", "group_size": "row"}, "--dtype bf16 .* --group-size row"),
        ({"dtype": "bf16", "rounding": "mse"}, "--dtype bf16 .* --rounding mse"),
        ({"dtype": "bf16", "mixed": 5}, "--dtype bf16 .* --mixed 5"),
        ({"dtype": "bf16", "target": "kt-kernel"}, "--dtype bf16 and --target kt-kernel"),
        ({"bits": "8", "group_size": "32"}, "8 bits have no scales for groups of 32"),
        ({"bits": "2", "group_size": "32"}, "2 bits have no scales for groups of 32"),
        ({"bits": "2", "rounding": "gptq"}, "three levels leave calibration nothing"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadUsage, match=words) as found:
        chosen_scheme({**NOTHING, **given})
    assert found.value.hint


def test_the_command_refuses_them_too_and_writes_nothing(cli: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "store"
    cli("convert-cpu", "tiny", "-o", out, "--rounding", "kt", "--group-size", "32").refused(
        2, "--group-size 32"
    )
    cli("convert-cpu", "tiny", "-o", out, "--dtype", "bf16", "--calibration", "corpus:profile").refused(
        2, "needs calibration text, and nothing else uses it"
    )
    assert not out.exists()


@pytest.fixture(scope="module")
def stores(cli: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    for name, options in OPTIONS.items():
        cli("convert-cpu", "tiny", "-o", folder / name, "-q", *options).ok()
    return {name: folder / name for name in OPTIONS}


def test_a_dry_run_says_the_exact_bytes(
    cli: Callable[..., Any], stores: dict[str, Path], tmp_path: Path
) -> None:
    for name, per_weight in (("int4-g32", 0.5625), ("bf16", 2.0)):
        arguments = ("convert-cpu", "tiny", "-o", tmp_path / "x", "--dry-run", "--json", *OPTIONS[name])
        body = cli(*arguments).ok().json()
        assert body["scheme"] == name
        assert body["bytes_out"] == ExpertStore.open(stores[name]).bytes
        assert body["bytes_per_weight"] == pytest.approx(per_weight, rel=0.02)  # headers on top


def test_verify_and_inspect_know_every_format(cli: Callable[..., Any], stores: dict[str, Path]) -> None:
    for name, folder in stores.items():
        body = cli("verify", folder, "--against", "tiny", "--json").ok().json()
        assert not body["damages"]
        facts = cli("inspect", folder, "--json").ok().json()
        assert facts["scheme"] == name and facts["layout"] == f"{name}-{'o-' if '-g' in name else ''}v1"


def test_finer_formats_do_less_damage(cli: Callable[..., Any], stores: dict[str, Path]) -> None:
    chosen = [word for folder in stores.values() for word in ("--store", folder)]
    body = (
        cli("eval", "tiny", *chosen, "--dataset", "corpus:test", "--max-tokens", "4k", "--json").ok().json()
    )
    by_name = dict(zip(stores, body["stores"], strict=True))
    kl = {name: row["kl"] for name, row in by_name.items()}
    # so few tokens do not tell groups of 64 from groups of 128; their weights do
    coarse = kl["int4-g64"], kl["int4-g128"]
    assert kl["bf16"] < 1e-4 < kl["int4-g32"] < min(coarse) <= max(coarse) < 0.01
    errors = [ExpertStore.open(stores[f"int4-g{group}"]).manifest.mean_error or 0 for group in (32, 64, 128)]
    assert 0.07 < errors[0] < 0.95 * errors[1] < 0.9 * errors[2] < 0.1
    assert by_name["bf16"]["top1_agreement"] > 0.995 and by_name["int4-g32"]["top1_agreement"] > 0.93


def test_a_model_runs_from_the_default_store(cli: Callable[..., Any], stores: dict[str, Path]) -> None:
    said = cli("run", "tiny", "--store", stores["int4-g32"], "--prompt", "The", "--max-new-tokens", "8").ok()
    assert said.stdout.strip()


def test_damage_is_found_in_scales_and_values(stores: dict[str, Path], tmp_path: Path) -> None:
    for name, word in (("int4-g32", "a scale is not a number"), ("bf16", "a weight is not a number")):
        folder = tmp_path / name
        folder.mkdir()
        for file in stores[name].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        store = ExpertStore.open(folder)
        shard = folder / store.manifest.files[0].name
        data = bytearray(shard.read_bytes())
        data[-2:] = b"\xc0\x7f"  # a bfloat16 NaN at the end: the last scale, or the last weight
        shard.write_bytes(data)
        found = verify_store(ExpertStore.open(folder))
        assert len(found.damages) == 2 and "digest differs" in found.damages[0] and word in found.damages[1]


@pytest.mark.parametrize(
    "scheme", [Scheme(4, 32), Scheme(4, 128), Scheme(16, rounding="nearest")], ids=lambda s: s.name
)
def test_parts_are_cut_and_joined_without_loss(
    scheme: Scheme, family_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from .test_repartition import same_weights, wide_model

    model = wide_model(tmp_path / "model")
    convert_cpu(open_source(model), tmp_path / "1", scheme)
    convert_cpu(open_source(model), tmp_path / "3", scheme, 3)
    cut = repartition(ExpertStore.open(tmp_path / "1"), tmp_path / "1to3", 3)
    joined = repartition(ExpertStore.open(tmp_path / "3"), tmp_path / "3to1", 1)
    assert cut.lossless and joined.lossless and cut.error == joined.error == 0
    # scales belong to groups, not to parts: converting in parts gives the same weights
    for count, made in ((3, tmp_path / "1to3"), (1, tmp_path / "3to1")):
        assert same_weights(tmp_path / str(count), made)
        whole = {f.name: f.read_bytes() for f in (tmp_path / str(count)).glob("*.safetensors")}
        assert {f.name: f.read_bytes() for f in made.glob("*.safetensors")} == whole


def test_mixed_stores_may_have_groups(tiny: Path, tmp_path: Path) -> None:
    from ktplan.runtime.cpu_experts import CpuExperts

    shape = StoreShape(bits=4, group=32, parts=1, experts=16, hidden=256, intermediate=128)
    narrow, wide = shape.plain_bytes(4), shape.plain_bytes(8)
    budget = 64 * narrow + 30 * (wide - narrow)
    made = convert_cpu(open_source(tiny), tmp_path / "mixed", Scheme(4, 32), mixed=budget).manifest
    assert len(made.wide) == 30 and made.layout == "int4-g32-o-v1" and made.scheme == "int4-g32 and int8-row"
    store = ExpertStore.open(tmp_path / "mixed")
    assert sum(map(store.manifest.shape.layer_bytes, made.layers)) == budget
    layer = next(number for number in made.layers if 0 < len(made.wide.layer(number)) < 16)
    for expert in range(16):
        limit = 0.01 if expert in made.wide.layer(layer) else 0.1
        exact = open_source(tiny).expert(layer, expert)
        assert np.linalg.norm(store.expert(layer, expert).up - exact.up) < limit * np.linalg.norm(exact.up)
    experts = CpuExperts(store, layer, ids=range(16), pool=Pool(1), activation_bits=16)
    hidden, index = torch.ones(1, 256), torch.arange(16)[None]
    expected = np.zeros(256, np.float32)
    for expert in range(16):
        own = store.expert(layer, expert)
        gate = own.gate.sum(axis=1)
        expected += own.down @ (gate / (1 + np.exp(-gate)) * own.up.sum(axis=1))
    found = experts.forward(hidden, index, torch.ones(1, 16)).numpy()[0]
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def test_kt_kernel_is_not_given_what_it_cannot_load(
    cli: Callable[..., Any], family_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    narrow = family_checkpoint("qwen3_moe")
    width = open_source(narrow).spec.moe_intermediate
    out = tmp_path / "store"
    done = cli("convert-cpu", narrow, "-o", out, "--target", "kt-kernel", "--bits", "4")
    if width % 128:
        done.refused(2, f"experts are {width} wide", "need a multiple of 128")
        assert not out.exists()
    cli("convert-cpu", "tiny", "-o", tmp_path / "kt", "--target", "kt-kernel", "-q").ok()
    from safetensors import safe_open

    with safe_open(tmp_path / "kt" / "model-00001-of-00004.safetensors", framework="np") as shard:
        assert all(name.startswith("blk.") for name in shard.keys())  # noqa: SIM118


@pytest.mark.parametrize("asked", [("--target", "kt-kernel"), ("--rounding", "kt")])
def test_experts_that_kt_kernel_cannot_compute_are_not_written_for_it(
    cli: Callable[..., Any], family_checkpoint: Callable[..., Path], tmp_path: Path, asked: tuple[str, str]
) -> None:
    told = cli("convert-cpu", family_checkpoint("gpt_oss"), "-o", tmp_path / "store", *asked)
    told.refused(2, "experts of gpt_oss have biases", "kt-kernel")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "scheme", [Scheme(4, 32), Scheme(16, rounding="nearest")], ids=lambda scheme: scheme.name
)
def test_widths_that_are_no_multiple_are_filled_with_zeros(scheme: Scheme, tmp_path: Path) -> None:
    from .test_repartition import wide_model

    model = wide_model(tmp_path / "model", width=392)
    manifest = convert_cpu(open_source(model), tmp_path / "store", scheme).manifest
    assert (manifest.intermediate, manifest.padding) == ((512, 120) if scheme.bits == 4 else (416, 24))
    store = ExpertStore.open(tmp_path / "store")
    for given, found in zip(open_source(model).expert(1, 2), store.expert(1, 2), strict=True):
        assert found.shape == given.shape
        assert np.linalg.norm(found - given) < 0.09 * np.linalg.norm(given)
    assert not verify_store(store, open_source(model)).damages


def layer_error(scheme: Scheme, outliers: bool) -> float:
    """Relative error of a layer's output, through the converter and the native engine, against float64."""
    hidden, inner, count, tokens = 1024, 768, 4, 16
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        values = random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
        if outliers:
            values[random.random(values.shape) < 0.001] *= 10
        return values

    held, wanted = [], np.zeros((tokens, hidden))
    x = random.standard_normal((tokens, hidden), np.float32)
    for _ in range(count):
        exact = ExpertWeights(matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner))
        arrays, _errors = quantize_expert(exact, scheme, 1)
        lines = [scale.reshape(-1, 32) for scale in arrays[3:]]
        scales = [
            line.reshape(rows // 32, -1, 32) for line, rows in zip(lines, (inner, inner, hidden), strict=True)
        ]
        held.append(PackedExpert(arrays[0], scales[0], arrays[1], scales[1], arrays[2], scales[2]))
        gate, up, down = (one.astype(np.float64) for one in exact)
        first = x.astype(np.float64) @ gate.T
        wanted += first / (1 + np.exp(-first)) * (x.astype(np.float64) @ up.T) @ down.T
    layer = ExpertLayer(
        [held], hidden=hidden, intermediate=inner, bits=4, group=scheme.group, offsets=scheme.offsets,
        threads_pool=Pool(1),
    )  # fmt: skip
    every = np.tile(np.arange(count), (tokens, 1))
    found = layer.forward(x, every, np.ones((tokens, count), np.float32))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_the_default_format_changes_a_layers_output_by_less_than_its_bars() -> None:
    default = Scheme(4, 32, offsets=True)
    assert layer_error(default, outliers=False) < 0.14 < layer_error(Scheme(4, 32), outliers=False)
    assert layer_error(default, outliers=True) < 0.16 < layer_error(Scheme(4, 32), outliers=True)
    shape = StoreShape(bits=4, group=32, offsets=True, parts=1, experts=1, hidden=2048, intermediate=1536)
    assert shape.plain_bytes(4) <= 0.57 * 3 * 2048 * 1536


@pytest.mark.parametrize("rounding", ["mse", "gptq"])
def test_a_model_that_has_plain_groups_itself_keeps_them_exactly(rounding: Any, tmp_path: Path) -> None:
    """Levels -8..7 times bfloat16 scales, as Kimi-K2 comes: told from the weights, not from how they are stored."""
    from safetensors.numpy import load_file, save_file

    from .test_repartition import wide_model

    model = wide_model(tmp_path / "model")
    free = settled(open_source(model), Scheme(4, 32, rounding))
    assert free.offsets and settled(open_source(model), Scheme(4)) == Scheme(4)
    tensors = load_file(model / "model.safetensors")
    save_file(
        {
            name: dequantize_stored(quantize_groups(values, 32, offsets=False))
            for name, values in tensors.items()
        },
        model / "model.safetensors",
    )
    scheme = Scheme(4, 32, rounding)
    assert settled(open_source(model), scheme) == scheme and not scheme.offsets
    if rounding == "mse":
        manifest = convert_cpu(open_source(model), tmp_path / "store", scheme).manifest
        assert manifest.layout == "int4-g32-v1" and manifest.mean_error == 0
        assert not verify_store(ExpertStore.open(tmp_path / "store"), open_source(model)).damages
