"""`ktplan verify`: read a store again and say whether it is what it says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktplan.cli.options import FiniteNumber, output_options, warn_if_crowded
from ktplan.cli.output import Output
from ktplan.errors import BadInput, KtplanError

if TYPE_CHECKING:
    from ktplan.convert.verify import Verification
    from ktplan.store import ExpertStore

_SHOWN = 10


@click.command("verify")
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--against", metavar="MODEL", help="Compare every expert with the model it was made from.")
@click.option(
    "--max-error",
    type=FiniteNumber(min=0),
    help="With --against: exit with 1 where a relative error is larger.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Default: all CPUs.")
@output_options
def verify_command(
    store: Path, against: str | None, max_error: float | None, threads: int | None, out: Output
) -> None:
    """Read all of STORE: digests, levels and scales; with --against also each expert's distance from the model.

    STORE is a folder of ktplan convert-cpu, or one that kt-kernel's converter wrote (which has no digests). Exit code
    0: all is well. 4: damaged, or not from that model. 1: an error is larger than --max-error.

    \b
    Examples:
      ktplan verify ./store
      ktplan verify ./store --against ./Qwen3-30B-A3B --max-error 0.2
    """
    from ktplan.convert.cpu import default_threads
    from ktplan.convert.verify import verify_store
    from ktplan.model import locate, open_source
    from ktplan.store import ExpertStore

    opened = ExpertStore.open(store)
    source = None if against is None else open_source(locate(against))
    if opened.foreign:
        out.note(f"{store} was written by kt-kernel: there are no digests, and it does not name its model")
    warn_if_crowded(threads, out)
    found = verify_store(opened, source, threads=threads or default_threads(), progress=out.progress())
    out.report("verify-report", _body(opened, found), lambda: _show(opened, found, out))
    if found.damages:
        more = f" and {len(found.damages) - 1} more" if len(found.damages) > 1 else ""
        raise BadInput(found.damages[0] + more, hint="copy the store again or convert the model again")
    worst = found.tensors[0]
    if max_error is not None and worst.error is not None and worst.error > max_error:
        raise KtplanError(
            f"layer {worst.layer}, expert {worst.expert}, {worst.projection} differs by {worst.error:.4g}, more than "
            f"--max-error {max_error:g}",
            hint="convert with more --bits, or with --rounding gptq",
        )


def _show(store: ExpertStore, found: Verification, out: Output) -> None:
    manifest = store.manifest
    experts = len(manifest.layers) * manifest.experts
    state = "damaged" if found.damages else "whole"
    digests = "digests agree" if found.digests and not found.damages else "no digests to check"
    out.line(
        f"{store.path}: {experts} experts, {manifest.scheme}, {state}"
        + ("" if found.damages else f"; {digests}")
    )
    for damage in found.damages[:_SHOWN]:
        out.line(f"  {damage}")
    if found.compared:
        errors = [tensor.error or 0.0 for tensor in found.tensors]
        out.table(
            ["layer", "expert", "projection", "error", "recorded"],
            [
                (
                    t.layer,
                    t.expert,
                    t.projection,
                    f"{t.error or 0.0:.4f}",
                    "" if t.recorded is None else f"{t.recorded:.4f}",
                )
                for t in found.tensors[:_SHOWN]
            ],
            title=f"relative weight error: mean {sum(errors) / len(errors):.4f}, the worst of {len(errors)} tensors",
            right=(0, 1, 3, 4),
        )


def _body(store: ExpertStore, found: Verification) -> dict[str, Any]:
    return {
        "store": str(store.path),
        "model": store.manifest.model,
        "fingerprint": store.manifest.fingerprint,
        "foreign": store.foreign,
        "digests_checked": found.digests,
        "damages": list(found.damages),
        "tensors": [tensor._asdict() for tensor in found.tensors] if found.compared else None,
    }
