"""Inside one fresh process: compose the recipe, prepare the workload, check, time (or weigh) it, check again."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from lmperf import memory, provenance, registry
from lmperf.devices import Device, get_device
from lmperf.failures import Incorrect
from lmperf.hoststate import usable_cores
from lmperf.recipe import Recipe, Stage
from lmperf.records import ArmSpec, Cell, Metric, Sample, SessionSpec, from_json, to_json
from lmperf.timing import Timing, TimingPlan, compile_count, measure
from lmperf.utilisation import Utilisation, utilisation
from lmperf.workloads.base import CheckOutcome, Prepared, Setting, get_workload

Phase = Callable[[str], None]
SETTLING_STEPS = 2  # before memory is read, so that lazily made state is there


def load_everything() -> None:
    """Import all variants and workloads once, in the fork server, instead of in every process sample."""
    registry.variants()
    get_workload("training_step")


def setting_of(arguments: Mapping[str, Any]) -> tuple[Setting, int]:
    """The workload's setting and the round from a job's JSON arguments; sets threads and seeds of this process."""
    spec: SessionSpec = from_json(SessionSpec, arguments["spec"])
    arm: ArmSpec = from_json(ArmSpec, arguments["arm"])
    cell: Cell = from_json(Cell, arguments["cell"])
    seed = int(arguments["seed"])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = arguments["compile_cache"]  # read when the first graph is compiled
    os.environ["TRITON_CACHE_DIR"] = arguments["compile_cache"]
    torch.set_num_threads(spec.threads)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    registry.load_plugins(spec.plugins)  # a plugin may bring a workload that the baseline needs too
    recipe = registry.compose(arm.variants, spec.plugins)
    scratch = Path(arguments["scratch"])
    return Setting(spec=spec, arm=arm, cell=cell, recipe=recipe, seed=seed, scratch=scratch), int(arguments["round"])


def timed(arguments: Mapping[str, Any], phase: Phase) -> dict[str, Any]:
    """One timed process sample as a `Sample`'s JSON."""
    started, clock = time.time(), time.perf_counter()
    phase("build")
    setting, number = setting_of(arguments)
    device = get_device(setting.device)
    prepared = get_workload(setting.spec.workload)(setting)
    device.synchronise()
    build_s = time.perf_counter() - clock
    checks = [check(prepared, setting.seed, "check", phase)]
    timing = measure(
        prepared.step, device, TimingPlan.of(setting.spec), slowdown=setting.arm.inject_slowdown, phase=phase,
        before_blocks=prepared.observations.clear, before_block=prepared.before_block,
    )  # fmt: skip
    used = machine_share(setting, prepared, timing)
    checks.append(check(prepared, setting.seed + 1, "after-check", phase))
    phase("close")
    prepared.close()
    details = sample_details(setting, timing, prepared, checks)
    details |= {"started": round(started, 3), "process_s": time.perf_counter() - clock}
    found = badges(timing, setting.spec.threads)
    # A probe that was itself disturbed says nothing about what is possible.
    impossible = used.implausible if "contention" not in found else None
    sample = Sample(
        arm=setting.arm.name,
        cell=setting.cell.label,
        round=number,
        status="implausible" if impossible else "ok",
        reason=impossible,
        metrics=timed_metrics(setting.recipe, prepared, timing, build_s) | used.metrics,
        badges=found,
        details=details,
    )
    return to_json(sample)


def machine_share(setting: Setting, prepared: Prepared, timing: Timing) -> Utilisation:
    """FLOP/s and utilisation against a peak probed now, with this process's threads; empty where FLOPs mean nothing."""
    if not setting.spec.options.get("utilisation", True):
        return Utilisation()
    return utilisation(prepared.flops_per_step, timing.step_time_s, setting.recipe, setting.device)


def check(prepared: Prepared, seed: int, name: str, phase: Phase) -> CheckOutcome | None:
    """Run the workload's check on the fresh inputs of `seed`; wrong numbers raise `Incorrect`."""
    if prepared.check is None:
        return None
    phase(name)
    forget_compiled()
    outcome = prepared.check(seed)
    forget_compiled()
    if not outcome.passed:
        raise Incorrect(outcome.message)
    return outcome


def forget_compiled() -> None:
    """Drop what dynamo has compiled in this process; what the caches on disk hold stays.

    A checked model has other sizes than the timed one.  Seeing both under one function, dynamo would compile the
    second for any size: another, slower graph than the one that a user gets.
    """
    if compile_count() > 0:
        torch._dynamo.reset()


def compiles(recipe: Recipe) -> bool:
    """Whether a recipe compiles anything, by its transforms or by what this process has compiled so far."""
    return any(t.stage == Stage.COMPILE for t in (*recipe.transforms, *recipe.finish)) or compile_count() > 0


