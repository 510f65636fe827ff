"""What the loopback interface counted: the cross-check of the payloads that the account says were sent."""

from __future__ import annotations

from pathlib import Path


def loopback_bytes() -> int | None:
    """Bytes sent over the loopback interface since the machine started (all processes), or None where unknown."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return None
