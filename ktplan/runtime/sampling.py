"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktplan.errors import BadInput, BadUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose: temperature 0 takes the likeliest token; the filters apply in the order listed here.

    `repetition_penalty` divides positive and multiplies negative logits of tokens seen before (CTRL,
    section 4.1); `min_p` keeps tokens with at least that share of the likeliest one's probability.
    """

    temperature: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, 100.0),
            ("repetition penalty", self.repetition_penalty, 0.01, 100.0),
            ("top-k", self.top_k, 0, 2**31),
            ("top-p", self.top_p, 0.0, 1.0),
            ("min-p", self.min_p, 0.0, 1.0),
        ):
            if not low <= value <= high:
                raise BadUsage(
                    f"{name} is {value}, it must lie in {low:g}-{high:g}", hint="change the option"
                )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise BadUsage(f"the seed is {self.seed}, it must lie in 0-{2**63 - 1}", hint="change --seed")


class Sampler:
    """Draws tokens one after another; the same seed and logits give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor, seen: Sequence[int]) -> int:
        """The next token for float logits [V] of any device; `seen` are the ids so far, prompt included.

        Raises BadInput where a logit is NaN: something in the model is no number, and any token would be a lie.
        """
        how = self._sampling
        scores = logits.detach().to("cpu", torch.float32)
        if bool(scores.isnan().any()):
            raise BadInput(
                f"{int(scores.isnan().sum()):,} of the model's {scores.numel():,} logits are NaN",
                hint="its weights are damaged, or overflow in --dtype float16: use float32 or bfloat16",
            )
        if how.repetition_penalty != 1.0 and seen:
            ids = torch.tensor(sorted(set(seen)))
            old = scores[ids]
            scores = scores.clone()
            scores[ids] = torch.where(old > 0, old / how.repetition_penalty, old * how.repetition_penalty)
        if how.temperature == 0.0:
            return int(scores.argmax())
        scores = scores / how.temperature
        if 0 < how.top_k < scores.numel():
            scores = scores.masked_fill(scores < scores.topk(how.top_k).values[-1], -torch.inf)
        probabilities = _nucleus(scores.softmax(-1), how.top_p)
        if how.min_p > 0.0:
            probabilities = probabilities * (probabilities >= how.min_p * probabilities.max())
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of likeliest tokens that holds `top_p` of the probability; never empty."""
    if top_p >= 1.0:
        return probabilities
    ordered, order = probabilities.sort(descending=True, stable=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    beyond[0] = False
    return probabilities.index_fill(0, order[beyond], 0.0)
