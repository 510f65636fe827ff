"""Attention by sequence length: growth exponents, cross-over lengths, every length against two references.

One sweep is the cells of one operator session that differ in nothing but their length (tokens); a session with
several head sizes holds several sweeps.  No ratio leaves its session.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lmperf.comparing import Block
from lmperf.readings import BASELINE, CONTROL, ArmRounds, Session, arm_rounds, kind_of, read_session
from lmperf.records import Cell, Sample
from lmperf.scaling import FEWEST_LENGTHS, crossover, growth_exponent
from lmperf.tables import frame, write_csv

Row = Mapping[str, Any]

WORKLOADS = ("operator_forward", "operator_forward_backward")
GROWING = {"step_time_s": "s", "peak_memory_bytes": "bytes"}
SHOWN = (*GROWING, "flops_per_s", "mfu", "mfu_datasheet")
SECOND_REFERENCE = "sdpa_flash"  # what a user gets from PyTorch without asking
ATTENTION_COLUMNS = (
    "kind", "session", "workload", "sweep", "length", "metric", "unit", "variant", "other", "value", "ratio", "ci_low",
    "ci_high", "n", "noise_floor", "verdict", "status", "reason", "device", "dtype", "fingerprint",
)  # fmt: skip


def write_attention(
    session_files: Sequence[Path], results: Sequence[Row], out_tables: Path, *, smallest_effect: float
) -> pd.DataFrame:
    """Write attention.csv (ATTENTION_COLUMNS) from the operator sessions of the attention axis and their results.

    Rows by `kind`: growth (value: exponent, ci: its interval, n: lengths), crossover (value: length in tokens at which
    `variant` and `other` cost the same, n: lengths) and length (value: the metric; ratio with ci: variant / other).
    """
    wanted = {row["session"] for row in results if row["axis"] == "attention" and row["workload"] in WORKLOADS}
    rows: list[dict[str, Any]] = []
    for path in session_files:
        if Path(path).stem in wanted:
            session = read_session(path)
            mine = [row for row in results if row["session"] == session.spec.session]
            for sweep in sweeps_of(session, mine):
                rows += sweep_rows(sweep, smallest_effect)
    return write_csv(frame(rows, ATTENTION_COLUMNS), Path(out_tables) / "attention.csv")


@dataclass(frozen=True)
class Sweep:
    """Cells of one session by length; `shared` is what their labels have in common; results by (cell, arm, metric)."""

    session: Session
    shared: str
    cells: Mapping[int, Cell]
    results: Mapping[tuple[str, str, str], Row]

    @property
    def lengths(self) -> list[int]:
        """The lengths in tokens, shortest first."""
        return sorted(self.cells)

    @property
    def arms(self) -> list[str]:
        """The arms that are compared: the baseline first, without its control."""
        return [arm.name for arm in self.session.spec.arms if arm.name != CONTROL]

    def row(self, length: int, arm: str, metric: str) -> Row:
        """The result of an arm at a length, empty where there is none."""
        return self.results.get((self.cells[length].label, arm, metric), {})

    def values(self, arm: str, metric: str) -> list[float | None]:
        """An arm's values over the lengths, None where not measured."""
        found = [self.row(length, arm, metric).get("value") for length in self.lengths]
        return [value if value is not None and value > 0 else None for value in found]

    def frame(self, kind: str, metric: str, unit: str, variant: str, other: str | None = None) -> dict[str, Any]:
        """The columns that every row of this sweep has."""
        spec = self.session.spec
        where = {"kind": kind, "session": spec.session, "workload": spec.workload, "sweep": self.shared}
        where |= {"device": spec.device, "dtype": spec.dtype, "fingerprint": self.session.fingerprint}
        return where | {"metric": metric, "unit": unit, "variant": variant, "other": other}


def sweeps_of(session: Session, results: Sequence[Row]) -> list[Sweep]:
    """The sweeps of a session, in the order of its cells; cells without a length belong to none."""
    groups: dict[str, dict[int, Cell]] = {}
    for cell in session.spec.cells:
        if isinstance(cell.params.get("length"), int):
            shared = " ".join(f"{name}={value}" for name, value in cell.params.items() if name != "length")
            groups.setdefault(shared, {})[cell.params["length"]] = cell
    by_cell = {(row["shape"], row["variant"], row["metric"]): row for row in results}
    return [Sweep(session, shared, cells, by_cell) for shared, cells in groups.items()]


def sweep_rows(sweep: Sweep, smallest_effect: float) -> Iterator[dict[str, Any]]:
    """All rows of one sweep."""
    for metric in GROWING:
        for arm in sweep.arms:
            yield growth_row(sweep, arm, metric)
        for one, other in itertools.combinations(sweep.arms, 2):
            yield crossover_row(sweep, one, other, metric)
    for length in sweep.lengths:
        yield from baseline_rows(sweep, length)
        if SECOND_REFERENCE in sweep.arms:
            yield from reference_rows(sweep, length, SECOND_REFERENCE, smallest_effect)


