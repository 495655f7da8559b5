"""How long planning takes, after the start of Python, on synthetic profiles of the shape of large models.

    python benchmarks/place_speed.py [--documents 120] [--json FILE]

61 layers x 256 experts, top-8 (DeepSeek-V3): every strategy with its interval, held-out rates and prediction, then
`--compare` with a trace. 93 x 384, top-8 (as large as Kimi-K2): `optimal`. Then what recording adds to the embedded
model's own forward time. Seconds of this process' processors (others on the machine do not count), and of the clock.
Exit code 1 beyond 2 s a plan, 10 s a comparison, 5 s the large plan, 3 % of recording.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ktplan.model import ModelSpec, read_spec
from ktplan.model.embedded import TINY
from ktplan.placement import fit, make_plan
from ktplan.placement.comparison import compare_all
from ktplan.placement.decide import setting_of
from ktplan.placement.known import reference
from ktplan.profile import ActivationProfile
from ktplan.profile.trace import Trace

STRATEGIES = ("uniform", "front-loading", "random", "frequency", "optimal", "robust")
LIMITS = {"plan": 2.0, "compare": 10.0, "large": 5.0, "recording": 0.03}


def spec_of(layers: int, experts: int, top_k: int) -> ModelSpec:
    """A model of that shape that exists on paper."""
    size = 3 * 7168 * 2048
    return replace(
        read_spec(TINY), name=f"{layers} x {experts}", layers=layers, moe_layers=tuple(range(layers)), experts=experts,
        top_k=top_k, hidden=7168, moe_intermediate=2048, expert_params=size * layers * experts,
        expert_bytes=2 * size * layers * experts, dense_bytes=20 << 30,
    )  # fmt: skip


def profile_of(spec: ModelSpec, documents: int, tokens: int = 200, trace: bool = True) -> ActivationProfile:
    """Documents with favourites of their own around common ones, token by token."""
    draw = np.random.default_rng(0)
    layers, k = len(spec.moe_layers), spec.top_k
    ids = np.zeros((layers, documents * tokens, k), np.uint16)
    counts = np.zeros((documents, layers, spec.experts), np.int64)
    for layer in range(layers):
        common = draw.normal(0, 1.0, spec.experts)
        for document in range(documents):
            own = common + draw.normal(0, 0.8, spec.experts)
            scores = own + draw.gumbel(size=(tokens, spec.experts))
            chosen = np.argpartition(-scores, k, axis=1)[:, :k]
            ids[layer, document * tokens : (document + 1) * tokens] = chosen
            counts[document, layer] = np.bincount(chosen.ravel(), minlength=spec.experts)
    owners = np.repeat(np.arange(documents, dtype=np.int32), tokens)
    return ActivationProfile(
        counts=counts,
        tokens=np.full(documents, tokens),
        document_ids=tuple(map(str, range(documents))),
        sources=tuple("abcd"[n % 4] for n in range(documents)),
        layers=spec.moe_layers,
        top_k=k,
        fingerprint=spec.fingerprint,
        model=spec.name,
        family=spec.family,
        trace=Trace(ids, owners, np.zeros(len(owners), np.uint8), False) if trace else None,
    )


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Processor and clock seconds of one call."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return {"cpu": time.process_time() - processor, "clock": time.perf_counter() - clock}


def recording(rounds: int = 9) -> float:
    """Share of the forward pass that counting adds, by processor time of one thread."""
    import torch

    from ktplan import network
    from ktplan.profile.recorder import Recorder

    torch.set_num_threads(1)
    model = network.load_whole(TINY)
    recorder = Recorder(dict(network.experts_modules(model)), experts=16)
    ids = torch.randint(0, 4096, (8, 256))
    owners = np.repeat(np.arange(8)[:, None], 256, axis=1)

    def forward() -> None:
        with torch.inference_mode():
            model.base_model(input_ids=ids, use_cache=False)

    def watched() -> None:
        with recorder.attached():
            recorder.watch(owners, forward)

    forward()
    pairs = [(timed(forward)["cpu"], timed(watched)["cpu"]) for _ in range(rounds)]
    return median(other / plain for plain, other in pairs) - 1


def run(documents: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spec = spec_of(61, 256, 8)
    profile = profile_of(spec, documents)
    slots = int(0.3 * spec.expert_count)
    for strategy in STRATEGIES:
        found[f"plan {strategy}"] = timed(lambda: make_plan(spec, profile, strategy=strategy, slots=slots))  # noqa: B023
    setting = setting_of(spec, fit(spec, slots=0), reference())
    found["compare"] = timed(lambda: compare_all(profile, setting))
    large = spec_of(93, 384, 8)
    wide = profile_of(large, documents // 2)
    found["large optimal"] = timed(
        lambda: make_plan(large, wide, strategy="optimal", slots=int(0.3 * large.expert_count))
    )
    found["recording"] = {"cpu": recording()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=120, help="of the profile, 200 tokens each")
    parser.add_argument("--json", type=Path, help="write everything here")
    given = parser.parse_args()
    found = run(given.documents)
    good = True
    for name, figures in found.items():
        limit = LIMITS[name.split()[0]]
        good &= figures["cpu"] <= limit
        if name == "recording":
            print(f"{name:20} {figures['cpu']:+.1%} of the forward pass (limit {limit:.0%})")
            continue
        print(
            f"{name:20} {figures['cpu']:6.2f} s of processors, {figures['clock']:6.2f} s (limit {limit:g} s)"
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
