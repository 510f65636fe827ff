"""Session and quality files made up for tests, written in the formats that the stages write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lmperf.records import ArmSpec, Cell, Metric, ModelShape, QualitySpec, Sample, SessionSpec, to_json

MEGABYTE = 2**20


def session_spec(
    arms: Sequence[str | ArmSpec],
    session: str = "attention.training_step",
    cells: Sequence[str] = ("T=128",),
    **changes: Any,
) -> SessionSpec:
    """A spec with the baseline and its control before the given arms."""
    axis, _, workload = session.partition(".")
    named = [arm if isinstance(arm, ArmSpec) else ArmSpec(arm, (f"{axis}/{arm}",)) for arm in arms]
    known = {"rounds": 9, "seed": 1, "device": "cpu", "batch_size": 2, "sequence_length": 64} | changes
    return SessionSpec(
        session=session, axis=axis, workload=workload, arms=(ArmSpec("baseline"), ArmSpec("baseline_prime"), *named),
        cells=tuple(Cell(label) for label in cells), model=ModelShape(), **known,
    )  # fmt: skip


def timed(spec: SessionSpec, effects: Mapping[str, float], noise: float = 0.005, seed: int = 0) -> list[Sample]:
    """Samples of all rounds: 10 ms steps times each arm's effect, with log-normal noise that arms do not share."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(1, spec.rounds + 1):
        for cell in spec.cells:
            for arm in spec.arms:
                time = 0.01 * effects.get(arm.name, 1.0) * float(np.exp(rng.normal(0, noise)))
                metrics = {"step_time_s": Metric("s", time, (time, time))}
                details = {"tokens_per_step": 128}
                samples.append(Sample(arm.name, cell.label, number, metrics=metrics, details=details))
    return samples


def write_session(
    path: Path,
    spec: SessionSpec,
    samples: Sequence[Sample],
    memory: Mapping[str, float] | None = None,
    fingerprint: str = "machine-1",
    end: bool = True,
    change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda lines: lines,
) -> Path:
    """Write a session file: header, samples and a round line by round, memory lines (arm to bytes), end."""
    lines: list[dict[str, Any]] = [
        {"kind": "header", "spec": to_json(spec), "provenance": {}, "fingerprint": fingerprint},
    ]
    for number in sorted({sample.round for sample in samples}):
        lines += [{"kind": "sample", **to_json(s)} for s in samples if s.round == number]
        lines.append({"kind": "round", "round": number})
    for arm, size in (memory or {}).items():
        metrics = {"peak_memory_bytes": {"unit": "bytes", "value": size, "blocks": []}}
        for cell in spec.cells:
            lines.append(
                {"kind": "memory", "arm": arm, "cell": cell.label, "status": "ok", "reason": None, "metrics": metrics}
            )
    lines += [{"kind": "end"}] if end else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)), encoding="utf-8")
    return path


def quality_run(recipe: str, seed: int, final: float, **changes: Any) -> dict[str, Any]:
    """One quality run: a curve from 4 bits per byte down to `final`, with constant speed and nothing unstable."""
    variants = () if recipe == "baseline" else (recipe,)
    stressed = bool(changes.pop("stressed", False))
    spec = QualitySpec(
        run=f"{recipe}.s{seed}", recipe=recipe, variants=changes.pop("variants", variants), seed=seed,
        model=ModelShape(), batch_size=8, sequence_length=128, steps=200, learning_rate=1e-3, device="cpu",
        data="data", stressed=stressed,
    )  # fmt: skip
    seconds = changes.pop("seconds", 20.0)
    steps = range(0, 201, 20)
    bits = {step: final + (4.0 - final) * (1 - step / 200) ** 2 for step in steps}
    curve = [
        {"step": k, "tokens": k * 1024, "wall_s": seconds * k / 200, "loss": b * 0.7, "bits_per_byte": b}
        for k, b in bits.items()
    ]
    calm = {"nonfinite_steps": 0, "loss_spikes": 0, "grad_norm_p99": 1.5, "skipped_scaler_steps": 0, "diverged": False}
    return {
        "spec": to_json(spec), "status": "ok", "reason": None, "curve": curve,
        "final": {"bits_per_byte": final, "loss": final * 0.7}, "domains": {"chinese": final * 1.5},
        "long_context": None, "stability": calm, "tokens_per_s": 200 * 1024 / seconds,
        "peak_memory_bytes": 50 * MEGABYTE, "wall_s": seconds, "time_to_target_s": seconds,
    } | changes  # fmt: skip


def write_quality(folder: Path, runs: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write quality runs to their files and name them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for run in runs:
        stress = ".stress" if run["spec"]["stressed"] else ""
        path = folder / f"{run['spec']['recipe'].replace('/', '-')}.s{run['spec']['seed']}{stress}.json"
        path.write_text(json.dumps(run), encoding="utf-8")
        paths.append(path)
    return paths


def swept_session(
    path: Path,
    costs: Mapping[str, Callable[[int], float]],
    memory: Mapping[str, Callable[[int], float]],
    *,
    lengths: Sequence[int] = (128, 256, 512, 1024, 2048),
    head_dims: Sequence[int] = (64,),
    workload: str = "operator_forward_backward",
    noise: float = 0.003,
    failing: Mapping[str, str] = MappingProxyType({}),
    change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda lines: lines,
) -> Path:
    """Write an attention operator session: seconds and bytes of each arm by length; `failing`: arm to its status."""
    arms = [name for name in {**costs, **failing} if name != "baseline"]
    cells = tuple(
        Cell(f"length={n} head_dim={d}", {"length": n, "head_dim": d}, n * d) for d in head_dims for n in lengths
    )
    spec = replace(session_spec(arms, f"attention.{workload}"), cells=cells)
    rng = np.random.default_rng(5)
    samples = []
    for number in range(1, spec.rounds + 1):
        for cell in cells:
            for arm in spec.arms:
                if arm.name in failing:
                    samples.append(Sample(arm.name, cell.label, number, failing[arm.name], "no such device", "build"))
                    continue
                cost = costs[arm.name.removesuffix("_prime")](cell.params["length"])
                metrics = {"step_time_s": Metric("s", cost * float(np.exp(rng.normal(0, noise))))}
                metrics["mfu"] = Metric("share", 0.4)
                samples.append(Sample(arm.name, cell.label, number, metrics=metrics))

    def weigh(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        by_label = {cell.label: cell.params["length"] for cell in cells}
        for line in lines:
            if line["kind"] == "memory":
                size = memory[line["arm"]](by_label[line["cell"]])
                line["metrics"] = {"peak_memory_bytes": {"unit": "bytes", "value": size, "blocks": []}}
        return change(lines)

    return write_session(path, spec, samples, dict.fromkeys(memory, 0.0), change=weigh)
