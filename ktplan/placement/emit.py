"""What a plan becomes: injection rules for ktplan or KTransformers, or a counts file that makes sglang-kt take it.

    ktplan      one rule for each run of layers with the same GPU experts, per-expert lists in kwargs
    kt-yaml     the same in KTransformers' own classes; it places whole layers and ignores the per-expert list
    sglang-kt   `logical_count` [1, L, E] in which the plan's experts outrank all others, and flags; its own
                `frequency` strategy then returns exactly this plan, whatever made it

A plan carries all that is needed; a model is only ever checked against it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadUsage, KtplanError
from ktplan.experts import format_ranges
from ktplan.model import ModelSpec
from ktplan.placement.plan import GPU, PlacementPlan
from ktplan.rules import DEFAULT, HYBRID, KT_EXPERTS, Match, Replace, Rule, Rules

DIALECTS: Final = ("ktplan", "kt-yaml")
SGLANG: Final = "sglang-kt"

# KTransformers vendors older modelling files; where the module had another name there, rules accept both.
_KT_EXPERTS_PARENT: Final[Mapping[str, str]] = {"mixtral": "block_sparse_moe"}
_FIRST_CUDA: Final = "cuda:0"


def to_rules(plan: PlacementPlan, spec: ModelSpec | None = None, dialect: str = "ktplan") -> Rules:
    """The plan as rules; each experts module is matched by exactly one of them before the final default rule.

    Raises BadInput when `spec` is another model's, BadUsage for an unknown dialect or a layer whose experts live on
    two GPUs, which the grammar cannot say.
    """
    if spec is not None:
        plan.for_model(spec)
    if dialect not in DIALECTS:
        raise BadUsage(f"there are no rules for '{dialect}'", hint=f"use one of {', '.join(DIALECTS)}")
    pattern = _pattern_of(plan, dialect)
    kwargs_of = _ktplan_kwargs if dialect == "ktplan" else _kt_kwargs
    per_layer = [(layer, kwargs_of(plan, layer)) for layer in plan.shape.moe_layers]
    rules = [
        Rule(
            match=Match(name=pattern([layer for layer, _ in run])),
            replace=Replace(class_name=HYBRID if dialect == "ktplan" else KT_EXPERTS, kwargs=kwargs),
            recursive=False,
        )
        for kwargs, run in _runs(per_layer)
    ]
    first = min(plan.devices, default=GPU)
    everything = {"generate_device": first}
    if dialect == "kt-yaml":
        everything = dict.fromkeys(("generate_device", "prefill_device"), _cuda(first))
    rules.append(Rule(match=Match(name="^.*$"), replace=Replace(class_name=DEFAULT, kwargs=everything)))
    made = Rules(tuple(rules))
    _check(made, plan)
    return made


def heading(plan: PlacementPlan, dialect: str) -> str:
    """Comment lines for the head of a rule file: what it is, and what a reader that knows less makes of it."""
    lines = [
        f"{plan.model}: {len(plan.gpu):,} of {len(plan.shape.moe_layers) * plan.shape.experts:,} experts on the GPU "
        f"({plan.strategy}); rules are tried from the top, the first match wins."
    ]
    if dialect == "kt-yaml":
        lost = len(plan.gpu) - plan.shape.experts * len(whole_layers(plan))
        lines += [
            "KTransformers places whole layers. Unmodified, it ignores 'gpu_experts' and keeps on the CPU each layer "
            f"that is not wholly on the GPU: {lost:,} of the planned experts.",
            "For KTransformers put the expert rules before those of the model's own rule file (attention, MoE block, "
            "linear layers) and the last rule after them.",
        ]
    return "\n".join(lines)


def whole_layers(plan: PlacementPlan) -> tuple[int, ...]:
    """MoE layers all of whose experts are on the GPU."""
    gpu = plan.gpu
    return tuple(layer for layer in plan.shape.moe_layers if len(gpu.layer(layer)) == plan.shape.experts)


class Sglang(NamedTuple):
    """What sglang-kt needs. `counts` int32 [1, layers, experts]; `flags` as words of a command line."""

    counts: npt.NDArray[np.int32]
    flags: list[str]
    notes: list[str]


def to_sglang(plan: PlacementPlan, spec: ModelSpec | None = None, counts_file: str = "counts.pt") -> Sglang:
    """The plan for unmodified sglang-kt: counts to be saved by torch as {"logical_count": counts}, and flags.

    Its `frequency` takes the top int(M * E * ratio) cells of the summed counts. The plan's experts get 2, other routed
    experts 1 and dense layers 0, so the top has no tie at its border; the ratio aims half an expert above the number
    because int() cuts. Raises BadInput when `spec` is another model's.
    """
    if spec is not None:
        plan.for_model(spec)
    shape = plan.shape
    counts = np.zeros((1, shape.layers, shape.experts), dtype=np.int32)
    counts[0, list(shape.moe_layers)] = 1
    for layer, expert in plan.gpu:
        counts[0, layer, expert] = 2
    seen = _moe_layers_sglang_sees(plan)
    notes = []
    if seen != len(shape.moe_layers):
        notes.append(
            f"sglang-kt takes all {seen} layers of this family for MoE; the ratio is made for its count, not for the "
            f"{len(shape.moe_layers)} layers that have experts"
        )
    if not len(plan.gpu):
        notes.append("no expert is on the GPU: some releases of sglang-kt do not start like that")
    flags = [
        "--kt-expert-placement-strategy", "frequency",
        "--init-expert-location", counts_file,
        "--kt-gpu-experts-ratio", ratio_text(len(plan.gpu), seen * shape.experts),
    ]  # fmt: skip
    return Sglang(counts, flags, notes)


def ratio_text(slots: int, cells: int) -> str:
    """The shortest decimal r for which `int(cells * r) == slots`, kept a quarter of an expert from either border."""
    if slots == cells:
        return "1.0"
    for digits in range(1, 18):
        text = f"{(slots + 0.5) / cells:.{digits}f}"
        if slots + 0.25 <= cells * float(text) <= slots + 0.75 and int(cells * float(text)) == slots:
            return text
    raise KtplanError(f"no ratio makes sglang-kt take {slots:,} of {cells:,} experts")


def launch_line(plan: PlacementPlan, flags: list[str]) -> str:
    """A whole command for sglang-kt; words in capitals are for the user to fill in."""
    words = [
        "python -m sglang.launch_server --model MODEL --kt-weight-path STORE --kt-method METHOD",
        "--kt-cpuinfer CORES --kt-threadpool-count NUMA_NODES --disable-shared-experts-fusion",
        shlex.join(flags),
    ]
    return " \\\n  ".join(words) + "\n"


def _moe_layers_sglang_sees(plan: PlacementPlan) -> int:
    """How many layers its budget is for: it reads DeepSeek's keys and knows neither decoder_sparse_step nor
    mlp_only_layers (kt_ep_wrapper.py), so other families are MoE throughout to it."""
    deepseek = plan.family.startswith("deepseek")
    return len(plan.shape.moe_layers) if deepseek else plan.shape.layers


def _runs(
    per_layer: list[tuple[int, dict[str, Any]]],
) -> Iterator[tuple[dict[str, Any], list[tuple[int, Any]]]]:
    """Neighbouring MoE layers with equal kwargs, together."""
    for _, run in groupby(per_layer, key=lambda entry: sorted(entry[1].items())):
        layers = list(run)
        yield layers[0][1], layers


def _pattern_of(plan: PlacementPlan, dialect: str) -> Any:
    """From layers to an anchored, escaped regex of their experts modules; layer numbers are spelt out, since
    alternations over digits lose layers where the number of digits changes."""
    before, _, after = plan.shape.experts_module.partition("{layer}")
    tail = re.escape(after)
    older = _KT_EXPERTS_PARENT.get(plan.family) if dialect == "kt-yaml" else None
    if older:
        own = after.split(".")[-2]
        tail = re.escape(after).replace(re.escape(f".{own}."), rf"\.(?:{own}|{older})\.")

    def pattern(layers: list[int]) -> str:
        numbers = "|".join(map(str, layers))
        return f"^{re.escape(before)}{numbers if len(layers) == 1 else f'(?:{numbers})'}{tail}$"

    return pattern


def _device_of(plan: PlacementPlan, layer: int) -> str | None:
    """The GPU that holds experts of a layer; None where there is none."""
    devices = [device for device, experts in plan.devices.items() if experts.layer(layer)]
    if len(devices) > 1:
        raise BadUsage(
            f"the experts of layer {layer} live on {' and '.join(devices)}: a rule names one GPU a layer",
            hint="keep the GPU experts of a layer on one device",
        )
    return devices[0] if devices else None


def _ktplan_kwargs(plan: PlacementPlan, layer: int) -> dict[str, Any]:
    device = _device_of(plan, layer) or min(plan.devices, default=GPU)
    return {"gpu_device": device, "gpu_experts": format_ranges(plan.gpu.layer(layer))}


def _kt_kwargs(plan: PlacementPlan, layer: int) -> dict[str, Any]:
    device = _cuda(_device_of(plan, layer) or min(plan.devices, default=GPU))
    on_gpu = plan.gpu.layer(layer)
    whole = len(on_gpu) == plan.shape.experts
    kwargs = {
        "prefill_device": device,
        "prefill_op": "KExpertsTorch",
        "generate_device": device if whole else "cpu",
        "generate_op": "KExpertsMarlin" if whole else "KExpertsCPU",
        "out_device": device,
    }
    if on_gpu and not whole:
        kwargs["gpu_experts"] = format_ranges(on_gpu)
    return kwargs


def _cuda(device: str) -> str:
    return _FIRST_CUDA if device == GPU else device


def _check(rules: Rules, plan: PlacementPlan) -> None:
    """Replay the match of every experts module, as the injector does, before anything is written."""
    for layer in plan.shape.moe_layers:
        name = plan.shape.experts_module_name(layer)
        matching = [rule for rule in rules.rules[:-1] if rule.match.name and re.search(rule.match.name, name)]
        if len(matching) != 1:
            raise KtplanError(f"{name} is matched by {len(matching)} of the rules made for this plan")
