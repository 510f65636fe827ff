"""Attention by length: exponents, crossings, ratios to two references, and what the report shows of them."""

import pytest
from session_files import swept_session

from lmperf.comparing import compare_session
from lmperf.readings import read_session
from lmperf.sweeps import write_attention
from lmperf.sweepviews import labels, series, sweep_sections
from lmperf.tables import read_csv

COSTS = {
    "baseline": lambda n: 1e-8 * n**2,
    "chunked": lambda n: 7e-6 * n,
    "sdpa_flash": lambda n: 0.5e-8 * n**2,
    "twin": lambda n: 1e-8 * n**2,
}
MEMORY = {"baseline": lambda n: 8 * n**2, "chunked": lambda n: 64 * n, "sdpa_flash": lambda n: 32 * n}


@pytest.fixture
def table(tmp_path):
    """The rows of attention.csv as the report reads them."""

    def make(*sessions):
        results = [row for path in sessions for row in compare_session(read_session(path), 0.02)]
        write_attention(sessions, results, tmp_path, smallest_effect=0.02)
        return read_csv(tmp_path / "attention.csv")

    return make


@pytest.fixture
def swept(tmp_path):
    """A session file of attention operators, named as its session is."""

    def make(costs=COSTS, memory=MEMORY, workload="operator_forward_backward", **changes):
        path = tmp_path / f"attention.{workload}.jsonl"
        return swept_session(path, costs, memory, workload=workload, **changes)

    return make


def pick(rows, kind, variant, metric="step_time_s", **others):
    """The one row of a kind with these columns."""
    wanted = {"kind": kind, "variant": variant, "metric": metric, **others}
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    assert len(found) == 1
    return found[0]


def test_exponents_with_their_intervals_and_lengths(table, swept):
    rows = table(swept())
    for variant, exponent in (("baseline", 2), ("chunked", 1), ("sdpa_flash", 2)):
        row = pick(rows, "growth", variant)
        assert float(row["value"]) == pytest.approx(exponent, abs=0.01)
        assert float(row["ci_low"]) < float(row["value"]) < float(row["ci_high"])
        assert (row["n"], row["sweep"]) == ("5", "head_dim=64")
    assert float(pick(rows, "growth", "sdpa_flash", "peak_memory_bytes")["value"]) == pytest.approx(1)
    assert not [row for row in rows if "baseline_prime" in (row["variant"], row["other"])]


def test_two_lengths_give_no_exponent_and_say_so(table, swept):
    row = pick(table(swept(lengths=(512, 2048))), "growth", "chunked")
    assert (row["value"], row["ci_low"], row["n"]) == (None, None, "2")
    assert row["reason"] == "measured at 2 of 2 lengths; an exponent needs 3"


def test_curves_cross_where_their_costs_are_equal_or_say_that_they_do_not(table, swept):
    rows = table(swept())
    row = pick(rows, "crossover", "baseline", other="chunked")
    assert float(row["value"]) == pytest.approx(700, rel=0.02)
    assert row["reason"] == "chunked takes less beyond"
    row = pick(rows, "crossover", "baseline", other="sdpa_flash")
    assert row["value"] is None
    assert row["reason"] == "do not cross in the measured range, 128 to 2048 tokens: sdpa_flash takes less"


def test_noise_is_no_crossing(table, swept):
    row = pick(table(swept(noise=0.01)), "crossover", "baseline", other="twin")
    assert row["value"] is None
    assert row["reason"].endswith("no difference above the noise floor")


def test_every_length_has_its_ratio_to_both_references(table, swept):
    rows = table(swept())
    at = {"length": "2048", "other": "sdpa_flash"}
    for variant, ratio, word in (("chunked", 0.684, "faster"), ("baseline", 2.0, "slower")):
        row = pick(rows, "length", variant, **at)
        assert float(row["ratio"]) == pytest.approx(ratio, rel=0.01)
        assert float(row["ci_low"]) < ratio < float(row["ci_high"])
        assert (row["verdict"], row["n"], row["status"]) == (word, "9", "ok")
    row = pick(rows, "length", "baseline", "peak_memory_bytes", **at)
    assert (float(row["ratio"]), row["verdict"]) == (512, "worse")
    row = pick(rows, "length", "chunked", length="2048", other="baseline")
    assert float(row["ratio"]) == pytest.approx(0.342, rel=0.01)


def test_a_reference_keeps_the_sessions_noise_floor(table, swept):
    rows = table(swept())
    own, other = (pick(rows, "length", "chunked", length="512", other=name) for name in ("baseline", "sdpa_flash"))
    assert float(own["noise_floor"]) == pytest.approx(float(other["noise_floor"]))


def test_a_reference_that_failed_gives_no_ratio_and_says_why(table, swept):
    costs = {name: cost for name, cost in COSTS.items() if name != "sdpa_flash"}
    rows = table(swept(costs, failing={"sdpa_flash": "unsupported"}))
    row = pick(rows, "length", "chunked", length="512", other="sdpa_flash")
    assert (row["ratio"], row["verdict"]) == (None, "not measured")
    assert row["reason"].startswith("sdpa_flash was not measured: ")


def test_other_sessions_are_no_sweep(table, tmp_path, swept):
    path = swept(workload="prefill")
    assert table(path) == []
    assert (tmp_path / "attention.csv").read_text().startswith("kind,session,workload,sweep,length,metric")


def test_the_report_draws_head_size_64_and_leaves_single_lengths_out(table, swept):
    rows = table(swept(head_dims=(128, 64), lengths=(512, 1024)))
    drawn = sweep_sections(rows)["attention.operator_forward_backward"]
    assert [sweep["shared"] for sweep in drawn] == ["head_dim=64", "head_dim=128"]
    assert (drawn[0]["length"], drawn[0]["asked"]) == (1024, 2048)
    assert sweep_sections(table(swept(lengths=(512,)))) == {}


def test_figures_show_the_exponent_in_the_legend_and_memory_in_mib(table, swept):
    rows = table(swept())
    sweep = sweep_sections(rows)["attention.operator_forward_backward"][0]
    assert labels(sweep, "step_time_s")["chunked"] == "chunked: ∝ T^1.00"
    assert series(rows, sweep, "peak_memory_bytes")["naive (baseline)"][-1] == (2048, 32.0)


def test_the_forward_pass_stands_beside_forward_and_backward(table, swept):
    rows = table(swept(), swept({name: lambda n: 1e-9 * n for name in COSTS}, workload="operator_forward"))
    drawn = sweep_sections(rows)
    both, alone = (drawn[f"attention.{name}"][0] for name in ("operator_forward_backward", "operator_forward"))
    assert float(both["forward"]["chunked"]) == pytest.approx(1e-9 * 2048, rel=0.01)
    assert alone["forward"] == {}
    assert [len(line["ratios"]) for line in both["at_length"]] == [4, 4, 4, 4]
