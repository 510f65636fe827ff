"""`up` and `down` of the small cluster from a shell."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster import Cluster, Unavailable, ask, install


def main(verb: str, folder: str) -> int:
    """Start or stop; returns the exit code."""
    cluster = Cluster(Path(folder).resolve())
    if verb == "down":
        cluster.down()
        return 0
    try:
        install()
        cluster.write()
        cluster.up()
    except Unavailable as error:
        sys.stderr.write(f"SKIPPED: {error}\n")
        return 77
    sys.stdout.write(ask("sinfo", "-N", "-l"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
