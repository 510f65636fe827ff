"""Quality runs: one recipe trained from one seed to a fixed number of tokens, and what it is worth afterwards."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmperf import evaluation, registry
from lmperf.failures import reason_of, status_of
from lmperf.implementations import ranks
from lmperf.machine import fingerprint, machine
from lmperf.model import StepReport, apply_transforms
from lmperf.numerics import dtype_table, underflow_share
from lmperf.preparation import Run, batches_of, context_of, prepare, settle_process, windows
from lmperf.provenance import provenance, scrub, scrubbed
from lmperf.recipe import Recipe
from lmperf.records import InputError, QualitySpec, to_json, write_json
from lmperf.schedule import learning_rate_factor, set_rates
from lmperf.stability import stability

log = logging.getLogger(__name__)

HOPELESS = 50  # steps in a row without a finite loss and an applied update, after which a run is ended
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError,
            ImportError, OSError, MemoryError)  # fmt: skip


class OutOfTime(RuntimeError):
    """The run's time limit was reached."""


def train(spec: QualitySpec, out: Path) -> dict[str, Any]:
    """Do one quality run and write its outcome to the file `out`; any failure of the recipe is a typed outcome.

    Bad input (no such variant, tokens that the vocabulary does not hold) raises `InputError` and writes nothing.
    """
    outcome = empty_outcome(spec)
    start = time.perf_counter()
    try:
        outcome |= quality_run(spec)
    except InputError:
        raise
    except OutOfTime as error:
        outcome |= {"status": "timeout", "reason": str(error)}
    except FAILURES as error:
        outcome |= {"status": status_of(error), "reason": scrub(reason_of(error))}
    outcome["wall_s"] = time.perf_counter() - start
    write_json(out, outcome)
    return outcome


def empty_outcome(spec: QualitySpec) -> dict[str, Any]:
    """The outcome of a run of which nothing is known yet: every key, nothing measured."""
    nothing = {"loss": None, "bits_per_byte": None}
    return {
        "schema": 1, "spec": scrubbed(to_json(spec)), "status": "crashed", "reason": None,
        "curve": [], "final": nothing, "before_finish": None, "held_out": None, "domains": {}, "long_context": None,
        "long_context_reason": None, "stability": None, "gradient_underflow": None, "dtypes": None,
        "dtypes_reason": None, "tokens_per_s": None, "timing_note": "from an untimed run: not a benchmark",
        "peak_memory_bytes": None, "wall_s": None,
        "time_to_target_s": None, "target": None, "provenance": provenance(spec), "fingerprint": fingerprint(machine()),
    }  # fmt: skip


def quality_run(spec: QualitySpec) -> dict[str, Any]:
    """Train and evaluate; the parts of the outcome that are then known."""
    for key in spec.variants:
        if reason := registry.get(key, spec.plugins).unavailable():
            return {"status": "unsupported", "reason": f"{key}: {reason}"}
    recipe = registry.compose(spec.variants, spec.plugins)
    settle_process(spec, recipe)
    with tempfile.TemporaryDirectory(prefix="lmperf-train-") as scratch, cohort(spec, recipe, Path(scratch)) as tell:
        run = prepare(spec, recipe, Path(scratch))
        train_steps(run, batches_of(spec, recipe, Path(scratch)), tell)
        return conclude(run)


@contextmanager
def cohort(spec: QualitySpec, recipe: Recipe, scratch: Path) -> Iterator[Callable[[], None]]:
    """The other processes of a recipe that needs several; what is yielded tells them to take the next step."""
    size = 1 if recipe.parallel is None else recipe.parallel.world_size
    if size == 1:
        yield lambda: None
        return
    if spec.batch_size % size:
        raise InputError(f"quality.batch_size: {spec.batch_size} cannot be shared by {size} processes")
    others = ranks.start(size, Follow(spec), folder=scratch, threads=spec.threads, device=spec.device)
    try:
        yield lambda: others.command("step")
    finally:
        others.close()


@dataclass(frozen=True)
class Follow:
    """What ranks 1 … n - 1 do: the same steps on their own rows of the same batches, whenever rank 0 takes one."""

    spec: QualitySpec

    def __call__(self, rank: int, pipe: Connection) -> None:
        recipe = registry.compose(self.spec.variants, self.spec.plugins)
        settle_process(self.spec, recipe)
        with tempfile.TemporaryDirectory(prefix="lmperf-train-") as scratch:
            run = prepare(self.spec, recipe, Path(scratch), rank)
            for number, (x, y) in enumerate(batches_of(self.spec, recipe, Path(scratch))):
                pipe.recv_bytes()
                scheduled_step(run, number, x, y)


def train_steps(run: Run, batches: Iterator[tuple[Tensor, Tensor]], tell: Callable[[], None]) -> None:
    """All steps with an evaluation before the first, every `evaluate_every` and after the last."""
    spec = run.spec
    begun = time.perf_counter()
    add_evaluation(run, 0)
    for number, (x, y) in zip(range(spec.steps), batches, strict=False):
        tell()
        scheduled_step(run, number, x, y)
        if (number + 1) % spec.evaluate_every == 0 or number + 1 == spec.steps:
            add_evaluation(run, number + 1)
        if run.steps.trailing_failures() >= HOPELESS and number + 1 < spec.steps:
            add_evaluation(run, number + 1)
            break
        if time.perf_counter() - begun > spec.time_limit_s:
            raise OutOfTime(f"time limit of {spec.time_limit_s:.0f} s reached at step {number + 1} of {spec.steps}")


