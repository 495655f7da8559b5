"""What `ktplan place` needs beside a single plan: the job's inputs, comparison, sweep, several GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktplan.artifact import read_json_object, write_whole
from ktplan.cli.output import Output
from ktplan.errors import BadUsage
from ktplan.model import ModelSpec, open_source
from ktplan.placement import PlacementPlan, fit, hit_rate, make_plan
from ktplan.placement import memory as memory_lines
from ktplan.placement.budget import DEFAULT_CONTEXT, Needs
from ktplan.placement.comparison import Row, Table, compare_all
from ktplan.placement.decide import decide, setting_of
from ktplan.placement.known import describe, reference
from ktplan.placement.machine import HardwareSpec
from ktplan.placement.sweep import Answer, Question, is_question, parse, sweep
from ktplan.units import format_bytes, format_percent

if TYPE_CHECKING:
    from ktplan.profile import ActivationProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Model, machine and question as the command line names them."""

    spec: ModelSpec
    config: dict[str, Any] | None  # None: a GGUF file, which has none
    anatomy: memory_lines.Anatomy
    machine: HardwareSpec | None
    question: Question | None
    cpu_expert: int | None

    @classmethod
    def read(cls, model: Path, what_if: tuple[str, ...], hardware: Path | None, store: Path | None) -> Job:
        """Open everything that is named. Raises BadUsage for two machines or two questions."""
        source = open_source(model)
        questions = [text for text in what_if if is_question(text)]
        machines = [text for text in what_if if not is_question(text)]
        if len(questions) > 1 or len(machines) + (hardware is not None) > 1:
            raise BadUsage("several machines or several sweeps are named", hint="give one of each at most")
        machine = HardwareSpec.load(hardware) if hardware else describe(machines[0]) if machines else None
        root = source.root if source.root.is_dir() else source.root.parent
        config = root / "config.json"
        cpu_expert = None
        if store:
            from ktplan.store import ExpertStore

            opened = ExpertStore.open(store)
            opened.check_model(source.spec)
            cpu_expert = opened.manifest.bytes_per_expert
        return cls(
            spec=source.spec,
            config=read_json_object(config) if config.is_file() else None,
            anatomy=memory_lines.anatomy(source),
            machine=machine,
            question=parse(questions[0]) if questions else None,
            cpu_expert=cpu_expert,
        )

    def needs(self, context: int | None, batch: int) -> Needs:
        """Cache, workspace and dense lines for so much context."""
        tokens = min(self.spec.context, DEFAULT_CONTEXT) if context is None else context
        kv_bytes, kind = self.spec.kv_bytes_per_token * max(0, tokens) * max(1, batch), ""
        if self.config is not None:
            held = memory_lines.cache(self.config, self.spec.layers, max(0, tokens), max(1, batch))
            kv_bytes, kind = held.bytes, held.kind
        return Needs(
            kv_bytes=kv_bytes,
            workspace=memory_lines.workspace(self.spec, max(1, batch)),
            attention=kind,
            dense_lines=tuple((line.what, line.bytes) for line in self.anatomy.lines),
        )

    def cards(self) -> tuple[int, ...]:
        """Memory of the named machine's GPUs, else of this one's; empty where there is none."""
        if self.machine is not None:
            return tuple(gpu.memory for gpu in self.machine.gpus)
        from ktplan.hardware import detect

        return tuple(gpu.memory_total for gpu in detect().gpus if gpu.memory_total)


def single(
    job: Job,
    profile: ActivationProfile | None,
    strategy: str,
    counted: dict[str, Any],
    how: dict[str, Any],
    seed: int,
    kt_compat: bool,
) -> PlacementPlan:
    """A plan for one GPU."""
    budget = fit(job.spec, **counted, needs=job.needs(how["context"], how["batch"]), **how)
    return make_plan(
        job.spec, profile, strategy=strategy, budget=budget, seed=seed, machine=job.machine,
        cpu_expert=job.cpu_expert, kt_compat=kt_compat,
    )  # fmt: skip


def several(
    job: Job,
    profile: ActivationProfile | None,
    strategy: str,
    cards: tuple[int, ...],
    how: dict[str, Any],
    seed: int,
) -> PlacementPlan:
    """A plan over several GPUs, whole layers on each."""
    from ktplan.placement.several import plan_several

    needs = job.needs(how["context"], how["batch"])
    return plan_several(
        job.spec, profile, job.anatomy, cards, needs, strategy=strategy, seed=seed, machine=job.machine,
        cpu_expert=job.cpu_expert, **how,
    )  # fmt: skip


def compare(
    job: Job,
    profile: ActivationProfile | None,
    test: ActivationProfile | None,
    how: dict[str, Any],
    seed: int,
    plot: Path | None,
    out: Output,
) -> None:
    """All strategies over all shares, as a table and a picture."""
    if profile is None:
        raise BadUsage("--compare needs counts", hint="give --profile, from 'ktplan profile'")
    budget = fit(job.spec, slots=0, needs=job.needs(how["context"], how["batch"]), **how)
    setting = setting_of(job.spec, budget, job.machine or reference(), job.cpu_expert)
    table = compare_all(profile.planning(), setting, seed=seed)
    tests = _on_test(job.spec, profile, test, table, seed)
    if plot:
        _draw(table, plot, setting.machine.name)
    rows = [{**row._asdict(), "test": on_test} for row, on_test in zip(table.rows, tests, strict=True)]
    body = {
        "model": job.spec.name,
        "fingerprint": job.spec.fingerprint,
        "machine": setting.machine.name,
        "rows": rows,
        "note": table.note,
        "plot": str(plot) if plot else None,
    }
    out.report("place-comparison", body, lambda: _render(table, tests, profile, setting.machine.name, out))
    if table.note:
        out.note(table.note)


