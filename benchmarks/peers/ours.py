"""ktplan's own layer in every format asked for (comma-separated), and the machine's limits in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from side_by_side import Routing, Shape

from ktplan import kernels

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "int4-g128": {"bits": 4, "group": 128},
    "int4-g64": {"bits": 4, "group": 64},
    "int4-g32": {"bits": 4, "group": 32},
    "bf16": {"bits": 16},
}


def bytes_per_weight(form: str) -> float:
    """Row scales, 4 bytes a row, are not worth counting; group scales are 2 bytes a group."""
    how = FORMATS[form]
    return how["bits"] / 8 + (2 / how["group"] if "group" in how else 0)


class Engine:
    def __init__(self, shape: Shape, forms: str, threads: int) -> None:
        self.shape, self.pool = shape, kernels.Pool(threads)
        self.bytes_per_weight = 0.0
        self.packed = {form: self._packed(form) for form in forms.split(",")}
        self.layers: dict[tuple[str, int], kernels.ExpertLayer] = {}

    def _packed(self, form: str) -> list[kernels.PackedExpert]:
        """Random weights in one stretch of memory, as a mapped file is."""
        rng = np.random.default_rng(0)
        hidden, inner, experts, _ = self.shape
        how = FORMATS[form]
        size = hidden * inner * how["bits"] // 8
        if how["bits"] == 16:  # numbers of ordinary size
            values = rng.integers(0x3C00, 0x3D00, experts * 3 * size // 2, np.uint16)
            memory = (values | (values << 15)).view(np.uint8)
        else:
            memory = rng.integers(0, 256, experts * 3 * size, np.uint8)

        def scales(rows: int, columns: int) -> Any:
            if how["bits"] == 16:
                return None
            if "group" in how:
                groups = rng.integers(0x3A00, 0x3A80, rows * columns // how["group"], np.uint16)
                return groups.reshape(rows // 32, columns // how["group"], 32)
            return np.full(rows, 1e-4, np.float32)

        def expert(e: int) -> kernels.PackedExpert:
            gate, up, down = (memory[(3 * e + i) * size : (3 * e + i + 1) * size] for i in range(3))
            return kernels.PackedExpert(
                gate, scales(inner, hidden), up, scales(inner, hidden), down, scales(hidden, inner)
            )

        return [expert(e) for e in range(experts)]

    def layer(self, form: str, activation_bits: int) -> kernels.ExpertLayer:
        key = (form, activation_bits)
        if key not in self.layers:
            self.layers[key] = kernels.ExpertLayer(
                [self.packed[form]],
                hidden=self.shape.hidden,
                intermediate=self.shape.intermediate,
                threads_pool=self.pool,
                activation_bits=activation_bits,
                **FORMATS[form],
            )
        return self.layers[key]

    def prepare(self, tokens: int, what: str) -> Callable[[], object]:
        """`what`: "int8 a16", or "int8 read" for reading the weights alone."""
        form, _, how = what.partition(" ")
        if how == "read":
            return self.layer(form, 16).read
        layer, routing = self.layer(form, int(how[1:])), Routing(tokens, self.shape)
        values = np.random.default_rng(7).standard_normal((tokens, self.shape.hidden), np.float32)
        x = (values.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16, as a model's activations are
        weights = np.full((tokens, self.shape.top_k), 1 / self.shape.top_k, np.float32)
        out = np.empty_like(values)
        return lambda: layer.forward(x, routing(), weights, out)

    def limit(self, kind: str) -> dict[str, object]:
        """The best loop of a kind of numbers: operations a second, the most of some short runs."""
        best: dict[str, object] = {"rate": 0.0, "name": "none"}
        for limit in kernels.limits():
            if limit.kind != kind or limit.missing:
                continue
            for _ in range(25):
                start = time.perf_counter()
                operations = kernels.run_limit(limit.name, 500_000, self.pool)
                rate = operations / (time.perf_counter() - start)
                if rate > float(str(best["rate"])):
                    best = {"rate": rate, "name": limit.name}
        return best


def make(shape: Shape, form: str, threads: int) -> Engine:
    return Engine(shape, form, threads)
