"""Shared fixtures: the embedded model, tiny random models of every family, the command line as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "olmoe")


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        return json.loads(self.stdout)

    def ok(self) -> Result:
        assert self.code == 0, f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        return self

    def refused(self, code: int, *words: str) -> Result:
        """One line that names what is wrong, the expected exit code, no traceback."""
        assert self.code == code, f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        assert "Traceback" not in self.stderr
        for word in words:
            assert word in self.stderr, f"{word!r} not in {self.stderr!r}"
        return self


@pytest.fixture(scope="session")
def tiny() -> Path:
    from ktplan.model.embedded import TINY

    return TINY


@pytest.fixture(scope="session")
def reference() -> Path:
    """Reference data kept beside the checkout; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("KTPLAN_REFERENCE", Path(__file__).resolve().parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip("no reference data beside the checkout (KTPLAN_REFERENCE)")
    return folder


@pytest.fixture(scope="session")
def cli() -> Callable[..., Result]:
    """Run `ktplan` as a user does: a process of its own."""

    def run(*arguments: str | Path, input: str | None = None, env: dict[str, str] | None = None) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "ktplan", *map(str, arguments)],
            input=input,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **(env or {})},
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def family_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`family_checkpoint(family, fused=False)`: a tiny random bfloat16 model saved by transformers, once a session."""
    made: dict[tuple[str, bool], Path] = {}

    def make(family: str, fused: bool = False) -> Path:
        if (family, fused) not in made:
            folder = tmp_path_factory.mktemp("checkpoint") / f"{family}-{'fused' if fused else 'per-expert'}"
            _save_random_model(family, fused, folder)
            made[family, fused] = folder
        return made[family, fused]

    return make


def _save_random_model(family: str, fused: bool, folder: Path) -> None:
    import torch
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "tie_word_embeddings": False,
    }
    own: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 256,
                                   "head_dim": 32, "mlp_only_layers": [1], "norm_topk_prob": True}),
        "qwen2_moe": ("Qwen2Moe", {"num_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 256,
                                   "shared_expert_intermediate_size": 128, "norm_topk_prob": False}),
        "mixtral": ("Mixtral", {"num_local_experts": 8, "intermediate_size": 128}),
        "deepseek_v3": ("DeepseekV3", {"n_routed_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 256,
                                       "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
                                       "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
                                       "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4}),
        "olmoe": ("Olmoe", {"num_experts": 8, "intermediate_size": 128, "norm_topk_prob": False}),
        # Biases, gate and up in turns, transposed; the limit is so low that it is reached.
        "gpt_oss": ("GptOss", {"num_local_experts": 8, "intermediate_size": 128, "head_dim": 32, "swiglu_limit": 0.25,
                               "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        "gemma4_text": ("Gemma4", {"num_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128,
                                   "head_dim": 32, "enable_moe_block": True, "top_k_experts": 2,
                                   "vocab_size_per_layer_input": 264, "hidden_size_per_layer_input": 0,
                                   "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    }  # fmt: skip
    name, keys = own[family]
    text = "Text" if family.endswith("_text") else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**common, **keys})
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if tensor.dim() > 1:
                tensor.normal_(0.0, 0.05)
            elif "bias" in key:
                tensor.normal_(0.0, 0.1)
        for key, tensor in model.named_buffers():
            if "e_score_correction_bias" in key:
                tensor.normal_(0.0, 0.2)
    model.save_pretrained(folder, **({"save_original_format": False} if fused else {}))
