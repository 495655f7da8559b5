"""ActivationProfile: how often each routed expert was chosen, document by document.

Documents stay apart because tokens of one document choose alike: whatever is said about another text
(held-out hit rates, their intervals) must leave whole documents out.

On disk it is one safetensors file: `counts` [documents, MoE layers, experts] and `tokens` [documents], and
all else as JSON under one metadata key. Same profile, same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ktplan.artifact import sha256_bytes, write_whole
from ktplan.errors import BadInput
from ktplan.model import ModelSpec
from ktplan.model.header import Header, read_header
from ktplan.profile.corpus import CorpusFile

KIND: Final = "activation-profile"
VERSION: Final = 1
_AGAIN = "record it again with 'ktplan profile'"
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActivationProfile:
    """Counts of routed slots. A token fills `top_k` slots in each MoE layer, so every row's sum is known.

    `counts[d, m, e]`: slots of document d in MoE layer `layers[m]` that chose expert e; `tokens[d]`: real
    tokens, neither padding nor special tokens. Raises BadInput when the parts contradict each other.
    """

    counts: Counts  # int64 [documents, MoE layers, experts]
    tokens: Counts  # int64 [documents]
    document_ids: tuple[str, ...]
    sources: tuple[str, ...]  # the corpus file of each document, by name
    layers: tuple[int, ...]  # the model's own numbers of its MoE layers
    top_k: int
    fingerprint: str
    model: str
    family: str
    files: tuple[CorpusFile, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # how it was recorded

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise BadInput(f"the activation profile contradicts itself: {fault}", hint=_AGAIN)

    def _fault(self) -> str | None:
        documents = len(self.document_ids)
        shape = self.counts.shape
        if self.counts.ndim != 3 or shape[:2] != (documents, len(self.layers)) or 0 in shape:
            return f"counts have shape {list(shape)}, {documents} documents and {len(self.layers)} layers are named"
        if self.tokens.shape != (documents,) or len(self.sources) != documents:
            return f"{documents} documents, {self.tokens.size} token totals, {len(self.sources)} sources"
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            return f"layer numbers {list(self.layers)} do not ascend"
        if not 1 <= self.top_k <= self.experts:
            return f"top-{self.top_k} of {self.experts} experts"
        if self.counts.min() < 0 or self.tokens.min() < 1:
            return "a count is negative or a document has no token"
        if np.any(self.counts.max(axis=2) > self.tokens[:, None]):
            return "an expert was chosen more often than there are tokens"
        wrong = np.argwhere(self.counts.sum(axis=2) != self.tokens[:, None] * self.top_k)
        if len(wrong):
            document, layer = wrong[0]
            return (
                f"document {self.document_ids[document]} has {int(self.counts[document, layer].sum()):,} routed slots "
                f"in layer {self.layers[layer]}, {self.tokens[document]:,} tokens x top-{self.top_k} are expected"
            )
        return None

    @property
    def experts(self) -> int:
        """Routed experts in each MoE layer."""
        return int(self.counts.shape[2])

    @property
    def documents(self) -> int:
        """How many documents were counted."""
        return len(self.document_ids)

    @property
    def token_count(self) -> int:
        """Real tokens in all documents."""
        return int(self.tokens.sum())

    def total(self) -> Counts:
        """int64 [MoE layers, experts]: counts over all documents."""
        return np.asarray(self.counts.sum(axis=0), dtype=np.int64)

    def for_model(self, spec: ModelSpec) -> ActivationProfile:
        """This profile, when it was recorded on the model of `spec`; raises BadInput showing both otherwise."""
        own, other = (len(self.layers), self.experts), (len(spec.moe_layers), spec.experts)
        if self.fingerprint == spec.fingerprint and self.layers == spec.moe_layers and own == other:
            return self
        raise BadInput(
            f"the profile was recorded on another model: {self.model} ({self.family}, {own[0]} MoE layers x {own[1]} "
            f"experts, {self.fingerprint}), this one is {spec.name} ({spec.family}, {other[0]} MoE layers x "
            f"{other[1]} experts, {spec.fingerprint})",
            hint="record a profile on this model with 'ktplan profile'",
        )

    def select(self, documents: Sequence[int] | npt.NDArray[np.intp]) -> ActivationProfile:
        """The profile of some documents, by position."""
        chosen = [int(document) for document in documents]
        return ActivationProfile(
            counts=self.counts[chosen],
            tokens=self.tokens[chosen],
            document_ids=tuple(self.document_ids[document] for document in chosen),
            sources=tuple(self.sources[document] for document in chosen),
            layers=self.layers,
            top_k=self.top_k,
            fingerprint=self.fingerprint,
            model=self.model,
            family=self.family,
            files=self.files,
            settings=self.settings,
        )

    def folds(self, folds: int) -> npt.NDArray[np.int64]:
        """The fold of each document, int64 [documents]: 0 .. folds - 1.

        Documents are ordered by source, inside a source by a hash of their id, and dealt out in turn: each
        fold gets a like share of each source, and the same documents give the same folds whatever their order
        in the files.
        """
        keys = [
            (source, sha256_bytes(name.encode()), position)
            for position, (source, name) in enumerate(zip(self.sources, self.document_ids, strict=True))
        ]
        dealt = np.empty(self.documents, dtype=np.int64)
        for place, (_, _, position) in enumerate(sorted(keys)):
            dealt[position] = place % folds
        return dealt

    def split(self, fold: int, folds: int) -> tuple[ActivationProfile, ActivationProfile]:
        """(the other folds, the documents of `fold`). Raises BadInput when there are fewer documents than folds."""
        if folds < 2 or self.documents < folds:
            raise BadInput(
                f"{self.documents} document(s) cannot be split into {folds} folds",
                hint="profile more documents",
            )
        dealt = self.folds(folds)
        return self.select(np.flatnonzero(dealt != fold)), self.select(np.flatnonzero(dealt == fold))

    def digest(self) -> str:
        """`sha256:` digest of the file that `save` writes."""
        return sha256_bytes(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The whole file. Counts are int32 where they fit."""
        small = self.counts.max() < 2**31
        arrays = {
            "counts": self.counts.astype("<i4" if small else "<i8"),
            "tokens": self.tokens.astype("<i8"),
        }
        about = {
            "kind": KIND,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "family": self.family,
            "layers": list(self.layers),
            "experts": self.experts,
            "top_k": self.top_k,
            "files": [{"name": file.name, "sha256": file.sha256} for file in self.files],
            "documents": list(self.document_ids),
            "sources": list(self.sources),
            "settings": dict(self.settings),
        }
        # Written by hand because the safetensors package keeps metadata in a hash table of random order.
        entries: dict[str, Any] = {
            "__metadata__": {"ktplan": json.dumps(about, sort_keys=True, ensure_ascii=False)}
        }
        place = 0
        for name, array in arrays.items():
            entries[name] = {
                "dtype": "I32" if array.itemsize == 4 else "I64",
                "shape": list(array.shape),
                "data_offsets": [place, place + array.nbytes],
            }
            place += array.nbytes
        header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        return b"".join(
            [len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays.values())]
        )

    def save(self, path: Path) -> None:
        """Write the profile, whole or not at all."""
        write_whole(path, self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> ActivationProfile:
        """Read and check a profile. Raises BadInput for a missing, damaged, foreign or newer file."""
        try:
            header = read_header(path)
        except BadInput as fault:
            raise BadInput(
                fault.message, hint=f"give the file that 'ktplan profile' wrote, or {_AGAIN}"
            ) from None
        about = _about(path, header)
        try:
            return cls(
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
            )
        except BadInput as fault:
            raise BadInput(f"{path} is damaged: {fault.message}", hint=fault.hint or _AGAIN) from None


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
    if about.get("version") != VERSION:
        raise BadInput(
            f"{path} has version {about.get('version')!r} of {KIND}, this program reads version {VERSION}",
            hint="use the program that wrote it, or record it again",
        )
    return about


def _array(path: Path, header: Header, name: str) -> Counts:
    info = header.tensors.get(name)
    if info is None or info.dtype not in ("I32", "I64"):
        raise BadInput(f"the tensor '{name}' is {'absent' if info is None else info.dtype}", hint=_AGAIN)
    try:
        with path.open("rb") as file:
            file.seek(info.start)
            data = file.read(info.bytes)
    except OSError as fault:
        raise BadInput(f"it cannot be read: {fault.strerror}", hint="check its permissions") from None
    return (
        np.frombuffer(data, dtype="<i4" if info.dtype == "I32" else "<i8")
        .astype(np.int64)
        .reshape(info.shape)
    )


def _list(about: Mapping[str, Any], key: str) -> list[Any]:
    value = about.get(key)
    if not isinstance(value, list):
        raise BadInput(f"'{key}' is no list", hint=_AGAIN)
    return value


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"'{key}' is {value!r}, a text is expected", hint=_AGAIN)
    return value


def _texts(about: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(_text(value, key) for value in _list(about, key))


def _whole(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadInput(f"'{key}' holds {value!r}, a whole number is expected", hint=_AGAIN)
    return value


def _fingerprint(about: Mapping[str, Any]) -> str:
    value = _text(about.get("fingerprint"), "fingerprint")
    if not _FINGERPRINT.fullmatch(value):
        raise BadInput(f"the fingerprint '{value}' is none", hint=_AGAIN)
    return value


def _file(entry: Any) -> CorpusFile:
    if not isinstance(entry, dict):
        raise BadInput(f"'files' holds {entry!r}", hint=_AGAIN)
    return CorpusFile(_text(entry.get("name"), "files"), _text(entry.get("sha256"), "files"))


def _settings(about: Mapping[str, Any]) -> dict[str, Any]:
    value = about.get("settings")
    if not isinstance(value, dict):
        raise BadInput("'settings' is no object", hint=_AGAIN)
    return value
