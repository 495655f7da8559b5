"""`ktplan eval`: what quantization and placement cost, against the unquantized model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktplan.cli.options import TokenCount, dataset_option, model_argument, output_options, warn_if_crowded
from ktplan.cli.output import Output
from ktplan.cli.run import placement_options, read_rules
from ktplan.errors import BadUsage
from ktplan.units import format_bytes, format_percent

if TYPE_CHECKING:
    from ktplan.model import ModelSpec
    from ktplan.profile import Corpus
    from ktplan.runtime.evaluate import Estimate, Measured, Quality
    from ktplan.runtime.loader import Prepared


@click.command("eval")
@model_argument
@dataset_option()
@click.option(
    "--store", "stores", multiple=True, type=click.Path(path_type=Path),
    help="Expert store for the CPU experts, from 'ktplan convert-cpu'; give several to compare them.",
)  # fmt: skip
@placement_options
@click.option(
    "--max-tokens", type=TokenCount(), help="Stop after so many tokens; the files share them evenly."
)
@click.option(
    "--chunk", type=TokenCount(), default=256, show_default=True,
    help="Tokens of a document seen at once; nothing is predicted across documents.",
)  # fmt: skip
@click.option(
    "--text-field", default="text", show_default=True, help="Field of a jsonl row that holds the text."
)
@click.option(
    "--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32", show_default=True,
    help="Of both models' arithmetic; float32 shows the weights' share alone.",
)  # fmt: skip
@click.option(
    "--activations", type=click.Choice(("16", "8")), default="16", show_default=True,
    help="Bits of activations in the CPU engine.",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads. Default: what the machine has.")
@click.option(
    "--no-reference", is_flag=True, help="Perplexity alone: the unquantized model is not loaded beside."
)
@output_options
def eval_command(
    model: Path,
    dataset: tuple[Path, ...],
    stores: tuple[Path, ...],
    gpu_weights: Path | None,
    plan_file: Path | None,
    rules_file: Path | None,
    max_tokens: int | None,
    chunk: int,
    text_field: str,
    dtype: str,
    activations: str,
    threads: int | None,
    no_reference: bool,
    out: Output,
) -> None:
    """Measure what quantization and placement cost.

    Runs text through the model as 'ktplan run' would and through transformers' own forward of the unquantized
    checkpoint, and compares: perplexity, KL divergence, and how often both find the same token likeliest.

    \b
    Example:
      ktplan eval tiny --store tiny-int8 --dataset corpus:test --max-tokens 8k
      ktplan eval tiny --store tiny-int8 --store tiny-int4 --dataset corpus:test
    """
    from ktplan.profile import read_corpus

    if max_tokens is not None and max_tokens < 1:
        raise BadUsage(f"--max-tokens {max_tokens} is nothing to measure", hint="give 1 or more")
    corpus = read_corpus(dataset, text_field)
    if warning := corpus.warning():
        out.warn(warning)
    rules = read_rules(model, plan_file, rules_file)
    from ktplan.runtime.loader import open_sources, prepare

    prepared = [
        prepare(open_sources(model, store, gpu_weights), rules=rules, dtype=dtype)
        for store in (stores or (None,))
    ]
    for warning in prepared[0].placement.warnings:
        out.warn(warning)
    for note in prepared[0].notes:
        out.note(f"note: {note}")
    settings = {"dtype": dtype, "activation_bits": int(activations), "chunk": chunk, "max_tokens": max_tokens}
    spec, reference, measured = _measure(model, corpus, prepared, settings, threads, no_reference, out)
    rows = [
        {
            **found.to_dict(),
            "store": str(store.path) if (store := one.sources.store) else None,
            "scheme": store.manifest.scheme if store else None,
            "experts_bytes": _stored(one, spec),
        }
        for one, found in zip(prepared, measured, strict=True)
    ]
    body = {
        "model": spec.name,
        "fingerprint": spec.fingerprint,
        "reference": {**reference.to_dict(), "experts_bytes": spec.expert_bytes} if reference else None,
        "stores": rows,
        "gpu_weights": str(gpu_weights) if gpu_weights else None,
        "gpu_experts": prepared[0].placement.gpu_experts.to_ranges(),
        "files": [file._asdict() for file in corpus.files],
        "notes": list(prepared[0].notes),
        **settings,
    }
    names = (
        [str(row["scheme"] or "unquantized") for row in rows]
        if len(set(stores)) < 2
        else list(map(str, stores))
    )
    sizes = [int(row["experts_bytes"]) for row in rows]
    out.report("eval-report", body, lambda: _render(spec, reference, names, sizes, measured, out))


def _measure(
    model: Path,
    corpus: Corpus,
    prepared: Sequence[Prepared],
    settings: dict[str, Any],
    threads: int | None,
    no_reference: bool,
    out: Output,
) -> tuple[ModelSpec, Measured | None, list[Measured]]:
    """Load the dense part once, the experts of every candidate beside it, and the reference; run the text."""
    from ktplan import network
    from ktplan.runtime.evaluate import Candidate, evaluate, model_logits
    from ktplan.runtime.loader import build, build_experts, mount

    warn_if_crowded(threads, out)
    how: dict[str, Any] = {"threads": threads, "activation_bits": settings["activation_bits"]}
    loaded = build(prepared[0], **how, progress=out.progress())
    others = [build_experts(one, loaded.source, **how, progress=out.progress()) for one in prepared[1:]]
    plain = model_logits(loaded.model)

    def candidate(experts: Any) -> Candidate:
        def logits(ids: Sequence[int]) -> Any:
            mount(loaded.model, experts)
            return plain(ids)

        return Candidate(logits=logits, counters=next(iter(experts.values())).counters)

    device = loaded.model.get_input_embeddings().weight.device
    whole = None if no_reference else network.load_whole(model, settings["dtype"], device)
    reference, measured = evaluate(
        corpus,
        encode=network.text_encoder(network.tokenizer(model)),
        candidates=[candidate(experts) for experts in (loaded.experts, *others)],
        reference=None if whole is None else model_logits(whole),
        chunk=min(settings["chunk"], loaded.source.spec.context),
        max_tokens=settings["max_tokens"],
        progress=out.progress(),
    )
    return loaded.source.spec, reference, measured


def _stored(prepared: Prepared, spec: ModelSpec) -> int:
    """Bytes of all routed experts as they are stored: in the store, in the GPTQ folder, or in the checkpoint."""
    one = spec.expert_bytes // spec.expert_count
    store, weights = prepared.sources.store, prepared.sources.gpu_weights
    on_gpu = len(prepared.placement.gpu_experts)
    gpu = weights.bytes // len(weights.experts) if weights else one
    if store is None:
        return on_gpu * gpu + (spec.expert_count - on_gpu) * one
    shape = store.manifest.shape
    usual, wide = shape.plain_bytes(shape.bits), len(shape.wide - prepared.placement.gpu_experts)
    narrow = spec.expert_count - on_gpu - wide
    return on_gpu * gpu + narrow * usual + wide * shape.plain_bytes(8)


def _render(
    spec: ModelSpec,
    reference: Measured | None,
    names: list[str],
    sizes: list[int],
    measured: list[Measured],
    out: Output,
) -> None:
    rows: list[tuple[Any, ...]] = []
    if reference:
        rows.append(
            _row(f"{spec.dtype} (transformers)", spec.expert_bytes, "all", reference.overall, reference)
        )
    for name, size, found in zip(names, sizes, measured, strict=True):
        if len(measured) == 1 and len(found.by_source) > 1:
            rows += [_row(name, size, source, quality, None) for source, quality in found.by_source.items()]
        rows.append(_row(name, size, "all", found.overall, found))
    columns = (
        "experts", "size", "text", "tokens", "perplexity", "loss change", "KL, nats", "same top token", "t/s",
        "GPU served",
    )  # fmt: skip
    out.table(columns, rows, right=(1, *range(3, 10)))
    out.note("brackets: 95 % interval over documents; t/s: tokens of whole stretches")


def _row(name: str, size: int, text: str, quality: Quality, whole: Measured | None) -> tuple[Any, ...]:
    hits = whole.gpu_hit_rate if whole else None
    return (
        name,
        format_bytes(size),
        text,
        f"{quality.tokens:,}",
        _interval(quality.perplexity, "{:.2f}".format),
        _interval(quality.loss_change, "{:+.4f}".format),
        _interval(quality.kl, "{:.5f}".format),
        _interval(quality.agreement, format_percent),
        f"{whole.tokens_per_s:,.0f}" if whole else "",
        "" if hits is None else format_percent(hits),
    )


def _interval(figure: Estimate | None, form: Callable[[float], str]) -> str:
    if figure is None:
        return "-"
    if figure.low is None or figure.high is None:
        return form(figure.value)
    return f"{form(figure.value)} [{form(figure.low)}, {form(figure.high)}]".replace(" %, ", ", ").replace(
        " %]", "]"
    )
