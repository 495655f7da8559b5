"""How fast a plan will be: tokens a second with an interval over documents, what limits it, what memory is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from ktplan.placement.choose import Chooser, Judged
from ktplan.placement.cost import Costs
from ktplan.placement.machine import HardwareSpec
from ktplan.placement.replay import Floats, Mask, Routing
from ktplan.profile.interval import interval

_PROMPT: Final = 512  # tokens of the prompt that the prefill figure is for
_DIGITS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Rates in tokens a second; held out where the profile has several documents.

    The interval is for as many other documents; the machine's own spread comes on top. `per_gib` and
    `per_16k_context` are tokens a second that one more GiB of GPU memory brings and 16,384 more tokens of context cost.
    """

    machine: str
    batch: int
    decode: float
    decode_low: float
    decode_high: float
    prefill: float
    step_seconds: float
    held_out: bool
    replayed: bool  # from a trace; False: from shares of counts
    bottleneck: str
    per_gib: float
    per_16k_context: float
    deferral: int
    deferral_gain: float  # fraction of decode speed
    bound_seconds: float | None = (
        None  # of a solver: no plan of nested sets takes less for the routed experts
    )
    gap: float | None = None
    kept: str | None = (
        None  # the strategy whose experts were kept because they were better on other documents
    )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, rounded far below any interval."""
        return {
            key: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Prediction:
        """Inverse of `to_dict`; raises KeyError or TypeError for other mappings."""
        return cls(**{name: body[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What beside the experts decides a step."""

    machine: HardwareSpec
    costs: Costs
    layers: int  # all layers
    batch: int
    gpu_expert: int  # bytes
    kv_per_token: int  # bytes, all layers
    dense_params: int
    params_per_expert: int
    top_k: int


def predict(judged: Judged, chooser: Chooser, setting: Setting, alike: Mask | None = None) -> Prediction:
    """All figures for one plan.

    What memory is worth is told of the chooser's own sets; `alike` is the one it makes now where that is not the
    plan's (several GPUs).
    """
    rest = rest_of(setting)
    step = rest + judged.seconds
    decode, low, high = rates(step, judged.weights, setting.batch, judged.widening)
    mask = judged.chosen.mask
    solution = judged.chosen.solution
    mean = float((step * judged.weights).sum() / judged.weights.sum())
    depth, gain = deferral(chooser.routing, mask, setting)
    made = Prediction(
        machine=setting.machine.name,
        batch=setting.batch,
        decode=decode,
        decode_low=low,
        decode_high=high,
        prefill=prefill(chooser.routing, mask, setting),
        step_seconds=mean,
        held_out=judged.held_hits is not None,
        replayed=chooser.routing.replayed,
        bottleneck=bottleneck(chooser.routing, mask, setting),
        per_gib=_per_gib(chooser, mask if alike is None else alike, setting),
        per_16k_context=_per_context(chooser, mask if alike is None else alike, setting),
        deferral=depth,
        deferral_gain=gain,
        bound_seconds=solution.bound if solution else None,
        gap=solution.gap if solution else None,
    )
    return Prediction.from_dict(made.to_dict())  # rounded as in the file, so that a plan equals its file


def rest_of(setting: Setting) -> float:
    """Seconds of a step outside routed experts."""
    return setting.costs.head + setting.layers * setting.costs.attention


def rates(step: Floats, weights: Floats, batch: int, widening: float = 1.0) -> tuple[float, float, float]:
    """(tokens a second, 5 %, 95 %) for as many other documents; see `ktplan.profile.interval`."""
    mean = float((step * weights).sum() / weights.sum())
    fast, slow = interval(step * weights, weights, widening)
    # A step of no time at all is the tail of a normal approximation, no speed.
    return batch / mean, batch / float(slow), batch / max(float(fast), mean / 10)


def expert_seconds(routing: Routing, mask: Mask, costs: Costs) -> float:
    """Mean seconds of a step's routed experts, in-sample."""
    return routing.times(costs, mask).mean()


def bottleneck(routing: Routing, mask: Mask, setting: Setting) -> str:
    """What most of a step goes into, in words."""
    costs = setting.costs
    rest = rest_of(setting)
    experts = expert_seconds(routing, mask, costs)
    share = (routing.counts * ~mask).sum(axis=2) / np.maximum(routing.counts.sum(axis=2), 1)
    cold = float(share.mean(axis=0).sum()) * setting.top_k
    hops = float((1 - (1 - share) ** (setting.top_k * setting.batch)).mean(axis=0).sum()) * costs.hop
    parts = {
        "reading dense weights and cache on the GPU": rest,
        "reading experts from CPU memory": min(experts, setting.batch * cold * costs.cpu),
        "waiting for the CPU to be called (hops)": min(experts, hops),
        "reading experts on the GPU": max(0.0, experts - setting.batch * cold * costs.cpu - hops),
    }
    what = max(parts, key=lambda name: parts[name])
    return f"{what}: {100 * min(1.0, parts[what] / (rest + experts)):.0f} % of a step"


