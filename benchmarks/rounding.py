"""What rounding costs, in one format: kt-kernel's rule, searched scales, and levels fitted to calibration text.

    python benchmarks/rounding.py weights                    weight error on bell-shaped and heavy-tailed rows
    python benchmarks/rounding.py model MODEL [--bits 4]     layer output error on held-out text, and perplexity
                                              [--layers 6]   only the first MoE layers, and no perplexity

`model` walks the model layer by layer on the embedded text (or --dataset). Each expert is rounded in the three ways to
one scale a row, and as `convert-cpu` does without options (groups of 32 inputs); errors are those of the layer's routed
output on documents that nothing was fitted on, relative to what unrounded experts give for the same inputs. What the
next layer sees comes from the fitted experts, as in a conversion. Rows of any length are measured (a file needs
multiples of 64 or 128 inputs), since only numbers count here.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ktplan.quant import Scheme, dequantize, quantize_groups, quantize_rows, squared_error
from ktplan.quant.groups import dequantize_groups

ROUNDINGS = ("kt", "mse", "gptq")
GROUPS = "mse g32"  # the default format; with --bits 8 there is none
# what, as a share of kt's, at most
BARS = {("error", "mse"): 0.75, ("error", "gptq"): 0.5, ("perplexity", "gptq"): 0.4}
LARGEST_INCREASE = 0.001  # of the perplexity with 8 bits


def weights() -> None:
    random = np.random.default_rng(1)
    rows = 256
    print(f"{'weights':20} {'K':>6} {'bits':>4} {'kt':>8} {'mse':>8} {'ratio':>6}")
    for name, draw in (
        ("Gaussian", random.standard_normal),
        ("Student t, 5 d.f.", lambda size: random.standard_t(5, size)),
    ):
        for columns in (512, 2048, 7168):
            matrix = np.asarray(draw((rows, columns)), np.float32)
            for bits in (8, 4):
                error = {}
                for rounding in ("kt", "mse"):
                    found = quantize_rows(matrix, Scheme(bits, rounding=rounding))
                    difference, energy = squared_error(matrix, found)
                    error[rounding] = (difference / energy) ** 0.5
                print(
                    f"{name:20} {columns:6} {bits:4} {error['kt']:8.4f} {error['mse']:8.4f} "
                    f"{error['mse'] / error['kt']:6.2f}",
                    flush=True,
                )


def rounded(weights: Any, scheme: Scheme) -> Any:
    """An expert as the format stores it."""
    if scheme.group is not None:
        return type(weights)(
            *(dequantize_groups(quantize_groups(matrix, scheme.group)) for matrix in weights)
        )
    return type(weights)(*(dequantize(quantize_rows(matrix, scheme)) for matrix in weights))


def model(
    path: Path, bits: int, dataset: list[Path], max_tokens: int, test_tokens: int, most_layers: int | None
) -> dict[str, Any]:
    import torch
    from transformers.activations import ACT2FN

    from ktplan import network
    from ktplan.convert.calibrate import LayerByLayer
    from ktplan.convert.calibrated import CalibrationText, RowExperts
    from ktplan.convert.expert_rounding import stacked
    from ktplan.model import ExpertWeights, open_source
    from ktplan.model.embedded import corpus_files
    from ktplan.profile import read_corpus
    from ktplan.progress import SILENT

    source = open_source(path)
    spec = source.spec
    corpus = read_corpus(dataset or corpus_files("profile"))
    calibration = CalibrationText(corpus=corpus, max_tokens=max_tokens)
    scheme = Scheme(bits, rounding="gptq")
    names = (*ROUNDINGS, GROUPS) if bits == 4 else ROUNDINGS
    kept: dict[str, dict[tuple[int, int], ExpertWeights]] = {name: {} for name in names}
    measured = spec.moe_layers[:most_layers]
    layers: list[dict[str, float]] = []
    with torch.no_grad():
        run = LayerByLayer(path, source, calibration.read(source, SILENT))
        held = torch.arange(len(run.held_out))[run.held_out]
        place = torch.full((len(run.held_out),), -1)
        place[held] = torch.arange(len(held))
        for layer in range(measured[-1] + 1):
            with run.loaded(layer):
                if layer in spec.moe_layers:
                    routing = run.route(layer)
                    experts = RowExperts(
                        run, routing, ACT2FN[spec.activation], 1, scheme, calibration.settings
                    )
                    run.outputs.clear()
                    sums = {name: torch.zeros(len(held), spec.hidden) for name in ("exact", *names)}
                    for expert in range(spec.experts):
                        exact = source.expert(layer, expert)
                        first, second = experts.fit(expert, exact)
                        gate_up = first.rounded.weight().numpy()
                        ways = {
                            "exact": exact,
                            "kt": rounded(exact, Scheme(bits, rounding="kt")),
                            "mse": rounded(exact, Scheme(bits)),
                            "gptq": ExpertWeights(
                                gate_up[: spec.moe_intermediate],
                                gate_up[spec.moe_intermediate :],
                                second.rounded.weight().numpy(),
                            ),
                        }
                        if bits == 4:
                            ways[GROUPS] = rounded(exact, Scheme(4, 32))
                        rows, share = routing.rows[expert], routing.weights[expert]
                        own = run.held_out[rows]
                        inputs = run.inputs.read(rows[own])
                        for name, weights_ in ways.items():
                            wide, down = stacked(weights_, torch.device("cpu"))
                            gate, up = (inputs @ wide.T).chunk(2, dim=-1)
                            output = (ACT2FN[spec.activation](gate) * up) @ down.T
                            sums[name].index_add_(0, place[rows[own]], output * share[own, None])
                            if name != "exact":
                                kept[name][layer, expert] = weights_
                        experts.give_unrounded(expert, ways["gptq"])
                    size = float(sums["exact"].norm())
                    layers.append({name: float((sums[name] - sums["exact"]).norm()) / size for name in names})
                    print(
                        f"layer {layer:3} " + "  ".join(f"{n} {e:.4f}" for n, e in layers[-1].items()),
                        flush=True,
                    )
                run.advance(layer)
        del run
        losses = {} if most_layers else perplexities(path, kept, test_tokens, network)
    mean = {name: sum(row[name] for row in layers) / len(layers) for name in names}
    print_table(mean, losses, bits)
    return {"model": spec.name, "bits": bits, "layers": len(layers), "layer_error": mean, "loss": losses}


def print_table(mean: dict[str, float], losses: dict[str, float], bits: int) -> None:
    """Mean layer errors and perplexities, absolute and as shares of kt's, and how they stand to the bars."""
    grown = {name: math.expm1(loss - losses["exact"]) for name, loss in losses.items()}
    print(
        f"{'int' + str(bits):10} {'layer error':>12} {'of kt':>6} {'perplexity':>11} {'increase':>9} {'of kt':>6}"
    )
    for name, error in mean.items():
        line = f"{name:10} {error:12.4f} {error / mean['kt']:6.2f}"
        if losses:
            share = grown[name] / grown["kt"] if grown["kt"] > 0 else math.nan
            line += f" {math.exp(losses[name]):11.4f} {grown[name]:+9.3%} {share:6.2f}"
        print(line)
    found = {("error", name): error / mean["kt"] for name, error in mean.items()}
    if losses and grown["kt"] > 0:
        found |= {("perplexity", name): increase / grown["kt"] for name, increase in grown.items()}
    for bar, most in BARS.items() if bits == 4 else ():
        if bar in found:
            verdict = "ok" if found[bar] <= most else "above"
            print(f"{' of '.join(bar)}: {found[bar]:.2f} x kt   {verdict} (at most {most})")
    if losses and bits == 8:
        worst = max(grown[name] for name in ROUNDINGS)
        print(f"perplexity: {worst:+.3%}   {'ok' if worst <= LARGEST_INCREASE else 'above'} (at most +0.1 %)")


