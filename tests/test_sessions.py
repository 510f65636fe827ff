"""Sessions end to end with tiny models: the file, typed failures, resume after SIGKILL, the lock, balanced orders."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmperf import sessions
from lmperf.journal import Journal
from lmperf.locking import host_lock
from lmperf.readings import read_session
from lmperf.records import (
    ArmSpec,
    Cell,
    CheckFailed,
    InputError,
    Metric,
    ModelShape,
    Sample,
    SessionSpec,
    read_lines,
    to_json,
)
from lmperf.sessions import balanced_orders, run_session, sample_seed, williams

PLUGIN = str(Path(__file__).parent / "faulty_variants.py")
TINY = ModelShape(vocab_size=61, context_length=16, layers=1, heads=2, kv_heads=2, d_model=16, d_ff=32)
ARMS = (ArmSpec("baseline"), ArmSpec("baseline_prime"), ArmSpec("same_thing", ("attention/same_thing",)))


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPERF_LOCK", str(tmp_path / "lock"))


def tiny(arms: tuple[ArmSpec, ...] = ARMS, **changes: Any) -> SessionSpec:
    values: dict[str, Any] = {
        "session": "attention.training_step", "axis": "attention", "workload": "training_step", "arms": arms,
        "cells": (Cell("T=16", {"length": 16}),), "model": TINY, "batch_size": 2, "sequence_length": 16, "rounds": 3,
        "seed": 5, "device": "cpu", "threads": 1, "blocks": 2, "block_s": 0.004, "warmup_s": 0.01, "warmup_steps": 2,
        "warmup_cap_s": 0.1, "time_limit_s": 20.0, "plugins": (PLUGIN,),
    }  # fmt: skip
    return SessionSpec(**{**values, **changes})


def faulty(*names: str) -> tuple[ArmSpec, ...]:
    return (ArmSpec("baseline"), *(ArmSpec(name, (f"attention/{name}",)) for name in names))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished session of three rounds in a folder of its own."""
    folder = tmp_path_factory.mktemp("finished")
    arms = (*ARMS, ArmSpec("own_environment", ("graph/own_environment",)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMPERF_LOCK", str(folder / "lock"))
        return run_session(tiny(arms), folder / "s.jsonl", work=folder / "work")


def test_a_session_file_holds_the_spec_every_round_and_the_end(finished: Path) -> None:
    found = read_session(finished)
    assert (found.rounds, found.finished) == (3, True)
    assert found.spec.rounds == 3
    assert {key: sorted(rounds) for key, rounds in found.index.items()} == {
        (arm.name, "T=16"): [1, 2, 3] for arm in found.spec.arms
    }
    assert {(m["arm"], m["status"]) for m in found.memory} == {
        ("baseline", "ok"), ("same_thing", "ok"), ("own_environment", "ok"),
    }  # fmt: skip
    assert list((finished.parent / "work").iterdir()) == []


def test_a_sample_tells_the_four_times_the_curve_and_the_checks(finished: Path) -> None:
    sample = read_session(finished).samples[0]
    assert {"step_time_s", "first_step_s", "build_time_s", "tokens_per_s"} <= set(sample.metrics)
    assert len(sample.metrics["step_time_s"].blocks) == 2
    assert sample.metrics["tokens_per_s"].value == pytest.approx(32 / sample.metrics["step_time_s"].value)
    assert len(sample.details["warmup"]["curve"]) >= 4
    assert [check["passed"] for check in sample.details["checks"]] == [True, True]
    assert sample.details["threads"] == 1
    header = read_lines(finished)[0]
    assert header["environment"]["GOMP_SPINCOUNT"] == "1000"
    assert header["provenance"]["machine"]["torch"]


def test_a_variant_with_an_environment_of_its_own_gets_its_own_server(finished: Path) -> None:
    index = read_session(finished).index
    seen = {arm: index[arm, "T=16"][1].details["environment"]["GOMP_SPINCOUNT"] for arm, _ in index}
    assert seen == {"baseline": "1000", "baseline_prime": "1000", "same_thing": "1000", "own_environment": "7"}


def test_the_memory_sample_explains_its_peak(finished: Path) -> None:
    memory = {line["arm"]: line for line in read_session(finished).memory}
    table = memory["baseline"]["details"]["table"]
    assert table["gradients"] == table["parameters"]
    assert table["moments"] >= 2 * table["parameters"]
    assert 0.5 < memory["baseline"]["details"]["explained"] <= 1.2
    assert memory["baseline"]["metrics"]["peak_memory_bytes"] == memory["same_thing"]["metrics"]["peak_memory_bytes"]


def test_every_failure_is_a_typed_row_and_the_others_finish(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))  # a resource tracker of an earlier test, say
    names = ("wrong_values", "raises", "cannot_compose", "null_read", "hangs", "eats_memory", "needs_a_package")
    cells = (Cell("T=16", {"length": 16}, size=16), Cell("T=8", {"length": 8}, size=8))
    options = {"memory": False}  # the memory samples would fail alike, and hang once more
    spec = tiny(faulty(*names), cells=cells, time_limit_s=6.0, rounds=2, memory_limit_bytes=2 << 30, options=options)
    out = run_session(spec, tmp_path / "s.jsonl", work=tmp_path / "work")
    found = read_session(out)
    rows = {key: next(iter(rounds.values())) for key, rounds in found.index.items()}
    statuses = {name: rows[name, "T=8"].status for name in names}
    assert statuses == {
        "wrong_values": "incorrect", "raises": "crashed", "cannot_compose": "crashed", "null_read": "crashed",
        "hangs": "timeout", "eats_memory": "oom_host", "needs_a_package": "unsupported",
    }  # fmt: skip
    assert "SIGSEGV" in rows["null_read", "T=8"].reason
    assert "never finished" in rows["raises", "T=8"].reason
    assert rows["null_read", "T=8"].phase == "check"
    assert rows["hangs", "T=16"].status == rows["eats_memory", "T=16"].status == "skipped_dominated"
    assert rows["wrong_values", "T=16"].status == "incorrect"
    assert all(len(found.index[name, "T=8"]) == 1 and not rows[name, "T=8"].metrics for name in names)
    assert len(found.index["baseline", "T=16"]) == len(found.index["baseline", "T=8"]) == 2
    assert set(psutil.Process().children(recursive=True)) <= before


def start(spec: SessionSpec, folder: Path, *, stand_in: bool) -> int:
    """A session in a process of its own; returns its pid.

    `stand_in`: its samples come at once instead of from fresh processes, so that many kills take seconds.
    """
    pid = os.fork()
    if pid == 0:
        try:
            if stand_in:
                sessions.Runner.sample = quick_sample  # type: ignore[method-assign]
            run_session(spec, folder / "s.jsonl", work=folder / "work")
        finally:
            os._exit(0)
    return pid


def quick_sample(self: sessions.Runner, call: str, arm: ArmSpec, cell: Cell, number: int) -> dict[str, Any]:
    time.sleep(0.004)
    return to_json(Sample(arm.name, cell.label, number, metrics={"step_time_s": Metric("s", time.time())}))


def gone(process: psutil.Process) -> bool:
    """Whether a process ends within ten seconds (a zombie has ended: whoever inherited it may not have asked yet)."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def closed_bytes(path: Path) -> bytes:
    """The file up to the last closed round or memory line."""
    kept, position, data = 0, 0, path.read_bytes() if path.exists() else b""
    for raw in data.split(b"\n")[:-1]:
        position += len(raw) + 1
        kept = position if json.loads(raw)["kind"] in ("header", "memory", "round") else kept
    return data[:kept]


def finish_and_verify(spec: SessionSpec, folder: Path, kept: bytes, *, stand_in: bool) -> None:
    """Run to the end: what was closed stands byte for byte, all rounds are there and none twice."""
    out = folder / "s.jsonl"
    if not out.exists():
        os.waitpid(start(spec, folder, stand_in=stand_in), 0)
    assert out.read_bytes().startswith(kept)
    found = read_session(out)
    assert (found.rounds, found.finished) == (spec.rounds, True)
    lines = [line for line in read_lines(out) if line["kind"] == "sample"]
    counts = Counter((line["arm"], line["round"]) for line in lines)
    assert Counter(counts.values()) == {1: len(spec.arms) * spec.rounds}


def test_killed_at_ten_random_moments_it_keeps_every_closed_round_and_counts_none_twice(tmp_path: Path) -> None:
    spec = tiny(rounds=400)
    rounds = tmp_path / "work" / "attention.training_step.rounds.jsonl"
    moments, kept = random.Random(11), b""
    sessions.check_spec(spec)
    sessions.make_header(spec)  # what is slow at first is remembered by the processes forked below
    for _ in range(10):
        pid = start(spec, tmp_path, stand_in=True)
        time.sleep(moments.random() * 0.5)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert not (tmp_path / "s.jsonl").exists(), "too few rounds: it finished before the kill"
        assert closed_bytes(rounds).startswith(kept)
        kept = closed_bytes(rounds)
    assert kept.count(b'"kind":"round"') >= 3, "the kills fell before any round"
    finish_and_verify(tiny(rounds=400), tmp_path, kept, stand_in=True)


def test_a_killed_session_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    spec = tiny(rounds=4, workload="counting", session="attention.counting")
    rounds = tmp_path / "work" / "attention.counting.rounds.jsonl"
    pid = start(spec, tmp_path, stand_in=False)
    deadline = time.monotonic() + 120
    while b'"kind":"round"' not in closed_bytes(rounds) and time.monotonic() < deadline:
        time.sleep(0.005)
    running = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(running) >= 1
    assert all(gone(process) for process in running)
    finish_and_verify(spec, tmp_path, closed_bytes(rounds), stand_in=False)


def test_a_changed_spec_starts_anew_and_the_same_one_continues(tmp_path: Path) -> None:
    header = {"kind": "header", "spec": to_json(tiny()), "fingerprint": "f", "environment": {}}
    said: list[str] = []
    path = tmp_path / "r.jsonl"
    Journal.open(path, header, said.append).add_round([])
    assert Journal.open(path, header, said.append).rounds == 1
    assert Journal.open(path, {**header, "spec": to_json(tiny(rounds=4))}, said.append).rounds == 0
    assert len(said) == 2


@pytest.mark.parametrize("damage", [b"not json\n", b'{"kind":"round","round":7}\n', b'{"kind":"other"}\n', b"[1]\n"])
def test_a_corrupt_rounds_file_is_kept_aside_and_measured_anew(tmp_path: Path, damage: bytes) -> None:
    header = {"kind": "header", "spec": {}, "fingerprint": "f", "environment": {}}
    said: list[str] = []
    path = tmp_path / "r.jsonl"
    Journal.open(path, header, said.append).add_round([])
    path.write_bytes(path.read_bytes() + damage)
    damaged = path.read_bytes()
    journal = Journal.open(path, header, said.append)
    assert (journal.rounds, len(said)) == (0, 1)
    assert (tmp_path / "r.jsonl.unreadable-1").read_bytes() == damaged


def test_a_half_written_round_is_cut_off(tmp_path: Path) -> None:
    header = {"kind": "header", "spec": {}, "fingerprint": "f", "environment": {}}
    path = tmp_path / "r.jsonl"
    Journal.open(path, header, print).add_round([])
    whole = path.read_bytes()
    for torn in (b'{"kind":"sam', b'{"kind":"sample","arm":"a","cell":"c","round":2}\n', b'{"kind":"round","round":2}'):
        path.write_bytes(whole + torn)
        assert Journal.open(path, header, print).rounds == 1
        assert path.read_bytes() == whole


def test_two_sessions_on_one_host_are_refused_and_a_dead_owner_holds_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    with host_lock("first", said.append):
        with pytest.raises(CheckFailed, match=f"process {os.getpid()}, session first"), host_lock("second", print):
            pass
    owner = os.fork()
    if owner == 0:
        with host_lock("dead", said.append):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(owner, 0)
    with host_lock("third", said.append):
        pass
    assert len(said) == 1
    assert "left behind" in said[0]


def test_a_spec_that_cannot_be_measured_is_refused_in_one_line(tmp_path: Path) -> None:
    for spec, word in (
        (tiny((ArmSpec("other"),)), "baseline"),
        (tiny((*ARMS, ArmSpec("baseline"))), "twice"),
        (tiny((*ARMS, ArmSpec("x", ("attention/sdpa_flush",)))), "sdpa_flush"),
        (tiny(rounds=0), "rounds 0"),
    ):
        with pytest.raises(InputError, match=word):
            run_session(spec, tmp_path / "s.jsonl", work=tmp_path / "work")


@pytest.mark.parametrize("arms", [2, 3, 4, 5, 8])
def test_orders_balance_places_and_neighbours(arms: int) -> None:
    rows = williams(arms)
    places = Counter((place, arm) for row in rows for place, arm in enumerate(row))
    pairs = Counter(pair for row in rows for pair in zip(row, row[1:], strict=False))
    assert len(set(places.values())) == len(set(pairs.values())) == 1
    assert len(pairs) == arms * (arms - 1)


def test_orders_depend_on_the_seed_alone_and_a_longer_session_begins_alike() -> None:
    assert balanced_orders(4, 9, 3) == balanced_orders(4, 12, 3)[:9]
    assert balanced_orders(4, 9, 3) != balanced_orders(4, 9, 4)
    assert all(sorted(order) == [0, 1, 2, 3] for order in balanced_orders(4, 9, 3))


def test_arms_of_a_round_share_their_inputs_and_rounds_do_not() -> None:
    cell = Cell("a")
    assert sample_seed(1, 2, cell) == sample_seed(1, 2, cell)
    assert len({sample_seed(1, 1, cell), sample_seed(1, 2, cell), sample_seed(2, 1, cell)}) == 3
