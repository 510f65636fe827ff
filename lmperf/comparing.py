"""Sessions to comparisons: one row per arm, cell and metric with its paired ratio, interval, noise floor and verdict.

A delta is only ever made inside one session, against the baseline's sample of the same round and cell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from lmperf.design import minimum_rounds
from lmperf.plausibility import impossible_cells, marked
from lmperf.readings import (
    BASELINE,
    CONTROL,
    ArmRounds,
    Kind,
    Session,
    arm_rounds,
    kind_of,
    measured,
    memory_value,
    read_session,
)
from lmperf.records import RED_BADGES, InputError
from lmperf.startup import WARM_UP_COLUMNS, break_even_rows, warm_up_rows
from lmperf.statistics import (
    FEWEST_EXACT_ROUNDS,
    SIZE_WORDS,
    SPEED_WORDS,
    Finding,
    Interval,
    detectable_effect,
    interval,
    judge_arms,
    verdict,
)
from lmperf.tables import frame, write_csv, write_results

BADGE_SHARE = 0.25  # a red badge on this share of an arm's paired rounds caps its verdict
COUNT_TOLERANCE = 0.01  # counted quantities (bytes, model size, hit rate) are "same" within this
SPREAD_OF_COUNTS = 1e-9  # counts that differ by more than rounding are treated as measured


def compare(
    session_files: Sequence[Path],
    out_tables: Path,
    results_parquet: Path,
    *,
    config_hash: str,
    smallest_effect: float,
) -> pd.DataFrame:
    """Compare every session's arms with its baseline; write results.csv and .parquet (RESULT_COLUMNS), warmup.csv."""
    rows, warm_ups = [], []
    for path in session_files:
        session = read_session(path)
        if not session.finished:
            raise InputError(f"{path}: it was cut before its end; delete it to measure this session again")
        rows += [{**row, "config_hash": config_hash} for row in compare_session(session, smallest_effect)]
        warm_ups += warm_up_rows(session)
    write_csv(frame(warm_ups, WARM_UP_COLUMNS), Path(out_tables) / "warmup.csv")
    return write_results(rows, out_tables, results_parquet)


def compare_session(session: Session, smallest_effect: float) -> list[dict[str, Any]]:
    """All rows of one session: its cells from small to large, and in each its metrics and arms."""
    rows: list[dict[str, Any]] = []
    impossible = impossible_cells(session)
    for cell in sorted(session.spec.cells, key=lambda cell: cell.size):
        timed: list[dict[str, Any]] = []
        for metric, unit in _timed_metrics(session, cell.label).items():
            timed += [marked(r, impossible) for r in _timed_rows(session, cell.label, metric, unit, smallest_effect)]
        rows += [*timed, *break_even_rows(session, cell.label, timed), *_memory_rows(session, cell.label)]
    return rows


def _timed_metrics(session: Session, cell: str) -> dict[str, str]:
    """Metric to unit at this cell over all arms; step time stands for arms of which none was measured."""
    found: dict[str, str] = {}
    for arm in session.spec.arms:
        for sample in session.index.get((arm.name, cell), {}).values():
            found |= {name: metric.unit for name, metric in measured(sample).items() if name not in found}
    return found or {"step_time_s": "s"}


def _timed_rows(
    session: Session, cell: str, metric: str, unit: str, smallest_effect: float
) -> Iterator[dict[str, Any]]:
    kind = kind_of(metric, unit)
    arms = {arm.name: arm_rounds(session, arm.name, cell, metric) for arm in session.spec.arms}
    base = arms.get(BASELINE, ArmRounds(BASELINE, {}, {}))
    block = Block(kind, base, arms, smallest_effect)
    for name, arm in arms.items():
        if not arm.values and arm.status == "ok" and not base.values:
            continue  # this arm has no such quantity (no compile time in eager mode, say)
        row = _frame(session, cell, name, metric, unit)
        yield row | {"value": _median(arm.values.values()), "status": arm.status} | block.compared(name)


