"""`ktplan doctor`: what this machine can run, and why. The verdict comes first."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ktplan.cli.options import output_options
from ktplan.cli.output import Output
from ktplan.units import format_bytes

if TYPE_CHECKING:
    from ktplan.hardware import Hardware
    from ktplan.kernels import Chosen

_MIN_PYTHON = (3, 11)
_SLOW_ISA = "scalar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report; `remedy` is what to do when it is not ok."""

    group: str
    what: str
    state: Literal["ok", "note", "fail"]
    value: str
    remedy: str | None = None


@click.command("doctor")
@click.option("--strict", is_flag=True, help="Exit with code 5 for notes too, not only for failures.")
@click.option(
    "--measure", is_flag=True, help="Measure bandwidth, kernels, hop and GPUs (some seconds, 200 MiB)."
)
@click.option(
    "--what-if", "what_if", metavar="MACHINE",
    help='Describe another machine instead, e.g. "RTX 4090 24GiB, 2x Xeon 8x DDR5-4800 512GiB".',
)  # fmt: skip
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write the machine's figures, for 'ktplan place --hardware'.",
)
@output_options
def doctor_command(
    strict: bool, measure: bool, what_if: str | None, output: Path | None, out: Output
) -> None:
    """Say what this machine can run, and why.

    Reads the processor, memory, NUMA nodes, GPUs and installed packages; without --measure it measures nothing, and it
    changes nothing. Exit code 5 when something that is needed is missing.

    \b
    Examples:
      ktplan doctor
      ktplan doctor --measure -o hardware.json
    """
    if measure or what_if is not None or output is not None:
        from ktplan.cli.machine import machine_report

        machine_report(measure, what_if, output, out)
        return
    from ktplan.errors import MachineLacks
    from ktplan.hardware import detect

    hardware = detect()
    try:
        from ktplan import kernels

        isa: Chosen[str] | None = kernels.isa()
        words, missing = kernels.isa_words(isa.value) if isa else "", None
    except (ImportError, MachineLacks) as fault:
        isa, words, missing = None, "", str(fault)
    found = checks(hardware, isa, missing)
    verdict = _verdict(found, words, hardware)
    body = {
        "verdict": verdict,
        "checks": [asdict(check) for check in found],
        "isa": {"chosen": isa.value, "why": isa.why, "rejected": dict(isa.rejected)} if isa else None,
        "tiles": kernels.tile_state()._asdict() if isa else None,
        "hardware": asdict(hardware),
    }
    out.report("doctor-report", body, lambda: _render(verdict, found, out))
    bad = ("fail", "note") if strict else ("fail",)
    if any(check.state in bad for check in found):
        raise click.exceptions.Exit(MachineLacks.exit_code)


def checks(hardware: Hardware, isa: Chosen[str] | None, isa_fault: str | None) -> list[Check]:
    """Every line of the report, group by group."""
    return [*_cpu(hardware, isa, isa_fault), *_memory(hardware), *_gpu(hardware), *_packages(hardware)]


def _cpu(hardware: Hardware, isa: Chosen[str] | None, isa_fault: str | None) -> list[Check]:
    cores = hardware.cores
    lines = [
        Check(group="CPU", what="processor", state="ok", value=hardware.cpu_name),
        Check(group="CPU", what="threads to use", state="ok", value=f"{cores.usable}: {cores.why}"),
        Check(
            group="CPU",
            what="instruction sets",
            state="ok",
            value=" ".join(hardware.isa_flags) or "none of interest",
        ),
    ]
    tiles = _tiles()
    if tiles is not None:
        lines.append(tiles)
    if isa is None:
        remedy = "reinstall ktplan with a C++20 compiler, or unset KTPLAN_ISA"
        return [
            *lines,
            Check(group="CPU", what="kernels", state="fail", value=isa_fault or "missing", remedy=remedy),
        ]
    slow = isa.value == _SLOW_ISA
    kernels = Check(
        group="CPU",
        what="kernels",
        state="note" if slow else "ok",
        value=f"{isa.value}: {isa.why}",
        remedy="scalar kernels are for comparison; unset KTPLAN_ISA or use a CPU with AVX2" if slow else None,
    )
    passed_over = [
        Check(group="CPU", what=f"not {name}", state="ok", value=why) for name, why in isa.rejected
    ]
    return [*lines, kernels, *_other_kernels(isa.value), *passed_over]


def _other_kernels(chosen: str) -> list[Check]:
    """What multiplies bfloat16 experts, and the lower sets that would run too."""
    from ktplan import kernels

    found = [Check(group="CPU", what="bfloat16 experts", state="ok", value=kernels.bf16_words(chosen))]
    runnable = kernels.available_isas()
    lower = runnable[runnable.index(chosen) + 1 :] if chosen in runnable else []
    if lower:
        value = f"{', '.join(lower)} ({kernels.ISA_VARIABLE} takes one)"
        found.append(Check(group="CPU", what="lower kernels", state="ok", value=value))
    return found


