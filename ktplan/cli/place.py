"""`ktplan place`: choose which experts live on the GPU and say what that is worth."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ktplan.artifact import check_output_file
from ktplan.cli.options import ByteSize, TokenCount, model_argument, output_options
from ktplan.cli.output import Output
from ktplan.errors import BadUsage
from ktplan.units import format_bytes, format_percent

if TYPE_CHECKING:
    from ktplan.model import ModelSpec
    from ktplan.placement import PlacementPlan
    from ktplan.placement.predict import Prediction

_STRATEGIES = ("frequency", "uniform", "front-loading", "random", "optimal", "robust")
_FORMATS = ("bf16", "gptq-w4", "gptq-w8")
ALL = "all"


class _Count(click.ParamType[int | str]):
    """A whole number, or `all`."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == ALL or isinstance(value, int):
            return ALL if value == ALL else int(value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"'{value}' is neither a whole number nor '{ALL}'", param, ctx)


_File = click.Path(path_type=Path)


@click.command("place")
@model_argument
@click.option(
    "--profile",
    "profile_file",
    type=_File,
    help="Counts from 'ktplan profile', or of another tool (.pt .gguf .csv ...).",
)
@click.option(
    "--strategy", type=click.Choice(_STRATEGIES), default="frequency", show_default=True,
    help="How experts are chosen: optimal solves for the machine's costs, robust for the slowest data set; these and "
    "frequency need a profile.",
)  # fmt: skip
@click.option(
    "--gpu-experts", type=_Count(), metavar="N|all", help="GPU experts in each MoE layer, on average."
)
@click.option("--ratio", type=float, metavar="R", help="Share of all experts, 0 to 1; cut to a whole number.")
@click.option("--gpu-memory", type=ByteSize(), help="Memory experts alone may use, e.g. 18GiB.")
@click.option(
    "--card-memory", type=ByteSize(), multiple=True,
    help="Memory of the card; experts get what all else leaves. Once for each GPU.  [default: what the machine has]",
)  # fmt: skip
@click.option(
    "--gpu-format", type=click.Choice(_FORMATS), default="bf16", show_default=True,
    help="How GPU experts are stored: sizes follow from it.",
)  # fmt: skip
@click.option(
    "--context", type=TokenCount(), help="Tokens of KV cache to count.  [default: 8192 or the model's]"
)
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences decoded at once.")
@click.option(
    "--hardware",
    "hardware_file",
    type=_File,
    help="The machine, from 'ktplan doctor --measure -o hardware.json'.",
)
@click.option(
    "--what-if", "what_if", multiple=True, metavar="MACHINE|RANGES",
    help='Another machine, "RTX 4090 24GiB, 2x Xeon 8x DDR5-4800", or ranges to sweep, '
    "vram=16..48,ctx=8k..128k,batch=1..16.",
)  # fmt: skip
@click.option("--store", type=_File, help="The expert store that the CPU will use: its real sizes count.")
@click.option(
    "--kt-compat",
    is_flag=True,
    help="Repeat sglang-kt's quirks: what it takes for MoE layers, ties of dense rows.",
)
@click.option("--margin", type=ByteSize(), default="1GiB", show_default=True, help="Workspace to leave free.")
@click.option(
    "--seed", type=int, default=42, show_default=True, help="For strategy random and for the intervals."
)
@click.option("--test", "test_file", type=_File, help="A profile of other text, to judge the plan on.")
@click.option(
    "--compare",
    is_flag=True,
    help="Compare all strategies and the dynamic rules at 0 to 100 % of the experts; writes no plan.",
)
@click.option("--plot", type=_File, help="With --compare: draw it, as PNG.")
@click.option("-o", "--output", type=_File, default="plan.json", show_default=True, help="The plan to write.")
@output_options
def place_command(
    model: Path,
    profile_file: Path | None,
    strategy: str,
    gpu_experts: int | str | None,
    ratio: float | None,
    gpu_memory: int | None,
    card_memory: tuple[int, ...],
    gpu_format: str,
    context: int | None,
    batch: int,
    hardware_file: Path | None,
    what_if: tuple[str, ...],
    store: Path | None,
    kt_compat: bool,
    margin: int,
    seed: int,
    test_file: Path | None,
    compare: bool,
    plot: Path | None,
    output: Path,
    out: Output,
) -> None:
    """Choose which experts live on the GPU.

    Say how many with one of --gpu-experts, --ratio, --gpu-memory (for experts alone) or --card-memory (for everything:
    dense weights, KV cache, margin and experts).

    \b
    Examples:
      ktplan place tiny --profile profile.safetensors --ratio 0.3 -o plan.json
      ktplan place ./model --profile p.safetensors --strategy optimal --hardware hardware.json
      ktplan place ./model --profile p.safetensors --what-if "RTX 4090 24GiB, 2x Xeon 8x DDR5-4800" --compare
      ktplan place ./model --profile p.safetensors --card-memory 24GiB --what-if vram=16..48,ctx=8k..128k
    """
    from ktplan.cli import place_tables as tables
    from ktplan.cli.profile_files import read_profile
    from ktplan.placement import hit_rate

    job = tables.Job.read(model, what_if, hardware_file, store)
    spec = job.spec
    profile = read_profile(spec, profile_file, out) if profile_file else None
    test = read_profile(spec, test_file, out) if test_file else None
    counted: dict[str, Any] = {"gpu_experts": gpu_experts, "ratio": ratio, "gpu_memory": gpu_memory}
    how: dict[str, Any] = {"gpu_format": gpu_format, "context": context, "margin": margin, "batch": batch}
    if compare:
        if card_memory or any(value is not None for value in counted.values()):
            raise BadUsage(
                "--compare takes its own budgets", hint="leave out --gpu-experts, --ratio and --*-memory"
            )
        tables.compare(job, profile, test, how, seed, plot, out)
        return
    if plot:
        raise BadUsage("--plot draws a comparison", hint="give --compare, too")
    if job.question is not None:
        tables.sweep_table(job, profile, strategy, card_memory, how, seed, out)
        return
    check_output_file(output, sources=[path for path in (model, profile_file, test_file) if path])
    cards = card_memory
    if not cards and all(value is None for value in counted.values()):
        cards = job.cards()
    if len(cards) > 1:
        plan = tables.several(job, profile, strategy, cards, how, seed)
    else:
        counted["card_memory"] = cards[0] if cards else None
        plan = tables.single(job, profile, strategy, counted, how, seed, kt_compat)
    on_test = hit_rate(plan.gpu, test) if test else None
    plan.save(output)
    body = {
        **plan.to_dict(),
        "plan": str(output),
        "per_layer": list(plan.per_layer()),
        "test_hit_rate": on_test,
    }
    out.report("place-report", body, lambda: _render(plan, on_test, out))
    _notes(plan, spec, out)
    if plan.prediction and job.machine is None:
        out.note("speeds are those of a published reference machine: name yours with --hardware or --what-if")
    out.note(f"wrote {output}")
    out.hint(f"ktplan emit {output} -o rules.yaml")


