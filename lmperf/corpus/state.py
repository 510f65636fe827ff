"""A cheap digest of the user's own raw files, so that an added or edited file is seen and a mere touch is not."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmperf.records import atomic_write


def source_state(paths: Sequence[str], data: Path) -> str:
    """12 hex digits over the names and contents of all files below `paths`; empty when there are none.

    Contents are hashed once: a cache in `data/.state.json` keeps each file's hash with its size and mtime.
    """
    if not paths:
        return ""
    cache_file = data / ".state.json"
    cache = _read_cache(cache_file)
    fresh: dict[str, list[str | int]] = {}
    total = hashlib.sha256()
    for path in paths:
        for name, entry in _files(os.fsencode(path)):
            key = os.fsdecode(name).encode("utf-8", "surrogateescape").hex()
            known = cache.get(key)
            stamp = [entry.st_size, entry.st_mtime_ns]
            fresh[key] = known if known and known[:2] == stamp else [*stamp, _hash(name)]
            total.update(os.path.relpath(name, os.fsencode(path)) + b"\0" + str(fresh[key][2]).encode() + b"\0")
    if fresh != cache:
        _write_cache(cache_file, fresh)
    return total.hexdigest()[:12]


def _read_cache(path: Path) -> dict[str, list[str | int]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_cache(path: Path, value: dict[str, list[str | int]]) -> None:
    try:
        with atomic_write(path) as stream:
            json.dump(value, stream)
    except OSError:
        return  # a read-only folder: only slower next time


def _files(top: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Regular files below `top` in sorted order, links followed, folder loops cut."""
    seen: set[tuple[int, int]] = set()
    stack = [top]
    while stack:
        path = stack.pop()
        try:
            entry = os.stat(path)
            if stat.S_ISREG(entry.st_mode):
                yield path, entry
            elif stat.S_ISDIR(entry.st_mode) and (entry.st_dev, entry.st_ino) not in seen:
                seen.add((entry.st_dev, entry.st_ino))
                stack += sorted((os.path.join(path, name) for name in os.listdir(path)), reverse=True)
        except OSError:
            continue  # ingest reports what cannot be read


def _hash(path: bytes) -> str:
    total = hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            while piece := stream.read(1 << 20):
                total.update(piece)
    except OSError:
        return "unreadable"
    return total.hexdigest()[:16]