def _tiles() -> Check | None:
    """Whether tiles are detected, permitted, emulated and forced; none where the compiled module is missing."""
    try:
        from ktplan import kernels
    except ImportError:
        return None
    state = kernels.tile_state()
    said = [
        "detected" if state.detected else "not detected",
        "permitted" if state.permitted else "not permitted" if state.detected else "",
        "emulated by a trap handler" if state.emulated else "",
        f"forced by {kernels.ISA_VARIABLE}" if os.environ.get(kernels.ISA_VARIABLE) == "amx-int8" else "",
    ]
    value = ", ".join(word for word in said if word) + (f": {state.missing}" if state.missing else "")
    refused = state.detected and not state.permitted
    remedy = "allow arch_prctl(ARCH_REQ_XCOMP_PERM) for this process, or ignore it" if refused else None
    return Check(
        group="CPU", what="tiles (AMX)", state="note" if refused else "ok", value=value, remedy=remedy
    )


def _memory(hardware: Hardware) -> list[Check]:
    total, free = hardware.memory_total, hardware.memory_available
    size = f"{format_bytes(total)}, {format_bytes(free)} available" if total and free else "not known"
    lines = [Check(group="memory", what="RAM", state="ok" if total else "note", value=size)]
    if hardware.memory_limit is not None:
        lines.append(
            Check(
                group="memory",
                what="limit of this process",
                state="ok",
                value=format_bytes(hardware.memory_limit),
            )
        )
    nodes = hardware.numa_nodes
    several = len(nodes) > 1
    sizes = ", ".join(format_bytes(node.memory_total) for node in nodes if node.memory_total)
    lines.append(
        Check(
            group="memory",
            what="NUMA nodes",
            state="note" if several else "ok",
            value=f"{len(nodes)} ({sizes})" if several else "1",
            remedy=f"convert-cpu --numa-parts {len(nodes)} splits experts over them" if several else None,
        )
    )
    if hardware.huge_pages is not None:
        lines.append(
            Check(group="memory", what="transparent huge pages", state="ok", value=hardware.huge_pages)
        )
    return lines


def _gpu(hardware: Hardware) -> list[Check]:
    if not hardware.gpus:
        value = f"none ({hardware.gpu_note})"
        return [Check(group="GPU", what="GPU", state="ok", value=value)]
    return [
        Check(
            group="GPU",
            what=f"GPU {gpu.index}",
            state="ok" if gpu.memory_total else "note",
            value=f"{gpu.name}, "
            + (
                f"{format_bytes(gpu.memory_total)}, {format_bytes(gpu.memory_free or 0)} free"
                if gpu.memory_total
                else "memory not known"
            ),
            remedy=None if gpu.memory_total else "install nvidia-smi to see its memory",
        )
        for gpu in hardware.gpus
    ]


def _packages(hardware: Hardware) -> list[Check]:
    right = sys.version_info >= _MIN_PYTHON
    lines = [
        Check(
            group="packages",
            what="Python",
            state="ok" if right else "fail",
            value=hardware.python,
            remedy=None if right else "ktplan needs Python 3.11 or newer",
        )
    ]
    for name, version in hardware.packages.items():
        optional = name in ("torch", "transformers")
        remedy = (
            "pip install 'ktplan[run]' for profile, convert-gpu, run and eval"
            if optional
            else f"pip install {name}"
        )
        state: Literal["ok", "note", "fail"] = "ok" if version else "note" if optional else "fail"
        value = version or "not installed"
        lines.append(
            Check(group="packages", what=name, state=state, value=value, remedy=None if version else remedy)
        )
    return lines


def _verdict(found: list[Check], isa_words: str, hardware: Hardware) -> str:
    failed = [check for check in found if check.state == "fail"]
    if failed:
        return "this machine cannot run experts yet: " + "; ".join(
            f"{check.what}: {check.value}" for check in failed
        )
    gpu = hardware.gpus[0].name if hardware.gpus else None
    device = f"GPU {gpu}" if gpu else "no GPU found: run uses the CPU only"
    return f"this machine can run int8 and int4 experts with {isa_words}; {device}"


def _render(verdict: str, found: list[Check], out: Output) -> None:
    out.line(verdict)
    rows: list[list[Any]] = []
    group = ""
    for check in found:
        rows.append(["" if check.group == group else check.group, check.state, check.what, check.value])
        group = check.group
        if check.remedy:
            rows.append(["", "", "", f"-> {check.remedy}"])
    out.line()
    out.table(["", "", "", ""], rows)
