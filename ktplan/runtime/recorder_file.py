"""SGLang's and KTransformers' recorder files (.pt): read with weights only, so nothing in them ever runs.

    stat, stat_approx   dict, `logical_count` int32 [passes, layers, experts]
    per_pass            dict, `records`: one dict a pass with `global_physical_count` [layers, physical experts]
    per_token           dict, `records` with `topk_ids_of_layer` [layers, tokens, k]
    activation_stats    dict, `activation_counts` int64 [layers, experts]: passes in which an expert was hit

Prompt and generated tokens are mixed in all but per_token, which says the mode of each pass.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ktplan.artifact import write_whole
from ktplan.errors import BadInput
from ktplan.model import ModelSpec
from ktplan.profile import ActivationProfile
from ktplan.profile.imports import Imported, from_counts
from ktplan.profile.trace import Trace

_CAPPED: Final = 1000  # SGLang's default ring of passes; older ones vanish without a word
_INT32: Final = np.iinfo(np.int32).max


def read_recorder(spec: ModelSpec, path: Path) -> Imported:
    """A recorder's file as a profile. Raises BadInput for files with code, of other models or without counts."""
    whole = load_pt(path)
    if isinstance(whole, torch.Tensor):
        whole = {"logical_count": whole}
    if not isinstance(whole, dict):
        raise BadInput(
            f"{path} holds a {type(whole).__name__}, a dict is expected", hint="give a recorder's file"
        )
    if "records" in whole:
        return _records(spec, path, whole)
    if "activation_counts" in whole:
        note = (
            "activation_stats.pt counts the passes in which an expert was hit: a prompt of 4,096 tokens weighs "
            "as much as "
            "one generated token"
        )
        return from_counts(
            spec, _array(path, whole["activation_counts"]), path, "activation_stats", notes=(note,)
        )
    if "logical_count" not in whole:
        keys = ", ".join(sorted(map(str, whole)))
        raise BadInput(f"{path} has no 'logical_count', only {keys}", hint="give a file of SGLang's recorder")
    counts = _array(path, whole["logical_count"])
    notes = []
    if counts.ndim == 3 and len(counts) == _CAPPED:
        notes.append(
            f"exactly {_CAPPED:,} passes: the recorder's buffer was full, older passes are lost (buffer size -1 "
            f"keeps all)"
        )
    return from_counts(spec, counts, path, "sglang stat", notes=notes)


