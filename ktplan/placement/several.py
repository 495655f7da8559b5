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
from ktplan.placement.choose import Chooser, Chosen, Judged, better
from ktplan.placement.decide import FOLDS, setting_of
from ktplan.placement.evaluate import expect
from ktplan.placement.known import reference
from ktplan.placement.machine import HardwareSpec
from ktplan.placement.memory import Anatomy
from ktplan.placement.plan import PlacementPlan, PlanShape
from ktplan.placement.predict import Setting, predict
from ktplan.placement.replay import Mask, Routing
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
    asked = fit(
        spec, slots=0, gpu_format=gpu_format, context=context, margin=margin, batch=batch, needs=needs
    )
    room = _Room(spec, anatomy, cards, needs, margin, one, asked.context)
    setting = setting_of(spec, asked, machine or reference(), cpu_expert)
    maker = _Maker(spec, planned, room, setting, seed)
    devices = maker.devices(strategy)
    expectation, judged, kept = None, None, None
    if planned is not None:
        judged = maker.judged(strategy, devices)
        if strategy == "optimal":
            plain = maker.devices("frequency")
            other = maker.judged("frequency", plain)
            if not better(judged, other):
                devices, judged, kept = plain, other, "frequency"
    gpu_set = ExpertSet(expert for experts in devices.values() for expert in experts)
    budget = fit(
        spec,
        slots=len(gpu_set),
        gpu_format=gpu_format,
        context=context,
        margin=margin * len(cards),
        batch=batch,
        needs=needs,
    )
    named = " + ".join(format_bytes(card) for card in cards)
    budget = replace(budget, asked=f"{named} for everything", limit_bytes=sum(cards), limit_of="card")
    prediction = None
    if planned is not None and judged is not None:
        chooser = maker.chooser("frequency", len(gpu_set))
        prediction = predict(judged, chooser, setting, alike=chooser.choose().mask)
        prediction = replace(prediction, kept=kept) if kept else prediction
        expectation = expect(planned, gpu_set, strategy=strategy, seed=seed, judged=judged)
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


class _Maker:
    """Devices by some of the documents: where to cut and what to take are both decided by those alone."""

    def __init__(
        self, spec: ModelSpec, profile: ActivationProfile | None, room: _Room, setting: Setting, seed: int
    ) -> None:
        self._spec, self._profile, self._room, self._setting, self._seed = spec, profile, room, setting, seed
        self._routing = Routing(profile, batch=setting.batch, seed=seed) if profile else None
        self._parts: dict[tuple[int, int], Routing] = {}

    def devices(self, strategy: str, documents: Mask | None = None) -> dict[str, ExpertSet]:
        """The experts of each GPU."""
        counts = np.ones((len(self._spec.moe_layers), self._spec.experts), np.int64)
        if self._profile is not None:
            kept = slice(None) if documents is None else documents
            counts = np.asarray(self._profile.counts[kept].sum(axis=0))
        return {
            f"cuda:{gpu}": self._on_one(strategy, span, self._room.slots(gpu, *span), documents)
            for gpu, span in enumerate(_cut(self._spec, counts, self._room))
        }

    def chooser(self, strategy: str, slots: int) -> Chooser:
        """A strategy over all layers, for what more memory would bring."""
        assert self._routing is not None
        return Chooser(
            strategy=strategy, slots=slots, routing=self._routing, costs=self._setting.costs, seed=self._seed
        )

    def judged(self, strategy: str, devices: dict[str, ExpertSet]) -> Judged:
        """On documents that neither cut nor choice has seen, where there are several."""
        assert self._routing is not None and self._profile is not None
        routing, costs = self._routing, self._setting.costs
        mask = _mask(routing, devices)
        chosen = Chosen(mask, None, self._profile.layers)
        hits = routing.hits(mask)
        folds = min(FOLDS, self._profile.documents)
        if folds < 2:
            times = routing.times(costs, mask)
            return Judged(chosen, hits, None, times.seconds, times.weights, None)
        dealt = self._profile.folds(folds)
        held = np.zeros_like(hits)
        seconds, weights = np.zeros(len(hits)), np.zeros(len(hits))
        for fold in range(folds):
            mine = dealt == fold
            apart = _mask(routing, self.devices(strategy, ~mine))
            times = routing.times(costs, apart, mine)
            held[mine] = routing.hits(apart)[mine]
            seconds[mine], weights[mine] = times.seconds[mine], times.weights[mine]
        return Judged(chosen, hits, held, seconds, weights, folds, routing.widening)

    def _on_one(self, strategy: str, span: tuple[int, int], slots: int, documents: Mask | None) -> ExpertSet:
        spec = self._spec
        mine = [place for place, layer in enumerate(spec.moe_layers) if span[0] <= layer < span[1]]
        if not mine or slots <= 0:
            return ExpertSet()
        layers = tuple(spec.moe_layers[place] for place in mine)
        if self._profile is None:
            return choose(strategy, Cells(layers, spec.experts), slots, None, self._seed)
        if span not in self._parts:
            self._parts[span] = Routing(
                _layers_of(self._profile, mine, layers), batch=self._setting.batch, seed=self._seed
            )
        chooser = Chooser(
            strategy=strategy,
            slots=slots,
            routing=self._parts[span],
            costs=self._setting.costs,
            seed=self._seed,
        )
        return chooser.choose(documents).gpu


