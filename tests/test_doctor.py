"""The doctor: what can run here, and a checklist whose points stand on measurements of this very machine."""

import csv
import json

import pytest

from lmperf.doctor import doctor, doctor_lines, model_dimensions
from lmperf.machine import fingerprint, machine
from lmperf.qualities import QUALITY_COLUMNS
from lmperf.records import RESULT_COLUMNS

HERE = fingerprint(machine())
CONFIG = {
    "model": {"size": "base", "d_ff": None, "kv_heads": None},
    "tokenizer": {"vocab_size": 1024},
    "training": {"batch_size": 8},
    "measure": {"environment": {"MALLOC_MMAP_MAX_": "0"}},
    "ablation": {"stack": []},
    "plugins": [],
    "device": "cpu",
}
ALIGNED, EPSILON, GUARD, POOL, MIXED, LOADER = (
    "matmul dimensions aligned to 64", "dynamic ε in the norm", "numeric guard in attention", "memory pooled",
    "mixed-precision gradients", "loader parallel enough",
)  # fmt: skip


def result(key: str, ratio: float, verdict: str, **changes) -> dict:
    axis, variant = key.split("/")
    row = dict.fromkeys(RESULT_COLUMNS, "")
    row |= {"axis": axis, "variant": variant, "workload": "training_step", "metric": "step_time_s", "ratio": ratio}
    row |= {"verdict": verdict, "fingerprint": HERE, "status": "ok", "session": f"{axis}.training_step"}
    return row | changes


def stable(recipe: str, diverged: float, nonfinite: float, stressed: bool = False) -> list[dict]:
    base = {**dict.fromkeys(QUALITY_COLUMNS, ""), "recipe": recipe, "stressed": stressed, "dimension": "stability"}
    return [
        {**base, "metric": "diverged_share", "value": diverged},
        {**base, "metric": "nonfinite_steps", "value": nonfinite},
    ]


@pytest.fixture
def examine(tmp_path):
    def write(name, columns, rows):
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, columns)
            writer.writeheader()
            writer.writerows(rows)

    def run(config=CONFIG, results=(), quality=()):
        write("results.csv", RESULT_COLUMNS, results)
        write("quality.csv", QUALITY_COLUMNS, quality)
        outcome = doctor(config, tmp_path)
        json.dumps(outcome, allow_nan=False)
        return {item["item"]: item for item in outcome["checklist"]}

    return run


def with_stack(*stack: str) -> dict:
    return {**CONFIG, "ablation": {"stack": list(stack)}}


def test_nothing_measured_is_unknown_and_says_what_to_run(examine):
    items = examine()
    assert set(items) == {ALIGNED, EPSILON, GUARD, POOL, MIXED, LOADER}
    assert {item["status"] for item in items.values()} == {"unknown"}
    assert all("lmperf " in item["why"] and item["measurement"] is None for item in items.values())


def test_without_a_configuration_or_tables_it_still_answers():
    outcome = doctor(None, None)
    assert {item["status"] for item in outcome["checklist"]} == {"unknown"}
    assert outcome["fingerprint"] == HERE


def test_every_variant_can_run_or_has_a_reason():
    entries = doctor(None, None)["can_run"]
    assert {"attention/naive", "precision/fp32", "graph/eager"} <= {entry["variant"] for entry in entries}
    assert all(entry["available"] == (entry["reason"] is None) for entry in entries)
    baseline = next(entry for entry in entries if entry["variant"] == "attention/naive")
    assert baseline["available"]


def test_results_of_another_machine_count_for_nothing(examine):
    items = examine(results=[result("precision/bf16_autocast", 0.5, "faster", fingerprint="0" * 12)])
    assert items[MIXED]["status"] == "unknown"
    assert "another machine" in items[MIXED]["why"]


@pytest.mark.parametrize(
    ("stack", "verdict", "status"),
    [
        ((), "faster", "fail"),
        ((), "same", "pass"),
        ((), "slower", "pass"),
        ((), "inconclusive", "warn"),
        (("precision/bf16_autocast",), "faster", "pass"),
        (("precision/bf16_autocast",), "slower", "fail"),
        (("precision/bf16_autocast",), "inconclusive", "warn"),
    ],
)
def test_mixed_precision_is_judged_by_what_it_brings_here(examine, stack, verdict, status):
    item = examine(with_stack(*stack), [result("precision/bf16_autocast", 0.9, verdict)])[MIXED]
    assert item["status"] == status
    assert item["measurement"]["variant"] == "bf16_autocast"
    assert item["measurement"]["ratio"] == 0.9


