"""How wrong one MoE layer is in each format of `convert-cpu`, against float32 with the original weights.

    python benchmarks/layer_error.py [--formats int4-g32 bf16 ...]

32 tokens, 2048 x 1536, top 4 of 8, 16-bit activations; the weights go through the converter and the native engine. The
error is the relative Frobenius norm of the outputs' difference. Kinds of weights and inputs: bell-shaped; Student's t
with 5 degrees of freedom; 0.1 % of the weights times 10; one input channel times 50.
"""

from __future__ import annotations

import argparse

import numpy as np

from ktplan.convert.expert import quantize_expert
from ktplan.kernels import ExpertLayer, PackedExpert, Pool
from ktplan.model import ExpertWeights
from ktplan.quant import Scheme
from ktplan.store import StoreShape

HIDDEN, INTERMEDIATE, EXPERTS, TOKENS, TOP_K = 2048, 1536, 8, 32, 4
SCHEMES = {
    "bf16": Scheme(16, rounding="nearest"),
    "int8-row mse": Scheme(8),
    "int8-row kt": Scheme(8, rounding="kt"),
    "int4-g32": Scheme(4, 32),
    "int4-g64": Scheme(4, 64),
    "int4-g128": Scheme(4, 128),
    "int4-row mse": Scheme(4),
    "int4-row kt": Scheme(4, rounding="kt"),
}
KINDS = ("gaussian", "student t5", "outliers", "hot channel")


def make(kind: str, seed: int = 0) -> tuple[list[ExpertWeights], np.ndarray, np.ndarray, np.ndarray]:
    """Experts, hidden states, chosen experts and their weights."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        if kind == "student t5":
            values = random.standard_t(5, (rows, columns)).astype(np.float32)
        else:
            values = random.standard_normal((rows, columns), np.float32)
        values /= np.float32(columns**0.5)
        if kind == "outliers":
            values[random.random(values.shape) < 0.001] *= 10
        return values

    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    experts = [ExpertWeights(*(matrix(*shape) for shape in shapes)) for _ in range(EXPERTS)]
    hidden = random.standard_normal((TOKENS, HIDDEN), np.float32)
    if kind == "hot channel":
        hidden[:, 7] *= 50
    index = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    weights = random.random((TOKENS, TOP_K), np.float32)
    return experts, hidden, index, weights / weights.sum(axis=1, keepdims=True)


def exact(
    experts: list[ExpertWeights], hidden: np.ndarray, index: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """The layer's outputs, float64."""
    out = np.zeros((TOKENS, HIDDEN))
    for number, expert in enumerate(experts):
        tokens, places = np.nonzero(index == number)
        gate, up, down = (matrix.astype(np.float64) for matrix in expert)
        x = hidden[tokens].astype(np.float64)
        first = x @ gate.T
        inner = first / (1 + np.exp(-first)) * (x @ up.T)
        out[tokens] += weights[tokens, places][:, None] * (inner @ down.T)
    return out


def packed(expert: ExpertWeights, scheme: Scheme) -> PackedExpert:
    """An expert as the converter writes it."""
    weights, scales = [], []
    arrays, _ = quantize_expert(expert, scheme, 1)
    weights, found = arrays[:3], arrays[3:]
    rows = (INTERMEDIATE, INTERMEDIATE, HIDDEN)
    for array, count in zip(found, rows, strict=False):
        scales.append(array if scheme.group is None else array.reshape(count // 32, -1, 32))
    scales = scales or [None, None, None]
    return PackedExpert(weights[0], scales[0], weights[1], scales[1], weights[2], scales[2])


def bytes_a_weight(scheme: Scheme) -> float:
    """Codes and scales."""
    shape = StoreShape(
        bits=scheme.bits, group=scheme.group, parts=1, experts=1, hidden=HIDDEN, intermediate=INTERMEDIATE
    )
    return shape.plain_bytes(scheme.bits) / (3 * HIDDEN * INTERMEDIATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--formats", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--seeds", type=int, default=1, help="draws whose errors are averaged")
    arguments = parser.parse_args()
    pool = Pool()
    found: dict[str, list[float]] = {name: [] for name in arguments.formats}
    for kind in KINDS:
        sums = dict.fromkeys(arguments.formats, 0.0)
        for seed in range(arguments.seeds):
            experts, hidden, index, weights = make(kind, seed)
            wanted = exact(experts, hidden, index, weights)
            for name in arguments.formats:
                scheme = SCHEMES[name]
                layer = ExpertLayer(
                    [[packed(expert, scheme) for expert in experts]],
                    hidden=HIDDEN, intermediate=INTERMEDIATE, bits=scheme.tile_bits, group=scheme.group,
                    threads_pool=pool,
                )  # fmt: skip
                rest = layer.forward(hidden, index, weights) - wanted
                sums[name] += float(np.linalg.norm(rest) / np.linalg.norm(wanted))
        for name, total in sums.items():
            found[name].append(total / arguments.seeds)
    print("| format | bytes a weight | " + " | ".join(KINDS) + " |")
    print("|---|---|" + "---|" * len(KINDS))
    for name, errors in found.items():
        cells = " | ".join(f"{error:.4f}" for error in errors)
        print(f"| {name} | {bytes_a_weight(SCHEMES[name]):.4f} | {cells} |")


if __name__ == "__main__":
    main()
