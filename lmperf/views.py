"""What the report shows, as plain rows: selection and wording of tables, no drawing and no HTML."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmperf import __version__
from lmperf.catalogue import AXES, Entry, catalogue
from lmperf.feeding import loader_lines
from lmperf.nodes import session_facts
from lmperf.precision_tables import precision_section
from lmperf.quantities import finite
from lmperf.records import read_json
from lmperf.sweepviews import sweep_sections
from lmperf.tables import read_csv

Row = Mapping[str, Any]

AXIS_TITLES = {
    "attention": "Attention",
    "precision": "Precision",
    "dataloader": "Data loading",
    "generation": "Generation",
    "norm": "Normalisation",
    "matmul": "Matrix multiplication",
    "graph": "Execution and memory",
    "distributed": "Distributed training",
    "compression": "Compression",
    "stack": "The stack",
}
#: Order in which a person looks for them; the metrics of a cell that are shown, the first being the primary one.
METRICS = {
    "step_time_s": "time",
    "ttft_s": "time to first token",
    "itl_s": "inter-token latency",
    "peak_memory_bytes": "peak memory",
    "model_bytes": "model size",
    "bytes_on_wire": "bytes on the wire",
    "wait_share": "waiting share",
    "break_even_steps": "compiling pays after",
    "cold_batch_s": "first batch, cold cache",
}


def page(spec: Mapping[str, Any], data: Path, reports: Path, results: Sequence[Row]) -> dict[str, Any]:
    """Everything the template needs."""
    tables = reports / "tables"
    entries = catalogue(tuple(spec["config"].get("plugins", ())))
    quality = read_csv(tables / "quality.csv")
    rows = [arm_row(group, quality, entries) for group in cells(results)]
    machine = read_json(tables / "machine.json")
    attention = read_csv(tables / "attention.csv")
    facts = session_facts(reports / "sessions", spec["sessions"])
    return {
        "title": spec["title"],
        "version": __version__,
        "machine": machine,
        "results": results,
        "rounds": sorted({fact["rounds"] for fact in facts}),
        "summary": ranked([row for row in rows if row["workload"] == "training_step" and row["axis"] != "stack"]),
        "sections": sections(rows, results, attention, entries),
        "attention": attention,
        "failures": failures(results),
        "controls": [row for row in results if row["variant"] == "baseline_prime" and row["metric"] == "step_time_s"],
        "quality": [row for row in quality if row["metric"] in QUALITY_SHOWN],
        "precision": precision_section(read_csv(tables / "precision.csv"), quality, entries),
        "ablation": five_dimensions(read_csv(tables / "ablation.csv")),
        "ladder": read_csv(tables / "ladder.csv"),
        "stack": spec["config"]["ablation"]["stack"],
        "claims": read_csv(tables / "claims.csv"),
        "hotspots": read_csv(tables / "hotspots.csv"),
        "utilisation": read_csv(tables / "utilisation.csv"),
        "profile": read_json(reports / "profile" / "profile.json"),
        "qualify": error_rates(optional_json(tables / "qualify.json")),
        "corpus": corpus(data),
        "sessions_facts": facts,
        "left_out": spec["left_out"],
        "config": json.dumps(spec["config"], indent=1, sort_keys=True),
    }


QUALITY_SHOWN = ("bits_per_byte",)
FOREST_ROWS = 40  # of one session: more are too long a figure


def optional_json(path: Path) -> Any:
    """A JSON file's content, or None when it does not exist."""
    return read_json(path) if path.exists() else None


def error_rates(outcome: Any) -> list[dict[str, Any]]:
    """Lines of the harness's own error rates: what was compared, how often it was called, with the interval."""
    rows = []
    for run in (outcome or {}).get("runs", ()):
        busy = ", one core kept busy" if run["hog"] else ""
        for row in run["table"]:
            called = "called faster or slower" if row["kind"] == "identical" else "found"
            rows.append({**row, "label": f"{row['kind']} arms {called} ({run['rounds']} rounds{busy})"})
    return rows


