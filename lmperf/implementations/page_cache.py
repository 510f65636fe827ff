"""The page cache and the memory of processes, as Linux tells them."""

from __future__ import annotations

import os
from pathlib import Path


def drop(folder: Path) -> int:
    """Ask the kernel to drop the cached pages of every file under `folder` (own files only); returns how many files.

    Pages that some process still maps stay; on systems without posix_fadvise nothing happens.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    dropped = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                dropped += 1
            finally:
                os.close(handle)
    return dropped


def proportional_bytes(pid: int) -> float | None:
    """The proportional set size of a process (shared pages divided among their users), or None where unknown."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")]
    return float(sizes[0]) if sizes else None


def children(pid: int) -> list[int]:
    """The direct child processes of `pid`, as far as /proc tells."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in path.read_text().split()]
    return sorted(found)
