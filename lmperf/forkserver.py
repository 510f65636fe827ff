"""The process that starts fresh processes: torch imported, nothing started; one watched child a job.

Run as `python -m lmperf.forkserver`, it reads one JSON job a line on stdin and answers one JSON line each on stdout.
When stdin ends, for whatever reason its owner died, it kills the running child's whole group and leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

POLL_S = 0.1  # how often limits are looked at; a look costs about 0.1 ms
LINUX = sys.platform.startswith("linux")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
Call = Callable[[dict[str, Any], Callable[[str], None]], dict[str, Any]]


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing (the group kill still works there)."""
    if LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def resident_bytes(pid: int) -> int:
    """Resident bytes of one process, 0 once it is gone or where /proc is not there."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def children_of(pid: int) -> list[int]:
    """Direct children of a process by /proc; empty where that is not there."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for one in found:
        found += [child for child in children_of(one) if child not in found]
    return found


@dataclass
class Watch:
    """What is known of a running child: its last phase, its answer, its peak size."""

    phase: str | None = None
    result: dict[str, Any] | None = None
    peak: int = 0
    ended_by: str | None = None  # "timeout" | "memory": why we killed it
    buffer: bytes = b""

    def feed(self, data: bytes) -> None:
        """Take what the child wrote: whole JSON lines, {"phase": …} or {"result": …}."""
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.phase = message.get("phase", self.phase)
            self.result = message.get("result", self.result)


@dataclass
class Server:
    """The loop over jobs; `control` and `answers` are file descriptors to the owner."""

    control: int
    answers: int
    pending: bytes = b""
    running: int | None = field(default=None)

    def serve(self) -> None:
        """Answer jobs until the owner goes away."""
        threads = len(list(Path("/proc/self/task").iterdir())) if LINUX else None
        self.answer({"ready": True, "threads": threads, "pid": os.getpid()})
        for line in self.lines():
            self.answer(self.run(json.loads(line)))

    def answer(self, message: dict[str, Any]) -> None:
        """One line to the owner."""
        try:
            os.write(self.answers, json.dumps(message, allow_nan=False).encode() + b"\n")
        except BrokenPipeError:  # the owner is gone
            os._exit(0)

    def lines(self) -> Iterator[bytes]:
        """The owner's lines until end of file."""
        while data := os.read(self.control, 1 << 16):
            *lines, self.pending = (self.pending + data).split(b"\n")
            yield from lines

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Start one child for `job`, watch it to its end, and leave nothing of it running."""
        reading, writing = os.pipe()
        started = time.monotonic()
        pid = self._start(job, reading, writing)
        os.close(writing)
        watch = Watch()
        try:
            self._watch(pid, reading, job, started, watch)
        finally:
            os.close(reading)
            code = end_group(pid, grace_s=0.0 if watch.ended_by else 2.0)
        wall = time.monotonic() - started
        return {
            "phase": watch.phase, "result": watch.result, "peak_rss_bytes": watch.peak or None, "wall_s": wall,
            "exit": code, "ended_by": watch.ended_by, "pid": pid,
        }  # fmt: skip

    def _start(self, job: dict[str, Any], reading: int, writing: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(reading)
        if job.get("spawn"):
            path = Path(job["scratch"]) / "job.json"
            path.write_text(json.dumps(job))
            os.set_inheritable(writing, True)
            os.execv(sys.executable, [sys.executable, "-m", "lmperf.forkserver", str(path), str(writing)])
        for descriptor in (self.control, self.answers):
            os.close(descriptor)
        child_main(job, writing)
        return 0  # never reached: the child leaves by os._exit

    def _watch(self, pid: int, reading: int, job: dict[str, Any], started: float, watch: Watch) -> None:
        deadline = started + job["time_limit_s"]
        poller = select.poll()
        poller.register(reading, select.POLLIN)
        poller.register(self.control, select.POLLIN)
        while True:
            for descriptor, events in poller.poll(POLL_S * 1000):
                if descriptor == self.control and events & select.POLLHUP:
                    end_group(pid, grace_s=0.0)  # the owner died: nobody waits for this result
                    os._exit(0)
                if descriptor == reading:
                    data = os.read(reading, 1 << 16)
                    if not data:
                        return
                    watch.feed(data)
            if watch.result is None and has_ended(pid):  # helpers of a dead child may hold the pipe open
                watch.feed(drain(reading))
                return
            size = sum(map(resident_bytes, tree(pid)))
            watch.peak = max(watch.peak, size)
            if watch.result is not None:
                return
            if size > job["memory_limit_bytes"]:
                watch.ended_by = "memory"
                return
            if time.monotonic() > deadline:
                watch.ended_by = "timeout"
                return


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays a zombie until `end_group` asks for its exit code."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def drain(reading: int) -> bytes:
    """What still lies in a pipe."""
    os.set_blocking(reading, False)
    data = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(reading, 1 << 16):
            data += part
    return data


def end_group(pid: int, *, grace_s: float) -> int:
    """Kill a child's group and whatever else descends from it; returns its exit code (negative: the signal).

    A child that is ending by itself has `grace_s` seconds to do so and keeps its own exit code.
    """
    deadline = time.monotonic() + grace_s
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _end_orphans()
    return code


def _end_orphans() -> None:
    """As the subreaper this process inherits what a child left behind, even from groups of their own: end those too."""
    for _ in range(100):
        for orphan in children_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return


class Typed:
    """A context that turns whatever ends the work inside into a status, instead of ending this process in silence."""

    def __init__(self, kinds: type[BaseException] = Exception) -> None:
        self.kinds = kinds
        self.failure: dict[str, Any] | None = None

    def __enter__(self) -> Typed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, self.kinds):
            return False
        release_memory_limit()  # the failure must be told, whatever it was
        from lmperf.failures import describe

        self.failure = describe(error)
        return True


def child_main(job: dict[str, Any], writing: int) -> None:
    """In the fresh process: limits, then the job's function, then its answer on the pipe; never returns."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # whatever a library prints must not reach the owner's protocol

    def tell(message: dict[str, Any]) -> None:
        data = json.dumps(message, allow_nan=False, default=str).encode() + b"\n"
        while data:
            data = data[os.write(writing, data) :]

    with Typed(BaseException) as typed:  # sys.exit in a library is a result too
        limit_memory(job)
        module, _, name = job["call"].partition(":")
        function: Call = getattr(importlib.import_module(module), name)
        tell({"result": {"ok": function(job["arguments"], lambda phase: tell({"phase": phase}))}})
    if typed.failure is not None:
        tell({"result": {"failure": typed.failure}})
    sys.stderr.flush()
    os._exit(0)


