"""`ktplan repartition`: split a store for another number of NUMA nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktplan.cli.options import output_options, warn_if_crowded
from ktplan.cli.output import Output
from ktplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ktplan.convert.repartition import Repartition


@click.command("repartition")
@click.argument("store", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New or empty folder.")
@click.option("--numa-parts", type=int, required=True, help="How many parts the new store has.")
@click.option(
    "--requantize",
    is_flag=True,
    help="Where parts cannot be joined without loss, round their down weights again.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Default: all CPUs.")
@output_options
def repartition_command(
    store: Path, output: Path, numa_parts: int, requantize: bool, threads: int | None, out: Output
) -> None:
    """Write STORE with another number of NUMA parts; the model is not needed.

    Cutting parts into smaller ones loses nothing, and so does joining what was cut. Parts that were quantized apart
    have scales of their own and can only be joined by rounding their down weights again: refused unless
    --requantize is given. STORE may be a folder that kt-kernel's converter wrote.

    \b
    Example:
      ktplan repartition ./store -o ./store-2 --numa-parts 2
    """
    from ktplan.convert.cpu import default_threads
    from ktplan.convert.repartition import repartition
    from ktplan.store import ExpertStore

    warn_if_crowded(threads, out)
    done = repartition(
        ExpertStore.open(store),
        output,
        numa_parts,
        requantize=requantize,
        threads=threads or default_threads(),
        progress=out.progress(),
    )
    if not done.lossless:
        out.warn(f"down weights were rounded again: they changed by {done.error:.4f} (relative RMS)")
    out.report("repartition-report", _body(done), lambda: _show(done, out))


def _show(done: Repartition, out: Output) -> None:
    manifest = done.manifest
    loss = "without loss" if done.lossless else "down weights rounded again"
    out.line(
        f"wrote {done.store}: {manifest.parts} part{'s' * (manifest.parts != 1)}, {loss}, "
        f"{format_bytes(manifest.total_bytes)} in {format_seconds(done.seconds)}"
    )


def _body(done: Repartition) -> dict[str, Any]:
    return {
        "store": str(done.store),
        "numa_parts": done.manifest.parts,
        "lossless": done.lossless,
        "down_error": done.error,
        "bytes_out": done.manifest.total_bytes,
        "seconds": done.seconds,
    }