class Block:
    """All arms of one session at one cell and metric: their paired log ratios, control, margins and findings."""

    def __init__(self, kind: Kind, base: ArmRounds, arms: Mapping[str, ArmRounds], smallest_effect: float) -> None:
        self.kind, self.base, self.arms = kind, base, arms
        self.costs = {name: self._log_costs(arm) for name, arm in arms.items() if name != BASELINE}
        self.counted = kind.counted and all(_constant(arm.values.values()) for arm in arms.values())
        control = self.costs.get(CONTROL)
        self.control = interval(control) if control else None
        self.floor = self.control.floor if self.control else None
        self.delta = min(0.99, max(smallest_effect, self.floor or 0.0))
        judged = {name: costs for name, costs in self.costs.items() if name != CONTROL and costs}
        self.family = len(judged)
        self.smallest_effect = smallest_effect
        self.findings = judge_arms(judged, self.delta, words=kind.words, same_delta=smallest_effect)
        if control:  # judged at the effect of interest alone: its own floor as the margin would hide every false alarm
            word = verdict(self.control, smallest_effect, words=kind.words)
            self.findings[CONTROL] = Finding(self.control, None, None, word)

    def pairs(self, arm: ArmRounds) -> list[tuple[int, float, float]]:
        """(round, baseline's value, the arm's value) of the rounds in which both were measured."""
        return [(n, self.base.values[n], arm.values[n]) for n in sorted(arm.values.keys() & self.base.values.keys())]

    def _log_costs(self, arm: ArmRounds) -> list[float] | None:
        """Log ratios turned so that less is better, or None where a value is zero and no ratio exists."""
        pairs = self.pairs(arm)
        if any(before <= 0 or after <= 0 for _, before, after in pairs):
            return None
        sign = -1.0 if self.kind.lower_is_better is False else 1.0
        return [sign * math.log(after / before) for _, before, after in pairs]

    def compared(self, name: str) -> dict[str, Any]:
        """The columns from baseline_value to reason of one arm's row."""
        arm, pairs = self.arms[name], self.pairs(self.arms[name])
        found: dict[str, Any] = {
            "baseline_value": _median([before for _, before, _ in pairs] or self.base.values.values()),
            "rounds": len(pairs) if name != BASELINE else len(self.base.values),
            "noise_floor": None if self.counted else self.floor,
            "verdict": "not measured",
            "reason": arm.reason,
        }
        if name == BASELINE:
            return found | {"reason": arm.reason or "the baseline itself"}
        if not pairs:
            return found | {"reason": arm.reason or self._why_unpaired(arm)}
        costs = self.costs[name]
        if self.counted:
            return found | _counted(self.kind, pairs, arm.reason)
        if costs is None:
            return found | {"verdict": "inconclusive", "reason": "zero in some rounds, so there is no ratio"}
        return found | self._ratio_columns(name, costs)

    def _why_unpaired(self, arm: ArmRounds) -> str:
        if not arm.values:
            return "the baseline has this quantity, this arm has not"
        return f"baseline: {self.base.status}" if self.base.status != "ok" else "the baseline has no such quantity"

    def _ratio_columns(self, name: str, costs: list[float]) -> dict[str, Any]:
        finding = self.findings[name]
        found, word = finding.interval, finding.verdict
        reasons = self.caps(name)
        if reasons and name != CONTROL or self.kind.lower_is_better is None and word in (*SPEED_WORDS, *SIZE_WORDS):
            word = "inconclusive"
        mde = detectable_effect(costs, self.delta, arms=max(1, self.family))
        if word == "inconclusive" and mde is not None and found is not None:
            mde = max(mde, found.floor)  # what the interval cannot exclude may have been missed too
        shown = self._turned(found)
        return {
            "ratio": shown.estimate if shown else math.exp(median(costs) * (-1 if self._is_rate else 1)),
            "ci_low": shown.low if shown else None,
            "ci_high": shown.high if shown else None,
            "mde": mde,
            "verdict": word,
            "reason": "; ".join([*reasons, *self._remarks(finding, word, len(costs))]) or None,
        }

    @property
    def _is_rate(self) -> bool:
        return self.kind.lower_is_better is False

    def _turned(self, found: Interval | None) -> Interval | None:
        return found.inverse() if found and self._is_rate else found

    def caps(self, name: str) -> list[str]:
        """Why this arm's verdict may not be more than inconclusive."""
        arm = self.arms[name]
        reasons = [arm.reason] if arm.status not in ("ok", None) and arm.reason else []
        reasons += _red_badges(self.base, arm, self.kind)
        if name == CONTROL:
            return reasons
        if self.control is None:
            reasons.append("no A/A control at this cell")
        elif self.control.excludes_1:
            span = f"[{self.control.low:.3f}, {self.control.high:.3f}]"
            reasons.append(f"red badge: aa_excludes_1 (baseline against itself: {span})")
        return reasons

    def _remarks(self, finding: Finding, word: str, n: int) -> list[str]:
        remarks = []
        needed = minimum_rounds(max(1, self.family))
        if finding.interval is None:
            remarks.append(f"n = {n}: no interval below 3 rounds")
        elif finding.interval.indicative:
            remarks.append(f"indicative (n = {n})")
        elif word == "inconclusive" and n < needed:
            remarks.append(f"{n} rounds cannot support {self.family} arms: {needed} needed")
        if n >= FEWEST_EXACT_ROUNDS and word == "inconclusive" and finding.interval and finding.interval.excludes_1:
            remarks.append("differs from 1, but not surely by more than the margin")
        if word == "inconclusive" and self.delta > self.smallest_effect:
            remarks.append(f"the noise floor of {self.floor:.1%} is above the smallest effect of interest")
        if self.kind.lower_is_better is None:
            remarks.append("neither way is better for this quantity")
        return remarks


