"""SIGKILL of a whole run at random moments, then the same command: it ends well, with an undisturbed run's results.

LMPERF_SLOW=1: two kills of the tiny run; LMPERF_KILLS=20: the smoke preset's run that often, and prints what was
redone (docs/robustness.md has the figures).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_workflow import Lab, Whole, complete_run, kill_tree, left_running, parse_log, smoke, wait_until

pytestmark = pytest.mark.skipif(
    not {"LMPERF_SLOW", "LMPERF_KILLS"} & set(os.environ),
    reason="takes minutes: LMPERF_SLOW=1 or LMPERF_KILLS=20 runs it",
)
KILLS = int(os.environ.get("LMPERF_KILLS", "2"))
SEED = int(os.environ.get("LMPERF_SEED", "1"))
MANY = 20  # from so many kills on it is the smoke preset's run that is killed
UNTIMED = ("reason", "badges", "details", "metrics")  # of a sample: what times and the machine's state decide


def timeless(lab: Lab) -> dict[str, Any]:
    """What no disturbance may change: texts, tokens, quality runs, which samples there are, their checks and peaks."""
    found: dict[str, Any] = {}
    for folder in ("data/shards", "data/tokens"):
        for path in sorted((lab.work / folder).iterdir()):
            data = path.read_bytes()
            if path.name == "manifest.json":
                data = data.replace(b'"reused": true', b'"reused": false')  # whether a shard was already there
            found[f"{folder}/{path.name}"] = hashlib.sha256(data).hexdigest()
    for path in sorted((lab.work / "reports" / "quality").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        found[path.name] = without_times({key: run[key] for key in run.keys() - {"provenance", "peak_memory_bytes"}})
    for path in sorted((lab.work / "reports" / "sessions").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert lines[-1] == {"kind": "end"}
        samples = [sample_facts(x) for x in lines if x["kind"] in ("sample", "memory")]
        found[path.name] = [lines[0]["spec"], sorted(samples)]
    return found


def sample_facts(sample: dict[str, Any]) -> str:
    """Of one process sample: where it belongs, what became of it, its checks against the reference, its tensor peak."""
    where = {key: value for key, value in sample.items() if key not in UNTIMED}
    peak = sample["metrics"].get("peak_memory_bytes", {}).get("value")
    return json.dumps([where, sample["details"].get("checks"), peak], sort_keys=True)


def without_times(value: Any) -> Any:
    """`value` without its seconds."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not key.endswith("_s")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@dataclass
class Tally:
    """What kills did: how many processes each ended, which jobs it cut, what was done again, what was kept."""

    kills: int = 0
    processes: list[int] = field(default_factory=list)
    unlocked: int = 0
    cut: Counter[str] = field(default_factory=Counter)
    between_jobs: int = 0
    done_again: Counter[str] = field(default_factory=Counter)
    rounds_kept: int = 0

    def note(self, lab: Lab, text: str, finished: set[str]) -> None:
        """Read one attempt's log: which finished jobs it did again, and how many rounds it took over."""
        for name in parse_log(text)[0]:
            if name in finished:
                self.done_again[name] += 1
            log = lab.work / "reports" / "logs" / f"{name.replace(' ', '.')}.log"
            kept = re.search(r"continuing after round (\d+)", log.read_text("utf-8") if log.exists() else "")
            self.rounds_kept += int(kept.group(1)) if kept else 0

    def note_kill(self, text: str, processes: int, unlocked: int) -> None:
        """Count one kill: its processes, the jobs that ran at that moment, and whether Snakemake's lock was left."""
        started, finished = parse_log(text)
        running = [name.split()[0] for name in started if name not in finished]
        self.kills += 1
        self.processes.append(processes)
        self.unlocked += unlocked
        self.cut.update(running)
        self.between_jobs += not running


def killed_run(lab: Lab, choose: Callable[[], float], most: int, tally: Tally, folder: Path) -> int:
    """Run, and kill the whole tree up to `most` times after `choose()` seconds, until a run ends; returns kills."""
    finished: set[str] = set()
    for attempt in range(most + 1):
        log = folder / f"attempt-{attempt}.log"
        process = lab.start(log=log)
        processes = 0
        try:
            process.wait(choose() if attempt < most else 900)
        except subprocess.TimeoutExpired:
            processes = kill_tree(process.pid)
            process.wait()
        text = log.read_text(encoding="utf-8")
        tally.note(lab, text, finished)
        if not processes:
            assert process.returncode == 0, text[-4000:]
            return attempt
        wait_until(lambda: not left_running(lab.project), 20)
        tally.note_kill(text, processes, unlock(lab))
        finished |= set(parse_log(text)[1])
    raise AssertionError("the last run was killed by its time limit")


def unlock(lab: Lab) -> int:
    """Take Snakemake's own lock away, as its message says and docs/cluster.md tells; 1 when there was one."""
    locked = any((lab.work / ".snakemake" / "locks").glob("*"))
    if locked:
        assert lab.snakemake("--unlock").returncode == 0
    return int(locked)


@pytest.fixture
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Whole, str]:
    """The run to compare with, and its configuration: the tiny one, or the smoke preset's for many kills."""
    if KILLS < MANY:
        whole: Whole = request.getfixturevalue("whole")
        return whole, (whole.lab.work / "tiny.yaml").read_text(encoding="utf-8")
    return complete_run(tmp_path_factory.mktemp("undisturbed"), smoke()), smoke()


def test_kills_at_random_moments(undisturbed: tuple[Whole, str], tmp_path: Path) -> None:
    """Each (re)start is killed after a random time, up to half of what an undisturbed run takes."""
    whole, config = undisturbed
    expected, chooser, tally, runs = timeless(whole.lab), random.Random(SEED), Tally(), 0
    while tally.kills < KILLS:
        runs += 1
        folder = tmp_path / f"run {runs}"
        lab = Lab.make(folder, config)
        killed_run(lab, lambda: chooser.uniform(1.0, whole.seconds / 2), KILLS - tally.kills, tally, folder)
        assert timeless(lab) == expected, f"seed {SEED}, run {runs}"
        assert lab.pending() == {}
        assert not left_running(lab.project)
    assert not tally.done_again, "a finished job was done again"
    sys.stderr.write(f"\nundisturbed run {whole.seconds:.0f} s, seed {SEED}, {runs} runs: {tally}\n")
