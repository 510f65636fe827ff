"""Sessions become rows: right verdicts, typed failures, honest nulls, nothing paired that does not belong together."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from session_files import MEGABYTE, session_spec, timed, write_session

from lmperf.comparing import Block, compare
from lmperf.readings import TIME, ArmRounds
from lmperf.records import RESULT_COLUMNS, VERDICTS, CheckFailed, InputError, Metric, Sample
from lmperf.tables import read_results


@pytest.fixture
def run(tmp_path):
    """Compare session files in a temporary folder."""

    def compare_files(*paths: Path, smallest_effect: float = 0.02) -> pd.DataFrame:
        tables = tmp_path / "tables"
        return compare(
            paths, tables, tmp_path / "results.parquet", config_hash="c0ffee", smallest_effect=smallest_effect
        )

    return compare_files


def pick(table: pd.DataFrame, variant: str, metric: str = "step_time_s", shape: str | None = None) -> dict:
    """The one row of this variant, metric and shape."""
    rows = table[(table.variant == variant) & (table.metric == metric)]
    rows = rows if shape is None else rows[rows["shape"] == shape]
    assert len(rows) == 1
    return rows.iloc[0].to_dict()


def test_fast_slow_and_equal_arms_get_their_words_for_times_and_for_rates(run, tmp_path):
    spec = session_spec(["chunked", "naive2", "slow"])
    samples = timed(spec, {"chunked": 0.7, "slow": 1.4})
    table = run(write_session(tmp_path / "a.jsonl", spec, samples))
    expected = {"chunked": "faster", "naive2": "same", "slow": "slower", "baseline_prime": "same"}
    for metric in ("step_time_s", "tokens_per_s"):
        for variant, word in expected.items():
            assert pick(table, variant, metric)["verdict"] in (word, "small difference" if word == "same" else word)
    time, rate = pick(table, "chunked"), pick(table, "chunked", "tokens_per_s")
    assert time["ratio"] == pytest.approx(0.7, rel=0.02)
    assert rate["ratio"] == pytest.approx(1 / time["ratio"])
    assert rate["ci_low"] == pytest.approx(1 / time["ci_high"])
    assert time["ci_low"] < 0.7 < time["ci_high"]
    assert rate["value"] == pytest.approx(128 / time["value"], rel=1e-6)


def test_files_have_the_fixed_columns_and_null_for_what_was_not_measured(run, tmp_path):
    spec = session_spec(["chunked"])
    table = run(write_session(tmp_path / "a.jsonl", spec, timed(spec, {}), memory={"baseline": 100, "chunked": 50}))
    assert tuple(table.columns) == RESULT_COLUMNS
    stored = pq.read_table(tmp_path / "results.parquet")
    assert tuple(stored.column_names) == RESULT_COLUMNS
    assert stored.schema.metadata[b"lmperf.schema"] == b"1"
    text = (tmp_path / "tables" / "results.csv").read_text()
    assert text.splitlines()[0] == ",".join(RESULT_COLUMNS)
    assert "nan" not in text.lower()
    assert json.loads((tmp_path / "tables" / "schemas.json").read_text())["results.csv"] == 1
    again = read_results(tmp_path / "results.parquet")
    assert again.equals(table)
    assert set(table.verdict) <= set(VERDICTS)
    baseline = pick(table, "baseline")
    assert baseline["value"] is not None
    assert baseline["ratio"] is None


def test_memory_is_a_deterministic_ratio_without_interval(run, tmp_path):
    spec = session_spec(["half", "equal", "more"])
    memory = {"baseline": 100 * MEGABYTE, "half": 50 * MEGABYTE, "equal": 100.5 * MEGABYTE, "more": 130 * MEGABYTE}
    table = run(write_session(tmp_path / "a.jsonl", spec, timed(spec, {}), memory=memory))
    for variant, word in {"half": "better", "equal": "same", "more": "worse"}.items():
        row = pick(table, variant, "peak_memory_bytes")
        assert row["verdict"] == word
        assert (row["ci_low"], row["ci_high"], row["rounds"]) == (None, None, 1)
        assert row["reason"] == "deterministic, n = 1"
        assert row["ratio"] == pytest.approx(memory[variant] / memory["baseline"])


def test_failed_and_dominated_arms_are_typed_rows_without_numbers(run, tmp_path):
    spec = session_spec(["naive2", "good"], cells=("T=128", "T=4096"))
    samples = [
        dataclasses.replace(
            s, status="oom_device" if s.cell == "T=128" else "skipped_dominated", reason="no room", metrics={}
        )
        if s.arm == "naive2"
        else s
        for s in timed(spec, {"good": 0.5})
    ]
    table = run(write_session(tmp_path / "a.jsonl", spec, samples))
    for shape, status in {"T=128": "oom_device", "T=4096": "skipped_dominated"}.items():
        row = pick(table, "naive2", shape=shape)
        assert row["status"] == status
        assert row["verdict"] == "not measured"
        assert row["reason"] == "no room"
        assert all(row[name] is None for name in ("value", "ratio", "ci_low", "ci_high", "mde"))
        assert pick(table, "good", shape=shape)["verdict"] == "faster"


def test_a_failed_baseline_leaves_values_but_no_ratios(run, tmp_path):
    spec = session_spec(["good"])
    samples = [
        dataclasses.replace(s, status="timeout", reason="60 s", metrics={}) if s.arm == "baseline" else s
        for s in timed(spec, {})
    ]
    row = pick(run(write_session(tmp_path / "a.jsonl", spec, samples)), "good")
    assert row["value"] is not None
    assert row["ratio"] is None
    assert row["verdict"] == "not measured"
    assert "timeout" in row["reason"]


def test_some_failed_rounds_cap_the_verdict_and_are_counted(run, tmp_path):
    spec = session_spec(["flaky"])
    samples = [
        dataclasses.replace(s, status="timeout", reason="60 s", metrics={}) if s.arm == "flaky" and s.round > 7 else s
        for s in timed(spec, {"flaky": 0.5})
    ]
    row = pick(run(write_session(tmp_path / "a.jsonl", spec, samples)), "flaky")
    assert (row["status"], row["verdict"], row["rounds"]) == ("unstable", "inconclusive", 7)
    assert "timeout in 2 of 9 rounds" in row["reason"]


@pytest.mark.parametrize(("rounds", "word"), [(1, "faster"), (3, "inconclusive")])
def test_a_red_badge_in_a_relevant_share_of_rounds_caps_the_verdict(run, tmp_path, rounds, word):
    spec = session_spec(["good", "other"])
    samples = [
        dataclasses.replace(s, badges=("contention",)) if s.arm == "good" and s.round <= rounds else s
        for s in timed(spec, {"good": 0.5, "other": 0.5})
    ]
    table = run(write_session(tmp_path / "a.jsonl", spec, samples))
    row = pick(table, "good")
    assert row["verdict"] == word
    assert ("contention" in (row["reason"] or "")) == (word == "inconclusive")
    assert pick(table, "other")["verdict"] == "faster"


def test_a_badge_on_the_baseline_caps_every_arm_but_not_memory(run, tmp_path):
    spec = session_spec(["good"])
    samples = [
        dataclasses.replace(s, badges=("throttling",)) if s.arm == "baseline" else s for s in timed(spec, {"good": 0.5})
    ]
    table = run(write_session(tmp_path / "a.jsonl", spec, samples, memory={"baseline": 4.0, "good": 2.0}))
    assert pick(table, "good")["verdict"] == "inconclusive"
    assert pick(table, "good", "peak_memory_bytes")["verdict"] == "better"


def test_a_flops_mismatch_does_not_cap_a_time(run, tmp_path):
    spec = session_spec(["good"])
    samples = [dataclasses.replace(s, badges=("flops_mismatch",)) for s in timed(spec, {"good": 0.5})]
    for sample in samples:
        sample.metrics["mfu_palm"] = Metric("share", 0.001 / sample.metrics["step_time_s"].value)
    table = run(write_session(tmp_path / "a.jsonl", spec, samples))
    assert pick(table, "good")["verdict"] == "faster"
    assert pick(table, "good", "mfu_palm")["verdict"] == "inconclusive"
    assert pick(table, "good", "mfu_palm")["ratio"] == pytest.approx(2.0, rel=0.05)


def test_an_unequal_control_caps_every_verdict_and_shows_as_the_floor(run, tmp_path):
    spec = session_spec(["good"])
    table = run(write_session(tmp_path / "a.jsonl", spec, timed(spec, {"good": 0.5, "baseline_prime": 1.1})))
    row = pick(table, "good")
    assert row["verdict"] == "inconclusive"
    assert "aa_excludes_1" in row["reason"]
    assert row["noise_floor"] >= 0.1
    assert pick(table, "baseline_prime")["verdict"] == "slower"


def test_without_a_control_nothing_is_claimed(run, tmp_path):
    spec = session_spec(["good"])
    samples = [s for s in timed(spec, {"good": 0.5}) if s.arm != "baseline_prime"]
    row = pick(run(write_session(tmp_path / "a.jsonl", spec, samples)), "good")
    assert row["verdict"] == "inconclusive"
    assert row["noise_floor"] is None
    assert "A/A" in row["reason"]


def test_the_margin_is_the_larger_of_the_smallest_effect_and_the_floor(run, tmp_path):
    spec = session_spec(["good"], rounds=15)
    path = write_session(tmp_path / "a.jsonl", spec, timed(spec, {"good": 0.96}, noise=0.004, seed=4))
    assert pick(run(path, smallest_effect=0.005), "good")["verdict"] == "faster"
    assert pick(run(path, smallest_effect=0.08), "good")["verdict"] == "small difference"
    noisy = write_session(tmp_path / "b.jsonl", spec, timed(spec, {"good": 0.96}, noise=0.15, seed=4))
    row = pick(run(noisy, smallest_effect=0.005), "good")
    assert row["verdict"] == "inconclusive"
    assert row["mde"] > 0.04  # honest: the 4 % that are there could not have been seen


def test_an_inconclusive_row_states_an_effect_no_smaller_than_what_its_interval_leaves_open(run, tmp_path):
    spec = session_spec([f"v{i}" for i in range(6)])
    table = run(write_session(tmp_path / "a.jsonl", spec, timed(spec, {}, noise=0.08)))
    rows = table[(table.verdict == "inconclusive") & table.mde.notna()]
    assert len(rows)
    for row in rows.to_dict("records"):
        assert row["mde"] >= max(row["ci_high"], 1 / row["ci_low"]) - 1 - 1e-9


def test_too_few_rounds_for_the_arms_say_how_many_are_needed(run, tmp_path):
    spec = session_spec([f"v{i}" for i in range(12)], rounds=6)
    row = pick(run(write_session(tmp_path / "a.jsonl", spec, timed(spec, {f"v{i}": 0.5 for i in range(12)}))), "v3")
    assert row["verdict"] == "inconclusive"
    assert "9 needed" in row["reason"]
    assert row["mde"] is None


@pytest.mark.parametrize(("rounds", "interval"), [(2, False), (3, True)])
def test_three_rounds_are_indicative_and_two_have_no_interval(run, tmp_path, rounds, interval):
    spec = session_spec(["good"], rounds=rounds)
    row = pick(run(write_session(tmp_path / "a.jsonl", spec, timed(spec, {"good": 0.5}, noise=0.001))), "good")
    assert (row["ci_low"] is not None) == interval
    assert row["ratio"] == pytest.approx(0.5, rel=0.05)
    assert ("indicative" in row["reason"]) == interval
    assert interval or row["verdict"] == "inconclusive"


def test_only_closed_rounds_count_and_a_repeated_round_counts_once(run, tmp_path):
    spec = session_spec(["good"])

    def kill_and_resume(lines: list[dict]) -> list[dict]:
        closes = [i for i, line in enumerate(lines) if line["kind"] == "round"]
        bad = [line | {"metrics": {}, "status": "crashed"} for line in lines[closes[0] + 1 : closes[0] + 3]]
        kept = lines[closes[0] + 1 : closes[8]]  # the ninth is never closed
        return [*lines[: closes[0] + 1], *bad, *kept, lines[-1]]

    path = write_session(tmp_path / "a.jsonl", spec, timed(spec, {"good": 0.5}), change=kill_and_resume)
    row = pick(run(path), "good")
    assert (row["rounds"], row["status"], row["verdict"]) == (8, "ok", "faster")


def test_a_round_closed_twice_is_refused(run, tmp_path):
    spec = session_spec(["good"])
    path = write_session(
        tmp_path / "a.jsonl", spec, timed(spec, {}), change=lambda lines: [*lines, {"kind": "round", "round": 2}]
    )
    with pytest.raises(CheckFailed, match="round 2"):
        run(path)


def test_two_fingerprints_in_one_file_are_refused_by_name(run, tmp_path):
    spec = session_spec(["good"])
    samples = timed(spec, {})
    samples[5].details["fingerprint"] = "machine-2"
    with pytest.raises(CheckFailed, match=r"mixed\.jsonl.*machine-1 and machine-2"):
        run(write_session(tmp_path / "mixed.jsonl", spec, samples))


def test_two_machines_stay_side_by_side_each_with_its_own_baseline(run, tmp_path):
    spec = session_spec(["good"])
    first = write_session(tmp_path / "a.jsonl", spec, timed(spec, {"good": 0.5}), fingerprint="one")
    samples = [
        dataclasses.replace(s, metrics={"step_time_s": Metric("s", s.metrics["step_time_s"].value * 50)})
        for s in timed(spec, {"good": 0.5})
    ]
    second = write_session(tmp_path / "b.jsonl", spec, samples, fingerprint="two")
    rows = run(first, second)
    rows = rows[(rows.variant == "good") & (rows.metric == "step_time_s")]
    assert list(rows.fingerprint) == ["one", "two"]
    assert all(ratio == pytest.approx(0.5, rel=0.05) for ratio in rows.ratio)


def test_a_file_that_is_no_session_is_named(run, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(InputError, match=r"empty\.jsonl"):
        run(path)


def test_counted_quantities_and_zero_baselines(run, tmp_path):
    spec = session_spec(["onebit", "flat"], session="distributed.distributed_step")
    sent = {"baseline": 0.0, "baseline_prime": 0.0, "onebit": 1e5, "flat": 3.2e6}
    samples = timed(spec, {})
    for sample in samples:
        sample.metrics["bytes_on_wire"] = Metric("bytes", sent[sample.arm])
    table = run(write_session(tmp_path / "a.jsonl", spec, samples))
    row = pick(table, "onebit", "bytes_on_wire")
    assert (row["value"], row["ratio"], row["ci_low"], row["verdict"]) == (1e5, None, None, "worse")
    assert "no ratio" in row["reason"]
    assert pick(table, "baseline_prime", "bytes_on_wire")["verdict"] == "same"


def test_a_quantity_that_only_some_arms_have_gives_rows_for_those_alone(run, tmp_path):
    spec = session_spec(["prefix", "plain"], session="generation.prefill_decode")
    samples = timed(spec, {})
    for sample in samples:
        if sample.arm == "prefix":
            sample.metrics["hit_rate"] = Metric("share", 0.8)
    table = run(write_session(tmp_path / "a.jsonl", spec, samples))
    row = pick(table, "prefix", "hit_rate")
    assert (row["value"], row["ratio"], row["verdict"]) == (0.8, None, "not measured")
    assert not len(table[(table.variant == "plain") & (table.metric == "hit_rate")])


def test_order_and_labels_of_arms_do_not_change_their_numbers(run, tmp_path):
    spec = session_spec(["a", "b"])
    samples = timed(spec, {"a": 0.8})
    turned = dataclasses.replace(spec, arms=spec.arms[::-1])
    one = pick(run(write_session(tmp_path / "a.jsonl", spec, samples)), "a")
    two = pick(run(write_session(tmp_path / "b.jsonl", turned, samples[::-1])), "a")
    assert one == two
    assert math.isclose(one["ratio"], 0.8, rel_tol=0.02)


def simulated(rng: np.random.Generator, effects: dict[str, float], noise, rounds: int = 9) -> dict[str, dict]:
    """The rows' columns of one simulated session, floor, badges and Holm and all."""
    arms = {}
    for name, effect in {"baseline": 1.0, "baseline_prime": 1.0, **effects}.items():
        values = effect * np.exp(noise(rng, rounds))
        samples = {n: Sample(name, "c", n) for n in range(rounds)}
        arms[name] = ArmRounds(name, dict(enumerate(values)), samples)
    block = Block(TIME, arms["baseline"], arms, 0.02)
    return {name: block.compared(name) for name in effects}


