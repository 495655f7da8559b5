"""`ktplan convert-gpu` from end to end: what is in the folder, that it is right, what an early end leaves behind."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ktplan import network
from ktplan.convert.expert_rounding import Calibration, choose
from ktplan.convert.gptq_folder import unquantized
from ktplan.convert.gpu import GptqCheckpoint, GpuOptions, convert_gpu, plan_gpu
from ktplan.errors import BadInput, BadUsage, DoesNotFit, MachineLacks
from ktplan.experts import ExpertId, ExpertSet
from ktplan.model import open_source
from ktplan.model.embedded import corpus_files
from ktplan.profile import Corpus, read_corpus
from ktplan.quant.gptq import Effort, SecondMoments, output_error, shrink
from ktplan.quant.gptq_format import GptqScheme

FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "olmoe"]
EFFORT = Effort()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text() -> Corpus:
    return read_corpus(tuple(corpus_files("profile")))


@pytest.fixture(scope="module")
def w4(tiny: Path, text: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The embedded model at 4 bits, with its report."""
    out = tmp_path_factory.mktemp("w4") / "model"
    return out, convert_gpu(open_source(tiny), out, GpuOptions(bits=4, max_tokens=6_000), corpus=text)


@pytest.fixture(scope="module")
def bytes_model(
    family_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A tiny random model of a family with a tokenizer of bytes; `change` may edit its tensors."""

    def make(
        family: str, fused: bool = False, change: Callable[[dict[str, torch.Tensor]], None] | None = None
    ) -> Path:
        folder = tmp_path_factory.mktemp("bytes") / family
        shutil.copytree(family_checkpoint(family, fused), folder)
        write_byte_tokenizer(folder)
        if change:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


def write_byte_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    file = tmp_path_factory.mktemp("text") / "lines.jsonl"
    rows = [
        f"line {n}: the quick brown fox jumps over {n * n} lazy dogs, again and again." for n in range(24)
    ]
    file.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    return read_corpus([file])


SMALL = GpuOptions(bits=4, max_tokens=800, chunk=64)


def raw(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a folder: type, shape, bytes."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor = tensors.get_tensor(name)
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = (str(tensor.dtype), tuple(tensor.shape), data)
    return found


def put_experts(model: Any, checkpoint: GptqCheckpoint) -> Any:
    """Replace the experts of a transformers model by those of a GPTQ checkpoint."""
    for layer, (_, module) in network.experts_modules(model).items():
        for expert in checkpoint.experts.layer(layer):
            weights = checkpoint.expert(layer, expert)
            gate_up = np.concatenate([weights.gate, weights.up])
            module.gate_up_proj.data[expert] = torch.from_numpy(gate_up).to(module.gate_up_proj.dtype)
            module.down_proj.data[expert] = torch.from_numpy(weights.down).to(module.down_proj.dtype)
    return model


def divergence(reference: Any, other: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        wanted = reference(ids).logits.log_softmax(-1)
        found = other(ids).logits.log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.fixture(scope="module")
def test_ids(tiny: Path) -> torch.Tensor:
    tokenizer = network.tokenizer(tiny)
    sequences = []
    for file in corpus_files("test"):
        document = json.loads(file.read_text().splitlines()[0])["text"]
        sequences.append(tokenizer(document, verbose=False).input_ids[:256])
    return torch.tensor([ids for ids in sequences if len(ids) == 256])


# What is in the folder.


def test_everything_but_the_experts_is_copied_to_the_byte(tiny: Path, w4: tuple[Path, Any]) -> None:
    before, after = raw(tiny), raw(w4[0])
    dense = {name for name in before if ".experts." not in name}
    assert {name for name in after if ".experts." not in name} == dense
    for name in dense:
        assert after[name] == before[name]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (w4[0] / name).read_bytes() == (tiny / name).read_bytes()


def test_experts_are_gptq_tensors_of_the_first_version(w4: tuple[Path, Any]) -> None:
    tensors = raw(w4[0])
    stem = "model.layers.3.mlp.experts.15"
    for projection, outputs, inputs in (
        ("gate_proj", 128, 256),
        ("up_proj", 128, 256),
        ("down_proj", 256, 128),
    ):
        own = {
            name: tensors[f"{stem}.{projection}.{name}"] for name in ("qweight", "qzeros", "scales", "g_idx")
        }
        groups = inputs // 128
        assert own["qweight"][:2] == ("torch.int32", (inputs // 8, outputs))
        assert own["qzeros"] == ("torch.int32", (groups, outputs // 8), b"\x77" * (groups * outputs // 2))
        assert own["scales"][:2] == ("torch.float16", (groups, outputs))
        assert np.array_equal(np.frombuffer(own["g_idx"][2], np.int32), np.arange(inputs) // 128)
        assert f"{stem}.{projection}.weight" not in tensors


def test_the_index_places_every_tensor(w4: tuple[Path, Any]) -> None:
    index = json.loads((w4[0] / "model.safetensors.index.json").read_text())
    tensors = raw(w4[0])
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(w4[0] / file, "pt") as held:
            assert name in held.keys()  # noqa: SIM118


def test_config_says_what_other_engines_need(tiny: Path, w4: tuple[Path, Any]) -> None:
    config = json.loads((w4[0] / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == json.loads((tiny / "config.json").read_text())
    assert settings == json.loads((w4[0] / "quantize_config.json").read_text())
    wanted = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
    }
    assert wanted.items() <= settings.items()
    assert settings["sym"] is True
    assert settings["meta"]["quantizer"][0].startswith("ktplan:")


def test_the_record_names_the_source_and_every_file(tiny: Path, w4: tuple[Path, Any]) -> None:
    record = json.loads((w4[0] / "gpu-experts.json").read_text())
    assert record["kind"] == "ktplan-gpu-experts"
    assert record["fingerprint"] == open_source(tiny).spec.fingerprint
    assert record["complete"] is True
    assert record["experts"] == {str(layer): "0-15" for layer in range(4)}
    for file in record["files"]:
        assert file["sha256"] == "sha256:" + hashlib.sha256((w4[0] / file["name"]).read_bytes()).hexdigest()
    assert len(record["results"]) == 64
    assert not list(w4[0].glob("*.part"))
    assert not list(w4[0].glob(".*"))


def test_the_plan_foretells_the_size(tiny: Path, w4: tuple[Path, Any], tmp_path: Path) -> None:
    plan = plan_gpu(open_source(tiny), tmp_path / "x", GpuOptions(bits=4))
    written = sum(file.stat().st_size for file in w4[0].iterdir())
    assert written <= plan.bytes_out < 1.2 * written


# That it is right.


def test_no_expert_is_worse_than_rounded_to_nearest(w4: tuple[Path, Any]) -> None:
    report = w4[1]
    assert len(report.experts) == 64
    for row in report.experts:
        for outcome in (row.gate_up, row.down):
            kept = outcome.gptq_error if outcome.method == "gptq" else outcome.rtn_error
            assert kept <= outcome.rtn_error
    gate_up = [(row.gate_up.gptq_error, row.gate_up.rtn_error) for row in report.experts]
    assert sum(first for first, _ in gate_up) < 0.5 * sum(second for _, second in gate_up)
    assert 0 < report.held_out_tokens < report.tokens <= 6_000


def test_the_model_stays_closer_to_itself_than_rounded_to_nearest(
    tiny: Path, w4: tuple[Path, Any], test_ids: torch.Tensor, tmp_path: Path
) -> None:
    source = open_source(tiny)
    convert_gpu(source, tmp_path / "rtn", GpuOptions(bits=4, method="rtn"))
    convert_gpu(source, tmp_path / "rtn8", GpuOptions(bits=8, method="rtn"))
    reference = network.load_whole(tiny)
    model = network.load_whole(tiny)
    gptq, rtn, eight = (
        divergence(reference, put_experts(model, GptqCheckpoint.open(folder)), test_ids)
        for folder in (w4[0], tmp_path / "rtn", tmp_path / "rtn8")
    )
    assert gptq < 0.8 * rtn
    assert gptq < 0.01
    assert eight < 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_both_layouts(
    family: str, bytes_model: Callable[..., Path], lines: Corpus, tmp_path: Path
) -> None:
    written = {}
    for fused in (False, True):
        source = open_source(bytes_model(family, fused))
        out = tmp_path / f"{fused}"
        report = convert_gpu(source, out, SMALL, corpus=lines)
        checkpoint = GptqCheckpoint.open(out)
        checkpoint.check_model(source.spec)
        assert len(checkpoint.experts) == source.spec.expert_count == len(report.experts)
        layer = source.spec.moe_layers[-1]
        for found, wanted in zip(checkpoint.expert(layer, 5), source.expert(layer, 5), strict=True):
            assert np.linalg.norm(found - wanted) < 0.2 * np.linalg.norm(wanted)
        written[fused] = raw(out)
        assert_exclusions_are_exact(source, report)
    # One tensor an expert, under the published names, whatever the source looked like: the same folder.
    assert written[True] == written[False]


def assert_exclusions_are_exact(source: Any, report: Any) -> None:
    folder = report.plan.folder
    settings = json.loads((report.plan.out / "quantize_config.json").read_text())
    patterns = [re.compile(key.removeprefix("-:")) for key in settings["dynamic"]]
    assert all(key.startswith("-:") for key in settings["dynamic"])

    def excluded(module: str) -> bool:
        return any(pattern.match(module) for pattern in patterns)

    quantized = {name.removesuffix(".qweight") for name in raw(report.plan.out) if name.endswith(".qweight")}
    kept = unquantized(source, folder)
    assert any(name.endswith(".gate") for name in kept)
    assert all(map(excluded, kept))
    assert not any(map(excluded, quantized))
    assert excluded("lm_head")
    assert excluded("model.layers.0.self_attn.qkv_proj") == ("deepseek" not in source.spec.family)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_is_the_whole_model(family: str, family_checkpoint: Callable[..., Path]) -> None:
    from ktplan.convert.calibrate import LayerByLayer, Text
    from ktplan.convert.expert_rounding import LayerExperts

    path = family_checkpoint(family)
    source, generator = open_source(path), torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 256, (length,), generator=generator) for length in (7, 40, 40, 1, 23)]
    text = Text(tuple(tuple(ids.tolist()) for ids in sequences), (False, True, False, False, False), 5)
    run = LayerByLayer(path, source, text)
    chosen = {}
    for layer in range(source.spec.layers):
        with run.loaded(layer), torch.no_grad():
            if layer in source.spec.moe_layers:
                chosen[layer] = run.route(layer)
                experts = LayerExperts(
                    run, chosen[layer], torch.nn.functional.silu, GptqScheme(4), Calibration(effort=EFFORT),
                    torch.device("cpu"),
                )  # fmt: skip
                run.outputs.clear()
                for expert in range(source.spec.experts):
                    experts.give_unrounded(expert, source.expert(layer, expert))
            run.advance(layer)

    order = sorted(range(5), key=lambda number: -len(sequences[number]))
    assert torch.equal(run.held_out, torch.cat([torch.full((len(sequences[n]),), n == 1) for n in order]))
    whole = network.load_whole(path)
    routes: dict[int, list[torch.Tensor]] = {layer: [] for layer in chosen}
    for layer, (_, module) in network.experts_modules(whole).items():
        module.register_forward_pre_hook(lambda module, given, layer=layer: routes[layer].append(given[1]))
    last: list[torch.Tensor] = []
    whole.base_model.norm.register_forward_pre_hook(lambda module, given: last.append(given[0][0]))
    with torch.no_grad():
        for number in order:
            whole(sequences[number][None])
    torch.testing.assert_close(run.boundary.read(slice(None)), torch.cat(last), rtol=1e-4, atol=1e-4)
    for layer, routing in chosen.items():
        ids = torch.cat(routes[layer])
        for expert, rows in enumerate(routing.rows):
            assert torch.equal(rows, (ids == expert).any(dim=1).nonzero().flatten())


def test_activations_on_disk_make_no_difference_to_speak_of(
    bytes_model: Callable[..., Path], lines: Corpus, tmp_path: Path
) -> None:
    source = open_source(bytes_model("qwen3_moe"))
    on_disk = GpuOptions(bits=4, max_tokens=800, chunk=64, buffer_bytes=1000)
    assert plan_gpu(source, tmp_path / "x", on_disk).buffers[1:] == (800 * 128 * 3 * 2, True)
    reports = [
        convert_gpu(source, tmp_path / name, options, corpus=lines)
        for name, options in (("a", SMALL), ("b", on_disk))
    ]
    for first, second in zip(*(report.experts for report in reports), strict=True):
        assert abs(first.tokens - second.tokens) <= 12  # bfloat16 turns some close calls of the router
        assert second.down.gptq_error == pytest.approx(first.down.gptq_error, rel=0.3)
    assert {file.name for file in (tmp_path / "a").iterdir()} == {
        file.name for file in (tmp_path / "b").iterdir()
    }


def test_the_same_input_gives_the_same_bytes(
    bytes_model: Callable[..., Path], lines: Corpus, tmp_path: Path
) -> None:
    source = open_source(bytes_model("qwen3_moe"))
    for name in "ab":
        convert_gpu(source, tmp_path / name, SMALL, corpus=lines)
    assert raw(tmp_path / "a") == raw(tmp_path / "b")


# Experts and inputs that calibration says little about.


def test_unreached_experts_are_in_the_same_format_and_listed(
    bytes_model: Callable[..., Path], lines: Corpus, tmp_path: Path
) -> None:
    def never(tensors: dict[str, torch.Tensor]) -> None:
        # Channel 0 is constant all through the network, so a router's row can use it as a bias.
        tensors["model.embed_tokens.weight"][:, 0] = 8
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor[0] = 0
            if name.endswith("mlp.gate.weight"):
                tensor[:, 0] = 0
                tensor[6:] = 0
                tensor[6:, 0] = -100

    source = open_source(bytes_model("qwen3_moe", change=never))
    report = convert_gpu(source, tmp_path / "a", SMALL, corpus=lines)
    nobodys = {ExpertId(layer, expert) for layer in (0, 2) for expert in (6, 7)}
    assert nobodys <= set(report.unreached)
    row = next(row for row in report.experts if row.id == (0, 7))
    assert row.tokens == 0
    assert row.gate_up.gptq_error <= row.gate_up.rtn_error  # the layer's other tokens say enough
    careful = GpuOptions(
        bits=4, max_tokens=800, chunk=64, calibration=Calibration(effort=EFFORT, least_tokens=1)
    )
    report = convert_gpu(source, tmp_path / "b", careful, corpus=lines)
    row = next(row for row in report.experts if row.id == (0, 7))
    assert (row.gate_up.method, row.down.method) == ("rtn", "rtn")
    assert report.unreached - report.plainly_rounded == ExpertSet()
    for folder in ("a", "b"):
        weights = GptqCheckpoint.open(tmp_path / folder).expert(0, 7)
        for found, wanted in zip(weights, source.expert(0, 7), strict=True):
            assert np.linalg.norm(found - wanted) < 0.2 * np.linalg.norm(wanted)


def test_dead_inputs_and_zero_groups(bytes_model: Callable[..., Path], lines: Corpus, tmp_path: Path) -> None:
    def die(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][:, 10:14] = 0
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor[10:14] = 0
        tensors["model.layers.0.mlp.experts.1.gate_proj.weight"][:, :64] = 0
        tensors["model.layers.0.mlp.experts.1.up_proj.weight"][:] = 0

    source = open_source(bytes_model("qwen3_moe", change=die))
    options = GpuOptions(bits=4, group_size=64, max_tokens=800, chunk=64)
    convert_gpu(source, tmp_path / "a", options, corpus=lines)
    checkpoint = GptqCheckpoint.open(tmp_path / "a")
    for layer, expert in checkpoint.experts:
        for found, wanted in zip(checkpoint.expert(layer, expert), source.expert(layer, expert), strict=True):
            assert np.isfinite(found).all()
            assert np.linalg.norm(found - wanted) <= 0.2 * np.linalg.norm(wanted)
    assert not checkpoint.expert(0, 1).gate[:, :64].any()
    assert not checkpoint.expert(0, 1).up.any()


def test_the_better_of_both_methods_is_kept() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(16, 64, generator=generator)
    mixed = torch.randn(64, 64, generator=generator)
    fit, other = mixed @ mixed.T, torch.diag(torch.rand(64, generator=generator) + 0.1)
    scheme = GptqScheme(4, 32)
    assert choose(weight, fit, None, scheme, EFFORT).outcome.method == "gptq"
    misled = choose(weight, fit, other, scheme, EFFORT)
    assert misled.outcome.method == "rtn"
    assert misled.outcome.gptq_error is not None
    assert misled.outcome.gptq_error > misled.outcome.rtn_error
    blind = choose(weight, None, None, scheme, EFFORT)
    assert blind.outcome[:2] == ("rtn", None)


def test_eight_bits_keep_weights_that_the_text_uses_little() -> None:
    """Few inputs carry nearly all of this text: the others' weights are as good as without calibration all the same."""
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(32, 128, generator=generator)
    weight[:, 100] *= 8
    size = torch.where(torch.arange(128) < 8, 30.0, 0.05)
    inputs = torch.randn(500, 128, generator=generator) * size
    moments = inputs.T @ inputs / 500
    scheme = GptqScheme(8, 128)
    blind = choose(weight, None, None, scheme, Effort()).rounded.weight()
    calm = choose(weight, moments, moments, scheme, Effort(), gptq=False).rounded.weight()
    assert float((weight - calm).norm()) <= 1.01 * float((weight - blind).norm())


def test_the_layers_other_tokens_help_experts_with_few() -> None:
    generator = torch.Generator().manual_seed(5)
    spread = torch.randn(10, 64, generator=generator)

    def inputs(tokens: int) -> torch.Tensor:
        return torch.randn(tokens, 10, generator=generator) @ spread + 0.3 * torch.randn(
            tokens, 64, generator=generator
        )

    weight, scheme = torch.randn(32, 64, generator=generator), GptqScheme(4, 32)
    routed, layer, unseen = SecondMoments(64), SecondMoments(64), SecondMoments(64)
    routed.add(inputs(24))
    layer.add(inputs(2000))
    unseen.add(inputs(2000))

    def error(prior: float) -> float:
        rounded = choose(weight, shrink(routed, layer.mean(), prior * 64), None, scheme, EFFORT).rounded
        return output_error(weight, rounded.weight(), unseen.mean())

    assert error(2.0) < 0.8 * error(0.0)


# Parts of a model, and more than its experts.


def test_a_plan_restricts_what_is_written(tiny: Path, text: Corpus, tmp_path: Path) -> None:
    source = open_source(tiny)
    experts = ExpertSet([ExpertId(1, 3), ExpertId(1, 4), ExpertId(2, 0)])
    options = GpuOptions(bits=8, max_tokens=2000)
    convert_gpu(source, tmp_path / "part", options, experts=experts, corpus=text)
    names = {file.name for file in (tmp_path / "part").iterdir()}
    assert names == {
        "experts-00001-of-00002.safetensors",
        "experts-00002-of-00002.safetensors",
        "gpu-experts.json",
        "quantize_config.json",
    }
    checkpoint = GptqCheckpoint.open(tmp_path / "part")
    checkpoint.check_model(source.spec)
    assert checkpoint.experts == experts
    assert not checkpoint.complete
    assert checkpoint.has(1, 4)
    assert not checkpoint.has(0, 0)
    for found, wanted in zip(checkpoint.expert(1, 3), source.expert(1, 3), strict=True):
        assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)
    with pytest.raises(BadInput, match=r"does not hold expert 5 of layer 1; of that layer it holds 3-4"):
        checkpoint.expert(1, 5)
    assert len(raw(tmp_path / "part")) == 3 * 3 * 4


