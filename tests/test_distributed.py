"""Several processes give one process's weights; lossy averages keep what they leave out; no rank outlives its first."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import distributed as dist

from lmperf import model, reference, registry
from lmperf.catalogue import catalogue
from lmperf.implementations import collectives, compressors, ranks, replicas
from lmperf.implementations.experts import InstallExperts
from lmperf.implementations.sharding import ZeroOptimizer, divide
from lmperf.recipe import BuildContext, Parallel, Recipe
from lmperf.records import ArmSpec, Cell, InputError, ModelShape, SessionSpec
from lmperf.workloads.base import Prepared, Setting, get_workload
from lmperf.workloads.distributed import check

NAMES = (
    "single", "ddp_per_parameter", "ddp_flat", "ddp_overlap", "torch_ddp", "zero1", "fsdp2", "bf16_hook", "powersgd",
    "onebit", "topk", "moe_topk",
)  # fmt: skip
LOSSY = ("bf16_hook", "powersgd", "onebit", "topk", "moe_topk")
SHAPE = ModelShape(vocab_size=61, context_length=16, layers=1, heads=2, kv_heads=2, d_model=16, d_ff=32)


# Imported before any test forks: what a process sample's fork server has, too.
registry.variants()
get_workload("distributed_step")
for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.parallel"):
    importlib.import_module(name)


def setting_of(name: str, scratch: Path, **params: object) -> Setting:
    arm = ArmSpec(name, () if name in ("single", "all_reduce") else (f"distributed/{name}",))
    spec = SessionSpec(
        session="distributed", axis="distributed", workload="distributed_step", arms=(arm,), cells=(), batch_size=6,
        sequence_length=16, rounds=3, seed=1, device="cpu", model=SHAPE, threads=1,
    )  # fmt: skip
    return Setting(spec, arm, Cell("cell", params), registry.compose(arm.variants), seed=11, scratch=scratch)


def isolated(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a forked process, as a process sample is: groups leave threads behind that would slow the next."""

    @functools.wraps(test)
    def run(*arguments: object, **named: object) -> None:
        process = multiprocessing.get_context("fork").Process(target=alone, args=(test, arguments, named))
        process.start()
        process.join(120)
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode == 0, "see the traceback in the captured stderr"

    return run


def alone(test: Callable[..., None], arguments: Sequence[object], named: Mapping[str, object]) -> None:
    torch.set_num_threads(1)
    test(*arguments, **named)
    assert not dist.is_initialized()
    assert psutil.Process().children() == []


def test_every_name_of_the_catalogue_is_registered() -> None:
    assert set(NAMES) <= {entry.name for entry in catalogue().values() if entry.axis == "distributed"}


@pytest.mark.parametrize("name", NAMES)
@isolated
def test_workload(name: str, tmp_path: Path) -> None:
    prepared = get_workload("distributed_step")(setting_of(name, tmp_path))
    try:
        prepared.step()
        assert prepared.check is not None
        outcome = prepared.check(5)
        assert outcome.passed, outcome.message
        assert prepared.tokens_per_step == 96
        if name != "single":
            told(prepared, name)
    finally:
        prepared.close()


def told(prepared: Prepared, name: str) -> None:
    once = {key: value for key, (_, value) in prepared.once.items()}
    assert 0 <= once["comm_share"] < 1
    assert once["loopback_bytes"] >= once["bytes_on_wire"] > 0  # headers on top
    assert (once["wire_reduction"] > 1) == (name in LOSSY)
    if name in ("fsdp2", "torch_ddp", "ddp_flat"):
        assert once["loopback_bytes"] == pytest.approx(once["bytes_on_wire"], rel=0.35)  # headers weigh much here
    if name == "bf16_hook":
        assert once["wire_reduction"] == 2
    if name == "moe_topk":
        assert once["expert_bytes"] < 0.25 * once["expert_dense_bytes"]
    if name == "zero1":
        assert once["optimizer_bytes"] < 0.75 * 8 * sum(p.numel() for p in prepared.model.parameters())


@pytest.mark.parametrize("name", ["ddp_flat", "fsdp2", "onebit"])
@isolated
def test_three_ranks(name: str, tmp_path: Path) -> None:
    prepared = get_workload("distributed_step")(setting_of(name, tmp_path, world_size=3))
    try:
        assert prepared.check is not None
        outcome = prepared.check(5)
        assert outcome.passed, outcome.message
    finally:
        prepared.close()


def forgotten(net: nn.Module) -> None:
    """A synchronisation that does nothing."""


