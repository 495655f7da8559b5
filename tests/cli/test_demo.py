"""The demo is the whole chain, run by its own commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def demo(cli: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("demo") / "out"
    return cli("demo", "-o", folder, "--tokens", 2048, "--json").ok().json()


def test_damage_grows_as_bits_shrink(demo: Any) -> None:
    formats = demo["formats"]
    assert set(formats) == {"bf16", "INT8", "INT4", "INT4-row", "INT4-kt", "INT2"}
    kl = {name: row["kl"] for name, row in formats.items() if name != "bf16"}
    assert kl["INT8"] < kl["INT4"] < kl["INT4-row"] < kl["INT4-kt"] < kl["INT2"]
    assert formats["INT8"]["top1_agreement"] >= 0.99
    assert formats["INT2"]["perplexity"] > 1.1 * formats["bf16"]["perplexity"]


def test_frequency_serves_most_on_text_it_has_not_seen(demo: Any) -> None:
    for ratio in (0.1, 0.3, 0.5):
        rates = {row["strategy"]: row["test"] for row in demo["hit_rates"] if row["ratio"] == ratio}
        assert rates["frequency"] > max(rates["uniform"], rates["random"], rates["front-loading"]) + 0.03


def test_every_file_of_the_chain_is_there(demo: Any) -> None:
    folder = Path(demo["folder"])
    for name in (
        "INT8/store.json",
        "profile.safetensors",
        "profile.png",
        "plan.json",
        "rules.yaml",
        "sglang-kt/counts.pt",
    ):
        assert (folder / name).is_file(), name
    assert any((folder / "gpu-w4").iterdir())


def test_the_placed_model_writes_text(demo: Any) -> None:
    assert len(demo["sample"]["text"].split()) > 10


def test_a_folder_that_is_not_a_demos_is_left_alone(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    cli("demo", "-o", tmp_path).refused(2, "not from a demo")
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]
