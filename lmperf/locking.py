"""One timed session a host: a lock that names its owner and that no dead owner can keep."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from lmperf.records import CheckFailed

VARIABLE = "LMPERF_LOCK"  # another lock file, for tests that time nothing


def lock_path() -> Path:
    """The host's lock file, shared by all users and work folders."""
    return Path(os.environ.get(VARIABLE) or Path(tempfile.gettempdir()) / "lmperf.host.lock")


@contextmanager
def host_lock(session: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the host's lock, or raise `CheckFailed` naming the process that holds it.

    The kernel's lock on the open file decides, so that a killed owner holds nothing whatever the file still says (its
    pid may belong to another process by now, or to another container); the content is for the message.
    """
    path = lock_path()
    handle = _open(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckFailed(_refusal(read_owner(handle), path)) from None
        left = read_owner(handle)
        if left:
            say(f"took over the lock that process {left.get('pid')} left behind when it was killed")
        _write(handle, {"pid": os.getpid(), "started": psutil.Process().create_time(), "session": session})
        try:
            yield
        finally:
            _write(handle, None)
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    # Without O_CREAT first: some systems forbid it on another user's file in a shared, sticky folder.
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            handle = os.open(path, flags | os.O_CLOEXEC, 0o666)
        except (FileNotFoundError, FileExistsError, PermissionError):
            continue
        if flags & os.O_CREAT:
            os.fchmod(handle, 0o666)
        return handle
    raise CheckFailed(f"{path}: the host's lock cannot be opened; set {VARIABLE} to a file that can")


def read_owner(handle: int) -> dict[str, Any]:
    """Who wrote the lock file last; empty after an orderly end."""
    os.lseek(handle, 0, os.SEEK_SET)
    try:
        owner = json.loads(os.read(handle, 4096) or b"{}")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _write(handle: int, owner: dict[str, Any] | None) -> None:
    try:
        os.ftruncate(handle, 0)
        if owner is not None:
            os.pwrite(handle, json.dumps(owner).encode(), 0)
    except OSError:  # another user's file, opened for reading: the kernel's lock holds all the same
        return


def _refusal(owner: dict[str, Any], path: Path) -> str:
    who = f"process {owner.get('pid', '?')}, session {owner.get('session', '?')}"
    since = owner.get("started")
    age = f", started {max(0, time.time() - since):.0f} s ago" if isinstance(since, float) else ""
    return f"another session is being timed on this host ({who}{age}): two at once would disturb each other ({path})"
