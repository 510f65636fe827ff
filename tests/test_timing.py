"""The clock on a scripted device: warm-up, calibration, recompilations, slow-downs, the collector, CUDA events."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmperf.devices import BlockTime, CpuDevice, CudaDevice, FakeDevice, get_device
from lmperf.hoststate import Disturbance, HostState, disturbance, read_state
from lmperf.records import InputError
from lmperf.timing import TimingPlan, block_steps, is_flat, measure, quiet_collector, warm_up

PLAN = TimingPlan(blocks=5, block_s=0.1, warmup_s=0.5, warmup_steps=3, warmup_cap_s=5.0)


def scripted(device: FakeDevice, seconds: Callable[[int], float]) -> tuple[Callable[[], None], list[int]]:
    """A step whose n-th call (from 0) takes `seconds(n)`."""
    calls = [0]

    def step() -> None:
        device.spend(seconds(calls[0]))
        calls[0] += 1

    return step, calls


def test_a_steady_step_is_timed_in_blocks_of_the_calibrated_length() -> None:
    device = FakeDevice()
    step, _ = scripted(device, lambda n: 0.01)
    timing = measure(step, device, PLAN)
    assert timing.steps_per_block == 10
    assert timing.step_times == pytest.approx([0.01] * 5)
    assert timing.warmup.stationary
    assert timing.warmup.seconds >= 0.5
    assert timing.first_step_s == pytest.approx(0.01)


def test_the_first_step_is_told_apart_and_not_part_of_the_steady_time() -> None:
    device = FakeDevice()
    step, _ = scripted(device, lambda n: 7.0 if n == 0 else 0.02)
    timing = measure(step, device, PLAN)
    assert timing.first_step_s == pytest.approx(7.0)
    assert timing.step_time_s == pytest.approx(0.02)


def test_warm_up_goes_on_until_a_falling_curve_is_flat() -> None:
    device = FakeDevice()
    step, calls = scripted(device, lambda n: 0.01 * (1 + 4 * math.exp(-n / 40)))
    timing = measure(step, device, PLAN)
    assert timing.warmup.stationary
    assert timing.warmup.seconds > 0.6
    assert timing.step_time_s < 0.0106
    assert timing.warmup.curve[0] > timing.warmup.curve[-1]


def test_a_curve_that_never_becomes_flat_stops_at_the_cap_and_says_so() -> None:
    device = FakeDevice()
    step, _ = scripted(device, lambda n: 0.01 * 1.03**n)
    warmup = warm_up(step, device, PLAN)
    assert not warmup.stationary
    assert PLAN.warmup_cap_s <= warmup.seconds < 3 * PLAN.warmup_cap_s


def test_steps_slower_than_the_cap_still_give_four_warm_up_blocks() -> None:
    device = FakeDevice()
    step, _ = scripted(device, lambda n: 30.0)
    warmup = warm_up(step, device, PLAN)
    assert len(warmup.curve) == 4
    assert warmup.stationary


@given(st.lists(st.floats(1e-6, 10.0), min_size=4, max_size=30))
def test_flatness_does_not_depend_on_the_unit(curve: list[float]) -> None:
    assert is_flat(curve) == is_flat([1024 * value for value in curve])


def test_flat_needs_both_a_near_level_and_a_narrow_middle() -> None:
    assert is_flat([1.0] * 10)
    assert not is_flat([1.2] * 5 + [1.0] * 5)
    assert not is_flat([1.0] * 5 + [0.7, 1.3, 1.0, 0.7, 1.3])
    assert is_flat([9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0])


@given(st.floats(1e-6, 1.0), st.sampled_from([0.0, 0.02, 0.05, 0.2, 0.5, 1.0]))
def test_a_block_is_long_enough_and_repeats_just_the_injected_share(step_s: float, slowdown: float) -> None:
    steps, extra = block_steps(step_s, 0.1, slowdown)
    assert steps * step_s >= 0.1 * (1 - 1e-9)
    assert extra == pytest.approx(steps * slowdown)


def test_an_injected_slow_down_shows_as_its_share() -> None:
    device = FakeDevice()
    step, _ = scripted(device, lambda n: 0.001)
    plain, slowed = measure(step, device, PLAN), measure(step, device, PLAN, slowdown=0.05)
    assert slowed.step_time_s / plain.step_time_s == pytest.approx(1.05)


def test_a_block_with_a_recompilation_inside_is_thrown_away_and_counted() -> None:
    device, compiled, due = FakeDevice(), [0], [False]

    def step() -> None:
        device.spend(3.0 if due[0] else 0.05)
        compiled[0] += due[0]
        due[0] = False

    def arm() -> None:
        due[0] = True  # the first step of the first timed block compiles again

    timing = measure(step, device, PLAN, compiled=lambda: compiled[0], before_blocks=arm)
    assert timing.recompiled_blocks == 1
    assert timing.step_times == pytest.approx([0.05] * 5)


def test_endless_recompilation_ends_and_keeps_the_count() -> None:
    device, compiled = FakeDevice(), [0]

    def step() -> None:
        compiled[0] += 1
        device.spend(0.05)

    timing = measure(step, device, PLAN, compiled=lambda: compiled[0])
    assert len(timing.blocks) == 5
    assert timing.recompiled_blocks == 10


def test_hooks_run_outside_the_clock() -> None:
    device = FakeDevice()
    seen: list[str] = []
    step, _ = scripted(device, lambda n: 0.05)

    def slow_hook() -> None:
        device.spend(1.0)
        seen.append("block")

    timing = measure(step, device, PLAN, before_blocks=lambda: seen.append("blocks"), before_block=slow_hook)
    assert timing.step_time_s == pytest.approx(0.05)
    assert seen[-6:] == ["blocks"] + ["block"] * 5


def test_the_collector_sleeps_in_blocks_and_wakes_after() -> None:
    assert gc.isenabled()
    with quiet_collector():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_device_that_waits_for_the_host_is_called_host_bound() -> None:
    for share, expected in ((0.3, True), (0.95, False), (None, False)):
        device = FakeDevice(device_share=share)
        step, _ = scripted(device, lambda n, d=device: 0.05)
        assert measure(step, device, PLAN).host_bound is expected


class FakeCuda:
    """The functions of `torch.cuda` that the clock uses, on a clock of its own (milliseconds)."""

    def __init__(self) -> None:
        self.queued_ms = self.done_ms = 0.0
        self.synchronised = 0

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.queued_ms)
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def synchronize(self) -> None:
        self.done_ms = self.queued_ms
        self.synchronised += 1

    def reset_peak_memory_stats(self) -> None:
        self.peak = 0

    def mem_get_info(self) -> tuple[int, int]:
        return 60, 100

    def memory_allocated(self) -> int:
        return 7

    def max_memory_allocated(self) -> int:
        return 30

    def max_memory_reserved(self) -> int:
        return 35

    def clock_rate(self) -> int:
        self.clock = getattr(self, "clock", 2000) - 150
        return self.clock


def test_cuda_blocks_use_one_event_pair_a_step_and_one_synchronisation_at_the_end() -> None:
    api = FakeCuda()
    block = CudaDevice(api).block(lambda: setattr(api, "queued_ms", api.queued_ms + 4.0), 5)
    assert block.device_s == pytest.approx(0.020)
    assert api.synchronised == 2  # before the clock starts, and at the end of the block
    assert api.done_ms == 20.0


def test_a_falling_clock_of_the_device_is_badged_and_kept_beside_each_block() -> None:
    api = FakeCuda()
    timing = measure(
        lambda: setattr(api, "queued_ms", api.queued_ms + 4.0), CudaDevice(api), replace(PLAN, block_s=1e-6)
    )
    assert len(timing.states) == 10
    assert timing.states[0].mhz == 1850
    assert "low_clock" in timing.disturbance.badges(1, 1)


def test_a_device_without_management_library_has_no_clock() -> None:
    assert CudaDevice(object()).clock_mhz() is None


def test_cuda_memory_counts_what_other_processes_hold_too() -> None:
    assert CudaDevice(FakeCuda()).memory() == {
        "allocated": 7, "allocated_peak": 30, "reserved_peak": 35, "device_in_use": 40,
    }  # fmt: skip


def test_the_cpu_clock_tells_wall_and_cpu_time_apart() -> None:
    block = CpuDevice().block(lambda: time.sleep(0.02), 2)
    assert isinstance(block, BlockTime)
    assert block.wall_s >= 0.04
    assert block.cpu_s < block.wall_s


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InputError, match="tpu"):
        get_device("tpu")


@pytest.fixture
def before() -> HostState:
    return HostState(time_s=0.0, waiting_s={1: 0.5}, busy_s=10.0, own_cpu_s=4.0, mhz=3000.0, throttled=2)


@pytest.mark.parametrize(
    ("after", "badges"),
    [
        (HostState(1.0, {1: 0.52}, 11.0, 5.0, mhz=2990.0, throttled=2), ()),
        (HostState(1.0, {1: 0.75}, 11.0, 5.0, mhz=3000.0, throttled=2), ("contention",)),
        (HostState(1.0, {1: 0.5, 9: 0.3}, 11.0, 5.0, mhz=3000.0, throttled=2), ("contention",)),
        (HostState(1.0, {1: 0.5}, 13.0, 5.0, mhz=3000.0, throttled=2), ("contention",)),
        (HostState(1.0, {1: 0.5}, 11.0, 5.0, mhz=3000.0, throttled=3), ("throttling",)),
        (HostState(1.0, {1: 0.5}, 11.0, 5.0, mhz=2000.0, throttled=2), ("low_clock",)),
        (HostState(1.0, {1: 0.70}, 11.0, 5.0, descendants=2, mhz=3000.0, throttled=2), ()),  # its own workers
        (HostState(1.0, {}, None, 5.0), ()),
    ],
)
def test_what_disturbs_a_block_is_badged(before: HostState, after: HostState, badges: tuple[str, ...]) -> None:
    assert disturbance(before, after, threads=2).badges(threads=2, cores=2) == badges


def test_a_neighbour_on_one_of_few_spare_cores_disturbs_and_on_one_of_many_does_not() -> None:
    found = Disturbance(waiting_share=0.0, others_cores=1.0, throttle_events=None, clock_ratio=None)
    assert found.badges(threads=1, cores=2) == ("contention",)
    assert found.badges(threads=2, cores=2) == ("contention",)
    assert found.badges(threads=2, cores=16) == ()


def test_the_host_can_be_read_here() -> None:
    first, second = read_state(), read_state()
    assert second.time_s > first.time_s
    assert second.own_cpu_s >= first.own_cpu_s


def test_what_living_children_compute_is_counted_as_the_own_work() -> None:
    before = read_state()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        deadline = time.monotonic() + 10
        while (after := read_state()).own_cpu_s < before.own_cpu_s + 0.3 and time.monotonic() < deadline:
            time.sleep(0.05)
        child.kill()
    assert after.descendants == before.descendants + 1
    assert after.own_cpu_s >= before.own_cpu_s + 0.3
