"""How fast experts are converted, side by side with a plain copy and with what others offer.

    python benchmarks/convert.py --folder /dev/shm/bench [--layers 2] [--kt-kernel PYTHON] [--llama-cpp PYTHON] [--disk]

Makes a checkpoint of Qwen3-30B-A3B's shape (128 experts of 768 x 2048 a layer, bfloat16, 1.2 GB a layer) in a folder,
reads it once so that it is cached, and runs each converter `--runs` times in turn. Rates are gigabytes of input a
second of the whole command; memory is the peak of the process's own resident set.

ktplan makes its files durable before it says that it is done (fsync), `cp` does not. On a memory file system (the
default folder) that makes no difference and the converters themselves are compared; with --disk a copy that is made
durable as well is measured too, since then the disk decides.

--kt-kernel names a Python that has kt-kernel 0.7.2 installed; its own extension packs the same layers there, read from
the same file (its converter script is not in the wheel and does not run without a GPU driver; it does more than this,
since it also puts the extension's many files together).

--llama-cpp names a Python that has llama-cpp-python installed: `llama_model_quantize` makes Q4_0 of a GGUF with such
experts.

A copy is made before anything is measured: the first use of memory costs a virtual machine more than the copy itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

HIDDEN, INTERMEDIATE, EXPERTS = 2048, 768, 128

# A layer's bf16 experts through kt-kernel's extension, as its converter does: stack, quantize and save.
KT_KERNEL = r"""
import json, os, sys, time
os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np, torch
import kt_kernel
from kt_kernel import kt_kernel_ext as ext
moe = ext.moe
folder, out, bits, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
E, H, I = 128, 2048, 768
config = ext.WorkerPoolConfig()
config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
infer = ext.CPUInfer(config)
for number, name in enumerate(sorted(n for n in os.listdir(folder) if n.endswith(".safetensors"))):
    raw = np.fromfile(os.path.join(folder, name), np.uint8)
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    weights = torch.from_numpy(raw[start:]).view(torch.bfloat16).reshape(E, 3, H * I)
    gate, up, down = (weights[:, i].contiguous() for i in range(3))
    layer = moe.MOEConfig(E, 8, H, I, 0)
    layer.layer_idx, layer.pool, layer.max_len = number, infer.backend_, 512
    layer.save, layer.load, layer.path = True, False, out
    layer.gate_proj, layer.up_proj, layer.down_proj = gate.data_ptr(), up.data_ptr(), down.data_ptr()
    made = (moe.AMXInt8_MOE if bits == 8 else moe.AMXInt4_MOE)(layer)
    order = torch.arange(E, dtype=torch.int64)
    infer.submit(made.load_weights_task(order.data_ptr()))
    infer.sync()
    del made
