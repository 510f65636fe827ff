"""The small interface between the clock and a device: CPU, CUDA, and a scripted device for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lmperf.records import InputError

Step = Callable[[], Any]


@dataclass(frozen=True)
class BlockTime:
    """One block of `steps` calls in seconds: host wall, CPU of all threads, sum of device events (None on CPU)."""

    steps: int
    wall_s: float
    cpu_s: float
    device_s: float | None = None

    @property
    def step_s(self) -> float:
        """Mean wall seconds of one step."""
        return self.wall_s / self.steps


class Device(Protocol):
    """What timing and memory need of a device."""

    name: str

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        ...

    def synchronise(self) -> None:
        """Return when all queued work is done."""
        ...

    def block(self, step: Step, steps: int) -> BlockTime:
        """Run `step` `steps` times and time them as one block, ended by one synchronisation."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak of device memory."""
        ...

    def memory(self) -> dict[str, int]:
        """Device memory counters in bytes; empty where the device has none of its own."""
        ...

    def clock_mhz(self) -> float | None:
        """The device's own clock now; None where it has none or does not tell."""
        ...


class CpuDevice:
    """The host's clock, with the CPU time of all threads of the process beside it."""

    name = "cpu"

    def now(self) -> float:
        return time.perf_counter_ns() / 1e9

    def synchronise(self) -> None:
        return None

    def block(self, step: Step, steps: int) -> BlockTime:
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(steps):
            step()
        wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        return BlockTime(steps, max(wall, 1) / 1e9, cpu / 1e9)

    def reset_peak(self) -> None:
        return None

    def memory(self) -> dict[str, int]:
        return {}

    def clock_mhz(self) -> float | None:
        return None


class CudaDevice:
    """CUDA events around each step, one synchronisation a block, and the host's clock around both.

    `api` is `torch.cuda`, or an object with the same functions where no GPU is there (tests).
    """

    name = "cuda"

    def __init__(self, api: Any = torch.cuda) -> None:
        self.api = api

    def now(self) -> float:
        return time.perf_counter_ns() / 1e9

    def synchronise(self) -> None:
        self.api.synchronize()

    def block(self, step: Step, steps: int) -> BlockTime:
        events = [(self.api.Event(enable_timing=True), self.api.Event(enable_timing=True)) for _ in range(steps)]
        self.synchronise()  # nothing queued earlier may run into this block
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for start, end in events:
            start.record()
            step()
            end.record()
        self.synchronise()
        wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        device_s = sum(start.elapsed_time(end) for start, end in events) / 1e3
        return BlockTime(steps, max(wall, 1) / 1e9, cpu / 1e9, device_s)

    def reset_peak(self) -> None:
        self.api.reset_peak_memory_stats()

    def memory(self) -> dict[str, int]:
        free, total = self.api.mem_get_info()
        return {
            "allocated": self.api.memory_allocated(),
            "allocated_peak": self.api.max_memory_allocated(),
            "reserved_peak": self.api.max_memory_reserved(),
            "device_in_use": total - free,
        }

    def clock_mhz(self) -> float | None:
        try:
            return float(self.api.clock_rate())
        except (ImportError, RuntimeError, AttributeError):  # it needs NVIDIA's management library and its bindings
            return None


@dataclass
class FakeDevice:
    """A device whose clock moves only when a step calls `spend`: tests script warm-up curves and blocks with it."""

    name: str = "fake"
    time_s: float = 0.0
    cpu_share: float = 1.0
    device_share: float | None = None
    calls: list[int] = field(default_factory=list)

    def spend(self, seconds: float) -> None:
        """Let the clock move on."""
        self.time_s += seconds

    def now(self) -> float:
        return self.time_s

    def synchronise(self) -> None:
        return None

    def block(self, step: Step, steps: int) -> BlockTime:
        start = self.time_s
        for _ in range(steps):
            step()
        self.calls.append(steps)
        wall = self.time_s - start
        device_s = None if self.device_share is None else wall * self.device_share
        return BlockTime(steps, wall, wall * self.cpu_share, device_s)

    def reset_peak(self) -> None:
        return None

    def memory(self) -> dict[str, int]:
        return {}

    def clock_mhz(self) -> float | None:
        return None


def get_device(name: str) -> Device:
    """The device of this name; a CUDA device that is not there is an `InputError`."""
    kind = name.split(":")[0]
    if kind == "cpu":
        return CpuDevice()
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device {name!r} is not there: torch sees no CUDA device; allowed here: cpu")
        return CudaDevice()
    raise InputError(f"device {name!r} is unknown; allowed: cpu, cuda")
