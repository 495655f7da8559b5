"""Several GPUs of any sizes: consecutive layers on each, experts of a layer beside the rest of it.

Each GPU holds its layers' dense weights and cache, its share of workspace and margin, and experts of its own layers in
what is left. Where to cut is decided by a programme over all cuts, for the most choices served.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ktplan.errors import DoesNotFit
from ktplan.experts import ExpertSet
from ktplan.model import ModelSpec
from ktplan.placement.budget import DEFAULT_MARGIN, Needs, expert_bytes, fit
from ktplan.placement.choose import Chooser, Judged, judge
from ktplan.placement.decide import FOLDS, setting_of
from ktplan.placement.evaluate import expect
from ktplan.placement.known import reference
from ktplan.placement.machine import HardwareSpec
from ktplan.placement.memory import Anatomy
from ktplan.placement.plan import PlacementPlan, PlanShape
from ktplan.placement.predict import predict
from ktplan.placement.replay import Routing
from ktplan.placement.strategies import DEFAULT_SEED, Cells, choose
from ktplan.profile.profile import ActivationProfile, Counts
from ktplan.profile.trace import Trace
from ktplan.units import format_bytes

_CUTS = 48  # layers beyond this are cut in steps


def plan_several(
    spec: ModelSpec,
    profile: ActivationProfile | None,
    anatomy: Anatomy,
    cards: tuple[int, ...],
    needs: Needs,
    *,
    strategy: str = "frequency",
    seed: int = DEFAULT_SEED,
    machine: HardwareSpec | None = None,
    cpu_expert: int | None = None,
    gpu_format: str = "bf16",
    context: int | None = None,
    margin: int = DEFAULT_MARGIN,
    batch: int = 1,
) -> PlacementPlan:
    """A plan with devices cuda:0, cuda:1, ... Raises DoesNotFit naming the GPU that cannot hold its part."""
    one = expert_bytes(spec, gpu_format)
    planned = profile.for_model(spec).planning() if profile else None
    counts = planned.total() if planned else np.ones((len(spec.moe_layers), spec.experts), np.int64)
    room = _Room(spec, anatomy, cards, needs, margin, one)
    spans = _cut(spec, counts, room)
    slots = [room.slots(gpu, *span) for gpu, span in enumerate(spans)]
    devices: dict[str, ExpertSet] = {}
    for gpu, (span, number) in enumerate(zip(spans, slots, strict=True)):
        devices[f"cuda:{gpu}"] = _on_one(
            spec, planned, strategy, span, number, seed, machine, cpu_expert, gpu_format
        )
    total = sum(len(experts) for experts in devices.values())
    budget = fit(
        spec,
        slots=total,
        gpu_format=gpu_format,
        context=context,
        margin=margin * len(cards),
        batch=batch,
        needs=needs,
    )
    named = " + ".join(format_bytes(card) for card in cards)
    budget = replace(budget, asked=f"{named} for everything", limit_bytes=sum(cards), limit_of="card")
    prediction = expectation = None
    gpu_set = ExpertSet(expert for experts in devices.values() for expert in experts)
    if planned is not None:
        setting = setting_of(spec, budget, machine or reference(), cpu_expert)
        routing = Routing(planned, batch=batch, seed=seed)
        chooser = Chooser(strategy="frequency", slots=total, routing=routing, costs=setting.costs, seed=seed)
        judged = _judged(judge(chooser, FOLDS), chooser, gpu_set)
        prediction = predict(judged, chooser, setting)
        expectation = expect(planned, gpu_set, strategy="frequency", seed=seed, judged=judged)
    return PlacementPlan(
        model=spec.name,
        family=spec.family,
        fingerprint=spec.fingerprint,
        shape=PlanShape.of(spec),
        strategy=strategy,
        seed=seed,
        budget=budget,
        devices=devices,
        expectation=expectation,
        inputs={"profile": profile.digest()} if profile else {},
        prediction=prediction,
    )


class _Room:
    """Slots that a GPU has for a span of layers; -1 where not even the rest fits."""

    def __init__(
        self, spec: ModelSpec, anatomy: Anatomy, cards: tuple[int, ...], needs: Needs, margin: int, one: int
    ) -> None:
        self._spec, self._cards, self._one = spec, cards, one
        self._dense = np.array([anatomy.by_layer.get(layer, 0) for layer in range(spec.layers)])
        self._kv = needs.kv_bytes / spec.layers
        self._rest = needs.workspace + margin
        self._first, self._last = anatomy.embedding, anatomy.head or anatomy.embedding

    def left(self, gpu: int, begin: int, end: int) -> int:
        """Bytes for experts of layers begin .. end - 1; negative where the rest does not fit."""
        need = int(self._dense[begin:end].sum()) + round(self._kv * (end - begin)) + self._rest
        need += self._first if begin == 0 else 0
        need += self._last if end == self._spec.layers and begin else 0
        return self._cards[gpu] - need

    def slots(self, gpu: int, begin: int, end: int) -> int:
        experts = sum(begin <= layer < end for layer in self._spec.moe_layers) * self._spec.experts
        left = self.left(gpu, begin, end)
        return -1 if left < 0 else min(experts, left // self._one)


def _cut(spec: ModelSpec, counts: Counts, room: _Room) -> list[tuple[int, int]]:
    """Spans of layers, one for each GPU, that serve most choices."""
    gpus = len(room._cards)
    step = max(1, spec.layers // _CUTS)
    borders = sorted({*range(0, spec.layers, step), spec.layers})
    place = {layer: n for n, layer in enumerate(spec.moe_layers)}

    def value(gpu: int, begin: int, end: int) -> float:
        slots = room.slots(gpu, begin, end)
        if slots < 0:
            return -np.inf
        rows = [place[layer] for layer in range(begin, end) if layer in place]
        cells = counts[rows].ravel()
        if slots >= len(cells):
            return float(cells.sum())
        return float(np.partition(cells, len(cells) - slots)[len(cells) - slots :].sum()) if slots else 0.0

    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for gpu in range(gpus):
        found: dict[int, tuple[float, int]] = {}
        ends = [spec.layers] if gpu == gpus - 1 else borders[1:]
        for end in ends:
            for begin, (so_far, _) in best[gpu].items():
                if begin < end:
                    total = so_far + value(gpu, begin, end)
                    if total > found.get(end, (-np.inf, 0))[0]:
                        found[end] = (total, begin)
        best.append(found)
    if spec.layers not in best[-1]:
        lack = -sum(min(0, room.left(gpu, 0, spec.layers)) for gpu in range(gpus)) // gpus
        raise DoesNotFit(
            f"{spec.name} without routed experts does not fit on {gpus} GPUs of "
            f"{', '.join(format_bytes(card) for card in room._cards)}",
            hint=f"lower --context or --margin, or give about {format_bytes(max(1, lack // gpus))} more",
        )
    spans, end = [], spec.layers
    for gpu in range(gpus - 1, -1, -1):
        begin = best[gpu + 1][end][1]
        spans.append((begin, end))
        end = begin
    return spans[::-1]


def _on_one(
    spec: ModelSpec,
    profile: ActivationProfile | None,
    strategy: str,
    span: tuple[int, int],
    slots: int,
    seed: int,
    machine: HardwareSpec | None,
    cpu_expert: int | None,
    gpu_format: str,
) -> ExpertSet:
    mine = [place for place, layer in enumerate(spec.moe_layers) if span[0] <= layer < span[1]]
    if not mine or slots <= 0:
        return ExpertSet()
    layers = tuple(spec.moe_layers[place] for place in mine)
    if profile is None:
        return choose(strategy, Cells(layers, spec.experts), slots, None, seed)
    trace = profile.trace
    part = replace(
        profile,
        counts=profile.counts[:, mine],
        layers=layers,
        decode_counts=None,
        decode_tokens=None,
        ranked=None,
        trace=Trace(trace.ids[mine], trace.owners, trace.phases, trace.ranked) if trace else None,
    )
    setting = setting_of(spec, fit(spec, slots=0, gpu_format=gpu_format), machine or reference(), cpu_expert)
    return (
        Chooser(
            strategy=strategy, slots=slots, routing=Routing(part, seed=seed), costs=setting.costs, seed=seed
        )
        .choose()
        .gpu
    )


def _judged(like: Judged, chooser: Chooser, gpu: ExpertSet) -> Judged:
    """Times of the set itself, in-sample: folds cannot be cut again for each GPU without deciding anew."""
    mask = chooser.routing.mask(gpu)
    assert chooser.costs is not None
    times = chooser.routing.times(chooser.costs, mask)
    return like._replace(
        chosen=like.chosen._replace(mask=mask), hits=chooser.routing.hits(mask), held_hits=None, folds=None,
        seconds=times.seconds, weights=times.weights,
    )  # fmt: skip
