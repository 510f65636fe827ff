"""Quality paired by seed, five dimensions for every recipe, and the stack taken apart without summing single gains."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from session_files import quality_run, session_spec, timed, write_quality, write_session

from lmperf.ablation import DIMENSIONS, ablate, quality_table
from lmperf.comparing import compare
from lmperf.records import ArmSpec, InputError

STACK = ("attention/chunked", "matmul/fused_qkv", "norm/rmsnorm")
GAINS = {"attention/chunked": 0.6, "matmul/fused_qkv": 0.9, "norm/rmsnorm": 1.0}


def seeds(recipe: str, finals: list[float], **changes) -> list[dict]:
    """Runs of one recipe, seeds 0, 1, …"""
    return [quality_run(recipe, seed, final, **changes) for seed, final in enumerate(finals)]


BASE = [2.000, 2.010, 1.990, 2.004, 1.996]


def row_of(table: pd.DataFrame, **wanted) -> dict:
    """The one row with these values."""
    for name, value in wanted.items():
        table = table[table[name] == value]
    assert len(table) == 1, table
    return table.iloc[0].to_dict()


@pytest.fixture
def table(tmp_path):
    """Quality table of the given runs beside five baseline seeds."""

    def build(*runs: dict, base: list[float] = BASE) -> pd.DataFrame:
        files = write_quality(tmp_path / "quality", [*seeds("baseline", base), *runs])
        return quality_table(files, tmp_path / "tables")

    return build


@pytest.mark.parametrize(
    ("finals", "word"),
    [
        ([2.001, 2.011, 1.9905], "non-inferior"),
        ([2.10, 2.111, 2.09], "inferior"),
        ([2.03, 1.98, 2.01], "inconclusive"),
        ([1.80, 1.809, 1.791], "better"),
    ],
)
def test_bits_per_byte_paired_by_seed(table, finals, word):
    row = row_of(table(*seeds("norm/rmsnorm", finals)), recipe="norm/rmsnorm", metric="bits_per_byte")
    assert row["verdict"] == word
    assert row["n"] == 3
    assert row["ci_low"] < row["ratio"] < row["ci_high"]
    assert row["ratio"] == pytest.approx(np.exp(np.mean(np.log(np.array(finals) / BASE[:3]))))


def test_the_margin_is_two_sigma_of_five_seeds_but_at_least_half_a_percent(table):
    spread = [2.0, 2.06, 1.94, 2.03, 1.97]
    runs = seeds("norm/rmsnorm", [x * 1.02 for x in spread[:3]])
    wide = row_of(table(*runs, base=spread), recipe="norm/rmsnorm", metric="bits_per_byte")
    assert wide["margin"] == pytest.approx(2 * np.std(spread, ddof=1) / 2.0)
    assert wide["verdict"] == "non-inferior"
    narrow = row_of(table(*runs, base=[2.0] * 5), recipe="norm/rmsnorm", metric="bits_per_byte")
    assert narrow["margin"] == 0.005


def test_with_fewer_than_five_baseline_seeds_the_margin_stays_at_its_least_and_says_so(tmp_path):
    files = write_quality(tmp_path, [*seeds("baseline", [2.0, 2.2, 1.8]), *seeds("norm/x", [2.0, 2.2, 1.8])])
    row = row_of(quality_table(files, tmp_path), recipe="norm/x", metric="bits_per_byte")
    assert (row["margin"], row["sigma"]) == (0.005, None)
    assert "needs 5 seeds" in row["reason"]


def test_two_seeds_are_never_enough(table):
    row = row_of(table(*seeds("norm/x", [2.0, 2.01])), recipe="norm/x", metric="bits_per_byte")
    assert (row["verdict"], row["ci_low"], row["n"]) == ("inconclusive", None, 2)


def test_a_better_recipe_among_many_must_survive_holm(table):
    many = [seeds(f"norm/v{i}", [2.004, 2.002 + i / 1e4, 1.991]) for i in range(1, 12)]
    slightly = seeds("norm/slightly", [1.988, 2.00297, 1.98204])
    row = row_of(table(*slightly, *(r for runs in many for r in runs)), recipe="norm/slightly", metric="bits_per_byte")
    alone = row_of(table(*slightly), recipe="norm/slightly", metric="bits_per_byte")
    assert alone["verdict"] == "better"
    assert row["verdict"] == "non-inferior"
    assert "Holm" in row["reason"]


def test_diverged_seeds_are_shares_and_spoil_the_loss(table):
    calm = quality_run("x", 0, 2.0)["stability"]
    bad = {"stability": calm | {"diverged": True, "nonfinite_steps": 30}, "status": "unstable"}
    lost = [run | {"final": {"bits_per_byte": None, "loss": None}} for run in seeds("precision/bad", [2.0] * 3, **bad)]
    most = table(*lost[:2], quality_run("precision/bad", 2, 1.99))
    share = row_of(most, recipe="precision/bad", metric="diverged_share")
    assert (share["value"], share["verdict"], share["status"]) == (pytest.approx(2 / 3), "inferior", "unstable")
    some = table(quality_run("precision/bad", 0, 2.0, **bad), *seeds("precision/bad", [2.0, 2.01, 1.99])[1:])
    row = row_of(some, recipe="precision/bad", metric="bits_per_byte")
    assert row["verdict"] == "inconclusive"
    assert "diverged in 1 of 3" in row["reason"]
    all_lost = row_of(table(*lost), recipe="precision/bad", metric="bits_per_byte")
    assert (all_lost["value"], all_lost["verdict"]) == (None, "not measured")


def test_a_missed_target_is_null_with_its_status_never_a_number(table):
    missed = row_of(table(*seeds("norm/x", [2.3, 2.3, 2.3])), recipe="norm/x", metric="time_to_target_s")
    assert (missed["value"], missed["status"], missed["verdict"]) == (None, "missed", "inferior")
    assert "3 of 3" in missed["reason"]
    met = row_of(table(*seeds("norm/x", [1.7, 1.71, 1.69])), recipe="norm/x", metric="time_to_target_s")
    assert met["ratio"] < 1
    assert met["verdict"] == "better"


def test_equal_time_prices_a_slow_recipe(table):
    slow = seeds("norm/x", BASE[:3], seconds=40.0)
    both = table(*slow)
    assert row_of(both, recipe="norm/x", metric="bits_per_byte")["ratio"] == pytest.approx(1.0)
    at_time = row_of(both, recipe="norm/x", metric="bits_per_byte_equal_time")
    assert at_time["ratio"] > 1.1
    assert row_of(both, recipe="norm/x", metric="tokens_per_s")["ratio"] == pytest.approx(0.5)


def test_matched_speedup_prices_throughput_with_the_baselines_own_curve(table):
    """Twice the throughput at a worse loss is worth less than twice; at the same loss, just twice."""
    same = row_of(table(*seeds("a/x", BASE[:3], seconds=10.0)), recipe="a/x", metric="matched_speedup")
    worse = row_of(table(*seeds("a/x", [2.2, 2.21, 2.19], seconds=10.0)), recipe="a/x", metric="matched_speedup")
    assert same["ratio"] == pytest.approx(2.0, rel=0.03)
    # the made-up curve reaches final + 0.2 when 2 (1 - step/200)^2 = 0.2
    assert worse["ratio"] == pytest.approx(2.0 * (1 - math.sqrt(0.1)), rel=0.08)


def test_generalisation_in_both_stored_forms(table):
    runs = seeds("attention/x", BASE[:3], long_context={"256": 2.1}, domains={"chinese": {"bits_per_byte": 3.0}})
    base = seeds("baseline", BASE, long_context={"256": 2.0})
    found = table(*runs, *base)
    assert row_of(found, recipe="attention/x", metric="long_context.256")["ratio"] == pytest.approx(1.05)
    assert row_of(found, recipe="attention/x", metric="domains.chinese")["ratio"] == pytest.approx(1.0, rel=0.01)
    longer = {"length": 256, "bits_per_byte": 2.2, "bits_per_byte_beyond": 2.3, "gain": 0.1}
    runs = seeds("attention/x", BASE[:3], long_context=longer)
    found = table(*runs, *seeds("baseline", BASE, long_context=longer))
    assert row_of(found, recipe="attention/x", metric="long_context.256.beyond")["ratio"] == pytest.approx(1.0)


def test_failed_runs_are_typed(table):
    failed = [
        run | {"final": None, "curve": [], "stability": None}
        for run in seeds("a/x", BASE[:3], status="oom_host", reason="no room")
    ]
    row = row_of(table(*failed), recipe="a/x", metric="bits_per_byte")
    assert (row["value"], row["verdict"], row["status"], row["reason"]) == (None, "not measured", "oom_host", "no room")


def test_stressed_runs_are_kept_apart(table):
    base = seeds("baseline", [2.5, 2.5, 2.5], stressed=True)
    stressed = seeds("a/x", [2.5, 2.5, 2.5], stressed=True)
    found = table(*seeds("a/x", BASE[:3]), *stressed, *base)
    assert row_of(found, recipe="a/x", metric="bits_per_byte", stressed=True)["value"] == pytest.approx(2.5)
    assert row_of(found, recipe="a/x", metric="bits_per_byte", stressed=False)["value"] == pytest.approx(2.0)


def test_a_file_that_is_no_run_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InputError, match=r"x\.json"):
        quality_table([tmp_path / "x.json"], tmp_path)


def stack_spec(**changes):
    """A session with all of the stack's arms, under names that say nothing."""
    ladders = [STACK[:k] for k in range(1, 4)] + [STACK[k:] for k in range(1, 3)]
    ladders += [tuple(v for v in STACK if v != left_out) for left_out in STACK]
    parts = dict.fromkeys([STACK, *ladders, *((v,) for v in STACK)])
    arms = [ArmSpec(f"arm{i}", variants) for i, variants in enumerate(parts)]
    return session_spec(arms, session="stack.training_step", rounds=15, **changes)


