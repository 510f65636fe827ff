"""The harness measured by itself: false alarms between identical arms, and how often a known slow-down is found."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from lmperf.comparing import compare_session
from lmperf.design import SMALLEST_EFFECT
from lmperf.hoststate import usable_cores
from lmperf.readings import read_session
from lmperf.records import ArmSpec, Cell, InputError, ModelShape, SessionSpec, atomic_write, read_json, write_json
from lmperf.sessions import CONTROL, run_session
from lmperf.statistics import SPEED_WORDS, binomial_interval

SCHEMA = 1
LEVELS = (0.02, 0.05, 0.20)  # injected slow-downs: this share of the timed steps is done again
AA_ARMS = 5  # identical arms of a session besides the baseline and its control
COPIES = 2  # arms of each level in a session
CELL = Cell("operator", {"length": 128, "head_dim": 32, "batch": 1})
SHAPE = ModelShape(context_length=128, layers=1, heads=4, kv_heads=4, d_model=128, d_ff=256)
WORDS = ("faster", "slower", "same", "small difference", "inconclusive")
COLUMNS = (
    "kind", "injected", "comparisons", *(word.replace(" ", "_") for word in WORDS), "not_measured", "rate", "rate_low",
    "rate_high", "median_ratio", "median_mde", "detectable", "detectable_found", "rounds", "hog", "schema",
)  # fmt: skip


def qualify(
    out_tables: Path,
    work: Path,
    comparisons: int = 40,
    *,
    rounds: int = 9,
    hog: bool = False,
    levels: Sequence[float] = LEVELS,
    seed: int = 2026,
    threads: int | None = None,
    progress: Callable[[str], None] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Run A/A sessions with injected slow-downs; write qualify.json and qualify.csv to `out_tables`; return the former.

    Every session is measured and judged as any other one is: a baseline, its control, five identical arms (each one
    comparison) and two arms of each level.  The comparisons of one session share its baseline, so that they are not
    quite independent; sessions are.  The control sets the margins and is told apart (`control`), since its own verdict
    is never capped.  `hog` keeps one core busy meanwhile.  `changes` go into the sessions' specs (block_s, blocks,
    workload …).  Rows of other `rounds` and `hog` settings are kept in the tables.
    """
    if comparisons < 1 or rounds < 3:
        raise InputError(f"qualify: comparisons {comparisons} and rounds {rounds} must be at least 1 and 3")
    started = time.time()
    number = math.ceil(comparisons / AA_ARMS)
    threads = threads or usable_cores()
    folder, rows, badges = Path(work) / "qualify", [], []
    with busy_core() if hog else contextlib.nullcontext():
        for index in range(number):
            spec = qualify_spec(index, rounds, hog, levels, seed, threads, changes)
            session = read_session(measured_once(spec, folder, progress))
            rows += [row for row in compare_session(session, SMALLEST_EFFECT) if row["metric"] == "step_time_s"]
            badges += [badge for sample in session.samples for badge in sample.badges]
    outcome = summary(rows, levels) | {
        "schema": SCHEMA, "sessions": number, "rounds": rounds, "hog": hog, "threads": threads,
        "fingerprint": session.fingerprint, "badges": {name: badges.count(name) for name in sorted(set(badges))},
        "samples": number * rounds * len(spec.arms), "duration_s": round(time.time() - started, 1),
        "note": "comparisons of one session share its baseline; sessions are independent",
    }  # fmt: skip
    write_tables(outcome, Path(out_tables))
    for path in folder.glob(f"{prefix(rounds, hog)}*"):
        path.unlink()
    return outcome


def prefix(rounds: int, hog: bool) -> str:
    """Start of the session names of one setting."""
    return f"qualify-{rounds}{'-hog' if hog else ''}."


def qualify_spec(
    index: int, rounds: int, hog: bool, levels: Sequence[float], seed: int, threads: int, changes: Mapping[str, Any]
) -> SessionSpec:
    """One session of the qualification: identical arms and slowed ones, on a small operator."""
    slowed = [ArmSpec(f"slow_{level:g}_{n}", (), level) for level in levels for n in range(1, COPIES + 1)]
    same = [ArmSpec(f"aa_{n}") for n in range(1, AA_ARMS + 1)]
    values: dict[str, Any] = {
        "session": f"{prefix(rounds, hog)}{index}", "axis": "attention", "workload": "operator_forward",
        "arms": (ArmSpec("baseline"), ArmSpec(CONTROL), *same, *slowed), "cells": (CELL,), "model": SHAPE,
        "batch_size": 1, "sequence_length": 128, "rounds": rounds, "seed": seed + index, "device": "cpu",
        "threads": threads, "blocks": 5, "block_s": 0.02, "warmup_s": 0.08, "warmup_cap_s": 0.6, "time_limit_s": 30.0,
        "options": {"memory": False, "utilisation": False},
    }  # fmt: skip
    return SessionSpec(**{**values, **changes})


