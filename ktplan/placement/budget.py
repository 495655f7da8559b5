"""How many experts the GPU takes: a number a layer, a share, or bytes; with every line a person can check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from ktplan.errors import BadUsage, DoesNotFit
from ktplan.model import ModelSpec
from ktplan.quant.gptq_format import GROUP_SIZES, GptqScheme
from ktplan.units import format_bytes

GPU_FORMATS: Final[Mapping[str, int]] = {"bf16": 16, "gptq-w4": 4, "gptq-w8": 8}  # name: bits a weight
DEFAULT_CONTEXT: Final = 8192  # tokens of KV cache that a budget holds unless told otherwise
DEFAULT_MARGIN: Final = 1 << 30  # workspace, CUDA context and graphs: what llama.cpp's --fit leaves a device
ALL: Final = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a model's own files say it needs beside weights; see `ktplan.placement.memory`."""

    kv_bytes: int
    workspace: int
    attention: str
    dense_lines: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The GPU's memory, line by line, in bytes.

    `slots` experts of `expert_bytes` each; beside them the GPU holds the dense weights, the KV cache of `context`
    tokens and a margin. `limit_bytes` is what the user named: for the experts alone ("experts") or for everything
    ("card"); None when experts were counted instead.
    """

    asked: str  # as a person would say it: "8 in each layer", "30 % of all"
    slots: int
    gpu_format: str
    expert_bytes: int
    context: int
    dense_bytes: int
    kv_bytes: int
    margin_bytes: int
    limit_bytes: int | None = None
    limit_of: str | None = None
    batch: int = 1  # sequences at once, each with its own cache
    workspace_bytes: int = 0
    attention: str = ""  # what the cache holds, in words
    dense_lines: tuple[tuple[str, int], ...] = ()  # dense_bytes by kind

    @property
    def experts_bytes(self) -> int:
        """All GPU experts together."""
        return self.slots * self.expert_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything but routed experts."""
        return self.dense_bytes + self.kv_bytes + self.workspace_bytes + self.margin_bytes

    @property
    def total_bytes(self) -> int:
        """What the card needs in the end."""
        return self.fixed_bytes + self.experts_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, with the two sums."""
        return {**asdict(self), "experts_bytes": self.experts_bytes, "total_bytes": self.total_bytes}

    def lines(self) -> list[tuple[str, int, str]]:
        """(what, bytes, remark), in the order a person adds them up."""
        sequences = "one sequence" if self.batch == 1 else f"{self.batch} sequences"
        detail = f"; {self.attention}" if self.attention else ""
        dense = [(f"  {what}", size, "") for what, size in self.dense_lines]
        work = (
            [("workspace", self.workspace_bytes, "activations of a prompt chunk, logits")]
            if self.workspace_bytes
            else []
        )
        return [
            ("dense weights", self.dense_bytes, "attention, router, shared experts, embedding"),
            *dense,
            ("KV cache", self.kv_bytes, f"{self.context:,} tokens of {sequences}{detail}"),
            *work,
            ("margin" if work else "workspace, margin", self.margin_bytes, "--margin"),
            (
                "experts",
                self.experts_bytes,
                f"{self.slots:,} x {format_bytes(self.expert_bytes)} as {self.gpu_format}",
            ),
            ("in all", self.total_bytes, ""),
        ]


def expert_bytes(spec: ModelSpec, gpu_format: str) -> int:
    """Bytes of one routed expert on the GPU, gate, up and down.

    bf16 takes 2 bytes a weight; GPTQ the codes, scales, zeros and group indices of its file format, in the largest
    group size that divides the expert's sides (128 where it can be). Raises BadUsage for an unknown format or sides
    that GPTQ cannot hold.
    """
    bits = GPU_FORMATS.get(gpu_format)
    if bits is None:
        raise BadUsage(f"'{gpu_format}' is no GPU format", hint=f"use one of {', '.join(GPU_FORMATS)}")
    if bits == 16:
        return 2 * spec.params_per_expert
    shapes = [(spec.moe_intermediate, spec.hidden)] * 2 + [(spec.hidden, spec.moe_intermediate)]
    misfit = None
    for group_size in GROUP_SIZES:
        scheme = GptqScheme(bits, group_size)
        misfit = next(filter(None, (scheme.misfit(*shape) for shape in shapes)), None)
        if misfit is None:
            return sum(scheme.bytes(*shape) for shape in shapes)
    raise BadUsage(
        f"experts of {spec.name} ({spec.hidden} x {spec.moe_intermediate}) cannot be {gpu_format}: {misfit}",
        hint="use --gpu-format bf16",
    )


def fit(
    spec: ModelSpec,
    *,
    slots: int | None = None,
    gpu_experts: int | str | None = None,
    ratio: float | None = None,
    gpu_memory: int | None = None,
    card_memory: int | None = None,
    gpu_format: str = "bf16",
    context: int | None = None,
    margin: int = DEFAULT_MARGIN,
    batch: int = 1,
    needs: Needs | None = None,
) -> Budget:
    """The budget for exactly one of the ways to say it; `needs` replaces estimates by what the model's files say.

    `slots` experts in all; `gpu_experts` in each MoE layer (or "all"); `ratio` of all experts, cut to a whole number
    as sglang-kt does (`int(M * E * ratio)`, so `int(100 * 0.29)` is 28); `gpu_memory`, bytes for experts alone;
    `card_memory`, bytes for everything, of which experts get what dense weights, KV cache and margin leave.

    Raises BadUsage for none or several of them or a value out of range (which the message gives), DoesNotFit when
    the card cannot hold even what is not an expert.
    """
    given = {
        "slots": slots,
        "--gpu-experts": gpu_experts,
        "--ratio": ratio,
        "--gpu-memory": gpu_memory,
        "--card-memory": card_memory,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        what = "nothing says how many experts the GPU takes"
        if named:
            what = f"{' and '.join(named)} exclude each other"
        raise BadUsage(what, hint="give one of --gpu-experts, --ratio, --gpu-memory, --card-memory")
    one = expert_bytes(spec, gpu_format)
    tokens = min(spec.context, DEFAULT_CONTEXT) if context is None else context
    if tokens < 0 or margin < 0:
        raise BadUsage(f"context {tokens} and margin {margin} must not be negative", hint="give 0 or more")
    if batch < 1:
        raise BadUsage(f"a batch of {batch} sequences is none", hint="give --batch 1 or more")
    kv_bytes = needs.kv_bytes if needs else spec.kv_bytes_per_token * tokens * batch
    workspace = needs.workspace if needs else 0
    fixed = spec.dense_bytes + kv_bytes + workspace + margin
    limit_of = "experts" if gpu_memory is not None else "card" if card_memory is not None else None
    limit = card_memory if gpu_memory is None else gpu_memory
    if limit is None:
        slots, asked = _counted(spec, slots, gpu_experts, ratio)
    else:
        left = limit if limit_of == "experts" else limit - fixed
        if left < 0:
            raise DoesNotFit(
                f"dense weights ({format_bytes(spec.dense_bytes)}), KV cache of {tokens:,} tokens "
                f"({format_bytes(kv_bytes)}) and margin ({format_bytes(margin + workspace)}) need "
                f"{format_bytes(fixed)}, "
                f"--card-memory gives {format_bytes(limit)}",
                hint=_remedy(fixed - limit, tokens, kv_bytes, margin),
            )
        slots = min(left // one, spec.expert_count)
        asked = f"{format_bytes(limit)} for {'experts' if limit_of == 'experts' else 'everything'}"
    return Budget(
        asked=asked,
        slots=slots,
        gpu_format=gpu_format,
        expert_bytes=one,
        context=tokens,
        dense_bytes=spec.dense_bytes,
        kv_bytes=kv_bytes,
        margin_bytes=margin,
        limit_bytes=limit,
        limit_of=limit_of,
        batch=batch,
        workspace_bytes=workspace,
        attention=needs.attention if needs else "",
        dense_lines=needs.dense_lines if needs else (),
    )


def _remedy(lack: int, tokens: int, kv_bytes: int, margin: int) -> str:
    """Which line to change and by how much, the least painful first."""
    ways = []
    if kv_bytes >= lack and tokens:
        ways.append(f"lower --context to {int(tokens * (kv_bytes - lack) / kv_bytes):,}")
    if margin >= lack:
        ways.append(f"lower --margin to {format_bytes(margin - lack)}")
    more = f"give {format_bytes(lack)} more"
    if not ways:
        still = format_bytes(max(0, lack - kv_bytes - margin))
        return f"{more}; without any context and margin {still} would still lack"
    return f"{more}, or {', or '.join(ways)}"


def _counted(
    spec: ModelSpec, slots: int | None, gpu_experts: int | str | None, ratio: float | None
) -> tuple[int, str]:
    if slots is not None:
        if not 0 <= slots <= spec.expert_count:
            raise BadUsage(
                f"{slots:,} GPU experts are out of range",
                hint=f"{spec.name} has {spec.expert_count:,}: give 0 to that",
            )
        return slots, f"{slots:,} of {spec.expert_count:,}"
    if gpu_experts is not None:
        number = spec.experts if gpu_experts == ALL else gpu_experts
        if not isinstance(number, int) or not 0 <= number <= spec.experts:
            raise BadUsage(
                f"--gpu-experts {gpu_experts} is out of range: {spec.name} has {spec.experts} experts in each layer",
                hint=f"give 0 to {spec.experts}, or all",
            )
        return number * len(spec.moe_layers), f"{number} in each of {len(spec.moe_layers)} layers"
    if ratio is None or not 0 <= ratio <= 1 or math.isnan(ratio):
        raise BadUsage(
            f"--ratio {ratio} is out of range", hint="give a share of all experts, 0 to 1, e.g. 0.3"
        )
    return slots_of(spec, ratio), f"{100 * ratio:g} % of {spec.expert_count:,}"


def slots_of(spec: ModelSpec, ratio: float) -> int:
    """`int(M * E * ratio)`, sglang-kt's cut (kt_ep_wrapper.py): binary fractions bite, 0.29 of 100 is 28."""
    return int(spec.expert_count * ratio)
