"""The clock: first step, adaptive warm-up with its curve, calibrated blocks, recompilations, the garbage collector."""

from __future__ import annotations

import gc
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lmperf.devices import BlockTime, Device, Step
from lmperf.hoststate import Disturbance, HostState, disturbance, read_state
from lmperf.records import SessionSpec

NEAR = 0.05  # the last warm-up blocks' median lies this near the median of those before
FLAT = 0.15  # and their middle half is no wider than this
WINDOW = 5  # blocks compared with the same number before
HOST_BOUND = 0.7  # device events below this share of the wall time
MOST_RECOMPILED = 2  # times `blocks` attempts before giving up on undisturbed blocks


@dataclass(frozen=True)
class TimingPlan:
    """How long to warm up and what to time (seconds, steps)."""

    blocks: int = 5
    block_s: float = 0.1
    warmup_s: float = 0.5
    warmup_steps: int = 3
    warmup_cap_s: float = 5.0
    threads: int = 1

    @classmethod
    def of(cls, spec: SessionSpec) -> TimingPlan:
        """The plan that a session's spec asks for."""
        return cls(spec.blocks, spec.block_s, spec.warmup_s, spec.warmup_steps, spec.warmup_cap_s, spec.threads)


@dataclass(frozen=True)
class Warmup:
    """The warm-up: mean step seconds of each warm-up block, whether it ended flat, and its length."""

    curve: tuple[float, ...]
    stationary: bool
    seconds: float
    steps: int


@dataclass(frozen=True)
class Timing:
    """All that one process learnt about the time of a step; times in seconds."""

    first_step_s: float
    warmup: Warmup
    steps_per_block: int
    blocks: tuple[BlockTime, ...]
    recompiled_blocks: int
    disturbance: Disturbance  # over all timed blocks together
    extra_steps: int = 0  # a block's share of repeated steps (injected slow-down)
    states: tuple[HostState, ...] = field(default=(), repr=False)  # before and after each block

    @property
    def step_times(self) -> tuple[float, ...]:
        """Seconds of one step for each block; steps repeated on purpose count as time, not as steps."""
        return tuple(block.wall_s / (block.steps - self.extra_steps) for block in self.blocks)

    @property
    def step_time_s(self) -> float:
        """Median of the blocks' means."""
        return statistics.median(self.step_times)

    @property
    def timed_s(self) -> float:
        """Seconds spent in timed blocks."""
        return sum(block.wall_s for block in self.blocks)

    @property
    def host_bound(self) -> bool:
        """Whether the device sat idle for a large part of the blocks."""
        shares = [b.device_s / b.wall_s for b in self.blocks if b.device_s is not None]
        return bool(shares) and statistics.median(shares) < HOST_BOUND

    @property
    def cores_used(self) -> float:
        """CPU seconds of all threads for one second of wall time, over all blocks."""
        return sum(block.cpu_s for block in self.blocks) / self.timed_s


