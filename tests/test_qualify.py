"""Qualification: the tally of verdicts, exact intervals, tables that keep other settings, and one real tiny run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from lmperf.qualify import COLUMNS, busy_core, qualify, qualify_lines, qualify_spec, summary, tally, write_tables
from lmperf.records import InputError, read_json

PLUGIN = str(Path(__file__).parent / "faulty_variants.py")


def row(variant: str, verdict: str, low: float = 0.99, high: float = 1.01, mde: float | None = 0.03) -> dict[str, Any]:
    return {"variant": variant, "verdict": verdict, "ratio": 1.0, "ci_low": low, "ci_high": high, "mde": mde}


def test_false_alarms_are_faster_or_slower_between_identical_arms() -> None:
    rows = [
        row("baseline_prime", "same"),
        row("aa_1", "faster", 0.9, 0.95),
        row("aa_2", "inconclusive"),
        row("aa_3", "slower"),
    ]
    found = summary([*rows, row("slow_0.05_1", "slower")], (0.05,))
    assert (found["false_positive_rate"]["hits"], found["false_positive_rate"]["trials"]) == (2, 3)
    assert found["interval_excludes_1"]["hits"] == 1
    assert found["control"]["trials"] == 1
    assert found["detection"]["0.05"] == {"hits": 1, "trials": 1, "rate": 1.0, "low": pytest.approx(0.025), "high": 1.0}


def test_a_slow_down_called_faster_is_not_found() -> None:
    line = tally(
        "slow-down 20%", 0.2, [row("a", "slower"), row("a", "faster"), row("a", "inconclusive", mde=0.4)], ("slower",)
    )
    assert (line["hits"], line["comparisons"], line["inconclusive"], line["faster"]) == (1, 3, 1, 1)
    assert (line["detectable"], line["detectable_found"]) == (2, 1)


def test_nothing_measured_gives_no_rate_rather_than_zero() -> None:
    line = tally("identical", 0.0, [], ("slower",))
    assert line["rate"] is None
    assert line["rate_low"] is None


def outcome(rounds: int, hog: bool = False, fingerprint: str = "f") -> dict[str, Any]:
    base = summary([row("aa_1", "same"), row("slow_0.05_1", "slower")], (0.05,))
    return base | {"rounds": rounds, "hog": hog, "fingerprint": fingerprint, "sessions": 1, "duration_s": 1.0}


def test_tables_keep_other_settings_of_this_machine_only(tmp_path: Path) -> None:
    for one in (outcome(3), outcome(9), outcome(9, hog=True), outcome(9)):
        write_tables(one, tmp_path)
    assert [(run["rounds"], run["hog"]) for run in read_json(tmp_path / "qualify.json")["runs"]] == [
        (3, False), (9, False), (9, True),
    ]  # fmt: skip
    table = pd.read_csv(tmp_path / "qualify.csv")
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == 6
    write_tables(outcome(9, fingerprint="other"), tmp_path)
    assert len(read_json(tmp_path / "qualify.json")["runs"]) == 1


def test_a_session_of_the_qualification_is_judged_like_any_other() -> None:
    spec = qualify_spec(0, 9, False, (0.02, 0.2), 1, 2, {})
    names = [arm.name for arm in spec.arms]
    assert names[:2] == ["baseline", "baseline_prime"]
    assert {arm.inject_slowdown for arm in spec.arms} == {0.0, 0.02, 0.2}
    assert all(not arm.variants for arm in spec.arms)


def test_the_hog_is_gone_afterwards() -> None:
    before = set(psutil.Process().children())  # a resource tracker of an earlier test, say
    with busy_core():
        (child,) = set(psutil.Process().children()) - before
    assert not child.is_running()


def test_too_few_comparisons_or_rounds_are_refused(tmp_path: Path) -> None:
    for comparisons, rounds in ((0, 9), (5, 2)):
        with pytest.raises(InputError, match="qualify"):
            qualify(tmp_path, tmp_path, comparisons, rounds=rounds)


def test_a_tiny_run_measures_every_kind_and_writes_both_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPERF_LOCK", str(tmp_path / "lock"))
    found = qualify(
        tmp_path / "tables", tmp_path / "work", 5, rounds=3, levels=(1.0,), threads=1, workload="counting",
        plugins=(PLUGIN,), block_s=0.004, warmup_s=0.01, warmup_cap_s=0.05, blocks=2,
    )  # fmt: skip
    assert [(line["kind"], line["comparisons"]) for line in found["table"]] == [("identical", 5), ("slow-down 100%", 2)]
    assert found["table"][1]["median_ratio"] > 1.3
    assert len(qualify_lines(found)) == 3
    assert (tmp_path / "tables" / "qualify.csv").exists()
    assert list((tmp_path / "work" / "qualify").iterdir()) == []
