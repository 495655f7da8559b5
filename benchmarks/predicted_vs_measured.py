"""Predicted against measured decode steps, on the embedded model with the real runtime.

Where no GPU exists torch's experts on the CPU are the "device": their work follows that of the CPU engine instead
of running beside it, so the two sides add up. Constants come from microbenchmarks of one layer (both sides, one
side) and two runs: all experts on the CPU, and the first half of every layer on the device (which says how much
slower a layer is amid a model than alone in its caches; that row is no prediction and is left out of the errors).
Routing from a recorded trace of the same steps, replayed. Then every strategy at five shares is built, run and
compared: time of a step, and the runtime's own counters, which must equal the replay of the same run to the last
route. (INT8 experts round differently from the device's, so a few routes change with the placement; each run is
therefore recorded itself for that check.) The run with all experts on the CPU is repeated document by document beside
each other run, and predictions are scaled by what it now takes: machines that others use change their speed.

    python benchmarks/predicted_vs_measured.py [--json FILE] [--tokens 240] [--clock cpu|wall]

`--clock cpu` counts processor time of this process with one thread: other programs on the machine disturb it least.
Exit code 1 when the median error exceeds 10 %, the worst 20 %, or a counter differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ktplan import network
from ktplan.convert.cpu import convert_cpu
from ktplan.model import open_source
from ktplan.model.embedded import TINY, corpus_files
from ktplan.placement import PlacementPlan, make_plan
from ktplan.placement.replay import Routing
from ktplan.profile import ActivationProfile, read_corpus
from ktplan.profile.recorder import Recorder
from ktplan.profile.trace import Trace
from ktplan.quant.scheme import Scheme
from ktplan.runtime import engine

RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
STRATEGIES = ("random", "uniform", "front-loading", "frequency", "optimal", "robust")
DOCUMENT = 24  # tokens of each document: the cache's growth stays small beside a step
LAYER_CALLS = 160


@dataclass(frozen=True)
class Table:
    """Seconds of a layer's experts with n choices on the CPU; a stand-in for the planner's Costs in a replay."""

    seconds: tuple[float, ...]

    def table(self, choices: int) -> np.ndarray:
        return np.array(self.seconds[: choices + 1])


def steps(model: Any, documents: list[list[int]], clock: Callable[[], float]) -> tuple[float, int]:
    """(seconds, steps) of decoding documents token by token, each with a cache of its own."""
    spent, count = 0.0, 0
    with torch.inference_mode():
        for ids in documents:
            cache = DynamicCache(config=model.config)
            for token in ids:
                started = clock()
                model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True, logits_to_keep=1)
                spent += clock() - started
                count += 1
    return spent, count


def record(
    model: Any, experts: dict[int, tuple[str, Any]], documents: list[list[int]], spec: Any
) -> ActivationProfile:
    """The routing of exactly those steps."""
    recorder = Recorder(experts, experts=spec.experts, keep_ids=True)
    pieces, owners, counts = [], [], np.zeros((len(documents), len(spec.moe_layers), spec.experts), np.int64)
    with recorder.attached(), torch.inference_mode():
        for number, ids in enumerate(documents):
            cache = DynamicCache(config=model.config)
            for token in ids:
                seen = recorder.watch(
                    np.zeros(1, np.int64),
                    lambda token=token, cache=cache: model(
                        input_ids=torch.tensor([[token]]), cache=cache, use_cache=True
                    ),
                )
                counts[number] += seen.counts.sum(axis=(0, 3))
                pieces.append(seen.ids)
                owners.append(number)
    trace = Trace(
        np.concatenate(pieces, axis=1), np.array(owners, np.int32), np.ones(len(owners), np.uint8), True
    )
    return ActivationProfile(
        counts=counts,
        tokens=np.array([len(ids) for ids in documents]),
        document_ids=tuple(map(str, range(len(documents)))),
        sources=tuple("ab"[n % 2] for n in range(len(documents))),
        layers=spec.moe_layers,
        top_k=spec.top_k,
        fingerprint=spec.fingerprint,
        model=spec.name,
        family=spec.family,
        trace=trace,
    )


def side_by_side(
    first: Any, second: Any, documents: list[list[int]], clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds of both over the documents, turn by turn."""
    steps(second.model, documents[:1], clock)
    pairs = [(steps(first.model, [ids], clock)[0], steps(second.model, [ids], clock)[0]) for ids in documents]
    return sum(one for one, _ in pairs), sum(other for _, other in pairs)


def watched(loaded: Any) -> dict[int, tuple[str, Any]]:
    """The experts modules as the recorder wants them."""
    return {layer: (module.place.name, module) for layer, module in loaded.experts.items()}


