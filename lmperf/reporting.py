"""The report: one self-contained HTML page, its figures as SVG, and TensorBoard event files, all from the tables."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from lmperf import figures, views
from lmperf.eventfiles import write_event_files
from lmperf.figures import finite
from lmperf.records import atomic_write, read_json
from lmperf.tables import read_csv

TEMPLATES = Path(__file__).parent / "templates"


def write_report(spec: Mapping[str, Any], data: Path, reports: Path) -> Path:
    """Write `reports/index.html`, `reports/figures/*.svg` and `reports/tensorboard`; returns the page's path."""
    tables = reports / "tables"
    results = read_csv(tables / "results.csv")
    quality_runs = views.read_quality_runs(reports / "quality")
    context = views.page(spec, data, reports, results)
    context["figures"] = draw(results, context, quality_runs, tables, reports)
    write_event_files(quality_runs, reports / "tensorboard")
    page = reports / "index.html"
    with atomic_write(page) as stream:
        stream.write(environment().get_template("report.html.j2").render(**context))
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
        "ratio": views.show_ratio,
        "quantity": views.show_quantity,
        "percent": views.show_percent,
        "bytes": views.show_bytes,
        "count": views.show_count,
        "short": views.show_short,
        "slug": slug,
    }
    return made


def slug(text: str) -> str:
    """A text as an id of a page."""
    return re.sub(r"[^a-z0-9]+", "-", str(text or "").lower()).strip("-")


def draw(
    results: Sequence[Mapping[str, Any]], context: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], tables: Path,
    reports: Path,
) -> dict[str, str]:  # fmt: skip
    """Draw every figure for which there is data; returns name → data URI, the SVG files lie in reports/figures."""
    folder = reports / "figures"
    wanted = dict(_drawn(results, context, runs, tables, read_json(reports / "profile" / "profile.json")))
    for old in folder.glob("*.svg"):
        if old.stem not in wanted:
            old.unlink()
    return {name: data_uri(figures.save(figure, folder / f"{name}.svg")) for name, figure in wanted.items()}


def _drawn(
    results: Sequence[Mapping[str, Any]], context: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], tables: Path,
    profile: Mapping[str, Any],
) -> Iterable[tuple[str, Any]]:  # fmt: skip
    overview = views.forest_rows(context["summary"])
    if overview:
        yield "overview", figures.forest(overview, "Training step: what each change does")
    for section in context["sections"]:
        rows = views.forest_rows(section["rows"])
        if rows:
            yield f"axis-{slug(section['name'])}", figures.forest(rows, section["title"])
    hotspots = read_csv(tables / "hotspots.csv")
    if hotspots:
        yield "hotspots", figures.hotspots(hotspots)
    curve = (profile.get("warmup") or {}).get("curve_s")
    if curve:
        yield "warmup", figures.warmup(curve, finite(profile.get("step_s")))
    yield from _sweeps(results)
    lines = views.median_curves(runs)
    if lines:
        yield "quality", figures.curves(lines)
    steps = views.ladder_rows(context["results"], context["stack"])
    if len(steps) > 1:
        yield "ladder", figures.ladder(steps)


def _sweeps(results: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, Any]]:
    for metric, ylabel, what in (
        ("step_time_s", "time of one call (s)", "time"),
        ("peak_memory_bytes", "peak tensor memory (MiB)", "memory"),
    ):
        series = views.sweep_series(results, metric, scale=2**-20 if metric == "peak_memory_bytes" else 1.0)
        if any(len(points) > 1 for points in series.values()):
            labels = {name: views.exponent_label(name, points) for name, points in series.items()}
            title = f"Attention, forward and backward: {what} by length"
            yield f"attention-{what}", figures.sweep(series, ylabel, title, labels)


def data_uri(path: Path) -> str:
    """An SVG file as a data URI, so that the page needs no other file."""
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()
