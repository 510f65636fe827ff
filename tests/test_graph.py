"""The graph axis: the same numbers whatever the execution, and the memory behaviour that each variant promises."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmperf import registry
from lmperf.checking import TrainingCheck, expectation
from lmperf.implementations.allocators import allocator_environment
from lmperf.implementations.execution import Offload, blocks_of
from lmperf.implementations.preallocation import BufferedLinear, preallocate
from lmperf.model import TrainingStep, build
from lmperf.recipe import BuildContext, Recipe, changed_slots
from lmperf.records import InputError, ModelShape

SHAPE = ModelShape(vocab_size=61, context_length=24, layers=3, heads=4, kv_heads=2, d_model=32, d_ff=64)
VARIANTS = registry.variants("graph")
EAGER_HERE = [k for k, v in VARIANTS.items() if v.unavailable() is None and not v.name.startswith("compile")]
TOKENS = torch.randint(61, (4, 25), generator=torch.Generator().manual_seed(0))


def losses(recipe: Recipe, count: int = 4) -> list[float]:
    step = TrainingStep(build(SHAPE, recipe, seed=3), recipe, learning_rate=1e-2)
    return [float(step(TOKENS[:, :-1], TOKENS[:, 1:]).loss) for _ in range(count)]


def test_every_name_of_the_catalogue_is_there():
    assert [entry.name for entry in VARIANTS.values()] == [
        "eager", "compile", "compile_regional", "compile_reduce_overhead", "compile_max_autotune", "recompute_full",
        "recompute_every_2", "adamw_loop", "adamw_foreach", "adamw_fused", "preallocated", "allocator", "accumulate_4",
        "sync_every_step", "offload_activations",
    ]  # fmt: skip
    assert {e.name for e in VARIANTS.values() if e.control} == {"sync_every_step"}
    assert not any(e.quality_run for e in VARIANTS.values())


@pytest.mark.parametrize("key", VARIANTS)
def test_changes_its_slots_only(key):
    assert changed_slots(VARIANTS[key].apply(Recipe())) <= registry.AXIS_SLOTS["graph"]


@pytest.mark.parametrize("key", EAGER_HERE)
def test_training_agrees_with_the_baseline(key):
    shape = dataclasses.replace(SHAPE, activation="swiglu", position="rotary", tied_head=False)
    for seed, sizes in enumerate((SHAPE, shape)):
        outcome = TrainingCheck(VARIANTS[key].apply(Recipe()), expectation([key]), sizes, length=17)(seed)
        assert outcome.passed, outcome.message


@pytest.mark.parametrize("key", EAGER_HERE)
def test_several_steps_are_the_baselines(key):
    assert losses(VARIANTS[key].apply(Recipe())) == pytest.approx(losses(Recipe()), rel=1e-4)


@pytest.mark.parametrize(
    "key", [f"graph/{n}" for n in ("recompute_full", "preallocated", "adamw_fused", "accumulate_4")]
)
@pytest.mark.parametrize("other", ["precision/bf16_autocast", "precision/fp16_autocast_scaler", "matmul/fused_qkv"])
def test_composes_with_other_axes(key, other):
    assert losses(registry.compose([key, other])) == pytest.approx(losses(registry.compose([other])), rel=2e-3)


@pytest.mark.skipif(registry.check_requirement("cxx") is not None, reason="no C++ compiler for torch.compile")
def test_compiled_layers_train_like_the_baseline_and_are_compiled_once(tmp_path):
    """In a process of its own: compiled code and its counters are process-wide."""
    program = (
        "import torch, dataclasses\n"
        "from torch._dynamo.testing import CompileCounterWithBackend\n"
        "from tests.test_graph import losses\n"
        "from lmperf import registry\n"
        "from lmperf.recipe import Recipe\n"
        "counter = CompileCounterWithBackend('eager')\n"
        "original = torch.compile\n"
        "torch.compile = lambda f, **k: original(f, **{**k, 'mode': None, 'backend': counter})\n"
        "mine, true = losses(registry.compose(['graph/compile_regional']), 2), losses(Recipe(), 2)\n"
        "assert all(abs(a - b) < 1e-4 for a, b in zip(mine, true)), (mine, true)\n"
        "print(counter.frame_count)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[1],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "1"  # three layers, one compilation


def saved_bytes(recipe: Recipe) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = build(SHAPE, recipe, seed=0)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
    loss.backward()
    return sum(size for pointer, size in seen.items() if pointer not in weights)


def test_recomputation_keeps_less_for_the_backward_pass():
    base, half, full = (saved_bytes(registry.compose(k)) for k in (
        [], ["graph/recompute_every_2"], ["graph/recompute_full"]
    ))  # fmt: skip
    assert full < half < base
    assert full < 0.5 * base


def test_a_model_without_layers_cannot_be_recomputed():
    with pytest.raises(NotImplementedError, match="blocks"):
        blocks_of(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "foreach", "fused"), [("loop", False, False), ("foreach", True, False), ("fused", False, True)]
)
def test_adamw_is_the_implementation_that_its_name_says(name, foreach, fused):
    recipe = registry.compose([f"graph/adamw_{name}"])
    groups = recipe.optimizer([torch.nn.Parameter(torch.ones(2, 2))], learning_rate=1e-3).param_groups
    assert {(g["foreach"], g["fused"]) for g in groups} == {(foreach, fused)}


def test_preallocated_buffers_and_gradients_stay_where_they_are():
    recipe = registry.compose(["graph/preallocated"])
    step = TrainingStep(build(SHAPE, recipe, seed=0), recipe, learning_rate=1e-3)
    layer = next(m for m in step.model.modules() if isinstance(m, BufferedLinear))
    places = []
    for _ in range(3):
        step(TOKENS[:, :-1], TOKENS[:, 1:])
        places.append((layer.buffer.data_ptr(), layer.weight.grad.data_ptr()))
    assert len(set(places)) == 1


def test_a_buffer_written_again_before_its_backward_pass_is_an_error():
    model = preallocate(build(SHAPE, Recipe(), seed=0), BuildContext(SHAPE))
    first = model(TOKENS[:, :-1], TOKENS[:, 1:])
    model(TOKENS[:, 1:], TOKENS[:, :-1])
    with pytest.raises(RuntimeError, match="modified in"):
        first.backward()


def test_preallocated_layers_do_not_share_outputs_without_gradients():
    model = preallocate(torch.nn.Sequential(torch.nn.Linear(4, 4)), BuildContext(SHAPE))
    with torch.no_grad():
        one, two = model(torch.ones(1, 4)), model(torch.zeros(1, 4))
    assert not torch.equal(one, two)


def test_offloaded_tensors_come_back_and_weights_stay():
    offload = Offload()
    large, weight = torch.randn(200, 100).t(), torch.nn.Parameter(torch.randn(200, 100))
    half = torch.randn(300, 200).to(torch.bfloat16)
    kept = [offload.pack(t) for t in (weight, weight.t(), torch.randn(4))]
    assert all(isinstance(t, torch.Tensor) for t in kept)
    packed = [offload.pack(t) for t in (large, half)]
    assert not any(isinstance(p, torch.Tensor) for p in packed)
    assert torch.equal(offload.unpack(packed[1]), half)
    assert torch.equal(offload.unpack(packed[0]), large)


def test_offloading_gives_the_same_gradients_on_large_activations():
    shape = dataclasses.replace(SHAPE, d_model=128, d_ff=512, layers=1)
    got = []
    for keys in ([], ["graph/offload_activations"]):
        recipe = registry.compose(keys)
        step = TrainingStep(build(shape, recipe, seed=0), recipe, learning_rate=1e-3)
        tokens = torch.randint(61, (8, 25), generator=torch.Generator().manual_seed(1))
        step.forward_backward(tokens[:, :-1], tokens[:, 1:])
        got.append([p.grad for p in step.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


def test_the_allocator_changes_environment_variables_only():
    recipe = registry.compose(["graph/allocator"])
    assert changed_slots(recipe) == {"environment"}
    assert recipe.environment == allocator_environment()
    assert {"LD_PRELOAD", "GLIBC_TUNABLES"} & set(recipe.environment)
    run = subprocess.run(
        [sys.executable, "-c", "print(1)"], env={**os.environ, **recipe.environment}, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    assert b"cannot be preloaded" not in run.stderr


def test_a_batch_that_four_does_not_divide_is_refused():
    recipe = registry.compose(["graph/accumulate_4"])
    step = TrainingStep(build(SHAPE, recipe, seed=0), recipe, learning_rate=1e-3)
    with pytest.raises(InputError, match="batch_size 3"):
        step(TOKENS[:3, :-1], TOKENS[:3, 1:])
