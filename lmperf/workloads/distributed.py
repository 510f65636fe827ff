"""Workloads `distributed_step` (one optimizer step over several processes) and `all_reduce` (the collective alone)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from statistics import median

import torch
from torch import Tensor
from torch import distributed as dist

from lmperf.implementations import ranks, replicas, wire
from lmperf.implementations.collectives import ACCOUNT
from lmperf.records import InputError
from lmperf.workloads.base import CheckOutcome, Observations, Prepared, Setting, Unsupported, workload

CALIBRATION_STEPS = 3
TOLERANCE = 1e-2  # of the learning rate, which is about what one AdamW step moves a weight
MEGABYTE = 10**6


def ranks_of(setting: Setting) -> int:
    """Processes of a cell: `world_size`, else the recipe's own; 1 for `single`."""
    if setting.recipe.parallel is None:
        return 1
    size = int(setting.param("world_size", setting.recipe.parallel.world_size))
    if size < 2:
        raise InputError(f"cell world_size: {size}; a distributed variant needs at least 2")
    if setting.device.startswith("cuda") and torch.cuda.device_count() < size:
        raise Unsupported(f"needs {size} CUDA devices, here are {torch.cuda.device_count()}")
    return size


def plan_of(setting: Setting) -> replicas.Plan:
    """What every rank builds and on which rows it works."""
    batch = int(setting.param("batch", setting.spec.batch_size))
    length = int(setting.param("length", setting.spec.sequence_length))
    world_size = ranks_of(setting)
    if batch % world_size:
        raise InputError(f"batch {batch} cannot be shared by {world_size} ranks; allowed: multiples of {world_size}")
    shape = replace(setting.spec.model, context_length=max(setting.spec.model.context_length, length))
    return replicas.Plan(
        recipe=setting.recipe, shape=shape, world_size=world_size, batch=batch, length=length, device=setting.device,
        weights_seed=setting.spec.seed, data_seed=setting.seed, learning_rate=setting.spec.learning_rate,
    )  # fmt: skip


@dataclass(frozen=True)
class Follow:
    """What ranks 1 … n - 1 do: build their replica, then obey rank 0 until its pipe closes."""

    plan: replicas.Plan

    def __call__(self, rank: int, pipe: Connection) -> None:
        worker = replicas.Worker(self.plan, rank)
        while True:
            worker.obey(pipe.recv_bytes().decode())


