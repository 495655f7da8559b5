"""`--mixed BUDGET`: the experts that 4 bits hurt most get 8, as many as fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktplan.convert.cpu import convert_cpu, plan_cpu
from ktplan.errors import BadUsage, DoesNotFit
from ktplan.kernels import Pool
from ktplan.model import open_source
from ktplan.quant import Scheme
from ktplan.store import ExpertStore, StoreShape

SHAPE = StoreShape(bits=4, parts=1, experts=16, hidden=256, intermediate=128)
NARROW, WIDE = SHAPE.plain_bytes(4), SHAPE.plain_bytes(8)


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "mixed"
    convert_cpu(open_source(tiny), folder, Scheme(4), mixed=64 * NARROW + 10 * (WIDE - NARROW) + 17)
    return folder


def test_the_worst_experts_have_8_bits_and_the_budget_holds(made: Path, tiny: Path, tmp_path: Path) -> None:
    store = ExpertStore.open(made)
    store.verify()
    manifest = store.manifest
    assert len(manifest.wide) == 10 and manifest.bits == 4 and "int8" in manifest.scheme
    plain = convert_cpu(open_source(tiny), tmp_path / "plain", Scheme(4)).manifest
    errors = {
        (layer, expert): sum(table[name][expert] ** 2 for name in ("gate", "up", "down"))
        for layer, table in plain.errors.items()
        for expert in range(16)
    }
    worst = sorted(errors, key=lambda place: -errors[place])[:10]
    assert set(worst) == {tuple(expert) for expert in manifest.wide}
    for layer, expert in worst:
        assert manifest.errors[layer]["up"][expert] < 0.01
    source = open_source(tiny)
    for layer, expert in (worst[0], next(place for place in errors if place not in worst)):
        for exact, found in zip(source.expert(layer, expert), store.expert(layer, expert), strict=True):
            limit = 0.01 if (layer, expert) in worst else 0.2
            assert np.linalg.norm(found - exact) < limit * np.linalg.norm(exact)


def test_kt_kernel_does_not_find_its_names_in_a_mixed_store(made: Path) -> None:
    from safetensors import safe_open

    for file in made.glob("*.safetensors"):
        with safe_open(file, framework="np") as shard:
            assert all(name.startswith("mixed.blk.") for name in shard.keys())  # noqa: SIM118


def test_the_runtime_computes_with_both_widths(made: Path) -> None:
    torch = pytest.importorskip("torch")
    from ktplan.runtime.cpu_experts import CpuExperts

    store = ExpertStore.open(made)
    layer = max(store.manifest.layers, key=lambda number: len(store.manifest.wide.layer(number)))
    assert 0 < len(store.manifest.wide.layer(layer)) < 16
    experts = CpuExperts(store, layer, ids=range(16), pool=Pool(1), activation_bits=16)
    random = np.random.default_rng(1)
    hidden = torch.from_numpy(random.standard_normal((5, 256), np.float32))
    index = torch.from_numpy(random.integers(0, 16, (5, 4)))
    weights = torch.full((5, 4), 0.25)
    expected = np.zeros((5, 256), np.float32)
    for token in range(5):
        for expert in index[token].tolist():
            own, x = store.expert(layer, expert), hidden[token].numpy()
            gate = own.gate @ x
            expected[token] += 0.25 * (own.down @ (gate / (1 + np.exp(-gate)) * (own.up @ x)))
    found = experts.forward(hidden, index, weights).numpy()
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.array_equal(experts.submit(hidden, index, weights)().numpy(), found)


def test_budgets_that_are_too_small_and_other_schemes_are_refused(
    tiny: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    source = open_source(tiny)
    with pytest.raises(DoesNotFit, match="all 64 experts take"):
        plan_cpu(source, tmp_path / "x", Scheme(4), mixed=64 * NARROW - 1)
    for scheme in (Scheme(8), Scheme(4, rounding="kt")):
        with pytest.raises(BadUsage, match="kt-kernel cannot read"):
            plan_cpu(source, tmp_path / "x", scheme, mixed=1 << 30)
    cli("convert-cpu", "tiny", "-o", tmp_path / "x", "--bits", "4", "--mixed", "5MiB", "--dry-run").ok()
    assert not (tmp_path / "x").exists()