def test_fp16_without_a_working_scaler_fails_unmeasured(examine):
    assert examine(with_stack("precision/fp16_unscaled"))[MIXED]["status"] == "fail"


def test_aligned_dimensions_stand_on_the_measured_cost_of_unaligned_ones(examine):
    item = examine(results=[result("matmul/unaligned", 1.3, "slower")])[ALIGNED]
    assert item["status"] == "pass"
    assert "1.300" in item["why"]


def test_unaligned_dimensions_fail_where_alignment_pays(examine):
    odd = {**CONFIG, "tokenizer": {"vocab_size": 1000}}
    assert "vocab_size 1000" in examine(odd)[ALIGNED]["why"]
    rows = [result("matmul/padded_vocab", 0.8, "faster")]
    assert examine(odd, rows)[ALIGNED]["status"] == "fail"
    assert examine({**odd, "ablation": {"stack": ["matmul/padded_vocab"]}})[ALIGNED]["status"] == "unknown"
    assert examine(odd, [result("matmul/padded_vocab", 1.0, "same")])[ALIGNED]["status"] == "pass"


def test_the_dimensions_are_those_of_the_size_with_its_replacements():
    assert model_dimensions(CONFIG) == {"d_model": 256, "d_ff": 1024, "key and value width": 256, "vocab_size": 1024}
    grouped = {"model": {"size": "base", "kv_heads": 1, "d_ff": 100}}
    assert model_dimensions(grouped) == {"d_model": 256, "d_ff": 100, "key and value width": 64}


def test_a_negative_epsilon_is_found_without_a_measurement(examine):
    item = examine(with_stack("norm/dynamic_eps_as_written"))[EPSILON]
    assert item["status"] == "fail"
    assert item["measurement"]["epsilon"] < 0


@pytest.mark.parametrize("item", [EPSILON, GUARD])
def test_a_guard_is_needed_only_where_training_is_unstable(examine, item):
    assert examine(quality=stable("baseline", 0, 0))[item]["status"] == "pass"
    assert examine(quality=stable("baseline", 0.4, 7))[item]["status"] == "fail"
    assert examine(quality=stable("baseline", 0, 3))[item]["status"] == "warn"
    both = stable("baseline", 0, 0) + stable("baseline", 1.0, 50, stressed=True)
    assert examine(quality=both)[item]["status"] == "fail", "the stressed learning rate counts"


def test_a_guard_in_use_is_judged_by_its_own_runs(examine):
    rows = stable("baseline", 1.0, 9) + stable("attention/qk_norm", 0, 0)
    item = examine(with_stack("attention/qk_norm"), quality=rows)[GUARD]
    assert (item["status"], item["measurement"]["recipe"]) == ("pass", "attention/qk_norm")


def test_pooling_already_there_softens_a_gain_left_over(examine):
    rows = [result("graph/allocator", 0.8, "faster")]
    assert examine(results=rows)[POOL]["status"] == "warn"
    assert examine({**CONFIG, "measure": {"environment": {}}}, rows)[POOL]["status"] == "fail"
    assert examine(with_stack("graph/allocator"), rows)[POOL]["status"] == "pass"


@pytest.mark.parametrize(("share", "status"), [(0.001, "pass"), (0.05, "warn"), (0.4, "fail")])
def test_the_loader_is_judged_by_the_share_of_waiting(examine, share, status):
    row = result("dataloader/workers_2", 1.0, "same", metric="wait_share", baseline_value=share)
    assert examine(results=[row])[LOADER]["status"] == status


def test_the_loader_alone_against_the_step_where_no_share_was_measured(examine):
    loads = result("dataloader/workers_2", 1.0, "same", metric="tokens_per_s", workload="loading", baseline_value=3e6)
    trains = result("attention/chunked", 1.0, "same", metric="tokens_per_s", baseline_value=1e4)
    item = examine(results=[loads, trains])[LOADER]
    assert item["status"] == "pass"
    assert "300.0 times" in item["why"]


def test_the_lines_hold_machine_reasons_and_points():
    text = "\n".join(doctor_lines(doctor(CONFIG, None)))
    assert HERE in text
    for item in (ALIGNED, EPSILON, GUARD, POOL, MIXED, LOADER):
        assert item in text
