"""What happens to the numbers of a quality run: formats of every tensor, the loss scale, gradients that underflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from lmperf.catalogue import Entry
from lmperf.qualities import Run, finite, read_runs
from lmperf.tables import frame, write_csv

AXIS = "precision"
BASELINE = "baseline"
REFERENCE = f"{AXIS}/fp16_autocast_scaler"  # what a negative control leaves something out of
MATTERS = 0.01  # share of steps, or of gradient elements, by which a control has to be worse for it to count

#: Kinds of tensors as `numerics.dtype_table` names them, in the order of a step, and their columns here.
KINDS = {
    "parameters": "parameters",
    "master weights": "master_weights",
    "first linear's output": "linear_output",
    "norm's output": "norm_output",
    "residual stream": "residual",
    "logits": "logits",
    "loss": "loss",
    "gradients": "gradients",
    "gradients for the update": "update_gradients",
    "gradient norm": "gradient_norm",
    "optimizer's moments": "moments",
    "products of fp32 matrices": "fp32_products",
}
COUNTS = (
    "scale_first", "scale_last", "scale_min", "scale_max", "steps", "skipped_steps", "nonfinite_steps",
    "underflow_total", "underflow_worst", "underflow_worst_layer",
)  # fmt: skip
PRECISION_COLUMNS = ("recipe", "stressed", "n", *KINDS.values(), "dtypes_reason", *COUNTS, "status", "reason")

Row = Mapping[str, Any]


def precision_table(quality_files: Sequence[Path], out: Path) -> pd.DataFrame:
    """Write precision.csv: the baseline and each recipe with a change of the precision axis, medians over seeds."""
    groups: dict[tuple[str, bool], list[Run]] = {}
    for run in read_runs(quality_files):
        if run.spec.recipe == BASELINE or any(name.startswith(f"{AXIS}/") for name in run.spec.variants):
            groups.setdefault((run.spec.recipe, run.spec.stressed), []).append(run)
    order = sorted(groups, key=lambda key: (key[1], key[0] != BASELINE, key[0]))
    rows = [{"recipe": key[0], "stressed": key[1], **recipe_row(groups[key])} for key in order]
    return write_csv(frame(rows, PRECISION_COLUMNS), Path(out) / "precision.csv")


def recipe_row(runs: Sequence[Run]) -> dict[str, Any]:
    """One recipe at one learning rate; what no run has is None."""
    trained = [run for run in runs if run.outcome.get("stability")]
    failed = next((run for run in runs if run.status not in ("ok", "unstable")), None)
    status = failed.status if failed else "unstable" if any(run.diverged for run in runs) else "ok"
    reason = next((run.outcome.get("reason") for run in runs if run.status == status), None)
    counts = {
        "steps": middle(run.stable("steps") for run in trained),
        "skipped_steps": middle(run.stable("skipped_scaler_steps") for run in trained),
        "nonfinite_steps": middle(run.stable("nonfinite_steps") for run in trained),
    }
    formats = number_formats(runs)
    return {**formats, **scales(trained), **counts, **underflow(trained), "n": len(trained),
            "status": status, "reason": reason}  # fmt: skip


def number_formats(runs: Sequence[Run]) -> dict[str, str | None]:
    """Dtypes of the first run that has them (they do not depend on the seed), or the reason why none has."""
    found = next((run.outcome["dtypes"] for run in runs if run.outcome.get("dtypes")), None)
    if found is None:
        reasons = (run.outcome.get("dtypes_reason") or run.outcome.get("reason") for run in runs)
        return {"dtypes_reason": next((reason for reason in reasons if reason), None)}
    return {column: found.get(kind) for kind, column in KINDS.items()}


def scales(runs: Sequence[Run]) -> dict[str, float | None]:
    """First, last, smallest and largest loss scale: medians over the runs that have a scaler."""
    paths = [[float(scale) for _, scale in points] for run in runs if (points := change_points(run.outcome))]
    return {
        "scale_first": middle(path[0] for path in paths),
        "scale_last": middle(path[-1] for path in paths),
        "scale_min": middle(map(min, paths)),
        "scale_max": middle(map(max, paths)),
    }


def change_points(outcome: Row) -> list[tuple[int, float]]:
    """A run's loss scale as (step, scale) at its first step and wherever it changed; empty without a scaler."""
    return [(int(step), float(scale)) for step, scale in (outcome.get("stability") or {}).get("scale") or ()]


def underflow(runs: Sequence[Run]) -> dict[str, Any]:
    """Shares of gradient elements that are exactly zero at the last evaluation: over all, and of the worst layer."""
    shares: dict[str, list[float]] = {}
    for run in runs:
        for layer, share in (run.outcome.get("gradient_underflow") or {}).items():
            shares.setdefault(layer, []).append(float(share))
    medians = {layer: median(values) for layer, values in shares.items()}
    total = medians.pop("total", None)
    share = max(medians.values(), default=None)
    worst = max(medians, key=medians.__getitem__) if share else None  # where all are zero no layer is the worst
    return {"underflow_total": total, "underflow_worst": share, "underflow_worst_layer": worst}


def middle(values: Iterable[float | None]) -> float | None:
    """The median of the values that are there, None without any."""
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None


def precision_section(rows: Sequence[Row], quality: Sequence[Row], entries: Mapping[str, Entry]) -> dict[str, Any]:
    """What the report shows, from precision.csv and quality.csv as text: the table's rows and the controls' lines."""
    return {
        "rows": list(rows),
        "kinds": {kind: column for kind, column in KINDS.items() if any(row[column] for row in rows)},
        "controls": list(control_lines(rows, quality, entries)),
    }