def timed_metrics(recipe: Recipe, prepared: Prepared, timing: Timing, build_s: float) -> dict[str, Metric]:
    """The four separate numbers, tokens/s, what the step observed itself, and what is known without timing."""
    metrics = {
        "step_time_s": Metric("s", timing.step_time_s, timing.step_times),
        "first_step_s": Metric("s", timing.first_step_s),
        "build_time_s": Metric("s", build_s),
    }
    if prepared.tokens_per_step:
        rates = tuple(prepared.tokens_per_step / seconds for seconds in timing.step_times)
        metrics["tokens_per_s"] = Metric("tokens/s", prepared.tokens_per_step / timing.step_time_s, rates)
    if compiles(recipe):
        # The caches are warm here: the memory sample, an earlier process with an empty cache, has the cold number.
        metrics["compile_warm_s"] = Metric("s", max(0.0, timing.first_step_s - timing.step_time_s))
    return metrics | observed(prepared)


def observed(prepared: Prepared) -> dict[str, Metric]:
    """Metrics that the step observed (median, raw values kept) and those known without timing."""
    seen = prepared.observations
    metrics = {
        name: Metric(seen.units[name], float(numpy.median(values)), tuple(map(float, values[:1000])))
        for name, values in seen.values.items()
        if values
    }
    return metrics | {name: Metric(unit, float(value)) for name, (unit, value) in prepared.once.items()}


def badges(timing: Timing, threads: int) -> tuple[str, ...]:
    """Red badges (contention, throttling, low_clock, not_stationary, recompilation) and the plain one host_bound."""
    found = [*timing.disturbance.badges(threads, usable_cores())]
    if not timing.warmup.stationary:
        found.append("not_stationary")
    if timing.recompiled_blocks:
        found.append("recompilation")
    if timing.host_bound:
        found.append("host_bound")
    return tuple(found)


def sample_details(
    setting: Setting, timing: Timing, prepared: Prepared, checks: list[CheckOutcome | None]
) -> dict[str, Any]:
    """What else is kept of a sample: warm-up curve, blocks, CPU use, disturbance, check errors, threads, seed."""
    return {
        "seed": setting.seed,
        "threads": torch.get_num_threads(),
        "tokens_per_step": prepared.tokens_per_step,
        "flops_per_step": prepared.flops_per_step,
        "steps_per_block": timing.steps_per_block,
        "extra_steps": timing.extra_steps,
        "warmup": dataclasses.asdict(timing.warmup),
        "block_wall_s": [block.wall_s for block in timing.blocks],
        "block_cpu_s": [block.cpu_s for block in timing.blocks],
        "block_device_s": [block.device_s for block in timing.blocks],
        "cores_used": timing.cores_used,
        "timed_s": timing.timed_s,
        "recompiled_blocks": timing.recompiled_blocks,
        "disturbance": dataclasses.asdict(timing.disturbance),
        "block_states": [state.summary() for state in timing.states],
        "checks": [dataclasses.asdict(outcome) if outcome else None for outcome in checks],
        "load": os.getloadavg()[0],
        "environment": provenance.environment(),
    }


def weighed(arguments: Mapping[str, Any], phase: Phase) -> dict[str, Any]:
    """One memory process sample as a `Sample`'s JSON: peaks by phase, the resident peak, the analytic table."""
    started, clock = time.time(), time.perf_counter()
    phase("build")
    setting, number = setting_of(arguments)
    # Inputs that wait for their turn would hide what an operator itself needs: one set is enough here.
    cell = dataclasses.replace(setting.cell, params={**setting.cell.params, "input_sets": 1})
    setting = dataclasses.replace(setting, cell=cell)
    device = get_device(setting.device)
    prepared = get_workload(setting.spec.workload)(setting)
    after_build = memory.live_tensor_bytes() if setting.device == "cpu" else device.memory().get("allocated")
    phase("warm-up")
    first_s = device.block(prepared.step, 1).wall_s
    steady_s = device.block(prepared.step, SETTLING_STEPS).step_s
    metrics = {}
    if compiles(setting.recipe):  # with an empty cache: no process of this session has compiled this arm before
        metrics["compile_time_s"] = Metric("s", max(0.0, first_s - steady_s))
    phase("memory")
    weighing = weigh(prepared, device, setting)
    if compiles(setting.recipe):  # the checked model is another one: compile it here, where the time limit is wider
        check(prepared, setting.seed, "check", phase)
    phase("close")
    prepared.close()
    details = {**weighing.details(after_build), "started": round(started, 3), "process_s": time.perf_counter() - clock}
    sample = Sample(
        arm=setting.arm.name, cell=setting.cell.label, round=number,
        metrics={**metrics, **weighing.metrics()}, details=details,
    )  # fmt: skip
    return to_json(sample)


def weigh(prepared: Prepared, device: Device, setting: Setting) -> memory.Weighing:
    """Peaks and the table of one more step, the resident peak before the profiler adds to it."""
    gc.collect()
    resident = memory.resident_peak(prepared.step)
    peaks = memory.peaks(prepared.step, device)
    table = memory.analytic_table(prepared)
    return memory.Weighing(peaks, resident, table)
