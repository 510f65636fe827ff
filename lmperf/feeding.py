"""Loaders against training steps: how short a step each loader can feed, what waiting, start-up and memory it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmperf.quantities import finite
from lmperf.readings import BASELINE, CONTROL

Row = Mapping[str, Any]

COSTS = ("tokens_per_s", "wait_share", "wait_s", "worker_start_s", "loader_process_pss_bytes", "worker_pss_bytes")


def loader_lines(results: Sequence[Row], session: str, baseline: str) -> list[dict[str, Any]]:
    """One line a loader and shape of a data loading session, the baseline (named so) first; absent metrics are None.

    `feeds_s` (workload `loading` only) is the loader's own time per batch: it is the bottleneck of every training step
    that is shorter.  `step_s` is this run's own step on such a batch, `bottleneck` whether it is shorter; both are
    None where no session of the same machine timed one.
    """
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in results:
        if row["session"] != session or row["axis"] != "dataloader" or row["variant"] == CONTROL:
            continue
        name = f"{baseline} (baseline)" if row["variant"] == BASELINE else row["variant"]
        empty = {"loader": name, "like": row, **dict.fromkeys(("feeds_s", "step_s", "bottleneck", *COSTS))}
        line = lines.setdefault((row["shape"], row["variant"]), empty)
        if row["metric"] in COSTS:
            line[row["metric"]] = finite(row["value"])
        elif row["metric"] == "step_time_s" and row["workload"] == "loading":
            line["feeds_s"] = finite(row["value"])
    return [with_step(line, results) for line in lines.values() if any(line[n] for n in ("feeds_s", *COSTS))]


def with_step(line: Mapping[str, Any], results: Sequence[Row]) -> dict[str, Any]:
    """A line with this run's own training step beside the loader's time per batch, where both are known."""
    step_s = training_step_s(results, line["like"]) if line["feeds_s"] is not None else None
    return {**line, "step_s": step_s, "bottleneck": None if step_s is None else line["feeds_s"] > step_s}


def training_step_s(results: Sequence[Row], like: Row) -> float | None:
    """Seconds of the baseline's training step at the same shape, on the same machine and device; None without one."""
    same = ("shape", "fingerprint", "device", "dtype")
    for row in results:
        baseline = (row["workload"], row["variant"], row["metric"]) == ("training_step", BASELINE, "step_time_s")
        if baseline and all(row[name] == like[name] for name in same):
            return finite(row["value"])
    return None