def cells(results: Sequence[Row]) -> list[list[Row]]:
    """The results grouped by session, shape and variant, in file order; the hidden control is left to its own table."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in results:
        if row["variant"] not in ("baseline", "baseline_prime"):
            groups.setdefault((row["session"], row["shape"], row["variant"]), []).append(row)
    return list(groups.values())


def cells_as_rows(reports: Path) -> list[dict[str, Any]]:
    """The comparison lines of a reports folder, one per session, shape and variant."""
    tables = reports / "tables"
    quality, entries = read_csv(tables / "quality.csv"), catalogue()
    return [arm_row(group, quality, entries) for group in cells(read_csv(tables / "results.csv"))]


def arm_row(group: Sequence[Row], quality: Sequence[Row], entries: Mapping[str, Entry]) -> dict[str, Any]:
    """One line of a comparison table: the primary metric with its interval, and the other metrics' ratios."""
    by_metric = {row["metric"]: row for row in group}
    first = by_metric.get("step_time_s") or group[0]
    ratio, low, high = (finite(first[key]) for key in ("ratio", "ci_low", "ci_high"))
    key = f"{first['axis']}/{first['variant']}"
    return {
        **first,
        "speedup": 1 / ratio if ratio else None,
        "speedup_low": 1 / high if high else None,
        "speedup_high": 1 / low if low else None,
        "others": [
            by_metric[name] | {"label": label, "unit": "share" if name.endswith("_share") else by_metric[name]["unit"]}
            for name, label in METRICS.items()
            if name in by_metric and name != "step_time_s"
        ],
        "summary": entries[key].summary if key in entries else "",
        "control": entries[key].control if key in entries else False,
        "quality": quality_word(key, quality, entries),
    }


def quality_word(key: str, quality: Sequence[Row], entries: Mapping[str, Entry]) -> str:
    """What is known of a variant's quality: the verdict of paired runs, or that it is the same function (checked)."""
    for row in quality:
        if (
            row["recipe"] == key
            and row["metric"] == "bits_per_byte"
            and row.get("stressed") in ("False", "false", None)
        ):
            return f"{row['verdict']} (n = {row['n']})"
    entry = entries.get(key)
    if entry is None:
        return "see quality table" if key.startswith("stack/") else "not measured"
    if entry.quality_run:
        return "not measured"
    return "same function (checked)"


