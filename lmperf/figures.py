"""The report's figures: each function draws one matplotlib figure from plain rows; `save` writes it as a stable SVG."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from lmperf.records import atomic_write

Row = Mapping[str, Any]

WIDTH = 5.4  # inches; readable on a telephone once scaled to its width
LONG_TITLE = 54  # characters that fit a figure's width
LONG_LABEL = 30  # characters beside a forest's axes
TWO_COLUMNS = 27  # characters of a legend's entries
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


def _canvas(height: float, rows: int = 1) -> tuple[Figure, Any]:
    with plt.rc_context(STYLE):
        return plt.subplots(rows, 1, figsize=(WIDTH, height))


def _broken(labels: Sequence[str]) -> list[str]:
    """The labels, over two lines each when one of them would leave no room for the axes."""
    long = max(map(len, labels), default=0) > LONG_LABEL
    return [label.replace("  ", "\n") if long else label for label in labels]


def forest(rows: Sequence[Row], title: str) -> Figure:
    """Speed-ups with their intervals, one line a row: keys label, speedup, low, high, verdict, floor.

    The shaded band is the session's A/A noise floor; 1 is "as fast as the baseline".
    """
    labels = _broken([row["label"] for row in reversed(rows)])
    figure, axes = _canvas(0.9 + (0.29 if "\n" not in "".join(labels) else 0.42) * len(rows))
    with plt.rc_context(STYLE):
        for place, row in enumerate(reversed(rows)):
            _interval(axes, place, row)
        axes.axvline(1, color="#333", linewidth=0.9)
        axes.set_xscale("log")
        _ratio_ticks(axes, [value for row in rows for value in (row["low"], row["high"], row["speedup"]) if value])
        axes.set_yticks(range(len(rows)), labels)
        axes.set_ylim(-0.7, len(rows) - 0.3)
        _frame_texts(figure, title, "speed-up (×, log scale), 95 % interval")
        axes.grid(axis="x", color="#e3e6ea", linewidth=0.7)
    return figure


def _frame_texts(figure: Figure, title: str, xlabel: str) -> None:
    """Title and label of the whole figure: beside long names the axes are too narrow to hold them."""
    lines = "\n".join(textwrap.wrap(title, LONG_TITLE))
    figure.suptitle(lines, x=0.01, ha="left", fontsize=STYLE["axes.titlesize"], fontweight="bold")
    figure.supxlabel(xlabel, fontsize=STYLE["font.size"])


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
    low, high = min([*values, 0.95]) / 1.06, max([*values, 1.05]) * 1.06
    axes.set_xlim(low, high)
    axes.set_xticks(ratio_ticks(low, high))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_locator(NullLocator())


def ratio_ticks(low: float, high: float) -> list[float]:
    """Round ratios between two limits on a log axis: most ticks of one ladder, a sixth of the axis apart or more."""
    steps = [[round(k * step, 2) for k in range(1, int(high / step) + 1)] for step in (0.05, 0.1, 0.2, 0.5)]
    tens = [10.0**k for k in range(-6, 7)]
    powers = [[2.0**k for k in range(-6, 7)], sorted([*tens, *(3 * ten for ten in tens)]), tens]
    inside = [[tick for tick in ladder if low <= tick <= high] for ladder in (*steps, *powers)]
    gap = (high / low) ** (1 / 6)
    return max((t for t in inside if all(b / a >= gap for a, b in itertools.pairwise(t))), key=len)


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
        _frame_texts(figure, "Hotspots of the baseline's training step", "share of self time (%)")
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
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step after start")
        axes.set_ylabel("step time (ms)")
        axes.set_title("Warm-up of the baseline", loc="left")
    return figure


def line_style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line with this number: no two of the first hundred are alike."""
    dashes = ("-", "--", ":")[number // len(LINES) % 3]
    return {"color": LINES[number % len(LINES)], "marker": MARKERS[number % len(MARKERS)], "linestyle": dashes}


def _legend_below(figure: Figure) -> None:
    """A legend under the axes, for which the figure grows: it never covers or squeezes them, nor is it cut."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    columns = 2 if max(map(len, names), default=0) <= TWO_COLUMNS else 1
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(names) / columns))
    figure.legend(handles, names, loc="outside lower center", ncols=columns)


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
        _cost_ticks(axes, [y for points in series.values() for _, y in points])
        axes.set_xticks(lengths, [f"{int(x)}" for x in lengths])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("sequence length (tokens)")
        axes.set_ylabel(ylabel)
        axes.set_title(title, loc="left")
        axes.grid(color="#e3e6ea", linewidth=0.7)
        _legend_below(figure)
    return figure


def _cost_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Plain numbers on a log axis: decades alone, or 1, 2 and 5 of each where the values span few of them."""
    few = max(values) / min(values) < 300
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def curves(series: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Validation loss in bits per byte against tokens, one line a recipe, and below it its distance to the baseline.

    `series` holds (tokens, median over seeds); good and bad recipes look alike without the lower panel.
    """
    apart = difference_to_baseline(series)
    figure, panels = _canvas(5.0 if apart else 3.1, rows=2 if apart else 1)
    with plt.rc_context(STYLE):
        upper, lower = panels if apart else (panels, panels)
        for number, (name, points) in enumerate(series.items()):
            own = {"color": "#222", "linewidth": 2.4} if name == "baseline" else {"linewidth": 1.2}
            style = {**line_style(number), "markersize": 3.5, **own}
            upper.plot(*zip(*points, strict=True), label=name, **style)
            if name in apart:
                lower.plot(*zip(*apart[name], strict=True), **style)
        upper.set_ylabel("bits per byte")
        upper.set_title("Quality runs: validation loss, median over seeds", loc="left")
        if apart:
            lower.set_ylabel("against the baseline (%)")
        for axes in dict.fromkeys((upper, lower)):
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e3:g} k"))
            axes.grid(color="#e3e6ea", linewidth=0.7)
        lower.set_xlabel("training tokens")
        _legend_below(figure)
    return figure


def difference_to_baseline(
    series: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, list[tuple[float, float]]]:  # fmt: skip
    """Each line as percent above (worse) or below the baseline's at the same tokens; empty without a baseline."""
    base = dict(series.get("baseline", ()))
    found = {name: [(x, 100 * (y / base[x] - 1)) for x, y in line if base.get(x)] for name, line in series.items()}
    return {name: line for name, line in found.items() if line} if len(series) > 1 else {}


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
        _frame_texts(figure, "The stack, one change after another", "speed-up (×), 95 % interval")
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
        _legend_below(figure)
    return figure
