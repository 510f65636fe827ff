"""TensorBoard event files of the quality runs: scalars by step, written without torch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def write_event_files(runs: Sequence[Mapping[str, Any]], out: Path) -> int:
    """Write one folder a run with validation loss, bits per byte and wall time by step; returns how many runs."""
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    for run in runs:
        _write_run(run, out / run["spec"]["run"])
    return len(runs)


def _write_run(run: Mapping[str, Any], folder: Path) -> None:
    writer = EventFileWriter(str(folder))
    try:
        for point in run.get("curve") or ():
            tags = {"validation/loss_nats": point["loss"], "validation/bits_per_byte": point["bits_per_byte"]}
            tags["progress/tokens"] = point["tokens"]
            writer.add_event(_event(tags, point["step"], point["wall_s"]))
        last = run["spec"]["steps"]
        writer.add_event(_event(_final_tags(run), last, run.get("wall_s") or 0.0))
    finally:
        writer.close()


def _final_tags(run: Mapping[str, Any]) -> dict[str, Any]:
    domains = (run.get("domains") or {}).items()
    tags = {f"domains/{name}_bits_per_byte": _bits(value) for name, value in domains}
    stability = run.get("stability") or {}
    tags |= {f"stability/{name}": stability.get(name) for name in ("nonfinite_steps", "loss_spikes", "grad_norm_p99")}
    return tags


def _bits(value: Any) -> float | None:
    return value.get("bits_per_byte") if isinstance(value, Mapping) else value


def _event(tags: Mapping[str, Any], step: int, wall_s: float) -> Event:
    values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in tags.items() if value is not None]
    # Wall time counts from the run's start: equal runs then give comparable files.
    return Event(wall_time=float(wall_s), step=int(step), summary=Summary(value=values))