def test_included_layers_are_quantized_in_running_order(
    bytes_model: Callable[..., Path], lines: Corpus, tmp_path: Path
) -> None:
    path = bytes_model("qwen2_moe")
    source = open_source(path)
    options = GpuOptions(bits=4, max_tokens=800, chunk=64, include=("self_attn", r"shared_expert\."))
    report = convert_gpu(source, tmp_path / "a", options, corpus=lines)
    tensors = raw(tmp_path / "a")
    made = {row.name.split(".", 3)[3] for row in report.linears}
    assert made == {f"self_attn.{p}_proj" for p in "qkvo"} | {
        f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")
    }
    assert len(report.linears) == 3 * 7
    assert "model.layers.0.self_attn.q_proj.qweight" in tensors
    assert "model.layers.0.self_attn.q_proj.bias" in tensors
    assert "model.layers.0.self_attn.q_proj.weight" not in tensors
    assert "model.layers.0.mlp.shared_expert_gate.weight" in tensors
    assert all(
        row.outcome.gptq_error <= row.outcome.rtn_error
        for row in report.linears
        if row.outcome.method == "gptq"
    )
    settings = json.loads((tmp_path / "a" / "quantize_config.json").read_text())
    assert not any("self_attn" in key for key in settings["dynamic"])
    assert any(key.endswith(r"mlp\.shared_expert_gate$") for key in settings["dynamic"])