def limit_memory(job: dict[str, Any]) -> None:
    """A soft limit on private memory, so that an allocation fails with a message before the watchdog has to kill."""
    if not LINUX or job.get("spawn"):  # CUDA reserves far more address space than it uses
        return
    import resource

    status = Path("/proc/self/status").read_text()
    have = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (have + int(job["memory_limit_bytes"]), resource.RLIM_INFINITY))


def release_memory_limit() -> None:
    """Lift the soft limit, so that the failure itself can be told."""
    if LINUX:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def preload(name: str) -> None:
    """Import `module`, or import it and call its `function` where the name is `module:function`."""
    module, _, function = name.partition(":")
    loaded = importlib.import_module(module)
    if function:
        getattr(loaded, function)()


def main(arguments: list[str]) -> None:
    """The server, or with a job file and a descriptor one spawned child."""
    if arguments[:1] == ["--serve"]:
        # The owner's pipes move away from 0 and 1, where a library's prints would spoil them.
        control, answers = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # while importing nobody reads stdin's end
        owner, *names = arguments[1:]
        if os.getppid() != int(owner):  # it died before the line above
            return
        for name in ("lmperf.failures", *names) if names else ():
            preload(name)
        gc.collect()
        gc.freeze()  # a child's collector need not walk, and so copy, what was imported here
        prctl(PR_SET_PDEATHSIG, 0)  # from here on the end of stdin says it, and the job's helpers end too
        Server(control, answers).serve()
        os._exit(0)  # nothing is left to tidy, and Python's own end takes seconds with torch loaded
    child_main(json.loads(Path(arguments[0]).read_text()), int(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
