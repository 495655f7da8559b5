"""ggml's mul_mat_id, through the shared libraries that llama-cpp-python brings, as llama.cpp builds a MoE layer.

"repack" puts the weights into the interleaved layout that llama.cpp prefers where it has one for the type.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np
from side_by_side import Routing, Shape

TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "I32": 26}
BYTES = {"Q4_0": 18 / 32, "Q8_0": 34 / 32, "Q4_K": 144 / 256, "Q5_0": 22 / 32}
REPACKED = ("Q4_0", "Q4_K")


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


def library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ImportError("llama_cpp")
    folder = Path(spec.origin).parent / "lib"
    for name in ("libggml-base.so", "libggml-cpu.so"):
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(str(folder / "libggml.so"), ctypes.RTLD_GLOBAL)
    tensor = c_void_p
    for name, result, arguments in (
        ("ggml_init", c_void_p, [InitParams]),
        ("ggml_new_tensor_3d", tensor, [c_void_p, c_int, c_int64, c_int64, c_int64]),
        ("ggml_new_tensor_2d", tensor, [c_void_p, c_int, c_int64, c_int64]),
        ("ggml_mul_mat_id", tensor, [c_void_p, tensor, tensor, tensor]),
        ("ggml_swiglu_split", tensor, [c_void_p, tensor, tensor]),
        ("ggml_mul", tensor, [c_void_p, tensor, tensor]),
        ("ggml_add", tensor, [c_void_p, tensor, tensor]),
        ("ggml_view_2d", tensor, [c_void_p, tensor, c_int64, c_int64, c_size_t, c_size_t]),
        ("ggml_new_graph", c_void_p, [c_void_p]),
        ("ggml_build_forward_expand", None, [c_void_p, tensor]),
        ("ggml_free", None, [c_void_p]),
        ("ggml_nbytes", c_size_t, [tensor]),
        ("ggml_quantize_chunk", c_size_t,
         [c_int, POINTER(c_float), c_void_p, c_int64, c_int64, c_int64, c_void_p]),
        ("ggml_row_size", c_size_t, [c_int, c_int64]),
        ("ggml_backend_cpu_init", c_void_p, []),
        ("ggml_backend_cpu_set_n_threads", None, [c_void_p, c_int]),
        ("ggml_backend_graph_compute", c_int, [c_void_p, c_void_p]),
        ("ggml_backend_alloc_ctx_tensors", c_void_p, [c_void_p, c_void_p]),
        ("ggml_backend_alloc_ctx_tensors_from_buft", c_void_p, [c_void_p, c_void_p]),
        ("ggml_backend_buffer_free", None, [c_void_p]),
        ("ggml_backend_tensor_set", None, [tensor, c_void_p, c_size_t, c_size_t]),
        ("ggml_backend_get_device", c_void_p, [c_void_p]),
        ("ggml_backend_dev_backend_reg", c_void_p, [c_void_p]),
        ("ggml_backend_reg_get_proc_address", c_void_p, [c_void_p, c_char_p]),
        ("ggml_backend_buft_name", c_char_p, [c_void_p]),
    ):  # fmt: skip
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


class Engine:
    def __init__(self, shape: Shape, form: str, threads: int) -> None:
        kind, _, self.layout = form.partition(" ")
        odd = kind == "Q4_K" and shape.intermediate % 256  # then llama.cpp's own way out
        kinds = ("Q4_K", "Q4_K", "Q5_0") if odd else (kind,) * 3
        self.shape = shape
        self.bytes_per_weight = sum(BYTES[k] for k in kinds) / 3
        self.lib = lib = library()
        self.backend = lib.ggml_backend_cpu_init()
        lib.ggml_backend_cpu_set_n_threads(self.backend, threads)
        # a type without a repacked layout must not lie in that buffer
        plain, repacked = (lib.ggml_init(InitParams(1 << 20, None, True)) for _ in range(2))
        places = [repacked if self.layout == "repack" and k in REPACKED else plain for k in kinds]
        h, i, e = shape.hidden, shape.intermediate, shape.experts
        types = {**TYPES, "Q5_0": 6}
        sizes = ((h, i), (h, i), (i, h))
        self.tensors = [
            lib.ggml_new_tensor_3d(place, types[k], *size, e)
            for place, k, size in zip(places, kinds, sizes, strict=True)
        ]
        if repacked in places:
            lib.ggml_backend_alloc_ctx_tensors_from_buft(repacked, self._repack())
        if plain in places:
            lib.ggml_backend_alloc_ctx_tensors(plain, self.backend)
        for tensor, k, (columns, rows) in zip(self.tensors, kinds, sizes, strict=True):
            self._fill(tensor, types[k], columns, rows)

    def _repack(self) -> int:
        device = self.lib.ggml_backend_get_device(self.backend)
        registry = self.lib.ggml_backend_dev_backend_reg(device)
        address = self.lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        kinds = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(device)
        n = 0
        while kinds[n]:
            if b"REPACK" in self.lib.ggml_backend_buft_name(kinds[n]):
                return kinds[n]
            n += 1
        raise RuntimeError("this build of ggml has no repacked layout")

    def _fill(self, tensor: int, kind: int, columns: int, rows: int) -> None:
        one = np.random.default_rng(0).standard_normal((rows, columns), np.float32) * np.float32(0.02)
        packed = np.empty(self.lib.ggml_row_size(kind, columns) * rows, np.uint8)
        source = one.ctypes.data_as(POINTER(c_float))
        self.lib.ggml_quantize_chunk(kind, source, packed.ctypes.data, 0, rows, columns, None)
        everything = np.tile(packed, self.shape.experts)  # set at once: a repacked tensor takes nothing less
        if everything.nbytes != self.lib.ggml_nbytes(tensor):
            raise RuntimeError("the library has another size for these weights")
        self.lib.ggml_backend_tensor_set(tensor, everything.ctypes.data, 0, everything.nbytes)

    def prepare(self, tokens: int) -> Callable[[], None]:
        lib, shape = self.lib, self.shape
        h, k = shape.hidden, shape.top_k
        context = lib.ggml_init(InitParams(1 << 22, None, True))
        x = lib.ggml_new_tensor_3d(context, TYPES["F32"], h, 1, tokens)
        ids = lib.ggml_new_tensor_2d(context, TYPES["I32"], k, tokens)
        weights = lib.ggml_new_tensor_3d(context, TYPES["F32"], 1, k, tokens)
        gate, up, down = self.tensors
        inner = lib.ggml_swiglu_split(
            context, lib.ggml_mul_mat_id(context, gate, x, ids), lib.ggml_mul_mat_id(context, up, x, ids)
        )
        each = lib.ggml_mul(context, lib.ggml_mul_mat_id(context, down, inner, ids), weights)
        total = None
        for choice in range(k):
            view = lib.ggml_view_2d(context, each, h, tokens, 4 * h * k, 4 * h * choice)
            total = view if total is None else lib.ggml_add(context, total, view)
        graph = lib.ggml_new_graph(context)
        lib.ggml_build_forward_expand(graph, total)
        buffer = lib.ggml_backend_alloc_ctx_tensors(context, self.backend)
        values = np.random.default_rng(1).standard_normal((tokens, h), np.float32)
        lib.ggml_backend_tensor_set(x, values.ctypes.data, 0, values.nbytes)
        shares = np.full(tokens * k, 1 / k, np.float32)
        lib.ggml_backend_tensor_set(weights, shares.ctypes.data, 0, shares.nbytes)
        chosen = [np.ascontiguousarray(call, np.int32) for call in Routing(tokens, shape).calls]
        turn = iter(range(1 << 60))

        class Call:
            def __call__(self) -> None:
                now = chosen[next(turn) % len(chosen)]
                lib.ggml_backend_tensor_set(ids, now.ctypes.data, 0, now.nbytes)
                if lib.ggml_backend_graph_compute(backend, graph) != 0:
                    raise RuntimeError("ggml failed")

            def __del__(self) -> None:
                lib.ggml_backend_buffer_free(buffer)
                lib.ggml_free(context)

        backend = self.backend
        return Call()


def make(shape: Shape, form: str, threads: int) -> Engine:
    return Engine(shape, form, threads)
