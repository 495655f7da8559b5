"""From a model folder, an expert store and rules to a network that is ready to run.

`prepare` decides everything on the skeleton and reads no weights: it is the dry run. `build` then loads
what was decided: GPU experts from the checkpoint or from GPTQ weights, CPU experts mapped from the store
(or, without a store, unquantized from the checkpoint and computed by torch), everything else from the
checkpoint.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ktplan import network
from ktplan.errors import BadInput, DoesNotFit
from ktplan.experts import format_ranges
from ktplan.model import ExpertWeights, WeightSource, open_safetensors
from ktplan.progress import SILENT, Progress, Task
from ktplan.rules import HYBRID, Match, Replace, Rule, Rules
from ktplan.runtime.device_experts import DeviceExperts
from ktplan.runtime.devices import best_device, connect, resolve
from ktplan.runtime.inject import ExpertBytes, LayerExperts, Placement, own_bytes, place
from ktplan.runtime.moe import CpuPart, HybridExperts, RouteCounters
from ktplan.store import ExpertStore
from ktplan.units import format_bytes

if TYPE_CHECKING:
    from ktplan.convert.gptq_checkpoint import GptqCheckpoint
    from ktplan.kernels import Pool
    from ktplan.placement import PlacementPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where weights come from; all checked to belong to one model."""

    model: Path
    store: ExpertStore | None = None
    gpu_weights: GptqCheckpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything decided, nothing loaded."""

    sources: Sources
    skeleton: Any
    placement: Placement
    dtype: torch.dtype
    why_dtype: str
    devices: Mapping[str, torch.device]  # canonical name to torch's
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network ready to run, and what it took to get there."""

    model: Any
    source: WeightSource
    experts: Mapping[int, HybridExperts]  # by layer
    placement: Placement
    counters: RouteCounters
    dtype: torch.dtype
    bytes: Mapping[str, int]  # by device name; mapped store pages count as "store (mapped)"
    seconds: float
    notes: tuple[str, ...]


def open_sources(model: Path, store: Path | None = None, gpu_weights: Path | None = None) -> Sources:
    """Open what the command line names. Raises BadInput when store or GPU weights belong to another model."""
    if store is None and gpu_weights is None:
        return Sources(model=model)
    spec = open_safetensors(model).spec
    opened = ExpertStore.open(store) if store else None
    if opened:
        opened.check_model(spec)
    if gpu_weights is None:
        return Sources(model=model, store=opened)
    from ktplan.convert.gptq_checkpoint import GptqCheckpoint

    quantized = GptqCheckpoint.open(gpu_weights)
    quantized.check_model(spec)
    return Sources(model=model, store=opened, gpu_weights=quantized)


def rules_of_plan(plan: PlacementPlan, model: Path) -> Rules:
    """A placement plan as rules. Raises BadInput when it was made for another model."""
    from ktplan.placement.emit import to_rules

    spec = open_safetensors(model).spec
    return replace(to_rules(plan.for_model(spec), spec, dialect="ktplan"), origin="rules of the plan")


