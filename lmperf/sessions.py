"""Sessions: rounds of fresh processes in balanced random order; failures are typed rows; a killed session resumes."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmperf import registry
from lmperf.environments import process_environment
from lmperf.forkserver import Typed
from lmperf.journal import Journal
from lmperf.launching import ForkServer, Outcome, default_memory_limit, must_spawn
from lmperf.locking import host_lock
from lmperf.machine import fingerprint, machine
from lmperf.provenance import cluster_job, provenance, scrub
from lmperf.records import ArmSpec, Cell, InputError, Sample, SessionSpec, canonical_json, digest, to_json

CONTROL = "baseline_prime"
DOMINATING = ("oom_device", "oom_host", "timeout")
COLD_FACTOR = 2.0  # the memory sample's time limit, in those of a timed sample
Say = Callable[[str], None]


def run_session(
    spec: SessionSpec, out: Path, *, work: Path, progress: Say | None = None, server: ForkServer | None = None
) -> Path:
    """Measure a session and write it to `out`; one killed before continues at the round it was in.

    `server`, a fork server launched beforehand, serves the arms of its environment and is closed with the others.
    Arms that fail give typed rows and do not end the session.  Raises `InputError` for a spec that cannot be run and
    `CheckFailed` when another session is being timed on this host.
    """
    say = _named(progress, spec.session)
    check_spec(spec)
    out, work = Path(out), Path(work)
    with host_lock(spec.session, say), contextlib.ExitStack() as stack:
        header = make_header(spec)
        scratch = work / f"{spec.session}.scratch"
        journal = Journal.open(work / f"{spec.session}.rounds.jsonl", header, say)
        if not journal.memory:
            shutil.rmtree(scratch, ignore_errors=True)  # compile caches of another spec
        launched = {} if server is None else {canonical_json(dict(server.environment)): server}
        runner = stack.enter_context(Runner(spec, scratch, launched))
        if spec.options.get("memory", True):
            _weigh_arms(spec, journal, runner, say)
        for number in range(journal.rounds + 1, spec.rounds + 1):
            started = time.monotonic()
            samples = run_round(spec, number, journal, runner)
            journal.add_round(samples, cluster_job())
            bad = sum(sample["status"] != "ok" for sample in samples)
            note = f", {bad} not ok" if bad else ""
            say(f"round {number} of {spec.rounds}: {len(samples)} samples in {time.monotonic() - started:.1f} s{note}")
        shutil.rmtree(scratch, ignore_errors=True)
        return journal.finish(out)


def _named(progress: Say | None, session: str) -> Say:
    return (lambda text: progress(f"{session}: {text}")) if progress is not None else (lambda text: None)


def check_spec(spec: SessionSpec) -> None:
    """Refuse a spec that no session can be made of: unknown variants, no baseline, twice the same name."""
    names = [arm.name for arm in spec.arms]
    labels = [cell.label for cell in spec.cells]
    for what, values in (("arms", names), ("cells", labels)):
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise InputError(f"{spec.session}: {what} has {twice[0]!r} twice; every name may stand once")
    if "baseline" not in names:
        raise InputError(f"{spec.session}: arms has no 'baseline'; found: {', '.join(names) or 'none'}")
    if spec.rounds < 1 or spec.blocks < 1:
        raise InputError(f"{spec.session}: rounds {spec.rounds} and blocks {spec.blocks} must be 1 or more")
    for arm in spec.arms:
        for key in arm.variants:
            registry.get(key, spec.plugins)


def make_header(spec: SessionSpec) -> dict[str, Any]:
    """The first line: spec, provenance, machine, the environment of the process samples, one fingerprint."""
    facts = machine()
    return {
        "kind": "header",
        "spec": to_json(spec),
        "provenance": {**provenance(spec), "machine": facts},
        "node": node_label(),
        "environment": _published(process_environment(spec.threads, spec.environment)),
        "fingerprint": fingerprint(facts),
    }


def node_label() -> str | None:
    """Which node of a cluster this is, by a label that names no host; None outside a cluster."""
    job = cluster_job()
    return job["node"] if job else None


def _published(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: scrub(value) for name, value in sorted(environment.items())}


@dataclass
class Runner:
    """Runs process samples: one fork server for each environment that the arms need, limits from the spec."""

    spec: SessionSpec
    scratch: Path
    servers: dict[str, ForkServer] = field(default_factory=dict)
    limit: int = 0

    def __enter__(self) -> Runner:
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.limit = self.spec.memory_limit_bytes or default_memory_limit()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers.values():
            server.close()

    def sample(self, call: str, arm: ArmSpec, cell: Cell, number: int) -> dict[str, Any]:
        """One process sample as JSON, whatever became of it."""
        folder = self.scratch / "sample"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        arguments = {
            "spec": to_json(self.spec), "arm": to_json(arm), "cell": to_json(cell), "round": number,
            "seed": sample_seed(self.spec.seed, number, cell), "scratch": str(folder),
            "compile_cache": str(self.scratch / "compiled" / digest([arm.variants, cell.label])),
        }  # fmt: skip
        server = self.server(arm)
        # The first process of an arm meets empty compile caches, and compiles the checked model too.
        seconds = self.spec.time_limit_s * (COLD_FACTOR if number == 0 else 1)
        outcome = server.run(call, arguments, time_limit_s=seconds, memory_limit_bytes=self.limit, scratch=folder)
        shutil.rmtree(folder, ignore_errors=True)
        return as_sample(outcome, arm, cell, number)

    def server(self, arm: ArmSpec) -> ForkServer:
        """The fork server of an arm's environment."""
        changes = arm_environment(arm, self.spec.plugins)
        environment = process_environment(self.spec.threads, self.spec.environment, changes)
        key = canonical_json(environment)
        if key not in self.servers:
            self.servers[key] = ForkServer(environment, spawn=must_spawn(self.spec.device))
        return self.servers[key]