def _on_test(
    spec: ModelSpec, profile: ActivationProfile, test: ActivationProfile | None, table: Table, seed: int
) -> list[float | None]:
    if test is None:
        return [None] * len(table.rows)
    found: list[float | None] = []
    for row in table.rows:
        if row.strategy in ("dynamic", "shrunk", "optimal", "robust"):
            found.append(None)
            continue
        plan = make_plan(spec, strategy="uniform", slots=row.slots) if row.strategy == "uniform" else None
        from ktplan.placement.strategies import Cells, choose

        gpu = plan.gpu if plan else choose(
            row.strategy, Cells(spec.moe_layers, spec.experts), row.slots, profile.planning().total(), seed
        )  # fmt: skip
        found.append(hit_rate(gpu, test))
    return found


def _render(
    table: Table, tests: list[float | None], profile: ActivationProfile, machine: str, out: Output
) -> None:
    with_test = any(value is not None for value in tests)
    out.table(
        ["experts", "strategy", "held out", "decode t/s", "5-95 %", *(["--test"] if with_test else [])],
        [
            (
                f"{100 * row.ratio:g} % ({row.slots:,})",
                row.strategy,
                format_percent(row.hit_rate),
                f"{row.decode:.1f}",
                f"{row.decode_low:.1f} to {row.decode_high:.1f}",
                *(["-" if on_test is None else format_percent(on_test)] if with_test else []),
            )
            for row, on_test in zip(table.rows, tests, strict=True)
        ],
        title=f"GPU serves, of {profile.token_count:,} tokens in {profile.documents:,} documents; on {machine}",
        right=[2, 3, 4, 5],
    )


# Okabe and Ito's colours, told apart by the colour-blind; dashed where experts move while serving.
_STYLES = {
    "random": ("#999999", "-"), "uniform": ("#56B4E9", "-"), "front-loading": ("#009E73", "-"),
    "frequency": ("#0072B2", "-"), "optimal": ("#D55E00", "-"), "robust": ("#CC79A7", "-"),
    "dynamic": ("#E69F00", "--"), "shrunk": ("#000000", "--"),
}  # fmt: skip


def _draw(table: Table, path: Path, machine: str) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    from ktplan.profile.pictures import png

    figure = Figure(figsize=(11.5, 5), layout="constrained")
    hits, speed = figure.subplots(1, 2)
    for name in dict.fromkeys(row.strategy for row in table.rows):
        rows: list[Row] = [row for row in table.rows if row.strategy == name]
        x = [row.ratio for row in rows]
        colour, style = _STYLES.get(name, ("#333333", "-"))
        hits.plot(x, [row.hit_rate for row in rows], style, color=colour, marker=".", ms=5)
        speed.plot(x, [row.decode for row in rows], style, color=colour, marker=".", ms=5, label=name)
        if name == "frequency":
            low, high = [row.decode_low for row in rows], [row.decode_high for row in rows]
            speed.fill_between(x, low, high, alpha=0.15, lw=0, color=colour, label="frequency, 5 to 95 %")
    hits.set(ylabel="hit rate on documents left out", ylim=(0, 1.02))
    hits.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    speed.set(ylabel="decode tokens a second, predicted")
    for axes in (hits, speed):
        axes.set(xlabel="share of all experts on the GPU", xlim=(0, 1))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(True, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"on {machine}", fontsize=9)
    figure.legend(
        *speed.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False
    )
    write_whole(path, png(figure))


def sweep_table(
    job: Job,
    profile: ActivationProfile | None,
    strategy: str,
    cards: tuple[int, ...],
    how: dict[str, Any],
    seed: int,
    out: Output,
) -> None:
    """Predicted speed for every combination that the question asks for."""
    if profile is None:
        raise BadUsage("a sweep needs counts", hint="give --profile, from 'ktplan profile'")
    assert job.question is not None
    found = cards or job.cards()
    if not found and not job.question.vram:
        raise BadUsage("nothing says how much memory the GPU has", hint="give --card-memory, or vram=16..48")
    machine = job.machine or reference()
    planned = profile.planning()

    def ask(memory: int, tokens: int, batch: int) -> tuple[int, float, float, float]:
        given = {**how, "context": tokens, "batch": batch}
        budget = fit(job.spec, card_memory=memory, needs=job.needs(tokens, batch), **given)
        setting = setting_of(job.spec, budget, machine, job.cpu_expert)
        gpu, _, made = decide(planned, strategy, budget.slots, setting, seed)
        return len(gpu), made.decode, made.decode_low, made.decode_high

    tokens = how["context"] or min(job.spec.context, DEFAULT_CONTEXT)
    rows = sweep(job.question, ask, vram=sum(found), ctx=tokens, batch=how["batch"])
    body = {"model": job.spec.name, "machine": machine.name, "rows": [row._asdict() for row in rows]}
    out.report("place-sweep", body, lambda: _render_sweep(rows, job.spec, machine.name, out))


def _render_sweep(rows: list[Answer], spec: ModelSpec, machine: str, out: Output) -> None:
    out.table(
        ["GPU memory", "context", "batch", "experts", "decode t/s", "5-95 %"],
        [
            (
                format_bytes(row.vram),
                f"{row.ctx:,}",
                row.batch,
                f"{row.slots:,} of {spec.expert_count:,}" if row.decode is not None else "-",
                f"{row.decode:.1f}" if row.decode is not None else "does not fit",
                f"{row.low:.1f} to {row.high:.1f}" if row.low is not None else "",
            )
            for row in rows
        ],
        title=f"{spec.name} on {machine}; all sequences of a batch together",
        right=[0, 1, 2, 4, 5],
    )