def compile_count() -> int:
    """How many graphs `torch.compile` has compiled in this process (0 where dynamo was never loaded)."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    return int(dynamo.counters["stats"]["unique_graphs"]) + int(dynamo.counters["frames"]["total"])


def measure(
    step: Step,
    device: Device,
    plan: TimingPlan,
    *,
    slowdown: float = 0.0,
    compiled: Callable[[], int] = compile_count,
    phase: Callable[[str], Any] = lambda name: None,
    before_blocks: Callable[[], Any] = lambda: None,
    before_block: Callable[[], Any] = lambda: None,
) -> Timing:
    """Time `step`: first call, warm-up until flat, then `plan.blocks` blocks of calibrated length.

    `slowdown` repeats that share of the steps of a block (qualification: a known amount of extra work).
    `before_blocks` runs once when warm-up is over, `before_block` before every block, both outside the clock.
    """
    phase("warm-up")
    before_block()
    first = device.block(step, 1).wall_s
    warmup = warm_up(step, device, plan, before_block)
    estimate = statistics.median(warmup.curve[-WINDOW:])
    steps, extra = block_steps(estimate, plan.block_s, slowdown)
    phase("timing")
    before_blocks()
    blocks, recompiled, states = _timed_blocks(step, device, plan, steps + extra, compiled, before_block)
    return Timing(
        first_step_s=first,
        warmup=warmup,
        steps_per_block=steps,
        blocks=blocks,
        recompiled_blocks=recompiled,
        disturbance=disturbance(states[0], states[-1], plan.threads),
        extra_steps=extra,
        states=states,
    )


def warm_up(step: Step, device: Device, plan: TimingPlan, before_block: Callable[[], Any] = lambda: None) -> Warmup:
    """Run short blocks until the plan's minimum is met and the curve is flat, or the cap is reached.

    Steps so slow that the cap holds fewer than four of them are judged on what there is, and never on fewer than four.
    """
    curve: list[float] = []
    start, steps_done, steps = device.now(), 0, 1
    while True:
        before_block()
        block = device.block(step, steps)
        curve.append(block.step_s)
        steps_done += steps
        elapsed = device.now() - start
        steps = max(1, round(plan.block_s / 2 / max(block.step_s, 1e-9)))
        enough = elapsed >= plan.warmup_s and steps_done >= plan.warmup_steps
        if enough and len(curve) >= 2 * WINDOW and is_flat(curve):
            return Warmup(tuple(curve), True, elapsed, steps_done)
        if elapsed >= plan.warmup_cap_s and enough and len(curve) >= 4:
            return Warmup(tuple(curve), is_flat(curve), elapsed, steps_done)


def is_flat(curve: Sequence[float]) -> bool:
    """Whether the last blocks (five, or half of a short curve) are flat and near as many before them.

    Near is within 5 %, or within what the blocks' own spread makes of a median of so few of them.
    """
    width = min(WINDOW, len(curve) // 2)
    last, earlier = list(curve[-width:]), list(curve[-2 * width : -width])
    centre = statistics.median(last)
    spread = _middle_half(last) / centre
    near = abs(centre / statistics.median(earlier) - 1) <= max(NEAR, spread / math.sqrt(width))
    return near and spread <= FLAT


def _middle_half(values: Sequence[float]) -> float:
    if len(values) < 4:
        return max(values) - min(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def block_steps(step_s: float, block_s: float, slowdown: float = 0.0) -> tuple[int, int]:
    """(steps, repeated steps) of one block that lasts at least `block_s` seconds.

    With an injected slow-down the block is lengthened until the repeated share is a whole number of steps.
    """
    steps = max(1, math.ceil(block_s / max(step_s, 1e-9)))
    if slowdown <= 0:
        return steps, 0
    period = max(1, round(1 / slowdown)) if slowdown < 1 else 1
    steps = math.ceil(steps / period) * period
    return steps, max(1, round(steps * slowdown))


def _timed_blocks(
    step: Step,
    device: Device,
    plan: TimingPlan,
    steps: int,
    compiled: Callable[[], int],
    before_block: Callable[[], Any],
) -> tuple[tuple[BlockTime, ...], int, tuple[HostState, ...]]:
    """Blocks without a recompilation inside; a block that had one is thrown away, counted and tried again."""
    blocks: list[BlockTime] = []
    states: list[HostState] = []
    recompiled = 0
    with quiet_collector():
        while len(blocks) < plan.blocks:
            before_block()
            count, before = compiled(), host_and_device(device)
            block = device.block(step, steps)
            if compiled() != count and recompiled < MOST_RECOMPILED * plan.blocks:
                recompiled += 1
                continue
            blocks.append(block)
            states += [before, host_and_device(device)]
    return tuple(blocks), recompiled, tuple(states)


def host_and_device(device: Device) -> HostState:
    """The host's state, with the device's clock in place of the CPU's where it tells one."""
    state, clock = read_state(), device.clock_mhz()
    return state if clock is None else replace(state, mhz=clock)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Collect, freeze and disable the garbage collector together: none alone keeps it out of a block."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
