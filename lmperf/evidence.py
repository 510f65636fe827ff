"""What a run's tables hold for and against a claim: finding the row and reading the direction it establishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]
FAILURES_THAT_HARM = ("unstable", "incorrect", "missed")
DIFFERENT = 0.02  # conservative comparison of two variants: beyond this they differ


class Sought(Protocol):
    """The parts of a claim's test that say which row is meant and what is expected of it."""

    axis: str | None
    recipe: str | None
    variant: tuple[str, ...]
    versus: tuple[str, ...]
    workload: tuple[str, ...]
    metric: str | None
    shape: str | None
    stressed: bool
    ratio: float | None
    direction: str | None
    within: float | None
    invert: bool
    harm: bool

    @property
    def expected(self) -> str:
        """Which way the claimed effect goes."""


@dataclass(frozen=True)
class Outcome:
    """A verdict on one figure with its reason and, where there is one, the measured ratio or share."""

    verdict: str
    reason: str
    measured: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Evidence:
    """A run's results, quality rows, table folder and machine facts."""

    results: Sequence[Row]
    quality: Sequence[Row]
    tables: Path
    machine: Mapping[str, Any]

    @property
    def has_cuda(self) -> bool:
        """Whether this machine has a CUDA device."""
        facts = self.machine.get("machine") or self.machine
        return bool(facts.get("gpus") or facts.get("gpu"))


@dataclass(frozen=True)
class Finding:
    """A measured ratio variant / baseline with the direction that its verdict establishes."""

    ratio: float | None
    low: float | None
    high: float | None
    direction: str  # less | more | none | unknown
    where: str
    mde: float | None = None
    harmed: bool = False  # the variant failed as unstable or incorrect

    def inverted(self) -> Finding:
        """The baseline against the variant."""
        turned = {"less": "more", "more": "less"}.get(self.direction, self.direction)
        return replace(
            self, ratio=_inverse(self.ratio), low=_inverse(self.high), high=_inverse(self.low), direction=turned
        )

    def against(self, test: Sought) -> Outcome:
        """The verdict on a claimed ratio, direction or bound."""
        found = self.inverted() if test.invert else self
        if test.harm and found.harmed:
            return found._outcome("reproduced", "training or the check against the reference failed")
        if found.ratio is None:
            return Outcome("not testable here", found.where)
        if test.within is not None:
            return found._bounded(test.within)
        if found.direction == "unknown":
            return found._outcome("inconclusive", found._smallest())
        if test.expected == "none":
            why = {"none": "equivalent", "less": "no cost: it even gains", "more": "it does cost"}[found.direction]
            return found._outcome("contradicted" if found.direction == "more" else "reproduced", why)
        if found.direction == "none":
            return found._nothing(test.ratio)
        if found.direction != test.expected:
            return found._outcome("contradicted", "the effect goes the other way")
        return found._reached(test.ratio)

    def _outcome(self, verdict: str, why: str) -> Outcome:
        reason = "; ".join(part for part in (why, self.where) if part)
        return Outcome(verdict, reason, self.ratio, self.low, self.high)

    def _bounds(self) -> tuple[float, float]:
        ratio = self.ratio or 0.0
        return (ratio if self.low is None else self.low), (ratio if self.high is None else self.high)

    def _smallest(self) -> str:
        if self.mde is None:
            return "the design could not have shown it"
        return f"an effect under {self.mde:.1%} could not have been seen"

    def _bounded(self, share: float) -> Outcome:
        low, high = self._bounds()
        if self.harmed or low > 1 + share:
            return self._outcome("contradicted", f"more than {share:.1%} worse")
        if self.low is not None and high <= 1 + share:
            return self._outcome("reproduced", f"at most {share:.1%} worse")
        return self._outcome("inconclusive", f"up to {high - 1:.1%} worse cannot be excluded")

    def _nothing(self, claimed: float | None) -> Outcome:
        low, high = self._bounds()
        if claimed is not None and low <= claimed <= high:
            return self._outcome("inconclusive", "the claimed effect is no larger than the margin of this session")
        return self._outcome("no effect", "equivalence shown")

    def _reached(self, claimed: float | None) -> Outcome:
        low, high = self._bounds()
        if claimed is None:
            return self._outcome("reproduced", "same direction (no figure was claimed)")
        if (low if claimed < 1 else -high) <= (claimed if claimed < 1 else -claimed):
            return self._outcome(
                "reproduced", f"the interval reaches the claimed ratio of {claimed:.3g} or lies beyond"
            )
        return self._outcome("direction only", f"the interval stays short of the claimed ratio of {claimed:.3g}")