def scheduled_step(run: Run, number: int, x: Tensor, y: Tensor) -> None:
    """Step `number` on this process's rows, its wall time and its record; reading the loss waits for the device."""
    spec, rows = run.spec, run.rows
    set_rates(run.step.optimizer, run.rates, learning_rate_factor(number, spec.steps, spec.warmup_steps))
    start = time.perf_counter()
    report: StepReport = run.step(x[rows].to(spec.device), y[rows].to(spec.device))
    loss, norm = report.loss.item(), float(report.gradient_norm)
    run.trained_s += time.perf_counter() - start
    run.steps.add(loss, norm, report.skipped, report.scale)


def add_evaluation(run: Run, step: int) -> None:
    """Append a point to the curve: the validation loss after `step` steps."""
    if run.curve and run.curve[-1]["step"] == step:
        return
    found = evaluation.evaluate_score(run.model, run.recipe, run.validation, run.spec.device)
    if step:
        run.underflow = underflow_share(run.model) or run.underflow
    run.curve.append({"step": step, "tokens": step * run.tokens_per_step, "wall_s": run.trained_s, **found})
    loss = "not finite" if found["loss"] is None else f"{found['loss']:.4f}"
    log.info("%s: step %d, validation loss %s", run.spec.run, step, loss)


def conclude(run: Run) -> dict[str, Any]:
    """What the trained model is worth: final loss, stability, generalisation, and after-training transforms."""
    spec = run.spec
    steady = stability(run.steps, [point["loss"] for point in run.curve])
    last = {key: run.curve[-1][key] for key in ("loss", "bits_per_byte")}
    outcome: dict[str, Any] = {
        "status": "unstable" if steady["diverged"] else "ok", "reason": steady["diverged_reason"], "curve": run.curve,
        "stability": steady, "gradient_underflow": run.underflow, "final": last,
        "tokens_per_s": len(run.steps.losses) * run.tokens_per_step / run.trained_s if run.trained_s else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if spec.device.startswith("cuda") else None,
        **time_to_target(run.curve, spec.options.get("target_bits_per_byte")),
    }  # fmt: skip
    if run.recipe.finish:
        finish(run)
        found = evaluation.evaluate_score(run.model, run.recipe, run.validation, spec.device)
        outcome |= {"before_finish": last, "final": found}
    return outcome | generalisation(run) | number_formats(run)


def finish(run: Run) -> None:
    """Apply the recipe's after-training transforms (quantisation, pruning, fine-tuning)."""
    with tempfile.TemporaryDirectory(prefix="lmperf-finish-") as scratch:
        run.model = apply_transforms(run.model, run.recipe.finish, context_of(run.spec, run.recipe, Path(scratch)))


def number_formats(run: Run) -> dict[str, Any]:
    """The dtype of every kind of tensor, from one step of a model of the recipe with one layer, or why there is none.

    A model of its own, so that the trained one is left as it is; eager, since compiling would cost more than it tells.
    """
    if run.recipe.parallel is not None:
        return {"dtypes": None, "dtypes_reason": "the step spans several processes"}
    spec = replace(run.spec, model=replace(run.spec.model, layers=1))
    try:
        with tempfile.TemporaryDirectory(prefix="lmperf-dtypes-") as scratch, torch.compiler.set_stance("force_eager"):
            context = context_of(spec, run.recipe, Path(scratch))
            table = dtype_table(run.recipe, spec.model, device=spec.device, context=context)
    except FAILURES as error:
        return {"dtypes": None, "dtypes_reason": scrub(reason_of(error))}
    return {"dtypes": {row.tensor: row.dtype for row in table}, "dtypes_reason": None}


def time_to_target(curve: list[dict[str, Any]], target: float | None) -> dict[str, Any]:
    """Training seconds, interpolated, to `target` bits per byte; a miss is None with reached False."""
    if target is None:
        return {"time_to_target_s": None, "target": None}
    known = [point for point in curve if point["bits_per_byte"] is not None]
    for before, after in zip(known, known[1:], strict=False):
        if after["bits_per_byte"] <= target < before["bits_per_byte"]:
            share = (before["bits_per_byte"] - target) / (before["bits_per_byte"] - after["bits_per_byte"])
            seconds = before["wall_s"] + share * (after["wall_s"] - before["wall_s"])
            return {"time_to_target_s": seconds, "target": {"bits_per_byte": target, "reached": True}}
    return {"time_to_target_s": None, "target": {"bits_per_byte": target, "reached": False}}


def generalisation(run: Run) -> dict[str, Any]:
    """Held-out text of the same source, every further domain, and a context longer than trained."""
    spec = run.spec
    splits = evaluation.split_names(spec.data)

    def scored(split: str) -> dict[str, float | None]:
        found = windows(spec, split, spec.sequence_length)
        return evaluation.evaluate_score(run.model, run.recipe, found, spec.device)

    domains = {name.removeprefix("domain."): scored(name) for name in splits if name.startswith("domain.")}
    return {"held_out": scored("test") if "test" in splits else None, "domains": domains, **longer(run)}


def longer(run: Run) -> dict[str, Any]:
    """The long-context evaluation, or the reason why there is none."""
    spec = run.spec
    length = spec.sequence_length * spec.long_context
    reason = None
    if spec.long_context < 2:
        reason = "not asked for"
    elif run.recipe.shape(spec.model).position != "rotary":
        reason = "learned positions end at the trained length; rotary positions are needed"
    else:
        try:
            found = windows(spec, "validation", length)
        except InputError as error:
            reason = str(error)
    if reason:
        return {"long_context": None, "long_context_reason": reason}
    return {
        "long_context": evaluation.long_context(run.model, run.recipe, found, spec.sequence_length, spec.device),
        "long_context_reason": None,
    }
