"""Machines: figures with an origin, descriptions in words, and the costs that follow from them."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from ktplan.errors import BadInput, BadUsage
from ktplan.placement.cost import Costs, Sizes, costs
from ktplan.placement.known import CPUS, GPUS, describe, reference
from ktplan.placement.machine import Figure, HardwareSpec


def test_words_become_a_machine() -> None:
    machine = describe("2x RTX 4090, RTX 5090 32GiB, 2x Xeon 8x DDR5-4800 512GiB")
    assert [gpu.memory >> 30 for gpu in machine.gpus] == [24, 24, 32]
    assert len(machine.cpu_bandwidth) == 2
    assert machine.total_cpu_bandwidth == pytest.approx(2 * 8 * 4800e6 * 8 * 0.70)
    assert {figure.origin for figure in machine.cpu_bandwidth} == {"given"}
    assert all(figure.low < figure.value < figure.high for figure in machine.cpu_bandwidth)


@pytest.mark.parametrize(
    ("text", "words"),
    [("RTX 9999, Xeon 8x DDR5-4800", "RTX 9999"), ("RTX 4090", "no CPU"), ("2x Xeon", "no memory")],
)
def test_what_is_not_understood_is_named(text: str, words: str) -> None:
    with pytest.raises(BadUsage, match=words):
        describe(text)


def test_every_row_of_the_table_has_a_source_and_a_date() -> None:
    for name, row in {**GPUS, **CPUS}.items():
        assert row.source.url.startswith("https://"), name
        assert date(2026, 1, 1) <= date.fromisoformat(row.source.date) <= date(2027, 1, 1), name
    for name, gpu in GPUS.items():
        # What no card of that kind exceeds; halves and doubles of a wrong column would.
        assert 8 <= gpu.memory <= 200 and 15 <= gpu.bandwidth / gpu.memory <= 60, name
        assert 15 <= gpu.pcie <= 63 and 60 <= 1000 * gpu.tflops / gpu.bandwidth <= 520, name


def test_a_described_card_says_where_its_figures_are_from() -> None:
    card = describe("RTX 4090, Xeon 8x DDR5-4800").gpus[0]
    for figure in (card.bandwidth, card.copy, card.flops):
        assert GPUS["RTX 4090"].source.url in figure.how and GPUS["RTX 4090"].source.date in figure.how


def test_the_file_comes_back_and_damage_is_named(tmp_path: Path) -> None:
    machine = describe("RTX 4090, Xeon 8x DDR5-4800")
    path = tmp_path / "hardware.json"
    machine.save(path)
    assert HardwareSpec.load(path) == machine
    for spoil in ("bandwidth", "hop"):
        body = json.loads(path.read_text())
        if spoil == "hop":
            body["hop"]["origin"] = "guessed"
        else:
            body["cpu"]["bandwidth"][0]["high"] = float("nan")
        (tmp_path / "bad.json").write_text(json.dumps(body))
        with pytest.raises(BadInput, match="bad.json"):
            HardwareSpec.load(tmp_path / "bad.json")


def test_a_measured_figure_is_the_median_with_its_spread() -> None:
    figure = Figure.measured([5.0, 1.0, 3.0, 2.0, 4.0], "x")
    assert (figure.low, figure.value, figure.high) == (1.0, 3.0, 5.0)


def test_bytes_over_bandwidth_and_the_published_fit() -> None:
    sizes = Sizes(cpu_expert=3_145_728, gpu_expert=3_145_728, layers=48, dense=10**9, head=10**8)
    found = costs(reference(), sizes)
    assert found.cpu == pytest.approx(14.8e-6, rel=0.01) and found.hop == pytest.approx(45e-6)


def test_a_layer_takes_the_longer_side_and_no_hop_without_cpu_experts() -> None:
    found = Costs(hop=45, cpu=15, gpu=30, attention=0, head=0)
    assert found.table(2).tolist() == [60, 60, 75]
    assert found.experts_time(np.array([0]), np.array([0])).tolist() == [0]


def test_a_measured_curve_is_used_and_goes_on_straight() -> None:
    found = Costs(hop=1, cpu=2, gpu=0, attention=0, head=0, cpu_curve=(0.0, 5.0, 6.0))
    assert found.cpu_time(np.array([0, 1, 2, 4])).tolist() == [0, 6, 7, 11]
