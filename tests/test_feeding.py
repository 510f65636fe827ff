"""Loaders against training steps: whose time per batch is the shortest step it feeds, and when that is a bottleneck."""

import pytest

from lmperf.feeding import loader_lines


def row(variant, metric, value, **changes):
    """One line of results.csv as read."""
    base = {"axis": "dataloader", "session": "dataloader.loading", "workload": "loading", "shape": "batch=2 length=64"}
    same = {"fingerprint": "m", "device": "cpu", "dtype": "float32"}
    return {**base, **same, "variant": variant, "metric": metric, "value": value, **changes}


STEP = row("baseline", "step_time_s", "0.01", axis="norm", session="norm.training_step", workload="training_step")
LOADING = [
    row("baseline", "step_time_s", "0.0001"),
    row("baseline_prime", "step_time_s", "0.0001"),
    row("small_files", "step_time_s", "0.045"),
    row("baseline", "worker_start_s", "0.002"),
    row("small_files", "worker_pss_bytes", "1024"),
]


def test_a_loader_is_the_bottleneck_of_steps_shorter_than_its_batch():
    first, second = loader_lines([STEP, *LOADING], "dataloader.loading", "arrow_mmap")
    assert (first["loader"], first["bottleneck"], first["worker_start_s"]) == ("arrow_mmap (baseline)", False, 0.002)
    assert (second["loader"], second["bottleneck"], second["feeds_s"]) == ("small_files", True, 0.045)
    assert (second["step_s"], second["worker_pss_bytes"], first["worker_pss_bytes"]) == (0.01, 1024, None)


@pytest.mark.parametrize("other", [{"fingerprint": "n"}, {"shape": "batch=4 length=64"}, {"variant": "rmsnorm"}])
def test_another_machine_or_shape_gives_no_step_to_stand_beside(other):
    lines = loader_lines([{**STEP, **other}, *LOADING], "dataloader.loading", "")
    assert [(line["step_s"], line["bottleneck"]) for line in lines] == [(None, None)] * 2


def test_waiting_in_the_step_is_told_and_feeds_nothing():
    lines = (LOADING[0], row("baseline", "wait_share", "0.3"))
    waiting = [{**line, "session": "s", "workload": "loading_in_step"} for line in lines]
    (line,) = loader_lines([STEP, *waiting], "s", "")
    assert (line["wait_share"], line["feeds_s"], line["bottleneck"]) == (0.3, None, None)
