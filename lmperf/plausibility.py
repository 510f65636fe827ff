"""A check across the cells of a session: a time that stays constant while the FLOPs more than double is no time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from lmperf.readings import BASELINE, Session, arm_rounds
from lmperf.records import Sample
from lmperf.statistics import interval

MORE_WORK = 2.0  # FLOPs of a cell over those of the one before, above which the time has to move
SAME_TIME = 0.02  # the whole interval of the paired ratio of step times inside 1 ± this: it did not move
HOST_BOUND = "host_bound"  # the device waits for the host, so that more work may well take no more time
TIMES = ("step_time_s", "tokens_per_s", "flops_per_s")

Row = Mapping[str, Any]


def impossible_cells(session: Session) -> dict[tuple[str, str], str]:
    """(arm, cell) → why the arm's step time there cannot be true: neighbouring cells, ordered by FLOPs a step."""
    return {
        (arm.name, later): reason for arm in session.spec.arms for later, reason in _constant_times(session, arm.name)
    }


def _constant_times(session: Session, arm: str) -> Iterator[tuple[str, str]]:
    work = {cell.label: flops for cell in session.spec.cells if (flops := flops_per_step(session, arm, cell.label))}
    ordered = sorted(work, key=work.__getitem__)
    for before, later in pairwise(ordered):
        more = work[later] / work[before]
        found = interval(_paired_logs(session, arm, before, later)) if more > MORE_WORK else None
        if found and 1 - SAME_TIME < found.low and found.high < 1 + SAME_TIME:
            span = f"{found.estimate:.3f} [{found.low:.3f}, {found.high:.3f}]"
            yield later, f"{more:.1f} times the FLOPs of {before!r} in {span} times its step time at {later!r}"


def flops_per_step(session: Session, arm: str, cell: str) -> float | None:
    """The arm's analytic FLOPs of one step at a cell, None where its samples hold none."""
    samples = session.index.get((arm, cell), {}).values()
    found = [float(flops) for sample in samples if (flops := sample.details.get("flops_per_step"))]
    return median(found) if found else None


def _paired_logs(session: Session, arm: str, before: str, later: str) -> list[float]:
    """Log ratios of the step times of two cells in the same rounds; rounds that wait for the host are left out."""
    one, two = (arm_rounds(session, arm, cell, "step_time_s") for cell in (before, later))
    rounds = [n for n in sorted(one.values.keys() & two.values.keys()) if one.values[n] > 0 and two.values[n] > 0]
    free = [n for n in rounds if not (_waits(one.samples[n]) or _waits(two.samples[n]))]
    return [math.log(two.values[n] / one.values[n]) for n in free]


def _waits(sample: Sample) -> bool:
    return HOST_BOUND in sample.badges


def marked(row: Row, impossible: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """A timed row as it is, or with the status `implausible` and a verdict of at most inconclusive.

    Where the baseline's time is impossible, nothing can be said against it: the other arms keep their status only.
    """
    if not row["metric"].startswith(("mfu", "hfu", *TIMES)):
        return dict(row)
    own, base = (_reason(impossible, row, arm) for arm in (row["variant"], BASELINE))
    if own is None and base is None:
        return dict(row)
    reason = own or f"the baseline's time is implausible: {base}"
    word = "not measured" if row["verdict"] == "not measured" else "inconclusive"
    return {
        **row, "status": "implausible" if own else row["status"], "verdict": word,
        "reason": f"{reason}; {row['reason']}" if row["reason"] else reason,
    }  # fmt: skip


def _reason(impossible: Mapping[tuple[str, str], str], row: Row, variant: str) -> str | None:
    names = (variant, f"{row['axis']}/{variant}")
    return next((impossible[name, row["shape"]] for name in names if (name, row["shape"]) in impossible), None)
