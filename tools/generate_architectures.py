"""Derive ktplan/data/architectures.json from the installed transformers: what each architecture calls its experts.

    python tools/generate_architectures.py            write the table
    python tools/generate_architectures.py MODEL_TYPE print one record

For every architecture a tiny model is built and saved; each saved tensor is recognised by its *values* as the gate, up
or down matrix of an expert (or a stack of them), so names come from transformers' own checkpoint conversion.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tiny_architectures import candidates, experts_modules, model_class, rows_of, tiny_model

from ktplan.model.families import ALIASES, UNREADABLE

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "ktplan" / "data" / "architectures.json"
PAGE = ROOT / "docs" / "models.md"

# What experts classes compute that replace transformers' default act(gate) * up.
GATES = {
    "BeamExperts": "", "GptOssExperts": "swiglu-oai", "OpenAIPrivacyFilterExperts": "swiglu-oai",
    "MiniMaxM3VLExperts": "swiglu-oai", "DeepseekV4Experts": "swiglu-clamped", "Glm5NextTextExperts": "swiglu-clamped", 
    "HYV4Experts": "swiglu-clamped", "HYV4VLExperts": "swiglu-clamped", "Step3p7Experts": "swiglu-clamped",
    "Inkling2Experts": "softcapped-swiglu", "Inkling2LoopExperts": "softcapped-swiglu",
}  # fmt: skip


# A flat matrix a projection, all experts in it, that of down transposed.
DBRX = {
    "activation": "", "class": "DbrxForCausalLM", "module": "transformer.blocks.{layer}.ffn.experts",
    "post_norm": False, "prefixes": ["transformer."],
    "forms": [
        {"gate": "ffn.experts.mlp.w1", "up": "ffn.experts.mlp.v1", "down": "ffn.experts.mlp.w2", "turned": ["down"]}
    ],
}  # fmt: skip

# Stacked experts that are two modules instead of two parameters.
JETMOE = {
    "activation": "", "class": "JetMoeForCausalLM", "module": "model.layers.{layer}.mlp", "post_norm": False,
    "forms": [{"gate_up": "mlp.input_linear", "down": "mlp.output_linear"}], "prefixes": ["model."],
}  # fmt: skip


OWN = {"jetmoe": JETMOE, "dbrx": DBRX}  # recognised by no rule below


def record(model_type: str) -> dict[str, Any] | None:
    """The table's entry of one architecture, or None where it has no stacked experts of the common kind."""
    if not experts_modules(tiny_model(model_type, "meta")):
        return None
    return record_of(tiny_model(model_type))


def record_of(model: Any) -> dict[str, Any]:
    """The table's entry, from a model with values."""
    name, module = experts_modules(model)[-1]
    layer = int(re.search(r"\.(\d+)\.", name)[1])
    prefix, tail = _cut(name + ".", layer)
    tail = tail.rstrip(".")
    gated = hasattr(module, "gate_up_proj")
    memory = {"gate_up": f"{tail}.gate_up_proj"} if gated else {"up": f"{tail}.up_proj"}
    memory["down"] = f"{tail}.down_proj"
    if getattr(module, "is_concatenated", True) is False:
        memory["interleaved"] = True
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}
    stored, prefixes = _stored(saved, module, layer)
    forms = [memory] if stored in ({}, memory) else [stored, memory]
    kind = type(module)
    own_gate = "_apply_gate" in vars(kind) and kind._apply_gate.__module__ != "transformers.integrations.moe"
    return {
        "class": type(model).__name__,
        "module": f"{prefix}{tail}",
        "prefixes": sorted(prefixes | {prefix.split("{")[0].removesuffix("layers.")}),
        "forms": forms,
        "activation": GATES[kind.__name__] if own_gate else "",
        "post_norm": bool(getattr(module, "has_post_expert_norm", False)),
    }


def _cut(name: str, layer: int) -> tuple[str, str]:
    found = re.match(rf"^(.*?(?:layers|blocks|h))\.{layer}\.(.*)$", name)
    return f"{found[1]}.{{layer}}.", found[2]