def perplexities(path: Path, kept: dict[str, Any], tokens: int, network: Any) -> dict[str, float]:
    """Mean loss on the embedded test text (English) with the experts of each rounding put into the model."""
    import torch

    from ktplan.model.embedded import corpus_files
    from ktplan.profile import read_corpus

    whole = network.load_whole(path, torch.float32)
    encode = network.tokenizer(path)
    length = 256
    rows = [
        encode(d.text, add_special_tokens=False)["input_ids"]
        for d in read_corpus(corpus_files("test")[:1]).documents
    ]
    pieces = [row[at : at + length] for row in rows for at in range(0, len(row) - length + 1, length)]
    pieces = pieces[:: max(1, len(pieces) // max(1, tokens // length))]
    modules = {layer: module for layer, (_, module) in network.experts_modules(whole).items()}

    def loss() -> float:
        total = sum(float(whole(input_ids=torch.tensor([p]), labels=torch.tensor([p])).loss) for p in pieces)
        return total / len(pieces)

    found = {"exact": loss()}
    for name, experts in kept.items():
        for (layer, expert), weights_ in experts.items():
            gate_up = torch.cat([torch.from_numpy(weights_.gate), torch.from_numpy(weights_.up)])
            modules[layer].gate_up_proj[expert].copy_(gate_up)
            modules[layer].down_proj[expert].copy_(torch.from_numpy(weights_.down))
        found[name] = loss()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["weights", "model"])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--bits", type=int, default=4, choices=[4, 8])
    parser.add_argument("--dataset", type=Path, nargs="*", default=[])
    parser.add_argument("--max-tokens", type=int, default=32_768)
    parser.add_argument("--test-tokens", type=int, default=8_192)
    parser.add_argument("--layers", type=int, help="stop after so many MoE layers")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    given = parser.parse_args()
    if given.what == "weights":
        weights()
        return
    from ktplan.model import locate

    report = model(
        locate(str(given.model)), given.bits, given.dataset, given.max_tokens, given.test_tokens, given.layers
    )
    if given.json:
        given.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
