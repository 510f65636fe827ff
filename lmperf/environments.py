"""The environment of every process whose numbers count: timed samples, the profile and quality runs (no torch).

OpenMP's spinning and glibc's mapping of large tensors change a step by more than most variants do, so all of these
processes get the same, it is set before Python starts, and it is recorded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

#: What a configuration may set otherwise (`measure.environment`; an empty text removes one).
SETTINGS: Mapping[str, str] = {
    "GOMP_SPINCOUNT": "1000",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
}
DEFAULTS: Mapping[str, str] = {
    **SETTINGS,
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compiler processes beside the clock
    "OPENBLAS_NUM_THREADS": "1",  # numpy's own pool would start when numpy is imported, before the fork
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # so would a thread of Arrow's allocator
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # the profiler's notes on frees that it did not see: memory.py allows for them
    "KINETO_LOG_LEVEL": "99",
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def process_environment(threads: int, *changes: Mapping[str, str]) -> dict[str, str]:
    """The settings fixed before Python starts: the defaults, the thread counts, then `changes` in order."""
    merged: dict[str, str] = {**DEFAULTS, **{name: str(threads) for name in THREAD_VARIABLES}}
    for change in changes:
        merged |= {str(name): str(value) for name, value in change.items()}
    return merged


def inherited_with(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `settings` on top; an empty value takes a variable away.

    Some of these variables change behaviour by merely being there.
    """
    merged = {**os.environ, **settings}
    return {name: value for name, value in merged.items() if value != "" or name not in settings}
