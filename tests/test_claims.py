"""Every claim gets a verdict with a reason; the verdicts follow from direction, interval and the claimed figure."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd
import pytest
from session_files import MEGABYTE, quality_run, session_spec, timed, write_quality, write_session

from lmperf.ablation import ablate, quality_table
from lmperf.catalogue import catalogue
from lmperf.claim_checks import concentration, expert_bytes, warm_up
from lmperf.claims import CLAIM_COLUMNS, CLAIM_VERDICTS, ClaimTest, judge, judge_test, load_claims
from lmperf.comparing import compare
from lmperf.evidence import Evidence
from lmperf.qualities import QUALITY_COLUMNS
from lmperf.records import RESULT_COLUMNS, InputError, Metric
from lmperf.tables import frame, records, write_csv

ALL = {*(f"A{i}" for i in range(1, 10)), *(f"B{i}" for i in range(1, 16))}
CPU = {"machine": {"gpus": []}}
NOTHING = (pd.DataFrame(columns=list(RESULT_COLUMNS)), pd.DataFrame(columns=list(QUALITY_COLUMNS)))


def result(variant: str = "x", **known) -> dict:
    """A row of results for attention training steps."""
    row = dict.fromkeys(RESULT_COLUMNS) | {
        "axis": "attention", "variant": variant, "workload": "training_step", "shape": "length=128", "unit": "s",
        "metric": "step_time_s", "value": 1.0, "rounds": 9, "verdict": "inconclusive", "status": "ok", "session": "s",
    }  # fmt: skip
    return row | known


def sought(**known) -> ClaimTest:
    """A test of a claim about that row."""
    what = {"axis": "attention", "variant": ("x",), "workload": ("training_step",), "metric": "step_time_s"}
    return ClaimTest(**({"what": "w", "claimed": "c", "table": "results"} | what | known))


def outcome(test: ClaimTest, *rows: dict, machine: dict = CPU, tables: Path = Path("nowhere")):
    """The outcome of a test on these result rows."""
    return judge_test(test, Evidence(rows, (), tables, machine))


def measured(ratio: float, low: float, high: float, verdict: str, **known) -> dict:
    """A measured row."""
    return result(ratio=ratio, ci_low=low, ci_high=high, verdict=verdict, **known)


def test_all_claims_are_there_with_their_tests():
    claims = load_claims()
    assert [claim.id for claim in claims] == [*(f"A{i}" for i in range(1, 10)), *(f"B{i}" for i in range(1, 16))]
    assert all(claim.tests and claim.statement for claim in claims)


def test_every_variant_that_a_claim_names_is_in_the_catalogue():
    tests = [test for claim in load_claims() for test in claim.tests if test.axis != "stack"]
    named = {f"{test.axis}/{name}" for test in tests for name in (*test.variant, *test.versus)}
    assert named - set(catalogue()) == set()


def test_a_run_of_nothing_makes_every_claim_untestable_with_its_reason(tmp_path):
    table = judge(*NOTHING, tmp_path, CPU)
    assert tuple(table.columns) == CLAIM_COLUMNS
    assert set(table.id) == ALL
    assert set(table.verdict) == {"not testable here"}
    assert table.reason.str.len().min() > 8
    assert table.measured.isna().all()
    sync = table[table.id == "B10"].iloc[0]
    assert sync.reason == "no CUDA device"
    assert "session generation.prefill_decode was not run" in table[table.id == "A4"].iloc[0].reason
    with (tmp_path / "claims.csv").open() as stream:
        assert tuple(next(csv.reader(stream))) == CLAIM_COLUMNS


def test_a_claim_without_a_source_is_marked(tmp_path):
    table = judge(*NOTHING, tmp_path, CPU)
    assert table[table.id == "B1"].statement.str.contains("no public source").all()
    assert not table[table.id == "A5"].statement.str.contains("no public source").any()


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (measured(0.30, 0.28, 0.33, "faster"), "reproduced"),  # the claimed 0.32 lies inside
        (measured(0.20, 0.18, 0.22, "faster"), "reproduced"),  # stronger than claimed
        (measured(0.60, 0.55, 0.65, "faster"), "direction only"),
        (measured(1.00, 0.99, 1.01, "same"), "no effect"),
        (measured(1.01, 1.005, 1.015, "small difference"), "no effect"),
        (measured(1.50, 1.40, 1.60, "slower"), "contradicted"),
        (measured(0.60, 0.30, 1.10, "inconclusive", mde=0.7), "inconclusive"),
        (measured(0.90, 0.25, 1.30, "same"), "inconclusive"),  # the margin is wider than the claim
    ],
)
def test_a_claimed_gain(row, verdict):
    found = outcome(sought(ratio=0.32), row)
    assert found.verdict == verdict
    assert (found.measured, found.low, found.high) == (row["ratio"], row["ci_low"], row["ci_high"])


@pytest.mark.parametrize(
    ("ratio", "low", "high", "word", "verdict"),
    [
        (2.3, 2.0, 2.5, "faster", "reproduced"),
        (3.0, 2.8, 3.2, "faster", "reproduced"),
        (1.5, 1.4, 1.6, "faster", "direction only"),
        (0.5, 0.4, 0.6, "slower", "contradicted"),
    ],
)
def test_a_claimed_rate(ratio, low, high, word, verdict):
    row = measured(ratio, low, high, word, metric="tokens_per_s")
    assert outcome(sought(ratio=2.1, metric="tokens_per_s"), row).verdict == verdict


@pytest.mark.parametrize(
    ("word", "ratio", "verdict"),
    [
        ("same", 1.0, "reproduced"),
        ("faster", 0.8, "reproduced"),
        ("slower", 1.2, "contradicted"),
        ("inconclusive", 1.0, "inconclusive"),
    ],
)
def test_a_claim_of_no_cost(word, ratio, verdict):
    row = measured(ratio, ratio - 0.01, ratio + 0.01, word)
    assert outcome(sought(direction="none"), row).verdict == verdict


@pytest.mark.parametrize(("sent", "verdict"), [(1.5, "reproduced"), (4.0, "direction only"), (11.0, "contradicted")])
def test_bytes_of_experts_are_counted_against_their_own(sent, verdict):
    rows = [
        result("moe_topk", metric=m, value=v) for m, v in {"expert_bytes": sent, "expert_dense_bytes": 10.0}.items()
    ]
    assert expert_bytes(Evidence(rows, (), Path("nowhere"), CPU)).verdict == verdict


def test_the_inconclusive_one_says_what_could_not_have_been_seen():
    assert "7.0%" in outcome(sought(ratio=0.97), measured(1.0, 0.94, 1.06, "inconclusive", mde=0.07)).reason


def test_an_inverted_claim_is_about_the_baseline():
    found = outcome(sought(direction="less", invert=True), measured(4.0, 3.5, 4.5, "slower"))
    assert found.verdict == "reproduced"
    assert found.measured == pytest.approx(0.25)
    assert found.low < found.measured < found.high


def test_a_counted_ratio_needs_no_interval():
    row = result(metric="peak_memory_bytes", ratio=0.6, verdict="better", reason="deterministic, n = 1", rounds=1)
    assert outcome(sought(metric="peak_memory_bytes", ratio=0.7), row).verdict == "reproduced"
    assert outcome(sought(metric="peak_memory_bytes", ratio=0.5), row).verdict == "direction only"


def test_the_named_shape_is_taken_else_the_largest():
    rows = [
        measured(0.9, 0.88, 0.92, "faster", shape="length=512"),
        measured(0.5, 0.48, 0.52, "faster", shape="length=2048"),
        measured(0.3, 0.28, 0.32, "faster", shape="length=4096"),
    ]
    assert outcome(sought(direction="less", shape="2048"), *rows).measured == 0.5
    assert outcome(sought(direction="less"), *rows).measured == 0.3
    assert "no cell with 8192" in outcome(sought(direction="less", shape="8192"), *rows).reason


def test_a_variant_that_could_not_run_says_why():
    row = result(value=None, status="unsupported", verdict="not measured", reason="needs sm89")
    found = outcome(sought(direction="less"), row)
    assert found.verdict == "not testable here"
    assert "unsupported: needs sm89" in found.reason


def test_a_failure_that_was_claimed_is_a_reproduction_but_out_of_memory_is_none():
    broken = result(value=None, status="incorrect", verdict="not measured", reason="NaN")
    assert outcome(sought(direction="more", harm=True), broken).verdict == "reproduced"
    assert outcome(sought(direction="more", harm=True), broken | {"status": "oom_host"}).verdict == "not testable here"
    assert outcome(sought(direction="more"), broken).verdict == "not testable here"


def test_against_another_variant_counts_are_divided_and_times_use_both_intervals():
    counted = {"metric": "bytes_on_wire", "unit": "bytes", "reason": "deterministic, n = 9", "verdict": "worse"}
    rows = [result("onebit", value=1e5, **counted), result("flat", value=3.1e6, **counted)]
    test = sought(variant=("onebit",), versus=("flat",), metric="bytes_on_wire", ratio=0.25)
    found = outcome(test, *rows)
    assert (found.verdict, found.measured) == ("reproduced", pytest.approx(1 / 31))
    times = [
        measured(2.0, 1.9, 2.1, "slower", variant="onebit"),
        measured(1.0, 0.95, 1.05, "same", variant="flat"),
    ]
    found = outcome(sought(variant=("onebit",), versus=("flat",), direction="less"), *times)
    assert found.verdict == "contradicted"
    assert (found.low, found.high) == (pytest.approx(1.9 / 1.05), pytest.approx(2.1 / 0.95))


def quality(tmp_path: Path, *runs: dict) -> list[dict]:
    """Quality rows of these runs beside five baseline seeds."""
    base = [quality_run("baseline", seed, bits) for seed, bits in enumerate([2.0, 2.01, 1.99, 2.004, 1.996])]
    return records(quality_table(write_quality(tmp_path / "q", [*base, *runs]), tmp_path / "t"))


def seeds(recipe: str, factor: float, **changes) -> list[dict]:
    """Three seeds at this factor of the baseline's loss, not quite equal."""
    finals = [2.0 * factor, 2.01 * factor * 1.0004, 1.99 * factor * 0.9997]
    return [quality_run(recipe, seed, bits, **changes) for seed, bits in enumerate(finals)]


