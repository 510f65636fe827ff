"""Which digests were seen: exact, deterministic, 16 bytes a document once there are many."""

from __future__ import annotations

import numpy as np

RECENT = 1 << 20


class Seen:
    """A set of 16-byte digests; past `RECENT` of them they move into sorted arrays, to save memory."""

    def __init__(self, recent: int = RECENT) -> None:
        self._limit = recent
        self._recent: set[bytes] = set()
        self._runs: list[np.ndarray] = []

    def add(self, digest: bytes) -> bool:
        """Whether `digest` is new; it is remembered."""
        recent = self._recent
        if digest in recent or (self._runs and self._in_runs(digest)):
            return False
        recent.add(digest)
        if len(recent) >= self._limit:
            self._settle()
        return True

    def _in_runs(self, digest: bytes) -> bool:
        key = np.frombuffer(digest, _KEY)[0]
        for run in self._runs:
            at = int(np.searchsorted(run, key))
            if at < len(run) and run[at] == key:
                return True
        return False

    def _settle(self) -> None:
        run = np.sort(np.frombuffer(b"".join(self._recent), _KEY))
        self._recent.clear()
        # Runs of falling size, merged like the digits of a counter, so that there are few and each is moved seldom.
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate((self._runs.pop(), run)), kind="stable")
        self._runs.append(run)


_KEY = np.dtype("S16")