QUIET = {
    "normal": lambda rng, n: rng.normal(0, 0.01, n),
    "bursty": lambda rng, n: rng.normal(0, 0.01, n) + (rng.random(n) < 0.1) * rng.exponential(0.5, n),
    "contention": lambda rng, n: rng.normal(0, 0.005, n) + rng.exponential(0.03, n),
}


@pytest.mark.parametrize("kind", QUIET)
def test_error_rates_of_whole_sessions(kind):
    """The harness's promises: no false word in 95 %, a 5 % slow-down found or honestly open, 20 % found when quiet."""
    rng = np.random.default_rng(list(QUIET).index(kind))
    effects = {"same1": 1.0, "same2": 1.0, "by5": 1.05, "by20": 1.2}
    sessions = [simulated(rng, effects, QUIET[kind]) for _ in range(200)]
    false = [s[n]["verdict"] in ("faster", "slower") for s in sessions for n in ("same1", "same2")]
    assert np.mean(false) <= 0.05
    by5 = [s["by5"] for s in sessions]
    honest = [row["verdict"] == "slower" or (row["verdict"] == "inconclusive" and row["mde"] >= 0.05) for row in by5]
    assert np.mean(honest) >= 0.95
    assert not any(row["verdict"] in ("same", "small difference", "faster") for row in by5)
    if kind == "normal":
        aa_bad = np.mean(["aa_excludes_1" in (s["by20"]["reason"] or "") for s in sessions])
        assert aa_bad <= 0.09
        assert np.mean([s["by20"]["verdict"] == "slower" for s in sessions]) >= 1 - aa_bad - 0.02


def test_a_session_that_was_cut_is_refused(run, tmp_path):
    spec = session_spec(["good"])
    path = write_session(tmp_path / "a.jsonl", spec, timed(spec, {}), end=False)
    with pytest.raises(InputError, match=r"a\.jsonl: it was cut"):
        run(path)
