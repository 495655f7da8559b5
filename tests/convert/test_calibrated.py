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


def test_what_is_wanted_of_a_matrix_are_outputs_and_not_its_weights() -> None:
    """Its inputs changed (rounded gate and up), its outputs should not: least squares finds what makes up for it."""
    from ktplan.convert.calibrated import Wanted

    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(24, 16, generator=generator)
    before = torch.randn(400, 16, generator=generator)
    inputs = before @ torch.diag(torch.linspace(0.8, 1.1, 16)) + 0.05 * torch.randn(
        400, 16, generator=generator
    )
    wanted = Wanted(16, 24)
    for some in (slice(0, 150), slice(150, 400)):
        wanted.add(inputs[some], before[some] @ weight.T)
    best = torch.linalg.lstsq(inputs, before @ weight.T).solution.T
    torch.testing.assert_close(wanted.best_near(weight, 0.0), best, rtol=1e-3, atol=1e-3)
    exact = float((inputs @ weight.T - before @ weight.T).square().sum() / (before @ weight.T).square().sum())
    assert wanted.error(weight) == pytest.approx(exact, rel=1e-3)
    assert wanted.error(best) < 0.2 * wanted.error(weight)
    # A prior of other tokens counts as so many; what was never seen changes nothing.
    torch.testing.assert_close(
        Wanted(16, 24).with_prior(wanted, 40.0).best_near(weight, 0.0), best, rtol=1e-3, atol=1e-3
    )
    assert (
        bool((Wanted(16, 24).best_near(weight, 0.05) == weight).all()) and Wanted(16, 24).error(weight) == 0.0
    )


def test_experts_of_a_layer_make_up_for_each_other(tiny: Path, text: Any) -> None:
    """The layer's output on held-out text is nearer than half of what kt-kernel's rounding leaves of it."""
    from transformers.activations import ACT2FN

    from ktplan.convert.calibrate import LayerByLayer
    from ktplan.convert.calibrated import CalibrationText, RowExperts
    from ktplan.progress import SILENT
    from ktplan.quant import dequantize, quantize_rows

    source = open_source(tiny)
    enough = CalibrationText(corpus=text.corpus, max_tokens=6144)
    with torch.no_grad():
        run = LayerByLayer(tiny, source, enough.read(source, SILENT))
        with run.loaded(0):
            routing = run.route(0)
        experts = RowExperts(run, routing, ACT2FN["silu"], 1, Scheme(4, rounding="gptq"), enough.settings)
        lacking = {"kt": torch.zeros(len(run.held_out), 256), "gptq": torch.zeros(len(run.held_out), 256)}
        for expert in range(16):
            exact = source.expert(0, expert)
            fitted = [one.rounded.weight() for one in experts.fit(expert, exact)]
            nearest_ = [
                torch.from_numpy(dequantize(quantize_rows(m, Scheme(4, rounding="kt")))) for m in exact
            ]
            rows, shares = routing.rows[expert], routing.weights[expert][:, None]
            inputs = run.inputs.read(rows)
            whole = [torch.from_numpy(np.array(m)) for m in exact]

            def output(
                gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, inputs: torch.Tensor = inputs
            ) -> Any:
                return (torch.nn.functional.silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T

            lacking["kt"][rows] += shares * (output(*whole) - output(*nearest_))
            lacking["gptq"][rows] += shares * (output(*whole) - output(*fitted[0].chunk(2), fitted[1]))
    held = run.held_out
    torch.testing.assert_close(experts._lacking, lacking["gptq"], rtol=1e-3, atol=1e-5)
    assert float(lacking["gptq"][held].norm()) < 0.55 * float(lacking["kt"][held].norm())


def test_padded_experts_are_fitted_too(tiny: Path, text: Any, tmp_path: Path) -> None:
    """96 columns filled up to 128, whose zeros stay zeros; a stopped run goes on to the same bytes."""
    import shutil

    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from ktplan.convert import calibrated

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, intermediate_size=96,
    )  # fmt: skip
    model = tmp_path / "model"
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, model)
    source, scheme = open_source(model), Scheme(4, rounding="gptq")
    made = convert_cpu(source, tmp_path / "store", scheme, calibration=text).manifest
    assert (made.intermediate, made.padding) == (128, 32)
    store = ExpertStore.open(tmp_path / "store")
    assert not store.quantized(1, 2, 0)["down"].levels[:, 96:].any()
    for given, found in zip(source.expert(1, 2), store.expert(1, 2), strict=True):
        assert np.linalg.norm(found - given) < 0.3 * np.linalg.norm(given)

    real = calibrated._round

    def stop(source: Any, experts: Any, scheme: Any, shape: Any, sink: Any, layer: int, expert: int) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return real(source, experts, scheme, shape, sink, layer, expert)

    calibrated._round = stop
    try:
        with pytest.raises(Exception, match="stopped after 1 of 2 layers"):
            convert_cpu(source, tmp_path / "again", scheme, calibration=text)
    finally:
        calibrated._round = real
    assert convert_cpu(source, tmp_path / "again", scheme, calibration=text).resumed == 1
    assert digests(tmp_path / "again") == digests(tmp_path / "store")


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


