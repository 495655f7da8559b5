"""PlacementPlan: the decision, the reasons a person can check, and all that emitting it needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from ktplan.artifact import json_bytes, parsed, read_json, write_whole
from ktplan.errors import BadInput, BadUsage
from ktplan.experts import ExpertSet, format_ranges, parse_ranges
from ktplan.model import ModelSpec
from ktplan.placement.budget import Budget, fit
from ktplan.placement.decide import decide, setting_of
from ktplan.placement.evaluate import Expectation, expect
from ktplan.placement.known import reference
from ktplan.placement.machine import HardwareSpec
from ktplan.placement.predict import Prediction
from ktplan.placement.strategies import DEFAULT_SEED, Cells, choose, compat
from ktplan.profile.profile import ActivationProfile
from ktplan.rules import is_device

KIND: Final = "placement-plan"
VERSION: Final = 1
GPU: Final = "gpu"  # the device of plans made here; the runtime says what it is on its machine
_AGAIN = "make the plan again with 'ktplan place'"
_T = TypeVar("_T")


class PlanShape(NamedTuple):
    """What a plan must know of its model: where its experts sit and how large they are."""

    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    moe_intermediate: int
    experts_module: str  # "model.layers.{layer}.mlp.experts"

    @classmethod
    def of(cls, spec: ModelSpec) -> PlanShape:
        """What a plan keeps of the model it was made for."""
        return cls(*(getattr(spec, name) for name in cls._fields))

    def experts_module_name(self, layer: int) -> str:
        """Dotted name of the module with a layer's routed experts."""
        return self.experts_module.format(layer=layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Which experts live on which GPU; all others stay on the CPU."""

    model: str
    family: str
    fingerprint: str
    shape: PlanShape
    strategy: str
    seed: int
    budget: Budget
    devices: Mapping[str, ExpertSet]  # disjoint; plans made here have the one device "gpu"
    expectation: Expectation | None = None  # None: no profile
    inputs: Mapping[str, str] = field(default_factory=dict)  # name to digest of what the plan was made from
    prediction: Prediction | None = None  # None: no profile

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise BadInput(f"the plan contradicts itself: {fault}", hint=_AGAIN)

    def _fault(self) -> str | None:
        shape = self.shape
        if list(shape.moe_layers) != sorted(set(shape.moe_layers)) or not shape.moe_layers:
            return f"MoE layers {list(shape.moe_layers)} do not ascend"
        first, last = shape.moe_layers[0], shape.moe_layers[-1]
        if not 0 <= first <= last < shape.layers or not 1 <= shape.top_k <= shape.experts:
            return f"layers {first} to {last} of {shape.layers}, top-{shape.top_k} of {shape.experts}"
        try:
            told_apart = len({shape.experts_module_name(layer) for layer in (0, 1)}) == 2
        except (KeyError, IndexError, ValueError):
            told_apart = False
        if not told_apart:
            return f"'{shape.experts_module}' does not name the experts of a layer"
        known = set(shape.moe_layers)
        for device, experts in self.devices.items():
            if not is_device(device) or device == "cpu":
                return f"'{device}' is no GPU"
            for layer, expert in experts:
                if layer not in known or expert >= shape.experts:
                    return f"expert {expert} of layer {layer} does not exist"
        if len(self.gpu) != sum(map(len, self.devices.values())):
            return "an expert lives on two devices"
        if len(self.gpu) != self.budget.slots:
            return f"{len(self.gpu)} experts for {self.budget.slots} slots"
        return None

    @property
    def gpu(self) -> ExpertSet:
        """All experts that live on a GPU."""
        return ExpertSet(expert for experts in self.devices.values() for expert in experts)

    @property
    def hit_rate(self) -> float | None:
        """What to expect on other text: the held-out rate, else the in-sample one; None without a profile."""
        if self.expectation is None:
            return None
        held_out = self.expectation.held_out
        return self.expectation.in_sample if held_out is None else held_out

    def for_model(self, spec: ModelSpec) -> PlacementPlan:
        """This plan, when it was made for the model of `spec`; raises BadInput showing both otherwise."""
        if self.fingerprint == spec.fingerprint:
            return self
        raise BadInput(
            f"the plan was made for another model: {self.model} ({self.family}, {len(self.per_layer())} MoE layers "
            f"x {self.shape.experts} experts, {self.fingerprint}), this one is {spec.name} ({spec.family}, "
            f"{len(spec.moe_layers)} MoE layers x {spec.experts} experts, {spec.fingerprint})",
            hint="make a plan for this model with 'ktplan place'",
        )

    def per_layer(self) -> tuple[int, ...]:
        """GPU experts in each MoE layer, in layer order."""
        gpu = self.gpu
        return tuple(len(gpu.layer(layer)) for layer in self.shape.moe_layers)

    def to_dict(self) -> dict[str, Any]:
        """The file's body."""
        shape = {**self.shape._asdict(), "moe_layers": format_ranges(self.shape.moe_layers)}
        return {
            "model": self.model,
            "family": self.family,
            "fingerprint": self.fingerprint,
            "shape": shape,
            "strategy": self.strategy,
            "seed": self.seed,
            "budget": self.budget.to_dict(),
            "gpu": {device: experts.to_ranges() for device, experts in self.devices.items()},
            "expectation": self.expectation.to_dict() if self.expectation else None,
            "inputs": dict(self.inputs),
            "prediction": self.prediction.to_dict() if self.prediction else None,
        }

    def save(self, path: Path) -> None:
        """Write plan.json, whole or not at all. The same inputs give the same bytes."""
        write_whole(path, json_bytes(KIND, VERSION, self.to_dict()))

    @classmethod
    def load(cls, path: Path) -> PlacementPlan:
        """Read and check a plan. Raises BadInput for a missing, damaged, foreign or newer file."""
        return parsed(path, _parse, read_json(path, KIND, VERSION), _AGAIN)


def make_plan(
    spec: ModelSpec,
    profile: ActivationProfile | None = None,
    *,
    strategy: str = "frequency",
    slots: int | None = None,
    budget: Budget | None = None,
    seed: int = DEFAULT_SEED,
    machine: HardwareSpec | None = None,
    cpu_expert: int | None = None,
    kt_compat: bool = False,
) -> PlacementPlan:
    """Choose `slots` experts (or as many as `budget` has) for the GPU.

    Without a profile `frequency`, `optimal` and `robust` do not work, and the plan promises nothing. With one it
    carries hit rates and predicted speeds for `machine` (a published reference machine by default); generated
    tokens decide where the profile has some. `optimal` keeps `frequency`'s experts where those are faster on
    left-out documents. `cpu_expert` is the bytes of an expert in CPU memory (what convert-cpu writes by default).
    `kt_compat` repeats sglang-kt's quirks: layers that it takes for MoE, dense rows that win ties.

    Raises BadUsage for an unknown strategy, slots out of range or missing counts, BadInput for the profile of another
    model.
    """
    if (slots is None) == (budget is None):
        raise BadUsage(
            "give either slots or a budget", hint="slots is a number of experts, a budget knows bytes"
        )
    budget = budget or fit(spec, slots=slots)
    machine = machine or reference()
    inputs = {"profile": profile.digest()} if profile else {}
    prediction = expectation = None
    if profile is None or kt_compat:
        counts = profile.for_model(spec).total() if profile else None
        cells = Cells(spec.moe_layers, spec.experts)
        chosen = compat(spec, strategy, budget.slots, counts, seed) if kt_compat else None
        gpu = chosen if chosen is not None else choose(strategy, cells, budget.slots, counts, seed)
        expectation = expect(profile, gpu, strategy=strategy, seed=seed) if profile else None
    else:
        planned = profile.for_model(spec).planning()
        setting = setting_of(spec, budget, machine, cpu_expert)
        gpu, judged, prediction = decide(planned, strategy, budget.slots, setting, seed)
        expectation = expect(planned, gpu, strategy=strategy, seed=seed, judged=judged)
    return PlacementPlan(
        model=spec.name,
        family=spec.family,
        fingerprint=spec.fingerprint,
        shape=PlanShape.of(spec),
        strategy=strategy,
        seed=seed,
        budget=replace(budget, slots=len(gpu)) if len(gpu) != budget.slots else budget,
        devices={GPU: gpu},
        expectation=expectation,
        inputs=inputs,
        prediction=prediction,
    )


def _parse(body: Mapping[str, Any]) -> PlacementPlan:
    shape, budget, expectation = body["shape"], body["budget"], body["expectation"]
    return PlacementPlan(
        model=_typed(body["model"], str),
        family=_typed(body["family"], str),
        fingerprint=_typed(body["fingerprint"], str),
        shape=PlanShape(
            **{
                name: _typed(shape[name], int)
                for name in PlanShape._fields
                if name not in ("moe_layers", "experts_module")
            },
            moe_layers=parse_ranges(_below(shape["moe_layers"], _typed(shape["layers"], int))),
            experts_module=_typed(shape["experts_module"], str),
        ),
        strategy=_typed(body["strategy"], str),
        seed=_typed(body["seed"], int),
        budget=_budget(budget),
        devices={
            _typed(device, str): ExpertSet.from_ranges(
                {layer: _below(text, shape["experts"]) for layer, text in ranges.items()}
            )
            for device, ranges in sorted(body["gpu"].items())
        },
        expectation=None
        if expectation is None
        else Expectation(**{part.name: _number(expectation[part.name]) for part in fields(Expectation)}),
        inputs={_typed(name, str): _typed(digest, str) for name, digest in body["inputs"].items()},
        prediction=None if body.get("prediction") is None else Prediction.from_dict(body["prediction"]),
    )


def _budget(body: Mapping[str, Any]) -> Budget:
    values = {line.name: body[line.name] for line in fields(Budget) if line.name in body}
    for name, value in values.items():
        if value is None and name in ("limit_bytes", "limit_of"):
            continue
        if name in ("asked", "gpu_format", "limit_of", "attention"):
            _typed(value, str)
        elif name == "dense_lines":
            values[name] = tuple((_typed(what, str), _typed(size, int)) for what, size in value)
        elif _typed(value, int) < 0:
            raise BadInput(f"{name} of the budget is {value}", hint=_AGAIN)
    return Budget(**values)


def _below(ranges: Any, limit: int) -> str:
    """The range text, when no number in it reaches `limit`: a damaged "0-99999999999" is never spelt out."""
    if any(int(number) >= limit for number in re.findall(r"\d{1,12}", _typed(ranges, str))):
        raise BadInput(f"'{ranges}' goes beyond {limit - 1}", hint=_AGAIN)
    return str(ranges)


def _typed(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadInput(f"{value!r} stands where a {kind.__name__} is expected", hint=_AGAIN)
    return value


def _number(value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise BadInput(f"{value!r} stands where a number is expected", hint=_AGAIN)
    return value