def growth_row(sweep: Sweep, arm: str, metric: str) -> dict[str, Any]:
    """The exponent of metric ∝ length^exponent with its 95 % interval, null below three lengths."""
    values = sweep.values(arm, metric)
    n = sum(value is not None for value in values)
    row = sweep.frame("growth", metric, "exponent", arm) | {"n": n}
    fit = growth_exponent(sweep.lengths, values) if n >= FEWEST_LENGTHS else None
    if fit is None:
        return row | {"reason": f"measured at {n} of {len(values)} lengths; an exponent needs {FEWEST_LENGTHS}"}
    return row | {"value": fit.exponent, "ci_low": fit.low, "ci_high": fit.high}


def crossover_row(sweep: Sweep, one: str, other: str, metric: str) -> dict[str, Any]:
    """The length at which two arms cost the same; closer than the noise floor of their length they count as equal."""
    lengths, first, second = common_curves(sweep, one, other, metric)
    row = sweep.frame("crossover", metric, "tokens", one, other) | {"n": len(lengths)}
    if len(lengths) < 2:
        return row | {"reason": f"measured together at {len(lengths)} lengths; a crossing needs 2"}
    value = crossover(lengths, first, second)
    gaps = [a - b for a, b in zip(first, second, strict=True) if a != b]
    less = f"{one if gaps[-1] < 0 else other} takes less" if gaps else "no difference above the noise floor"
    if value is not None:
        return row | {"value": value, "reason": f"{less} beyond"}
    return row | {"reason": f"do not cross in the measured range, {lengths[0]} to {lengths[-1]} tokens: {less}"}


def common_curves(
    sweep: Sweep, one: str, other: str, metric: str
) -> tuple[list[int], list[float], list[float]]:  # fmt: skip
    """Lengths at which both arms were measured, with both values; equal ones where they differ by less than noise."""
    lengths, first, second = [], [], []
    values = zip(sweep.lengths, sweep.values(one, metric), sweep.values(other, metric), strict=True)
    for length, a, b in values:
        if a is not None and b is not None:
            floor = sweep.row(length, BASELINE, metric).get("noise_floor") or 0.0
            lengths.append(length)
            first.append(a)
            second.append(a if abs(math.log(a / b)) <= math.log1p(floor) else b)
    return lengths, first, second


def baseline_rows(sweep: Sweep, length: int) -> Iterator[dict[str, Any]]:
    """Each arm's metrics at a length and their ratios to the baseline, as in the results table."""
    for metric in SHOWN:
        for arm in sweep.arms:
            found = sweep.row(length, arm, metric)
            if found:
                other = None if arm == BASELINE else BASELINE
                kept = {name: found.get(name) for name in ATTENTION_COLUMNS if name in found}
                row = sweep.frame("length", metric, found["unit"], arm, other) | kept
                yield row | {"kind": "length", "length": length, "n": found.get("rounds")}


def reference_rows(sweep: Sweep, length: int, reference: str, smallest_effect: float) -> Iterator[dict[str, Any]]:
    """Each arm's time and memory at a length as ratios to another arm of the session."""
    label = sweep.cells[length].label
    for metric, unit in GROWING.items():
        if metric == "step_time_s":
            arms = {arm.name: arm_rounds(sweep.session, arm.name, label, metric) for arm in sweep.session.spec.arms}
        else:
            arms = weighed_arms(sweep.session, label, metric)
        for arm, columns in against(arms, reference, kind_of(metric, unit), smallest_effect).items():
            row = sweep.frame("length", metric, unit, arm, reference) | columns
            yield row | {"length": length, "value": sweep.row(length, arm, metric).get("value")}


def weighed_arms(session: Session, cell: str, metric: str) -> dict[str, ArmRounds]:
    """The memory process samples of a cell as arms of one round."""
    arms = {}
    for line in session.memory:
        if line["cell"] == cell:
            value = ((line.get("metrics") or {}).get(metric) or {}).get("value")
            sample = Sample(line["arm"], cell, 1, line.get("status", "ok"), line.get("reason"))
            arms[line["arm"]] = ArmRounds(line["arm"], {} if value is None else {1: float(value)}, {1: sample})
    return arms


def against(
    arms: Mapping[str, ArmRounds], reference: str, kind: Any, smallest_effect: float
) -> dict[str, dict[str, Any]]:
    """Columns ratio to reason of every other arm as if `reference` were the baseline, by the rules of `comparing`.

    The control keeps its ratio to its own twin round by round, so that the noise floor stays the session's.
    """
    base = arms.get(reference)
    others = [name for name in arms if name not in (reference, CONTROL)]
    if base is None or not base.values:
        why = f"{reference} was not measured" + (f": {base.reason}" if base and base.reason else "")
        return {name: {"verdict": "not measured", "status": arms[name].status, "reason": why} for name in others}
    own = {f"arm {name}": arms[name] for name in others}
    block = Block(kind, base, {BASELINE: base, **_moved_control(arms, base), **own}, smallest_effect)
    found = {name: block.compared(f"arm {name}") for name in others}
    return {name: row | {"status": arms[name].status, "n": row["rounds"]} for name, row in found.items()}


def _moved_control(arms: Mapping[str, ArmRounds], base: ArmRounds) -> dict[str, ArmRounds]:
    control, twin = arms.get(CONTROL), arms.get(BASELINE)
    if control is None or twin is None:
        return {}
    rounds = control.values.keys() & twin.values.keys() & base.values.keys()
    moved = {n: base.values[n] * control.values[n] / twin.values[n] for n in rounds}
    return {CONTROL: ArmRounds(CONTROL, moved, control.samples)}
