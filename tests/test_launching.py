"""Fresh processes: answers, every way to fail as a typed outcome, limits, environments, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lmperf.environments import process_environment
from lmperf.launching import ForkServer, Outcome

HERE = str(Path(__file__).parent)
GIB = 1 << 30


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(process_environment(2, {"PYTHONPATH": HERE}), preload=("torch",)) as started:
        yield started


def run(server: ForkServer, name: str, seconds: float = 20.0, memory: int = 2 * GIB, **arguments: object) -> Outcome:
    return server.run(f"sample_jobs:{name}", arguments, time_limit_s=seconds, memory_limit_bytes=memory)


def gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_job_runs_in_a_fresh_process_of_its_own_session(server: ForkServer) -> None:
    first, second = run(server, "add", numbers=[1, 2]), run(server, "add", numbers=[5])
    assert (first.status, first.value["sum"], second.value["sum"]) == ("ok", 3, 5)
    assert first.value["pid"] != second.value["pid"]
    assert first.value["own_session"]


def test_the_server_has_started_no_thread_before_it_forks(server: ForkServer) -> None:
    run(server, "add", numbers=[])
    assert server.hello["threads"] == 1


@pytest.mark.parametrize(
    ("name", "status", "words", "phase"),
    [
        ("raises", "crashed", "one over nothing", "thinking"),
        ("leaves", "crashed", "SystemExit", None),
        ("vanishes", "crashed", "exit code 5", None),
        ("unsupported", "unsupported", "no such instruction here", None),
        ("null_read", "crashed", "SIGSEGV", "reading"),
        ("null_read_with_helper", "crashed", "SIGSEGV", "reading"),
        ("not_a_number", "crashed", "JSON", None),
    ],
)
def test_each_way_to_fail_has_its_type_and_phase(
    server: ForkServer, name: str, status: str, words: str, phase: str | None
) -> None:
    outcome = run(server, name)
    assert (outcome.status, outcome.phase) == (status, phase)
    assert words in (outcome.reason or "")
    assert run(server, "add", numbers=[1]).status == "ok"  # the server lives on


def test_a_hanging_job_ends_at_its_limit_with_all_its_helpers(server: ForkServer, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    outcome = run(server, "hangs", seconds=1.0, note=str(note))
    assert (outcome.status, outcome.phase) == ("timeout", "waiting")
    assert gone(int(note.read_text()))


def test_what_a_finished_job_left_behind_is_ended(server: ForkServer) -> None:
    outcome = run(server, "leaves_a_helper")
    assert outcome.status == "ok"
    assert gone(outcome.value["helper"])


def test_too_large_an_allocation_is_out_of_host_memory(server: ForkServer) -> None:
    outcome = run(server, "eats_memory", memory=GIB)
    assert (outcome.status, outcome.phase) == ("oom_host", "eating")


def test_the_limit_counts_helpers_too(server: ForkServer) -> None:
    outcome = run(server, "eats_slowly", memory=700 << 20)
    assert (outcome.status, outcome.phase) == ("oom_host", "eating")
    assert outcome.peak_rss_bytes is not None
    assert outcome.peak_rss_bytes > 700 << 20


def test_settings_are_there_before_python_starts_and_empty_ones_are_not() -> None:
    with ForkServer(process_environment(1, {"PYTHONPATH": HERE, "MALLOC_TOP_PAD_": ""}), preload=()) as server:
        assert run(server, "variable", key="GOMP_SPINCOUNT").value["value"] == "1000"
        assert run(server, "variable", key="OMP_NUM_THREADS").value["value"] == "1"
        assert run(server, "variable", key="MALLOC_TOP_PAD_").value["value"] is None


def test_a_stage_restarts_itself_with_the_same_settings() -> None:
    code = (
        "import os; from lmperf.environments import process_environment as p; from lmperf.stages import restart_with;"
        "restart_with(p(1, {'MALLOC_TOP_PAD_': ''}));"
        "print(*(os.environ.get(n) for n in ('OMP_NUM_THREADS', 'GOMP_SPINCOUNT', 'MALLOC_TOP_PAD_')))"
    )
    before = {**os.environ, "OMP_NUM_THREADS": "7", "MALLOC_TOP_PAD_": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=before, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["1 1000 None", ""]


def test_spawned_jobs_answer_and_fail_alike() -> None:
    with ForkServer({"PYTHONPATH": HERE}, spawn=True) as server:
        assert run(server, "add", numbers=[2, 2]).value["sum"] == 4
        assert "SIGSEGV" in (run(server, "null_read").reason or "")
        assert run(server, "hangs", seconds=1.0, note=os.devnull).status == "timeout"


def test_a_killed_server_is_a_typed_outcome_and_the_next_job_gets_a_new_one() -> None:
    with ForkServer({"PYTHONPATH": HERE}, preload=()) as server:
        assert run(server, "add", numbers=[1]).status == "ok"
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        assert run(server, "add", numbers=[1]).status in ("crashed", "ok")
        assert run(server, "add", numbers=[1]).status == "ok"


def test_when_the_owner_is_killed_its_server_and_running_job_end(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    owner = os.fork()
    if owner == 0:
        ForkServer({"PYTHONPATH": HERE}, preload=()).run(
            "sample_jobs:hangs", {"note": str(note)}, time_limit_s=60, memory_limit_bytes=GIB
        )
        os._exit(0)
    deadline = time.monotonic() + 20
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    running = psutil.Process(owner).children(recursive=True)
    assert len(running) >= 3  # the server, the job and its helper
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert all(gone(process.pid) for process in running)
