"""ModelSpec: everything a planner or converter needs to know about a model; no weights are held."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ktplan.errors import BadInput

# What the store and both engines compute, by the names of the activations: silu and swish are one function.
COMPUTED = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "swiglu-clamped", "swiglu-oai")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A Mixture-of-Experts model as its config and tensor headers describe it. Sizes in elements, bytes as stored."""

    name: str  # the folder's name, for people
    family: str  # the record in families.py that reads it
    model_type: str  # config.json's word
    layers: int
    moe_layers: tuple[int, ...]  # the model's own layer numbers
    experts: int  # routed experts in each MoE layer
    top_k: int
    shared_experts: int
    hidden: int
    moe_intermediate: int
    vocab: int
    context: int  # longest sequence in tokens
    activation: str  # what an expert does with gate and up: "silu" is down(silu(gate) * up); others by name
    dtype: str  # how the experts are stored: "bfloat16", "float8 per block", "mxfp4", "int4 pack-quantized", "Q4_K" ...
    tied_embeddings: bool
    fused: bool  # experts of a layer stored as one tensor a projection
    dense_params: int
    expert_params: int  # all routed experts
    dense_bytes: int
    expert_bytes: int
    kv_bytes_per_token: int  # all layers, 2-byte cache
    experts_module: str  # "model.layers.{layer}.mlp.experts": the module that holds a layer's routed experts
    expert_bias: bool = False  # experts add biases (gpt-oss)
    activation_alpha: float | None = None  # of swiglu-oai: gate * sigmoid(alpha * gate) * (up + 1)
    activation_limit: float | None = None  # gate at most this, up within +-this, first
    fingerprint: str  # sha256 of config, tensor headers and a sample of the dense weights

    @property
    def expert_count(self) -> int:
        """Routed experts in the whole model."""
        return len(self.moe_layers) * self.experts

    @property
    def params_per_expert(self) -> int:
        """gate, up and down of one routed expert."""
        return 3 * self.hidden * self.moe_intermediate

    def experts_module_name(self, layer: int) -> str:
        """Dotted name of the module with a layer's routed experts."""
        return self.experts_module.format(layer=layer)

    def check_experts(self, *, calibrated: bool = False) -> None:
        """Raise BadInput unless the store and both engines can compute what an expert does.

        Rounding by calibration asks for more: act(gate) * up, and no biases.
        """
        extra = None
        if self.activation not in COMPUTED:
            extra = f"the activation '{self.activation}'"
        elif self.activation.startswith("swiglu-") and self.activation_limit is None:
            extra = "limits that differ by layer"
        if extra:
            raise BadInput(
                f"{self.name}: experts of {self.model_type} have {extra}; those with {', '.join(COMPUTED)} can be "
                "converted and run",
                hint="inspect, profile without a store, and place work on this model",
            )
        if calibrated and (self.expert_bias or self.activation.startswith("swiglu-")):
            raise BadInput(
                f"{self.name}: experts of {self.model_type} have {'biases and ' * self.expert_bias}the activation "
                f"'{self.activation}', which rounding by calibration does not compute",
                hint="convert-cpu --rounding mse does without calibration; convert-gpu cannot take this model",
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "moe_layers": list(self.moe_layers)}
