"""kt-kernel's extension, called as its own wrapper does, without that wrapper (which needs a GPU driver)."""

from __future__ import annotations

from collections.abc import Callable

import kt_kernel  # noqa: F401  (chooses the extension)
import torch
from kt_kernel import kt_kernel_ext as ext
from side_by_side import Routing, Shape

FORMATS = {"AMXINT8": 1.0, "AMXINT4": 0.5, "BF16": 2.0, "FP8_PERCHANNEL": 1.0, "RAWINT4": 0.5625}
MAX_TOKENS = 1024


def random_bf16(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02)


class Engine:
    def __init__(self, shape: Shape, form: str, threads: int) -> None:
        self.shape, self.bytes_per_weight = shape, FORMATS[form]
        config = ext.WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
        self.infer = ext.CPUInfer(config)
        layer = ext.moe.MOEConfig(shape.experts, shape.top_k, shape.hidden, shape.intermediate, 0)
        layer.layer_idx, layer.pool, layer.max_len = 0, self.infer.backend_, MAX_TOKENS
        layer.save = layer.load = False
        getattr(self, "_" + form.lower())(layer)
        order = torch.arange(shape.experts, dtype=torch.int64)
        self.infer.submit(self.moe.load_weights_task(order.data_ptr()))
        self.infer.sync()
        self.kept = None  # the engine has copies

    def _stacked(self, layer: ext.moe.MOEConfig) -> None:
        e, h, i = self.shape.experts, self.shape.hidden, self.shape.intermediate
        one = [random_bf16(i * h) for _ in range(3)]  # the same values for every expert: only bytes count
        self.kept = [w.repeat(e) for w in one]
        layer.gate_proj, layer.up_proj, layer.down_proj = (w.data_ptr() for w in self.kept)

    def _amxint8(self, layer: ext.moe.MOEConfig) -> None:
        self._stacked(layer)
        self.moe = ext.moe.AMXInt8_MOE(layer)

    def _amxint4(self, layer: ext.moe.MOEConfig) -> None:
        self._stacked(layer)
        self.moe = ext.moe.AMXInt4_MOE(layer)

    def _pointers(self, layer: ext.moe.MOEConfig, tensors: list[torch.Tensor], what: str) -> None:
        for name, tensor in zip(("gate", "up", "down"), tensors, strict=True):
            setattr(layer, f"{name}_{what}", [[tensor.data_ptr()] * self.shape.experts])
        self.kept = [*(self.kept or []), *tensors]

    def _bf16(self, layer: ext.moe.MOEConfig) -> None:
        h, i = self.shape.hidden, self.shape.intermediate
        self.kept = None
        self._pointers(layer, [random_bf16(i, h), random_bf16(i, h), random_bf16(h, i)], "projs")
        self.moe = ext.moe.AMXBF16_MOE(layer)

    def _fp8_perchannel(self, layer: ext.moe.MOEConfig) -> None:
        h, i = self.shape.hidden, self.shape.intermediate
        self.kept = None
        sizes = ((i, h), (i, h), (h, i))
        self._pointers(layer, [random_bf16(*s).to(torch.float8_e4m3fn) for s in sizes], "projs")
        self._pointers(layer, [torch.full((s[0],), 0.01) for s in sizes], "scales")
        layer.quant_config.bits, layer.quant_config.per_channel, layer.quant_config.zero_point = (
            8,
            True,
            False,
        )
        self.moe = ext.moe.AMXFP8PerChannel_MOE(layer)

    def _rawint4(self, layer: ext.moe.MOEConfig) -> None:
        h, i = self.shape.hidden, self.shape.intermediate
        self.kept = None
        sizes = ((i, h), (i, h), (h, i))
        self._pointers(
            layer, [torch.randint(0, 256, (n, k // 2), dtype=torch.uint8) for n, k in sizes], "projs"
        )
        self._pointers(
            layer, [torch.full((n, k // 32), 0.01, dtype=torch.bfloat16) for n, k in sizes], "scales"
        )
        layer.quant_config.bits, layer.quant_config.group_size, layer.quant_config.zero_point = 4, 32, False
        self.moe = ext.moe.AMXInt4_KGroup_MOE(layer)

    def prepare(self, tokens: int) -> Callable[[], None]:
        routing = Routing(tokens, self.shape)
        ids = [torch.from_numpy(call) for call in routing.calls]
        x = torch.randn(tokens, self.shape.hidden).bfloat16()
        y = torch.empty_like(x)
        weights = torch.full((tokens, self.shape.top_k), 1 / self.shape.top_k)
        count = torch.tensor([tokens], dtype=torch.int32)
        turn = iter(range(1 << 60))

        def call() -> None:
            chosen = ids[next(turn) % len(ids)]
            self.infer.submit(
                self.moe.forward_task(
                    count.data_ptr(), self.shape.top_k, chosen.data_ptr(), weights.data_ptr(), x.data_ptr(),
                    y.data_ptr(), False,
                )
            )  # fmt: skip
            self.infer.sync()

        return call


def make(shape: Shape, form: str, threads: int) -> Engine:
    return Engine(shape, form, threads)