def quality_test(**known) -> ClaimTest:
    """A test of a claim about a recipe's loss."""
    what = {"axis": "precision", "variant": ("bad",), "metric": "bits_per_byte", "table": "quality"}
    return ClaimTest(**({"what": "w", "claimed": "c"} | what | known))


@pytest.mark.parametrize(
    ("factor", "known", "verdict"),
    [
        (1.1, {"direction": "more", "harm": True}, "reproduced"),
        (1.0, {"direction": "more", "harm": True}, "no effect"),
        (0.8, {"direction": "more", "harm": True}, "contradicted"),
        (1.0, {"direction": "none"}, "reproduced"),
        (1.1, {"direction": "none"}, "contradicted"),
        (1.0, {"within": 0.005}, "reproduced"),
        (1.02, {"within": 0.005}, "contradicted"),
        (1.005, {"within": 0.005}, "inconclusive"),
        (0.9, {"ratio": 0.92}, "reproduced"),
    ],
)
def test_claims_about_quality(tmp_path, factor, known, verdict):
    rows = quality(tmp_path, *seeds("precision/bad", factor))
    assert judge_test(quality_test(**known), Evidence((), rows, tmp_path, CPU)).verdict == verdict


def test_divergence_is_the_claimed_harm(tmp_path):
    lost = {"stability": {"diverged": True}, "status": "unstable"}
    rows = quality(tmp_path, *(run | {"final": None} for run in seeds("precision/bad", 1.0, **lost)))
    found = judge_test(quality_test(direction="more", harm=True), Evidence((), rows, tmp_path, CPU))
    assert found.verdict == "reproduced"


