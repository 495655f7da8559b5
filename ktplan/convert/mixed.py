"""Which experts of a 4-bit store get 8 bits: those that 4 bits hurt most, as many as a budget of bytes allows."""

from __future__ import annotations

import numpy as np

from ktplan.convert.expert import Reader, Slot, pack_expert, refuse_not_finite
from ktplan.errors import BadUsage, DoesNotFit
from ktplan.experts import ExpertId, ExpertSet
from ktplan.kernels import Pool
from ktplan.model.source import WeightSource
from ktplan.progress import Progress
from ktplan.quant.scheme import Scheme
from ktplan.store.manifest import StoreShape
from ktplan.units import format_bytes


def wide_count(source: WeightSource, scheme: Scheme, shape: StoreShape, budget: int) -> int:
    """How many experts can have 8 bits within `budget` bytes for all of them.

    Raises BadUsage for another scheme than 4 bits with searched scales, DoesNotFit for a budget below all in 4 bits.
    """
    if scheme.bits != 4 or scheme.rounding != "mse":
        raise BadUsage(
            "--mixed raises experts of a 4-bit store with searched scales to 8 bits; kt-kernel cannot read the result",
            hint="use it with --bits 4 --rounding mse",
        )
    count = source.spec.expert_count
    narrow, wide = shape.plain_bytes(4), shape.plain_bytes(8)
    if budget < count * narrow:
        raise DoesNotFit(
            f"all {count} experts take {format_bytes(count * narrow)} in 4 bits, --mixed allows {format_bytes(budget)}",
            hint=f"give between {format_bytes(count * narrow)} and {format_bytes(count * wide)}",
        )
    return min(count, (budget - count * narrow) // (wide - narrow))


def choose_wide(
    source: WeightSource, scheme: Scheme, shape: StoreShape, budget: int, threads: int, progress: Progress
) -> ExpertSet:
    """The experts with the largest relative error in 4 bits; reads and rounds the whole model once. Deterministic.

    An expert's error is the mean of its projections' squared relative errors; ties go to the first.
    """
    count = wide_count(source, scheme, shape, budget)
    spec = source.spec
    reader, slot, pool = Reader(source), Slot(), Pool(threads, spin_us=0)
    out = np.empty(shape.plain_bytes(4), np.uint8)
    errors: list[tuple[float, ExpertId]] = []
    try:
        with progress.task("measuring 4 bits", spec.expert_bytes, "B") as task:
            for layer in spec.moe_layers:
                for expert in range(spec.experts):
                    matrices = reader.read(slot, layer, expert)
                    found = pack_expert(matrices, scheme, shape, 4, out, pool)
                    if found is None:
                        refuse_not_finite(source, layer, expert, matrices)
                    assert found is not None
                    errors.append((sum(one.relative**2 for one in found), ExpertId(layer, expert)))
                    task.advance(spec.expert_bytes // spec.expert_count)
    finally:
        reader.close()
    worst = sorted(errors, key=lambda row: (-row[0], row[1]))
    return ExpertSet(expert for _, expert in worst[:count])
