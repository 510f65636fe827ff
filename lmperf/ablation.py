"""The ablation: five dimensions for every recipe, and the stack taken apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lmperf.catalogue import catalogue
from lmperf.design import SMALLEST_EFFECT
from lmperf.ladder import LADDER_COLUMNS, ladder_rows
from lmperf.precision_tables import precision_table
from lmperf.qualities import quality_table
from lmperf.readings import BASELINE, CONTROL, Session, read_session
from lmperf.records import InputError, SessionSpec
from lmperf.tables import frame, records, write_csv

__all__ = ["DIMENSIONS", "ablate", "precision_table", "quality_table"]

ABLATION_COLUMNS = ("recipe", "dimension", "metric", "value", "ci_low", "ci_high", "n", "verdict", "reason")
DIMENSIONS = ("accuracy", "speed", "memory", "stability", "generalisation")
STACK_SESSION = "stack.training_step"
WORKLOADS = ("training_step", "operator_forward_backward", "operator_forward", "prefill_decode", "decode", "loading")
LEADING = {"accuracy": "bits_per_byte", "speed": "step_time_s", "memory": "peak_memory_bytes"}

Row = dict[str, Any]


def ablate(
    results: pd.DataFrame,
    quality: pd.DataFrame,
    spec: Mapping[str, Any] | SessionSpec | None,
    out: Path,
    *,
    session_file: Path | None = None,
) -> dict[str, pd.DataFrame]:
    """Write ablation.csv (all five dimensions of every recipe) and ladder.csv (the stack), and hand both back.

    `spec` may name the stack's order and the smallest effect; its arms come from the stack session's own file, by
    default beside `out` in sessions/, because increments are paired round by round.
    """
    out = Path(out)
    session_file = session_file or out.parent / "sessions" / f"{STACK_SESSION}.jsonl"
    session = read_session(session_file) if session_file.exists() else None
    measured, trained = _named_stack(records(results), session), records(quality)
    rows: list[Row] = []
    for recipe in recipes(measured, trained):
        rows += recipe_rows(recipe, measured, trained)
    ladder = stack_rows(spec, session) if session else []
    return {
        "ablation": write_csv(frame(rows, ABLATION_COLUMNS), out / "ablation.csv"),
        "ladder": write_csv(frame(ladder, LADDER_COLUMNS), out / "ladder.csv"),
    }


def _named_stack(rows: list[Row], session: Session | None) -> list[Row]:
    """The rows with the whole stack's arm called "all", whatever its name in the session."""
    whole = max(session.spec.arms, key=lambda arm: len(arm.variants)).name if session else None
    return [row | {"variant": "all"} if row["axis"] == "stack" and row["variant"] == whole else row for row in rows]


def stack_rows(spec: Mapping[str, Any] | SessionSpec | None, session: Session) -> list[Row]:
    """Rows of ladder.csv; the stack's order is the spec's, else that of the arm with most changes."""
    settings = spec if isinstance(spec, Mapping) else {}
    stack = list(settings.get("stack") or max((arm.variants for arm in session.spec.arms), key=len))
    missing = [v for v in stack if not any(v in arm.variants for arm in session.spec.arms)]
    if missing:
        raise InputError(f"ablation.stack: {missing[0]!r} is in no arm of {session.path}; measure that session again")
    smallest = float(settings.get("smallest_effect") or SMALLEST_EFFECT)
    return ladder_rows(session, stack, smallest)


def key_of(row: Mapping[str, Any]) -> str:
    """A result row's recipe: "axis/name", or "stack" for the whole stack."""
    if row["axis"] == "stack":
        return "stack" if row["variant"] == "all" else f"stack:{row['variant']}"
    return f"{row['axis']}/{row['variant']}"


def recipes(measured: Sequence[Row], trained: Sequence[Row]) -> list[str]:
    """Every recipe with a result or a quality run, parts of the stack apart (ladder.csv has those)."""
    timed = [key_of(row) for row in measured if row["variant"] not in (BASELINE, CONTROL)]
    names = [name for name in timed if not name.startswith("stack:")]
    return list(dict.fromkeys([*names, *(row["recipe"] for row in trained if row["recipe"] != BASELINE)]))