def prepare(
    sources: Sources,
    *,
    rules: Rules | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> Prepared:
    """Build the skeleton and decide where everything goes.

    `dtype` "auto" is bfloat16 on a GPU and float32 on the CPU; `device` is where modules go that no rule
    takes. Raises BadInput for rules that do not fit the model, MachineLacks for a GPU that is not there,
    DoesNotFit when the weights of a GPU exceed `gpu_memory` bytes or what it has free.
    """
    chosen = best_device() if device == "auto" else device
    wanted, why = _dtype(dtype, chosen)
    skeleton = network.skeleton(sources.model, wanted)
    weights, said = sources.gpu_weights, []
    if weights is not None and rules is None:
        rules = _rules_of_weights(skeleton, weights)
        said.append(
            f"no plan and no rules: the {len(weights.experts):,} experts of {weights.root} go to the GPU"
        )
    placement = place(
        skeleton,
        rules,
        device=chosen,
        experts_on_gpu=sources.store is None,
        expert_bytes=expert_bytes(skeleton, sources.store),
    )
    if weights is not None:
        _check_weights(weights, placement)
    devices, notes = resolve(placement.devices)
    return Prepared(
        sources=sources,
        skeleton=skeleton,
        placement=placement,
        dtype=wanted,
        why_dtype=why,
        devices={"cpu": torch.device("cpu"), **devices},
        notes=(*said, *placement.notes, *notes),
    )


def _rules_of_weights(skeleton: Any, weights: GptqCheckpoint) -> Rules:
    """Every expert that the GPU weights hold on the GPU, the others on the CPU."""
    held = {
        name: weights.experts.layer(layer) for layer, (name, _) in network.experts_modules(skeleton).items()
    }
    rules = [
        Rule(
            match=Match(name=f"^{re.escape(name)}$"),
            replace=Replace(
                class_name=HYBRID, kwargs={"gpu_device": "gpu", "gpu_experts": format_ranges(ids)}
            ),
            recursive=False,
        )
        for name, ids in held.items()
    ]
    return Rules(tuple(rules), origin=f"the experts of {weights.root}")


def _check_weights(weights: GptqCheckpoint, placement: Placement) -> None:
    """Raise BadInput where an expert is placed on the GPU that the GPU weights do not hold."""
    lacking = placement.gpu_experts - weights.experts
    if lacking:
        first = next(iter(lacking))
        raise BadInput(
            f"{weights.root} lacks {len(lacking):,} of {len(placement.gpu_experts):,} experts that are placed on the "
            f"GPU, the first is expert {first.expert} of layer {first.layer}",
            hint="quantize the experts of this plan: ktplan convert-gpu with the same --plan",
        )


def check_memory(prepared: Prepared, gpu_memory: int | None) -> Prepared:
    """Raise DoesNotFit where the weights of one GPU exceed `gpu_memory` bytes, or what it has free."""
    for name, needed in prepared.placement.bytes.items():
        device = prepared.devices[name]
        limit, what = gpu_memory, "the budget of --gpu-memory is"
        if limit is None and device.type == "cuda":
            limit, what = torch.cuda.mem_get_info(device)[0], "free memory is"
        if name != "cpu" and limit is not None and needed > limit:
            raise DoesNotFit(
                f"the rules put {format_bytes(needed)} of weights on {name}, {what} {format_bytes(limit)}",
                hint="see with --dry-run which rule takes how much, or plan with ktplan place --gpu-memory",
            )
    return prepared


def build(
    prepared: Prepared,
    *,
    threads: int | None = None,
    activation_bits: int = 16,
    progress: Progress = SILENT,
) -> Network:
    """Load what `prepare` decided; the skeleton becomes the network.

    `threads`, of the CPU engine and of torch, default to what the machine has and the model can use;
    `activation_bits` is what the engine quantizes activations to, 16 or 8. Raises BadInput for an incomplete
    checkpoint or GPU weights that lack an expert.
    """
    started = time.monotonic()
    source = open_safetensors(prepared.sources.model)
    source.spec.check_experts()
    model = prepared.skeleton
    experts = build_experts(
        prepared, source, threads=threads, activation_bits=activation_bits, progress=progress
    )
    mount(model, experts)
    dense = network.load_dense(
        model,
        source,
        device_of=lambda name: prepared.devices[prepared.placement.device_of(name)],
        dtype=prepared.dtype,
        progress=progress,
    )
    connect(model, skip=experts.values())
    network.fit_torch_threads(model, threads)
    unused = (f"not used from the checkpoint: {', '.join(dense.unused[:5])}",) if dense.unused else ()
    return Network(
        model=model.eval(),
        source=source,
        experts=experts,
        placement=prepared.placement,
        counters=next(iter(experts.values())).counters,
        dtype=prepared.dtype,
        bytes=_held(model, experts),
        seconds=time.monotonic() - started,
        notes=(*prepared.notes, *unused),
    )


def build_experts(
    prepared: Prepared,
    source: WeightSource,
    *,
    threads: int | None = None,
    activation_bits: int = 16,
    progress: Progress = SILENT,
) -> dict[int, HybridExperts]:
    """The experts of every layer as `prepare` placed them, with one set of counters; see `build`."""
    builder = _Builder(prepared, source, RouteCounters(), threads, activation_bits)
    mapped = prepared.sources.store is not None
    count = sum(len(found.gpu) if mapped else found.experts for found in prepared.placement.experts)
    with progress.task("loading experts", count or None, "experts") as task:
        return {found.layer: builder.layer(found, task) for found in prepared.placement.experts}


def mount(model: nn.Module, experts: Mapping[int, HybridExperts]) -> None:
    """Put experts into their places in a network, instead of those that were there."""
    for module in experts.values():
        parent, _, leaf = module.place.name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)


