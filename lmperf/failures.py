"""What ended a piece of work, as a typed status with one clear line and no paths that name anyone."""

from __future__ import annotations

import traceback
from typing import Any

import torch

from lmperf.workloads.base import Unsupported

#: Words of torch's, the C++ library's and oneDNN's messages when the host has no memory left.
HOST_MEMORY = ("can't allocate memory", "std::bad_alloc", "Cannot allocate memory", "could not create a memory object")


class Incorrect(RuntimeError):
    """An arm's numbers differ from its reference (status `incorrect`)."""


class Unstable(RuntimeError):
    """A step's numbers stopped being finite (status `unstable`)."""


def describe(error: BaseException) -> dict[str, Any]:
    """{"status", "reason", "trace"}: one of `records.STATUSES`, a line, and the frames without their folders."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    return {
        "status": status_of(error),
        "reason": reason_of(error),
        "trace": [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames],
    }


def status_of(error: BaseException) -> str:
    """The status that an exception stands for."""
    if isinstance(error, Incorrect):
        return "incorrect"
    if isinstance(error, Unstable):
        return "unstable"
    if isinstance(error, NotImplementedError | Unsupported):
        return "unsupported"
    if isinstance(error, torch.OutOfMemoryError):
        return "oom_device"
    if isinstance(error, MemoryError) or any(words in str(error) for words in HOST_MEMORY):
        return "oom_host"
    return "crashed"


def reason_of(error: BaseException) -> str:
    """The first line of an exception's message, after its type unless it is one of ours, at most 300 characters."""
    text = str(error).strip().partition("\n")[0]
    ours = isinstance(error, Incorrect | Unstable | NotImplementedError | Unsupported)
    text = text if ours and text else f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:300]
