"""Convert, place and run Mixture-of-Experts LLMs on one machine: the public names.

Names load on first use, so that `import ktplan` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ktplan.version import __version__

if TYPE_CHECKING:
    from ktplan.model import ModelSpec, read_spec
    from ktplan.placement import PlacementPlan, make_plan
    from ktplan.profile import ActivationProfile
    from ktplan.store import ExpertStore

__all__ = [
    "ActivationProfile",
    "ExpertStore",
    "ModelSpec",
    "PlacementPlan",
    "__version__",
    "make_plan",
    "read_spec",
]

_HOME = {
    "ActivationProfile": "ktplan.profile",
    "ExpertStore": "ktplan.store",
    "ModelSpec": "ktplan.model",
    "PlacementPlan": "ktplan.placement",
    "make_plan": "ktplan.placement",
    "read_spec": "ktplan.model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ktplan' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
