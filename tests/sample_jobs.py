"""Jobs that the tests of launching run in fresh processes, good ones and every way to fail."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Phase = Callable[[str], None]


def add(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """The sum, with proof of a fresh process."""
    phase("adding")
    print("a library that prints must not disturb the answer")  # noqa: T201
    return {"sum": sum(arguments["numbers"]), "pid": os.getpid(), "own_session": os.getsid(0) == os.getpid()}


def variable(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """An environment variable as the process sees it."""
    return {"value": os.environ.get(arguments["key"])}


def raises(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """An ordinary exception."""
    phase("thinking")
    raise ZeroDivisionError("one over nothing")


def leaves(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """A library that calls exit."""
    sys.exit(3)


def vanishes(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """An exit that no exception tells of."""
    os._exit(5)


def unsupported(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """Something that cannot run here."""
    raise NotImplementedError("no such instruction here")


def null_read(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """A segmentation fault."""
    phase("reading")
    ctypes.string_at(0)
    return {}


def null_read_with_helper(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """A segmentation fault while a helper process still holds the pipe."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return null_read(arguments, phase)


def hangs(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """Never ends, nor does its helper in a session of its own."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(arguments["note"], "w") as stream:
        stream.write(str(child.pid))
    phase("waiting")
    time.sleep(600)
    return {}


def leaves_a_helper(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """Ends well but leaves a process behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    return {"helper": child.pid}


def eats_memory(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """One tensor of 4 GiB."""
    import torch

    phase("eating")
    return {"sum": float(torch.ones(1 << 30).sum())}


def eats_slowly(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """Grows in children, where no limit of one process helps."""
    phase("eating")
    for _ in range(6):
        if os.fork() == 0:
            block = bytearray(b"x") * (60 << 20)
            time.sleep(60)
            os._exit(len(block) % 2)
    time.sleep(60)
    return {}


def not_a_number(arguments: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """A value that is no JSON."""
    return {"value": float("nan")}
