"""Which experts live on the GPU: budgets in bytes, strategies, what they are worth, plans and what they become.

budget      how many experts fit, line by line
strategies  budget and counts in, experts out: KTransformers' four, exactly
evaluate    what a set of experts serves, in-sample and on documents that were left out
plan        the file
emit        injection rules, and a counts file that makes sglang-kt take exactly this plan
"""

from ktplan.placement.budget import Budget, expert_bytes, fit
from ktplan.placement.evaluate import Comparison, Expectation, compare, expect, hit_rate
from ktplan.placement.plan import PlacementPlan, make_plan
from ktplan.placement.strategies import STRATEGIES

__all__ = [
    "STRATEGIES",
    "Budget",
    "Comparison",
    "Expectation",
    "PlacementPlan",
    "compare",
    "expect",
    "expert_bytes",
    "fit",
    "hit_rate",
    "make_plan",
]