def summed(net: nn.Module) -> None:
    """A synchronisation that forgets to divide."""
    for grad in collectives.gradients(net):
        dist.all_reduce(grad)


@pytest.mark.parametrize(("wrong", "message"), [(forgotten, "the ranks' weights differ"), (summed, "from one process")])
@isolated
def test_wrong_averages_fail_the_check(wrong: object, message: str, tmp_path: Path) -> None:
    setting = setting_of("ddp_flat", tmp_path)
    recipe = setting.recipe.replace(parallel=Parallel(2, collectives.keep, wrong))  # type: ignore[arg-type]
    prepared = get_workload("distributed_step")(replace(setting, recipe=recipe))
    try:
        assert prepared.check is not None
        outcome = prepared.check(5)
        assert not outcome.passed
        assert message in outcome.message
    finally:
        prepared.close()


@pytest.mark.parametrize("name", ["ddp_flat", "ddp_overlap", "torch_ddp"])
@isolated
def test_accumulated_micro_batches_are_averaged_once(name: str, tmp_path: Path) -> None:
    setting = setting_of(name, tmp_path)
    prepared = get_workload("distributed_step")(replace(setting, recipe=setting.recipe.replace(accumulate=3)))
    try:
        assert prepared.check is not None
        outcome = prepared.check(5)
        assert outcome.passed, outcome.message
    finally:
        prepared.close()


def test_a_batch_that_cannot_be_shared_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch 7 cannot be shared by 2"):
        get_workload("distributed_step")(setting_of("ddp_flat", tmp_path, batch=7))
    with pytest.raises(InputError, match="world_size: 1"):
        get_workload("distributed_step")(setting_of("ddp_flat", tmp_path, world_size=1))


@isolated
def test_all_reduce_table(tmp_path: Path) -> None:
    prepared = get_workload("all_reduce")(setting_of("all_reduce", tmp_path, megabytes=0.1))
    try:
        prepared.step()
        assert prepared.check is not None
        assert prepared.check(3).passed
        assert prepared.observations.values["bus_bandwidth"][0] > 0
    finally:
        prepared.close()


def gradient_net(*shapes: tuple[int, ...]) -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])


@pytest.mark.parametrize(
    "average",
    [compressors.OneBit(), compressors.TopK(density=0.1), compressors.PowerSGD(rank=1)],
    ids=lambda a: type(a).__name__,
)
@isolated
def test_error_feedback_loses_nothing(average: object, tmp_path: Path) -> None:
    net = gradient_net((12, 9), (7,), (5, 3))
    generator = torch.Generator().manual_seed(0)
    wanted = [torch.zeros_like(p) for p in net.parameters()]
    sent = [torch.zeros_like(p) for p in net.parameters()]
    gaps = []
    ranks.join_group(0, 1, tmp_path / "store", threads=1, device="cpu")
    for _ in range(40):
        for parameter, total in zip(net.parameters(), wanted, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.3
            total += parameter.grad
        average(net)  # type: ignore[operator]
        for parameter, total in zip(net.parameters(), sent, strict=True):
            total += parameter.grad
        gaps.append(sum(float((a - b).norm()) for a, b in zip(wanted, sent, strict=True)))
    dist.destroy_process_group()
    # What is still owed stays bounded instead of growing with the number of steps.
    assert gaps[-1] < 2 * max(gaps[:20])


@isolated
def test_ranks_meet_in_a_folder_with_a_relative_name(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    Path("a b 文").mkdir()
    ranks.join_group(0, 1, Path("a b 文") / "store", threads=1, device="cpu")
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


@isolated
def test_the_whole_rank_and_all_entries_lose_nothing_at_once(tmp_path: Path) -> None:
    ranks.join_group(0, 1, tmp_path / "store", threads=1, device="cpu")
    for average in (compressors.TopK(density=1.0), compressors.PowerSGD(rank=2)):
        net = gradient_net((6, 8), (3,))
        left, right = torch.randn(6, 2), torch.randn(2, 8)
        grads = [left @ right, torch.randn(3)]  # a matrix of rank 2
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            parameter.grad = grad.clone()
        average(net)
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50))
@settings(max_examples=50, deadline=None)
def test_signs_survive_packing(values: list[float]) -> None:
    tensor = torch.tensor(values)
    packed = compressors.pack_signs(tensor)
    assert packed.numel() == (len(values) + 7) // 8
    expected = torch.where(tensor >= 0, 1.0, -1.0)
    assert torch.equal(compressors.unpack_signs(packed, len(values)), expected)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_parameters_are_divided_evenly(sizes: list[int], parts: int) -> None:
    owners = divide(sizes, parts)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == part) for part in range(parts)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


