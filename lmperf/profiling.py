"""The baseline's profile: where a training step's time and memory go, and how near it comes to the machine's limits."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lmperf import flops, memory, registry
from lmperf.devices import get_device
from lmperf.failures import reason_of, status_of
from lmperf.hotspots import COLUMNS, Ceiling, by_operator, hotspots
from lmperf.machine import datasheet_bandwidth, datasheet_peak, device_name, fingerprint, machine, measure_peaks
from lmperf.model import TrainingStep, apply_runtime, build
from lmperf.provenance import provenance, scrub, scrubbed
from lmperf.recipe import Recipe
from lmperf.records import InputError, SessionSpec, to_json, write_json
from lmperf.reference import LoaderSource
from lmperf.tables import frame, write_csv
from lmperf.tracing import overhead, record_within
from lmperf.training import FAILURES
from lmperf.utilisation import dtype_of
from lmperf.workloads.base import Prepared

UTILISATION_COLUMNS = ("dtype", "what", "achieved", "peak", "share", "source")
CURVE_STEPS = 30
CURVE_CAP_S = 60.0  # of the warm-up curve, for models whose step takes seconds
WARMUPS = (0, 1, 2, 5, 10)
INPUT_BATCHES = 4
NOTHING = {
    "step_s": None, "tokens_per_s": None, "build_s": None, "warmup": None, "overhead_factor": None, "trace": None,
    "memory": {"peak_memory_bytes": None}, "flops": None,
}  # fmt: skip
PEAK_DTYPES = ("float32", "bfloat16", "float16")


def profile_baseline(
    spec: SessionSpec, out: Path, *, tables: Path, trace_budget_bytes: int = 20_000_000, top: int = 20
) -> dict[str, Any]:
    """Profile the first arm's training step on real tokens; runs in a process of its own, apart from all timing.

    Writes out/profile.json, out/trace/, tables/hotspots.csv, tables/utilisation.csv and tables/machine.json.  A
    step that cannot run here leaves its status and reason in profile.json and empty tables.
    """
    torch.set_num_threads(spec.threads)
    torch.manual_seed(spec.seed)
    out.mkdir(parents=True, exist_ok=True)
    facts = machine()
    answer: dict[str, Any] = {
        "schema": 1, "spec": scrubbed(to_json(spec)),
        "status": "ok", "reason": None, **NOTHING, "provenance": provenance(spec), "fingerprint": fingerprint(facts),
    }  # fmt: skip
    recipe = registry.compose(spec.arms[0].variants if spec.arms else (), spec.plugins)
    rows: list[dict[str, Any]] = []
    try:
        answer |= profile_step(spec, recipe, out / "trace", trace_budget_bytes)
        rows = answer.pop("rows")
    except InputError:
        raise
    except FAILURES as error:
        answer |= {"status": status_of(error), "reason": scrub(reason_of(error))}
    peaks = peaks_of(spec)
    write_tables(spec, recipe, answer, rows, peaks, facts, tables, top)
    write_json(out / "profile.json", answer)
    return answer


def peaks_of(spec: SessionSpec) -> dict[str, Any]:
    """The machine's measured peaks; `options` may set peak_dtypes, peak_sizes and peak_seconds."""
    options = spec.options
    dtypes = (*PEAK_DTYPES, *(("tf32",) if spec.device.startswith("cuda") else ()))
    sizes = (4096, 8192) if spec.device.startswith("cuda") else (1024, 2048)
    return measure_peaks(
        options.get("peak_dtypes", dtypes), options.get("peak_sizes", sizes), options.get("peak_seconds", 0.5),
        device=spec.device,
    )  # fmt: skip


