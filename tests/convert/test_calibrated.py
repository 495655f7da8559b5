"""`--rounding gptq`: ordinary AMXINT4 / AMXINT8 files whose experts change what comes out of them least."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktplan.convert.cpu import convert_cpu, plan_cpu
from ktplan.errors import BadUsage
from ktplan.model import open_source
from ktplan.quant import Scheme
from ktplan.quant.gptq import Effort
from ktplan.quant.groups import narrow, widen
from ktplan.quant.row_feedback import Grid, nearest, with_feedback
from ktplan.store import ExpertStore

TOKENS = 1024


@pytest.fixture(autouse=True)
def few_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text() -> Any:
    from ktplan.convert.calibrated import CalibrationText
    from ktplan.convert.expert_rounding import Calibration
    from ktplan.model.embedded import corpus_files
    from ktplan.profile import read_corpus

    corpus = read_corpus(corpus_files("profile")[:1])
    quick = Calibration(effort=Effort(polish=0))
    return CalibrationText(corpus=corpus, max_tokens=TOKENS, settings=quick)


@pytest.fixture(scope="module")
def made(tiny: Path, text: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "gptq"
    torch.set_num_threads(1)
    convert_cpu(open_source(tiny), folder, Scheme(4, rounding="gptq"), calibration=text)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def correlated(rows: int = 64, inputs: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    seen = torch.randn(2000, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return torch.randn(rows, inputs, generator=generator), seen.T @ seen / len(seen)


def output_error(weight: torch.Tensor, rounded: Any, moments: torch.Tensor) -> float:
    rest = weight - rounded.weight()
    return float(((rest @ moments) * rest).sum() / ((weight @ moments) * weight).sum()) ** 0.5


@pytest.mark.parametrize("top", [7, 127])
@pytest.mark.parametrize("parts", [1, 2])
def test_feedback_beats_the_nearest_levels_and_stays_in_the_format(parts: int, top: int) -> None:
    weight, moments = correlated()
    grid = Grid.of_rows(top, parts)
    plain = nearest(weight, moments.diagonal(), grid)
    fitted = with_feedback(weight, moments, grid, Effort())
    assert output_error(weight, fitted, moments) < 0.75 * output_error(weight, plain, moments)
    assert fitted.step.shape == (64, parts) and int(fitted.levels.abs().max()) <= top
    assert bool((fitted.step > 0).all())


@pytest.mark.parametrize("group", [32, 64, 128])
def test_feedback_works_with_groups_whose_scales_are_bfloat16(group: int) -> None:
    weight, moments = correlated(inputs=256)
    grid = Grid.of_groups(256, group)
    plain = nearest(weight, moments.diagonal(), grid)
    unpolished = with_feedback(weight, moments, grid, Effort(polish=0))
    fitted = with_feedback(weight, moments, grid, Effort())
    errors = [output_error(weight, rounded, moments) for rounded in (plain, unpolished, fitted)]
    assert errors[1] < 0.75 * errors[0] and errors[2] < errors[1]
    assert fitted.step.shape == (64, 256 // group)
    assert int(fitted.levels.min()) == -8 and int(fitted.levels.max()) == 7
    step = fitted.step.numpy()
    assert np.array_equal(widen(narrow(step)), step)
    assert (step < 0).any() and (step > 0).any()


def test_inputs_and_rows_that_are_never_used_do_no_harm() -> None:
    weight, moments = correlated()
    moments[:, 5] = moments[5, :] = 0
    weight[7] = 0
    fitted = with_feedback(weight, moments, Grid.of_rows(7, 1), Effort())
    assert bool(fitted.weight().isfinite().all()) and not fitted.levels[7].any()
    # An input that calibration never saw keeps its weight, rounded.
    rest = (weight - fitted.weight())[:, 5].abs()
    assert bool(
        (rest <= fitted.step[:, 0] * 0.51 + (weight[:, 5].abs() - 7 * fitted.step[:, 0]).clamp_min(0)).all()
    )


def test_the_store_is_an_ordinary_one_with_output_errors_beside_weight_errors(made: Path, tiny: Path) -> None:
    store = ExpertStore.open(made)
    store.verify()
    manifest = store.manifest
    assert (manifest.rounding, manifest.layout, manifest.scheme) == ("gptq", "amx-int4-v1", "int4-row")
    assert set(manifest.output_errors) == {0, 1, 2, 3}
    exact = open_source(tiny).expert(1, 3)
    for projection, given, found in zip(("gate", "up", "down"), exact, store.expert(1, 3), strict=True):
        recorded = manifest.errors[1][projection][3]
        assert recorded == pytest.approx(np.linalg.norm(found - given) / np.linalg.norm(given), rel=2e-3)
        # Weights are further away than with searched scales, outputs nearer.
        assert manifest.output_errors[1][projection][3] < recorded


def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    made: Path, tiny: Path, text: Any, tmp_path: Path
) -> None:
    from ktplan.convert import calibrated

    real = calibrated._round

    def stop(source: Any, experts: Any, scheme: Any, shape: Any, sink: Any, layer: int, expert: int) -> Any:
        if (layer, expert) == (2, 3):
            raise KeyboardInterrupt
        return real(source, experts, scheme, shape, sink, layer, expert)

    out = tmp_path / "store"
    calibrated._round = stop
    try:
        with pytest.raises(Exception, match="stopped after 2 of 4 layers"):
            convert_cpu(open_source(tiny), out, Scheme(4, rounding="gptq"), calibration=text)
    finally:
        calibrated._round = real
    report = convert_cpu(open_source(tiny), out, Scheme(4, rounding="gptq"), calibration=text)
    assert report.resumed == 2
    assert digests(out) == digests(made)


def test_text_and_rounding_go_together(
    tiny: Path, text: Any, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    for scheme, calibration in ((Scheme(4, rounding="gptq"), None), (Scheme(4), text)):
        with pytest.raises(BadUsage, match="needs calibration text"):
            plan_cpu(open_source(tiny), tmp_path / "store", scheme, calibration=calibration)
    profile = tmp_path / "profile.safetensors"
    profile.touch()
    arguments = (
        "convert-cpu",
        "tiny",
        "-o",
        tmp_path / "store",
        "--rounding",
        "gptq",
        "--calibration",
        profile,
    )
    cli(*arguments).refused(2, "not what their inputs are")
