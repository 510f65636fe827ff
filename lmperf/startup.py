"""What starting costs: the warm-up curve against the steady step, and when a compilation has paid for itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from lmperf.readings import BASELINE, Session, measured, memory_values
from lmperf.records import Sample
from lmperf.statistics import interval

WARM_UP_COLUMNS = ("session", "workload", "shape", "place", "ratio", "ci_low", "ci_high", "n")
COLD, WARM, BREAK_EVEN = "compile_time_s", "compile_warm_s", "break_even_steps"

Row = Mapping[str, Any]


def warm_up_rows(session: Session) -> Iterator[dict[str, Any]]:
    """How far the baseline's first step, and each later block of its warm-up, lies from its steady step time."""
    for cell in session.spec.cells:
        curves: dict[int, list[float]] = {}
        for sample in session.index.get((BASELINE, cell.label), {}).values():
            steady = measured(sample).get("step_time_s")
            for place, step_s in enumerate(_warm_up_curve(sample) if steady and steady.value else ()):
                curves.setdefault(place, []).append(math.log(step_s / steady.value))
        for place, logs in curves.items():
            found = interval(logs)
            row = {"session": session.spec.session, "workload": session.spec.workload, "shape": cell.label}
            row |= {"place": place, "ratio": math.exp(median(logs)), "n": len(logs)}
            yield row | ({"ratio": found.estimate, "ci_low": found.low, "ci_high": found.high} if found else {})


def _warm_up_curve(sample: Sample) -> list[float]:
    """Step seconds of the very first step and of the warm-up's blocks after it."""
    first = sample.metrics.get("first_step_s")
    curve = (sample.details.get("warmup") or {}).get("curve") or ()
    return [first.value, *map(float, curve)] if first and first.value else []


def break_even_rows(session: Session, cell: str, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """For each arm of a cell that compiles: the steps after which its cold compilation has paid for itself.

    `rows` are the cell's timed ones.  Steps = cold compile seconds / seconds that a step saves; the interval is that
    of the paired ratio of step times (the compilation itself was seen once).
    """
    cold = memory_values(session, cell, COLD)
    warm = {row["variant"] for row in rows if row["metric"] == WARM and row["value"] is not None}
    for row in rows:
        if row["metric"] != "step_time_s" or row["variant"] == BASELINE:
            continue
        seconds = next((cold[arm] for arm in cold if arm.removeprefix(f"{row['axis']}/") == row["variant"]), None)
        if seconds is not None or row["variant"] in warm:
            yield {**row, **EMPTY, **break_even(row, seconds)}


EMPTY = {
    "metric": BREAK_EVEN, "unit": "steps", "value": None, "baseline_value": None, "ratio": None, "ci_low": None,
    "ci_high": None, "noise_floor": None, "mde": None, "verdict": "not measured",
}  # fmt: skip


def break_even(row: Row, cold_s: float | None) -> dict[str, Any]:
    """Steps until `cold_s` of compiling are saved again by an arm's step time (its row), or why never."""
    if cold_s is None:
        return {"reason": "the compilation with an empty cache was not measured"}
    if row["value"] is None or row["verdict"] in ("inconclusive", "not measured"):
        word = row["verdict"] if row["status"] in ("ok", None) else row["status"]
        return {"reason": f"not known: the step time is {word}"}
    if row["verdict"] != "faster":
        return {"reason": f"never: not faster ({row['verdict']})"}
    steps = [cold_s / (row["baseline_value"] * (1 - row[key])) for key in ("ratio", "ci_low", "ci_high")]
    note = f"{cold_s:.3g} s of compiling, seen once; the interval is of these steps, from that of the step time's ratio"
    return dict(zip(("value", "ci_low", "ci_high"), steps, strict=True)) | {"reason": note}