def ranked(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fastest first; rows without a number last."""
    return sorted(rows, key=lambda row: (row["speedup"] is None, -(row["speedup"] or 0)))


def sections(
    rows: Sequence[dict[str, Any]], results: Sequence[Row], attention: Sequence[Row], entries: Mapping[str, Entry]
) -> list[dict[str, Any]]:  # fmt: skip
    """One section per session, in the axes' order, with its sweeps (attention) or its loaders (data loading)."""
    order = {axis: place for place, axis in enumerate((*AXES, "stack"))}
    sweeps = sweep_sections(attention)
    loader = next((entry.name for entry in entries.values() if entry.axis == "dataloader" and entry.baseline), "")
    made = []
    for name in dict.fromkeys(row["session"] for row in rows):
        mine = [row for row in rows if row["session"] == name]
        axis, workload = mine[0]["axis"], mine[0]["workload"]
        title = f"{AXIS_TITLES.get(axis, axis)}: {workload.replace('_', ' ')}"
        found = {"name": name, "title": title, "axis": axis, "workload": workload, "rows": mine}
        loaders = loader_lines(results, name, loader) if axis == "dataloader" else []
        made.append({**found, "sweeps": sweeps.get(name, []), "loaders": loaders})
    return sorted(made, key=lambda section: order.get(section["axis"], len(order)))


def forest_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of the forest figure: those with a number; of a session with too many, those at its largest shape."""
    kept = forest_cut(rows)
    axes = len({row["axis"] for row in kept}) > 1
    short = short_shapes(list(dict.fromkeys(row["shape"] or "" for row in kept)))
    made = []
    for row in kept:
        label = f"{row['axis']}/{row['variant']}" if axes else f"{row['variant']}  {short[row['shape'] or '']}".strip()
        made.append({"label": label, "speedup": row["speedup"], "low": row["speedup_low"], "high": row["speedup_high"],
                     "verdict": row["verdict"], "floor": finite(row["noise_floor"])})  # fmt: skip
    return made


def forest_cut(rows: Sequence[Row]) -> list[Row]:
    """The rows with a number, of one session and more of them than a figure can show: at its last shape only."""
    kept = [row for row in rows if row["speedup"]]
    if len(kept) <= FOREST_ROWS or len({row["session"] for row in kept}) > 1:
        return kept
    return [row for row in kept if row["shape"] == kept[-1]["shape"]]


def short_shapes(shapes: Sequence[str]) -> dict[str, str]:
    """Each shape without the parts that all of them share."""
    shared = set.intersection(*(set(shape.split()) for shape in shapes)) if shapes else set()
    return {shape: " ".join(part for part in shape.split() if part not in shared) for shape in shapes}


def read_quality_runs(folder: Path) -> list[dict[str, Any]]:
    """All quality runs' JSON, sorted by name."""
    return [read_json(path) for path in sorted(folder.glob("*.json"))] if folder.exists() else []


def median_curves(runs: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Recipe → (tokens, median over seeds of bits per byte), runs at the ordinary learning rate only."""
    groups: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        if not run["spec"]["stressed"]:
            for point in run.get("curve") or ():
                if finite(point["bits_per_byte"]) is not None:
                    groups.setdefault(run["spec"]["recipe"], {}).setdefault(point["tokens"], []).append(
                        point["bits_per_byte"]
                    )
    order = sorted(groups, key=lambda name: (name != "baseline", name))
    return {name: [(t, statistics.median(values)) for t, values in sorted(groups[name].items())] for name in order}


def ladder_rows(results: Sequence[Row], stack: Sequence[str]) -> list[dict[str, Any]]:
    """The ladder upwards: the baseline, then each longer prefix of the stack."""
    names = [f"only:{stack[0]}", *(f"up-{n}" for n in range(2, len(stack))), "all"] if stack else []
    by_name = {r["variant"]: r for r in results if r["axis"] == "stack" and r["metric"] == "step_time_s"}
    rows: list[dict[str, Any]] = [{"label": "baseline", "speedup": 1.0, "low": None, "high": None}]
    for name, variant in zip(names, stack, strict=False):
        row = by_name.get(name)
        ratio = finite(row["ratio"]) if row else None
        if row and ratio:
            low, high = finite(row["ci_low"]), finite(row["ci_high"])
            rows.append({"label": f"+ {variant}", "speedup": 1 / ratio, "low": 1 / high if high else None,
                         "high": 1 / low if low else None})  # fmt: skip
    return rows


def failures(results: Sequence[Row]) -> list[dict[str, Any]]:
    """What could not be measured: one line for each arm, session, status and reason, with its shapes."""
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in results:
        if row["status"] != "ok" and row["metric"] in ("step_time_s", None, ""):
            key = tuple(row[name] for name in ("axis", "variant", "session", "status", "reason"))
            lines.setdefault(key, {**row, "shapes": []})["shapes"].append(row["shape"] or "")
    return [{**line, "shape": "; ".join(line["shapes"])} for line in lines.values()]


def five_dimensions(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The ablation by recipe: the first metric of each dimension."""
    table: dict[str, dict[str, Row]] = {}
    for row in rows:
        table.setdefault(row["recipe"], {}).setdefault(row["dimension"], row)
    return [{"recipe": recipe, **found} for recipe, found in table.items()]


def corpus(data: Path) -> dict[str, Any]:
    """Sources, counts and splits from the three manifests."""
    raw, shards, tokens = (read_json(data / name / "manifest.json") for name in ("raw", "shards", "tokens"))
    counts = {source["name"]: source for source in shards["sources"]}
    return {
        "sources": [{**source, **{"counts": counts.get(source["name"])}} for source in raw["sources"]],
        "totals": shards["totals"],
        "reproducible": shards["reproducible"],
        "shards": len(shards["shards"]),
        "reused": sum(bool(shard.get("reused")) for shard in shards["shards"]),
        "tokens": tokens,
    }
