"""Process samples: fork servers with a fixed environment, one fresh process a job, limits, and typed outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from lmperf.environments import inherited_with

GRACE_S = 20.0  # beyond a job's time limit before the server itself is given up
START_S = 180.0  # a cold disk can make importing torch slow
PRELOAD = ("torch", "torch.optim", "torch._dynamo", "lmperf.sampling:load_everything")


@dataclass(frozen=True)
class Outcome:
    """What became of one job: `value` of its function when ok, else status, reason and the phase it died in."""

    status: str
    reason: str | None = None
    phase: str | None = None
    value: Any = None
    peak_rss_bytes: int | None = None
    wall_s: float | None = None
    trace: Sequence[str] = ()


@dataclass
class ForkServer:
    """A server process for one environment; jobs run one at a time, each in a fresh process of its own.

    `spawn`: each job starts a new Python instead of a fork (CUDA, macOS).  Use as a context manager.
    """

    environment: Mapping[str, str]
    spawn: bool = False
    preload: Sequence[str] = PRELOAD
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    buffer: bytes = field(default=b"", repr=False)
    hello: dict[str, Any] = field(default_factory=dict, repr=False)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the server if it is not running; raises `RuntimeError` when it cannot import what it must."""
        self.launch()
        if self.hello:
            return
        answer = self._read(START_S)
        if answer is None:
            self.close()
            raise RuntimeError("the fork server did not start; its messages are above")
        self.hello = answer

    def launch(self) -> None:
        """Start the server's process without waiting: it imports torch while its owner does the same."""
        if self.process is not None and self.process.poll() is None:
            return
        owner, names = str(os.getpid()), () if self.spawn else self.preload
        command = [sys.executable, "-m", "lmperf.forkserver", "--serve", owner, *names]
        # Its own session: Ctrl-C must reach the owner only, which then ends the server in good order.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=inherited_with(self.environment),
            start_new_session=True,
        )  # fmt: skip
        self.buffer, self.hello = b"", {}

    def run(
        self,
        call: str,
        arguments: Mapping[str, Any],
        *,
        time_limit_s: float,
        memory_limit_bytes: int | None = None,
        scratch: Path | None = None,
    ) -> Outcome:
        """Run `module:function(arguments, phase)` in a fresh process under both limits and type what became of it."""
        with contextlib.ExitStack() as stack:
            folder = scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix="lmperf-"))
            self.start()
            job = {
                "call": call, "arguments": dict(arguments), "time_limit_s": time_limit_s, "spawn": self.spawn,
                "memory_limit_bytes": memory_limit_bytes or default_memory_limit(), "scratch": str(folder),
            }  # fmt: skip
            started = time.monotonic()
            answer = self._ask(job)
        if answer is None:
            self.close()
            return Outcome("crashed", "the fork server ended during this job", wall_s=time.monotonic() - started)
        return typed(answer, job)

    def _ask(self, job: Mapping[str, Any]) -> dict[str, Any] | None:
        if self.process is None or self.process.stdin is None:
            return None
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(job["time_limit_s"] + GRACE_S)

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """One line from the server, or None when it ended or said nothing for `seconds`."""
        if self.process is None or self.process.stdout is None:
            return None
        handle, deadline = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(handle, 1 << 16) if ready else b""
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """End the server and all that it started."""
        if self.process is None:
            return
        descendants = _descendants(self.process.pid)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in descendants:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self.process = None


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def typed(answer: Mapping[str, Any], job: Mapping[str, Any]) -> Outcome:
    """The outcome that a server's answer stands for."""
    common = {"phase": answer["phase"], "peak_rss_bytes": answer["peak_rss_bytes"], "wall_s": answer["wall_s"]}
    result, code = answer["result"], answer["exit"]
    if result is not None and "ok" in result:
        return Outcome("ok", value=result["ok"], **common)
    if result is not None:
        failure = result["failure"]
        return Outcome(failure["status"], failure["reason"], trace=tuple(failure["trace"]), **common)
    if answer["ended_by"] == "timeout":
        return Outcome("timeout", f"longer than {job['time_limit_s']:g} s", **common)
    if answer["ended_by"] == "memory":
        limit = job["memory_limit_bytes"] / 2**20
        return Outcome("oom_host", f"resident memory over the limit of {limit:.0f} MiB", **common)
    if code == -signal.SIGKILL and (answer["peak_rss_bytes"] or 0) > psutil.virtual_memory().total / 2:
        return Outcome("oom_host", "killed by SIGKILL while it held most of the machine's memory", **common)
    if code is not None and code < 0:
        return Outcome("crashed", f"killed by {signal.Signals(-code).name}", **common)
    return Outcome("crashed", f"ended with exit code {code} and without a result", **common)


def default_memory_limit() -> int:
    """80 % of the memory that is free now, in bytes."""
    return int(0.8 * psutil.virtual_memory().available)


def must_spawn(device: str) -> bool:
    """Whether forking is unsafe: CUDA contexts do not survive a fork, nor does macOS's Objective-C runtime."""
    return device.split(":")[0] != "cpu" or not sys.platform.startswith("linux")
