"""How long a plan will take and what its design can detect, before anything runs (no torch).

A process sample costs a start (fork, build, check), the warm-up and the blocks; a block is as long as configured or as
one step, whichever is longer.  Step times come from training steps timed here a moment ago (`probing.probe`) and, at
other sizes, from the step's FLOPs; the constants are seconds, fitted to whole runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from lmperf.design import minimum_rounds
from lmperf.planning import Plan, threads
from lmperf.probing import Probe
from lmperf.records import ModelShape, QualitySpec, SessionSpec, from_json

#: Seconds of a process sample beside warm-up and blocks, by workload.
SAMPLE_OVERHEAD_S = {
    "training_step": 0.5,
    "operator_forward": 0.3,
    "operator_forward_backward": 0.4,
    "prefill": 0.4,
    "loading": 0.4,
    "loading_in_step": 0.6,
    "prefill_decode": 0.9,
    "distributed_step": 2.5,
    "decode": 0.5,
}
#: Extra seconds of one sample for variants that compile or prepare files.
EXTRA_S = {"compile": 6.0, "small_files": 1.0, "flex": 8.0, "static_compiled": 12.0}
JOB_S = 1.2  # of a job beside the start of Python with torch: Snakemake's shell, the command line, the file written
SESSION_START_S = 3.0  # provenance, a fork server with torch imported; memory samples aside
QUALITY_START_S = 1.0  # of a quality run beside the start: tokens mapped, the model built, the outcome written
STAGES_S = {
    "fetch-corpus": 12.0,
    "ingest": 6.0,
    "tokenize": 12.0,
    "profile": 25.0,
    "compare": 4.0,
    "ablate": 6.0,
    "report": 15.0,
}
SLOW = 1.5  # a number format that makes a step this much longer is mentioned


def parameters(shape: ModelShape) -> int:
    """Number of parameters, biases left out."""
    gate = 3 if shape.activation == "swiglu" else 2
    kv = 2 * shape.d_model * shape.kv_heads * shape.head_dim
    layer = 2 * shape.d_model**2 + kv + gate * shape.d_model * shape.d_ff
    return shape.layers * layer + shape.vocab_size * shape.d_model


def step_flops(shape: ModelShape, batch: int, length: int) -> float:
    """FLOPs of a training step by the rule 6N + 12·L·d·T a token (Chowdhery et al. 2022, appendix B)."""
    return (6 * parameters(shape) + 12 * shape.layers * shape.d_model * length) * batch * length


def cell_step_s(spec: SessionSpec, params: Mapping[str, Any], rate: float) -> float:
    """Seconds of one step of a session's workload at a cell."""
    length, batch = params.get("length", spec.sequence_length), params.get("batch", spec.batch_size)
    if spec.workload.startswith("operator"):
        heads = params.get("heads", spec.model.heads)
        flops = 4 * batch * heads * length**2 * params.get("head_dim", spec.model.head_dim)
        return flops * (3.5 if "backward" in spec.workload else 1) / rate
    if spec.workload in ("prefill_decode", "decode"):
        tokens = params.get("prompt", 32) + params.get("new_tokens", 16)
        return step_flops(spec.model, 1, tokens) / 3 * params.get("new_tokens", 1) / rate + 0.002 * spec.model.layers
    if spec.workload == "loading":
        return 0.01
    return step_flops(spec.model, batch, length) / (3 if spec.workload == "prefill" else 1) / rate


def slowest_format(variants: Iterable[str], probe: Probe) -> float:
    """What the number formats of `variants` make of a float32 step's time on this machine."""
    return max([probe.slower.get(probe.formats.get(key, "float32"), 1.0) for key in variants], default=1.0)


def session_seconds(spec: SessionSpec, rate: float, probe: Probe) -> float:
    """Predicted duration of a whole session; `rate` in FLOP/s of a float32 training step."""
    total = probe.start_s + JOB_S + SESSION_START_S
    for cell in spec.cells:
        for arm in spec.arms:
            step = cell_step_s(spec, cell.params, rate) * slowest_format(arm.variants, probe)
            extra = max([EXTRA_S.get(name.partition("/")[2], 0.0) for name in arm.variants], default=0.0)
            warm = max(spec.warmup_s, min(spec.warmup_cap_s, spec.warmup_steps * step))
            blocks = spec.blocks * max(spec.block_s, step)
            sample = SAMPLE_OVERHEAD_S.get(spec.workload, 0.5) + extra + warm + blocks + 4 * step
            total += spec.rounds * sample + SAMPLE_OVERHEAD_S.get(spec.workload, 0.5) + 3 * step
    return total


