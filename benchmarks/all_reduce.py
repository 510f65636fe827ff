"""The all-reduce table: 1, 10 and 100 MB of fp32 × number of processes, over gloo's loopback; the last line is JSON.

Time is the median of calls in a fresh group for each row.  Bus bandwidth is 2(n-1)/n · size / time, as in NCCL's tests,
so that it can be compared over n.  Loopback time is not network time.
`--gigabyte` adds 1 GB, `--quick` leaves 100 MB out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed as dist

from lmperf.implementations import ranks
from lmperf.workloads.distributed import MEGABYTE, Reducer


def measure(size: int, megabytes: float, repeats: int) -> float:
    """Median seconds of an all-reduce over `size` ranks (one thread each), three untimed calls before."""
    elements = int(megabytes * MEGABYTE / 4)
    tensor, seconds = torch.ones(elements), []
    with tempfile.TemporaryDirectory() as folder:
        others = ranks.start(size, Reducer(elements, "cpu"), folder=Path(folder), threads=1)
        try:
            for _ in range(3 + repeats):
                tensor.fill_(1.0)
                others.command("reduce")
                started = time.perf_counter()
                dist.all_reduce(tensor)
                seconds.append(time.perf_counter() - started)
            if not bool((tensor == size).all()):
                raise RuntimeError(f"the sum of {size} ones is wrong")
        finally:
            others.close()
    return statistics.median(seconds[3:])


def apart(size: int, megabytes: float, repeats: int) -> float:
    """`measure` in a fresh process, since a group leaves threads behind."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, size, megabytes, repeats))
    process.start()
    there.close()
    seconds: float = here.recv()
    process.join()
    return seconds


def _send(pipe: Connection, size: int, megabytes: float, repeats: int) -> None:
    pipe.send(measure(size, megabytes, repeats))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gigabyte", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    sizes = [1, 10] + ([] if options.quick else [100]) + ([1000] if options.gigabyte else [])
    rows = []
    print(f"{'ranks':>5} {'MB':>6} {'ms':>10} {'bus MB/s':>10}")
    for count in options.ranks:
        for megabytes in sizes:
            seconds = apart(count, megabytes, 5 if options.quick else 15)
            bus = 2 * (count - 1) / count * megabytes / seconds
            rows.append({"ranks": count, "megabytes": megabytes, "seconds": seconds, "bus_mb_per_s": bus})
            print(f"{count:>5} {megabytes:>6} {1e3 * seconds:>10.2f} {bus:>10.0f}")
    print(json.dumps({"all_reduce": rows}))


if __name__ == "__main__":
    main()
