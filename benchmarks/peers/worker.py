"""One engine in a process of its own, told what to do by lines of JSON on stdin; answers on stdout.

    python benchmarks/peers/worker.py ENGINE FORMAT SHAPE THREADS

It may be another Python than the benchmark's: nothing but numpy and the engine's own package is imported. Engines:
`kt` (kt-kernel), `ggml` (the libraries inside llama-cpp-python), `torch_experts`, `ours`.

An engine module has `make(shape, format, threads)`, which returns an object with `bytes_per_weight` and
`prepare(tokens)`, which returns the function that computes one layer for the next routing; `ours` has more.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from side_by_side import SHAPES, block  # noqa: E402


def serve(engine: Any, answers: Any) -> None:
    calls: dict[Any, Any] = {}

    def call_for(order: dict[str, Any]) -> Any:
        key = (order.get("what", ""), order["tokens"])
        if key not in calls:
            calls.clear()  # buffers of other batch sizes go
            calls[key] = engine.prepare(order["tokens"], *([order["what"]] if "what" in order else []))
        return calls[key]

    for line in sys.stdin:
        order = json.loads(line)
        if "limit" in order:
            answer = engine.limit(order["limit"])
        else:
            call = call_for(order)
            call()
            done = block(call, seconds=order["seconds"])
            answer = {"seconds": done.seconds, "cpu_seconds": done.cpu_seconds, "others": done.others}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    name, form, shape, threads = sys.argv[1:5]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is not an answer
    os.environ["OMP_NUM_THREADS"] = threads
    engine = importlib.import_module(f"peers.{name}").make(SHAPES[shape], form, int(threads))
    print(json.dumps({"bytes_per_weight": engine.bytes_per_weight}), file=answers, flush=True)
    serve(engine, answers)


if __name__ == "__main__":
    main()