def test_an_included_layer_that_cannot_be_stored_is_named(
    bytes_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_source(bytes_model("qwen2_moe"))
    options = GpuOptions(bits=4, method="rtn", include=("shared_expert",))
    plan = plan_gpu(source, tmp_path / "a", options)
    assert (
        plan.skipped_linears["model.layers.0.mlp.shared_expert_gate"]
        == "its 1 outputs are not a multiple of 8"
    )
    report = convert_gpu(source, tmp_path / "a", options)
    assert len(report.linears) == 9
    with pytest.raises(BadUsage, match="which cannot be stored: its 1 outputs"):
        plan_gpu(source, tmp_path / "b", GpuOptions(bits=4, method="rtn", include=("shared_expert_gate",)))


# Refused before any work.


@pytest.mark.parametrize(
    ("options", "experts", "words"),
    [
        (GpuOptions(bits=4, include=("(",)), None, "not a regular expression"),
        (GpuOptions(bits=4, include=("nothing",)), None, "matches no linear layer"),
        (GpuOptions(bits=4, include=("self_attn",)), [ExpertId(0, 0)], "nothing but its experts"),
        (GpuOptions(bits=4), [], "no expert on the GPU"),
        (GpuOptions(bits=4), None, "needs calibration text"),
    ],
)
def test_requests_that_contradict_themselves(
    options: GpuOptions, experts: list[ExpertId] | None, words: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadUsage, match=re.escape(words)):
        convert_gpu(
            open_source(tiny),
            tmp_path / "x",
            options,
            experts=None if experts is None else ExpertSet(experts),
        )
    assert not list(tmp_path.iterdir())


def resized(tiny: Path, folder: Path, hidden: int, inner: int) -> Path:
    """A checkpoint of another size, experts only: enough to plan with."""
    config = json.loads((tiny / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_local_experts": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for expert in range(2):
        stem = f"model.layers.0.mlp.experts.{expert}"
        tensors[f"{stem}.gate_proj.weight"] = torch.randn(inner, hidden, dtype=torch.bfloat16)
        tensors[f"{stem}.up_proj.weight"] = torch.randn(inner, hidden, dtype=torch.bfloat16)
        tensors[f"{stem}.down_proj.weight"] = torch.randn(hidden, inner, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_devices_that_are_not_there_are_refused(tiny: Path, tmp_path: Path) -> None:
    for device, fault in (("cuda:99", MachineLacks), ("toaster", BadUsage)):
        with pytest.raises(fault, match=device):
            plan_gpu(open_source(tiny), tmp_path / "a", GpuOptions(bits=4, method="rtn", device=device))


def test_quantized_dense_weights_go_with_a_plan_only(
    bytes_model: Callable[..., Path], tmp_path: Path
) -> None:
    def squeeze(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    source = open_source(bytes_model("qwen3_moe", change=squeeze))
    experts, rtn = ExpertSet([ExpertId(0, 1)]), GpuOptions(bits=4, method="rtn")
    for options, chosen in ((rtn, None), (GpuOptions(bits=4), experts)):
        with pytest.raises(
            BadInput, match=r"q_proj\.weight is stored as F8_E4M3: .* dense weights are quantized"
        ):
            plan_gpu(source, tmp_path / "a", options, chosen)
    convert_gpu(source, tmp_path / "a", rtn, experts=experts)
    assert GptqCheckpoint.open(tmp_path / "a").experts == experts


def test_the_group_size_falls_back_for_the_whole_model(tiny: Path, tmp_path: Path) -> None:
    source = open_source(resized(tiny, tmp_path / "m", 256, 192))
    options = GpuOptions(bits=4, method="rtn")
    report = convert_gpu(source, tmp_path / "a", options)
    assert report.plan.folder.scheme == GptqScheme(4, 64)
    assert report.plan.group_size_why == (
        "groups of 64 instead of 128: the expert intermediate size 192 is no multiple of 128"
    )
    assert json.loads((tmp_path / "a" / "quantize_config.json").read_text())["group_size"] == 64
    assert GptqCheckpoint.open(tmp_path / "a").expert(0, 1).down.shape == (256, 192)


def test_a_width_that_no_group_divides_is_refused(tiny: Path, tmp_path: Path) -> None:
    source = open_source(resized(tiny, tmp_path / "m", 256, 144))
    with pytest.raises(BadInput, match="expert intermediate size of m is 144, which is no multiple"):
        plan_gpu(source, tmp_path / "a", GpuOptions(bits=4, method="rtn"))


def test_outputs_in_use_are_left_alone(tiny: Path, tmp_path: Path) -> None:
    source, options = open_source(tiny), GpuOptions(bits=4, method="rtn")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, words in (("full", "not empty"), ("file", "is a file")):
        with pytest.raises(BadUsage, match=words):
            plan_gpu(source, tmp_path / name, options)
    with pytest.raises(BadUsage, match="not empty"):
        plan_gpu(source, tiny, options)
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_a_disk_that_is_too_small_is_noticed_first(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000)
    )
    with pytest.raises(DoesNotFit, match=r"4\.88 KiB are free"):
        plan_gpu(open_source(tiny), tmp_path / "a", GpuOptions(bits=4, method="rtn"))


# An early end leaves nothing.


class Stopping:
    """Progress that stops the work after some units."""

    def __init__(self, after: int) -> None:
        self._left = after

    def task(self, label: str, total: float | None, unit: str = "") -> Stopping:
        return self

    def __enter__(self) -> Stopping:
        return self

    def __exit__(self, *how: object) -> None:
        pass

    def advance(self, amount: float = 1) -> None:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        pass


@pytest.mark.parametrize("after", [0, 20, 63, 64])
def test_stopped_by_the_user(after: int, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert_gpu(
            open_source(tiny),
            tmp_path / "deep" / "a",
            GpuOptions(bits=4, method="rtn"),
            progress=Stopping(after),
        )
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_named(
    bytes_model: Callable[..., Path], lines: Corpus, tmp_path: Path
) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.experts.6.up_proj.weight"][3, 4] = torch.nan

    source = open_source(bytes_model("qwen3_moe", change=damage))
    words = r"layers\.2\.mlp\.experts\.6\.up_proj\.weight .*1 values that are NaN.*row 3, column 4"
    for options, corpus in ((SMALL, lines), (GpuOptions(bits=4, method="rtn"), None)):
        with pytest.raises(BadInput, match=words):
            convert_gpu(source, tmp_path / "a", options, corpus=corpus)
        assert not list(tmp_path.iterdir())


def test_weights_beyond_the_formats_scales_are_named(
    bytes_model: Callable[..., Path], tmp_path: Path
) -> None:
    def grow(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.0.down_proj.weight"][0, 0] = 1e6

    with pytest.raises(BadInput, match="float16 scales end at 65504"):
        convert_gpu(
            open_source(bytes_model("qwen3_moe", change=grow)),
            tmp_path / "a",
            GpuOptions(bits=4, method="rtn"),
        )