def test_a_profile_stands_for_the_texts_that_it_was_recorded_on(
    tiny: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    text = tmp_path / "letters.jsonl"
    text.write_text("".join(f'{{"body": "The ship was lost, and {n} men with it."}}\n' for n in range(8)))
    profile = tmp_path / "p.safetensors"
    cli("profile", "tiny", "--dataset", text, "--text-field", "body", "-o", profile, "-q").ok()
    given = ("--rounding", "gptq", "--bits", "4", "--max-tokens", "256", "-q", "--calibration")
    cli("convert-cpu", "tiny", "-o", tmp_path / "a", *given, profile).ok()
    store = ExpertStore.open(tmp_path / "a")
    assert store.manifest.output_errors

    text.rename(tmp_path / "elsewhere.jsonl")
    refused = cli("convert-cpu", "tiny", "-o", tmp_path / "b", *given, profile)
    refused.refused(4, f"recorded on letters.jsonl: it is in none of {tmp_path}", "the texts themselves")
    text.write_text('{"body": "another"}\n')
    cli("convert-cpu", "tiny", "-o", tmp_path / "b", *given, profile).refused(
        4, "letters.jsonl is another text by now"
    )
    damaged = tmp_path / "d.safetensors"
    damaged.touch()
    cli("convert-cpu", "tiny", "-o", tmp_path / "b", *given, damaged).refused(4, "d.safetensors")
    assert not (tmp_path / "b").exists()


def test_texts_of_a_profile_are_the_embedded_ones_too(tiny: Path, tmp_path: Path) -> None:
    from ktplan.artifact import sha256_file
    from ktplan.errors import BadInput
    from ktplan.model.embedded import corpus_files
    from ktplan.profile import ActivationProfile, CorpusFile
    from ktplan.profile.texts import texts_of

    files = corpus_files("profile")[:2]

    def profile(named: tuple[CorpusFile, ...]) -> ActivationProfile:
        return ActivationProfile(
            counts=np.ones((1, 1, 2), np.int64), tokens=np.array([2]), document_ids=("d",), sources=("s",),
            layers=(0,), top_k=1, fingerprint="", model="m", family="f", files=named,
        )  # fmt: skip

    named = tuple(CorpusFile(file.name, sha256_file(file)) for file in files)
    assert texts_of(profile(named), [tmp_path]) == files
    with pytest.raises(BadInput, match="not on which texts"):
        texts_of(profile(()), [tmp_path])
    with pytest.raises(BadInput, match=r"english\.profile\.jsonl is another text by now"):
        texts_of(profile((CorpusFile(files[0].name, "sha256:" + "0" * 64),)), [tmp_path])
