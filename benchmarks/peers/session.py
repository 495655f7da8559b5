"""The benchmark's side of worker.py: which engines there are, and how to start and ask one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from side_by_side import Block


class Peer(NamedTuple):
    name: str
    engine: str
    format: str
    against: str  # our format that takes turns with it
    threads: int | None = None  # None: as many as we
    most_tokens: int = 1024


PEERS = (
    Peer("kt-kernel AMXINT8", "kt", "AMXINT8", "int8"),
    Peer("kt-kernel AMXINT8, 1 thread", "kt", "AMXINT8", "int8", 1, 4),
    Peer("kt-kernel FP8_PERCHANNEL", "kt", "FP8_PERCHANNEL", "int8"),
    Peer("kt-kernel AMXINT4", "kt", "AMXINT4", "int4"),
    Peer("kt-kernel AMXINT4, 1 thread", "kt", "AMXINT4", "int4", 1, 4),
    Peer("kt-kernel RAWINT4", "kt", "RAWINT4", "int4-g32"),
    Peer("kt-kernel BF16", "kt", "BF16", "bf16"),
    Peer("ggml Q8_0", "ggml", "Q8_0 plain", "int8"),
    Peer("ggml Q4_K", "ggml", "Q4_K plain", "int4-g32"),
    Peer("ggml Q4_K repacked", "ggml", "Q4_K repack", "int4-g32"),
    Peer("ggml Q4_0 repacked", "ggml", "Q4_0 repack", "int4"),
    Peer("torch int8", "torch_experts", "int8", "int8"),
    Peer("torch bf16", "torch_experts", "bf16", "bf16"),
)
PACKAGES = {
    "kt": ("kt_kernel", "pip install kt-kernel==0.7.2"),
    "ggml": ("llama_cpp", 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python==0.3.36'),
    "torch_experts": ("torch", "pip install torch"),
}


class EngineFailed(RuntimeError):
    """The worker ended before it answered."""


def lacks(python: str, engine: str) -> str | None:
    """How to install what an engine needs; None where it is there."""
    package, command = PACKAGES[engine]
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    if subprocess.run([python, "-c", look], capture_output=True).returncode == 0:
        return None
    return command


class Worker:
    def __init__(self, python: str, engine: str, form: str, shape: str, threads: int) -> None:
        script = Path(__file__).parent / "worker.py"
        self._process = subprocess.Popen(
            [python, str(script), engine, form, shape, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.bytes_per_weight: float = self._answer()["bytes_per_weight"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"{self._process.args} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **order: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineFailed(f"{self._process.args} is gone") from error
        return self._answer()

    def block(self, tokens: int, seconds: float, what: str | None = None) -> Block:
        more = {} if what is None else {"what": what}
        return Block(**self.ask(tokens=tokens, seconds=seconds, **more))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
