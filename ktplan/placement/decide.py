"""One plan: choose, judge on left-out documents, keep the better of the solver and `frequency`, predict."""

from __future__ import annotations

from dataclasses import replace

from ktplan.experts import ExpertSet
from ktplan.model import ModelSpec
from ktplan.placement.budget import Budget
from ktplan.placement.choose import Chooser, Judged, better, judge
from ktplan.placement.cost import Costs, Sizes, costs
from ktplan.placement.machine import HardwareSpec
from ktplan.placement.predict import Prediction, Setting, predict
from ktplan.placement.replay import Routing
from ktplan.profile.profile import ActivationProfile
from ktplan.store.manifest import expert_bytes_as

FOLDS = 5


def setting_of(
    spec: ModelSpec, budget: Budget, machine: HardwareSpec, cpu_expert: int | None = None
) -> Setting:
    """The machine's constants for this model and budget. `cpu_expert` bytes; without it what convert-cpu writes."""
    on_cpu = cpu_expert or _stored(spec)
    per_token = budget.kv_bytes // max(1, budget.context * budget.batch)
    sizes = Sizes(
        cpu_expert=on_cpu,
        gpu_expert=budget.expert_bytes,
        layers=spec.layers,
        dense=spec.dense_bytes,
        head=min(spec.dense_bytes, 2 * spec.vocab * spec.hidden),
        kv=budget.kv_bytes // 2,  # half full on average
    )
    return Setting(
        machine=machine,
        costs=costs(machine, sizes),
        layers=spec.layers,
        batch=budget.batch,
        gpu_expert=budget.expert_bytes,
        kv_per_token=per_token,
        dense_params=spec.dense_params,
        params_per_expert=spec.params_per_expert,
        top_k=spec.top_k,
    )


def _stored(spec: ModelSpec) -> int:
    """Bytes of an expert in the format that convert-cpu writes without options, or the nearest that fits the model."""
    formats = ((4, 32), (8, None), (16, None))
    found = [size for bits, group in formats if (size := expert_bytes_as(spec, bits, group)) is not None]
    return found[0] if found else 2 * spec.params_per_expert


def decide(
    profile: ActivationProfile,
    strategy: str,
    slots: int,
    setting: Setting,
    seed: int,
    routing: Routing | None = None,
) -> tuple[ExpertSet, Judged, Prediction]:
    """The experts, how they were judged, and what they promise."""
    routing = routing or Routing(profile, batch=setting.batch, seed=seed)
    chooser = with_weights(
        Chooser(strategy=strategy, slots=slots, routing=routing, costs=setting.costs, seed=seed)
    )
    judged = judge(chooser, FOLDS)
    kept = None
    if strategy == "optimal":
        plain = replace(chooser, strategy="frequency")
        other = judge(plain, FOLDS)
        if not better(judged, other):
            solution = judged.chosen.solution
            judged, chooser, kept = (
                other._replace(chosen=other.chosen._replace(solution=solution)),
                plain,
                "frequency",
            )
    prediction = predict(judged, chooser, setting)
    return judged.chosen.gpu, judged, replace(prediction, kept=kept) if kept else prediction


def with_weights(chooser: Chooser) -> Chooser:
    """For `robust`: the weights of its data sets are found once, on all documents; folds use them."""
    if chooser.strategy != "robust" or chooser.weights is not None:
        return chooser
    return replace(chooser, weights=chooser.robust_weights())


def time_of(costs_of: Costs, routing: Routing, gpu: ExpertSet) -> float:
    """Mean seconds of a step's routed experts for a set."""
    return routing.times(costs_of, routing.mask(gpu)).mean()


__all__ = ["FOLDS", "decide", "setting_of", "time_of", "with_weights"]
