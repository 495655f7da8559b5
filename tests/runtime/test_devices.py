"""Words of rules to devices, and tensors that follow the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ktplan import network
from ktplan.errors import MachineLacks
from ktplan.model import open_source
from ktplan.rules import Match, Replace, Rule, Rules
from ktplan.runtime import devices
from ktplan.runtime.devices import canonical, connect, resolve
from ktplan.runtime.loader import build, open_sources, prepare

IDS = torch.arange(12)[None]


def test_words_have_one_name() -> None:
    assert [canonical(word) for word in ("gpu", "cuda", "cuda:0", "cuda:2", "cpu")] == [
        "cuda:0", "cuda:0", "cuda:0", "cuda:2", "cpu",
    ]  # fmt: skip


def test_the_cpu_stands_in_where_there_is_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, notes = resolve(["cpu", "gpu", "cuda:1"])
    assert set(found.values()) == {torch.device("cpu")}
    assert notes == [f"no GPU found: torch on the CPU stands in for cuda:{n}" for n in (0, 1)]


def test_a_gpu_beyond_those_that_are_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve(["gpu"]) == ({"gpu": torch.device("cuda:0")}, [])
    with pytest.raises(MachineLacks, match=r"cuda:3 .* has 1 GPU"):
        resolve(["cuda:3"])


def test_one_device_needs_no_hooks(tiny: Path) -> None:
    model = network.skeleton(tiny)
    network.load_dense(model, open_source(tiny))
    for _, module in network.experts_modules(model).values():
        module.to_empty(device="cpu")
    assert connect(model) == 0


def test_inputs_follow_weights_and_outputs_come_back(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of the layers is said to lie elsewhere; what would be carried there and back is watched."""
    model: Any = network.load_whole(tiny)
    with torch.inference_mode():
        expected = model(IDS).logits
    own = devices._own_device
    elsewhere = {id(module) for layer in model.model.layers[2:] for module in layer.modules()}
    away = torch.device("cuda:7")
    carried: list[torch.device] = []

    def watched(values: Any, device: Any) -> Any:
        carried.append(device)
        return values

    monkeypatch.setattr(devices, "_own_device", lambda m: away if id(m) in elsewhere and own(m) else own(m))
    monkeypatch.setattr(devices, "_moved", watched)
    hooks = connect(model, skip=[module for _, module in network.experts_modules(model).values()])
    owners = sum(own(module) is not None for module in model.modules()) - 4
    assert hooks == 2 * owners + 4
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected)
    # A hook moves positional and named inputs, then the output: towards `away` once for each layer and twice for each
    # of its nine modules with weights; every output is handed back to where its inputs came from.
    assert carried.count(away) == 2 * (2 + 2 * 9)
    assert carried[-1] == torch.device("cpu")


def test_values_are_found_and_moved_inside_containers() -> None:
    tensor = torch.ones(2)
    nested = (None, {"a": [tensor, 3]}, "text")
    assert devices._first_device(nested) == torch.device("cpu")
    assert devices._first_device(("text", 3)) is None
    moved = devices._moved(nested, "meta")
    assert moved[1]["a"][0].is_meta and moved[1]["a"][1] == 3 and moved[2] == "text"
    cache = object()
    assert devices._moved(cache, "meta") is cache


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_network_over_cpu_and_gpu_agrees_with_the_cpu(tiny: Path) -> None:
    split = Rules(
        (
            Rule(
                match=Match(name=r"^model\.layers\.[23]\."),
                replace=Replace(kwargs={"generate_device": "cuda:0"}),
            ),
            Rule(match=Match(name="^.*$"), replace=Replace(kwargs={"generate_device": "cpu"})),
        )
    )
    found = build(prepare(open_sources(tiny), rules=split, dtype="float32"))
    assert {"cpu", "cuda:0"} <= set(found.bytes)
    with torch.inference_mode():
        ours, expected = found.model(IDS).logits, network.load_whole(tiny)(IDS).logits
    assert torch.allclose(ours.cpu(), expected, atol=1e-3)


def test_a_tied_weight_stored_twice_may_be_placed_elsewhere(tiny: Path, tmp_path: Path) -> None:
    """A checkpoint that keeps lm_head beside the embedding it is tied to, under rules that part the two."""
    stored = load_file(tiny / "model.safetensors")
    save_file(
        {**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    rules = Rules((Rule(match=Match(name="^lm_head$"), replace=Replace(kwargs={"generate_device": "cpu"})),))
    found = build(prepare(open_sources(tmp_path), rules=rules, dtype="float32"))
    with torch.inference_mode():
        assert torch.equal(found.model(IDS).logits, network.load_whole(tiny)(IDS).logits)