def test_fewer_spikes_than_none_cannot_be_shown(tmp_path):
    rows = quality(tmp_path, *seeds("precision/bad", 1.0))
    found = judge_test(quality_test(metric="loss_spikes", ratio=0.3), Evidence((), rows, tmp_path, CPU))
    assert found.verdict == "not testable here"
    assert "baseline had no such step" in found.reason


def whole_run(tmp_path: Path) -> pd.DataFrame:
    """Claims of a small run: attention, generation, a stack, quality runs, all written by the real stages."""
    attention = session_spec(["chunked", "scale_offset"])
    samples = timed(attention, {"chunked": 0.8}, seed=2)
    for sample in samples:
        sample.metrics["first_step_s"] = Metric("s", 0.05)
        sample.details["warmup"] = {"curve": [0.02, 0.011, 0.01]}
        sample.details["flops_per_step"] = 1e9
    memory = {"baseline": 100 * MEGABYTE, "chunked": 60 * MEGABYTE, "scale_offset": 100 * MEGABYTE}
    generation = session_spec(["dynamic_cache"], session="generation.prefill_decode")
    stack = ("attention/chunked", "matmul/fused_qkv")
    stacked = session_spec([], session="stack.training_step")
    arms = [
        *stacked.arms,
        *(type(stacked.arms[0])(n, v) for n, v in {"all": stack, "only:a": stack[:1], "only:b": stack[1:]}.items()),
    ]
    stacked = type(stacked)(**{**stacked.__dict__, "arms": tuple(arms)})
    sessions = tmp_path / "sessions"
    cached = timed(generation, {"dynamic_cache": 0.2}, seed=2)
    parts = timed(stacked, {"all": 0.4, "only:a": 0.5, "only:b": 0.8}, seed=2)
    files = [
        write_session(sessions / "attention.training_step.jsonl", attention, samples, memory=memory),
        write_session(sessions / "generation.prefill_decode.jsonl", generation, cached),
        write_session(sessions / "stack.training_step.jsonl", stacked, parts),
    ]
    tables = tmp_path / "tables"
    results = compare(files, tables, tmp_path / "results.parquet", config_hash="x", smallest_effect=0.02)
    base = [quality_run("baseline", seed, bits) for seed, bits in enumerate([2.0, 2.01, 1.99, 2.004, 1.996])]
    runs = [*base, *seeds("attention/scale_offset", 1.0), *seeds("stack", 1.0, variants=stack)]
    trained = quality_table(write_quality(tmp_path / "quality", runs), tables)
    ablate(results, trained, {"stack": list(stack)}, tables)
    return judge(pd.read_parquet(tmp_path / "results.parquet"), trained, tables, CPU)


