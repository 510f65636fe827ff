"""The precision axis: formats of every tensor, agreement with fp32, the loss scaler and its negative controls."""

import dataclasses

import pytest
import torch

from lmperf import registry
from lmperf.checking import TrainingCheck, expectation
from lmperf.implementations.float8 import Float8Linear, convert
from lmperf.model import TrainingStep, build
from lmperf.numerics import dtype_table
from lmperf.recipe import Recipe, changed_slots
from lmperf.records import ModelShape

SHAPE = ModelShape(vocab_size=61, context_length=24, layers=2, heads=2, kv_heads=2, d_model=32, d_ff=64)
VARIANTS = registry.variants("precision")
HERE = [key for key, entry in VARIANTS.items() if entry.unavailable() is None]


def steps(name: str, count: int = 3, rate: float = 1e-2):
    recipe = registry.compose([f"precision/{name}"])
    model = build(SHAPE, recipe, seed=0)
    step = TrainingStep(model, recipe, learning_rate=rate)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SHAPE.vocab_size, (4, 17), generator=generator)
    return step, [step(tokens[:, :-1], tokens[:, 1:]) for _ in range(count)]


def test_every_name_of_the_catalogue_is_there():
    assert [entry.name for entry in VARIANTS.values()] == [
        "fp32", "tf32", "matmul_medium", "bf16_autocast", "fp16_autocast_scaler", "fp16_unscaled", "fp16_no_update",
        "bf16_pure", "bf16_fp32_master", "fp8",
    ]  # fmt: skip
    assert [e.name for e in VARIANTS.values() if e.baseline] == ["fp32"]
    assert {e.name for e in VARIANTS.values() if e.control} == {"fp16_unscaled", "fp16_no_update"}
    assert all(e.quality_run for e in VARIANTS.values() if not e.baseline)


@pytest.mark.parametrize("key", VARIANTS)
def test_changes_the_precision_slot_only(key):
    assert changed_slots(VARIANTS[key].apply(Recipe())) <= {"precision"}


@pytest.mark.parametrize(
    "shape", [SHAPE, dataclasses.replace(SHAPE, activation="swiglu", position="rotary", kv_heads=1)]
)
@pytest.mark.parametrize("key", HERE)
def test_agrees_with_fp32_forward_and_backward(key, shape):
    check = TrainingCheck(VARIANTS[key].apply(Recipe()), expectation([key]), shape, length=17)
    for seed in (1, 2):
        outcome = check(seed)
        assert outcome.passed, outcome.message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp32", {"first linear's output": "float32", "logits": "float32"}),
        ("bf16_autocast", {"parameters": "float32", "first linear's output": "bfloat16", "loss": "float32"}),
        ("fp16_autocast_scaler", {"parameters": "float32", "logits": "float16", "gradients": "float32"}),
        ("bf16_pure", {"parameters": "bfloat16", "optimizer's moments": "bfloat16", "gradients": "bfloat16"}),
        ("bf16_fp32_master", {"parameters": "bfloat16", "master weights": "float32", "optimizer's moments": "float32"}),
    ],
)
def test_dtype_of_every_kind_of_tensor(name, expected):
    table = {row.tensor: row.dtype for row in dtype_table(registry.compose([f"precision/{name}"]), SHAPE)}
    assert expected.items() <= table.items()


def test_master_weights_keep_updates_that_bf16_rounds_away():
    rate = 1e-4  # below half a unit in the last place of most weights near 1 (norm weights)
    pure, _ = steps("bf16_pure", 4, rate)
    master, _ = steps("bf16_fp32_master", 4, rate)
    name = "blocks.0.norm_1.weight"
    assert torch.equal(dict(pure.model.named_parameters())[name], torch.ones(32, dtype=torch.bfloat16))
    index = [n for n, _ in master.model.named_parameters()].index(name)
    assert not torch.equal(master.masters[index], torch.ones(32))


def test_dynamic_scaler_halves_its_scale_after_an_overflow_and_skips_the_update():
    step, _ = steps("fp16_autocast_scaler", 1)
    before = [p.detach().clone() for p in step.parameters]
    reports = overflowing(step, 2)
    assert [r.skipped for r in reports] == [True, True]
    assert reports[1].scale == reports[0].scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, step.parameters, strict=True))


def test_without_update_the_scale_never_moves_and_every_overflow_is_skipped():
    step, first = steps("fp16_no_update", 2)
    assert not any(r.skipped for r in first)
    reports = overflowing(step, 3)
    assert all(r.skipped for r in reports)
    assert {r.scale for r in (*first, *reports)} == {2.0**16}


def overflowing(step: TrainingStep, count: int):
    """Steps at a scale that fp16 cannot hold: the loss is multiplied before it reaches the scaler."""
    step.model.loss_function = lambda hidden, head, targets: (hidden.half() @ head.half().t()).mean() * 6e4
    tokens = torch.zeros(2, 8, dtype=torch.long)
    return [step(tokens, tokens) for _ in range(count)]


def test_without_a_scaler_no_scale_is_reported():
    _, reports = steps("fp16_unscaled", 1)
    assert reports[0].scale is None
    assert not reports[0].skipped


def test_medium_precision_is_asked_for():
    assert registry.compose(["precision/matmul_medium"]).precision.matmul == "medium"
    assert registry.compose(["precision/tf32"]).precision.tf32


def test_fp8_converts_linear_layers_of_the_blocks_and_stays_near_fp32():
    model = convert(build(SHAPE, Recipe(), seed=0))
    layers = [m for m in model.modules() if isinstance(m, Float8Linear)]
    assert len(layers) == 2 * 6
    layer, x = layers[0], torch.randn(3, 5, 32, requires_grad=True)
    got, true = layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert got.shape == true.shape
    assert (got.float() - true).square().mean().sqrt() < 0.08 * true.square().mean().sqrt()
    upstream = torch.randn(true.shape)
    mine = torch.autograd.grad(got, (x, layer.weight), upstream.to(got.dtype), retain_graph=True)
    theirs = torch.autograd.grad(true, (x, layer.weight), upstream)
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).square().mean().sqrt() < 0.12 * b.square().mean().sqrt()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here, nothing is missing")
def test_cuda_formats_say_why_they_cannot_run():
    assert VARIANTS["precision/fp8"].unavailable().startswith("no CUDA device")
    assert VARIANTS["precision/tf32"].unavailable().startswith("no CUDA device")
