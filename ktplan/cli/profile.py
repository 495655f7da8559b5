"""`ktplan profile`: run a text through the model and record which experts each layer's router chooses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktplan.artifact import check_output_file
from ktplan.cli import profile_files
from ktplan.cli.options import ManyFiles, TokenCount, model_argument, model_word, output_options
from ktplan.cli.output import Output
from ktplan.cli.profile_files import named_files
from ktplan.cli.verbs import WithVerbs
from ktplan.errors import BadUsage
from ktplan.units import format_percent

if TYPE_CHECKING:
    from ktplan.cli.profile_network import Text
    from ktplan.model import ModelSpec
    from ktplan.profile import ActivationProfile, Corpus
    from ktplan.profile.recorder import Wishes

_TRACE_BYTES = (
    256 << 20
)  # a trace beyond this is cut: planning needs tens of thousands of tokens, not millions


@click.group("profile", cls=WithVerbs)
@model_argument
@click.option(
    "--dataset", cls=ManyFiles, multiple=True, required=True, metavar="[NAME=]FILE...",
    help="Text (.txt), documents (.jsonl, .json, .csv, .parquet), a folder or a pattern of them, or a data set in the "
    "Hugging Face cache (hf:org/name); several may follow. NAME tells data sets apart. 'corpus:profile' and "
    "'corpus:test' name the embedded text.",
)  # fmt: skip
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
@click.option("--group-by", metavar="FIELD", help="Field of a row that names its data set.")
@click.option(
    "--generate", type=TokenCount(), default=0, metavar="N",
    help="Continue each document by N tokens and count those apart: a placement is for them.",
)  # fmt: skip
@click.option(
    "--trace", is_flag=True, help="Keep what every token chose, so that 'place' can replay it exactly."
)
@click.option(
    "--strict", is_flag=True, help="Refuse a jsonl line that cannot be used instead of skipping it."
)
@click.option(
    "--store", type=click.Path(path_type=Path), help="Run the experts from this expert store (less memory)."
)
@click.option(
    "--by-layer", is_flag=True,
    help="Load one layer at a time.  [default: where the whole model does not fit into memory]",
)  # fmt: skip
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
    dataset: tuple[str, ...],
    output: Path,
    max_tokens: int | None,
    chunk: int,
    text_field: str,
    group_by: str | None,
    generate: int,
    trace: bool,
    strict: bool,
    store: Path | None,
    by_layer: bool,
    dtype: str,
    plot: Path | None,
    no_plot: bool,
    out: Output,
) -> None:
    """Record which experts a text uses.

    Texts are .txt files (each one document) or rows with a text field or chat messages. Give text like that which the
    model will serve, in several documents: a profile of another kind of text is worth little. Interrupted work is taken
    up again by the same command.

    \b
    Examples:
      ktplan profile tiny --dataset corpus:profile --max-tokens 40k -o profile.safetensors
      ktplan profile ./model --dataset code=src.jsonl chat=logs/ --generate 64 --trace -o profile.safetensors
      ktplan profile info profile.safetensors
    """
    from ktplan.model import read_spec
    from ktplan.profile import read_corpus, report

    if store and by_layer:
        raise BadUsage("a store is mapped, not loaded", hint="leave out --by-layer or --store")
    if plot and no_plot:
        raise BadUsage("--plot and --no-plot exclude each other", hint="leave one out")
    files = named_files(dataset)
    picture = _check_outputs(model, tuple(files), output, plot, no_plot)
    spec = read_spec(model)
    text = _text_of(model)
    corpus = read_corpus(
        list(files),
        text_field,
        strict=strict,
        datasets=files,
        group_by=group_by,
        chat=lambda messages: text().chat(messages),
    )
    _tell_corpus(corpus, out)
    from ktplan.cli import (
        profile_network as network,
    )  # torch comes with it: once the inputs are known to be good

    wishes = _wishes(spec, text(), chunk, max_tokens, generate, trace)
    way = network.Way(dtype, False) if store else network.choose_way(spec, dtype, by_layer, out)
    profile = network.record(
        model,
        spec,
        corpus,
        way,
        store,
        out,
        text=text(),
        wishes=wishes,
        settings={"text_field": text_field},
        output=output,
    )
    profile.save(output)
    if picture:
        from ktplan.profile import pictures

        pictures.save_plot(profile, picture)
    for warning in report.warnings(profile):
        out.warn(warning)
    body = _body(profile, corpus, output, picture)
    out.report("profile-report", body, lambda: _render(profile, corpus, out))
    out.note(f"wrote {output}" + (f" and {picture}" if picture else ""))
    out.hint(f"ktplan place {model_word(model)} --profile {output} --ratio 0.3 -o plan.json")


def _wishes(
    spec: ModelSpec, text: Text, chunk: int, max_tokens: int | None, generate: int, trace: bool
) -> Wishes:
    """How much to record. Raises BadUsage for what the model cannot do."""
    from ktplan.profile.recorder import Wishes

    wishes = Wishes(
        chunk=chunk if not generate else min(chunk, max(1, spec.context - generate)),
        max_tokens=max_tokens,
        generate=generate,
        trace_tokens=_TRACE_BYTES // (2 * spec.top_k * len(spec.moe_layers)) if trace else 0,
        special_ids=text.special_ids,
    )
    wishes.check(spec)
    return wishes


def _text_of(model: Path) -> Callable[[], Text]:
    """The model's tokenizer, loaded when it is first asked for."""

    @cache
    def text() -> Text:
        from ktplan.cli.profile_network import Text

        return Text(model)

    return text


def _check_outputs(
    model: Path, dataset: tuple[Path, ...], output: Path, plot: Path | None, no_plot: bool
) -> Path | None:
    """Refuse outputs that cannot be written before an hour of work, not after it; returns where the heat map goes."""
    check_output_file(output, sources=(model, *dataset))
    if no_plot:
        return None
    picture = plot or output.with_suffix(".png")
    if picture.suffix.lower() != ".png":
        raise BadUsage(f"the heat map {picture} is written as PNG", hint="name it .png with --plot")
    if picture == output or (picture.exists() and output.exists() and picture.samefile(output)):
        raise BadUsage(
            f"{output} cannot be both profile and heat map", hint="end the profile's name in .safetensors"
        )
    check_output_file(picture, sources=(model, *dataset))
    return picture


def _tell_corpus(corpus: Corpus, out: Output) -> None:
    warning = corpus.warning()
    if warning:
        out.warn(warning)
    whole = [file.name for file in corpus.files if not file.name.endswith((".jsonl", ".ndjson"))]
    if whole:
        out.note(f"{', '.join(whole)}: each text file is one document")


def _body(profile: ActivationProfile, corpus: Corpus, output: Path, picture: Path | None) -> dict[str, Any]:
    from ktplan.profile import report

    return {
        "profile": str(output),
        "plot": str(picture) if picture else None,
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "documents": profile.documents,
        "tokens": profile.token_count,
        "decode_tokens": profile.decode_token_count,
        "trace_tokens": profile.trace.tokens if profile.trace else 0,
        "datasets": sorted(set(profile.dataset_of)),
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


for _verb in (
    profile_files.info_command,
    profile_files.report_command,
    profile_files.merge_command,
    profile_files.import_command,
    profile_files.export_command,
):
    profile_command.add_command(_verb)
