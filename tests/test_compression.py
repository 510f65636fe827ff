"""The compression axis: what the integers and zeros stand for, what is stored, and what training with them does."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lmperf import registry
from lmperf.checking import TrainingCheck, expectation
from lmperf.implementations.model_size import (
    linear_weights,
    memory_bytes,
    read_weights,
    stored_tensors,
    token_flops,
    write_weights,
)
from lmperf.implementations.pruning import threshold, two_of_four
from lmperf.implementations.quantisation import Int8Linear, WeightOnlyLinear, quantise_rows
from lmperf.implementations.static_quantisation import FakeQuantisedLinear, fake_quantise
from lmperf.model import TrainingStep, apply_transforms, build
from lmperf.recipe import BuildContext, Recipe, changed_slots
from lmperf.records import ModelShape

SHAPE = ModelShape(vocab_size=61, context_length=24, layers=2, heads=4, kv_heads=2, d_model=32, d_ff=64)
VARIANTS = registry.variants("compression")
HERE = [key for key, entry in VARIANTS.items() if entry.unavailable() is None]
TOKENS = torch.randint(61, (4, 25), generator=torch.Generator().manual_seed(0))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield TOKENS[:, :-1], TOKENS[:, 1:]


CONTEXT = BuildContext(SHAPE, batches=batches)


def finished(name: str, steps: int = 0) -> nn.Module:
    recipe = registry.compose([f"compression/{name}"])
    model = build(SHAPE, recipe, seed=0, context=CONTEXT)
    step = TrainingStep(model, recipe, learning_rate=1e-2)
    for _ in range(steps):
        step(TOKENS[:, :-1], TOKENS[:, 1:])
    return apply_transforms(model, recipe.finish, CONTEXT).eval()


def test_every_name_of_the_catalogue_is_there():
    assert [entry.name for entry in VARIANTS.values()] == [
        "dense", "int8_dynamic", "int8_weight_only", "qat_int8", "ptq_int8", "threshold_50", "threshold_80",
        "threshold_90", "semi_structured_2_4", "prune_finetune",
    ]  # fmt: skip
    assert all(e.quality_run for e in VARIANTS.values() if not e.baseline)


@pytest.mark.parametrize("key", VARIANTS)
def test_changes_its_slots_only(key):
    assert changed_slots(VARIANTS[key].apply(Recipe())) <= {"transforms", "finish"}


@pytest.mark.parametrize("key", HERE)
def test_trains_with_finite_gradients(key):
    outcome = TrainingCheck(VARIANTS[key].apply(Recipe()), expectation([key]), SHAPE, length=17)(1)
    assert outcome.passed, outcome.message


def test_rows_are_quantised_to_half_a_step():
    weight = torch.randn(7, 33) * torch.logspace(-3, 3, 7)[:, None]
    integers, scale = quantise_rows(weight)
    assert integers.dtype == torch.int8
    assert (integers.abs().amax(dim=1) == 127).all()
    error = (integers * scale[:, None] - weight).abs()
    assert (error <= 0.5001 * scale[:, None]).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(1, 33), (2, 5, 33), (1, 1, 33)])
@pytest.mark.parametrize("kind", ["dynamic", "static", "weight_only"])
def test_int8_layers_compute_with_the_weights_they_stand_for(kind, size, bias):
    torch.manual_seed(0)
    linear, x = nn.Linear(33, 20, bias=bias), torch.randn(size)
    peak = float(x.abs().max())
    layer = {
        "dynamic": lambda: Int8Linear(linear),
        "static": lambda: Int8Linear(linear, input_scale=peak),
        "weight_only": lambda: WeightOnlyLinear(linear),
    }[kind]()
    true = nn.functional.linear(x, layer.dense_weight(), linear.bias)
    assert layer(x).shape == true.shape
    assert layer(x).dtype == x.dtype
    assert (layer(x) - true).square().mean().sqrt() < 0.02 * true.square().mean().sqrt()
    torch.testing.assert_close(
        layer.dense_weight(), linear.weight.detach(), rtol=0, atol=float(linear.weight.detach().abs().max()) / 250
    )


def test_the_integer_product_of_other_devices_is_the_packed_one():
    linear, x = nn.Linear(32, 24), torch.randn(5, 32)
    layer = Int8Linear(linear)
    packed = layer(x)
    for name, tensor in layer.tensors().items():
        layer.register_buffer(name, tensor)
    layer.packed = None
    assert (layer(x) - packed).abs().max() < 0.03  # older CPUs keep seven bits of the activations


@pytest.mark.parametrize("name", ["int8_dynamic", "int8_weight_only", "qat_int8", "ptq_int8"])
def test_int8_models_are_smaller_and_near_the_dense_one(name, tmp_path):
    dense, model = finished("dense", 3), finished(name, 3)
    assert memory_bytes(model) < 0.6 * memory_bytes(dense)
    assert write_weights(model, tmp_path / "a") < 0.7 * write_weights(dense, tmp_path / "b")
    with torch.no_grad():
        loss, true = (float(m(TOKENS[:, :-1], TOKENS[:, 1:])) for m in (model, dense))
    assert loss == pytest.approx(true, abs=0.05)


def test_fake_quantisation_rounds_and_lets_the_gradient_through():
    x = torch.tensor([0.24, 0.26, -9.0], requires_grad=True)
    y = fake_quantise(x, torch.tensor(0.05))
    y.sum().backward()
    torch.testing.assert_close(y.detach(), torch.tensor([0.25, 0.25, -6.35]))
    assert (x.grad == 1).all()


def test_training_finds_activation_scales_and_conversion_uses_them():
    recipe = registry.compose(["compression/qat_int8"])
    model = build(SHAPE, recipe, seed=0, context=CONTEXT)
    step = TrainingStep(model, recipe, learning_rate=1e-2)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, FakeQuantisedLinear)}
    assert {float(m.peak) for m in layers.values()} == {0.0}
    step(TOKENS[:, :-1], TOKENS[:, 1:])
    peaks = {name: float(m.peak) for name, m in layers.items()}
    assert all(peak > 0 for peak in peaks.values())
    trained = float(model.eval()(TOKENS[:, :-1], TOKENS[:, 1:]))
    model = apply_transforms(model, recipe.finish, BuildContext(SHAPE))  # trained: needs no batches
    assert {name: m.input_scale for name, m in model.named_modules() if isinstance(m, Int8Linear)} == peaks
    assert float(model(TOKENS[:, :-1], TOKENS[:, 1:])) == pytest.approx(trained, abs=0.02)


def test_calibration_without_batches_is_refused():
    recipe = registry.compose(["compression/ptq_int8"])
    with pytest.raises(ValueError, match="BuildContext.batches"):
        apply_transforms(build(SHAPE, recipe, seed=0), recipe.finish, BuildContext(SHAPE))


@pytest.mark.parametrize(
    ("name", "share"), [("threshold_50", 0.5), ("threshold_80", 0.8), ("threshold_90", 0.9), ("prune_finetune", 0.8)]
)
def test_pruned_share_of_every_layer_after_training(name, share, tmp_path):
    dense, model = finished("dense"), finished(name, 2)
    inside = [weight for path, weight in linear_weights(model) if path.startswith("blocks")]
    assert len(inside) == 12
    for weight in inside:
        assert float((weight == 0).double().mean()) == pytest.approx(share, abs=0.01)
    assert memory_bytes(model) == memory_bytes(dense)  # zeros in a dense tensor save nothing …
    assert write_weights(model, tmp_path / "a") < write_weights(dense, tmp_path / "b")  # … but on disk
    flops = [token_flops(model, past=8, effective=kind) for kind in (False, True)]
    assert flops[0] == token_flops(dense, past=8, effective=True)
    assert flops[1] < flops[0]


def test_threshold_training_moves_unused_weights_too():
    recipe = registry.compose(["compression/threshold_90"])
    model = build(SHAPE, recipe, seed=0)
    before = model.blocks[0].feed_forward.up.weight.detach().clone()
    TrainingStep(model, recipe, learning_rate=1e-2)(TOKENS[:, :-1], TOKENS[:, 1:])
    moved = (model.blocks[0].feed_forward.up.weight != before).double().mean()
    assert moved > 0.99


def test_threshold_is_the_quantile_of_magnitudes():
    weight = torch.arange(-5.0, 5.0).reshape(2, 5)
    assert float(threshold(weight, 0.5)) == 2.0
    assert int((weight.abs() > threshold(weight, 0.9)).sum()) == 1


def test_two_of_every_four_keeps_the_larger_ones():
    weight = torch.tensor([[1.0, -4.0, 3.0, 2.0, 0.0, 0.1, -0.2, 9.0]])
    assert two_of_four(weight).tolist() == [[0.0, -4.0, 3.0, 0.0, 0.0, 0.0, pytest.approx(-0.2), 9.0]]
    with pytest.raises(NotImplementedError, match="multiple of 4"):
        two_of_four(torch.ones(2, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_weights_come_back_from_disk_bit_by_bit(dtype, tmp_path):
    model = nn.Module()
    model.register_buffer("sparse", (torch.randn(9, 11) * (torch.rand(9, 11) < 0.1) * 50).to(dtype))
    model.register_buffer("dense", (torch.randn(5) * 20 + 60).to(dtype))
    model.register_buffer("empty", torch.zeros(0, 3, dtype=dtype))
    size = write_weights(model, tmp_path / "weights.bin")
    assert size == (tmp_path / "weights.bin").stat().st_size
    back = read_weights(tmp_path / "weights.bin")
    for name, tensor in stored_tensors(model):
        assert back[name].dtype == dtype
        assert torch.equal(back[name], tensor)


def test_tied_weights_count_once():
    model = build(SHAPE, Recipe(), seed=0)
    assert memory_bytes(model) == sum(p.numel() * 4 for p in model.parameters())
