"""What a plan says experts take is what they take, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ktplan.convert.gptq_checkpoint import GptqCheckpoint
from ktplan.convert.gpu import convert_gpu
from ktplan.convert.gpu_plan import GpuOptions
from ktplan.model import open_source, read_spec
from ktplan.placement import fit, make_plan
from ktplan.runtime import engine
from ktplan.store import ExpertStore


@pytest.mark.parametrize("slots", [1, 19, 64])
def test_device_experts_hold_what_was_planned(tiny: Path, store_of: Callable[..., Path], slots: int) -> None:
    spec = read_spec(tiny)
    budget = fit(spec, slots=slots, gpu_format="bf16")
    plan = make_plan(spec, strategy="random", budget=budget)
    loaded = engine.load(tiny, store=store_of(tiny), plan=plan, dtype="bfloat16", threads=1).network
    sides = [module.gpu_side for module in loaded.experts.values() if module.gpu_side is not None]
    assert sum(side.bytes for side in sides) == budget.experts_bytes
    # The CPU keeps the others alone, in the store's own sizes.
    mapped = [module.cpu_side.bytes for module in loaded.experts.values() if module.cpu_side is not None]
    one = ExpertStore.open(store_of(tiny)).manifest.bytes_per_expert
    assert sum(mapped) == (spec.expert_count - slots) * one


@pytest.mark.parametrize(("gpu_format", "bits"), [("gptq-w4", 4), ("gptq-w8", 8)])
@pytest.mark.parametrize("family", ["tiny", "mixtral", "deepseek_v3"])
def test_gptq_folders_hold_what_was_planned(
    tiny: Path,
    family_checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    gpu_format: str,
    bits: int,
) -> None:
    model = tiny if family == "tiny" else family_checkpoint(family)
    spec = read_spec(model)
    budget = fit(spec, slots=5, gpu_format=gpu_format)
    plan = make_plan(spec, strategy="random", budget=budget)
    folder = tmp_path / "gptq"
    convert_gpu(open_source(model), folder, GpuOptions(bits=bits, method="rtn"), experts=plan.gpu)
    assert GptqCheckpoint.open(folder).bytes == budget.experts_bytes
