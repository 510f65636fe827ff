"""The report's figures: each function draws one matplotlib figure from plain rows; `save` writes it as a stable SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from lmperf.records import atomic_write

Row = Mapping[str, Any]

WIDTH = 6.0  # inches; readable on a telephone once scaled to its width
COLOURS = {
    "faster": "#1a7f4b",
    "better": "#1a7f4b",
    "slower": "#b3261e",
    "worse": "#b3261e",
    "same": "#4a6fa5",
    "small difference": "#7a6a9b",
    "inconclusive": "#8a8f98",
    "not measured": "#8a8f98",
}
LINES = ("#20639b", "#d1495b", "#2a9d8f", "#e09f3e", "#6d597a", "#3d405b", "#8ab17d", "#bc6c25", "#577590", "#9b2226")
MARKERS = "osD^vPX*<>h"  # one more than colours, so that the pairs do not repeat
STYLE = {
    "svg.fonttype": "path",
    "svg.hashsalt": "lmperf",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.constrained_layout.use": True,
}


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as SVG with no date in it, so that equal data gives equal bytes."""
    with plt.rc_context(STYLE), atomic_write(path, "wb") as stream:
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return path


def _canvas(height: float, columns: int = 1) -> tuple[Figure, Any]:
    with plt.rc_context(STYLE):
        return plt.subplots(1, columns, figsize=(WIDTH, height))


def forest(rows: Sequence[Row], title: str) -> Figure:
    """Speed-ups with their intervals, one line a row: keys label, speedup, low, high, verdict, floor.

    The shaded band is the session's A/A noise floor; 1 is "as fast as the baseline".
    """
    figure, axes = _canvas(0.9 + 0.29 * len(rows))
    with plt.rc_context(STYLE):
        for place, row in enumerate(reversed(rows)):
            _interval(axes, place, row)
        axes.axvline(1, color="#333", linewidth=0.9)
        axes.set_xscale("log")
        _ratio_ticks(axes, [value for row in rows for value in (row["low"], row["high"], row["speedup"]) if value])
        axes.set_yticks(range(len(rows)), [row["label"] for row in reversed(rows)])
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.set_xlabel("speed-up (×, log scale), 95 % interval")
        axes.set_title(title, loc="left")
        axes.grid(axis="x", color="#e3e6ea", linewidth=0.7)
    return figure


def _interval(axes: Axes, place: int, row: Row) -> None:
    floor = row.get("floor")
    if floor:
        axes.fill_betweenx([place - 0.42, place + 0.42], 1 / (1 + floor), 1 + floor, color="#e7e9ed", linewidth=0)
    colour = COLOURS.get(row["verdict"], "#8a8f98")
    if row["low"] and row["high"]:
        axes.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
    hollow = row["verdict"] in ("inconclusive", "not measured")
    axes.plot(row["speedup"], place, "o", color=colour, markersize=5.5, markerfacecolor="white" if hollow else colour)


def _ratio_ticks(axes: Axes, values: Sequence[float]) -> None:
    low, high = min([*values, 0.95]), max([*values, 1.05])
    # As many ticks as fit beside long names: from fine to coarse, the first ladder with at most six inside.
    ladders = (
        (0.9, 0.95, 1, 1.05, 1.1, 1.15),
        (0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4),
        (0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3),
        (0.25, 0.5, 1, 2, 4, 8),
        (0.01, 0.1, 1, 10, 100, 1000),
    )
    inside = [[tick for tick in ladder if low / 1.05 <= tick <= high * 1.05] for ladder in ladders]
    fitting = (
        ticks for ladder, ticks in zip(ladders, inside, strict=True) if ladder[0] <= low * 1.3 and len(ticks) <= 6
    )
    ticks = next(fitting, inside[-1])
    axes.set_xlim(low / 1.06, high * 1.06)
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_locator(NullLocator())


def hotspots(rows: Sequence[Row], top: int = 12) -> Figure:
    """Self time by operator: keys operator, share; the rest of the step is one bar."""
    shares: dict[str, float] = {}
    for row in rows:
        shares[row["operator"]] = shares.get(row["operator"], 0.0) + float(row["share"])
    ranked = sorted(shares.items(), key=lambda item: -item[1])[:top]
    figure, axes = _canvas(0.8 + 0.27 * len(ranked))
    with plt.rc_context(STYLE):
        names = [name.removeprefix("aten::") for name, _ in reversed(ranked)]
        values = [100 * share for _, share in reversed(ranked)]
        axes.barh(names, values, color="#4a6fa5", height=0.66)
        for place, value in enumerate(values):
            axes.text(value, place, f" {value:.1f} %", va="center", fontsize=9)
        axes.set_xlim(0, max(values, default=1) * 1.16)
        axes.set_xlabel("share of self time (%)")
        axes.set_title("Hotspots of the baseline's training step", loc="left")
    return figure