def _red_badges(base: ArmRounds, arm: ArmRounds, kind: Kind) -> list[str]:
    """Each red badge that either side carries in at least a quarter of the paired rounds, with its count."""
    paired = [n for n in arm.values if n in base.values]
    counts = Counter(b for n in paired for b in {*arm.samples[n].badges, *base.samples[n].badges} if b in RED_BADGES)
    if not kind.utilisation:
        counts.pop("flops_mismatch", None)  # a wrong FLOP count spoils a utilisation, not a time
    return [
        f"red badge: {b} in {k} of {len(paired)} rounds" for b, k in counts.items() if k >= BADGE_SHARE * len(paired)
    ]


def _counted(kind: Kind, pairs: Sequence[tuple[int, float, float]], trouble: str | None) -> dict[str, Any]:
    """The ratio and verdict of a quantity that is counted and not timed; a zero baseline has no ratio."""
    before, after = median(p[1] for p in pairs), median(p[2] for p in pairs)
    n = "deterministic, n = 1" if len(pairs) == 1 else f"deterministic, n = {len(pairs)}"
    ratio = after / before if before > 0 else None
    change = after - before if ratio is None else ratio - 1
    if kind.lower_is_better is None or trouble:
        word = "inconclusive"
    elif abs(change) <= COUNT_TOLERANCE:
        word = "same"
    else:
        word = kind.words[0 if (change < 0) == kind.lower_is_better else 1]
    reason = n if ratio is not None else f"{n}; the baseline's is 0, so there is no ratio"
    return {"ratio": ratio, "verdict": word, "reason": f"{trouble}; {reason}" if trouble else reason}


def _memory_rows(session: Session, cell: str) -> Iterator[dict[str, Any]]:
    """Rows of the memory process samples (one an arm and cell): counted, so without interval."""
    lines = {line["arm"]: line for line in session.memory if line["cell"] == cell}
    names: dict[str, str] = {}
    for line in lines.values():
        names |= {name: metric["unit"] for name, metric in (line.get("metrics") or {}).items() if name not in names}
    for metric, unit in (names or ({"peak_memory_bytes": "bytes"} if lines else {})).items():
        base = memory_value(lines.get(BASELINE), metric)
        for arm, line in lines.items():
            yield _frame(session, cell, arm, metric, unit) | _memory_columns(arm, line, metric, unit, base)


def _memory_columns(arm: str, line: Mapping[str, Any], metric: str, unit: str, base: float | None) -> dict[str, Any]:
    value, status = memory_value(line, metric), line.get("status", "ok")
    row = {"value": value, "baseline_value": base, "rounds": int(value is not None), "status": status}
    row |= {"verdict": "not measured", "reason": line.get("reason")}
    if arm == BASELINE:
        return row | {"reason": line.get("reason") or "the baseline itself"}
    if value is None or status != "ok":
        return row | {"reason": line.get("reason") or "not measured in this arm"}
    if base is None:
        return row | {"reason": "the baseline's was not measured"}
    row |= _counted(kind_of(metric, unit), [(1, base, value)], None)
    if unit != "bytes":
        return row | {"verdict": "inconclusive", "reason": "seen once, n = 1: shown without a verdict"}
    if metric.startswith(("resident", "rss")):  # what the allocator keeps is not repeatable to a percent
        row |= {"verdict": "inconclusive", "reason": "resident memory, n = 1: shown without a verdict"}
    return row


def _frame(session: Session, cell: str, arm: str, metric: str, unit: str) -> dict[str, Any]:
    spec = session.spec
    variant = arm.removeprefix(f"{spec.axis}/")
    names = {"axis": spec.axis, "variant": variant, "workload": spec.workload, "shape": cell, "metric": metric}
    where = {"device": spec.device, "dtype": spec.dtype, "session": spec.session, "fingerprint": session.fingerprint}
    return names | {"unit": unit} | where


def _median(values: Any) -> float | None:
    values = list(values)
    return float(median(values)) if values else None


def _constant(values: Any) -> bool:
    values = list(values)
    return not values or max(values) - min(values) <= SPREAD_OF_COUNTS * max(abs(v) for v in values)
