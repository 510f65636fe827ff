"""What else the host does while a block is timed: waiting for a core, other processes, clock, throttling (no torch)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WAITING_SHARE = 0.10  # of the threads' time spent runnable but without a core: `contention` (2–7 % on an idle machine)
OTHERS_SHARE = 0.15  # of the cores that we need, taken by other processes: `contention`
SPARE_SHARE = 0.25  # and of those that we leave free
LOW_CLOCK = 0.8  # of the frequency seen at the start of the sample


@dataclass(frozen=True)
class HostState:
    """One reading of the host; None where this system does not tell."""

    time_s: float
    waiting_s: Mapping[int, float] = field(default_factory=dict)  # thread → seconds runnable without a core
    busy_s: float | None = None  # all cores, all processes, stolen time included
    own_cpu_s: float = 0.0  # this process, its ended children and its living descendants
    descendants: int = 0  # loader workers, the other ranks of a distributed step
    load: float | None = None
    mhz: float | None = None
    throttled: int | None = None  # thermal throttling events

    def summary(self) -> dict[str, float | int | None]:
        """What is kept of a reading beside each block."""
        return {"load": self.load, "mhz": self.mhz, "throttled": self.throttled}


def read_state() -> HostState:
    """Read the host's state now (about 0.1 ms; never inside a timed block)."""
    times = os.times()
    living = _descendants(os.getpid())
    ended = times.children_user + times.children_system
    return HostState(
        time_s=time.perf_counter(),
        waiting_s=_waiting(),
        busy_s=_busy(),
        own_cpu_s=times.user + times.system + ended + sum(map(_cpu_s, living)),
        descendants=len(living),
        load=os.getloadavg()[0],
        mhz=_mhz(),
        throttled=_throttled(),
    )


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _waiting() -> dict[int, float]:
    waiting = {}
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        words = _read(task / "schedstat").split()
        if len(words) == 3:
            waiting[int(task.name)] = int(words[1]) / 1e9
    return waiting


def _descendants(pid: int) -> list[int]:
    found = []
    tasks = Path(f"/proc/{pid}/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        for child in map(int, _read(task / "children").split()):
            found += [child, *_descendants(child)]
    return found


def _cpu_s(pid: int) -> float:
    """CPU seconds of a living process and of its ended children; 0 for one that has just gone."""
    words = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK") if len(words) > 14 else 0.0


def _busy() -> float | None:
    words = _read("/proc/stat").partition("\n")[0].split()
    if len(words) < 9:
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(word) for word in words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _mhz() -> float | None:
    kilohertz = [_read(p).strip() for p in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")]
    values = [int(text) / 1e3 for text in kilohertz if text.isdigit()]
    return sum(values) / len(values) if values else None


def _throttled() -> int | None:
    paths = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    counts = [text for path in paths if (text := _read(path).strip()).isdigit()]
    return sum(map(int, counts)) if counts else None


@dataclass(frozen=True)
class Disturbance:
    """What happened between two readings: shares (fractions) of the threads' or cores' time, None = not readable."""

    waiting_share: float | None
    others_cores: float | None
    throttle_events: int | None
    clock_ratio: float | None

    def badges(self, threads: int, cores: int) -> tuple[str, ...]:
        """Red badges: `contention`, `throttling`, `low_clock`."""
        found = []
        # A neighbour on a core that we leave free still shares its execution units (virtual cores are often two threads
        # of one), caches and clock: a step of one thread was seen to take 1.7 times as long beside one.
        allowed = OTHERS_SHARE * threads + SPARE_SHARE * max(0, cores - threads)
        crowded = self.others_cores is not None and self.others_cores > allowed
        if crowded or (self.waiting_share or 0.0) > WAITING_SHARE:
            found.append("contention")
        if self.throttle_events:
            found.append("throttling")
        if self.clock_ratio is not None and self.clock_ratio < LOW_CLOCK:
            found.append("low_clock")
        return tuple(found)


def disturbance(before: HostState, after: HostState, threads: int) -> Disturbance:
    """Compare two readings around a stretch of work on `threads` threads."""
    wall = max(after.time_s - before.time_s, 1e-9)
    waited = sum(seconds - before.waiting_s.get(task, 0.0) for task, seconds in after.waiting_s.items())
    # Processes of the arm's own that wait for one another's cores are a part of what it costs, not a disturbance.
    tells = bool(after.waiting_s) and not after.descendants
    others = None
    if before.busy_s is not None and after.busy_s is not None:
        own = after.own_cpu_s - before.own_cpu_s
        # Kernel ticks are 10 ms each: below a few of them the difference says nothing.
        others = max(0.0, after.busy_s - before.busy_s - own) / wall if wall > 0.1 else None
    known = before.throttled is not None and after.throttled is not None
    return Disturbance(
        waiting_share=waited / (wall * threads) if tells else None,
        others_cores=others,
        throttle_events=after.throttled - before.throttled if known else None,
        clock_ratio=after.mhz / before.mhz if before.mhz and after.mhz else None,
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