def measured_once(spec: SessionSpec, folder: Path, progress: Callable[[str], None] | None) -> Path:
    """The session's file; one that a killed qualification finished is taken as it is."""
    out = folder / f"{spec.session}.jsonl"
    if out.exists() and read_session(out).spec == spec:
        return out
    return run_session(spec, out, work=folder, progress=progress)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Another process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def summary(rows: Sequence[Mapping[str, Any]], levels: Sequence[float]) -> dict[str, Any]:
    """Rates with their exact binomial intervals from the comparison rows of all sessions."""
    identical = [row for row in rows if row["variant"].startswith("aa_")]
    control = [row for row in rows if row["variant"] == CONTROL]
    by_level = {level: [row for row in rows if row["variant"].startswith(f"slow_{level:g}_")] for level in levels}
    table = [tally("identical", 0.0, identical, SPEED_WORDS)]
    table += [tally(f"slow-down {level:.0%}", level, found, ("slower",)) for level, found in by_level.items()]
    excluded = [row for row in identical if row["ci_low"] is not None and not row["ci_low"] <= 1 <= row["ci_high"]]
    return {
        "false_positive_rate": rate(table[0]),
        "interval_excludes_1": rate_of(len(excluded), len(identical)),
        "control": rate_of(sum(row["verdict"] in SPEED_WORDS for row in control), len(control)),
        "detection": {f"{row['injected']:g}": rate(row) for row in table[1:]},
        "table": table,
    }


def tally(kind: str, injected: float, rows: Sequence[Mapping[str, Any]], hits: Sequence[str]) -> dict[str, Any]:
    """One line of the table: how often each verdict fell, the rate of `hits`, and how the smallest effect held.

    `detectable` counts comparisons whose printed smallest effect is at most the injected one: there the slow-down
    should have been found four times out of five (`detectable_found`).
    """
    verdicts = [row["verdict"] for row in rows]
    counted = {word.replace(" ", "_"): verdicts.count(word) for word in WORDS}
    ratios = [row["ratio"] for row in rows if row.get("ratio")]
    smallest = [row["mde"] for row in rows if row.get("mde") is not None]
    detectable = [row for row in rows if injected and row.get("mde") is not None and row["mde"] <= injected]
    found = rate_of(sum(word in hits for word in verdicts), len(rows))
    return {
        "kind": kind, "injected": injected, "comparisons": len(rows), **counted,
        "not_measured": verdicts.count("not measured"), "hits": found["hits"], "rate": found["rate"],
        "rate_low": found["low"], "rate_high": found["high"], "median_ratio": median(ratios) if ratios else None,
        "median_mde": median(smallest) if smallest else None, "detectable": len(detectable),
        "detectable_found": sum(row["verdict"] in hits for row in detectable),
    }  # fmt: skip


def rate_of(hits: int, trials: int) -> dict[str, Any]:
    """Hits, trials, rate and Clopper-Pearson's 95 % interval; rates are None without a trial."""
    low, high = binomial_interval(hits, trials) if trials else (None, None)
    return {"hits": hits, "trials": trials, "rate": hits / trials if trials else None, "low": low, "high": high}


def rate(row: Mapping[str, Any]) -> dict[str, Any]:
    """The rate of one line of the table."""
    return rate_of(row["hits"], row["comparisons"])


def write_tables(outcome: Mapping[str, Any], out_tables: Path) -> None:
    """Write qualify.json (all settings measured on this machine, newest of each) and qualify.csv from it."""
    path = out_tables / "qualify.json"
    runs = [outcome]
    with contextlib.suppress(InputError, KeyError, TypeError):
        key = (outcome["rounds"], outcome["hog"])
        same_machine = [run for run in read_json(path)["runs"] if run["fingerprint"] == outcome["fingerprint"]]
        runs += [run for run in same_machine if (run["rounds"], run["hog"]) != key]
    runs.sort(key=lambda run: (run["rounds"], run["hog"]))
    write_json(path, {"schema": SCHEMA, "runs": runs})
    lines = [
        {**row, "rounds": run["rounds"], "hog": run["hog"], "schema": SCHEMA} for run in runs for row in run["table"]
    ]
    with atomic_write(out_tables / "qualify.csv") as stream:
        pd.DataFrame(lines, columns=list(COLUMNS)).to_csv(stream, index=False)


def qualify_lines(outcome: Mapping[str, Any]) -> list[str]:
    """The outcome in a few lines for a terminal."""
    setting = f"{outcome['rounds']} rounds" + (", one core kept busy" if outcome["hog"] else "")
    lines = [f"{outcome['sessions']} sessions of {setting}, {outcome['duration_s']:.0f} s"]
    for row in outcome["table"]:
        name = "false faster/slower" if row["kind"] == "identical" else f"{row['kind']} found"
        if row["rate"] is None:
            lines.append(f"{name}: not measured")
            continue
        text = f"{name}: {row['hits']} of {row['comparisons']} = {row['rate']:.1%}"
        text += f" (95 % interval {row['rate_low']:.1%} to {row['rate_high']:.1%})"
        text += f", inconclusive {row['inconclusive']}"
        if row["median_mde"] is not None:
            text += f", smallest detectable effect {row['median_mde']:.1%} (median)"
        lines.append(text)
    return lines