def quality_seconds(spec: QualitySpec, probe: Probe) -> float:
    """Predicted duration of one quality run on one thread: steps, and evaluations at a third of a step's cost."""
    evaluations = (spec.steps / spec.evaluate_every + 4) * spec.evaluation_batches / 3
    steps = (spec.steps + evaluations) * probe.quality_step_s * slowest_format(spec.variants, probe)
    return probe.start_s + JOB_S + QUALITY_START_S + steps


def detectable(rounds: int, arms: int, noise: float = 0.01) -> float:
    """The smallest relative effect that `rounds` paired rounds can show over `arms`, if a paired ratio's sd is `noise`.

    Twice the usual normal approximation's critical value (Holm's first step), over √rounds: the interval has to lie
    beyond the margin with its whole width.
    """
    from scipy.stats import norm

    critical = float(norm.ppf(1 - 0.05 / (2 * max(arms, 1))))
    return 2 * critical * noise / math.sqrt(rounds)


def forecast(plan: Plan, probe: Probe) -> dict[str, Any]:
    """Sessions, quality runs, what the design can detect, and predicted seconds, all JSON-able."""
    timed = from_json(SessionSpec, plan.profile["session"])
    rate = step_flops(timed.model, timed.batch_size, timed.sequence_length) / probe.timed_step_s
    sessions = [session_row(spec, rate, probe) for spec in plan.sessions.values()]
    runs = [{"run": s.run, "recipe": s.recipe, "predicted_s": quality_seconds(s, probe)} for s in plan.quality.values()]
    cores = max(1, min(len(runs), threads(plan.config)))
    seconds = {
        **STAGES_S,
        "measure": sum(row["predicted_s"] for row in sessions),
        "train": sum(row["predicted_s"] for row in runs) / cores,
    }
    return {
        "sessions": sessions,
        "quality_runs": runs,
        "probe": asdict(probe),
        "stages_s": seconds,
        "predicted_s": sum(seconds.values()),
        "left_out": list(plan.report["left_out"]),
    }


def session_row(spec: SessionSpec, rate: float, probe: Probe) -> dict[str, Any]:
    """One session of the forecast."""
    arms = len(spec.arms) - 2
    return {
        "session": spec.session,
        "arms": [arm.name for arm in spec.arms[2:]],
        "cells": [cell.label for cell in spec.cells],
        "rounds": spec.rounds,
        "rounds_needed": minimum_rounds(arms),
        "indicative": spec.rounds < 6,
        "detectable_effect": detectable(spec.rounds, arms),
        "predicted_s": session_seconds(spec, rate, probe),
    }


def forecast_lines(outlook: Mapping[str, Any]) -> list[str]:
    """The forecast as a person reads it."""
    lines = []
    for row in outlook["sessions"]:
        label = "indicative" if row["indicative"] else f"detects about {row['detectable_effect']:.1%}"
        shape = f"{len(row['arms'])} variants × {len(row['cells'])} cells × {row['rounds']} rounds"
        lines.append(f"{row['session']:36} {shape:36} {label:22} {row['predicted_s'] / 60:5.1f} min")
    stages = outlook["stages_s"]
    lines.append(f"{'quality runs':36} {len(outlook['quality_runs'])} runs{'':53} {stages['train'] / 60:5.1f} min")
    other = sum(value for name, value in stages.items() if name not in ("measure", "train"))
    lines.append(f"{'corpus, profile, tables, report':95} {other / 60:5.1f} min")
    lines.append(f"{'predicted in all':95} {outlook['predicted_s'] / 60:5.1f} min")
    slow = [f"{name} {factor:.1f} ×" for name, factor in outlook["probe"]["slower"].items() if factor > SLOW]
    if slow:
        lines.append(f"this machine has no fast {' and '.join(slow)} the time of float32 a step")
    if outlook["left_out"]:
        lines.append(f"not measured by this configuration: {', '.join(outlook['left_out'])}")
    lines.append("(detectable effects assume a paired spread of 1 % between rounds; each session prints its own)")
    return lines