def effect_of(variants: tuple[str, ...], interaction: float = 1.0) -> float:
    """The made-up truth: independent gains, but the first two together gain `interaction` times more."""
    both = {"attention/chunked", "matmul/fused_qkv"} <= set(variants)
    return math.prod(GAINS[v] for v in variants) * (interaction if both else 1.0)


def stack_file(folder: Path, interaction: float = 1.0, seed: int = 5) -> Path:
    """A stack session file with that truth, memory halved by the first change alone."""
    spec = stack_spec()
    effects = {arm.name: effect_of(arm.variants, interaction) for arm in spec.arms}
    memory = {arm.name: 50.0 if "attention/chunked" in arm.variants else 100.0 for arm in spec.arms}
    path = folder / "sessions" / "stack.training_step.jsonl"
    return write_session(path, spec, timed(spec, effects, seed=seed), memory=memory)


@pytest.fixture
def ablated(tmp_path, table):
    """The ablation of a stack session, one attention session and a few quality runs."""

    def build(*quality: dict, interaction: float = 1.0) -> dict[str, pd.DataFrame]:
        spec = session_spec(["chunked", "sdpa"])
        memory = {"baseline": 100, "chunked": 50}
        session = write_session(tmp_path / "a.jsonl", spec, timed(spec, {"chunked": 0.7}), memory=memory)
        files = [session, stack_file(tmp_path, interaction)]
        results = compare(files, tmp_path / "tables", tmp_path / "r.parquet", config_hash="x", smallest_effect=0.02)
        settings = {"stack": list(STACK), "smallest_effect": 0.02}
        return ablate(results, table(*quality), settings, tmp_path / "tables")

    return build


