"""The report: one self-contained HTML page, its figures as SVG, and TensorBoard event files, all from the tables."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from lmperf import figures, quantities, sweepviews, views
from lmperf.cards import with_cards
from lmperf.eventfiles import write_event_files
from lmperf.precision_tables import scale_lines
from lmperf.quantities import finite
from lmperf.records import atomic_write
from lmperf.tables import read_csv

TEMPLATES = Path(__file__).parent / "templates"


def write_report(spec: Mapping[str, Any], data: Path, reports: Path) -> Path:
    """Write `reports/index.html`, `reports/figures/*.svg` and `reports/tensorboard`; returns the page's path."""
    tables = reports / "tables"
    results = read_csv(tables / "results.csv")
    quality_runs = views.read_quality_runs(reports / "quality")
    context = views.page(spec, data, reports, results)
    context["figures"] = draw(context, quality_runs, reports)
    write_event_files(quality_runs, reports / "tensorboard")
    page = reports / "index.html"
    with atomic_write(page) as stream:
        stream.write(with_cards(environment().get_template("report.html.j2").render(**context)))
    return page


def environment() -> jinja2.Environment:
    """The template environment: everything is escaped, undefined names are errors, numbers have named formats."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "ratio": quantities.show_ratio,
        "quantity": quantities.show_quantity,
        "percent": quantities.show_percent,
        "bytes": quantities.show_bytes,
        "count": quantities.show_count,
        "short": quantities.show_short,
        "fixed": quantities.show_fixed,
        "slug": slug,
    }
    return made


def slug(text: str) -> str:
    """A text as an id of a page."""
    return re.sub(r"[^a-z0-9]+", "-", str(text or "").lower()).strip("-")


def draw(
    context: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], reports: Path
) -> dict[str, str]:  # fmt: skip
    """Draw every figure for which there is data; returns name → data URI, the SVG files lie in reports/figures."""
    folder = reports / "figures"
    wanted = dict(_drawn(context, runs))
    for old in folder.glob("*.svg"):
        if old.stem not in wanted:
            old.unlink()
    return {name: data_uri(figures.save(figure, folder / f"{name}.svg")) for name, figure in wanted.items()}


def _drawn(
    context: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]
) -> Iterable[tuple[str, Any]]:  # fmt: skip
    overview = views.forest_rows(context["summary"])
    if overview:
        yield "overview", figures.forest(overview, "Training step: what each change does")
    for section in context["sections"]:
        rows = views.forest_rows(section["rows"])
        if rows:
            whole = len(rows) == sum(bool(row["speedup"]) for row in section["rows"])
            title = section["title"] + ("" if whole else f", {section['rows'][-1]['shape']}")
            yield f"axis-{slug(section['name'])}", figures.forest(rows, title)
    if context["hotspots"]:
        yield "hotspots", figures.hotspots(context["hotspots"])
    profile = context["profile"]
    curve = (profile.get("warmup") or {}).get("curve_s")
    if curve:
        yield "warmup", figures.warmup(curve, finite(profile.get("step_s")))
    yield from _sweeps(context)
    lines = views.median_curves(runs)
    if lines:
        yield "quality", figures.curves(lines)
    lines = scale_lines(runs)
    if lines:
        yield "loss-scale", figures.loss_scales(lines)
    steps = views.ladder_rows(context["results"], context["stack"])
    if len(steps) > 1:
        yield "ladder", figures.ladder(steps)


def _sweeps(context: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Time and memory by length of each attention session's first sweep."""
    for section in context["sections"]:
        for sweep in section["sweeps"][:1]:
            for metric, ylabel in sweepviews.AXIS_LABELS.items():
                lines = sweepviews.series(context["attention"], sweep, metric)
                if any(len(points) > 1 for points in lines.values()):
                    what = sweepviews.NAMES[metric]
                    title = f"Attention, {sweep['what']}: {what} by length"
                    figure = figures.sweep(lines, ylabel, title, sweepviews.labels(sweep, metric))
                    yield f"sweep-{slug(section['name'])}-{what}", figure


def data_uri(path: Path) -> str:
    """An SVG file as a data URI, so that the page needs no other file."""
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()