def test_a_whole_run_from_its_own_files(tmp_path):
    table = whole_run(tmp_path)
    assert set(table.verdict) <= set(CLAIM_VERDICTS)
    assert table.reason.notna().all()

    def verdicts(claim: str) -> dict[str, str]:
        rows = table[table.id == claim]
        return {s.rpartition(": ")[2]: v for s, v in zip(rows.statement, rows.verdict, strict=True)}

    assert verdicts("A4")["generation time of no cache against cache"] == "reproduced"
    assert verdicts("A3")["first step against steady state (baseline)"] == "reproduced"
    assert verdicts("A2") == {"share of measured training-step arms that have all three": "direction only"}
    assert verdicts("B14") == {
        "training speed": "reproduced", "peak memory": "not testable here", "accuracy": "reproduced",
    }  # fmt: skip
    assert verdicts("A8")["training time of the whole stack"] == "reproduced"
    assert set(verdicts("B15").values()) == {"contradicted"}
    assert verdicts("B1")["loss at equal tokens"] in ("no effect", "inconclusive")


def test_ninety_percent_from_under_ten_percent(tmp_path):
    columns = ("kind", "step", "variant", "metric", "share", "ci_high", "reason")

    def with_shares(shares: list[float], summary: float) -> str:
        rows = [
            {
                "kind": "attribution",
                "step": i,
                "variant": f"v{i}",
                "metric": "step_time_s",
                "share": s,
                "ci_high": s + 0.02,
            }
            for i, s in enumerate(shares)
        ]
        last = {"kind": "concentration", "step": len(shares), "metric": "step_time_s", "share": summary, "reason": "r"}
        write_csv(frame([*rows, last], columns), tmp_path / "ladder.csv")
        return concentration(Evidence((), (), tmp_path, CPU)).verdict

    assert with_shares([0.95, *[0.05 / 19] * 19], 1 / 20) == "reproduced"
    assert with_shares([0.95, 0.03, 0.02], 1 / 3) == "direction only"  # three changes cannot show 10 %
    assert with_shares([0.5, 0.3, 0.2], 1.0) == "contradicted"
    assert with_shares([0.05] * 20, 0.9) == "contradicted"
    assert with_shares([0.89, 0.06, 0.05], 2 / 3) == "inconclusive"


def test_warm_up_without_interval_is_inconclusive(tmp_path):
    row = {"session": "s", "workload": "training_step", "shape": "a", "place": 0, "ratio": 3.0, "n": 2}
    columns = ("session", "workload", "shape", "place", "ratio", "ci_low", "ci_high", "n")
    write_csv(frame([row], columns), tmp_path / "warmup.csv")
    assert warm_up(Evidence((), (), tmp_path, CPU)).verdict == "inconclusive"
    write_csv(frame([row | {"ci_low": 2.5, "ci_high": 3.5}], columns), tmp_path / "warmup.csv")
    assert warm_up(Evidence((), (), tmp_path, CPU)).verdict == "reproduced"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[{id: X, statement: s, source: null, tests: [{what: w, claimed: c, colour: red, direction: less}]}]",
            "colour",
        ),
        ("[{id: X, statement: s, source: null, tests: [{what: w, claimed: c}]}]", "needs one of"),
        ("[{id: X, statement: s, source: null, tests: [{what: w, claimed: c, check: nope}]}]", "nope"),
        ("[{id: X, statement: s, source: null, author: me, tests: []}]", "author"),
    ],
)
def test_a_bad_entry_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_claims(tmp_path / "claims.yaml")
