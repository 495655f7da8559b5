"""The figures of a machine, measured or described, for people and for hardware.json."""

from __future__ import annotations

from pathlib import Path

from ktplan.cli.output import Output
from ktplan.errors import BadUsage
from ktplan.placement.known import describe
from ktplan.placement.machine import Figure, HardwareSpec
from ktplan.units import format_bytes, format_rate


def machine_report(measure: bool, what_if: str | None, output: Path | None, out: Output) -> None:
    """Measure this machine or describe another; tell and write it."""
    if measure and what_if is not None:
        raise BadUsage(
            "another machine cannot be measured from here", hint="leave out --measure or --what-if"
        )
    if what_if is not None:
        machine = describe(what_if)
    elif measure:
        from ktplan.runtime.measure import measure as measured

        machine = measured(progress=out.progress())
    else:
        raise BadUsage("there is nothing to write: nothing was measured", hint="give --measure or --what-if")
    if output is not None:
        machine.save(output)
    body = {**machine.to_dict(), "output": str(output) if output else None}
    out.report("hardware-report", body, lambda: _render(machine, out))
    for note in machine.notes:
        out.note(note)
    if output is not None:
        out.note(f"wrote {output}")
        out.hint(f"ktplan place MODEL --profile PROFILE --hardware {output}")


def _render(machine: HardwareSpec, out: Output) -> None:
    rows = [
        (f"memory bandwidth, node {number}", *_row(figure, format_rate))
        for number, figure in enumerate(machine.cpu_bandwidth)
    ]
    rows += [
        (f"{distinct} experts of {format_bytes(machine.cpu_expert_bytes or 0)}", *_row(figure, _microseconds))
        for distinct, figure in machine.cpu_experts
    ]
    rows.append(("touching the CPU", *_row(machine.hop, _microseconds)))
    rows.append(("CPU products", *_row(machine.cpu_flops, _flops)))
    for gpu in machine.gpus:
        rows.append((f"{gpu.name} memory", format_bytes(gpu.memory), "", "", ""))
        rows.append((f"{gpu.name} bandwidth", *_row(gpu.bandwidth, format_rate)))
        rows.append((f"{gpu.name} copy", *_row(gpu.copy, format_rate)))
        rows.append((f"{gpu.name} launch", *_row(gpu.launch, _microseconds)))
        rows.append((f"{gpu.name} products", *_row(gpu.flops, _flops)))
    out.table(["figure", "value", "5-95 %", "origin", ""], rows, title=machine.name, right=[1, 2])


def _row(figure: Figure, words: object) -> tuple[str, str, str, str]:
    assert callable(words)
    return (
        words(figure.value),
        f"{words(figure.low)} to {words(figure.high)}",
        figure.origin,
        figure.how,
    )


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3f} TFLOPS"