def test_every_recipe_has_all_five_dimensions_in_order(ablated, tmp_path):
    found = ablated(*seeds("attention/chunked", BASE[:3]), *seeds("norm/rmsnorm", BASE[:3]))["ablation"]
    recipes = list(dict.fromkeys(found.recipe))
    assert {"attention/chunked", "attention/sdpa", "norm/rmsnorm", "stack"} <= set(recipes)
    for recipe in recipes:
        rows = found[found.recipe == recipe]
        assert tuple(dict.fromkeys(rows.dimension)) == DIMENSIONS
        empty = rows[rows.value.isna()]
        assert all(empty.reason.notna())
    speed = row_of(found, recipe="attention/chunked", dimension="speed", metric="step_time_s")
    assert speed["value"] == pytest.approx(0.7, rel=0.03)
    assert speed["verdict"] == "faster"
    with (tmp_path / "tables" / "ablation.csv").open() as stream:
        header = next(csv.reader(stream))
    assert header == ["recipe", "dimension", "metric", "value", "ci_low", "ci_high", "n", "verdict", "reason"]
    assert json.loads((tmp_path / "tables" / "schemas.json").read_text())["ladder.csv"] == 1


def test_matched_speedup_uses_the_measured_throughput(ablated):
    found = ablated(*seeds("attention/chunked", [2.2, 2.21, 2.19]))["ablation"]
    row = row_of(found, recipe="attention/chunked", metric="matched_speedup")
    assert row["value"] == pytest.approx(1 / 0.7 * (1 - math.sqrt(0.1)), rel=0.1)
    assert row["ci_low"] < row["value"] < row["ci_high"]


