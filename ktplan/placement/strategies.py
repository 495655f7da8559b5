"""Which experts live on the GPU.

A strategy is a pure function: the model's cells, a number of slots, a seed and counts in, ExpertSet out. It does not
know how many bytes an expert takes (budget.py does), nor how the set reaches a model (emit.py does).

The rules are those of sglang-kt 0.7.2 (kt_ep_wrapper.py) to the expert, with two repairs of `frequency`: dense layers
take no slots, and ties fall to the lower layer, then to the lower id, where torch.topk leaves them open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from ktplan.errors import BadUsage
from ktplan.experts import ExpertId, ExpertSet
from ktplan.model import ModelSpec
from ktplan.profile.profile import Counts

DEFAULT_SEED: Final = 42  # sglang-kt's, where it is no flag


class Cells(NamedTuple):
    """The routed experts of a model in (layer, expert) order; cell n is expert n % experts of layers[n // experts]."""

    layers: tuple[int, ...]
    experts: int

    @property
    def size(self) -> int:
        """Experts in the whole model."""
        return len(self.layers) * self.experts

    def at(self, cells: Iterable[int]) -> ExpertSet:
        """The experts at these cells."""
        return ExpertSet(
            ExpertId(self.layers[cell // self.experts], cell % self.experts) for cell in map(int, cells)
        )


Indices = npt.NDArray[np.int64]  # cells, in no order
Strategy = Callable[[Cells, int, Counts | None, int], Indices]


def uniform(cells: Cells, slots: int, counts: Counts | None, seed: int) -> Indices:
    """The same number in every MoE layer, lowest ids first; what is left goes one each to the first layers."""
    each, extra = divmod(slots, len(cells.layers))
    return np.concatenate(
        [
            np.arange(each + (place < extra), dtype=np.int64) + place * cells.experts
            for place in range(len(cells.layers))
        ]
    )


def frequency(cells: Cells, slots: int, counts: Counts | None, seed: int) -> Indices:
    """The most used experts of the whole model, whatever layer they are in; ties to the lower layer, then id."""
    if counts is None:
        raise BadUsage("strategy 'frequency' needs counts", hint="give --profile, or another --strategy")
    # A stable sort of the negated counts keeps equal ones in cell order.
    return np.argsort(-counts.ravel(), kind="stable")[:slots].astype(np.int64)


def front_loading(cells: Cells, slots: int, counts: Counts | None, seed: int) -> Indices:
    """Whole layers from the first MoE layer on, lowest ids in the last one."""
    return np.arange(slots, dtype=np.int64)


def random(cells: Cells, slots: int, counts: Counts | None, seed: int) -> Indices:
    """`torch.randperm` over all cells, the first ones taken: a control that any profile should beat."""
    return torch_permutation(cells.size, seed)[:slots]


STRATEGIES: Final[Mapping[str, Strategy]] = {
    "frequency": frequency,
    "uniform": uniform,
    "front-loading": front_loading,
    "random": random,
}
NEED_PROFILE: Final = (
    "optimal",
    "robust",
)  # solved over what a profile counted, not by a rule of this module


@overload
def choose(
    strategy: str,
    cells: Cells,
    slots: int,
    counts: Counts | None,
    seed: int = ...,
    *,
    as_cells: Literal[True],
) -> Indices: ...
@overload
def choose(
    strategy: str,
    cells: Cells,
    slots: int,
    counts: Counts | None,
    seed: int = ...,
    *,
    as_cells: Literal[False] = ...,
) -> ExpertSet: ...
def choose(
    strategy: str,
    cells: Cells,
    slots: int,
    counts: Counts | None,
    seed: int = DEFAULT_SEED,
    *,
    as_cells: bool = False,
) -> ExpertSet | Indices:
    """Apply a strategy by name; as positions of cells when asked. `counts` int64 [MoE layers, experts] is needed
    by `frequency` alone.

    Raises BadUsage for an unknown strategy, slots outside 0 .. all, a negative seed, or missing counts.
    """
    if strategy in NEED_PROFILE:
        raise BadUsage(
            f"strategy '{strategy}' decides by what experts were used for",
            hint="give a profile with --profile",
        )
    if strategy not in STRATEGIES:
        raise BadUsage(f"there is no strategy '{strategy}'", hint=f"use one of {', '.join(STRATEGIES)}")
    if not 0 <= slots <= cells.size:
        raise BadUsage(
            f"{slots:,} GPU experts are out of range", hint=f"the model has {cells.size:,}: give 0 to that"
        )
    if seed < 0:
        raise BadUsage(f"seed {seed} is negative", hint="give 0 or more")
    found = STRATEGIES[strategy](cells, slots, counts, seed)
    return found if as_cells else cells.at(found)


def compat(
    spec: ModelSpec, strategy: str, slots: int, counts: Counts | None, seed: int = DEFAULT_SEED
) -> ExpertSet:
    """sglang-kt's own outcome, quirks included, as experts that exist; some slots may be lost.

    It reads DeepSeek's keys alone, so that every layer of another family is MoE to it. Its `frequency` ranks dense rows
    too; once fewer cells were used than there are slots they win ties (torch leaves the order open; here it is by
    row). Without counts its `frequency` is a top-N over ties.
    """
    seen = spec.moe_layers if spec.family.startswith("deepseek") else tuple(range(spec.layers))
    if strategy == "frequency":
        table = np.zeros((spec.layers, spec.experts), dtype=np.int64)
        table[list(spec.moe_layers)] = 1 if counts is None else counts
        cells = Cells(tuple(range(spec.layers)), spec.experts)
        found = cells.at(frequency(cells, min(slots, len(seen) * spec.experts), table, seed))
    elif strategy in STRATEGIES:
        found = choose(strategy, Cells(seen, spec.experts), slots, counts, seed)
    else:
        raise BadUsage(f"sglang-kt has no strategy '{strategy}'", hint=f"it has {', '.join(STRATEGIES)}")
    real = set(spec.moe_layers)
    return ExpertSet(expert for expert in found if expert.layer in real)


def torch_permutation(size: int, seed: int) -> npt.NDArray[np.int64]:
    """`torch.randperm(size, generator=torch.Generator("cpu").manual_seed(seed))` without torch, int64 [size].

    torch's CPU generator is MT19937 seeded with the low 32 bits; below 2^32 / 20 elements randperm walks from the front
    and swaps with `random() % (size - i)` (aten/src/ATen/native/TensorFactories.cpp, randperm_cpu). numpy's RandomState
    has the same seeding and its stream is frozen, so plans never change with numpy.
    """
    if size >= 2**32 // 20:
        raise BadUsage(
            f"{size:,} experts are too many for the random strategy", hint="use another --strategy"
        )
    draws = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 2**32, size=max(size - 1, 0), dtype=np.uint32)
    order = list(range(size))
    for place, draw in enumerate(draws.tolist()):
        other = place + draw % (size - place)
        order[place], order[other] = order[other], order[place]
    return np.array(order, dtype=np.int64)