def profile_step(spec: SessionSpec, recipe: Recipe, traces: Path, budget: int) -> dict[str, Any]:
    """Warm-up curve, plain step time, recording, memory and FLOPs of the step; `rows` holds the raw averages."""
    apply_runtime(recipe)
    with tempfile.TemporaryDirectory(prefix="lmperf-profile-") as scratch:
        batches = input_batches(spec, recipe, Path(scratch))
    build_start = time.perf_counter()
    model = build(spec.model, recipe, seed=spec.seed, device=spec.device)
    training = TrainingStep(model, recipe, learning_rate=spec.learning_rate, device=spec.device)
    build_s = time.perf_counter() - build_start
    rotation = itertools.cycle(batches)

    def step() -> None:
        training(*next(rotation))

    curve = warmup_curve(step, spec.device)
    before = plain_steps(step, spec.device)
    recording, trace = record_within(step, spec.device, traces, budget)
    plain_s = statistics.median([*before, *plain_steps(step, spec.device)])
    averages = recording.profiler.key_averages(group_by_input_shape=True)
    tokens = spec.batch_size * spec.sequence_length
    return {
        "build_s": build_s,
        "step_s": plain_s,
        "tokens_per_s": tokens / plain_s,
        "warmup": describe_warmup(curve, plain_s),
        "overhead_factor": overhead(recording, plain_s),
        "trace": {
            "file": trace.path.name if trace.path else None, "bytes": trace.size, "budget_bytes": budget,
            "recorded": trace.detail.words if trace.detail else None, "messages": list(trace.messages),
        },
        "memory": memory_of(training, step, spec.device),
        "flops": flops_of(spec, recipe, training, batches[0]),
        "rows": list(averages),
    }  # fmt: skip


