"""Specs are self-contained, change only when something they use changes, and impossible designs are refused."""

from pathlib import Path

import pytest

from lmperf.catalogue import catalogue
from lmperf.config import load
from lmperf.design import minimum_rounds
from lmperf.planning import make_plan, quality_recipes, stack_recipes
from lmperf.records import InputError, SessionSpec, from_json, to_json

ROOT = Path(__file__).parents[1]


def plan(*overrides):
    return make_plan(load([ROOT / "config.yaml", ROOT / "workflow" / "presets" / "smoke.yaml"], overrides))


def changed(before, after):
    """Names of the stages, sessions and runs whose specs differ."""
    names = ("fetch", "ingest", "tokenize", "profile", "ablate", "report")
    stages = [name for name in names if getattr(before, name) != getattr(after, name)]
    sessions = [n for n in after.sessions if before.sessions.get(n) != after.sessions[n]]
    runs = [n for n in after.quality if before.quality.get(n) != after.quality[n]]
    return set(stages), set(sessions), set(runs)


def test_a_spec_survives_json():
    for spec in plan().sessions.values():
        assert from_json(SessionSpec, to_json(spec)) == spec


def test_every_session_has_its_baseline_and_hidden_control():
    for spec in plan().sessions.values():
        assert [arm.name for arm in spec.arms[:2]] == ["baseline", "baseline_prime"]
        assert spec.arms[0].variants == spec.arms[1].variants == ()


def test_each_variant_arm_differs_from_the_baseline_in_one_axis():
    for name, spec in plan().sessions.items():
        if name != "stack.training_step":
            assert all(len(arm.variants) == 1 and arm.variants[0].startswith(f"{spec.axis}/") for arm in spec.arms[2:])


def test_a_key_of_one_stage_changes_that_stage_alone():
    before = plan()
    stages, sessions, runs = changed(before, plan("quality.steps=41"))
    assert (stages & {"fetch", "ingest", "tokenize", "profile"}, sessions) == (set(), set())
    assert runs == set(before.quality)
    assert changed(before, plan("report.title=another")) == ({"report"}, set(), set())
    stages, sessions, runs = changed(before, plan("profile.top=7"))
    assert (stages - {"report"}, sessions, runs) == ({"profile"}, set(), set())


def test_another_seed_changes_every_session():
    before = plan()
    assert changed(before, plan("seed=7"))[1] == set(before.sessions)


@pytest.mark.parametrize(("arms", "rounds"), [(1, 6), (3, 7), (4, 8), (12, 9), (13, 10)])
def test_minimum_rounds_follow_the_formula(arms, rounds):
    # 1 + ceil(log2(arms / 0.05))
    assert minimum_rounds(arms) == rounds


def test_a_design_that_can_never_support_a_claim_is_refused_with_the_rounds_it_needs():
    with pytest.raises(InputError, match=r"6 rounds can never .* at least 8 rounds"):
        plan("measure.rounds=6")


def test_an_indicative_design_is_allowed():
    assert plan("measure.rounds=3").sessions


def test_the_stack_is_taken_apart_both_ways():
    recipes = stack_recipes(["a/1", "b/2", "c/3", "d/4"], [["a/1", "c/3"]])
    sets = {frozenset(v) for v in recipes.values()}
    assert len(sets) == len(recipes), "equal sets are one arm"
    for name in ("a/1", "b/2", "c/3", "d/4"):
        assert frozenset([name]) in sets
        assert frozenset({"a/1", "b/2", "c/3", "d/4"} - {name}) in sets
    assert frozenset(["a/1", "b/2"]) in sets
    assert frozenset(["c/3", "d/4"]) in sets
    assert frozenset(["a/1", "c/3"]) in sets


def test_what_is_left_out_is_named():
    known = plan().report["left_out"]
    assert "attention/gqa" in known
    assert "attention/window" not in known


def test_quality_variants_may_name_whole_axes_and_what_is_measured():
    recipes = quality_recipes(load([ROOT / "config.yaml"], ["quality.variants=[measured, precision, attention/lsh]"]))
    known = catalogue()
    owed = {key for key, entry in known.items() if entry.axis == "precision" and entry.quality_run}
    measured = set(quality_recipes(load([ROOT / "config.yaml"], ["quality.variants=measured"])))
    assert set(recipes) == {"baseline", "stack", "attention/lsh"} | owed | measured
    assert {"precision/fp8", "precision/fp16_no_update"} <= owed
    assert not any(known[key].baseline for key in owed)


def test_the_smallest_effect_is_no_part_of_a_measurement():
    before, after = plan(), plan("measure.smallest_effect=0.05")
    assert changed(before, after) == ({"ablate", "report"}, set(), set())
    assert before.compare != after.compare
    assert before.compare["config_hash"] != after.compare["config_hash"]


def test_all_measured_processes_get_the_same_environment():
    made = plan('measure.environment={GOMP_SPINCOUNT: "7"}')
    specs = [*made.sessions.values(), *made.quality.values(), from_json(SessionSpec, made.profile["session"])]
    assert {spec.environment["GOMP_SPINCOUNT"] for spec in specs} == {"7"}
