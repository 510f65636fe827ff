"""Across the cells of a session: impossible times are marked; a compilation is priced by the time that it saves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from session_files import session_spec, timed, write_session

from lmperf.comparing import compare_session
from lmperf.readings import read_session
from lmperf.records import Metric

Rows = list[dict[str, Any]]


def pick(rows: Rows, variant: str, metric: str, shape: str = "T=256") -> dict[str, Any]:
    """The one row of this variant, metric and shape."""
    found = [r for r in rows if (r["variant"], r["metric"], r["shape"]) == (variant, metric, shape)]
    assert len(found) == 1
    return found[0]


def two_cells(folder: Path, work: float, longer: dict[str, float], badges: tuple[str, ...] = ()) -> Rows:
    """Rows of a session whose second cell has `work` times the FLOPs and takes an arm `longer` times (else 4)."""
    spec = session_spec(["good", "other"], cells=("T=128", "T=256"))
    samples = []
    for sample in timed(spec, {"good": 0.5, "other": 0.8}):
        far = sample.cell == "T=256"
        time = sample.metrics["step_time_s"].value * (longer.get(sample.arm, 4.0) if far else 1.0)
        details = {**sample.details, "flops_per_step": 1e9 * (work if far else 1.0)}
        changes = {"metrics": {"step_time_s": Metric("s", time)}, "details": details, "badges": badges}
        samples.append(dataclasses.replace(sample, **changes))
    return compare_session(read_session(write_session(folder / "s.jsonl", spec, samples)), 0.02)


def test_a_time_that_stays_while_the_work_more_than_doubles_is_implausible(tmp_path):
    rows = two_cells(tmp_path, 4.0, {"good": 1.0})
    for metric in ("step_time_s", "tokens_per_s", "flops_per_s"):
        row = pick(rows, "good", metric)
        assert (row["status"], row["verdict"]) == ("implausible", "inconclusive")
        assert "'T=128'" in row["reason"]
        assert "'T=256'" in row["reason"]
    assert pick(rows, "good", "step_time_s", "T=128")["verdict"] == "faster"
    other = pick(rows, "other", "step_time_s")
    assert (other["status"], other["verdict"]) == ("ok", "faster")


@pytest.mark.parametrize(("work", "longer", "badges"), [(1.9, 1.0, ()), (4.0, 1.05, ()), (4.0, 1.0, ("host_bound",))])
def test_little_more_work_some_more_time_or_a_waiting_device_is_no_fault(tmp_path, work, longer, badges):
    rows = two_cells(tmp_path, work, {"good": longer}, badges)
    assert {row["status"] for row in rows} == {"ok"}


def test_against_an_implausible_baseline_nothing_is_claimed(tmp_path):
    rows = two_cells(tmp_path, 4.0, {"baseline": 1.0})
    row = pick(rows, "good", "step_time_s")
    assert (row["status"], row["verdict"]) == ("ok", "inconclusive")
    assert "baseline" in row["reason"]
    assert pick(rows, "baseline", "step_time_s")["status"] == "implausible"


def test_a_compilation_breaks_even_after_its_seconds_over_what_a_step_saves(tmp_path):
    spec = session_spec(["compile", "late", "loop", "unweighed"], session="graph.training_step")
    samples = timed(spec, {"compile": 0.5, "late": 1.3, "unweighed": 0.5})
    for sample in samples:
        if sample.arm == "unweighed":
            sample.metrics["compile_warm_s"] = Metric("s", 1.0)

    def weighed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        common = {"kind": "memory", "cell": "T=128", "status": "ok", "reason": None}
        cold = {"compile": 10.0, "late": 5.0}
        metrics = {arm: {"compile_time_s": {"unit": "s", "value": seconds}} for arm, seconds in cold.items()}
        found = [{**common, "arm": arm, "metrics": metrics[arm]} for arm in cold]
        return [lines[0], *found, *lines[1:]]

    path = write_session(tmp_path / "s.jsonl", spec, samples, change=weighed)
    rows = compare_session(read_session(path), 0.02)
    row = pick(rows, "compile", "break_even_steps", "T=128")
    assert row["value"] == pytest.approx(10.0 / (0.010 - 0.005), rel=0.03)
    assert row["ci_low"] < row["value"] < row["ci_high"]
    assert (row["unit"], row["ratio"], row["verdict"]) == ("steps", None, "not measured")
    never = pick(rows, "late", "break_even_steps", "T=128")
    assert (never["value"], never["reason"]) == (None, "never: not faster (slower)")
    assert "not measured" in pick(rows, "unweighed", "break_even_steps", "T=128")["reason"]
    assert not [r for r in rows if r["variant"] == "loop" and r["metric"] == "break_even_steps"]