class _Builder:
    """Makes the experts of a layer, both sides."""

    def __init__(
        self,
        prepared: Prepared,
        source: WeightSource,
        counters: RouteCounters,
        threads: int | None,
        activation_bits: int,
    ) -> None:
        self._prepared, self._source, self._counters = prepared, source, counters
        self._threads, self._activation_bits = threads, activation_bits
        self._pool: Pool | None = None

    def layer(self, found: LayerExperts, task: Task) -> HybridExperts:
        gpu = None
        if found.gpu:
            device = self._prepared.devices[found.gpu_device]
            gpu = self._by_torch(found, found.gpu, self._gpu_reader(found.layer), device, task)
        cpu = self._cpu(found, task) if found.cpu else None
        return HybridExperts(found, gpu_side=gpu, cpu_side=cpu, counters=self._counters)

    def _cpu(self, found: LayerExperts, task: Task) -> CpuPart:
        store = self._prepared.sources.store
        if store is None:
            reader = self._checkpoint_reader(found.layer)
            return self._by_torch(found, found.cpu, reader, torch.device("cpu"), task)
        # Imported here: a model without a store runs where the native engine is not built.
        from ktplan.kernels import Pool
        from ktplan.runtime.cpu_experts import CpuExperts

        if self._pool is None:
            self._pool = Pool(self._threads) if self._threads else Pool.default()
        return CpuExperts(
            store,
            found.layer,
            ids=found.cpu,
            pool=self._pool,
            activation_bits=self._activation_bits,
            source=self._source,
        )

    def _by_torch(
        self,
        found: LayerExperts,
        ids: tuple[int, ...],
        read: Callable[[int], ExpertWeights],
        device: torch.device,
        task: Task,
    ) -> DeviceExperts:
        return DeviceExperts.load(
            read,
            ids=ids,
            experts=found.experts,
            dtype=self._prepared.dtype,
            device=device,
            gate=network.gate_of(self._source.spec),
            each=task.advance,
        )

    def _checkpoint_reader(self, layer: int) -> Callable[[int], ExpertWeights]:
        def read(expert: int) -> ExpertWeights:
            weights = self._source.expert(layer, expert)
            for projection, name in self._source.expert_names(layer, expert).items():
                matrix = network.tensor_of(getattr(weights, projection))
                network.refuse_not_finite(matrix, f"{name} (expert {expert})", self._source.file_of(name))
            return weights

        return read

    def _gpu_reader(self, layer: int) -> Callable[[int], ExpertWeights]:
        quantized = self._prepared.sources.gpu_weights
        if quantized is None:
            return self._checkpoint_reader(layer)

        return lambda expert: quantized.expert(layer, expert)


def _dtype(dtype: str, device: str) -> tuple[torch.dtype, str]:
    if dtype != "auto":
        return network.as_dtype(dtype), "as asked"
    if device != "cpu" and torch.cuda.is_available():
        return torch.bfloat16, "bfloat16 on the GPU"
    return torch.float32, "float32 on the CPU: bfloat16 is slower there and less exact"


def expert_bytes(skeleton: Any, store: ExpertStore | None) -> ExpertBytes | None:
    """An expert's size on either side: the skeleton's type on the GPU, the store's own on the CPU; None without one."""
    if store is None:
        return None
    _, module = next(iter(network.experts_modules(skeleton).values()))
    return ExpertBytes(gpu=own_bytes(module).gpu, cpu=store.manifest.bytes_per_expert)


def _held(model: Any, experts: Mapping[int, HybridExperts]) -> dict[str, int]:
    held: dict[str, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        held[str(tensor.device)] = held.get(str(tensor.device), 0) + tensor.nbytes
    for module in experts.values():
        if module.gpu_side is not None:
            name = str(module.gpu_side.device)
            held[name] = held.get(name, 0) + module.gpu_side.bytes
        if module.cpu_side is not None:
            name = "cpu" if isinstance(module.cpu_side, DeviceExperts) else "store (mapped)"
            held[name] = held.get(name, 0) + module.cpu_side.bytes
    return dict(sorted(held.items()))