def arm_environment(arm: ArmSpec, plugins: Sequence[str]) -> Mapping[str, str]:
    """What an arm's recipe sets before Python starts; an arm that cannot even be composed fails in its own process."""
    with Typed():
        return registry.compose(arm.variants, plugins).environment
    return {}


def as_sample(outcome: Outcome, arm: ArmSpec, cell: Cell, number: int) -> dict[str, Any]:
    """The sample that a process gave, or the typed row that stands for it; the process's peak is kept beside either."""
    if outcome.status == "ok":
        sample = dict(outcome.value)
        sample["details"] = {**sample["details"], "process_peak_rss_bytes": outcome.peak_rss_bytes}
        return sample
    details = {
        "process_peak_rss_bytes": outcome.peak_rss_bytes, "process_s": outcome.wall_s, "trace": list(outcome.trace),
    }  # fmt: skip
    reason = scrub(outcome.reason) if outcome.reason else None
    return to_json(Sample(arm.name, cell.label, number, outcome.status, reason, outcome.phase, details=details))


def sample_seed(seed: int, number: int, cell: Cell) -> int:
    """The seed of one round at one cell: the same for all its arms, so that they get the same inputs."""
    return int(digest([seed, number, cell.label], 8), 16) % 2**31


def _weigh_arms(spec: SessionSpec, journal: Journal, runner: Runner, say: Say) -> None:
    """One memory sample of each arm and cell in a process of its own; what is already in the journal is left."""
    done = {(sample.arm, sample.cell) for sample in journal.memory}
    for cell in spec.cells:
        for arm in spec.arms:
            # The A/A arm is the baseline's own recipe: its memory would be the same number, at the same cost.
            if arm.name == CONTROL or arm.inject_slowdown or (arm.name, cell.label) in done:
                continue
            reason = unavailable(arm, spec.plugins)
            if reason:
                journal.add_memory(to_json(Sample(arm.name, cell.label, 0, "unsupported", reason)))
            else:
                journal.add_memory(runner.sample("lmperf.sampling:weighed", arm, cell, 0))
        say(f"memory of {cell.label} is weighed")


def unavailable(arm: ArmSpec, plugins: Sequence[str]) -> str | None:
    """Why an arm cannot run on this machine, or None."""
    reasons = [reason for key in arm.variants if (reason := registry.get(key, plugins).unavailable())]
    return "; ".join(reasons) or None


def run_round(spec: SessionSpec, number: int, journal: Journal, runner: Runner) -> list[dict[str, Any]]:
    """Samples of all arms at all cells, smaller cells first; arms that failed before are left out."""
    failed = {(sample.arm, sample.cell): sample for sample in journal.samples if sample.status != "ok"}
    sizes = {cell.label: cell.size for cell in spec.cells}
    limits: dict[str, float] = {}
    for (name, label), sample in failed.items():
        if sample.status in DOMINATING:
            limits[name] = min(limits.get(name, sizes[label]), sizes[label])
    samples = []
    for cell in sorted(spec.cells, key=lambda c: c.size):
        for arm in round_order(spec, cell, number):
            if (arm.name, cell.label) in failed:
                continue
            sample = _one(arm, cell, number, limits, runner)
            if sample["status"] in DOMINATING:
                limits[arm.name] = min(limits.get(arm.name, cell.size), cell.size)
            samples.append(sample)
    return samples


def _one(arm: ArmSpec, cell: Cell, number: int, limits: Mapping[str, float], runner: Runner) -> dict[str, Any]:
    reason = unavailable(arm, runner.spec.plugins)
    if reason:
        return to_json(Sample(arm.name, cell.label, number, "unsupported", reason))
    if cell.size > limits.get(arm.name, float("inf")):
        reason = "a smaller cell of this arm ran out of memory or time"
        return to_json(Sample(arm.name, cell.label, number, "skipped_dominated", reason))
    return runner.sample("lmperf.sampling:timed", arm, cell, number)


def round_order(spec: SessionSpec, cell: Cell, number: int) -> list[ArmSpec]:
    """The order of the arms in round `number` (from 1) at a cell."""
    design = balanced_orders(len(spec.arms), number, int(digest([spec.seed, "order", cell.label], 8), 16))
    return [spec.arms[index] for index in design[number - 1]]


def balanced_orders(arms: int, rounds: int, seed: int) -> list[tuple[int, ...]]:
    """Orders for `rounds` rounds: Williams designs with arms and rows shuffled afresh for each.

    Within one design (arms rounds when arms is even, twice as many when odd) every arm stands equally often in every
    place and follows every other arm equally often, so that neither the place nor the neighbour favours anyone.
    """
    shuffler, orders = random.Random(seed), []
    while len(orders) < rounds:
        names = list(range(arms))
        shuffler.shuffle(names)
        rows = williams(arms)
        shuffler.shuffle(rows)
        orders += [tuple(names[index] for index in row) for row in rows]
    return orders[:rounds]


def williams(arms: int) -> list[list[int]]:
    """Williams's square of `arms` treatments (1949), balanced for first-order carry-over; two squares when odd."""
    first = [(place + 1) // 2 if place % 2 else (arms - place // 2) % arms for place in range(arms)]
    square = [[(entry + shift) % arms for entry in first] for shift in range(arms)]
    return square if arms % 2 == 0 else square + [row[::-1] for row in square]
