"""Counts of other tools: what is read, what is said about it, what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktplan.errors import BadInput
from ktplan.model import ModelSpec
from ktplan.profile.imatrix import read_imatrix
from ktplan.profile.imports import read_table
from ktplan.runtime.recorder_file import load_pt, read_recorder, write_recorder

EXPERTS = 8


@pytest.fixture
def spec() -> ModelSpec:
    """Three layers, the first dense."""
    return ModelSpec(
        name="paper", family="deepseek_v3", model_type="deepseek_v3", layers=3, moe_layers=(1, 2), experts=EXPERTS,
        top_k=2,
        shared_experts=1, hidden=64, moe_intermediate=32, vocab=100, context=512, activation="silu", dtype="bfloat16",
        tied_embeddings=False, fused=False, dense_params=1, expert_params=1, dense_bytes=2, expert_bytes=2,
        kv_bytes_per_token=64, experts_module="model.layers.{layer}.mlp.experts", fingerprint="sha256:" + "0" * 64,
    )  # fmt: skip


def passes(tokens: tuple[int, ...] = (3, 1, 5)) -> np.ndarray:
    """int32 [passes, 3 layers, experts] as the recorder writes them; the dense row is zero."""
    draw = np.random.default_rng(0)
    counts = np.zeros((len(tokens), 3, EXPERTS), np.int32)
    for number, count in enumerate(tokens):
        for layer in (1, 2):
            for _ in range(count):
                counts[number, layer, draw.choice(EXPERTS, 2, replace=False)] += 1
    return counts


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def test_the_recorders_stat_mode(spec: ModelSpec, tmp_path: Path) -> None:
    counts = passes()
    file = saved(tmp_path / "r.pt", {"rank": 0, "logical_count": torch.from_numpy(counts)})
    found = read_recorder(spec, file)
    assert np.array_equal(found.profile.counts, counts[:, 1:]) and found.profile.tokens.tolist() == [3, 1, 5]
    assert found.profile.exact and not found.profile.phases_known
    assert any("mixed" in note for note in found.notes)
    full = saved(tmp_path / "full.pt", {"logical_count": torch.from_numpy(passes((1,) * 1000))})
    assert any("buffer was full" in note for note in read_recorder(spec, full).notes)


def test_the_recorders_per_pass_mode_folds_physical_experts(spec: ModelSpec, tmp_path: Path) -> None:
    counts = passes((4,))[0]
    doubled = np.concatenate([counts, counts], axis=1)
    to = np.tile(np.arange(EXPERTS), (3, 2))
    records = [{"forward_pass_id": 1, "global_physical_count": torch.from_numpy(doubled)}]
    file = saved(
        tmp_path / "r.pt", {"records": records, "last_physical_to_logical_map": torch.from_numpy(to)}
    )
    assert np.array_equal(read_recorder(spec, file).profile.counts[0], 2 * counts[1:])


def test_the_recorders_per_token_mode_keeps_phase_and_trace(spec: ModelSpec, tmp_path: Path) -> None:
    ids = torch.full((3, 4, 8), -1, dtype=torch.int32)
    ids[1:, :, :2] = torch.tensor([[[0, 1], [1, 2], [2, 3], [3, 4]], [[4, 5], [5, 6], [6, 7], [7, 0]]])
    records = [
        {"topk_ids_of_layer": ids, "forward_mode": 1},
        {"topk_ids_of_layer": ids[:, :1], "forward_mode": 2},
    ]
    found = read_recorder(spec, saved(tmp_path / "r.pt", {"records": records})).profile
    assert found.tokens.tolist() == [4, 1] and found.trace is not None and found.trace.tokens == 5
    assert found.trace.phases.tolist() == [0, 0, 0, 0, 1] and not found.trace.ranked
    decode = [dict(records[1])]
    only = read_recorder(spec, saved(tmp_path / "d.pt", {"records": decode})).profile
    assert only.decode_token_count == 1 and only.phases_known


def test_kts_activation_stats(spec: ModelSpec, tmp_path: Path) -> None:
    counts = torch.from_numpy(passes().sum(axis=0).astype(np.int64))
    counts[1, 0] += 1
    file = saved(tmp_path / "activation_stats.pt", {"activation_counts": counts, "num_layers": 3})
    found = read_recorder(spec, file)
    assert not found.profile.exact and any("weighs as much as" in note for note in found.notes)
    assert any("estimated" in note for note in found.notes)


def test_code_in_a_file_never_runs(tmp_path: Path, spec: ModelSpec) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    file = saved(tmp_path / "trap.pt", {"logical_count": Trap()})
    with pytest.raises(BadInput, match="more than data"):
        read_recorder(spec, file)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "cut.pt").write_bytes(file.read_bytes()[:50])
    with pytest.raises(BadInput, match="cannot be read"):
        read_recorder(spec, tmp_path / "cut.pt")


def test_what_is_exported_is_what_sglang_reads(spec: ModelSpec, tmp_path: Path) -> None:
    counts = passes()
    profile = read_recorder(
        spec, saved(tmp_path / "r.pt", {"logical_count": torch.from_numpy(counts)})
    ).profile
    write_recorder(profile, tmp_path / "x.pt", layers=3)
    back = load_pt(tmp_path / "x.pt")
    assert back["logical_count"].dtype == torch.int32 and np.array_equal(
        back["logical_count"].numpy(), counts
    )


@pytest.mark.parametrize("kind", ["json", "rows.json", "npz", "npy", "csv", "wide.csv"])
def test_plain_tables(kind: str, spec: ModelSpec, tmp_path: Path) -> None:
    counts = passes().sum(axis=0)[1:].astype(np.int64)
    path = tmp_path / f"counts.{kind}"
    if kind == "json":
        path.write_text(json.dumps({"counts": counts.tolist()}))
    elif kind == "rows.json":
        path.write_text(json.dumps({"1": counts[0].tolist(), "2": counts[1].tolist()}))
    elif kind == "npz":
        np.savez(path, counts=counts)
    elif kind == "npy":
        np.save(path, counts)
    elif kind == "csv":
        rows = [f"{layer + 1},{e},{counts[layer, e]}" for layer in range(2) for e in range(EXPERTS)]
        path.write_text("layer,expert,count\n" + "\n".join(rows))
    else:
        path.write_text("\n".join(",".join(map(str, row)) for row in counts.tolist()))
    assert np.array_equal(read_table(spec, path).profile.counts[0], counts)


def test_an_order_list_keeps_the_order(spec: ModelSpec, tmp_path: Path) -> None:
    order = [[layer, expert] for expert in range(EXPERTS) for layer in (2, 1)]
    (tmp_path / "order.json").write_text(json.dumps(order))
    found = read_table(spec, tmp_path / "order.json")
    counts = found.profile.counts[0]
    assert counts[1, 0] > counts[0, 0] > counts[1, 1] and any("no counts" in note for note in found.notes)
    (tmp_path / "twice.json").write_text(json.dumps([[1, 0], [1, 0]]))
    with pytest.raises(BadInput, match="twice"):
        read_table(spec, tmp_path / "twice.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c[:, :, :4], "shape"),
        (lambda c: np.where(c == c.max(), np.nan, c.astype(float)), "NaN"),
        (lambda c: c - 1, "negative"),
        (lambda c: c * 0.5 + 0.25, "fractional"),
        (lambda c: c * 0, "no count above 0"),
        (lambda c: c + 1, "which is dense"),
    ],
)
def test_damaged_and_foreign_counts_are_refused(
    change: Any, words: str, spec: ModelSpec, tmp_path: Path
) -> None:
    np.save(tmp_path / "c.npy", change(passes()))
    with pytest.raises(BadInput, match=words):
        read_table(spec, tmp_path / "c.npy")


def gguf(tensors: dict[str, np.ndarray], kind: int = 0) -> bytes:
    """A GGUF file in llama.cpp's layout with float32 tensors."""

    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    pairs = text("general.type") + struct.pack("<I", 8) + text("imatrix")
    pairs += text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text("wiki.txt")
    body, infos = b"", b""
    for name, values in tensors.items():
        infos += (
            text(name)
            + struct.pack("<I", 2)
            + struct.pack("<QQ", 1, len(values))
            + struct.pack("<IQ", kind, len(body))
        )
        body += values.astype("<f4").tobytes()
        body += b"\0" * (-len(body) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2) + pairs + infos
    return head + b"\0" * (-len(head) % 32) + body


