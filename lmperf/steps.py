"""The steps of a run, their verbs, inputs and outputs: what `lmperf run` executes and `status` explains (no torch)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmperf.planning import Plan
from lmperf.records import canonical_json, digest, to_json, write_json

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
    data, reports = plan.data, plan.reports
    raw, shards, tokens = (f"{data}/{folder}/manifest.json" for folder in ("raw", "shards", "tokens"))
    yield Step("fetch-corpus", "fetch-corpus", plan.fetch, (), (raw,))
    yield Step("ingest", "ingest", plan.ingest, (raw,), (shards,))
    yield Step("tokenize", "tokenize", plan.tokenize, (shards,), (tokens,))
    profiled = tuple(f"{reports}/{name}" for name in PROFILE_OUTPUTS)
    yield Step("profile", "profile", plan.profile, (tokens,), profiled, timed=True)
    sessions = {name: f"{reports}/sessions/{name}.jsonl" for name in plan.sessions}
    for name, spec in plan.sessions.items():
        yield Step(f"measure {name}", "measure", to_json(spec), (tokens,), (sessions[name],), timed=True)
    runs = {name: f"{reports}/quality/{name}.json" for name in plan.quality}
    for name, run in plan.quality.items():
        yield Step(f"train {name}", "train", to_json(run), (tokens,), (runs[name],), parallel=True)
    results = (f"{reports}/results.parquet", *(f"{reports}/tables/{name}" for name in RESULTS))
    yield Step("compare", "compare", plan.compare, tuple(sessions.values()), results)
    tables = tuple(f"{reports}/tables/{name}" for name in TABLES)
    yield Step("ablate", "ablate", plan.ablate, (results[0], profiled[0], *runs.values()), tables)
    page = (f"{reports}/index.html",)
    yield Step("report", "report", plan.report, (*results, *tables, *profiled, shards, tokens), page)


PROFILE_OUTPUTS = (
    "tables/machine.json",
    "tables/hotspots.csv",
    "tables/utilisation.csv",
    "profile/profile.json",
)


class Stamps:
    """Remembers, for each step, the digest of its spec and of its inputs' contents when it last succeeded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.known: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.known = {}

    def reason(self, step: Step) -> str | None:
        """Why a step has to run, in a few words, or None when its outputs are current."""
        missing = [name for name in step.outputs if not Path(name).exists()]
        if missing:
            return f"{missing[0]} does not exist"
        old = self.known.get(step.name)
        if old is None:
            return "not run before"
        spec, _, inputs = old.partition(" ")
        if spec != digest(step.spec):
            return "its configuration or code changed"
        return None if inputs == _content(step.inputs) else "its inputs changed"

    def record(self, step: Step) -> None:
        """Remember that a step succeeded with its present spec and inputs."""
        self.known[step.name] = f"{digest(step.spec)} {_content(step.inputs)}"
        write_json(self.path, self.known)


def _content(names: tuple[str, ...]) -> str:
    total = hashlib.sha256()
    for name in names:
        path = Path(name)
        total.update(path.read_bytes() if path.is_file() else b"missing")
    return total.hexdigest()[:16]


def command(step: Step, data: str, reports: str) -> list[str]:
    """The command line of a step, without the program's own name."""
    return [step.verb, "--spec", canonical_json(step.spec), "--data", data, "--reports", reports]
