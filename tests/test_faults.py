"""Faults of every kind against real runs: kills at random moments, signals, broken files, a full or read-only disk.

LMPERF_KILLS=20 does the whole of the kill test (the default is a few moments, since each costs seconds).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_workflow import Lab, kill_tree, left_running, whole_tree

pytestmark = pytest.mark.skipif(
    "LMPERF_SLOW" not in os.environ, reason="kill and fault tests take many minutes: set LMPERF_SLOW=1 to run them"
)

KILLS = int(os.environ.get("LMPERF_KILLS", "2"))
KILLS_A_RUN = 5
TIMELESS = ("curve", "final", "held_out", "domains", "status", "stability")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lab, float]:
    """An undisturbed run and how long it took in seconds."""
    lab = Lab.make(tmp_path_factory.mktemp("undisturbed"))
    started = time.monotonic()
    done = lab.snakemake(timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    return lab, time.monotonic() - started


def timeless(lab: Lab) -> dict[str, Any]:
    """What no disturbance may change: texts, tokens, quality curves, and which samples there are with which status."""
    found: dict[str, Any] = {}
    for folder in ("data/shards", "data/tokens"):
        for path in sorted((lab.work / folder).iterdir()):
            data = path.read_bytes()
            if path.name == "manifest.json":
                data = data.replace(b'"reused": true', b'"reused": false')  # whether a shard was already there
            found[f"{folder}/{path.name}"] = hashlib.sha256(data).hexdigest()
    for path in sorted((lab.work / "reports" / "quality").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        found[path.name] = without_times({key: run[key] for key in TIMELESS if key in run})
    for path in sorted((lab.work / "reports" / "sessions").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert lines[-1] == {"kind": "end"}
        samples = [line for line in lines if line["kind"] == "sample"]
        found[path.name] = sorted((line["round"], line["cell"], line["arm"], line["status"]) for line in samples)
    return found


def without_times(value: Any) -> Any:
    """`value` without its seconds."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not key.endswith("_s")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def stale_files(lab: Lab) -> list[str]:
    """Half-written files that stand where a result belongs."""
    places = [lab.work / "reports" / name for name in ("sessions", "quality", "tables")] + [lab.work / "data/tokens"]
    return [path.name for place in places for path in place.glob("*.tmp")]