def _layers_of(profile: ActivationProfile, mine: list[int], layers: tuple[int, ...]) -> ActivationProfile:
    trace = profile.trace
    return replace(
        profile,
        counts=profile.counts[:, mine],
        layers=layers,
        decode_counts=None,
        decode_tokens=None,
        ranked=None,
        trace=Trace(trace.ids[mine], trace.owners, trace.phases, trace.ranked) if trace else None,
    )


def _mask(routing: Routing, devices: dict[str, ExpertSet]) -> Mask:
    return routing.mask(ExpertSet(expert for experts in devices.values() for expert in experts))


class _Room:
    """Slots that a GPU has for a span of layers; -1 where not even the rest fits."""

    def __init__(
        self,
        spec: ModelSpec,
        anatomy: Anatomy,
        cards: tuple[int, ...],
        needs: Needs,
        margin: int,
        one: int,
        tokens: int,
    ) -> None:
        self._spec, self._cards, self._one, self._tokens = spec, cards, one, tokens
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

    def misfit(self) -> DoesNotFit:
        """What to say when no cut leaves each GPU what it needs: the lines of all GPUs together, and the lack."""
        spec, gpus = self._spec, len(self._cards)
        lines = {
            "dense weights": int(self._dense.sum()) + self._first + self._last,
            "KV cache": round(self._kv * spec.layers),
            "workspace and margin": self._rest * gpus,
        }
        lack = sum(lines.values()) - sum(self._cards)
        named = ", ".join(f"{what} {format_bytes(size)}" for what, size in lines.items())
        cards = ", ".join(format_bytes(card) for card in self._cards)
        if lack <= 0:
            # In all there is room: some GPU is too small for its workspace and one layer, or layers are too large.
            small = min(range(gpus), key=lambda gpu: self._cards[gpu])
            need = self._rest + int(self._dense.max()) + round(self._kv) + self._first
            hint = f"cuda:{small} alone needs about {format_bytes(need)}: leave it out, or lower --margin or --context"
        elif lines["KV cache"] >= lack and self._tokens:
            lower = int(self._tokens * (lines["KV cache"] - lack) / lines["KV cache"])
            hint = f"give {format_bytes(lack)} more in all, or lower --context to about {lower:,}"
        else:
            hint = f"give {format_bytes(lack)} more in all, or lower --margin"
        return DoesNotFit(
            f"{spec.name} without routed experts does not fit on {gpus} GPUs of {cards}: {named}", hint=hint
        )

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
                if begin < end and np.isfinite(so_far):
                    total = so_far + value(gpu, begin, end)
                    if total > found.get(end, (-np.inf, 0))[0]:
                        found[end] = (total, begin)
        best.append(found)
    if spec.layers not in best[-1] or not np.isfinite(best[-1][spec.layers][0]):
        raise room.misfit()
    spans, end = [], spec.layers
    for gpu in range(gpus - 1, -1, -1):
        begin = best[gpu + 1][end][1]
        spans.append((begin, end))
        end = begin
    return spans[::-1]
