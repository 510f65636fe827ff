"""Processes that work as one: start the other ranks of a process group, send them commands, end them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

import torch
from torch import distributed as dist

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PATIENCE = timedelta(seconds=60)  # a rank that waits longer for another gives up

Body = Callable[[int, "Connection"], None]


@dataclass
class Ranks:
    """The other ranks (1 … world_size - 1) as rank 0 sees them."""

    processes: list[BaseProcess]
    pipes: list[Connection]

    def command(self, text: str) -> None:
        """Tell every other rank what to do next; they do it while rank 0 does the same."""
        for pipe in self.pipes:
            pipe.send_bytes(text.encode())

    def close(self) -> None:
        """End the ranks and the process group; nothing is left running."""
        for pipe in self.pipes:
            pipe.close()  # the end of the pipe is the command to leave
        if dist.is_initialized():
            dist.destroy_process_group()
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes, self.pipes = [], []


def start(world_size: int, body: Body, *, folder: Path, threads: int, device: str = "cpu") -> Ranks:
    """Start ranks 1 … world_size - 1, each running `body(rank, pipe)` in the group, and join it as rank 0.

    `folder` holds the file store through which they find each other.  The ranks die with this process, even when it
    is killed.  A process that may be forked is; any other starts fresh ones, which must import everything.
    """
    context = multiprocessing.get_context("fork" if device == "cpu" and may_fork(threads) else "spawn")
    store = folder / f"store-{os.getpid()}-{os.urandom(4).hex()}"
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(1, world_size):
        here, there = context.Pipe()
        pipes.append(here)
        arguments = (body, rank, world_size, there, pipes if context.get_start_method() == "fork" else [], store)
        process = context.Process(target=_rank, args=(*arguments, threads, device, os.getpid()), daemon=True)
        with _no_main_module():
            process.start()
        there.close()
        processes.append(process)
    ranks = Ranks(processes, pipes)
    try:
        join_group(0, world_size, store, threads=threads, device=device)
    except RuntimeError:
        ranks.close()
        raise
    return ranks


_joined = False  # this process has been in a group, which leaves gloo's threads behind


def may_fork(threads: int) -> bool:
    """Whether a forked rank can work: no Python thread, no former group, and no team of OpenMP threads to miss.

    GNU's OpenMP hangs in a forked child that wants the team its parent had; a rank of one thread never does.
    """
    if threading.active_count() > 1 or _joined:
        return False
    return threads == 1 or has_one_thread()


def has_one_thread() -> bool:
    """Whether this process has no thread but its own (jemalloc's helper survives a fork and does not count)."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return len([name for name in names if name != "jemalloc_bg_thd"]) == 1


@contextmanager
def _no_main_module() -> Iterator[None]:
    """A fresh process would run the caller's main script again; it needs nothing from there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def join_group(rank: int, world_size: int, store: Path, *, threads: int, device: str) -> None:
    """Become `rank` of the process group: gloo over the loopback interface, or NCCL on CUDA."""
    global _joined
    _joined = True
    torch.set_num_threads(threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.startswith("cuda"):
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if device.startswith("cuda") else "gloo"
    # A store made here, not a file:// address: that would read a relative path as a host's name.
    meeting = dist.FileStore(str(store.resolve()), world_size)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world_size, timeout=PATIENCE)


def _rank(
    body: Body, rank: int, world_size: int, pipe: Connection, others: list[Connection], store: Path, threads: int,
    device: str, parent: int,
) -> None:  # fmt: skip
    _die_with_parent(parent)
    for other in others:  # inherited copies would keep a pipe open after rank 0 is gone
        other.close()
    join_group(rank, world_size, store, threads=threads, device=device)
    try:
        body(rank, pipe)
    except (EOFError, ConnectionError):
        pass  # rank 0 left
    finally:
        dist.destroy_process_group()


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)