def warmup(curve_s: Sequence[float], steady_s: float | None) -> Figure:
    """Step time by step number after start, against the steady state."""
    figure, axes = _canvas(2.4)
    with plt.rc_context(STYLE):
        axes.plot(range(1, len(curve_s) + 1), [1e3 * value for value in curve_s], "o-", color=LINES[0], markersize=4)
        if steady_s:
            axes.axhline(1e3 * steady_s, color="#333", linewidth=0.9, linestyle="--", label="steady state")
            figure.legend(loc="outside lower center")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step after start")
        axes.set_ylabel("step time (ms)")
        axes.set_title("Warm-up of the baseline", loc="left")
    return figure


def line_style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line with this number: no two of the first hundred are alike."""
    dashes = ("-", "--", ":")[number // len(LINES) % 3]
    return {"color": LINES[number % len(LINES)], "marker": MARKERS[number % len(MARKERS)], "linestyle": dashes}


def _legend_below(figure: Figure, lines: int) -> None:
    """A legend of two columns under the axes, for which the figure grows: it never covers or squeezes them."""
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(lines / 2))
    figure.legend(loc="outside lower center", ncols=2)


def sweep(
    series: Mapping[str, Sequence[tuple[float, float]]], ylabel: str, title: str, labels: Mapping[str, str]
) -> Figure:
    """Time or memory against length on log axes, one line a variant; `labels` add the fitted exponent."""
    figure, axes = _canvas(3.1)
    with plt.rc_context(STYLE):
        for number, (name, points) in enumerate(series.items()):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, label=labels.get(name, name), markersize=4.5, linewidth=1.4, **line_style(number))
        lengths = sorted({x for points in series.values() for x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{int(x)}" for x in lengths])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("sequence length (tokens)")
        axes.set_ylabel(ylabel)
        axes.set_title(title, loc="left")
        axes.grid(color="#e3e6ea", linewidth=0.7)
        _legend_below(figure, len(series))
    return figure


def curves(series: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Validation loss in bits per byte against tokens, one line a recipe (median over seeds)."""
    figure, axes = _canvas(3.1)
    with plt.rc_context(STYLE):
        for number, (name, points) in enumerate(series.items()):
            own = {"color": "#222", "linewidth": 2.4} if name == "baseline" else {"linewidth": 1.2}
            style = {**line_style(number), "marker": None, **own}
            axes.plot(*zip(*points, strict=True), label=name, **style)
        axes.set_xlabel("training tokens")
        axes.set_ylabel("validation loss (bits per byte)")
        axes.set_title("Quality runs, median over seeds", loc="left")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e3:g} k"))
        axes.grid(color="#e3e6ea", linewidth=0.7)
        _legend_below(figure, len(series))
    return figure


def ladder(rows: Sequence[Row]) -> Figure:
    """Speed-up of the stack as its changes are added one by one: keys label, speedup, low, high."""
    figure, axes = _canvas(1.1 + 0.34 * len(rows))
    with plt.rc_context(STYLE):
        values = [row["speedup"] for row in reversed(rows)]
        lows = [max(0.0, row["speedup"] - (row["low"] or row["speedup"])) for row in reversed(rows)]
        highs = [max(0.0, (row["high"] or row["speedup"]) - row["speedup"]) for row in reversed(rows)]
        places = range(len(values))
        axes.barh(places, values, xerr=[lows, highs], color="#8fb3d9", ecolor="#333", capsize=2.5, height=0.62)
        axes.set_yticks(places, [row["label"] for row in reversed(rows)])
        for place, (value, high) in enumerate(zip(values, highs, strict=True)):
            axes.text(value + high, place, f"  {value:.2f}×", va="center", fontsize=9.5)
        axes.axvline(1, color="#333", linewidth=0.9)
        axes.set_xlim(0, max((v + h for v, h in zip(values, highs, strict=True)), default=1) * 1.16)
        axes.set_xlabel("speed-up (×), 95 % interval")
        axes.set_title("The stack, one change after another", loc="left")
    return figure


def loss_scales(series: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Loss scale by training step, one line a recipe that has a scaler (median over seeds), on a log axis."""
    figure, axes = _canvas(2.8)
    with plt.rc_context(STYLE):
        for number, (name, points) in enumerate(series.items()):
            line = {"color": LINES[number % len(LINES)], "linestyle": ("-", "--", ":", "-.")[number % 4]}
            axes.plot(*zip(*points, strict=True), label=name, drawstyle="steps-post", linewidth=1.6, **line)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("training step")
        axes.set_ylabel("loss scale")
        axes.set_title("Loss scale, median over seeds", loc="left")
        axes.grid(color="#e3e6ea", linewidth=0.7)
        _legend_below(figure, len(series))
    return figure
