"""`ktplan place`: choose which experts live on the GPU and say what that is worth."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ktplan.cli.options import ByteSize, TokenCount, model_argument, output_options
from ktplan.cli.output import Output
from ktplan.errors import BadUsage
from ktplan.units import format_bytes, format_percent

if TYPE_CHECKING:
    from ktplan.model import ModelSpec
    from ktplan.placement import Comparison, PlacementPlan
    from ktplan.profile import ActivationProfile

_STRATEGIES = ("frequency", "uniform", "front-loading", "random")
_FORMATS = ("bf16", "gptq-w4", "gptq-w8")
_COMPARED = (0.1, 0.3, 0.5)
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
@click.option("--profile", "profile_file", type=_File, help="Counts from 'ktplan profile'.")
@click.option(
    "--strategy", type=click.Choice(_STRATEGIES), default="frequency", show_default=True,
    help="How experts are chosen; only frequency needs a profile.",
)  # fmt: skip
@click.option(
    "--gpu-experts", type=_Count(), metavar="N|all", help="GPU experts in each MoE layer, on average."
)
@click.option("--ratio", type=float, metavar="R", help="Share of all experts, 0 to 1; cut to a whole number.")
@click.option("--gpu-memory", type=ByteSize(), help="Memory experts alone may use, e.g. 18GiB.")
@click.option("--card-memory", type=ByteSize(), help="Memory of the card; experts get what all else leaves.")
@click.option(
    "--gpu-format", type=click.Choice(_FORMATS), default="bf16", show_default=True,
    help="How GPU experts are stored: sizes follow from it.",
)  # fmt: skip
@click.option(
    "--context", type=TokenCount(), help="Tokens of KV cache to count.  [default: 8192 or the model's]"
)
@click.option("--margin", type=ByteSize(), default="1GiB", show_default=True, help="Workspace to leave free.")
@click.option(
    "--seed", type=int, default=42, show_default=True, help="For strategy random and for the intervals."
)
@click.option("--test", "test_file", type=_File, help="A profile of other text, to judge the plan on.")
@click.option(
    "--compare",
    is_flag=True,
    help="Compare all strategies at 10, 30 and 50 % of the experts; writes no plan.",
)
@click.option("-o", "--output", type=_File, default="plan.json", show_default=True, help="The plan to write.")
@output_options
def place_command(
    model: Path,
    profile_file: Path | None,
    strategy: str,
    gpu_experts: int | str | None,
    ratio: float | None,
    gpu_memory: int | None,
    card_memory: int | None,
    gpu_format: str,
    context: int | None,
    margin: int,
    seed: int,
    test_file: Path | None,
    compare: bool,
    output: Path,
    out: Output,
) -> None:
    """Choose which experts live on the GPU.

    Say how many with one of --gpu-experts, --ratio, --gpu-memory (for experts alone) or --card-memory (for everything:
    dense weights, KV cache, margin and experts).

    \b
    Example:
      ktplan place tiny --profile profile.safetensors --ratio 0.3 -o plan.json
    """
    from ktplan.model import read_spec
    from ktplan.placement import fit, hit_rate, make_plan
    from ktplan.profile import ActivationProfile

    spec = read_spec(model)
    profile = ActivationProfile.load(profile_file).for_model(spec) if profile_file else None
    test = ActivationProfile.load(test_file).for_model(spec) if test_file else None
    if compare:
        if any(value is not None for value in (gpu_experts, ratio, gpu_memory, card_memory)):
            raise BadUsage(
                "--compare takes its own budgets", hint="leave out --gpu-experts, --ratio and --*-memory"
            )
        _compare(spec, profile, test, seed, out)
        return
    budget = fit(
        spec,
        gpu_experts=gpu_experts,
        ratio=ratio,
        gpu_memory=gpu_memory,
        card_memory=card_memory,
        gpu_format=gpu_format,
        context=context,
        margin=margin,
    )
    for source in filter(None, (profile_file, test_file)):
        if output.exists() and output.samefile(source):
            raise BadUsage(f"{output} is the profile itself", hint="name another file with -o")
    plan = make_plan(spec, profile, strategy=strategy, budget=budget, seed=seed)
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
    if expectation is None:
        out.note("no profile given: the plan says nothing about hit rates")
    elif expectation.held_out is None:
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
    expectation = plan.expectation
    if expectation is None:
        return
    rows = [("this plan, in-sample", format_percent(expectation.in_sample), "on the text it was made from")]
    if expectation.held_out is not None:
        band = f"{_share(expectation.held_out_low)} to {_share(expectation.held_out_high)}"
        remark = f"{band} (5-95 % over documents), {expectation.folds} folds"
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


def _share(rate: float | None) -> str:
    return "-" if rate is None else format_percent(rate)


def _compare(
    spec: ModelSpec, profile: ActivationProfile | None, test: ActivationProfile | None, seed: int, out: Output
) -> None:
    from ktplan.placement import compare

    if profile is None:
        raise BadUsage("--compare needs counts", hint="give --profile, from 'ktplan profile'")
    rows = compare(spec, profile, _COMPARED, seed, test)
    body = {"model": spec.name, "fingerprint": spec.fingerprint, "rows": [row._asdict() for row in rows]}
    out.report("place-comparison", body, lambda: _render_comparison(rows, profile, out))


def _render_comparison(rows: list[Comparison], profile: ActivationProfile, out: Output) -> None:
    def band(row: Comparison) -> str:
        return (
            "-" if row.held_out_low is None else f"{_share(row.held_out_low)} to {_share(row.held_out_high)}"
        )

    with_test = any(row.test is not None for row in rows)
    out.table(
        ["experts", "strategy", "in-sample", "held out", "5-95 %", *(["--test"] if with_test else [])],
        [
            (
                f"{100 * row.ratio:g} % ({row.slots:,})",
                row.strategy,
                _share(row.in_sample),
                _share(row.held_out),
                band(row),
                *([_share(row.test)] if with_test else []),
            )
            for row in rows
        ],
        title=f"GPU serves, of {profile.token_count:,} tokens in {profile.documents:,} documents",
        right=[2, 3, 4, 5],
    )