"""


# llama.cpp's own quantizer, Q4_0 for every tensor.
LLAMA_CPP = r"""
import ctypes, os, sys
import llama_cpp
os.makedirs(sys.argv[2])
given = llama_cpp.llama_model_quantize_default_params()
given.ftype, given.nthread, given.pure = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, int(sys.argv[3]), True
llama_cpp.llama_backend_init()
out = os.path.join(sys.argv[2], "model.gguf")
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), out.encode(), ctypes.byref(given)))
"""

# name, dividend, divisor, least ratio of speeds
BARS = (
    ("int8 kt / cp -r", "ktplan int8 kt", "cp -r", 0.5),
    ("int4 kt / cp -r", "ktplan int4 kt", "cp -r", 0.5),
    ("int8 mse / kt", "ktplan int8 mse", "ktplan int8 kt", 0.5),
    ("int4 mse / kt", "ktplan int4 mse", "ktplan int4 kt", 0.5),
    ("int8 kt / kt-kernel", "ktplan int8 kt", "kt-kernel int8", 3.0),
    ("int4 kt / kt-kernel", "ktplan int4 kt", "kt-kernel int4", 3.0),
    ("int4 kt / llama.cpp Q4_0", "ktplan int4 kt", "llama.cpp Q4_0", 1.5),
)


def make_gguf(path: Path, layers: int) -> None:
    """The same kind of experts as `make_model` makes, stacked, in a GGUF that llama.cpp takes for a qwen3moe."""
    from gguf import GGMLQuantizationType, GGUFWriter

    out = GGUFWriter(path, "qwen3moe")
    for add, value in (
        (out.add_block_count, layers), (out.add_context_length, 64), (out.add_embedding_length, HIDDEN),
        (out.add_feed_forward_length, INTERMEDIATE), (out.add_head_count, 4), (out.add_head_count_kv, 4),
        (out.add_layer_norm_rms_eps, 1e-6), (out.add_expert_count, EXPERTS), (out.add_expert_used_count, 8),
        (out.add_expert_feed_forward_length, INTERMEDIATE), (out.add_vocab_size, 8),
    ):  # fmt: skip
        add(value)
    random = np.random.default_rng(0)
    bits = random.standard_normal((4, HIDDEN * INTERMEDIATE), np.float32).view(np.uint32) >> 16
    matrices = bits.astype(np.uint16)
    stack = np.tile(matrices, (EXPERTS // 4, 1)).view(np.uint8)
    shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    for layer in range(layers):
        for name, (rows, columns) in shapes.items():
            out.add_tensor_info(
                f"blk.{layer}.ffn_{name}_exps.weight", (EXPERTS, rows, 2 * columns), np.dtype(np.uint8), stack.nbytes,
                GGMLQuantizationType.BF16,
            )  # fmt: skip
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    for _ in range(3 * layers):
        out.write_tensor_data(stack)
    out.close()


def make_model(folder: Path, layers: int) -> None:
    """Random experts; a few matrices are repeated, which no converter here takes advantage of."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": EXPERTS, "num_experts_per_tok": 8,
        "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_attention_heads": 4, "vocab_size": 8,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    size = HIDDEN * INTERMEDIATE * 2
    places: dict[str, str] = {}
    for layer in range(layers):
        matrices = [
            (random.standard_normal(HIDDEN * INTERMEDIATE, np.float32).view(np.uint32) >> 16).astype(
                np.uint16
            )
            for _ in range(8)
        ]
        names = [
            (f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight", shape)
            for expert in range(EXPERTS)
            for name, shape in (
                ("gate", [INTERMEDIATE, HIDDEN]), ("up", [INTERMEDIATE, HIDDEN]), ("down", [HIDDEN, INTERMEDIATE]))
        ]  # fmt: skip
        header = {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": [n * size, (n + 1) * size]}
            for n, (name, shape) in enumerate(names)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = folder / f"model-{layer:05d}.safetensors"
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for number in range(len(names)):
                out.write(matrices[number % len(matrices)].tobytes())
        places |= {name: file.name for name, _ in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def elsewhere(work: Callable[[Path, int], None], path: Path, layers: int) -> None:
    """In a process of its own: what this one holds would count into the peak of the commands that it starts."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=(path, layers))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{path} cannot be made")


def measured(command: list[str]) -> tuple[float, float, float]:
    """Seconds, CPU seconds, and peak resident bytes of a command."""
    before = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - before
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.stderr is not None
    complaint = process.stderr.read().decode()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)[:200]}\n{complaint}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def report(found: dict[str, list[tuple[float, float, float]]], size: int, threads: int) -> None:
    """The table, and how the ratios stand to the bars."""
    copy = min(run[0] for run in found["cp -r"])
    runs = len(found["cp -r"])
    print(f"{size / 1e9:.2f} GB of bfloat16 experts, {threads} threads, best of {runs}")
    print(f"{'':16} {'seconds':>8} {'GB/s in':>8} {'x cp -r':>8} {'CPU s':>6} {'peak MB':>8}")
    for name, measured_ in found.items():
        seconds, cpu, peak = min(measured_)
        print(
            f"{name:16} {seconds:8.2f} {size / seconds / 1e9:8.2f} {copy / seconds:8.2f} {cpu:6.2f} {peak / 1e6:8.0f}"
        )
    for text, ours, theirs, least in BARS:
        if ours in found and theirs in found:
            ratio = min(found[theirs])[0] / min(found[ours])[0]
            print(f"{text:26} {ratio:6.2f} x   {'ok' if ratio >= least else 'below'} (at least {least:g})")
        else:
            print(f"{text:26}   not measured: {theirs} is not there")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/ktplan-convert"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kt-kernel", metavar="PYTHON")
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    given = parser.parse_args()
    model, out = given.folder / "model", given.folder / "out"
    if given.folder.exists():
        raise SystemExit(f"{given.folder} exists; name another folder")
    elsewhere(make_model, model, given.layers)
    size = given.layers * 3 * EXPERTS * HIDDEN * INTERMEDIATE * 2
    commands = {"cp -r": ["cp", "-r", str(model), str(out)]}
    if given.disk:
        commands["cp -r, durable"] = ["sh", "-c", f"cp -r '{model}' '{out}' && sync -f '{out}'"]
    for bits in (8, 4):
        for rounding in ("kt", "mse"):
            commands[f"ktplan int{bits} {rounding}"] = [
                sys.executable, "-m", "ktplan", "convert-cpu", str(model), "-o", str(out), "-q",
                "--bits", str(bits), "--group-size", "row", "--rounding", rounding, "--threads", str(given.threads),
            ]  # fmt: skip
    for name, options in (("int4-g32", ["--group-size", "32"]), ("bf16", ["--dtype", "bf16"])):
        commands[f"ktplan {name}"] = [
            sys.executable, "-m", "ktplan", "convert-cpu", str(model), "-o", str(out), "-q", *options,
            "--threads", str(given.threads),
        ]  # fmt: skip
    if given.kt_kernel:
        for bits in (8, 4):
            commands[f"kt-kernel int{bits}"] = [
                given.kt_kernel, "-c", KT_KERNEL, str(model), str(out), str(bits), str(given.threads),
            ]  # fmt: skip
    if given.llama_cpp:
        elsewhere(make_gguf, given.folder / "model.gguf", given.layers)
        commands["llama.cpp Q4_0"] = [
            given.llama_cpp, "-c", LLAMA_CPP, str(given.folder / "model.gguf"), str(out), str(given.threads),
        ]  # fmt: skip
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
    try:
        shutil.copytree(model, out)  # not measured
        shutil.rmtree(out)
        for _ in range(given.runs):
            for name, command in commands.items():
                if name.startswith("kt-kernel"):
                    out.mkdir()
                found[name].append(measured(command))
                shutil.rmtree(out)
    finally:
        shutil.rmtree(given.folder)
    report(found, size, given.threads)
    if given.json:
        rows = {name: min(runs)[0] for name, runs in found.items()}
        peaks = {name: min(runs)[2] for name, runs in found.items()}
        given.json.write_text(
            json.dumps({"bytes": size, "seconds": rows, "peak_bytes": peaks}, indent=1) + "\n"
        )
    load = os.getloadavg()[0]
    own = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    print(f"load of the machine {load:.1f} ({own:.0f} CPU s were ours)")


if __name__ == "__main__":
    main()
