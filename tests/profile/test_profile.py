"""The profile as a file: same bytes for the same counts, everything checked on the way in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ktplan.errors import BadInput
from ktplan.model import read_spec
from ktplan.profile import ActivationProfile, CorpusFile

FINGERPRINT = "sha256:" + "ab" * 32


def profile(
    documents: int = 6, layers: int = 3, experts: int = 8, top_k: int = 2, seed: int = 0
) -> ActivationProfile:
    """Random routing that could be real: each token chooses `top_k` different experts in each layer."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, 50, documents)
    counts = np.zeros((documents, layers, experts), np.int64)
    for document in range(documents):
        for layer in range(layers):
            for _ in range(tokens[document]):
                counts[document, layer, draw.choice(experts, top_k, replace=False)] += 1
    return ActivationProfile(
        counts=counts,
        tokens=tokens,
        document_ids=tuple(f"d{n}" for n in range(documents)),
        sources=tuple(f"{'ab'[n % 2]}.jsonl" for n in range(documents)),
        layers=tuple(range(1, layers + 1)),
        top_k=top_k,
        fingerprint=FINGERPRINT,
        model="some model",
        family="qwen3_moe",
        files=(CorpusFile("a.jsonl", "sha256:0"), CorpusFile("b.jsonl", "sha256:1")),
        settings={"chunk": 256, "max_tokens": None},
    )


def rewrite(path: Path, change: Any) -> None:
    """Change a saved profile with the reference implementation of safetensors."""
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    length = int.from_bytes(path.read_bytes()[:8], "little")
    about = json.loads(json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]["ktplan"])
    change(tensors, about)
    save_file(tensors, path, {"ktplan": json.dumps(about)})


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    made = profile()
    made.save(tmp_path / "p.safetensors")
    back = ActivationProfile.load(tmp_path / "p.safetensors")
    assert np.array_equal(back.counts, made.counts) and back.counts.dtype == np.int64
    assert np.array_equal(back.tokens, made.tokens)
    for name in (
        "document_ids",
        "sources",
        "layers",
        "top_k",
        "fingerprint",
        "model",
        "family",
        "files",
        "settings",
    ):
        assert getattr(back, name) == getattr(made, name), name
    assert back.to_bytes() == made.to_bytes() == (tmp_path / "p.safetensors").read_bytes()


def test_any_safetensors_reader_can_open_it(tmp_path: Path) -> None:
    made = profile()
    made.save(tmp_path / "p.safetensors")
    tensors = load_file(tmp_path / "p.safetensors")
    assert tensors["counts"].dtype == np.int32 and np.array_equal(tensors["counts"], made.counts)


def test_counts_beyond_32_bits_survive(tmp_path: Path) -> None:
    counts = np.array([[[2**33, 2**33, 0]]], np.int64)
    big = replace(
        profile(), counts=counts, tokens=np.array([2**33]), document_ids=("d",), sources=("a",), layers=(0,)
    )
    big.save(tmp_path / "p.safetensors")
    assert ActivationProfile.load(tmp_path / "p.safetensors").token_count == 2**33


def test_totals_and_sizes() -> None:
    made = profile(documents=4, layers=2, experts=8)
    assert made.documents == 4 and made.experts == 8
    assert made.total().shape == (2, 8)
    assert (made.total().sum(axis=1) == made.token_count * made.top_k).all()


def spoil_count(tensors: Any, about: Any) -> None:
    tensors["counts"][0, 0, 0] = -1


def spoil_sum(tensors: Any, about: Any) -> None:
    tensors["counts"][2, 1, 3] += 1


def spoil_shape(tensors: Any, about: Any) -> None:
    tensors["counts"] = tensors["counts"][:, :, :-1].copy()


def spoil_tokens(tensors: Any, about: Any) -> None:
    del tensors["tokens"]


def spoil_dtype(tensors: Any, about: Any) -> None:
    tensors["counts"] = tensors["counts"].astype(np.float32)


def spoil_layers(tensors: Any, about: Any) -> None:
    about["layers"] = [1, 1, 2]


def spoil_layer_type(tensors: Any, about: Any) -> None:
    about["layers"] = ["1", "2", "3"]


def spoil_documents(tensors: Any, about: Any) -> None:
    about["documents"].pop()


def spoil_fingerprint(tensors: Any, about: Any) -> None:
    about["fingerprint"] = "none"


def spoil_settings(tensors: Any, about: Any) -> None:
    about["settings"] = None


@pytest.mark.parametrize(
    "change",
    [spoil_count, spoil_sum, spoil_shape, spoil_tokens, spoil_dtype, spoil_layers, spoil_layer_type]
    + [spoil_documents, spoil_fingerprint, spoil_settings],
)
def test_damage_is_found_and_names_the_file(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "p.safetensors"
    profile().save(path)
    rewrite(path, change)
    with pytest.raises(BadInput, match="p.safetensors is damaged"):
        ActivationProfile.load(path)


def test_a_foreign_or_newer_file_is_told_apart_from_a_damaged_one(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(BadInput, match="is not an activation-profile"):
        ActivationProfile.load(tiny / "model.safetensors")
    path = tmp_path / "p.safetensors"
    profile().save(path)
    rewrite(path, lambda tensors, about: about.update(version=3))
    with pytest.raises(
        BadInput, match="version 3 of activation-profile, this program reads versions 1 and 2"
    ):
        ActivationProfile.load(path)
    with pytest.raises(BadInput, match="cannot be read"):
        ActivationProfile.load(tmp_path / "absent.safetensors")


@given(st.integers(0, 10**6))
def test_a_file_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, place: int) -> None:
    data = profile(documents=2, layers=1).to_bytes()
    path = tmp_path_factory.mktemp("cut") / "p.safetensors"
    path.write_bytes(data[: place % len(data)])
    with pytest.raises(BadInput):
        ActivationProfile.load(path)


def test_the_profile_of_another_model_is_refused_with_both_fingerprints(tiny: Path) -> None:
    spec = read_spec(tiny)
    with pytest.raises(BadInput) as fault:
        profile().for_model(spec)
    for word in (FINGERPRINT, spec.fingerprint, "3 MoE layers x 8 experts", "4 MoE layers x 16 experts"):
        assert word in fault.value.message


def test_folds_are_dealt_out_by_source_whatever_the_order_of_documents() -> None:
    made = profile(documents=20)
    dealt = made.folds(5)
    for source in ("a.jsonl", "b.jsonl"):
        mine = [int(fold) for fold, name in zip(dealt, made.sources, strict=True) if name == source]
        assert sorted(np.bincount(mine, minlength=5)) == [2, 2, 2, 2, 2]
    turned = made.select(list(range(19, -1, -1)))
    assert list(turned.folds(5)) == list(dealt[::-1])


def test_a_split_loses_no_document_and_no_count() -> None:
    made = profile(documents=7)
    for fold in range(3):
        rest, held_out = made.split(fold, 3)
        assert sorted(rest.document_ids + held_out.document_ids) == sorted(made.document_ids)
        assert np.array_equal(rest.total() + held_out.total(), made.total())
    with pytest.raises(BadInput, match="cannot be split into 8 folds"):
        made.split(0, 8)