def deferral(routing: Routing, mask: Mask, setting: Setting) -> tuple[int, float]:
    """(experts a token to defer, gain of decode speed): steady state of `max(A+gH, A+a+cI, c(I+D))` a layer.

    Deferral lets the CPU work on a layer's weakest experts while the GPU goes on; it pays until the CPU never waits.
    Ranks are used where the profile has them, else each is as likely to be on the CPU. The smallest depth within 1 % of
    the best is advised. With batches the protected set is a union over them, so little is deferred: none is advised.
    """
    costs, k = setting.costs, setting.top_k
    by_rank = routing.profile.by_rank()
    totals = np.maximum(routing.counts.sum(axis=(0, 2)), 1)
    if by_rank is not None and by_rank.shape[2] == k:
        cold = (by_rank * ~mask[:, :, None]).sum(axis=1) * k / totals[:, None]
    else:
        share = (routing.counts.sum(axis=0) * ~mask).sum(axis=1) / totals
        cold = np.repeat(share[:, None], k, axis=1)
    spent = []
    for depth in range(k):
        now, later = cold[:, : k - depth].sum(axis=1), cold[:, k - depth :].sum(axis=1)
        hot = k - now - later
        called = np.minimum(1.0, now + later)
        side = costs.attention + np.where(now > 0, called * costs.hop + costs.cpu * now, 0)
        spent.append(
            float(
                np.maximum.reduce([costs.attention + costs.gpu * hot, side, costs.cpu * (now + later)]).sum()
            )
        )
    if setting.batch > 1 or not spent[0]:
        return 0, 0.0
    best = next(depth for depth, time in enumerate(spent) if time <= 1.01 * min(spent))
    total = setting.costs.head + spent[0]
    return best, (total / (setting.costs.head + spent[best]) - 1) if best else 0.0


def prefill(routing: Routing, mask: Mask, setting: Setting, tokens: int = _PROMPT) -> float:
    """Tokens a second of a prompt: products over speed, or weights over bandwidth where those are more."""
    costs, machine = setting.costs, setting.machine
    share = routing.counts.sum(axis=0) / np.maximum(routing.counts.sum(axis=(0, 2)), 1)[:, None]
    chance = 1 - (1 - np.minimum(setting.top_k * share, 1)) ** tokens
    work = 2.0 * setting.params_per_expert * tokens * setting.top_k
    gpu_flops = machine.gpus[0].flops.value if machine.gpus else machine.cpu_flops.value
    cold = (share * ~mask).sum(axis=1)
    cpu = np.maximum(costs.cpu * (chance * ~mask).sum(axis=1), work * cold / machine.cpu_flops.value)
    cpu = np.where(cold > 0, cpu + costs.hop, 0)
    gpu = np.maximum(costs.gpu * (chance * mask).sum(axis=1), work * (1 - cold) / gpu_flops)
    dense = max(rest_of(setting), 2.0 * setting.dense_params * tokens / gpu_flops)
    return float(tokens / (dense + np.maximum(cpu, gpu).sum()))


def _per_gib(chooser: Chooser, mask: Mask, setting: Setting) -> float:
    return _with_more(chooser, mask, setting, max(1, (1 << 30) // setting.gpu_expert), 0.0)


def _per_context(chooser: Chooser, mask: Mask, setting: Setting) -> float:
    """Experts give way to the cache, and the cache is read."""
    extra = 16384 * setting.kv_per_token * setting.batch
    bandwidth = (
        setting.machine.gpus[0].bandwidth.value
        if setting.machine.gpus
        else setting.machine.total_cpu_bandwidth
    )
    return -_with_more(chooser, mask, setting, -(-extra // setting.gpu_expert) * -1, extra / bandwidth)


def _with_more(chooser: Chooser, mask: Mask, setting: Setting, slots: int, seconds: float) -> float:
    target = min(mask.size, max(0, chooser.slots + slots))
    rest = rest_of(setting)
    now = rest + expert_seconds(chooser.routing, mask, setting.costs)
    other = replace(chooser, slots=target).choose()
    then = rest + seconds + expert_seconds(chooser.routing, other.mask, setting.costs)
    return setting.batch / then - setting.batch / now
