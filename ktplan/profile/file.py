"""The profile's file: safetensors with arrays, all else as JSON under one metadata key.

Version 1 held `counts` and `tokens`; version 2 adds what generated tokens chose, gate ranks and the trace. Both load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ktplan.artifact import parsed
from ktplan.errors import BadInput
from ktplan.model.header import Header, read_header
from ktplan.profile.corpus import CorpusFile
from ktplan.profile.profile import AGAIN, ActivationProfile, Counts
from ktplan.profile.trace import Trace

KIND: Final = "activation-profile"
VERSION: Final = 2
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
_DTYPES: Final = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "I64": "<i8"}


def to_bytes(profile: ActivationProfile) -> bytes:
    """The whole file. Every array takes the narrowest type that holds it."""
    plain = ("counts", "tokens")  # 32 bits at least, as in version 1
    arrays = {name: _narrow(array, name not in plain) for name, array in _arrays(profile).items()}
    about = {
        "kind": KIND,
        "version": VERSION,
        "fingerprint": profile.fingerprint,
        "model": profile.model,
        "family": profile.family,
        "layers": list(profile.layers),
        "experts": profile.experts,
        "top_k": profile.top_k,
        "files": [{"name": file.name, "sha256": file.sha256} for file in profile.files],
        "documents": list(profile.document_ids),
        "sources": list(profile.sources),
        "datasets": list(profile.datasets),
        "tokenizer": profile.tokenizer,
        "exact": profile.exact,
        "phases_known": profile.phases_known,
        "trace_ranked": profile.trace.ranked if profile.trace else None,
        "settings": dict(profile.settings),
    }
    # Written by hand because the safetensors package keeps metadata in a hash table of random order.
    entries: dict[str, Any] = {
        "__metadata__": {"ktplan": json.dumps(about, sort_keys=True, ensure_ascii=False)}
    }
    place = 0
    for name, array in arrays.items():
        entries[name] = {
            "dtype": next(word for word, code in _DTYPES.items() if np.dtype(code) == array.dtype),
            "shape": list(array.shape),
            "data_offsets": [place, place + array.nbytes],
        }
        place += array.nbytes
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return b"".join(
        [len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays.values())]
    )


def load(path: Path) -> ActivationProfile:
    """Read and check a profile. Raises BadInput for a missing, damaged, foreign or newer file."""
    try:
        header = read_header(path)
    except BadInput as fault:
        raise BadInput(fault.message, hint=f"give the file that 'ktplan profile' wrote, or {AGAIN}") from None
    about = _about(path, header)
    optional = {
        name: _array(path, header, name) if name in header.tensors else None
        for name in ("decode_counts", "decode_tokens", "ranked")
    }
    return parsed(path, partial(_read, path, header, optional), about, AGAIN)


def _read(
    path: Path, header: Header, optional: Mapping[str, Counts | None], about: Mapping[str, Any]
) -> ActivationProfile:
    ranked = optional["ranked"]
    return ActivationProfile(
        counts=_array(path, header, "counts"),
        tokens=_array(path, header, "tokens"),
        document_ids=_texts(about, "documents"),
        sources=_texts(about, "sources"),
        layers=tuple(_whole(number, "layers") for number in _list(about, "layers")),
        top_k=_whole(about.get("top_k"), "top_k"),
        fingerprint=_fingerprint(about),
        model=_text(about.get("model"), "model"),
        family=_text(about.get("family"), "family"),
        files=tuple(_file(entry) for entry in _list(about, "files")),
        settings=_settings(about),
        decode_counts=optional["decode_counts"],
        decode_tokens=optional["decode_tokens"],
        ranked=None if ranked is None else ranked.astype(np.uint32),
        trace=_trace(path, header, about),
        tokenizer=None if about.get("tokenizer") is None else _text(about["tokenizer"], "tokenizer"),
        datasets=_texts(about, "datasets") if "datasets" in about else (),
        exact=_flag(about, "exact"),
        phases_known=_flag(about, "phases_known"),
    )


def _arrays(profile: ActivationProfile) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any] | None] = {
        "counts": profile.counts,
        "tokens": profile.tokens,
        "decode_counts": profile.decode_counts,
        "decode_tokens": profile.decode_tokens,
        "ranked": profile.ranked,
    }
    if profile.trace:
        found |= {
            "trace_ids": profile.trace.ids,
            "trace_owners": profile.trace.owners,
            "trace_phases": profile.trace.phases,
        }
    return {name: array for name, array in found.items() if array is not None}


def _narrow(array: npt.NDArray[Any], small: bool) -> npt.NDArray[Any]:
    top = int(array.max(initial=0))
    for code in ("<u1", "<u2", "<i4") if small else ("<i4",):
        if top <= np.iinfo(code).max:
            return np.ascontiguousarray(array.astype(code))
    return np.ascontiguousarray(array.astype("<i8"))


def _about(path: Path, header: Header) -> dict[str, Any]:
    try:
        about = json.loads(header.metadata.get("ktplan", "null"))
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or about.get("kind") != KIND:
        found = about.get("kind") if isinstance(about, dict) else None
        raise BadInput(
            f"{path} is not an {KIND}: it says kind {found!r}",
            hint="give the file that 'ktplan profile' wrote",
        )
    if about.get("version") not in (1, VERSION):
        raise BadInput(
            f"{path} has version {about.get('version')!r} of {KIND}, this program reads versions 1 and {VERSION}",
            hint="use the program that wrote it, or record it again",
        )
    return about


def _array(path: Path, header: Header, name: str) -> Counts:
    info = header.tensors.get(name)
    if info is None or info.dtype not in _DTYPES:
        raise BadInput(
            f"{path} is damaged: the tensor '{name}' is {'absent' if info is None else info.dtype}",
            hint=AGAIN,
        )
    try:
        with path.open("rb") as file:
            file.seek(info.start)
            data = file.read(info.bytes)
    except OSError as fault:
        raise BadInput(f"{path} cannot be read: {fault.strerror}", hint="check its permissions") from None
    return np.frombuffer(data, dtype=_DTYPES[info.dtype]).astype(np.int64).reshape(info.shape)


def _trace(path: Path, header: Header, about: Mapping[str, Any]) -> Trace | None:
    if "trace_ids" not in header.tensors:
        return None
    ids, owners, phases = (_array(path, header, f"trace_{name}") for name in ("ids", "owners", "phases"))
    if ids.min(initial=0) < 0 or ids.max(initial=0) > np.iinfo(np.uint16).max:
        raise BadInput("the trace holds an id that no expert has", hint=AGAIN)
    return Trace(
        ids.astype(np.uint16),
        owners.astype(np.int32),
        phases.astype(np.uint8),
        about.get("trace_ranked") is True,
    )


def _flag(about: Mapping[str, Any], key: str) -> bool:
    value = about.get(key, True)
    if not isinstance(value, bool):
        raise BadInput(f"'{key}' is {value!r}, true or false is expected", hint=AGAIN)
    return value


def _list(about: Mapping[str, Any], key: str) -> list[Any]:
    value = about.get(key)
    if not isinstance(value, list):
        raise BadInput(f"'{key}' is no list", hint=AGAIN)
    return value


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"'{key}' is {value!r}, a text is expected", hint=AGAIN)
    return value


def _texts(about: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(_text(value, key) for value in _list(about, key))


def _whole(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadInput(f"'{key}' holds {value!r}, a whole number is expected", hint=AGAIN)
    return value


def _fingerprint(about: Mapping[str, Any]) -> str:
    value = _text(about.get("fingerprint"), "fingerprint")
    if value and not _FINGERPRINT.fullmatch(value):
        raise BadInput(f"the fingerprint '{value}' is none", hint=AGAIN)
    return value


def _file(entry: Any) -> CorpusFile:
    if not isinstance(entry, dict):
        raise BadInput(f"'files' holds {entry!r}", hint=AGAIN)
    return CorpusFile(_text(entry.get("name"), "files"), _text(entry.get("sha256"), "files"))


def _settings(about: Mapping[str, Any]) -> dict[str, Any]:
    value = about.get("settings")
    if not isinstance(value, dict):
        raise BadInput("'settings' is no object", hint=AGAIN)
    return value