def test_the_sharded_optimizer_follows_a_schedule() -> None:
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(5)]
    pairs = [[nn.Parameter(t.clone()) for t in start] for _ in range(2)]
    optimizers = [ZeroOptimizer()(pairs[0], learning_rate=0.1), reference.adamw(pairs[1], learning_rate=0.1)]
    for step in range(4):
        grads = [torch.randn(4, 3), torch.randn(5)]
        for parameters, optimizer in zip(pairs, optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
    for mine, true in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, true)


def test_experts_share_the_tokens_and_all_learn() -> None:
    net = model.build(SHAPE, Recipe().replace(parallel=Parallel(1, InstallExperts())), seed=1)
    mixture = net.blocks[-1].feed_forward
    x = torch.randn(2, 30, 16)
    weight, choice = torch.nn.functional.linear(x, mixture.router).softmax(-1).max(-1)
    true = torch.stack(
        [
            mixture.experts[int(e)](t) * w
            for t, e, w in zip(x.flatten(0, 1), choice.flatten(), weight.flatten(), strict=True)
        ]
    )
    torch.testing.assert_close(mixture(x).flatten(0, 1), true)
    mixture(x).square().sum().backward()
    assert all(p.grad is not None for p in mixture.parameters())
    again = InstallExperts()(model.build(SHAPE, Recipe(), seed=1), BuildContext(SHAPE, seed=1))
    assert torch.equal(again.blocks[-1].feed_forward.router, mixture.router)


@dataclass(frozen=True)
class Sleeper:
    """A rank that tells its number and waits."""

    folder: Path

    def __call__(self, rank: int, pipe: Connection) -> None:
        (self.folder / f"rank-{rank}").write_text(str(os.getpid()))
        pipe.recv_bytes()


@isolated
def test_a_process_with_threads_starts_fresh_ranks(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
    assert not ranks.may_fork(1)
    others = ranks.start(2, Sleeper(tmp_path), folder=tmp_path, threads=1)
    wait_for((tmp_path / "rank-1").exists)
    assert others.processes[0].is_alive()
    process = others.processes[0]
    others.close()
    assert not running(int(process.pid or 0))
    stop.set()
    for child in psutil.Process().children():  # multiprocessing's resource tracker
        child.kill()
        child.wait()


def test_ranks_die_with_their_first(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[2])\n"
        "from test_distributed import Sleeper\nfrom lmperf.implementations import ranks\n"
        "folder = Path(sys.argv[1])\nranks.start(3, Sleeper(folder), folder=folder, threads=1)\n"
        "(folder / 'ready').touch()\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)], env=environment
    )  # fmt: skip
    files = [tmp_path / name for name in ("ready", "rank-1", "rank-2")]
    wait_for(lambda: all(file.exists() and (file.name == "ready" or file.read_text()) for file in files))
    pids = [int(file.read_text()) for file in files[1:]]
    assert all(psutil.pid_exists(pid) for pid in pids)
    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_for(lambda: not any(running(pid) for pid in pids))


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@isolated
def test_a_rank_that_fails_fails_the_step(tmp_path: Path) -> None:
    others = ranks.start(2, Failing(), folder=tmp_path, threads=1)
    try:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3))
    finally:
        others.close()


@dataclass(frozen=True)
class Failing:
    """A rank that breaks at once."""

    def __call__(self, rank: int, pipe: Connection) -> None:
        raise SystemExit(3)


def test_check_names_what_a_lossy_average_owes() -> None:
    plan = replicas.Plan(registry.compose(["distributed/topk"]), SHAPE, 2, 4, 8)
    spread = check(plan, lambda _: replicas.Weights([torch.zeros(3)], 0.1), 1)
    broken = check(plan, lambda _: replicas.Weights([torch.tensor([float("nan")])], 0.0), 1)
    assert not spread.passed
    assert not broken.passed


def test_rows_are_shared_without_overlap() -> None:
    plan = replicas.Plan(Recipe(), SHAPE, 3, 6, 8)
    shares = [plan.inputs(0, 5, rank)[0] for rank in range(3)]
    whole: Tensor = replicas.Plan(Recipe(), SHAPE, 1, 6, 8).inputs(0, 5, 0)[0]
    assert torch.equal(torch.cat(shares), whole)