def _inverse(value: float | None) -> float | None:
    return None if value is None or value == 0 else 1 / value


def find_result(test: Sought, evidence: Evidence) -> Finding | Outcome:
    """The result row that a test is about, or why there is none."""
    rows = [row for row in evidence.results if row["axis"] == test.axis and row["workload"] in test.workload]
    if not rows:
        return Outcome("not testable here", f"session {test.axis}.{test.workload[0]} was not run: not in this preset")
    row = _pick(rows, test.variant, test)
    if isinstance(row, Outcome):
        return row
    if not test.versus:
        return _result_finding(row)
    other = _pick([r for r in rows if r["session"] == row["session"]], test.versus, test)
    return other if isinstance(other, Outcome) else _against_other(row, other)


def _pick(rows: Sequence[Row], variants: Sequence[str], test: Sought) -> Row | Outcome:
    """The first named variant that was measured, at the named shape, else at the session's last (largest) cell."""
    named = [row for name in variants for row in rows if row["variant"] == name]
    if not named:
        return Outcome(
            "not testable here", f"{' or '.join(variants)} is not among the variants of this preset's session"
        )
    there = [row for row in named if row["metric"] == test.metric]
    if not there:
        return Outcome("not testable here", _why_absent(named, test))
    shaped = [row for row in there if test.shape is None or test.shape in str(row["shape"])]
    if not shaped:
        return Outcome("not testable here", f"no cell with {test.shape} was measured")
    for name in variants:
        for workload in test.workload:
            fitting = [row for row in shaped if row["variant"] == name and row["workload"] == workload]
            able = [row for row in fitting if row["value"] is not None]
            if able:
                return able[-1]
    return shaped[-1]


def _why_absent(named: Sequence[Row], test: Sought) -> str:
    failed = next((row for row in named if row["status"] not in ("ok", None)), None)
    if failed:
        return f"{failed['variant']}: {failed['status']}: {failed['reason'] or 'no reason given'}"
    return f"{test.metric} was not measured for {named[0]['variant']}"


DIRECTIONS = {"same": "none", "small difference": "none", "inconclusive": "unknown", "not measured": "unknown"}


def _result_finding(row: Row) -> Finding:
    where = f"{row['variant']}, {row['workload']} at {row['shape']}, n = {row['rounds'] or 0}"
    if row["ratio"] is None:
        why = f"{row['status']}: {row['reason']}" if row["status"] not in ("ok", None) else row["reason"]
        return Finding(None, None, None, "unknown", f"{where}: {why}", harmed=row["status"] in FAILURES_THAT_HARM)
    direction = DIRECTIONS.get(row["verdict"]) or ("less" if row["ratio"] < 1 else "more")
    where += f"; {row['reason']}" if row["reason"] else ""
    return Finding(row["ratio"], row["ci_low"], row["ci_high"], direction, where, row["mde"])