def load_pt(path: Path) -> Any:
    """`torch.load` of data alone. Raises BadInput for a file that is damaged or wants to run code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as fault:
        raise BadInput(
            f"{path} holds more than data and was not loaded: {str(fault).splitlines()[0]}",
            hint="only tensors, numbers, texts, lists and dicts are read",
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as fault:
        raise BadInput(
            f"{path} cannot be read as a .pt file: {str(fault).splitlines()[0]}", hint="copy it again"
        ) from None


def write_recorder(profile: ActivationProfile, path: Path, *, layers: int) -> None:
    """`{"logical_count": int32 [documents, all layers, experts]}`, what `--init-expert-location` reads.

    `layers` counts dense ones too; their rows are zero. Counts beyond int32 are refused with BadInput.
    """
    if profile.counts.max() > _INT32 or int(profile.total().max()) > _INT32:
        raise BadInput("counts exceed int32, which sglang-kt sums in", hint="export a smaller profile")
    counts = np.zeros((profile.documents, layers, profile.experts), dtype=np.int32)
    counts[:, list(profile.layers)] = profile.counts
    archive = io.BytesIO()
    torch.save({"logical_count": torch.from_numpy(counts)}, archive)
    write_whole(path, archive.getvalue())


def _records(spec: ModelSpec, path: Path, whole: dict[str, Any]) -> Imported:
    records = [record for record in whole["records"] if isinstance(record, dict)]
    if not records:
        raise BadInput(f"{path} has no records", hint="record again, with requests in between")
    if "topk_ids_of_layer" in records[0]:
        return _per_token(spec, path, records)
    physical = whole.get("last_physical_to_logical_map")
    passes = []
    for record in records:
        if "logical_count" in record:
            passes.append(_array(path, record["logical_count"]))
        elif "global_physical_count" in record:
            passes.append(
                _logical(path, _array(path, record["global_physical_count"]), physical, spec.experts)
            )
        else:
            raise BadInput(
                f"{path} has records of {', '.join(sorted(map(str, record)))}",
                hint="no mode of SGLang's recorder",
            )
    return from_counts(spec, np.stack(passes), path, "sglang per_pass")


def _logical(path: Path, counts: npt.NDArray[Any], physical: Any, experts: int) -> npt.NDArray[np.int64]:
    """Physical experts [layers, slots] folded to logical ones."""
    if physical is None:
        return counts.astype(np.int64)
    to = _array(path, physical).astype(np.int64)
    if to.shape != counts.shape or to.min() < 0 or to.max() >= experts:
        raise BadInput(f"{path}: the map of physical experts does not fit the counts", hint="record again")
    folded = np.zeros((len(counts), experts), dtype=np.int64)
    np.add.at(folded, (np.arange(len(counts))[:, None], to), counts.astype(np.int64))
    return folded


def _per_token(spec: ModelSpec, path: Path, records: list[dict[str, Any]]) -> Imported:
    counts, pieces, owners, decode = [], [], [], []
    for number, record in enumerate(records):
        ids = _array(path, record["topk_ids_of_layer"]).astype(np.int64)
        if ids.ndim != 3 or ids.shape[0] not in (spec.layers, len(spec.moe_layers)):
            raise BadInput(
                f"{path} has ids of shape {list(ids.shape)}; {spec.name} has {spec.layers} layers, "
                f"{len(spec.moe_layers)} of them MoE",
                hint="the records belong to another model",
            )
        if ids.shape[0] == spec.layers:
            ids = ids[list(spec.moe_layers)]
        if (
            ids.shape[2] > spec.top_k
        ):  # the recorder's width is 8 whatever the model; the rest is filled with -1
            ids = ids[:, :, : spec.top_k]
        valid = (ids >= 0).all(axis=(0, 2))
        ids = ids[:, valid]
        if not ids.shape[1]:
            continue
        if ids.max() >= spec.experts or ids.shape[2] != spec.top_k:
            raise BadInput(
                f"{path} has expert {int(ids.max())} among {ids.shape[2]} choices; {spec.name} has {spec.experts}, "
                f"top-{spec.top_k}",
                hint="the records belong to another model",
            )
        counts.append(np.stack([np.bincount(row.ravel(), minlength=spec.experts) for row in ids]))
        pieces.append(ids.astype(np.uint16))
        owners += [len(counts) - 1] * ids.shape[1]
        decode.append(_is_decode(record.get("forward_mode")))
        del number
    if not counts:
        raise BadInput(f"{path} has no token", hint="record again, with requests in between")
    phases = "decode" if all(decode) else "prefill" if not any(decode) else None
    phase_of = np.array([int(decode[owner]) for owner in owners], dtype=np.uint8)
    trace = Trace(np.concatenate(pieces, axis=1), np.array(owners, dtype=np.int32), phase_of, False)
    notes = ("a document is a pass: requests of one pass share it, intervals are too narrow",)
    return from_counts(
        spec, np.stack(counts), path, "sglang per_token", phases=phases, notes=notes, trace=trace
    )


def _is_decode(mode: Any) -> bool:
    """SGLang's ForwardMode: 1 is EXTEND (prompt), 2 is DECODE."""
    return mode in (2, "DECODE", "ForwardMode.DECODE")


def _array(path: Path, value: Any) -> npt.NDArray[Any]:
    if not isinstance(value, torch.Tensor):
        raise BadInput(f"{path} has a {type(value).__name__} where a tensor is expected", hint="record again")
    tensor = value.float() if value.dtype == torch.bfloat16 else value
    found: npt.NDArray[Any] = tensor.numpy()
    return found
