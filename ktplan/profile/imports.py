"""Counts that other tools recorded, as profiles: arrays, csv, json, order lists, llama.cpp's imatrix.

None of them names the model by its weights, most mix prompt and generated tokens, and some break the rule that a
token fills top-k slots in each layer. What is lost is said in `notes`.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ktplan.artifact import sha256_file
from ktplan.errors import BadInput
from ktplan.model import ModelSpec
from ktplan.profile.corpus import CorpusFile
from ktplan.profile.profile import ActivationProfile, Counts
from ktplan.profile.trace import Trace

_AXES: Final = "counts are read as [layers, experts] or [passes, layers, experts]"


class Imported(NamedTuple):
    """A profile and what a person should know of it."""

    profile: ActivationProfile
    notes: tuple[str, ...]


def from_counts(
    spec: ModelSpec,
    counts: npt.NDArray[Any],
    path: Path,
    kind: str,
    *,
    phases: str | None = None,
    notes: Sequence[str] = (),
    trace: Trace | None = None,
) -> Imported:
    """Counts [layers, experts] or [passes, layers, experts]; layers may be all of the model's or its MoE layers.

    `phases` is "prefill" or "decode" where the source has one kind alone. Raises BadInput for other shapes (both
    shown), NaN, negative or fractional counts, choices in dense layers, and tables without any.
    """
    found = _checked(spec, np.asarray(counts), path)
    said = list(notes)
    total = found.sum(axis=(1, 2))
    if len(found) > 1 and not total.all():
        said.append(f"{int((total == 0).sum()):,} of {len(found):,} passes are empty and left out")
        if trace is not None and trace.tokens:
            trace = trace.of(np.flatnonzero(total).tolist())
        found = found[total > 0]
    sums = found.sum(axis=2)
    tokens = np.maximum(-(-sums.max(axis=1) // spec.top_k), found.max(axis=(1, 2)))
    exact = bool(np.all(sums == tokens[:, None] * spec.top_k))
    if not exact:
        said.append(
            f"the layers' sums are no multiples of top-{spec.top_k}: tokens are estimated, rates are shares of choices"
        )
    if phases is None:
        said.append(
            "prompt and generated tokens are mixed in these counts; a placement exists for the latter"
        )
    if len(found) == 1:
        said.append("one document only: nothing can be said about other texts")
    decode = phases == "decode"
    profile = ActivationProfile(
        counts=found,
        tokens=tokens,
        document_ids=tuple(f"{path.name}:{n}" for n in range(len(found))),
        sources=(path.name,) * len(found),
        layers=spec.moe_layers,
        top_k=spec.top_k,
        fingerprint="",
        model=spec.name,
        family=spec.family,
        files=(CorpusFile(path.name, sha256_file(path)),),
        settings={"imported": kind},
        decode_counts=found if decode else None,
        decode_tokens=tokens if decode else None,
        trace=trace,
        exact=exact,
        phases_known=phases is not None,
    )
    return Imported(profile, tuple(said))


def read_table(spec: ModelSpec, path: Path) -> Imported:
    """Counts from .npz or .npy (an array `counts`, `logical_count` or the only one), .json or .csv.

    JSON is nested lists, an object with such a list, {"layer": [counts]} or an order list [[layer, expert], ...]; CSV
    has columns layer, expert, count, or a row of counts for each layer. Raises BadInput for anything else.
    """
    suffix = path.suffix.lower()
    if suffix in (".npz", ".npy"):
        return from_counts(spec, _arrays(path), path, suffix[1:])
    text = _text(path)
    if suffix == ".csv":
        return from_counts(spec, _csv(spec, text, path), path, "csv")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(f"{path} is neither JSON nor a known kind of counts", hint=_AXES) from None
    return _json(spec, whole, path)


def _json(spec: ModelSpec, whole: Any, path: Path) -> Imported:
    if isinstance(whole, dict):
        named = next((whole[key] for key in ("counts", "logical_count", "order") if key in whole), None)
        if named is None and all(str(key).isdecimal() for key in whole):
            rows = {int(key): value for key, value in whole.items()}
            missing = [layer for layer in spec.moe_layers if layer not in rows]
            if missing:
                raise BadInput(f"{path} has no counts for layer {missing[0]}", hint="give all MoE layers")
            named = [rows[layer] for layer in spec.moe_layers]
        whole = named
    try:
        array = np.array(whole, dtype=np.float64)
    except (TypeError, ValueError):
        raise BadInput(f"{path} holds no table of counts", hint=_AXES) from None
    if array.ndim == 2 and array.shape[1] == 2 and spec.experts != 2:
        return from_order(spec, array, path)
    return from_counts(spec, array, path, "json")


def from_order(spec: ModelSpec, pairs: npt.NDArray[Any], path: Path) -> Imported:
    """A list of (layer, expert), most used first: ranks stand for counts, so shares and intervals mean nothing."""
    place = {layer: n for n, layer in enumerate(spec.moe_layers)}
    counts = np.zeros((len(spec.moe_layers), spec.experts), dtype=np.int64)
    for rank, (layer, expert) in enumerate(pairs.tolist()):
        row, column = place.get(int(layer)), int(expert)
        if row is None or not 0 <= column < spec.experts:
            raise BadInput(f"{path} orders expert {column} of layer {int(layer)}, which {spec.name} does not have",
                           hint="the list belongs to another model")  # fmt: skip
        if counts[row, column]:
            raise BadInput(f"{path} names expert {column} of layer {int(layer)} twice", hint="check the list")
        counts[row, column] = len(pairs) - rank
    return from_counts(
        spec,
        counts,
        path,
        "order",
        notes=("an order has no counts: strategy frequency can use it, hit rates mean nothing",),
    )


def _checked(spec: ModelSpec, counts: npt.NDArray[Any], path: Path) -> Counts:
    if counts.ndim == 2:
        counts = counts[None]
    moe, layers, experts = len(spec.moe_layers), spec.layers, spec.experts
    if (
        counts.ndim != 3
        or counts.shape[1] not in (moe, layers)
        or counts.shape[2] != experts
        or not len(counts)
    ):
        raise BadInput(
            f"{path} has counts of shape {list(counts.shape)}; {spec.name} has {moe} MoE layers ({layers} in all) x "
            f"{experts} experts",
            hint=f"the counts belong to another model; {_AXES}",
        )
    if counts.dtype.kind not in "biuf":
        raise BadInput(f"{path} has counts of type {counts.dtype}", hint="counts are whole numbers")
    if counts.dtype.kind == "f" and not np.isfinite(counts).all():
        raise BadInput(
            f"{path} has {int((~np.isfinite(counts)).sum()):,} counts that are NaN or infinite",
            hint="record again",
        )
    if counts.min() < 0:
        where = np.argwhere(counts < 0)[0].tolist()
        raise BadInput(
            f"{path} has a negative count at {where}",
            hint="an int32 counter may have overflowed: record again",
        )
    if counts.dtype.kind == "f" and not np.array_equal(counts, np.round(counts)):
        raise BadInput(f"{path} has fractional counts", hint="give counts, not shares")
    whole = counts.astype(np.int64)
    if counts.shape[1] == layers and moe != layers:
        dense = [layer for layer in range(layers) if layer not in spec.moe_layers]
        if whole[:, dense].any():
            first = dense[int(np.argwhere(whole[:, dense].any(axis=(0, 2)))[0, 0])]
            raise BadInput(f"{path} has choices in layer {first}, "
                           f"which is dense in {spec.name}", hint="the counts belong to another model")  # fmt: skip
        whole = whole[:, list(spec.moe_layers)]
    if not whole.any():
        raise BadInput(f"{path} has no count above 0", hint="record again, with requests in between")
    return whole


def _arrays(path: Path) -> npt.NDArray[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as fault:
        raise BadInput(f"{path} cannot be read: {fault}", hint="give arrays saved by numpy") from None
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        for name in ("counts", "logical_count", *(loaded.files if len(loaded.files) == 1 else ())):
            if name in loaded.files:
                found: npt.NDArray[Any] = loaded[name]
                return found
        raise BadInput(f"{path} has no array 'counts', only {', '.join(loaded.files)}", hint=_AXES)


def _csv(spec: ModelSpec, text: str, path: Path) -> npt.NDArray[np.float64]:
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    try:
        if rows and {"layer", "expert", "count"} <= {name.strip().lower() for name in rows[0]}:
            head = [name.strip().lower() for name in rows[0]]
            at = [head.index(name) for name in ("layer", "expert", "count")]
            place = {layer: n for n, layer in enumerate(spec.moe_layers)}
            counts = np.zeros((len(spec.moe_layers), spec.experts))
            for number, row in enumerate(rows[1:], start=2):
                layer, expert, count = int(row[at[0]]), int(row[at[1]]), float(row[at[2]])
                if layer not in place or not 0 <= expert < spec.experts:
                    raise BadInput(f"{path} line {number}: {spec.name} has no expert {expert} in layer {layer}",
                                   hint="the counts belong to another model")  # fmt: skip
                counts[place[layer], expert] += count
            return counts
        return np.array([[float(cell) for cell in row] for row in rows])
    except (ValueError, IndexError) as fault:
        raise BadInput(f"{path} is no table of counts: {fault}", hint="columns layer,expert,count") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as fault:
        raise BadInput(f"{path} cannot be read: {fault.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is no text and no known kind of counts", hint=_AXES) from None


def tokens_of(counts: Counts, top_k: int) -> int:
    """The least number of tokens that explains counts [layers, experts]."""
    return max(math.ceil(int(counts.sum(axis=1).max()) / top_k), int(counts.max()))
