"""Faults of every kind against real runs: signals, broken files, a full or read-only disk, a clock that jumps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_workflow import Lab, Whole, left_running, slow, wait_until, whole_tree

pytestmark = slow


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_no_children(whole: Whole, tmp_path: Path, number: signal.Signals) -> None:
    lab = whole.lab
    spec = json.loads((lab.work / "reports/sessions/norm.training_step.jsonl").read_text().splitlines()[0])["spec"]
    words = [sys.executable, "-m", "lmperf", "measure", "--spec", json.dumps({**spec, "rounds": 500})]
    process = subprocess.Popen(
        [*words, "--data", "data", "--reports", str(tmp_path)], cwd=lab.work, env=lab.environment(),
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    journal = tmp_path / "work" / "norm.training_step.rounds.jsonl"
    wait_until(lambda: journal.exists() and b'"memory"' in journal.read_bytes(), 120)
    assert len(whole_tree(process.pid)) > 1
    process.send_signal(number)
    assert process.wait(60) != 0
    wait_until(lambda: not left_running(lab.project), 30)
    assert not (tmp_path / "sessions" / "norm.training_step.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_workflow_leaves_no_children(tmp_path: Path, number: signal.Signals) -> None:
    lab = Lab.make(tmp_path)
    process = lab.start(log=tmp_path / "log")
    wait_until(lambda: list((lab.work / "reports" / "logs").glob("train.*")), 120)
    time.sleep(1)
    os.killpg(process.pid, number)  # what a terminal's Ctrl-C, and a batch system, do
    assert process.wait(90) != 0
    wait_until(lambda: not left_running(lab.project), 30)
    assert not list((lab.work / ".snakemake" / "locks").glob("*"))


@pytest.fixture
def broken(whole: Whole) -> Iterator[Lab]:
    """The finished lab; whatever files a test replaced by `damage` are put back."""
    yield whole.lab
    for kept in whole.lab.work.rglob("*.kept"):
        kept.replace(kept.with_name(kept.name.removesuffix(".kept")))


def damage(path: Path, data: bytes) -> None:
    """Replace a file's content, keeping the old one aside."""
    path.rename(path.with_name(path.name + ".kept"))
    path.write_bytes(data)


def verb(
    lab: Lab, *words: str, reports: str = "reports", data: str = "data", **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run one verb on the lab's own configuration; `changes` are environment variables."""
    config = ["--config", str(lab.project / "config.yaml"), "--config", "tiny.yaml"]
    return subprocess.run(
        [sys.executable, "-m", "lmperf", *words, *config, "--reports", reports, "--data", data],
        cwd=lab.work, env=lab.environment(**changes), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def one_clear_line(done: subprocess.CompletedProcess[str], *names: str) -> None:
    """The verb failed with one error line that names what is wrong, and without a traceback."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode in (1, 2), done.stderr
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for name in names:
        assert name in errors[0], errors[0]


def test_truncated_token_shard_is_one_clear_line(broken: Lab) -> None:
    shard = next((broken.work / "data/tokens").glob("train-*.arrow"))
    damage(shard, shard.read_bytes()[:-200])
    one_clear_line(verb(broken, "train", "--run", "baseline.s1234"), shard.name)


def test_truncated_text_shard_is_told_and_mended(broken: Lab) -> None:
    shard = next((broken.work / "data/shards").glob("*.arrow"))
    damage(shard, shard.read_bytes()[:100])
    one_clear_line(verb(broken, "tokenize"), shard.name)
    assert verb(broken, "ingest").returncode == 0
    assert shard.read_bytes() == shard.with_name(shard.name + ".kept").read_bytes()


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.98])
def test_corrupt_session_file_is_one_clear_line(broken: Lab, keep: float) -> None:
    file = broken.work / "reports/sessions/norm.training_step.jsonl"
    table = (broken.work / "reports/tables/results.csv").read_bytes()
    data = file.read_bytes()
    damage(file, data[: int(keep * len(data))])
    one_clear_line(verb(broken, "compare"), file.name)
    assert (broken.work / "reports/tables/results.csv").read_bytes() == table


def test_output_that_is_no_folder_is_one_clear_line(broken: Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one_clear_line(verb(broken, "compare", reports=str(tmp_path / "file")))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB of its own; needs root and the right to mount."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("free", [0, 12 << 10])
def test_full_disk_is_one_clear_line_and_earlier_results_stay(broken: Lab, mounted: Path, free: int) -> None:
    name = "sessions/norm.training_step.jsonl"
    earlier = (broken.work / "reports" / name).read_bytes()
    (mounted / "sessions").mkdir()
    (mounted / name).write_bytes(earlier)
    room = os.statvfs(mounted)
    (mounted / "filling").write_bytes(b"x" * (room.f_bavail * room.f_frsize - free))
    one_clear_line(verb(broken, "ingest", data=str(mounted / "data")))
    one_clear_line(verb(broken, "measure", "--session", "norm.training_step", reports=str(mounted)))
    assert (mounted / name).read_bytes() == earlier
    assert not list(mounted.rglob("*.tmp"))


def test_read_only_disk_is_one_clear_line(broken: Lab, mounted: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    there = str(mounted)
    one_clear_line(verb(broken, "ingest", data=there))
    for words in (["train", "--run", "baseline.s1234"], ["measure", "--session", "norm.training_step"], ["report"]):
        one_clear_line(verb(broken, *words, reports=there))


def test_stale_lock_of_a_dead_owner_does_not_block(broken: Lab, tmp_path: Path) -> None:
    lock = Path(broken.environment()["LMPERF_LOCK"])
    lock.write_text(json.dumps({"pid": 1, "session": "long dead", "started": 0.0}))
    done = verb(broken, "measure", "--session", "attention.training_step", reports=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "took over the lock" in done.stderr


def test_dates_of_the_future_or_of_1970_are_no_reason_to_run(broken: Lab) -> None:
    for when in (0, time.time() + 10 * 365 * 86400):
        os.utime(broken.work / "data/tokens/manifest.json", (when, when))
        assert broken.pending() == {}


JUMPING_CLOCK = """\
import itertools, time
real, calls = time.time, itertools.count()
time.time = lambda: real() + 86400 * (-1) ** next(calls)
"""


def test_clock_that_jumps_by_days_disturbs_no_measurement(broken: Lab, tmp_path: Path) -> None:
    """Durations come from the monotonic clock; the time of day is only written down."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    path = os.pathsep.join([str(tmp_path), str(broken.project)])
    for words in (["measure", "--session", "norm.training_step"], ["train", "--run", "baseline.s1234"]):
        done = verb(broken, *words, reports=str(tmp_path), PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
    lines = (tmp_path / "sessions" / "norm.training_step.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [x for x in map(json.loads, lines) if x["kind"] == "sample"]
    assert {sample["status"] for sample in samples} == {"ok"}
    assert all(0 < sample["metrics"]["step_time_s"]["value"] < 1 for sample in samples)
    assert 0 < json.loads((tmp_path / "quality" / "baseline.s1234.json").read_text())["wall_s"] < 300
