"""What a profile says about itself, on counts whose answers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktplan.profile import ActivationProfile
from ktplan.profile.page import page
from ktplan.profile.pictures import save_overview, save_plot
from ktplan.profile.report import layer_use, single_document_mass, warnings


def profile(counts: list[list[list[int]]], top_k: int = 1) -> ActivationProfile:
    table = np.array(counts, np.int64)
    tokens = table[:, 0].sum(axis=1) // top_k
    return ActivationProfile(
        counts=table,
        tokens=tokens,
        document_ids=tuple(map(str, range(len(table)))),
        sources=("a",) * len(table),
        layers=tuple(range(table.shape[1])),
        top_k=top_k,
        fingerprint="sha256:" + "0" * 64,
        model="m",
        family="olmoe",
    )


def test_an_even_layer_and_one_that_uses_a_single_expert() -> None:
    even, single = layer_use(profile([[[10, 10, 10, 10], [40, 0, 0, 0]]]))
    assert (even.used, even.unseen, even.slots) == (4, 0, 40)
    assert even.busiest_shares == (0.25, 0.25, 0.5)
    assert even.entropy == pytest.approx(1.0) and even.busiest_over_mean == 1.0
    assert (single.used, single.unseen) == (1, 3)
    assert single.entropy == 0.0 and single.busiest_over_mean == 4.0 and single.busiest_shares[0] == 1.0


def test_unseen_mass_is_the_share_of_singletons() -> None:
    (row,) = layer_use(profile([[[97, 1, 1, 1, 0, 0, 0, 0]]]))
    assert row.unseen_mass == 0.03


def test_experts_of_a_single_document_are_weighed() -> None:
    made = profile([[[6, 4, 0, 0]], [[6, 0, 4, 0]]])
    assert single_document_mass(made) == 0.4
    assert any("a single document chose" in text for text in warnings(made))


def test_warnings_name_the_reason_and_an_ample_profile_has_none() -> None:
    assert any(
        "Good-Turing" in text for text in warnings(profile([[[9, 1, 0, 0]], [[9, 1, 0, 0]], [[5, 5, 1, 0]]]))
    )
    assert any("one document only" in text for text in warnings(profile([[[100, 100, 100, 100]]])))
    assert any("are few" in text for text in warnings(profile([[[10, 10, 10, 10]], [[10, 10, 10, 10]]])))
    assert warnings(profile([[[100, 100, 100, 100]], [[100, 100, 100, 100]]])) == []


@pytest.mark.parametrize(("layers", "experts"), [(1, 4), (4, 16), (61, 256)])
def test_the_heat_map_is_a_picture_that_grows_with_the_model(
    tmp_path: Path, layers: int, experts: int
) -> None:
    draw = np.random.default_rng(0)
    counts = draw.multinomial(4000, draw.dirichlet(np.full(experts, 0.3)), size=(1, layers))
    save_plot(profile(counts.tolist()), tmp_path / "p.png")
    data = (tmp_path / "p.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    # At least two pixels a cell either way, and no larger than a screen can show.
    assert 2 * experts <= width <= 3000 and 2 * layers <= height <= 2000


@pytest.mark.parametrize("save", [save_plot, save_overview])
def test_the_same_profile_gives_the_same_picture(tmp_path: Path, save: Any) -> None:
    made = profile([[[10, 0, 3, 1]], [[2, 5, 0, 1]]])
    save(made, tmp_path / "a.png")
    save(made, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_page_has_every_part_and_needs_nothing_else() -> None:
    made = profile([[[10, 2, 3, 1]], [[2, 5, 4, 1]], [[9, 2, 3, 2]], [[2, 9, 4, 1]]])
    text = page(replace(made, datasets=("a", "b", "a", "b")))
    assert text.count("data:image/png") == 3 and "http" not in text and "<script" not in text
    for word in (
        "Use of each expert",
        "What placements serve",
        "From one data set to another",
        "unseen mass",
        "entropy",
    ):
        assert word in text, word
    # The matrix is a table, too: a row and a column for each data set.
    assert "<td>a</td>" in text and "<th>b</th>" in text