def test_ladders_give_each_change_its_paired_increment(ablated):
    ladder = ablated()["ladder"]
    times = ladder[ladder.metric == "step_time_s"]
    for kind in ("up", "down", "leave one out", "alone"):
        for variant, gain in GAINS.items():
            row = row_of(times, kind=kind, variant=variant)
            expected = gain if kind in ("up", "alone") else 1 / gain
            assert row["increment_low"] < row["increment"] < row["increment_high"]
            assert row["increment"] == pytest.approx(expected, rel=0.02)
            if gain < 0.95:
                assert row["verdict"] == ("faster" if kind in ("up", "alone") else "slower")
    top = row_of(times, kind="up", variant="norm/rmsnorm")
    assert top["ratio"] == pytest.approx(0.54, rel=0.02)
    assert top["verdict"] in ("same", "small difference")


@pytest.mark.parametrize(("truth", "word"), [(1.0, "same"), (0.8, "better"), (1.3, "worse")])
def test_interactions_are_the_pair_against_the_product_of_its_changes(ablated, truth, word):
    ladder = ablated(interaction=truth)["ladder"]
    row = row_of(ladder, kind="interaction", variant="attention/chunked + matmul/fused_qkv", metric="step_time_s")
    assert row["increment"] == pytest.approx(truth, rel=0.03)
    assert row["verdict"] in (word, "small difference" if word == "same" else word)


@pytest.mark.parametrize("truth", [1.0, 0.7])
def test_shares_sum_to_one_even_with_interactions(ablated, truth):
    ladder = ablated(interaction=truth)["ladder"]
    rows = ladder[(ladder.kind == "attribution") & (ladder.metric == "step_time_s")]
    assert sum(rows.share) == pytest.approx(1.0, abs=1e-9)
    largest = row_of(rows, variant="attention/chunked")
    expected = (math.log(0.6) + math.log(truth) / 2) / math.log(0.54 * truth)
    assert largest["share"] == pytest.approx(expected, abs=0.03)
    assert largest["ci_low"] < largest["share"] < largest["ci_high"]
    summary = row_of(ladder, kind="concentration", metric="step_time_s")
    assert summary["share"] == pytest.approx(2 / 3)


def test_memory_of_the_stack_is_counted(ablated):
    ladder = ablated()["ladder"]
    row = row_of(ladder, kind="up", variant="attention/chunked", metric="peak_memory_bytes")
    assert (row["increment"], row["verdict"], row["increment_low"]) == (pytest.approx(0.5), "better", None)
    assert row_of(ladder, kind="concentration", metric="peak_memory_bytes")["share"] == pytest.approx(1 / 3)


def test_a_stack_without_gain_has_no_shares(tmp_path, table):
    spec = stack_spec()
    write_session(tmp_path / "sessions" / "stack.training_step.jsonl", spec, timed(spec, {}))
    results = pd.DataFrame(columns=["axis", "variant"])
    ladder = ablate(results, table(), {"stack": list(STACK)}, tmp_path / "tables")["ladder"]
    rows = ladder[ladder.kind == "attribution"]
    assert rows.share.isna().all()
    assert rows.reason.str.contains("no gain").all()


def test_an_unequal_control_caps_the_ladder_too(tmp_path, table):
    spec = stack_spec()
    effects = {arm.name: effect_of(arm.variants) for arm in spec.arms} | {"baseline_prime": 1.2}
    write_session(tmp_path / "sessions" / "stack.training_step.jsonl", spec, timed(spec, effects))
    ladder = ablate(pd.DataFrame(columns=["axis", "variant"]), table(), None, tmp_path / "tables")["ladder"]
    assert set(ladder[ladder.kind == "up"].verdict) == {"inconclusive"}
    assert ladder[ladder.kind == "up"].reason.str.contains("aa_excludes_1").all()


def test_without_a_stack_the_ladder_is_empty_but_there(tmp_path, table):
    found = ablate(pd.DataFrame(columns=["axis", "variant"]), table(), {"stack": []}, tmp_path / "tables")
    assert not len(found["ladder"])
    assert (tmp_path / "tables" / "ladder.csv").read_text().startswith("kind,step,recipe")


def test_a_stack_that_the_session_did_not_measure_is_refused(tmp_path, table):
    stack_file(tmp_path)
    with pytest.raises(InputError, match="graph/compile"):
        ablate(pd.DataFrame(columns=["axis", "variant"]), table(), {"stack": ["graph/compile"]}, tmp_path / "tables")
