"""The steps of a run, their verbs, inputs and outputs: what `lmperf run` executes and `status` explains (no torch)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmperf.planning import Plan
from lmperf.records import atomic_write, canonical_json, digest, to_json

RESULTS = ("results.csv", "attention.csv")
TABLES = ("quality.csv", "precision.csv", "ablation.csv", "ladder.csv", "claims.csv")


@dataclass(frozen=True)
class Step:
    """One unit of work: `lmperf <verb> --spec <spec>`; `timed` ones run alone on the machine."""

    name: str
    verb: str
    spec: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    timed: bool = False
    parallel: bool = False


def steps(plan: Plan) -> Iterator[Step]:
    """All steps in an order in which each one's inputs exist."""
    folders = plan.data, plan.reports
    for verb, spec in (("fetch-corpus", plan.fetch), ("ingest", plan.ingest), ("tokenize", plan.tokenize)):
        yield step_of(verb, spec, *folders)
    yield step_of("profile", plan.profile, *folders)
    for session in plan.sessions.values():
        yield step_of("measure", to_json(session), *folders)
    for run in plan.quality.values():
        yield step_of("train", to_json(run), *folders)
    for verb, spec in (("compare", plan.compare), ("ablate", plan.ablate), ("report", plan.report)):
        yield step_of(verb, spec, *folders)


def step_of(verb: str, spec: Mapping[str, Any], data: str, reports: str) -> Step:
    """The step that `verb` does with `spec`: its name, inputs and outputs follow from these alone."""
    raw, shards, tokens = (f"{data}/{folder}/manifest.json" for folder in ("raw", "shards", "tokens"))
    results = (f"{reports}/results.parquet", *(f"{reports}/tables/{name}" for name in RESULTS))
    tables = tuple(f"{reports}/tables/{name}" for name in TABLES)
    profiled = tuple(f"{reports}/{name}" for name in PROFILE_OUTPUTS)
    measured = [spec["session"]] if verb == "measure" else spec.get("sessions", ())
    trained = [spec["run"]] if verb == "train" else spec.get("quality", ())
    sessions = tuple(f"{reports}/sessions/{name}.jsonl" for name in measured)
    runs = tuple(f"{reports}/quality/{name}.json" for name in trained)
    inputs, outputs = {
        "fetch-corpus": ((), (raw,)),
        "ingest": ((raw,), (shards,)),
        "tokenize": ((shards,), (tokens,)),
        "profile": ((tokens,), profiled),
        "measure": ((tokens,), sessions),
        "train": ((tokens,), runs),
        "compare": (sessions, results),
        "ablate": ((results[0], profiled[0], *runs), tables),
        "report": ((*results, *tables, *profiled, shards, tokens), (f"{reports}/index.html",)),
    }[verb]
    name = " ".join([verb, *(measured if verb == "measure" else trained if verb == "train" else ())])
    return Step(name, verb, spec, inputs, outputs, timed=verb in ("profile", "measure"), parallel=verb == "train")


PROFILE_OUTPUTS = (
    "tables/machine.json",
    "tables/hotspots.csv",
    "tables/utilisation.csv",
    "profile/profile.json",
)


class Stamps:
    """Remembers, for each step, the digest of its spec and of its inputs' contents when it last succeeded.

    The verbs themselves write them, whoever called them; one small file each, since jobs end side by side.
    """

    def __init__(self, reports: Path) -> None:
        self.folder = reports / "work" / "stamps"

    def _file(self, step: Step) -> Path:
        return self.folder / step.name.replace(" ", ".")

    def reason(self, step: Step) -> str | None:
        """Why a step has to run, in a few words, or None when its outputs are current."""
        missing = [name for name in step.outputs if not Path(name).exists()]
        if missing:
            return f"{missing[0]} does not exist"
        try:
            spec, _, inputs = self._file(step).read_text(encoding="ascii").partition(" ")
        except (OSError, UnicodeDecodeError):
            return "not run before"
        if spec != digest(step.spec):
            return "its configuration or code changed"
        return None if inputs == _content(step.inputs) else "its inputs changed"

    def record(self, step: Step) -> None:
        """Remember that a step succeeded with its present spec and inputs."""
        with atomic_write(self._file(step)) as stream:
            stream.write(f"{digest(step.spec)} {_content(step.inputs)}")


def _content(names: tuple[str, ...]) -> str:
    total = hashlib.sha256()
    for name in names:
        path = Path(name)
        total.update(path.read_bytes() if path.is_file() else b"missing")
    return total.hexdigest()[:16]


def command(step: Step, data: str, reports: str) -> list[str]:
    """The command line of a step, without the program's own name."""
    return [step.verb, "--spec", canonical_json(step.spec), "--data", data, "--reports", reports]
