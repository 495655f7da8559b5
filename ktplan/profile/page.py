"""The report as one HTML page that needs nothing else: pictures inside, no script, no address to fetch from."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ktplan.artifact import write_whole
from ktplan.profile import curves, pictures, report
from ktplan.profile.profile import ActivationProfile

_STYLE: Final = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.15em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}img{max-width:100%}.warn{color:#9a3412}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}td,th{border-color:#444}img{background:#fff}}
"""


def save_page(profile: ActivationProfile, path: Path) -> None:
    """Write the page, whole. The same profile gives the same bytes with the same version of matplotlib."""
    write_whole(path, page(profile).encode())


def page(profile: ActivationProfile) -> str:
    """Table, heat map, Lorenz curve, hit-rate curve with interval, transfer matrix, unseen mass."""
    parts = [f"<h1>{_text(profile.model)}: expert use</h1>", _facts(profile)]
    parts += [f'<p class="warn">{_text(warning)}</p>' for warning in report.warnings(profile)]
    parts.append(_section("Use of each expert", _image(pictures.heat_map(profile))))
    parts.append(
        _section("What placements serve", _image(pictures.curves_figure(profile)) + _curve_table(profile))
    )
    matrix = curves.transfer(profile, pictures.TRANSFER_AT)
    title = "How sure this is" if matrix is None else "From one data set to another, and how sure this is"
    parts.append(_section(title, _image(pictures.doubts_figure(profile, matrix))))
    if matrix is not None:
        parts.append(
            _section(
                f"From one data set to another, {100 * matrix.ratio:.0f} % of the experts", _matrix(matrix)
            )
        )
    parts.append(_section("Layers", _layers(profile)))
    title = f"<title>{_text(profile.model)}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _facts(profile: ActivationProfile) -> str:
    generated = f", {profile.decode_token_count:,} of them generated" if profile.decode_token_count else ""
    known = "" if profile.phases_known else " Prompt and generated tokens are mixed."
    return (
        f"<p>{profile.token_count:,} tokens{generated}, {profile.documents:,} documents, "
        f"{len(set(profile.dataset_of))} data sets; {len(profile.layers)} MoE layers x {profile.experts} experts, "
        f"top-{profile.top_k}.{known} Unseen mass by document: "
        f"{100 * report.single_document_mass(profile):.2f} % of choices went to experts that one document alone "
        f"chose.</p>"
    )


def _curve_table(profile: ActivationProfile) -> str:
    found = curves.hit_curve(profile, (0.1, 0.2, 0.3, 0.5, 0.7, 0.9))
    rows = []
    for place, ratio in enumerate(found.ratios):
        row = [f"{100 * ratio:.0f} %", _share(found.in_sample[place])]
        if found.held_out is not None and found.low is not None and found.high is not None:
            row += [
                _share(found.held_out[place]),
                f"{_share(found.low[place])} to {_share(found.high[place])}",
            ]
        rows.append(row)
    return _table(["experts", "in-sample", "held out", "5-95 % of other text"][: len(rows[0])], rows)


def _matrix(matrix: curves.Transfer) -> str:
    rows = [
        [name, *(f"{rate:.3f}" for rate in row)]
        for name, row in zip(matrix.datasets, matrix.rates, strict=True)
    ]
    return (
        _table(["made from \\ scored on", *matrix.datasets], rows)
        + "<p>The diagonal is held out by document.</p>"
    )


def _layers(profile: ActivationProfile) -> str:
    rows = [
        [row.layer, f"{row.slots:,}", row.used, *map(_share, row.busiest_shares), f"{row.busiest_over_mean:.1f}",
         f"{row.entropy:.3f}", f"{100 * row.unseen_mass:.2f} %"]
        for row in report.layer_use(profile)
    ]  # fmt: skip
    shares = [f"top {100 * share:.0f} %" for share in report.SHARES]
    return _table(["layer", "choices", "used", *shares, "busiest/mean", "entropy", "unseen mass"], rows)


def _section(title: str, body: str) -> str:
    return f"<h2>{_text(title)}</h2>\n{body}"


def _image(figure: Any) -> str:
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(pictures.png(figure)).decode()}">'


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    def cells(row: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in row) + "</tr>"

    return "<table>" + cells(head, "th") + "".join(cells(row, "td") for row in rows) + "</table>"


def _share(rate: float) -> str:
    return f"{100 * float(np.round(rate, 6)):.1f} %"


def _text(value: object) -> str:
    return html.escape(str(value))