def _against_other(row: Row, other: Row) -> Finding:
    """Two variants of one session: exact for counted values, else by the quotient of their bounds, which is wider."""
    where = f"{row['variant']} against {other['variant']}, {row['workload']} at {row['shape']}"
    if row["value"] is None or not other["value"]:
        bad = row if row["value"] is None else other
        return Finding(None, None, None, "unknown", f"{where}: {bad['status']}: {bad['reason']}")
    counted = row["ci_low"] is None and other["ci_low"] is None
    if counted and str(row["reason"]).startswith("deterministic"):
        ratio = row["value"] / other["value"]
        return Finding(ratio, None, None, _plain_direction(ratio, ratio), f"{where}; counted")
    bounds = (row["ci_low"], row["ci_high"], other["ci_low"], other["ci_high"])
    if None in bounds:
        return Finding(None, None, None, "unknown", f"{where}: no interval")
    low, high = bounds[0] / bounds[3], bounds[1] / bounds[2]
    capped = "inconclusive" in (row["verdict"], other["verdict"])
    direction = "unknown" if capped else _plain_direction(low, high)
    return Finding(row["ratio"] / other["ratio"], low, high, direction, f"{where}; bounds of both combined", row["mde"])


def _plain_direction(low: float, high: float) -> str:
    if high < 1 - DIFFERENT:
        return "less"
    if low > 1 + DIFFERENT:
        return "more"
    return "none" if low >= 1 - DIFFERENT and high <= 1 + DIFFERENT else "unknown"


QUALITY_DIRECTIONS = {"non-inferior": "none", "inferior": "more", "better": "less"}


def find_quality(test: Sought, evidence: Evidence) -> Finding | Outcome:
    """The quality row that a test is about, or why there is none."""
    names = [test.recipe] if test.recipe else [f"{test.axis}/{name}" for name in test.variant]
    row = _pick_quality(names, test, evidence)
    if isinstance(row, Outcome) or not test.versus:
        return row if isinstance(row, Outcome) else _quality_finding(row)
    other = _pick_quality([f"{test.axis}/{name}" for name in test.versus], test, evidence)
    if isinstance(other, Outcome):
        return other
    as_results = [
        {**r, "variant": r["recipe"], "workload": "quality run", "shape": "", "mde": None} for r in (row, other)
    ]
    return _against_other(*as_results)


def _pick_quality(names: Sequence[str], test: Sought, evidence: Evidence) -> Row | Outcome:
    tried = [row for name in names for row in evidence.quality if row["recipe"] == name]
    if not tried:
        return Outcome("not testable here", f"no quality run of {' or '.join(names)} in this preset")
    rows = [row for row in tried if bool(row["stressed"]) == test.stressed and _is_metric(row["metric"], test.metric)]
    if not rows:
        rate = " at the stressed learning rate" if test.stressed else ""
        return Outcome("not testable here", f"{test.metric} was not measured for {tried[0]['recipe']}{rate}")
    return next((row for row in reversed(rows) if row["ratio"] is not None), rows[-1])


def _is_metric(name: str, wanted: str | None) -> bool:
    return name == wanted or name.startswith(f"{wanted}.")


def _quality_finding(row: Row) -> Finding:
    where = f"{row['recipe']}, {row['metric']}, {row['n'] or 0} seeds"
    where += f"; {row['reason']}" if row["reason"] else ""
    harmed = row["status"] in FAILURES_THAT_HARM
    if row["unit"] == "steps a run":
        return _count_finding(row, where, harmed)
    if row["ratio"] is None:
        return Finding(None, None, None, "unknown", where, harmed=harmed)
    direction = QUALITY_DIRECTIONS.get(row["verdict"], "unknown")
    mde = None if row["ci_high"] is None else max(row["ci_high"], 1 / row["ci_low"]) - 1
    return Finding(row["ratio"], row["ci_low"], row["ci_high"], direction, where, mde, harmed)


def _count_finding(row: Row, where: str, harmed: bool) -> Finding:
    """Counts of rare steps: no ratio where the baseline has none, and no interval ever."""
    before, after = row["baseline_value"], row["value"]
    if not before:
        return Finding(None, None, None, "unknown", f"{where}: the baseline had no such step, so none can be saved")
    if after is None:
        return Finding(None, None, None, "unknown", where, harmed=harmed)
    return Finding(after / before, None, None, "unknown", f"{where}: a ratio of counts, without interval", None, harmed)
