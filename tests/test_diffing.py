"""Two reports: worse is found, unlike machines are refused, words that say nothing are neither gain nor loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from session_files import session_spec, timed, write_session

from lmperf.comparing import compare
from lmperf.diffing import DIFF_COLUMNS, diff, diff_lines
from lmperf.records import InputError
from lmperf.tables import frame, write_csv

ABLATION = ("recipe", "dimension", "metric", "value", "ci_low", "ci_high", "n", "verdict", "reason")
CLAIMS = ("id", "statement", "claimed", "measured", "ci_low", "ci_high", "verdict", "reason")


def report(folder: Path, effects: dict[str, float], fingerprint: str = "one", noise: float = 0.003, **how) -> Path:
    """A report folder with one attention session of these effects."""
    spec = session_spec(list(effects))
    path = write_session(
        folder / "sessions" / "a.jsonl", spec, timed(spec, effects, noise=noise, seed=3), fingerprint=fingerprint, **how
    )
    compare([path], folder / "tables", folder / "results.parquet", config_hash="x", smallest_effect=0.02)
    return folder


def change_of(rows: list[dict], variant: str, metric: str = "step_time_s") -> str:
    """The change of one variant's metric."""
    found = [row for row in rows if f"/{variant}," in row["what"] and row["what"].endswith(metric)]
    assert len(found) == 1
    return found[0]["change"]


def test_a_report_against_itself_is_all_the_same(tmp_path):
    one = report(tmp_path / "a", {"fast": 0.5, "slow": 2.0})
    rows, worse = diff(one, one)
    assert rows
    assert {row["change"] for row in rows} == {"same"}
    assert not worse
    assert tuple(rows[0]) == DIFF_COLUMNS


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [(0.5, 1.5, "worse"), (1.5, 0.5, "better"), (0.5, 1.0, "worse"), (0.5, 0.7, "worse"), (0.7, 0.5, "better")],
)
def test_changes_of_verdict_and_of_size(tmp_path, before, after, change):
    rows, worse = diff(report(tmp_path / "a", {"x": before}), report(tmp_path / "b", {"x": after}))
    assert change_of(rows, "x") == change_of(rows, "x", "tokens_per_s") == change
    assert worse == (change == "worse")
    assert rows[0]["change"] == change


def test_losing_certainty_is_a_change_but_not_worse(tmp_path):
    one, two = report(tmp_path / "a", {"x": 0.9}), report(tmp_path / "b", {"x": 0.9}, noise=0.5)
    rows, worse = diff(one, two)
    assert change_of(rows, "x") == "changed"
    assert not worse


def test_an_arm_that_now_fails_is_worse(tmp_path):
    def fail(lines: list[dict]) -> list[dict]:
        broken = {"status": "crashed", "reason": "segfault", "metrics": {}}
        return [line | broken if line.get("arm") == "x" else line for line in lines]

    one, two = report(tmp_path / "a", {"x": 0.9}), report(tmp_path / "b", {"x": 0.9}, change=fail)
    rows, worse = diff(one, two)
    assert change_of(rows, "x") == "worse"
    assert worse
    rows, worse = diff(two, one)
    assert change_of(rows, "x") == "better"
    assert not worse


def test_new_and_gone_variants_are_named(tmp_path):
    rows, worse = diff(report(tmp_path / "a", {"x": 0.5, "y": 0.5}), report(tmp_path / "b", {"x": 0.5, "z": 0.5}))
    assert (change_of(rows, "y"), change_of(rows, "z")) == ("gone", "new")
    assert not worse


def test_other_machines_are_refused(tmp_path):
    one, two = report(tmp_path / "a", {"x": 0.5}), report(tmp_path / "b", {"x": 0.5}, fingerprint="two")
    with pytest.raises(InputError, match="different machines.*one and two"):
        diff(one, two)


def test_a_folder_without_a_report_is_named(tmp_path):
    one = report(tmp_path / "a", {"x": 0.5})
    with pytest.raises(InputError, match="nowhere"):
        diff(one, tmp_path / "nowhere")


def test_quality_that_got_worse_counts_and_claims_only_change(tmp_path):
    one, two = report(tmp_path / "a", {"x": 0.5}), report(tmp_path / "b", {"x": 0.5})
    for folder, quality, claim in ((one, "non-inferior", "reproduced"), (two, "inferior", "contradicted")):
        row = {"recipe": "norm/rmsnorm", "dimension": "accuracy", "metric": "bits_per_byte", "verdict": quality}
        write_csv(frame([row], ABLATION), folder / "tables" / "ablation.csv")
        write_csv(frame([{"id": "A4", "statement": "s", "verdict": claim}], CLAIMS), folder / "tables" / "claims.csv")
    rows, worse = diff(one, two)
    changes = {row["table"]: row["change"] for row in rows if row["table"] != "results"}
    assert changes == {"ablation": "worse", "claims": "changed"}
    assert worse


def test_lines_name_what_changed_and_count_the_rest(tmp_path):
    rows, _ = diff(report(tmp_path / "a", {"x": 0.5, "y": 0.8}), report(tmp_path / "b", {"x": 1.5, "y": 0.8}))
    lines = diff_lines(rows)
    assert any(line.startswith("worse") and "attention/x" in line and "faster -> slower" in line for line in lines)
    assert not any("attention/y" in line for line in lines)
    assert "same" in lines[-1]
