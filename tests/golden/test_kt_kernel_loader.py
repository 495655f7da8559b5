"""A store through kt-kernel 0.7.2's own loader and kernels: the same outputs as ours.

Runs where kt-kernel is installed: in this Python, or in the one that KTPLAN_KT_KERNEL_PYTHON names (it wants torch of
its own). Its wrapper needs a GPU driver even for CPU experts, so its loader and its extension are called directly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ktplan.convert.cpu import convert_cpu
from ktplan.kernels import ExpertLayer, PackedExpert
from ktplan.model import open_source
from ktplan.quant import Scheme
from ktplan.store import ExpertStore

TOP_K = 2

# argv: store, experts, hidden, intermediate, bits, file of inputs, file of outputs
THEIRS = r"""
import sys
import torch
from kt_kernel import kt_kernel_ext as extension
from kt_kernel.utils.loader import SafeTensorLoader
from safetensors.torch import load_file, save_file
store, inputs, outputs = sys.argv[1], sys.argv[6], sys.argv[7]
experts, hidden, intermediate, bits = map(int, sys.argv[2:6])
held = SafeTensorLoader(store).load_experts("blk.1")
parts = len(held["gate"])
pool = extension.WorkerPoolConfig()
pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = parts, [0] * parts, [1] * parts
cpu = extension.CPUInfer(pool)
config = extension.moe.MOEConfig(experts, 2, hidden, intermediate, 0)
config.layer_idx, config.pool, config.max_len, config.load = 1, cpu.backend_, 64, True
for name in ("gate", "up", "down"):
    for ours, kind in (("projs", ""), ("scales", "_scale")):
        addresses = [[array.ctypes.data for array in part] for part in held[name + kind]]
        setattr(config, f"{name}_{ours}", addresses)
layer = (extension.moe.AMXInt8_MOE if bits == 8 else extension.moe.AMXInt4_MOE)(config)
order = torch.arange(experts, dtype=torch.int64)
cpu.submit(layer.load_weights_task(order.data_ptr()))
cpu.sync()
given = load_file(inputs)
found = {}
for count in (1, 4, 40):
    x, ids, weights = (given[f"{what}.{count}"].contiguous() for what in ("x", "ids", "weights"))
    out, size = torch.zeros(count, hidden, dtype=torch.bfloat16), torch.tensor([count], dtype=torch.int32)
    cpu.submit(layer.forward_task(
        size.data_ptr(), 2, ids.data_ptr(), weights.data_ptr(), x.data_ptr(), out.data_ptr(), False))
    cpu.sync()
    found[str(count)] = out
save_file(found, outputs)
"""


@pytest.fixture(scope="module")
def kt_kernel() -> str:
    """A Python that can run kt-kernel."""
    python = os.environ.get("KTPLAN_KT_KERNEL_PYTHON", sys.executable)
    asked = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.version('kt-kernel'))"],
        capture_output=True,
        text=True,
    )
    if asked.returncode:
        pytest.skip("kt-kernel is not installed (KTPLAN_KT_KERNEL_PYTHON may name a Python that has it)")
    return python


@pytest.mark.parametrize(
    ("bits", "rounding", "parts"), [(8, "kt", 1), (8, "kt", 2), (8, "mse", 1), (4, "kt", 1), (4, "mse", 1)]
)
def test_its_loader_and_kernels_give_what_ours_give(
    bits: int, rounding: str, parts: int, kt_kernel: str, tiny: Path, tmp_path: Path
) -> None:
    import torch

    convert_cpu(open_source(tiny), tmp_path / "store", Scheme(bits, rounding=rounding), numa_parts=parts)
    store = ExpertStore.open(tmp_path / "store")
    sizes = store.manifest
    random = torch.Generator().manual_seed(7)
    given: dict[str, torch.Tensor] = {}
    for count in (1, 4, 40):
        given[f"x.{count}"] = torch.randn(count, sizes.hidden, generator=random).bfloat16()
        order = torch.rand(count, sizes.experts, generator=random).argsort(dim=1)
        given[f"ids.{count}"] = order[:, :TOP_K].contiguous()
        given[f"weights.{count}"] = torch.rand(count, TOP_K, generator=random)
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    save_torch(given, tmp_path / "inputs.safetensors")
    numbers = map(str, (sizes.experts, sizes.hidden, sizes.intermediate, bits))
    done = subprocess.run(
        [kt_kernel, "-c", THEIRS, str(tmp_path / "store"), *numbers, str(tmp_path / "inputs.safetensors"),
         str(tmp_path / "outputs.safetensors")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = load_torch(tmp_path / "outputs.safetensors")
    packed = [
        [PackedExpert(*store.packed(1, expert, part)) for expert in range(sizes.experts)]
        for part in range(parts)
    ]
    layer = ExpertLayer(
        packed, hidden=sizes.hidden, intermediate=sizes.intermediate, bits=bits, activation_bits=8,
        numerics="upstream",
    )  # fmt: skip
    for count in (1, 4, 40):
        x, ids, weights = (given[f"{what}.{count}"] for what in ("x", "ids", "weights"))
        ours = torch.from_numpy(layer.forward(x, ids, weights)).bfloat16()
        mine = ours.view(torch.int16).numpy().view(np.uint16)
        step = np.abs(ordered(mine) - ordered(theirs[str(count)].view(torch.int16).numpy().view(np.uint16)))
        assert step.max() <= 1, (count, int(step.max()), float((step > 0).mean()))


def ordered(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns as integers in the order of their values."""
    signed = bits.astype(np.int32)
    return np.where(signed & 0x8000, 0x8000 - signed, signed)
