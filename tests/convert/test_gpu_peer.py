"""GPTQModel reads what we write: the same weights, the same logits. Needs `pip install gptqmodel`, which few have."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ktplan import network
from ktplan.convert.gpu import GptqCheckpoint, GpuOptions, convert_gpu
from ktplan.model import open_source
from ktplan.model.embedded import corpus_files
from ktplan.profile import read_corpus

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(find_spec("gptqmodel") is None, reason="gptqmodel is not installed"),
]

# A process of its own: importing gptqmodel changes classes of transformers for good.
_PEER = """
import json, sys, torch
from gptqmodel import BACKEND, GPTQModel
from safetensors.torch import save_file
folder, ids, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
model = GPTQModel.load(folder, device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model
layer = model.model.layers[1]
assert type(layer.self_attn.q_proj) is torch.nn.Linear, "not excluded through dynamic"
with torch.no_grad():
    logits = model(torch.tensor([ids])).logits.float()
weight = layer.mlp.experts[3].down_proj.dequantize_weight().T.float().contiguous()
save_file({"logits": logits, "weight": weight}, out)
"""


@pytest.mark.parametrize("bits", [4, 8])
def test_gptqmodel_loads_the_folder_and_computes_the_same(bits: int, tiny: Path, tmp_path: Path) -> None:
    text = read_corpus(tuple(corpus_files("profile")))
    convert_gpu(open_source(tiny), tmp_path / "x", GpuOptions(bits=bits, max_tokens=4000), corpus=text)
    checkpoint = GptqCheckpoint.open(tmp_path / "x")
    document = json.loads(corpus_files("test")[0].read_text().splitlines()[0])["text"]
    ids = network.tokenizer(tiny)(document, verbose=False).input_ids[:256]

    command = [
        sys.executable,
        "-c",
        _PEER,
        str(tmp_path / "x"),
        json.dumps(ids),
        str(tmp_path / "peer.safetensors"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    peer = load_file(tmp_path / "peer.safetensors")

    ours = checkpoint.expert(1, 3).down
    assert np.abs(peer["weight"].numpy() - ours).max() < 1e-3 * np.abs(ours).max()  # they round to float16

    model = network.load_whole(tiny, "float16")
    for number, (_, module) in network.experts_modules(model).items():
        for expert in range(16):
            weights = checkpoint.expert(number, expert)
            module.gate_up_proj.data[expert] = torch.from_numpy(np.concatenate([weights.gate, weights.up]))
            module.down_proj.data[expert] = torch.from_numpy(weights.down)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits.float().log_softmax(-1)
    found = peer["logits"].log_softmax(-1)
    divergence = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    same = float((wanted.argmax(-1) == found.argmax(-1)).float().mean())
    print(f"W{bits}: KL {divergence:.1e}, top-1 equal {same:.4f}")
    assert divergence < 1e-4
    assert same > 0.99