def _notes(plan: PlacementPlan, spec: ModelSpec, out: Output) -> None:
    budget, expectation = plan.budget, plan.expectation
    if budget.context > spec.context:
        out.warn(
            f"{budget.context:,} tokens of context are more than {spec.name} is made for ({spec.context:,})"
        )
    if budget.limit_bytes is not None and not budget.slots:
        out.warn(
            f"{budget.asked} holds no expert: one takes {format_bytes(budget.expert_bytes)} as {budget.gpu_format}"
        )
    if budget.gpu_format.startswith("gptq") and budget.slots:
        out.note(
            f"{budget.gpu_format} sizes are those of the packed files, as servers keep them; 'ktplan run' unpacks such "
            f"experts to 16 bits, {format_bytes(2 * spec.params_per_expert)} each"
        )
    if expectation is None:
        out.note("no profile given: the plan says nothing about hit rates")
    elif expectation.held_out is None and expectation.documents < 2:
        out.warn("the profile has one document: its hit rate is in-sample, on other text expect less")


def _render(plan: PlacementPlan, on_test: float | None, out: Output) -> None:
    budget = plan.budget
    cells = len(plan.shape.moe_layers) * plan.shape.experts
    out.table(
        ["GPU memory", "size", ""],
        [(what, format_bytes(size), remark) for what, size, remark in budget.lines()],
        title=f"{plan.model}: {len(plan.gpu):,} of {cells:,} experts on the GPU ({plan.strategy}; {budget.asked})",
        right=[1],
    )
    each = plan.per_layer()
    out.line(
        f"GPU experts a layer: {min(each)} min, {median(each):g} median, {max(each)} max of {plan.shape.experts}"
    )
    if plan.prediction:
        _render_prediction(plan.prediction, out)
    expectation = plan.expectation
    if expectation is None:
        return
    rows = [("this plan, in-sample", format_percent(expectation.in_sample), "on the text it was made from")]
    if expectation.held_out is not None:
        band = f"{_share(expectation.held_out_low)} to {_share(expectation.held_out_high)}"
        remark = f"{band} (5-95 % of as much other text), {expectation.folds} folds"
        rows.insert(0, ("this plan, held out", format_percent(expectation.held_out), remark))
    if on_test is not None:
        rows.append(("this plan, --test", format_percent(on_test), "on the second profile"))
    rows += [
        ("uniform", format_percent(expectation.uniform), "first ids of each layer"),
        ("random", format_percent(expectation.random), f"seed {plan.seed}"),
        ("bound", format_percent(expectation.bound), "the most so many experts serve of this text"),
    ]
    out.line()
    out.table(
        ["GPU serves", "hit rate", ""],
        rows,
        title=f"of {expectation.tokens:,} tokens in {expectation.documents:,} documents",
        right=[1],
    )


def _render_prediction(found: Prediction, out: Output) -> None:
    how = "replayed from the trace" if found.replayed else "from shares of counts"
    judged = "held out" if found.held_out else "in-sample"
    band = f"{found.decode_low:.1f} to {found.decode_high:.1f}"
    gain = f"{100 * found.deferral_gain:+.0f} % decode; changes outputs slightly"
    later = gain if found.deferral else "nothing to gain"
    rows = [
        ("decode", f"{found.decode:.1f} t/s", f"{band} (5-95 % of as much other text), {judged}, {how}"),
        ("prefill", f"{found.prefill:,.0f} t/s", "a prompt of 512 tokens"),
        ("one more GiB", f"{found.per_gib:+.2f} t/s", "of GPU memory for experts"),
        ("16k more context", f"{-found.per_16k_context:+.2f} t/s", "its cache takes the place of experts"),
        ("defer", f"{found.deferral} experts", later),
    ]  # fmt: skip
    if found.gap is not None:
        rows.append(
            ("solver's gap", f"{100 * found.gap:.3f} %", "from a bound that no plan of nested sets can beat")
        )
    out.line()
    batch = f", {found.batch} sequences at once" if found.batch > 1 else ""
    out.table(["speed", "predicted", ""], rows, title=f"on {found.machine}{batch}", right=[1])
    out.line(f"bottleneck: {found.bottleneck}")
    if found.kept:
        out.line(f"kept the experts of '{found.kept}': on documents left out they are at least as fast")


def _share(rate: float | None) -> str:
    return "-" if rate is None else format_percent(rate)