def control_lines(
    rows: Sequence[Row], quality: Sequence[Row], entries: Mapping[str, Entry]
) -> Iterator[dict[str, Any]]:
    """One plain line for each negative control of the axis: whether its harm showed here (`harm`, None: not run)."""
    for key in (key for key, entry in entries.items() if entry.axis == AXIS and entry.control):
        mine = [row for row in rows if row["recipe"] == key]
        if not any(number(row["n"]) for row in mine):
            why = mine[0]["reason"] or mine[0]["status"] if mine else "no quality run in this configuration"
            yield {"recipe": key, "harm": None, "text": f"not run here: {why}"}
            continue
        seen = [sign for row in mine for sign in signs(row, rows, quality)]
        texts = {kind: "; ".join(text for found, text in seen if found == kind) for kind in ("harm", "fault", "calm")}
        yield {"recipe": key, "harm": bool(texts["harm"]), "text": verdict_line(**texts)}


def verdict_line(harm: str, fault: str, calm: str) -> str:
    """The line on one control from what was harmful, what was faulty without being harm yet, and what was neither."""
    if harm:
        return f"its harm showed here: {'; '.join(text for text in (harm, fault) if text)}"
    if fault:
        return f"its fault showed here ({fault}), but no harm to training: {calm}"
    return f"no harm was shown here: {calm}"


def signs(row: Row, rows: Sequence[Row], quality: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """(harm, fault or calm; what was seen) of one control at one learning rate.

    The loss and the lost seeds are held against the baseline's, as in quality.csv; counts against the recipe with a
    scaler where it ran, else the baseline, and they have to be worse in the median by `MATTERS`.
    """
    rate = " at the stressed learning rate" if is_true(row["stressed"]) else ""
    yield from ((kind, text + rate) for kind, text in _outcome_signs(row, quality))
    able = [r for r in rows if number(r["n"])]
    other = next((r for name in (REFERENCE, BASELINE) for r in able if same_rate(r, row, name)), None)
    if other is not None:
        yield from ((kind, text + rate) for kind, text in _count_signs(row, other))


def _outcome_signs(row: Row, quality: Sequence[Row]) -> Iterator[tuple[str, str]]:
    loss, lost = (quality_row(row, quality, metric) or {} for metric in ("bits_per_byte", "diverged_share"))
    if (ratio := number(loss.get("ratio"))) is not None:
        text = f"bits per byte {ratio:.4f} times the baseline's ({loss['verdict']}, n = {loss['n']})"
        yield "harm" if loss["verdict"] == "inferior" else "calm", text
    if (share := number(lost.get("value"))) is not None:
        base = number(lost["baseline_value"]) or 0.0
        yield "harm" if share > base else "calm", f"{share:.0%} of the seeds diverged (baseline {base:.0%})"


def _count_signs(row: Row, other: Row) -> Iterator[tuple[str, str]]:
    steps = number(row["steps"])
    for key, what in (("skipped_steps", "steps skipped"), ("nonfinite_steps", "steps not finite")):
        ours, theirs = number(row[key]), number(other[key]) or 0.0
        if ours is not None and steps:
            worse = ours - theirs > MATTERS * steps
            yield "harm" if worse else "calm", f"{ours:g} of {steps:g} {what} ({other['recipe']}: {theirs:g})"
    ours, theirs = number(row["underflow_total"]), number(other["underflow_total"])
    if ours is not None and theirs is not None:
        text = f"{ours:.2%} of the gradients' elements zero ({other['recipe']}: {theirs:.2%})"
        yield "fault" if ours - theirs > MATTERS else "calm", text


def quality_row(row: Row, quality: Sequence[Row], metric: str) -> Row | None:
    """The row of quality.csv on the same recipe and learning rate."""
    return next((r for r in quality if r["metric"] == metric and same_rate(r, row, row["recipe"])), None)


def same_rate(row: Row, other: Row, recipe: str) -> bool:
    """Whether a row is of this recipe, at the other row's learning rate."""
    return row["recipe"] == recipe and is_true(row["stressed"]) == is_true(other["stressed"])


def is_true(value: Any) -> bool:
    """A table's flag, as it was written or as text."""
    return str(value).lower() == "true"


def number(value: Any) -> float | None:
    """A table's cell as a number, None where it is empty."""
    return finite(float(value)) if value not in (None, "") else None


def scale_lines(outcomes: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Recipe → (step, loss scale) at every change of any seed and at the end: the median over seeds."""
    groups: dict[str, list[tuple[list[tuple[int, float]], int]]] = {}
    for outcome in outcomes:
        if points := change_points(outcome):
            spec = outcome["spec"]
            steps = int(outcome["stability"].get("steps") or spec["steps"])
            name = f"{spec['recipe']} (stressed)" if spec["stressed"] else str(spec["recipe"])
            groups.setdefault(name, []).append((points, steps))
    return {name: _median_line(runs) for name, runs in sorted(groups.items())}


def _median_line(runs: Sequence[tuple[list[tuple[int, float]], int]]) -> list[tuple[float, float]]:
    steps = sorted({step for points, _ in runs for step, _ in points} | {max(end for _, end in runs)})
    return [(step, median(_scale_at(points, step) for points, _ in runs)) for step in steps]


def _scale_at(points: Sequence[tuple[int, float]], step: int) -> float:
    return next(scale for start, scale in reversed(points) if start <= step)