def killed_run(lab: Lab, moments: Sequence[float], log: Path) -> dict[str, int]:
    """Run, kill the whole tree after each of `moments` seconds, and at last run to the end; what had to be done."""
    counts = {"kills": 0, "ended before": 0, "unlocked": 0, "processes": 0}
    for moment in moments:
        process = lab.start(log=log)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            counts["processes"] += kill_tree(process.pid)
            process.wait()
            counts["kills"] += 1
            counts["unlocked"] += unlock(lab)
        else:
            counts["ended before"] += 1
            assert process.returncode == 0, log.read_text(encoding="utf-8")[-4000:]
    done = lab.snakemake(timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    counts["jobs of the last run"] = done.stdout.count("Finished jobid")
    return counts


def unlock(lab: Lab) -> int:
    """Take Snakemake's own lock away, as its message says and docs/cluster.md tells; 1 when there was one."""
    locked = any((lab.work / ".snakemake" / "locks").glob("*"))
    if locked:
        assert lab.snakemake("--unlock").returncode == 0
    return int(locked)


def test_kills_at_random_moments(finished: tuple[Lab, float], tmp_path: Path) -> None:
    whole, seconds = finished
    expected = timeless(whole)
    seed = int(os.environ.get("LMPERF_SEED", "1"))
    chooser, left, told = random.Random(seed), KILLS, []
    while left > 0:
        number = min(left, KILLS_A_RUN)
        lab = Lab.make(tmp_path / f"kill {len(told)}")
        moments = [chooser.uniform(2.0, max(4.0, 0.7 * seconds)) for _ in range(number)]
        told.append(killed_run(lab, moments, tmp_path / "log"))
        assert timeless(lab) == expected, f"seed {seed}, moments {moments}"
        assert lab.pending() == {}
        assert not left_running(lab.project)
        left -= number
    sys.stderr.write(f"\nkills, undisturbed run {seconds:.0f} s, seed {seed}: {json.dumps(told)}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_no_children(finished: tuple[Lab, float], tmp_path: Path, number: signal.Signals) -> None:
    lab, _ = finished
    spec = json.loads((lab.work / "reports/sessions/norm.training_step.jsonl").read_text().splitlines()[0])["spec"]
    words = [sys.executable, "-m", "lmperf", "measure", "--spec", json.dumps({**spec, "rounds": 500})]
    process = subprocess.Popen(
        [*words, "--data", "data", "--reports", str(tmp_path)], cwd=lab.work, env=lab.environment(),
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    journal = tmp_path / "work" / "norm.training_step.rounds.jsonl"
    wait_until(lambda: journal.exists() and b'"memory"' in journal.read_bytes(), 120)
    children = whole_tree(process.pid)
    assert len(children) > 1
    process.send_signal(number)
    assert process.wait(60) != 0
    wait_until(lambda: not left_running(lab.project), 30)
    assert not (tmp_path / "sessions" / "norm.training_step.jsonl").exists()


def test_interrupted_workflow_leaves_no_children(finished: tuple[Lab, float], tmp_path: Path) -> None:
    lab = Lab.make(tmp_path)
    process = lab.start(log=tmp_path / "log")
    wait_until(lambda: list((lab.work / "reports" / "logs").glob("train.*")), 120)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal's Ctrl-C does
    assert process.wait(90) != 0
    wait_until(lambda: not left_running(lab.project), 30)
    assert not list((lab.work / ".snakemake" / "locks").glob("*"))


def wait_until(test: Any, seconds: float) -> None:
    """Wait until `test()` is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


@pytest.fixture
def broken(finished: tuple[Lab, float]) -> Iterator[Lab]:
    """The finished lab; whatever files a test replaced by `damage` are put back."""
    lab, _ = finished
    yield lab
    for kept in lab.work.rglob("*.kept"):
        kept.replace(kept.with_name(kept.name.removesuffix(".kept")))


def damage(path: Path, data: bytes) -> None:
    """Replace a file's content, keeping the old one aside."""
    path.rename(path.with_name(path.name + ".kept"))
    path.write_bytes(data)


def verb(lab: Lab, *words: str, reports: str = "reports", data: str = "data") -> subprocess.CompletedProcess[str]:
    """Run one verb on the lab's own configuration."""
    config = ["--config", str(lab.project / "config.yaml"), "--config", "tiny.yaml"]
    return subprocess.run(
        [sys.executable, "-m", "lmperf", *words, *config, "--reports", reports, "--data", data],
        cwd=lab.work, env=lab.environment(), capture_output=True, text=True, timeout=300, check=False,
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


def test_truncated_text_shard_is_told_or_mended(broken: Lab) -> None:
    shard = next((broken.work / "data/shards").glob("*.arrow"))
    damage(shard, shard.read_bytes()[:100])
    one_clear_line(verb(broken, "tokenize", data="data"), shard.name)
    assert verb(broken, "ingest").returncode == 0
    assert shard.read_bytes() == shard.with_name(shard.name + ".kept").read_bytes()


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.98])
def test_corrupt_session_file_is_one_clear_line(broken: Lab, keep: float) -> None:
    file = broken.work / "reports/sessions/norm.training_step.jsonl"
    data = file.read_bytes()
    damage(file, data[: int(keep * len(data))])
    one_clear_line(verb(broken, "compare"), file.name)


def test_output_that_is_no_folder_is_one_clear_line(broken: Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one_clear_line(verb(broken, "compare", reports=str(tmp_path / "file")))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB of its own; needs root and the right to mount."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk_is_one_clear_line(broken: Lab, mounted: Path) -> None:
    one_clear_line(verb(broken, "ingest", data=str(mounted / "data")))
    (mounted / "reports").mkdir()
    (mounted / "reports" / "filling").write_bytes(b"x" * (60 << 10))
    one_clear_line(verb(broken, "measure", "--session", "norm.training_step", reports=str(mounted / "reports")))
    assert not list(mounted.rglob("*.jsonl.*tmp"))


def test_read_only_disk_is_one_clear_line(broken: Lab, mounted: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    for words in (["ingest"], ["train", "--run", "baseline.s1234"], ["measure", "--session", "norm.training_step"]):
        one_clear_line(
            verb(broken, *words, reports=str(mounted / "r"), data="data" if words[0] != "ingest" else str(mounted))
        )


def test_stale_lock_of_a_dead_owner_does_not_block(broken: Lab, tmp_path: Path) -> None:
    lock = Path(broken.environment()["LMPERF_LOCK"])
    lock.write_text(json.dumps({"pid": 1, "session": "long dead", "started": 0.0}))
    done = verb(broken, "measure", "--session", "attention.training_step", reports=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "took over the lock" in done.stderr


def test_clock_that_jumped_is_no_reason_to_run(broken: Lab) -> None:
    """A result of the future, or of 1970, stays current: contents decide, not times."""
    for when in (0, time.time() + 10 * 365 * 86400):
        os.utime(broken.work / "data/tokens/manifest.json", (when, when))
        assert broken.pending() == {}
