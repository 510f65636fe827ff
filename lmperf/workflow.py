"""What the Snakefile imports: the plan as specs in JSON, and nothing that loads torch."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lmperf.config import Config, parse
from lmperf.planning import Plan, device, make_plan, threads
from lmperf.records import InputError, canonical_json, to_json
from lmperf.steps import PROFILE_OUTPUTS, RESULTS, TABLES, steps

__all__ = [
    "PROFILE_OUTPUTS",
    "RESULTS",
    "TABLES",
    "arguments_of",
    "cluster_resources",
    "outputs_of",
    "plan_or_exit",
    "prepare_path",
    "timed_threads",
]


def prepare_path() -> None:
    """Put this interpreter's folder first on the PATH, so that rules say `python` and no path is part of a rule."""
    folder = os.path.dirname(sys.executable)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", "")])


def plan_or_exit(config: Mapping[str, Any]) -> Plan:
    """The plan of a workflow's configuration; bad input is one line on stderr and exit code 2, before any job."""
    try:
        return make_plan(settled(parse(config, where="config")))
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
        os._exit(2)  # Snakemake turns every exception into a traceback and exit code 1


def settled(config: Config) -> Config:
    """`config` with `auto` replaced by what it means here, also for the jobs that this workflow starts.

    Snakemake reads the workflow again in every job, on a cluster on another machine, where `auto` would mean something
    else; the environment, which jobs inherit, carries the first answer.
    """
    count = os.environ.setdefault("LMPERF_THREADS", str(threads(config))) if config.threads == "auto" else None
    kind = os.environ.setdefault("LMPERF_DEVICE", device(config)) if config.device == "auto" else None
    changes = {"threads": int(count) if count else None, "device": kind}
    return config.model_copy(update={key: value for key, value in changes.items() if value})


def outputs_of(plan: Plan) -> list[str]:
    """Every file that a run makes: all are asked for, so that a deleted one is made again while the report stands."""
    return [name for step in steps(plan) for name in step.outputs]


def timed_threads(workflow: Any, config: Config) -> int:
    """Cores that a timed rule claims: all of `--cores`, so that nothing runs beside it; its own on a cluster."""
    cores = workflow.resource_settings.cores  # None where a scheduler hands out cores
    return threads(config) if cores is None else cores


def cluster_resources(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an ordinary job and a timed one ask a cluster for; without a cluster these are only notes.

    `cpus_per_task` goes before a rule's threads: a timed job gets the cores that it computes with.
    """
    cluster = config.cluster
    common: dict[str, Any] = {"mem_mb": cluster.mem_mb}
    if cluster.partition:
        common["slurm_partition"] = cluster.partition
    if cluster.constraint:
        common["constraint"] = cluster.constraint
    if cluster.gpus:
        common["gpu"] = cluster.gpus
    timed = {**common, "runtime": cluster.timed_runtime_min, "cpus_per_task": threads(config), "nodes": 1}
    if cluster.nodes_exclusive:
        timed["slurm_extra"] = "--exclusive"
    return {**common, "runtime": cluster.runtime_min}, timed


def arguments_of(plan: Plan) -> Callable[[Any], str]:
    """A function from a spec to a rule's arguments, quoted for the shell.

    Everything a job uses stands in this one text, so that a changed spec re-runs its job and no other.
    """

    def arguments(spec: Any) -> str:
        text = canonical_json(spec if isinstance(spec, Mapping) else to_json(spec))
        return shlex.join(["--spec", text, "--data", plan.data, "--reports", plan.reports])

    return arguments