def input_batches(spec: SessionSpec, recipe: Recipe, scratch: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """At least four different batches of real training tokens on the device, read before any clock runs."""
    if spec.data is None:
        raise InputError("profile: data is not set; allowed: the folder that `lmperf tokenize` wrote")
    source = LoaderSource(
        tokens=Path(spec.data), split="train", batch_size=spec.batch_size, length=spec.sequence_length,
        seed=spec.seed, texts=Path(spec.texts) if spec.texts else None, scratch=scratch,
    )  # fmt: skip
    batches = [
        (x.to(spec.device), y.to(spec.device)) for x, y in itertools.islice(recipe.loader(source), INPUT_BATCHES)
    ]
    largest = max(int(x.max()) for x, _ in batches)
    if largest >= spec.model.vocab_size:
        raise InputError(f"{spec.data}: token {largest} is outside the model's vocabulary of {spec.model.vocab_size}")
    return batches


def timed(step: Callable[[], object], device: str) -> float:
    """Wall seconds of one step, the device's work included."""
    start = time.perf_counter()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def warmup_curve(step: Callable[[], object], device: str) -> list[float]:
    """Seconds of the first `CURVE_STEPS` steps of this process, fewer when they take over a minute."""
    curve: list[float] = []
    while len(curve) < CURVE_STEPS and (len(curve) < 5 or sum(curve) < CURVE_CAP_S):
        curve.append(timed(step, device))
    return curve


def plain_steps(step: Callable[[], object], device: str, seconds: float = 1.0, least: int = 5) -> list[float]:
    """Seconds of unprofiled steps: at least five and one second of them."""
    found: list[float] = []
    while len(found) < least or sum(found) < seconds:
        found.append(timed(step, device))
    return found


def describe_warmup(curve: list[float], steady_s: float) -> dict[str, Any]:
    """The curve, and the mean of the following steps over the steady time after 0, 1, 2, 5 and 10 warm-up steps."""
    biased = {str(n): statistics.mean(curve[n : n + 20]) / steady_s for n in WARMUPS if len(curve) > n}
    return {
        "curve_s": curve,
        "steady_s": steady_s,
        "first_over_steady": curve[0] / steady_s,
        "mean_over_steady": biased,
    }


def memory_of(training: TrainingStep, step: Callable[[], None], device: str) -> dict[str, Any]:
    """Tensor peaks of a step by phase, in bytes, and the analytic table with the share that it explains."""
    # The recording does not see the release of what was there before it: the old gradients go first.
    training.zero_grad()
    peaks = memory.peaks(step, get_device(device))
    table = memory.analytic_table(Prepared(step=step, model=training.model))
    weighing = memory.Weighing(peaks, None, table)
    return {"peak_memory_bytes": peaks.step, "forward_peak_bytes": peaks.forward, **weighing.details(None)}


def flops_of(
    spec: SessionSpec, recipe: Recipe, training: TrainingStep, batch: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, Any]:
    """FLOPs of one step in every convention, and what PyTorch's counter sees of it.

    The counter comes last: a dispatch mode changes how the rest of the process runs.
    """
    answers = {
        name: flops.recipe_flops(recipe, spec.model, spec.batch_size, spec.sequence_length, name)
        for name in flops.CONVENTIONS
    }
    counted = flops.count_step(training.model, *batch)
    return {
        **answers,
        "counted": counted,
        "mismatch": flops.counter_mismatch(answers["full"], counted),
        "parameters": flops.parameter_count(recipe.shape(spec.model)),
    }


def write_tables(
    spec: SessionSpec, recipe: Recipe, answer: dict[str, Any], rows: list[Any], peaks: Mapping[str, Any],
    facts: Mapping[str, Any], tables: Path, top: int,
) -> None:  # fmt: skip
    """Write hotspots.csv, utilisation.csv and machine.json, and put hotspots and utilisation into `answer`."""
    dtype = dtype_of(recipe)
    best = peaks["flops"].get(dtype, {}).get("best")
    table = hotspots(rows, Ceiling(best, peaks["copy_bytes_per_s"], dtype), spec.device)
    name = device_name(spec.device, facts)
    used = utilisation_rows(answer, dtype, peaks, name)
    write_csv(frame(table[:top], COLUMNS), tables / "hotspots.csv")
    write_csv(frame(used, UTILISATION_COLUMNS), tables / "utilisation.csv")
    datasheet = {kind: datasheet_peak(name, kind) for kind in (*PEAK_DTYPES, "tf32", "float8")}
    write_json(tables / "machine.json", {
        "schema": 1, "machine": facts, "fingerprint": answer["fingerprint"], "peaks": peaks, "device": name,
        "datasheet": {"flops": datasheet, "bandwidth": datasheet_bandwidth(name)},
    })  # fmt: skip
    answer["badges"] = badges(answer, best)
    answer |= {"hotspots": table[:top], "operators": by_operator(table), "utilisation": used, "peaks": peaks}


def badges(answer: Mapping[str, Any], peak: float | None) -> list[str]:
    """What makes the numbers doubtful: more FLOP/s than the machine's peak, or FLOPs that the counter does not see."""
    if answer["status"] != "ok":
        return []
    found = ["flops_mismatch"] if answer["flops"]["mismatch"] else []
    done = answer["flops"]["exact"]["hardware_total"]
    return [*found, *(["implausible"] if flops.above_roofline(done, answer["step_s"], peak) else [])]


def utilisation_rows(
    answer: Mapping[str, Any], dtype: str, peaks: Mapping[str, Any], device: str
) -> list[dict[str, Any]]:
    """The step in each convention against the measured and the datasheet peak, each dtype's product, and the copy."""
    best = {kind: entry["best"] for kind, entry in peaks["flops"].items()}
    rows: list[tuple[str, str, float | None, float | None, str]] = []
    for convention in ("palm", "exact"):
        rate = answer["flops"][convention]["total"] / answer["step_s"] if answer["step_s"] else None
        rows.append((dtype, f"training_step_{convention}", rate, best.get(dtype), "measured"))
        rows.append((dtype, f"training_step_{convention}", rate, datasheet_peak(device, dtype), "datasheet"))
    for kind, entry in peaks["flops"].items():
        rows += [(kind, f"matmul_{size}", rate, entry["best"], "measured") for size, rate in entry["by_size"].items()]
        rows.append((kind, "matmul_best", entry["best"], datasheet_peak(device, kind), "datasheet"))
    rows.append(("bytes", "copy", peaks["copy_bytes_per_s"], datasheet_bandwidth(device), "datasheet"))
    return [
        dict(
            zip(UTILISATION_COLUMNS, (kind, what, rate, peak, flops.utilisation(rate, 1.0, peak), source), strict=True)
        )
        for kind, what, rate, peak, source in rows
    ]
