"""KTransformers' own mask function, from its wheel, on what is emitted for it: exactly the plan, for any numbers."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktplan.placement import make_plan
from ktplan.placement.emit import to_sglang
from ktplan.placement.strategies import Cells, choose

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def masks() -> Callable[[torch.Tensor, int], torch.Tensor]:
    """`generate_gpu_experts_masks` of kt-kernel; the rest of the package, which needs its native code, is not run."""
    found = importlib.util.find_spec("kt_kernel")
    if found is None or found.origin is None:
        pytest.skip("kt-kernel is not installed")
    source = Path(found.origin).with_name("experts_base.py").read_text()
    name = "generate_gpu_experts_masks"
    function = next(
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([function], []), "experts_base.py", "exec"), scope)
    made: Callable[[torch.Tensor, int], torch.Tensor] = scope[name]
    return made


def test_emitted_counts_give_the_plan(masks: Any, spec_of: Callable[..., Any]) -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        layers, experts = int(draw.integers(2, 40)), int(draw.integers(4, 130))
        dense = int(draw.integers(0, min(4, layers)))
        spec = spec_of(
            layers=layers, experts=experts, moe_layers=tuple(range(dense, layers)), family="deepseek_v3"
        )
        slots = int(draw.integers(0, spec.expert_count + 1))
        plan = make_plan(spec, strategy="random", slots=slots, seed=int(draw.integers(1000)))
        made = to_sglang(plan, spec)
        wanted = np.zeros((layers, experts), bool)
        for layer, expert in plan.gpu:
            wanted[layer, expert] = True
        ratio = float(made.flags[made.flags.index("--kt-gpu-experts-ratio") + 1])
        number = int((layers - dense) * experts * ratio)
        found = masks(torch.from_numpy(made.counts).sum(dim=0).float(), number)
        assert number == slots and np.array_equal(found.numpy(), wanted)


def test_frequency_takes_the_same_counts(masks: Any) -> None:
    draw = np.random.default_rng(1)
    for _ in range(50):
        layers, experts = int(draw.integers(1, 30)), int(draw.integers(4, 100))
        counts = draw.integers(0, 40, (layers, experts))
        slots = int(draw.integers(0, layers * experts + 1))
        theirs = masks(torch.from_numpy(counts).float(), slots).numpy()
        ours = choose("frequency", Cells(tuple(range(layers)), experts), slots, counts, as_cells=True)
        # Ties are open there: the counts taken are the same, the experts need not be.
        assert sorted(counts[theirs].tolist()) == sorted(counts.ravel()[ours].tolist())
