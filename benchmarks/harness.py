"""The harness beside torch.utils.benchmark.Timer and pyperf on one function: overhead, interval width, false alarms.

    python benchmarks/harness.py [--quick]

Each tool measures the same small operator again and again and is asked, pair by pair, whether identical code differs:
ours by its sessions and verdicts, the others by the 95 % interval of the ratio of two of their results (Welch's t on
log values, as `pyperf compare_to` tests), with the same 2 % margin.  Overhead is the share of the wall time that is
neither in timed blocks nor in declared warm-up.  `width` is the half-width of the 95 % interval of a ratio; width x
sqrt(s) prices it in seconds (lower is better).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

MARGIN = 0.02


@dataclass(frozen=True)
class Line:
    """One tool's row: comparisons of identical code, seconds for each, overhead, half-widths, false alarms."""

    tool: str
    comparisons: int
    seconds: float
    overhead: float
    widths: Sequence[float]
    false_alarms: int

    def text(self) -> str:
        """The row for a terminal, with the exact interval of the false-alarm rate."""
        from lmperf.statistics import binomial_interval

        low, high = binomial_interval(self.false_alarms, self.comparisons)
        width, each = median(self.widths), self.seconds / self.comparisons
        alarms = self.false_alarms
        return (
            f"{self.tool:28} {self.comparisons:4} {each:8.2f} s {self.overhead:8.0%} {width:9.2%} "
            f"{width * math.sqrt(each) * 100:9.2f}   {alarms:3} = {alarms / self.comparisons:5.1%} "
            f"[{low:.1%}, {high:.1%}]"
        )


def make_step():
    """The function that every tool times: naive attention, forward, 1 x 4 x 128 x 32, one thread."""
    import torch

    from lmperf import reference

    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 4, 128, 32) for _ in range(3))
    return lambda: reference.attention(q, k, v)


def ours(sessions: int, rounds: int) -> Line:
    """A/A sessions as `lmperf qualify` makes them, without injected slow-downs."""
    from lmperf.comparing import compare_session
    from lmperf.qualify import qualify_spec
    from lmperf.readings import read_session
    from lmperf.sessions import run_session

    declared, comparisons, widths, alarms, started = 0.0, 0, [], 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for index in range(sessions):
            spec = qualify_spec(index, rounds, False, (), 11, 1, {})
            session = read_session(run_session(spec, Path(folder) / f"{index}.jsonl", work=Path(folder)))
            for sample in session.samples:
                declared += sample.details.get("timed_s", 0.0) + sample.details.get("warmup", {}).get("seconds", 0.0)
            for row in compare_session(session, MARGIN):
                if row["metric"] == "step_time_s" and row["variant"].startswith("aa_"):
                    comparisons += 1
                    widths.append(math.log(row["ci_high"] / row["ci_low"]) / 2)
                    alarms += row["verdict"] in ("faster", "slower")
    wall = time.perf_counter() - started
    return Line(f"lmperf, {rounds} rounds", comparisons, wall, 1 - declared / wall, widths, alarms)


def judged(results: Sequence[Sequence[float]]) -> tuple[list[float], int]:
    """Half-widths and false alarms of neighbouring results (values in seconds) by Welch's t on their logarithms."""
    from scipy import stats

    widths, alarms = [], 0
    for first, second in zip(results, results[1:], strict=False):
        a, b = ([math.log(value) for value in values] for values in (first, second))
        spread = math.hypot(stdev(a) / math.sqrt(len(a)), stdev(b) / math.sqrt(len(b)))
        half = float(stats.t.ppf(0.975, len(a) + len(b) - 2)) * spread
        centre = mean(b) - mean(a)
        widths.append(half)
        alarms += centre - half > math.log1p(MARGIN) or centre + half < math.log1p(-MARGIN)
    return widths, alarms


def torch_timer(results: int, seconds: float) -> Line:
    """`blocked_autorange` again and again in one process, as its documentation compares."""
    import torch.utils.benchmark as benchmark

    timer = benchmark.Timer("step()", globals={"step": make_step()}, num_threads=1)
    started = time.perf_counter()
    found = [timer.blocked_autorange(min_run_time=seconds) for _ in range(results)]
    wall = time.perf_counter() - started
    timed = sum(sum(one.raw_times) for one in found)
    widths, alarms = judged([one.times for one in found])
    return Line("torch.utils.benchmark.Timer", len(widths), wall, 1 - timed / wall, widths, alarms)


def pyperf_runs(results: int, processes: int) -> Line | None:
    """pyperf's own runner in fresh processes, again and again; None where pyperf is not installed."""
    try:
        import pyperf
    except ImportError:
        return None
    started, timed, values = time.perf_counter(), 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(results):
            out = Path(folder) / f"{index}.json"
            options = ["--processes", str(processes), "--values", "3", "--warmups", "1", "--quiet", "-o", str(out)]
            environment = {**os.environ, "HARNESS_PYPERF": "1"}
            inherit = ["--inherit-environ", "HARNESS_PYPERF,PYTHONPATH,OMP_NUM_THREADS"]
            command = [sys.executable, __file__, *options, *inherit]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            bench = pyperf.Benchmark.load(str(out))
            values.append(list(bench.get_values()))
            runs = json.loads(out.read_text())["benchmarks"][0]["runs"]
            loops = bench.get_total_loops()
            timed += sum(sum(run.get("values", [])) * loops for run in runs)
            timed += sum(value * count for run in runs for count, value in run.get("warmups", []))
    wall = time.perf_counter() - started
    widths, alarms = judged(values)
    return Line(f"pyperf, {processes} processes", len(widths), wall, 1 - timed / wall, widths, alarms)


def main() -> None:
    """Measure the three beside each other and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under half a minute; says little")
    quick = parser.parse_args().quick
    print(f"{'tool':28} {'A/A':>4} {'each':>10} {'overhead':>8} {'width':>9} {'w*sqrt(s)':>9}   false alarms")
    print(ours(1 if quick else 3, 6 if quick else 9).text(), flush=True)
    print(torch_timer(10 if quick else 41, 0.2).text(), flush=True)
    beside = pyperf_runs(2 if quick else 6, 2 if quick else 4)
    print(beside.text() if beside else "pyperf is not installed: not measured")


if __name__ == "__main__":
    if "HARNESS_PYPERF" in os.environ:
        import pyperf

        pyperf.Runner().bench_func("attention", make_step())
    else:
        main()
