"""`ktplan inspect`: what a thing is and how big its parts are, from headers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktplan.cli.options import model_argument, output_options
from ktplan.cli.output import Output
from ktplan.errors import BadInput, BadUsage
from ktplan.units import format_bytes, format_count, format_percent

if TYPE_CHECKING:
    from ktplan.model import ModelSpec

_KV_TOKENS = 8192
_STORE_FACTS = (
    "model", "family", "fingerprint", "scheme", "bits", "rounding", "layout", "parts", "experts", "hidden",
    "intermediate", "activation",
)  # fmt: skip


@click.command("inspect")
@model_argument
@output_options
def inspect_command(model: Path, out: Output) -> None:
    """Say what a model, expert store or file of the suite is, and how big its parts are.

    Reads headers and manifests, never the weights themselves.

    \b
    Examples:
      ktplan inspect tiny
      ktplan inspect ./Qwen3-30B-A3B --json
      ktplan inspect ./store
      ktplan inspect plan.json
    """
    kind, body, render = describe(model, out)
    out.report(kind, body, render)


def describe(path: Path, out: Output) -> tuple[str, dict[str, Any], Callable[[], None]]:
    """Kind, JSON body and human rendering of whatever lies at `path`. Raises BadInput for what is none of ours."""
    if path.is_dir():
        if any((path / name).exists() for name in ("store.json", "job.json")):  # finished or stopped
            return _store(path, out)
        if (path / "gpu-experts.json").exists() or _quant_method(path) == "gptq":
            return _gptq(path, out)
        return _model(path, out)
    if path.suffix == ".safetensors":
        from ktplan.model.header import read_header

        header = read_header(path)
        if "ktplan" in header.metadata:
            return _profile(path, out)
        if (path.parent / "config.json").is_file():
            return _model(path, out)
        return _tensors(path, out)
    if path.suffix == ".json":
        return _json_artefact(path, out)
    raise BadInput(
        f"{path} is nothing that ktplan knows",
        hint="give a model folder, an expert store, a .safetensors file, a profile or a plan",
    )


def _quant_method(folder: Path) -> str | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(config["quantization_config"]["quant_method"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # whatever is wrong with that file, reading it as a model will say so


def expert_formats(spec: ModelSpec) -> dict[str, int]:
    """Bytes that one routed expert takes in each format the suite writes; formats that do not fit are left out."""
    from ktplan.placement.budget import GPU_FORMATS, expert_bytes
    from ktplan.quant.scheme import scheme_name
    from ktplan.store.manifest import expert_bytes_as

    sizes: dict[str, int] = {"bf16": expert_bytes(spec, "bf16")}
    for bits, group in ((8, None), (4, 32), (4, None)):
        if (size := expert_bytes_as(spec, bits, group)) is not None:
            sizes[scheme_name(bits, group)] = size
    for name in GPU_FORMATS:
        if name not in sizes:
            with suppress(BadUsage):
                sizes[name] = expert_bytes(spec, name)
    return sizes


def _model(path: Path, out: Output) -> tuple[str, dict[str, Any], Callable[[], None]]:
    from ktplan.model import read_spec

    spec = read_spec(path)
    formats = expert_formats(spec)
    body = {
        **spec.to_dict(),
        "expert_count": spec.expert_count,
        "params_per_expert": spec.params_per_expert,
        "bytes_per_expert": formats,
        "experts_bytes": {name: size * spec.expert_count for name, size in formats.items()},
    }

    def render() -> None:
        dense_layers = spec.layers - len(spec.moe_layers)
        which = "all MoE" if not dense_layers else f"{len(spec.moe_layers)} MoE, {dense_layers} dense"
        shared = f", {spec.shared_experts} shared" if spec.shared_experts else ""
        out.line(
            f"{spec.name}   {spec.model_type}   {spec.layers} layers, {which}   "
            f"{spec.experts} experts{shared}, {spec.top_k} active   {spec.dtype}"
        )
        rows: list[list[str]] = [
            [
                "dense part",
                format_count(spec.dense_params),
                format_bytes(spec.dense_bytes),
                *[""] * len(formats),
            ]
        ]
        for label, count in ((f"experts ({spec.expert_count:,})", spec.expert_count), ("one expert", 1)):
            stored = spec.expert_bytes // spec.expert_count * count
            cells = [format_bytes(size * count) for size in formats.values()]
            rows.append([label, format_count(spec.params_per_expert * count), format_bytes(stored), *cells])
        out.table(["", "params", "as stored", *formats], rows, right=range(1, 3 + len(formats)))
        tokens = min(_KV_TOKENS, spec.context)
        out.line(
            f"KV cache {format_bytes(spec.kv_bytes_per_token)} a token, "
            f"{format_bytes(spec.kv_bytes_per_token * tokens)} for {tokens:,} tokens (16 bit); context {spec.context:,}"
        )
        out.line(f"fingerprint {spec.fingerprint}")

    return "model", body, render


def _store(path: Path, out: Output) -> tuple[str, dict[str, Any], Callable[[], None]]:
    from ktplan.store import ExpertStore

    manifest = ExpertStore.open(path).manifest
    worst = manifest.worst(3)
    body = {
        **{name: getattr(manifest, name) for name in _STORE_FACTS},
        "layers": list(manifest.layers),
        "bytes": manifest.total_bytes,
        "bytes_per_expert": manifest.bytes_per_expert,
        "mean_error": manifest.mean_error,
        "worst_errors": [found._asdict() for found in worst],
    }

    def render() -> None:
        padding = f" ({manifest.padding} of them padding)" if manifest.padding else ""
        parts = f"{manifest.parts} NUMA part{'s' * (manifest.parts != 1)}"
        out.line(
            f"expert store of {manifest.model}   {manifest.scheme}   layout {manifest.layout}   "
            f"rounding {manifest.rounding}   {parts}"
        )
        out.line(
            f"{len(manifest.layers)} layers of {manifest.experts} experts, hidden {manifest.hidden}, "
            f"intermediate {manifest.intermediate}{padding}   {format_bytes(manifest.total_bytes)}"
        )
        places = ", ".join(f"{e.error:.4f} (layer {e.layer} expert {e.expert} {e.projection})" for e in worst)
        if manifest.mean_error is not None:
            out.line(f"relative weight error {manifest.mean_error:.4f} mean; worst {places}")
        out.line(f"made from {manifest.fingerprint or 'a model that it does not name: kt-kernel wrote it'}")

    return "store", body, render


def _gptq(path: Path, out: Output) -> tuple[str, dict[str, Any], Callable[[], None]]:
    from ktplan.convert.gptq_checkpoint import GptqCheckpoint

    checkpoint = GptqCheckpoint.open(path)
    body = checkpoint.to_dict()

    def render() -> None:
        out.line(
            f"GPTQ checkpoint   W{body['bits']}A16, groups of {body['group_size']}   "
            f"{body['experts']:,} experts   {format_bytes(body['bytes'])}"
        )

    return "gptq-checkpoint", body, render


def _profile(path: Path, out: Output) -> tuple[str, dict[str, Any], Callable[[], None]]:
    from ktplan.profile import ActivationProfile

    profile = ActivationProfile.load(path)
    total = profile.total()
    body = {
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "documents": len(profile.counts),
        "tokens": int(sum(profile.tokens)),
        "layers": list(profile.layers),
        "experts": int(total.shape[1]),
        "unused_experts": int((total == 0).sum()),
    }

    def render() -> None:
        out.line(
            f"activation profile of {profile.model}   {body['tokens']:,} tokens in {body['documents']:,} documents"
        )
        out.line(
            f"{len(profile.layers)} MoE layers of {body['experts']} experts, "
            f"{body['unused_experts']} of them never used"
        )
        out.line(f"made with {profile.fingerprint}")

    return "activation-profile", body, render


def _json_artefact(path: Path, out: Output) -> tuple[str, dict[str, Any], Callable[[], None]]:
    from ktplan.artifact import read_json_object

    kind = read_json_object(path).get("kind")
    if kind != "placement-plan":
        raise BadInput(
            f"{path} is no file of the suite: its kind is {kind!r}", hint="give a plan, a profile or a model"
        )
    from ktplan.placement import PlacementPlan

    plan = PlacementPlan.load(path)

    def render() -> None:
        share = len(plan.gpu) / (len(plan.shape.moe_layers) * plan.shape.experts)
        out.line(f"placement plan for {plan.model}   {plan.strategy}, seed {plan.seed}")
        out.line(f"{len(plan.gpu):,} experts on the GPU ({format_percent(share)})")
        out.table(
            ["layer", "experts on the GPU"],
            [[layer, ids or "-"] for layer, ids in plan.gpu.to_ranges().items()],
        )
        out.line(f"made for {plan.fingerprint}")

    return "placement-plan", plan.to_dict(), render


def _tensors(path: Path, out: Output) -> tuple[str, dict[str, Any], Callable[[], None]]:
    from ktplan.model.header import read_header

    header = read_header(path)
    tensors = {
        name: {"dtype": info.dtype, "shape": list(info.shape), "bytes": info.bytes}
        for name, info in sorted(header.tensors.items())
    }
    body = {
        "tensors": tensors,
        "metadata": header.metadata,
        "bytes": sum(t.bytes for t in header.tensors.values()),
    }

    def render() -> None:
        out.line(f"{path.name}   {len(tensors):,} tensors   {format_bytes(body['bytes'])}")  # type: ignore[arg-type]
        rows = [
            [name, info["dtype"], info["shape"], format_bytes(int(str(info["bytes"])))]
            for name, info in tensors.items()
        ]
        out.table(["tensor", "dtype", "shape", "size"], rows, right=[3])

    return "tensors", body, render