@workload("distributed_step")
def distributed_step(setting: Setting) -> Prepared:
    """One step on a joined batch, its rows shared by the ranks (cell: world_size, batch, length); rank 0 is timed."""
    plan = plan_of(setting)
    threads = max(1, setting.spec.threads // plan.world_size)
    if plan.world_size == 1:
        torch.set_num_threads(setting.spec.threads)
        worker = replicas.Worker(plan, 0)
        worker.obey("step")
        return _prepared(plan, worker, lambda text: worker.obey(text), Observations(), {}, lambda: None)
    started = time.perf_counter()
    try:
        others = ranks.start(
            plan.world_size, Follow(plan), folder=setting.scratch, threads=threads, device=setting.device
        )
        try:
            worker = replicas.Worker(plan, 0)
            start_s = time.perf_counter() - started
            return _with_ranks(plan, worker, others, start_s)
        except BaseException:
            others.close()
            raise
    except NotImplementedError as error:
        raise Unsupported(str(error)) from None


def _with_ranks(plan: replicas.Plan, worker: replicas.Worker, others: ranks.Ranks, start_s: float) -> Prepared:
    seen = Observations()

    def tell(text: str) -> object:
        others.command(text)
        return worker.obey(text)

    once = {"ranks_start_s": ("s", start_s), **_calibrate(plan, tell)}

    def step(text: str) -> object:
        ACCOUNT.take()
        report = tell(text)
        spent = ACCOUNT.take()
        # The ranks do the same work, so all of them together send world_size times what rank 0 does.
        seen.add("blocked_s", "s", spent.blocked_s)
        if spent.compress_s:
            seen.add("compress_s", "s", spent.compress_s)
        return report

    return _prepared(plan, worker, lambda text: step(text) if text == "step" else tell(text), seen, once, others.close)


def _prepared(
    plan: replicas.Plan, worker: replicas.Worker, tell: Callable[[str], object], seen: Observations,
    once: dict[str, tuple[str, float]], close: Callable[[], None],
) -> Prepared:  # fmt: skip
    once = once | {"optimizer_bytes": ("bytes", float(worker.optimizer_bytes()))}
    return Prepared(
        step=lambda: tell("step"),
        check=lambda seed: check(plan, tell, seed),
        tokens_per_step=float(plan.batch * plan.length),
        observations=seen,
        once=once,
        close=close,
        # Sharded parameters have no storage of their own to count.
        model=None if any(hasattr(p, "full_tensor") for p in worker.step.parameters) else worker.step.model,
    )


def _calibrate(plan: replicas.Plan, tell: Callable[[str], object]) -> dict[str, tuple[str, float]]:
    """Bytes on the wire, share of communication and break-even bandwidth, from a few steps before the clock.

    The share is 1 - (time of the same step without any communication) / (time of the step), both on all ranks at once.
    """
    for command in ("step", "step", "local", "local"):  # the first steps allocate
        tell(command)
    local = median(_seconds(lambda: tell("local")) for _ in range(CALIBRATION_STEPS))
    tell("drop local")
    ACCOUNT.take()
    before = wire.loopback_bytes()
    full = median(_seconds(lambda: tell("step")) for _ in range(CALIBRATION_STEPS))
    after, spent = wire.loopback_bytes(), ACCOUNT.take()
    found = {"comm_share": ("ratio", max(0.0, 1 - local / full))}
    if spent.sent_bytes:
        total = plan.world_size * spent.sent_bytes / CALIBRATION_STEPS
        found["bytes_on_wire"] = ("bytes", total)
        found["wire_reduction"] = ("ratio", spent.dense_bytes / spent.sent_bytes)
    if before is not None and after is not None:
        found["loopback_bytes"] = ("bytes", (after - before) / CALIBRATION_STEPS)
    if spent.compress_s and spent.dense_bytes > spent.sent_bytes:
        # On a link slower than this, the bytes saved are worth more time than packing them costs.
        saved = (spent.dense_bytes - spent.sent_bytes) / spent.compress_s
        found["break_even_bandwidth"] = ("bytes/s", saved)
    return found | {name: ("bytes", value / CALIBRATION_STEPS) for name, value in spent.extra.items()}


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def check(plan: replicas.Plan, tell: Callable[[str], object], seed: int) -> CheckOutcome:
    """Weights after 5 steps against one process on the joined batch; replicas must always be identical."""
    found = tell(f"check {seed}")
    if not isinstance(found, replicas.Weights):
        raise TypeError(f"check: expected weights, got {type(found).__name__}")
    if found.spread > 0:
        return CheckOutcome(False, f"the ranks' weights differ by up to {found.spread:.3g}", found.spread)
    if not all(bool(torch.isfinite(t).all()) for t in found.tensors):
        return CheckOutcome(False, "weights are not finite after 5 steps")
    if replicas.lossy(plan.recipe):
        return CheckOutcome(True, "replicas agree and are finite; a lossy average: see its quality run", 0.0)
    truth = replicas.run_steps(replace(plan, recipe=replicas.alone(plan.recipe), world_size=1), 0, seed)
    error = max(float((a - b).abs().max()) for a, b in zip(found.tensors, truth.tensors, strict=True))
    allowed = TOLERANCE * plan.learning_rate
    message = f"weights after 5 steps differ from one process by {error:.3g} where {allowed:.3g} is allowed"
    return CheckOutcome(error <= allowed, message, error)


@workload("all_reduce")
def all_reduce(setting: Setting) -> Prepared:
    """One all-reduce of `megabytes` of fp32 over `world_size` ranks (the collective alone, no model)."""
    size = int(setting.param("world_size", 2))
    elements = max(1, int(float(setting.param("megabytes", 10)) * MEGABYTE / 4))
    threads = max(1, setting.spec.threads // size)
    others = ranks.start(
        size, Reducer(elements, setting.device), folder=setting.scratch, threads=threads, device=setting.device
    )
    tensor = torch.ones(elements, device=setting.device)
    seen = Observations()

    def step() -> Tensor:
        others.command("reduce")
        started = time.perf_counter()
        dist.all_reduce(tensor)
        seconds = time.perf_counter() - started
        # Bus bandwidth as in NCCL's tests: 2(n-1)/n · size / time, comparable over n.
        seen.add("bus_bandwidth", "bytes/s", 2 * (size - 1) / size * 4 * elements / seconds)
        return tensor.fill_(1.0)

    def verify(seed: int) -> CheckOutcome:
        others.command("reduce")
        tensor.fill_(float(seed % 97))
        dist.all_reduce(tensor)
        expected = float(seed % 97) + size - 1
        passed = bool((tensor == expected).all())
        tensor.fill_(1.0)
        return CheckOutcome(passed, f"every element should be {expected:g}", 0.0 if passed else None)

    return Prepared(step=step, check=verify, observations=seen, close=others.close)


@dataclass(frozen=True)
class Reducer:
    """The other ranks of `all_reduce`: they bring ones."""

    elements: int
    device: str

    def __call__(self, rank: int, pipe: Connection) -> None:
        tensor = torch.ones(self.elements, device=self.device)
        while pipe.recv_bytes():
            dist.all_reduce(tensor)
            tensor.fill_(1.0)