def imatrix() -> dict[str, np.ndarray]:
    counts = passes().sum(axis=0)
    counts[1, int(counts[1].argmin())] = 0
    return {
        f"blk.{layer}.ffn_{name}_exps.weight.{end}": counts[layer].astype(np.float32)
        for layer in (1, 2)
        for name in ("gate", "up", "down")
        for end in ("counts", "in_sum2")
    }


def test_imatrix_counts_are_a_prompt_profile(spec: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "i.gguf").write_bytes(gguf(imatrix()))
    found = read_imatrix(spec, tmp_path / "i.gguf")
    assert found.profile.layers == (1, 2) and (found.profile.counts[0, 0] == 0).sum() >= 1
    assert found.profile.phases_known and any("prompts alone" in note for note in found.notes)
    assert any("wiki.txt" in note for note in found.notes)


def test_imatrix_of_the_old_form_of_other_models_or_cut_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    for data, words in (
        (b"\x02\0\0\0legacy", "no GGUF"),
        (gguf(imatrix())[:-20], "cut off"),
        (gguf({"blk.0.attn_q.weight.counts": np.ones(1)}), "no expert counts"),
        (gguf({name: row[:4] for name, row in imatrix().items()}), "x \\[4\\] experts"),
        (gguf({name: row for name, row in imatrix().items() if "blk.1" in name}), "2 MoE layers"),
        (gguf(imatrix(), kind=1), "type 1"),
    ):
        path.write_bytes(data)
        with pytest.raises(BadInput, match=words):
            read_imatrix(spec, path)
