"""A profile in pictures: heat map, what placements serve, Lorenz curve, transfer between data sets, unseen mass.

Colours are told apart by the colour-blind, too (Okabe and Ito's).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import numpy as np

from ktplan.artifact import write_whole
from ktplan.profile import curves, report
from ktplan.profile.profile import ActivationProfile

RATIOS: Final = tuple(round(0.02 * step, 2) for step in range(51))
TRANSFER_AT: Final = 0.3  # share of the experts that the transfer matrix is for
_LIMIT: Final = 8.0  # colours end at 1/8 and 8 times the even share
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "0.55"


def save_plot(profile: ActivationProfile, path: Path) -> None:
    """`heat_map` as PNG."""
    write_whole(path, png(heat_map(profile)))


def save_overview(profile: ActivationProfile, path: Path) -> None:
    """`overview` as PNG."""
    write_whole(path, png(overview(profile)))


def png(figure: Any) -> bytes:
    """The picture's file: same figure, same bytes with the same matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture, metadata={"Software": None})
    return picture.getvalue()


def heat_map(profile: ActivationProfile) -> Any:
    """A figure, layers down and experts across: each cell's use relative to an even spread, log scale.

    White is the even share, red above, blue below, grey never chosen.
    """
    figure = _figure(_width(profile), _height(profile))
    _heat(figure, figure.subplots(), profile)
    return figure


def curves_figure(profile: ActivationProfile) -> Any:
    """A figure: hit rate by share of the experts with its interval, and the Lorenz curve."""
    figure = _figure(10, 4)
    left, right = figure.subplots(1, 2)
    _hits(left, profile)
    _lorenz(right, profile)
    return figure


def doubts_figure(profile: ActivationProfile, matrix: curves.Transfer | None) -> Any:
    """A figure: transfer between data sets, where there are several, and the unseen mass of each layer."""
    figure = _figure(10, 3.6)
    if matrix is None:
        _unseen(figure.subplots(), profile)
        return figure
    left, right = figure.subplots(1, 2)
    _transfer(left, matrix)
    _unseen(right, profile)
    return figure


def overview(profile: ActivationProfile) -> Any:
    """Everything on one sheet."""
    matrix = curves.transfer(profile, TRANSFER_AT)
    width, height = max(11.0, _width(profile)), _height(profile)
    figure = _figure(width, height + 7.2)
    top, below = figure.subfigures(2, 1, height_ratios=[height, 7.2])
    _heat(top, top.subplots(), profile)
    axes = below.subplots(2, 2)
    _hits(axes[0, 0], profile)
    _lorenz(axes[0, 1], profile)
    _unseen(axes[1, 0], profile)
    if matrix is None:
        axes[1, 1].axis("off")
        axes[1, 1].text(0.5, 0.5, "one data set: no transfer to show", ha="center", va="center", color=_GREY)
    else:
        _transfer(axes[1, 1], matrix)
    return figure


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _width(profile: ActivationProfile) -> float:
    """A cell is at least a few pixels wide whatever the model, and a tiny model is no postage stamp."""
    return min(24.0, max(7.0, 2.2 + 0.085 * profile.experts))


def _height(profile: ActivationProfile) -> float:
    return min(18.0, max(2.6, 1.5 + 0.17 * len(profile.layers)))


