"""`ktplan profile`: run a text through the model and record which experts each layer's router chooses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktplan.cli.options import TokenCount, dataset_option, model_argument, model_word, output_options
from ktplan.cli.output import Output
from ktplan.errors import BadUsage, DoesNotFit, KtplanError
from ktplan.units import format_bytes, format_percent

if TYPE_CHECKING:
    from ktplan.model import ModelSpec
    from ktplan.profile import ActivationProfile, Corpus
    from ktplan.profile.recorder import Tokens

_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes
_MEMORY_SHARE = (
    0.6  # of free memory that weights may take before float32 is too much: loading needs room beside
)


@click.command("profile")
@model_argument
@dataset_option()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default="profile.safetensors", show_default=True,
    help="The profile to write.",
)  # fmt: skip
@click.option(
    "--max-tokens", type=TokenCount(), help="Stop after so many tokens; the files share them evenly."
)
@click.option(
    "--chunk",
    type=TokenCount(),
    default=256,
    show_default=True,
    help="Tokens of a document seen at once, from its start.",
)
@click.option(
    "--text-field", default="text", show_default=True, help="Field of a jsonl row that holds the text."
)
@click.option(
    "--strict", is_flag=True, help="Refuse a jsonl line that cannot be used instead of skipping it."
)
@click.option(
    "--store", type=click.Path(path_type=Path), help="Run the experts from this expert store (less memory)."
)
@click.option(
    "--dtype", type=click.Choice(("auto", "float32", "bfloat16", "float16")), default="auto", show_default=True,
    help="Type to compute in; auto is float32 where memory allows, else as stored.",
)  # fmt: skip
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Where the heat map goes. Default: beside the profile."
)
@click.option("--no-plot", is_flag=True, help="Draw no heat map.")
@output_options
def profile_command(
    model: Path,
    dataset: tuple[Path, ...],
    output: Path,
    max_tokens: int | None,
    chunk: int,
    text_field: str,
    strict: bool,
    store: Path | None,
    dtype: str,
    plot: Path | None,
    no_plot: bool,
    out: Output,
) -> None:
    """Record which experts a text uses.

    Texts are .txt files (each one document) or .jsonl files (one document a line, {"text": "..."}). Give text like that
    which the model will serve, in several documents: a profile of another kind of text is worth little.

    \b
    Example:
      ktplan profile tiny --dataset corpus:profile --max-tokens 40k -o profile.safetensors
    """
    from ktplan.model import read_spec
    from ktplan.profile import read_corpus, report
    from ktplan.profile.recorder import record

    if plot and no_plot:
        raise BadUsage("--plot and --no-plot exclude each other", hint="leave one out")
    picture = None if no_plot else plot or output.with_suffix(".png")
    for path in filter(None, (output, picture)):
        _check_place(path, dataset)
    spec = read_spec(model)
    corpus = read_corpus(dataset, text_field, strict=strict)
    _tell_corpus(corpus, out)
    from ktplan import network  # torch comes with it: only once the inputs are known to be good

    modules, forward, how = _network(model, store, dtype if store else _dtype(spec, dtype, out), out)
    profile = record(
        spec,
        corpus,
        modules=modules,
        encode=network.text_encoder(network.tokenizer(model)),
        forward=forward,
        chunk=chunk,
        max_tokens=max_tokens,
        settings={"text_field": text_field, **how},
        progress=out.progress(),
    )
    profile.save(output)
    if picture:
        report.save_plot(profile, picture)
    for warning in report.warnings(profile):
        out.warn(warning)
    body = _body(profile, corpus, output, picture)
    out.report("profile-report", body, lambda: _render(profile, corpus, out))
    out.note(f"wrote {output}" + (f" and {picture}" if picture else ""))
    out.hint(f"ktplan place {model_word(model)} --profile {output} --ratio 0.3 -o plan.json")


def _check_place(path: Path, dataset: tuple[Path, ...]) -> None:
    """Refuse an output that cannot be written before an hour of work, not after it."""
    folder = path.parent
    if path.is_dir():
        raise BadUsage(f"{path} is a folder, a file is to be written", hint="name a file, e.g. with -o")
    if not folder.is_dir():
        raise BadUsage(
            f"the folder {folder} does not exist", hint="make it first, or name another file with -o"
        )
    if not os.access(folder, os.W_OK):
        raise KtplanError(f"{folder} is not writable", hint="name another file with -o")
    if path.exists() and any(path.samefile(text) for text in dataset):
        raise BadUsage(f"{path} is one of the texts", hint="name another file with -o")


def _tell_corpus(corpus: Corpus, out: Output) -> None:
    warning = corpus.warning()
    if warning:
        out.warn(warning)
    whole = [file.name for file in corpus.files if not file.name.endswith((".jsonl", ".ndjson"))]
    if whole:
        out.note(f"{', '.join(whole)}: each text file is one document")


def _dtype(spec: ModelSpec, asked: str, out: Output) -> str:
    """What to compute in, and whether the whole model fits into memory with it; None is read as enough."""
    from ktplan.hardware import detect

    machine = detect()
    known = [amount for amount in (machine.memory_available, machine.memory_limit) if amount is not None]
    free = min(known, default=None)
    params = spec.dense_params + spec.expert_params
    # float32 holds any stored weight exactly, so routing is the model's own; half types round every layer anew.
    chosen = asked
    if asked == "auto":
        chosen = (
            "float32" if free is None or params * _WIDTH["float32"] < _MEMORY_SHARE * free else spec.dtype
        )
        if chosen != "float32":
            out.note(
                f"computing in {chosen}: the model as float32 would not fit into {format_bytes(free or 0)}"
            )
    need = params * _WIDTH.get(chosen, 2)
    if free is not None and need > free:
        raise DoesNotFit(
            f"{spec.name} as {chosen} needs {format_bytes(need)} of memory, {format_bytes(free)} are free",
            hint="convert the experts with 'ktplan convert-cpu' and give that with --store",
        )
    return chosen


def _network(
    model: Path, store: Path | None, dtype: str, out: Output
) -> tuple[dict[int, tuple[str, Any]], Callable[[Tokens], object], dict[str, str]]:
    """The experts modules, a forward pass, and what to remember of how they ran."""
    import torch

    from ktplan import network

    modules: dict[int, tuple[str, Any]]
    if store:
        from ktplan.runtime import engine

        loaded = engine.load(model, store=store, dtype=dtype, progress=out.progress()).network
        whole = loaded.model
        modules = {layer: (module.place.name, module) for layer, module in loaded.experts.items()}
        how = {"dtype": str(loaded.dtype).removeprefix("torch."), "experts": "store"}
    else:
        with out.progress().task("loading the model", None):
            whole = network.load_whole(model, dtype)
        modules = dict(network.experts_modules(whole))
        how = {"dtype": dtype, "experts": "checkpoint"}
    device = whole.get_input_embeddings().weight.device

    def forward(ids: Tokens) -> object:
        with torch.inference_mode():
            return whole.base_model(input_ids=torch.from_numpy(ids).to(device), use_cache=False)

    return modules, forward, how


def _body(profile: ActivationProfile, corpus: Corpus, output: Path, picture: Path | None) -> dict[str, Any]:
    from ktplan.profile import report

    return {
        "profile": str(output),
        "plot": str(picture) if picture else None,
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "documents": profile.documents,
        "tokens": profile.token_count,
        "files": [file._asdict() for file in profile.files],
        "skipped": [row._asdict() for row in corpus.skipped],
        "layers": [row.to_dict() for row in report.layer_use(profile)],
        "single_document_mass": report.single_document_mass(profile),
        "warnings": [*filter(None, [corpus.warning()]), *report.warnings(profile)],
    }


def _render(profile: ActivationProfile, corpus: Corpus, out: Output) -> None:
    from ktplan.profile import report

    rows = [
        (
            row.layer,
            f"{row.slots:,}",
            f"{row.used} of {profile.experts}",
            row.unseen,
            *(format_percent(share) for share in row.busiest_shares),
            f"{row.busiest_over_mean:.1f}",
            f"{row.entropy:.3f}",
            format_percent(row.unseen_mass),
        )
        for row in report.layer_use(profile)
    ]
    used_documents = f"{profile.documents:,} of {len(corpus.documents):,} documents"
    out.table(
        [
            "layer",
            "choices",
            "experts used",
            "unseen",
            *(f"top {100 * share:.0f} %" for share in report.SHARES),
        ]
        + ["busiest/mean", "entropy", "unseen mass"],
        rows,
        title=f"{profile.model}: {profile.token_count:,} tokens of {used_documents}, top-{profile.top_k}",
        right=range(10),
    )
