"""Recording a few steps with the PyTorch profiler, and keeping the trace on disk within a budget by recording less."""

from __future__ import annotations

import gzip
import logging
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from lmperf.provenance import scrub
from lmperf.records import CheckFailed

log = logging.getLogger(__name__)

WAIT, WARMUP, ACTIVE = 1, 1, 3
BYTES_AN_EVENT = (
    20  # of a gzip trace, on the low side: only recordings that are hopelessly large are not written at all
)


@dataclass(frozen=True)
class Detail:
    """How much is recorded; the levels below are tried in order until the trace fits."""

    shapes: bool = True
    memory: bool = True
    active: int = ACTIVE

    @property
    def words(self) -> str:
        """What is recorded, for messages."""
        kept = [name for name, on in (("shapes", self.shapes), ("memory", self.memory)) if on]
        return f"{self.active} step{'s' if self.active > 1 else ''} with {' and '.join(kept) or 'operators only'}"


LEVELS = (Detail(), Detail(memory=False), Detail(shapes=False, memory=False), Detail(False, False, 1))


@dataclass(frozen=True)
class Recording:
    """A finished recording: the profiler object, wall seconds of each active step, and how much was recorded."""

    profiler: profile
    step_s: tuple[float, ...]
    detail: Detail


@dataclass(frozen=True)
class Trace:
    """The trace that was kept (None when none fits) and what had to be left out."""

    path: Path | None
    size: int | None
    detail: Detail | None
    messages: tuple[str, ...]


def activities(device: str) -> list[ProfilerActivity]:
    """CPU, and CUDA where the step runs on it."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]


def record(
    step: Callable[[], object], device: str, detail: Detail, on_ready: Callable[[profile], None] | None = None
) -> Recording:
    """Run `step` under the schedule wait 1 / warm-up 1 / active 3; `CheckFailed` when nothing was recorded."""
    seconds: list[float] = []
    plan = schedule(wait=WAIT, warmup=WARMUP, active=detail.active, repeat=1)
    synchronise = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    with profile(
        activities=activities(device), schedule=plan, record_shapes=detail.shapes, profile_memory=detail.memory,
        with_flops=detail.shapes, on_trace_ready=on_ready,
    ) as profiler:  # fmt: skip
        for _ in range(WAIT + WARMUP + detail.active):
            synchronise()
            start = time.perf_counter()
            step()
            synchronise()
            seconds.append(time.perf_counter() - start)
            profiler.step()
    if not profiler.events():
        raise CheckFailed("the profiler recorded no event: fewer steps than its schedule needs?")
    return Recording(profiler, tuple(seconds[WAIT + WARMUP :]), detail)


def record_within(step: Callable[[], object], device: str, out: Path, budget: int) -> tuple[Recording, Trace]:
    """The full recording (for tables) and the most detailed trace of at most `budget` bytes, gzip, in `out`."""
    full: Recording | None = None
    messages: list[str] = []
    for detail in LEVELS:
        with trace_folder(out) as folder:
            write = TraceWriter(folder, budget)
            recording = record(step, device, detail, write)
            full = full or recording
            if write.path is not None and write.size <= budget:
                path = keep(write.path, out)
                return full, Trace(path, write.size, detail, tuple(messages))
        messages.append(
            f"{detail.words} is over the trace budget of {budget} bytes ({write.estimate} bytes): recording less"
        )
        log.warning("%s", messages[-1])
    remove(out.glob("*.pt.trace.json.gz"))  # one of an earlier run would pass for this one's
    messages.append(f"no trace fits the budget of {budget} bytes: none was kept")
    log.warning("%s", messages[-1])
    return full, Trace(None, None, None, tuple(messages))


class TraceWriter:
    """PyTorch's TensorBoard handler behind a look at the number of events, so that no huge file is ever written."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder, budget
        self.path: Path | None = None
        self.size = self.estimate = 0

    def __call__(self, profiler: profile) -> None:
        self.estimate = BYTES_AN_EVENT * len(profiler.profiler.kineto_results.events())
        if self.estimate > self.budget:
            return
        # The handler's default name holds the host's name.
        tensorboard_trace_handler(str(self.folder), worker_name="baseline", use_gzip=True)(profiler)
        self.path = next(self.folder.glob("*.pt.trace.json.gz"))
        anonymise(self.path)
        self.size = self.estimate = self.path.stat().st_size


def anonymise(path: Path) -> None:
    """Cut paths and names of hosts out of a gzip trace, in place."""
    quoted = re.compile(r'"(?:[^"\\]|\\.)*/(?:[^"\\]|\\.)*"')
    host = re.compile(r'("host_name"\s*:\s*)"[^"]*"')
    new = path.with_suffix(".new")
    with gzip.open(path, "rt", encoding="utf-8") as old, gzip.open(new, "wt", encoding="utf-8") as out:
        for line in old:
            line = quoted.sub(lambda found: scrub(found[0]), line) if "/" in line else line
            out.write(host.sub(r'\1""', line) if "host_name" in line else line)
    os.replace(new, path)


@contextmanager
def trace_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside the traces, removed afterwards."""
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".trace-", dir=out.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep(path: Path, out: Path) -> Path:
    """Move a finished trace into `out` and remove the traces of earlier runs."""
    old = list(out.glob("*.pt.trace.json.gz"))
    kept = out / path.name
    os.replace(path, kept)
    remove(old)
    return kept


def remove(paths: Iterable[Path]) -> None:
    """Delete files."""
    for path in paths:
        path.unlink(missing_ok=True)


def overhead(recording: Recording, plain_s: float) -> float:
    """Profiled over plain step time."""
    return statistics.median(recording.step_s) / plain_s