def _heat(figure: Any, axes: Any, profile: ActivationProfile) -> None:
    from matplotlib.colors import LogNorm

    total = profile.total()
    layers, experts = total.shape
    relative = total * experts / np.maximum(total.sum(axis=1, keepdims=True), 1)
    seen = np.ma.masked_equal(np.clip(relative, 0, _LIMIT), 0)
    seen = np.ma.maximum(seen, 1 / _LIMIT)
    axes.set_facecolor("0.6")
    image = axes.imshow(
        seen,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        norm=LogNorm(vmin=1 / _LIMIT, vmax=_LIMIT),
    )
    rows = range(0, layers, -(-layers // 32))
    axes.set_yticks(list(rows), [str(profile.layers[row]) for row in rows])
    if experts <= 32:
        axes.set_xticks(range(experts))
    axes.set(xlabel="expert", ylabel="layer")
    axes.set_title(
        f"{profile.model}: {profile.token_count:,} tokens, top-{profile.top_k} of {experts}; grey: never chosen",
        fontsize=10,
    )
    bar = figure.colorbar(image, ax=axes, ticks=[1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], pad=0.01)
    bar.ax.set_yticklabels(["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    bar.ax.minorticks_off()
    bar.set_label("use / even share")


def _plain(axes: Any, *, title: str, x: str, y: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, alpha=0.25, linewidth=0.6)
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10)


def _percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _hits(axes: Any, profile: ActivationProfile) -> None:
    found = curves.hit_curve(profile, RATIOS)
    if found.held_out is not None and found.low is not None and found.high is not None:
        axes.fill_between(
            found.ratios,
            found.low,
            found.high,
            color=_BLUE,
            alpha=0.2,
            lw=0,
            label="5 to 95 % of as much other text",
        )
        axes.plot(found.ratios, found.held_out, color=_BLUE, label="held out")
    axes.plot(found.ratios, found.in_sample, "--", color=_ORANGE, lw=1.2, label="in-sample")
    axes.plot([0, 1], [0, 1], ":", color=_GREY, label="chance")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    axes.legend(fontsize=8, loc="lower right", frameon=False)
    _plain(axes, title="what the most used experts serve", x="share of all experts on the GPU", y="hit rate")


def _lorenz(axes: Any, profile: ActivationProfile) -> None:
    x, low, middle, high = curves.lorenz_band(profile)
    axes.fill_between(x, low, high, color=_BLUE, alpha=0.2, lw=0, label="least to most uneven layer")
    axes.plot(x, middle, color=_BLUE, label="mean of the layers")
    axes.plot([0, 1], [0, 1], ":", color=_GREY, label="all alike")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    axes.legend(fontsize=8, loc="lower right", frameon=False)
    _plain(
        axes,
        title="Lorenz curve, in-sample",
        x="share of a layer's experts, busiest first",
        y="share of its choices",
    )


def _transfer(axes: Any, matrix: curves.Transfer) -> None:
    axes.imshow(matrix.rates, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    names = [name if len(name) <= 18 else f"{name[:17]}…" for name in matrix.datasets]
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    if len(names) <= 12:
        for row, rates in enumerate(matrix.rates):
            for column, rate in enumerate(rates):
                colour = "white" if rate > 0.55 else "black"
                axes.text(
                    column, row, f"{100 * rate:.0f}", ha="center", va="center", color=colour, fontsize=9
                )
    axes.set(xlabel="scored on", ylabel="made from")
    axes.set_title(
        f"hit rate in % at {100 * matrix.ratio:.0f} % of the experts; diagonal held out", fontsize=10
    )


def _unseen(axes: Any, profile: ActivationProfile) -> None:
    rows = report.layer_use(profile)
    mass = [row.unseen_mass for row in rows]
    axes.bar(range(len(rows)), mass, color=_BLUE, width=0.8)
    axes.axhline(report.UNSEEN_LIMIT, color=_ORANGE, lw=1, ls="--")
    axes.annotate(
        "more text is needed above", (0, report.UNSEEN_LIMIT), xytext=(2, 3), textcoords="offset points",
        fontsize=8, color=_ORANGE,
    )  # fmt: skip
    if not any(mass):
        axes.text(
            0.5, 0.3, "0: every expert that was chosen was chosen again", ha="center", transform=axes.transAxes,
            fontsize=8, color=_GREY,
        )  # fmt: skip
    axes.set_ylim(0, max(1.25 * max(mass), 1.6 * report.UNSEEN_LIMIT))
    step = -(-len(rows) // 16)
    axes.set_xticks(range(0, len(rows), step), [str(row.layer) for row in rows[::step]])
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    _plain(axes, title="chance that the next choice is an expert not yet seen", x="layer", y="unseen mass")