def recipe_rows(recipe: str, measured: Sequence[Row], trained: Sequence[Row]) -> Iterator[Row]:
    """One recipe's rows in the order of DIMENSIONS; one without any number gives a row with the reason."""
    timed = [row for row in measured if key_of(row) == recipe]
    tried = [row for row in trained if row["recipe"] == recipe]
    for dimension in DIMENSIONS:
        rows = list(dimension_rows(dimension, timed, tried))
        if not any(row["value"] is not None for row in rows):
            reason = why_missing(recipe, dimension, rows)
            yield {"recipe": recipe, **_line(dimension, LEADING.get(dimension), reason=reason)}
            continue
        yield from ({"recipe": recipe, **row} for row in rows)


def dimension_rows(dimension: str, timed: Sequence[Row], tried: Sequence[Row]) -> Iterator[Row]:
    """Rows of one dimension: ratios to the baseline for measured quantities, plain values for counts and shares."""
    if dimension in ("speed", "memory"):
        row = leading_row(timed, LEADING[dimension])
        if row:
            yield measured_line(dimension, row)
    if dimension == "speed" and (row := leading_row(timed, "tokens_per_s")):
        efficiency = next((q for q in tried if q["metric"] == "token_efficiency" and not q["stressed"]), None)
        if efficiency and efficiency["ratio"] is not None and row["ratio"] is not None:
            yield matched_line(row, efficiency)
    for row in tried:
        if row["dimension"] == dimension and (dimension not in ("speed", "memory") or not timed):
            if not row["stressed"] or dimension == "stability":
                yield quality_line(dimension, row)


def leading_row(rows: Sequence[Row], metric: str) -> Row | None:
    """The row that stands for a metric: a training step before operators, its last (largest) cell that has a ratio."""
    fitting = [row for row in rows if row["metric"] == metric]
    for workload in dict.fromkeys([*WORKLOADS, *(row["workload"] for row in fitting)]):
        here = [row for row in fitting if row["workload"] == workload]
        if here:
            return next((row for row in reversed(here) if row["ratio"] is not None), here[-1])
    return None


def measured_line(dimension: str, row: Row) -> Row:
    """A result row as an ablation row: its ratio, interval and verdict, and where it was measured."""
    where = f"{row['workload']}, {row['shape']}"
    failed = f"{row['status']}: " if row["status"] not in ("ok", None) else ""
    reason = f"{where}: {failed}{row['reason']}" if row["reason"] else where
    return _line(dimension, row["metric"], row, value=row["ratio"], n=row["rounds"], reason=reason)


def matched_line(row: Row, efficiency: Row) -> Row:
    """Capability-matched speed-up: measured throughput ratio × token efficiency, with the product of the bounds."""
    bounds = [row["ci_low"], row["ci_high"], efficiency["ci_low"], efficiency["ci_high"]]
    whole = None not in bounds
    low, high = (bounds[0] * bounds[2], bounds[1] * bounds[3]) if whole else (None, None)
    found = {"ci_low": low, "ci_high": high, "verdict": "inconclusive"}
    if whole and row["verdict"] != "inconclusive":
        found["verdict"] = "better" if low > 1 else "worse" if high < 1 else "inconclusive"
    note = "throughput × tokens the baseline needs for the same loss; the bounds' product, so at least 90 % sure"
    return _line(
        "speed", "matched_speedup", found, value=row["ratio"] * efficiency["ratio"], n=efficiency["n"], reason=note
    )


def quality_line(dimension: str, row: Row) -> Row:
    """A quality row as an ablation row; runs at the stressed learning rate carry that in the metric's name."""
    metric = f"{row['metric']}.stressed" if row["stressed"] else row["metric"]
    value = row["value"] if row["ratio"] is None and dimension == "stability" else row["ratio"]
    return _line(dimension, metric, row, value=value, n=row["n"], reason=row["reason"])


def why_missing(recipe: str, dimension: str, rows: Iterable[Row]) -> str:
    """Why a recipe has no number in a dimension."""
    reasons = [row["reason"] for row in rows if row["reason"]]
    if reasons:
        return str(reasons[0])
    if dimension in ("speed", "memory"):
        return "no session of this preset measured it"
    entry = catalogue().get(recipe)
    if entry and not entry.quality_run:
        return f"no quality run: its fidelity is {entry.fidelity}, it changes no numerics beyond that"
    return "no quality run in this preset"


def _line(dimension: str, metric: str | None, row: Mapping[str, Any] | None = None, **known: Any) -> Row:
    row = row or {}
    found = {"ci_low": row.get("ci_low"), "ci_high": row.get("ci_high"), "verdict": row.get("verdict", "not measured")}
    return {"dimension": dimension, "metric": metric, "value": None, "n": 0, **found, **known}
