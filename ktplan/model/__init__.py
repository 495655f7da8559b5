"""What is in a checkpoint: its shape from headers alone, its experts one at a time."""

from ktplan.model.locate import locate
from ktplan.model.opening import open_source, read_spec
from ktplan.model.safetensors import SafetensorsSource, open_safetensors
from ktplan.model.source import ExpertWeights, WeightSource
from ktplan.model.spec import ModelSpec

__all__ = [
    "ExpertWeights",
    "ModelSpec",
    "SafetensorsSource",
    "WeightSource",
    "locate",
    "open_safetensors",
    "open_source",
    "read_spec",
]
