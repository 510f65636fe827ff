"""One sorted scan of a user's folder: names stay bytes, links are followed once, what cannot be read is reported."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

SKIPPED_NAMES = frozenset(
    os.fsencode(name)
    for name in (".git", ".hg", ".svn", ".bzr", "_darcs", "CVS", "__pycache__", ".ipynb_checkpoints", ".DS_Store")
    + (".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".venv", "node_modules")
)
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
)


class Entry(NamedTuple):
    """A file below the root: relative name as the file system's bytes, size in bytes, modification time in ns."""

    name: bytes
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Walk:
    """All files of one root by name, the reasons for what cannot be read, and counts of what was passed over."""

    root: bytes
    files: list[Entry]
    problems: list[tuple[bytes, str]]
    skipped: Counter[str] = field(default_factory=Counter)

    def path(self, name: bytes) -> bytes:
        """The path under which the file `name` is opened."""
        return os.path.join(self.root, name)


def display(name: bytes) -> str:
    """A file name as text for a report; bytes that are no UTF-8 and control characters are shown as escapes."""
    text = name.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def identity(path: Path | str | bytes) -> tuple[int, int] | None:
    """Device and inode of `path`, or None where there is nothing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def walk(path: Path | str, *, exclude: Iterable[Path] = ()) -> Walk:
    """Scan `path` (a folder or one file); folders in `exclude`, version control and caches are passed over."""
    raw = os.path.abspath(os.fsencode(path))
    if not os.path.isdir(raw):
        result = Walk(os.path.dirname(raw), [], [])
        _add(result, os.path.basename(raw), raw, None)
        return result
    result = Walk(raw, [], [])
    visited = {key for key in map(identity, exclude) if key}
    linked: list[bytes] = [b""]
    while linked:  # folders reached through links come last, so that a real folder keeps its own name
        later: list[bytes] = []
        for name in sorted(linked):
            _walk_tree(result, name, visited, later)
        linked = later
    result.files.sort(key=itemgetter(0))
    result.problems.sort()
    return result


def _walk_tree(result: Walk, start: bytes, visited: set[tuple[int, int]], linked: list[bytes]) -> None:
    pending = [start]
    while pending:
        name = pending.pop()
        folder = os.path.join(result.root, name) if name else result.root
        key = identity(folder)
        if key is None or key in visited:
            result.skipped["folder already read (link or loop)" if key else "folder vanished"] += 1
            continue
        visited.add(key)
        try:
            with os.scandir(folder) as entries:
                _scan(result, entries, name + b"/" if name else b"", pending, linked)
        except OSError as error:
            result.problems.append((name, f"folder cannot be read: {_reason(error)}"))


def _scan(
    result: Walk, entries: Iterable[os.DirEntry[bytes]], prefix: bytes, pending: list[bytes], linked: list[bytes]
) -> None:
    files = result.files
    for entry in entries:
        base = entry.name
        if base in SKIPPED_NAMES:
            result.skipped[f"named {display(base)}"] += 1
        elif entry.is_file(follow_symlinks=False):
            try:
                status = entry.stat()
            except OSError as error:
                result.problems.append((prefix + base, _reason(error)))
                continue
            files.append(Entry(prefix + base, status.st_size, status.st_mtime_ns))
        elif entry.is_dir(follow_symlinks=False):
            pending.append(prefix + base)
        elif entry.is_symlink() and os.path.isdir(entry.path):
            linked.append(prefix + base)
        else:
            _add(result, prefix + base, entry.path, "link")


def _add(result: Walk, name: bytes, path: bytes, link: str | None) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        reason = "a link that leads nowhere" if link and error.errno in (errno.ENOENT, errno.ELOOP) else _reason(error)
        result.problems.append((name, reason))
        return
    if stat.S_ISREG(status.st_mode):
        result.files.append(Entry(name, status.st_size, status.st_mtime_ns))
        return
    kind = next((text for test, text in _KINDS if test(status.st_mode)), "no regular file")
    result.problems.append((name, f"{kind}, not a file"))


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
