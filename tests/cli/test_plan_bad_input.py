"""What a user may get wrong with profile and place: one line, both sides named, a remedy; nothing is left behind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Cli = Callable[..., Any]


def counts(path: Path, table: Any) -> Path:
    np.save(path, np.asarray(table))
    return path


def spoiled(value: float) -> Any:
    table = np.full((4, 16), 10.0)
    table[2, 5] = value
    return table


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (spoiled(float("nan")), ["1 counts that are NaN or infinite"]),
        (spoiled(-3), ["negative count at [0, 2, 5]"]),
        (np.ones((3, 16)), ["[1, 3, 16]", "4 MoE layers (4 in all) x 16 experts"]),
    ],
)
def test_counts_that_cannot_be(cli: Cli, tmp_path: Path, table: Any, words: list[str]) -> None:
    source = counts(tmp_path / "counts.npy", table)
    refused = cli("place", "tiny", "--profile", source, "--ratio", "0.3", "-o", tmp_path / "plan.json")
    refused.refused(4, "counts.npy", "hint:", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["counts.npy"]


def test_a_dense_model_is_told_so(cli: Cli, tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    (tmp_path / "a.txt").write_text("some text")
    for command in (
        ("profile", tmp_path / "dense", "--dataset", tmp_path / "a.txt", "-o", tmp_path / "p.safetensors"),
        (
            "place",
            tmp_path / "dense",
            "--strategy",
            "uniform",
            "--ratio",
            "0.5",
            "-o",
            tmp_path / "plan.json",
        ),
    ):
        cli(*command).refused(4, "experts", "hint:")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "dense"]


def test_a_corpus_that_is_too_small_says_what_was_never_seen_and_how_much_to_give(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("Call me Ishmael.")
    profile = tmp_path / "p.safetensors"
    told = cli("profile", "tiny", "--dataset", tmp_path / "a.txt", "--no-plot", "-o", profile).ok()
    assert "further choices would be experts that this text never reached (Good-Turing)" in told.stderr
    assert "profile 400 tokens or more" in told.stderr  # 50 choices for each of 16 experts, two a token
    placed = cli("place", "tiny", "--profile", profile, "--ratio", "0.3", "-o", tmp_path / "plan.json").ok()
    assert "one document: its hit rate is in-sample" in placed.stderr
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    cli("profile", "tiny", "--dataset", tmp_path / "b.jsonl", "-o", tmp_path / "q.safetensors").refused(
        4, "b.jsonl has no usable document"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--gpu-memory", "-1GiB"), 2, ["-1GiB"]),
        (("--card-memory", "100MiB"), 3, ["margin (1.0", "--card-memory gives 100 MiB", "give ", " more"]),
        (
            ("--card-memory", "1GiB", "--card-memory", "1GiB"),
            3,
            ["does not fit on 2 GPUs", "dense weights", "more"],
        ),
        (("--ratio", "0.3", "--what-if", "RTX 9999, Xeon 8x DDR5-4800"), 2, ["RTX 9999", "known are"]),
    ],
)
def test_budgets_and_machines_that_cannot_be(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], code: int, words: list[str]
) -> None:
    output = tmp_path / "plan.json"
    cli("place", "tiny", "--strategy", "uniform", *arguments, "-o", output).refused(code, *words)
    assert not output.exists()


def test_the_same_inputs_give_the_same_files_whatever_python_hashes(cli: Cli, tmp_path: Path) -> None:
    """Profile, plan, rules and page from processes with other hash seeds and other numbers of threads."""
    (tmp_path / "a.jsonl").write_text(
        "".join(
            json.dumps({"text": f"Document {n} is about {n * n} ships.", "kind": "ab"[n % 2]}) + "\n"
            for n in range(12)
        )
    )
    made = []
    for seed, threads in (("1", "1"), ("77", "2")):
        folder = tmp_path / seed
        folder.mkdir()
        env = {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads}
        profile, plan = folder / "p.safetensors", folder / "plan.json"
        text = ("--dataset", tmp_path / "a.jsonl", "--group-by", "kind")
        cli("profile", "tiny", *text, "--trace", "-o", profile, env=env).ok()
        cli(
            "place",
            "tiny",
            "--profile",
            profile,
            "--strategy",
            "robust",
            "--ratio",
            "0.4",
            "-o",
            plan,
            env=env,
        ).ok()
        cli("emit", plan, "-o", folder / "rules.yaml", env=env).ok()
        cli("profile", "report", profile, "-o", folder / "p.html", env=env).ok()
        made.append(
            {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
        )
    assert set(made[0]) == {"p.safetensors", "p.png", "plan.json", "rules.yaml", "p.html"}
    assert made[0] == made[1]
