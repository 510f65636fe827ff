"""A tiny run of the real workflow: own texts, a copy of the package, two sessions, two quality runs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent

slow = pytest.mark.skipif("LMPERF_SLOW" not in os.environ, reason="takes minutes: LMPERF_SLOW=1 runs it")

CONFIG = """\
# The smallest run that goes through every stage: seconds of work, nothing that may be read as a result.
threads: 1
output: {data: data, reports: reports}
corpus:
  sources: [{name: own, kind: files, domain: english, path: texts}]
tokenizer: {vocab_size: 270, sample_bytes: 65536, held_out: 0.1}
model: {size: tiny, layers: 1}
training: {batch_size: 2, sequence_length: 16}
profile: {trace_budget_bytes: 1000000}
measure:
  rounds: 2
  blocks: 2
  block_s: 0.005
  warmup_s: 0.01
  warmup_cap_s: 0.05
  sessions:
    - {axis: attention, workload: training_step, variants: [sdpa_flash]}
    - {axis: norm, workload: training_step, variants: all}
quality:
  steps: 20
  batch_size: 2
  sequence_length: 16
  stressed_learning_rate: null
  seeds: 1
  baseline_seeds: 1
  variants: [norm/rmsnorm]
  model: {size: tiny, layers: 1}
ablation: {stack: [], interactions: []}
"""

SESSIONS = ("attention.training_step", "norm.training_step")
RUNS = ("baseline.s1234", "norm-rmsnorm.s1234")
MEASURES = frozenset(f"measure {name}" for name in SESSIONS)
TRAINS = frozenset(f"train {name}" for name in RUNS)
CORPUS = frozenset({"fetch_corpus", "ingest", "tokenize"})
AFTER = frozenset({"compare", "ablate", "report"})
ALL = CORPUS | {"profile"} | MEASURES | TRAINS | AFTER


def smoke() -> str:
    """The project's smoke preset, its folders put where a lab has them."""
    text = (ROOT / "workflow" / "presets" / "smoke.yaml").read_text(encoding="utf-8")
    return text.replace("{data: data/smoke, reports: reports/smoke}", "{data: data, reports: reports}")


def write_texts(folder: Path, documents: int = 60) -> None:
    """Made-up documents with enough tokens for every split, all different."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["river", "stone", "lantern", "quiet", "carries", "under", "the", "seven", "bridges", "slowly", "a", "bell"]
    for number in range(documents):
        lines = [
            " ".join(words[(number * 7 + line * 5 + place * (number % 5 + 1)) % len(words)] for place in range(12))
            for line in range(12)
        ]
        (folder / f"text-{number:03}.txt").write_text(f"Document {number}.\n" + ".\n".join(lines), encoding="utf-8")


@dataclass(frozen=True)
class Lab:
    """A copy of the workflow in `project` and a working directory `work`; the repository's files are never touched."""

    project: Path
    work: Path

    @classmethod
    def make(cls, folder: Path, config: str = CONFIG) -> Lab:
        """Copy package and workflow, write texts and the configuration overlay."""
        lab = cls(folder / "project", folder / "work 目录")
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in ("lmperf", "workflow"):
            shutil.copytree(ROOT / name, lab.project / name, ignore=ignore)
        for name in ("Snakefile", "config.yaml"):
            shutil.copy2(ROOT / name, lab.project / name)
        write_texts(lab.work / "texts")
        (lab.work / "tiny.yaml").write_text(config, encoding="utf-8")
        return lab

    @property
    def package(self) -> Path:
        """The copied package's folder."""
        return self.project / "lmperf"

    def environment(self, **changes: str) -> dict[str, str]:
        """This process's environment with the copied package first and a lock file of the run's own."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("SNAKEMAKE")}
        own = {"PYTHONPATH": str(self.project), "LMPERF_LOCK": str(self.project / "host.lock"), "OMP_NUM_THREADS": "1"}
        return {**inherited, **own, "PYTHONDONTWRITEBYTECODE": "1", **changes}

    def command(self, *words: str, cores: int = 2) -> list[str]:
        """The command line of Snakemake on the copied workflow."""
        base = [sys.executable, "-m", "snakemake", "--snakefile", str(self.project / "Snakefile")]
        return [*base, "--cores", str(cores), "--configfile", "tiny.yaml", "--nocolor", *words]

    def snakemake(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run it to its end; stdout and stderr are one text."""
        return subprocess.run(
            self.command(*words), cwd=self.work, env=self.environment(), timeout=timeout, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def start(self, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """Start it in the background in a group of its own."""
        with log.open("ab") as stream:
            return subprocess.Popen(
                self.command(*words), cwd=self.work, env=self.environment(), stdout=stream, stderr=stream,
                start_new_session=True,
            )  # fmt: skip

    def pending(self, *words: str) -> dict[str, str]:
        """The jobs that would run (rule, and session or run), each with Snakemake's reason."""
        done = self.snakemake("--dry-run", *words)
        if done.returncode:
            raise AssertionError(done.stdout)
        return parse_jobs(done.stdout)


@dataclass(frozen=True)
class Whole:
    """A lab with one complete, undisturbed run, and how long that took in seconds."""

    lab: Lab
    seconds: float


def complete_run(folder: Path, config: str) -> Whole:
    """Make a lab and run it undisturbed to its report."""
    lab = Lab.make(folder, config)
    started = time.monotonic()
    done = lab.snakemake(timeout=900)
    if done.returncode or not (lab.work / "reports" / "index.html").is_file():
        raise AssertionError(done.stdout[-4000:])
    return Whole(lab, time.monotonic() - started)


def parse_jobs(text: str) -> dict[str, str]:
    """Jobs in a dry run's listing or a run's log, `rule all` left out: "measure norm.training_step" → reason."""
    return {name: reason for _, name, reason in _blocks(text)}


def parse_log(text: str) -> tuple[list[str], list[str]]:
    """Jobs that a run's log shows as started, and those of them that it shows as finished."""
    names = {number: name for number, name, _ in _blocks(text)}
    done = re.findall(r"^Finished jobid: (\d+)", text, re.M)
    return list(names.values()), [names[number] for number in done if number in names]


def _blocks(text: str) -> Iterator[tuple[str, str, str]]:
    for block in re.split(r"\n(?=(?:local)?rule )", text):
        head = re.match(r"(?:local)?rule (\w+):\n", block)
        if head and head.group(1) != "all":
            wild, number, reason = (
                re.search(rf"^    {key}(.+)$", block, re.M) for key in (r"wildcards: \w+=", "jobid: ", "reason: ")
            )
            name = head.group(1) + (f" {wild.group(1)}" if wild else "")
            yield number.group(1) if number else "", name, reason.group(1) if reason else ""


def whole_tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants, whatever group or login they belong to."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_tree(pid: int) -> int:
    """SIGKILL a process and all its descendants at one moment; returns how many there were.

    They are stopped first, until no new one shows up, so that none can start another while the list is made.
    """
    stopped: dict[int, psutil.Process] = {}
    while new := [process for process in whole_tree(pid) if process.pid not in stopped]:
        for process in new:
            _send(process, signal.SIGSTOP)
            stopped[process.pid] = process
    for process in stopped.values():
        _send(process, signal.SIGKILL)
    psutil.wait_procs(list(stopped.values()), timeout=20)
    return len(stopped)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def left_running(marker: Path) -> list[list[str]]:
    """Command lines of the processes whose environment belongs to a lab's project folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PYTHONPATH") == str(marker) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
        except (psutil.Error, OSError):
            continue
    return found


def wait_until(test: Callable[[], object], seconds: float) -> None:
    """Wait until `test()` is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