def layer_time(module: Any, hidden: int, pairs: list[tuple[int, int]], clock: Callable[[], float]) -> float:
    """Seconds of a call of one layer's experts, routed to these pairs in turn; the median of blocks."""
    states = torch.randn(1, hidden)
    weights = torch.full((1, 2), 0.5)
    indices = [torch.tensor([pair]) for pair in pairs]
    blocks = []
    with torch.inference_mode():
        for block in range(9):
            started = clock()
            for call in range(LAYER_CALLS // 8):
                module(states, indices[(block * 7 + call) % len(indices)], weights)
            blocks.append((clock() - started) / (LAYER_CALLS // 8))
    return median(blocks[1:])


@dataclass(frozen=True)
class Constants:
    """Seconds: of a layer with both sides by CPU choices, with one side alone, and of a step outside experts."""

    both: tuple[float, float, float]
    cpu_only: float
    gpu_only: float
    rest: float


def engine_of(store: Path, plan: PlacementPlan) -> Any:
    return engine.load(TINY, store=store, plan=plan, dtype="float32", threads=1)


def calibrate(spec: Any, store: Path, documents: list[list[int]], clock: Callable[[], float]) -> Constants:
    """Microbenchmarks of one layer, and one run with everything on the CPU."""
    half = engine_of(store, make_plan(spec, strategy="uniform", slots=spec.expert_count // 2)).network
    gpu, cpu = list(range(spec.experts // 2)), list(range(spec.experts // 2, spec.experts))
    module = half.experts[0]
    turn = range(len(gpu))
    both = tuple(
        layer_time(module, spec.hidden, pairs, clock)
        for pairs in (
            [(gpu[n], gpu[n - 1]) for n in turn],
            [(gpu[n], cpu[n]) for n in turn],
            [(cpu[n], cpu[n - 1]) for n in turn],
        )
    )
    none = engine_of(store, make_plan(spec, strategy="uniform", slots=0)).network
    every = engine_of(store, make_plan(spec, strategy="uniform", slots=spec.expert_count)).network
    mixed = [(n, (n + 3) % spec.experts) for n in range(spec.experts)]
    cpu_only = layer_time(none.experts[0], spec.hidden, mixed, clock)
    gpu_only = layer_time(every.experts[0], spec.hidden, mixed, clock)
    steps(none.model, documents[:2], clock)
    spent, count = steps(none.model, documents, clock)
    return Constants(both, cpu_only, gpu_only, spent / count - len(spec.moe_layers) * cpu_only)  # type: ignore[arg-type]


def predicted(constants: Constants, routing: Routing, mask: np.ndarray) -> float:
    """Seconds of a step by replay: layers with both sides by their CPU choices, the others at their own time."""
    held = mask.sum(axis=1)
    one_sided = (held == 0) | (held == mask.shape[1])
    time_all = routing.times(Table(constants.both), mask).mean()  # type: ignore[arg-type]
    wrong = sum(constants.both[2] if n == 0 else constants.both[0] for n in held[one_sided].tolist())
    right = sum(constants.cpu_only if n == 0 else constants.gpu_only for n in held[one_sided].tolist())
    return constants.rest + time_all - wrong + right


def run(tokens: int, clock: Callable[[], float]) -> dict[str, Any]:
    torch.set_num_threads(1)
    source = open_source(TINY)
    spec = source.spec
    corpus = read_corpus(corpus_files("test"))
    encode = network.text_encoder(network.tokenizer(TINY))
    texts = [encode(document.text).tokens.tolist()[:DOCUMENT] for document in corpus.documents]
    texts = [ids for ids in texts if len(ids) == DOCUMENT]
    stride = max(1, len(texts) * DOCUMENT // tokens)
    documents = texts[::stride][: max(4, tokens // DOCUMENT)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        convert_cpu(source, store, Scheme(8))
        none = engine_of(store, make_plan(spec, strategy="uniform", slots=0)).network
        profile = record(none.model, watched(none), documents, spec)
        routing = Routing(profile)
        constants = calibrate(spec, store, documents, clock)
        reference = constants.rest + len(spec.moe_layers) * constants.cpu_only
        count = sum(map(len, documents))
        half = make_plan(spec, strategy="uniform", slots=spec.expert_count // 2)
        beside, spent = side_by_side(none, engine_of(store, half).network, documents, clock)
        told = predicted(constants, routing, routing.mask(half.gpu))
        amid = (spent / beside * reference - constants.rest) / (told - constants.rest)
        constants = Constants(
            tuple(amid * value for value in constants.both),
            constants.cpu_only,
            amid * constants.gpu_only,
            constants.rest,
        )
        for ratio in RATIOS:
            for strategy in STRATEGIES:
                if (ratio, strategy) == (0.5, "uniform"):
                    continue
                plan = make_plan(spec, profile, strategy=strategy, slots=int(spec.expert_count * ratio))
                loaded = engine_of(store, plan).network
                mask = routing.mask(plan.gpu)
                beside, spent = side_by_side(none, loaded, documents, clock)
                loaded.counters.clear()
                own = record(loaded.model, watched(loaded), documents, spec)
                (served, routes), *_ = loaded.counters.totals().values()
                told = predicted(constants, routing, mask) * beside / count / reference
                rows.append({
                    "ratio": ratio, "strategy": strategy, "predicted_us": 1e6 * told,
                    "measured_us": 1e6 * spent / count, "error": told / (spent / count) - 1, "hits": served,
                    "replayed_hits": int(Routing(own).hits(mask).sum()), "routes": routes,
                })  # fmt: skip
    errors = [abs(row["error"]) for row in rows]
    return {
        "constants_us": {"both": [1e6 * value for value in constants.both], "cpu_only": 1e6 * constants.cpu_only,
                         "gpu_only": 1e6 * constants.gpu_only, "rest": 1e6 * constants.rest},
        "rows": rows,
        "amid": amid,
        "median_error": median(errors),
        "worst_error": max(errors),
        "counters_equal": all(row["hits"] == row["replayed_hits"] for row in rows),
        "tokens": profile.token_count,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--tokens", type=int, default=240, help="steps of each run")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="what to measure in")
    given = parser.parse_args()
    found = run(given.tokens, time.process_time if given.clock == "cpu" else time.perf_counter)
    for row in found["rows"]:
        print(
            f"{row['ratio']:4.0%} {row['strategy']:14} predicted {row['predicted_us']:8.0f} us  measured "
            f"{row['measured_us']:8.0f} us {row['error']:+6.1%}  hits {row['hits']} = {row['replayed_hits']}"
        )
    errors = f"median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}"
    print(f"{errors}, counters equal: {found['counters_equal']}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    good = found["median_error"] <= 0.10 and found["worst_error"] <= 0.20 and found["counters_equal"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