def _stored(saved: dict[str, torch.Tensor], module: Any, layer: int) -> tuple[dict[str, Any], set[str]]:
    """Role to name of what save_pretrained wrote, and the prefixes before `layers.`."""
    form: dict[str, Any] = {}
    prefixes = set()
    for name, tensor in saved.items():
        if not re.search(rf"\.{layer}\.", name) or "shared" in name:
            continue
        role, expert = _role(tensor, module)
        if role is None:
            continue
        prefix, tail = _cut(name, layer)
        tail = re.sub(r"[._]weight$", "", tail)
        if expert is not None:
            tail = re.sub(rf"\.{expert}\.", ".{expert}.", tail, count=1)
        if role == "interleaved":
            role, form["interleaved"] = "gate_up", True
        form[role] = tail
        prefixes.add(re.sub(r"(layers|blocks|h)\.\{layer\}\.$", "", prefix))
    return form, prefixes


def _role(tensor: torch.Tensor, module: Any) -> tuple[str | None, int | None]:
    one = rows_of(module, 1)
    if tensor.dim() == 2:
        found = [role for role in ("gate", "up", "down") if role in one and torch.equal(tensor, one[role])]
        return (found[0], 1) if found else (None, None)
    if tensor.dim() != 3:
        return None, None
    second = tensor[1]
    for matrix in (second, second.T):
        for role in ("gate", "up", "down"):
            if role in one and torch.equal(matrix, one[role]):
                return role, None
        if "gate" in one and torch.equal(matrix, torch.cat([one["gate"], one["up"]])):
            return "gate_up", None
        if "gate" in one and torch.equal(matrix, torch.stack([one["gate"], one["up"]], 1).flatten(0, 1)):
            return "interleaved", None
    return None, None


def markdown() -> str:
    """The table of docs/models.md."""
    known = json.loads(TABLE.read_text(encoding="utf-8"))["architectures"]
    rows = [
        "| model_type | class in transformers | experts in files, after `layers.N.` | activation |",
        "|---|---|---|---|",
    ]
    for name, entry in sorted(known.items()):
        if name in UNREADABLE:
            continue
        names = "; ".join(
            ", ".join(
                f"`{text}`"
                for role, text in sorted(form.items())
                if role in ("gate", "up", "gate_up", "down")
            )
            + (" (gate and up rows alternate)" if form.get("interleaved") else "")
            for form in entry["forms"]
        )
        kind = entry["activation"] + ("+post-norm" if entry["post_norm"] else "")
        rows.append(f"| {name} | {entry['class']} | {names} | {kind or 'that of config.json'} |")
    rows += [
        "",
        "| model_type | read as |",
        "|---|---|",
        *(f"| {a} | {b} |" for a, b in sorted(ALIASES.items())),
    ]
    rows += [
        "",
        "| model_type | refused, because |",
        "|---|---|",
        *(f"| {a} | {b} |" for a, b in sorted(UNREADABLE.items())),
    ]
    return "\n".join(rows)


def table() -> tuple[dict[str, Any], dict[str, str]]:
    records, failed = {}, {}
    for model_type in candidates():
        try:
            found = record(model_type)
        except Exception as fault:
            failed[model_type] = f"{type(fault).__name__}: {str(fault)[:200]}"
            continue
        if model_type in OWN:
            records[model_type] = OWN[model_type]
        elif found is None:
            failed[model_type] = f"{model_class(model_type).__name__}: no stacked experts"
        else:
            records[model_type] = found
    return records, failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        print(json.dumps({name: record(name) for name in sys.argv[1:]}, indent=1))
    else:
        records, failed = table()
        body = {"transformers": transformers.__version__, "architectures": records}
        TABLE.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        before, _, rest = PAGE.read_text(encoding="utf-8").partition("| model_type | class")
        PAGE.write_text(f"{before}{markdown()}\n", encoding="utf-8")
        for name, why in failed.items():
            print(f"{name}: {why}")
        print(f"{len(records)} architectures")
