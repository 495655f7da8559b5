"""`ktplan run`: text from a model whose experts are spread over GPU and CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ktplan.cli.options import ByteSize, model_argument, output_options, warn_if_crowded
from ktplan.cli.output import Output
from ktplan.errors import BadUsage
from ktplan.rules import is_device, load
from ktplan.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from ktplan.rules import Rules
    from ktplan.runtime.engine import Engine, Generation, RunStats
    from ktplan.runtime.loader import Prepared
    from ktplan.runtime.sampling import Sampling

_File = click.Path(path_type=Path)
F = TypeVar("F", bound=Callable[..., Any])


def placement_options(function: F) -> F:
    """--gpu-weights, --plan and --rules: where the experts go, and with which weights on the GPU."""
    options = (
        ("--rules", "rules_file", "Injection rules (YAML), e.g. from 'ktplan emit'."),
        ("--plan", "plan_file", "Placement from 'ktplan place'."),
        ("--gpu-weights", "gpu_weights", "Experts for the GPU, from 'ktplan convert-gpu'."),
    )
    for flag, name, text in options:
        function = click.option(flag, name, type=_File, help=text)(function)
    return function


@click.command("run")
@model_argument
@click.option("--store", type=_File, help="Expert store for the CPU experts, from 'ktplan convert-cpu'.")
@placement_options
@click.option("--prompt", metavar="TEXT", help="Text to continue, as it is. Default: read from stdin.")
@click.option("--chat", is_flag=True, help="Converse, with the model's chat template.")
@click.option("--system", metavar="TEXT", help="System text of the conversation.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True,
    help="Longest answer; the model may end sooner.",
)  # fmt: skip
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."
)
@click.option("--top-k", type=int, default=0, help="Choose among so many tokens. Default: all.")
@click.option("--top-p", type=float, default=1.0, help="Choose among tokens with this much probability.")
@click.option("--min-p", type=float, default=0.0, help="Drop tokens below this share of the likeliest one.")
@click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: avoid tokens seen before.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads. Default: what the machine has.")
@click.option(
    "--dtype", type=click.Choice(("auto", "float32", "bfloat16", "float16")), default="auto", show_default=True,
    help="Of dense weights and GPU experts; auto is bfloat16 on a GPU, float32 on the CPU.",
)  # fmt: skip
@click.option(
    "--device", default="auto", show_default=True,
    help="Where modules go that no rule takes: auto, cpu, cuda:0 ...",
)  # fmt: skip
@click.option(
    "--activations", type=click.Choice(("16", "8")), default="16", show_default=True,
    help="Bits of activations in the CPU engine; 8 is faster with many tokens and less exact.",
)  # fmt: skip
@click.option(
    "--gpu-memory", type=ByteSize(), help="Refuse rules that put more weights than this on one GPU."
)
@click.option(
    "--dry-run", is_flag=True, help="Say what each rule takes and the bytes on each device; load nothing."
)
@output_options
def run_command(
    model: Path,
    store: Path | None,
    gpu_weights: Path | None,
    plan_file: Path | None,
    rules_file: Path | None,
    prompt: str | None,
    chat: bool,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    seed: int | None,
    threads: int | None,
    dtype: str,
    device: str,
    activations: str,
    gpu_memory: int | None,
    dry_run: bool,
    out: Output,
) -> None:
    """Generate text or chat.

    Without --plan or --rules all experts are on the CPU, from --store, but for those that --gpu-weights
    holds; without --store they are computed from the checkpoint, unquantized. The text goes to stdout as it
    comes, figures to stderr at the end.

    \b
    Example:
      ktplan run tiny --store tiny-int8 --prompt "The President of the" --max-new-tokens 32
      ktplan run tiny --store tiny-int8 --plan plan.json --chat
      ktplan run tiny --rules rules.yaml --dry-run
    """
    _check_asked(prompt, chat, system, device, dry_run, out)
    text = "" if chat or dry_run else _prompt(prompt)
    rules = read_rules(model, plan_file, rules_file)
    from ktplan.runtime.loader import check_memory, open_sources, prepare
    from ktplan.runtime.sampling import Sampling

    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    prepared = prepare(open_sources(model, store, gpu_weights), rules=rules, dtype=dtype, device=device)
    for warning in prepared.placement.warnings:
        out.warn(warning)
    for note in prepared.notes:
        out.note(f"note: {note}")
    if dry_run:
        out.report("run-dry-run", _dry_body(prepared), lambda: _render_dry(prepared, out))
        check_memory(prepared, gpu_memory)
        return
    check_memory(prepared, gpu_memory)
    engine = _engine(prepared, threads, int(activations), out)
    if chat:
        _chat(engine, system, sampling, max_new_tokens, out)
    else:
        _write(engine, text, sampling, max_new_tokens, out)


def _check_asked(
    prompt: str | None, chat: bool, system: str | None, device: str, dry_run: bool, out: Output
) -> None:
    """Refuse contradictions before the seconds that torch takes to load."""
    if prompt is not None and chat:
        raise BadUsage("--prompt and --chat exclude each other", hint="leave one out")
    if system is not None and not chat:
        raise BadUsage("--system belongs to --chat", hint="add --chat, or put the text into the prompt")
    if chat and out.json_mode:
        raise BadUsage("--chat has no --json", hint="use --prompt with --json")
    if device != "auto" and not is_device(device):
        raise BadUsage(
            f"--device {device} is no device", hint="use auto, cpu, gpu, cuda, or cuda:0, cuda:1 ..."
        )
    if prompt is None and not chat and not dry_run and sys.stdin.isatty():
        raise BadUsage("no prompt", hint="give --prompt TEXT, --chat, or a text on stdin")


def _prompt(prompt: str | None) -> str:
    text = prompt if prompt is not None else _from_stdin(sys.stdin.read)
    if not text:
        raise BadUsage("the prompt is empty", hint="give a text with --prompt or on stdin")
    return text


def read_rules(model: Path, plan_file: Path | None, rules_file: Path | None) -> Rules | None:
    """The rules that --plan or --rules gives; None for neither. Raises BadUsage for both."""
    if plan_file and rules_file:
        raise BadUsage("--plan and --rules exclude each other", hint="leave one out")
    if rules_file:
        return load(rules_file)
    if plan_file:
        from ktplan.placement import PlacementPlan
        from ktplan.runtime.loader import rules_of_plan

        return rules_of_plan(PlacementPlan.load(plan_file), model)
    return None


def _engine(prepared: Prepared, threads: int | None, activation_bits: int, out: Output) -> Engine:
    from ktplan import network
    from ktplan.runtime.engine import start
    from ktplan.runtime.loader import build

    warn_if_crowded(threads, out)
    tokenizer = network.tokenizer(prepared.sources.model)  # before the minutes that loading may take
    loaded = build(prepared, threads=threads, activation_bits=activation_bits, progress=out.progress())
    for note in loaded.notes[len(prepared.notes) :]:
        out.note(f"note: {note}")
    return start(loaded, tokenizer)


def _write(engine: Engine, text: str, sampling: Sampling, limit: int, out: Output) -> None:
    generation = engine.generate(engine.encode(text), max_new_tokens=limit, sampling=sampling)
    pieces = []
    for piece in generation:
        pieces.append(piece)
        if not out.json_mode:
            out.write(piece)
    answer = "".join(pieces)
    out.report(
        "run-report",
        _body(engine, generation, text, answer),
        lambda: None if answer.endswith("\n") else out.line(),
    )
    out.note(figures(generation.stats, engine.network.seconds))


def _chat(engine: Engine, system: str | None, sampling: Sampling, limit: int, out: Output) -> None:
    from ktplan.runtime.chat import Conversation, talk

    conversation = Conversation(engine, system=system, sampling=sampling, max_new_tokens=limit)
    talk(
        conversation,
        read=_read_line,
        write=out.write,
        say=out.note,
        figures=lambda generation: figures(generation.stats, engine.network.seconds),
    )


def _read_line() -> str | None:
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    line = _from_stdin(sys.stdin.readline)
    return line if line else None


def _from_stdin(read: Callable[[], str]) -> str:
    try:
        text = read()
        text.encode()  # in the C locale Python lets foreign bytes through as half surrogates
    except UnicodeError as fault:
        raise BadUsage(
            f"stdin is not UTF-8 text: {getattr(fault, 'reason', fault)}", hint="convert it to UTF-8 first"
        ) from None
    return text


def figures(stats: RunStats, load_seconds: float) -> str:
    """The last line of a run: speeds of prompt and answer, and what the GPU served of each."""
    kept = f" ({stats.cached_tokens} kept)" if stats.cached_tokens else ""
    parts = [
        f"prompt {stats.prompt_tokens} tokens{kept}" + _rate(stats.prefill_rate),
        f"answer {stats.new_tokens} tokens" + _rate(stats.decode_rate),
        f"GPU served {_share(stats.prefill_hit_rate)} of the prompt's expert routes, "
        f"{_share(stats.decode_hit_rate)} of the answer's",
        f"loaded in {format_seconds(load_seconds)}",
    ]
    return "   ".join(parts)


def _rate(rate: float | None) -> str:
    return "" if rate is None else f", {rate:.1f} t/s"


def _share(rate: float | None) -> str:
    return "-" if rate is None else format_percent(rate)


def _body(engine: Engine, generation: Generation, prompt: str, answer: str) -> dict[str, Any]:
    stats, loaded = generation.stats, engine.network
    return {
        "prompt": prompt,
        "text": answer,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "prefill_tokens_per_s": stats.prefill_rate,
        "decode_tokens_per_s": stats.decode_rate,
        "prefill_gpu_hit_rate": stats.prefill_hit_rate,
        "decode_gpu_hit_rate": stats.decode_hit_rate,
        "load_seconds": loaded.seconds,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "bytes": dict(loaded.bytes),
        "gpu_experts": loaded.placement.gpu_experts.to_ranges(),
        "notes": list(loaded.notes),
        "warnings": list(loaded.placement.warnings),
    }


def _dry_body(prepared: Prepared) -> dict[str, Any]:
    placement = prepared.placement
    return {
        "rules": [taken.to_dict() for taken in placement.taken],
        "bytes": placement.bytes,
        "gpu_experts": placement.gpu_experts.to_ranges(),
        "dtype": str(prepared.dtype).removeprefix("torch."),
        "why_dtype": prepared.why_dtype,
        "notes": list(prepared.notes),
        "warnings": list(placement.warnings),
    }


def _render_dry(prepared: Prepared, out: Output) -> None:
    from ktplan.experts import format_ranges

    placement = prepared.placement
    out.table(
        ("rule", "class", "modules", "layers", "bytes", "for example"),
        [
            (
                taken.where,
                taken.class_name.rsplit(".", 1)[-1],
                taken.modules,
                format_ranges(taken.layers) or "-",
                ", ".join(f"{name} {format_bytes(size)}" for name, size in taken.bytes.items()) or "-",
                taken.examples[0] if taken.examples else "-",
            )
            for taken in placement.taken
        ],
        right=(2,),
    )
    total = ", ".join(f"{name} {format_bytes(size)}" for name, size in placement.bytes.items())
    on_gpu, every = len(placement.gpu_experts), sum(found.experts for found in placement.experts)
    out.line(f"weights: {total}; {on_gpu:,} of {every:,} experts on the GPU side; {prepared.why_dtype}")
