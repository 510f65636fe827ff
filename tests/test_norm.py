"""The norm axis: agreement with a second way to write each norm, and what happens on tiny and constant rows."""

import dataclasses

import pytest
import torch

from lmperf import registry
from lmperf.checking import TrainingCheck, expectation
from lmperf.implementations.norms import DynamicLayerNorm, ManualLayerNorm, dynamic_epsilon
from lmperf.numerics import norm_table
from lmperf.recipe import Recipe, changed_slots
from lmperf.records import ModelShape
from lmperf.variants.norm import FLOOR

SHAPE = ModelShape(vocab_size=61, context_length=24, layers=2, heads=2, kv_heads=2, d_model=32, d_ff=64)
VARIANTS = registry.variants("norm")


def test_every_name_of_the_catalogue_is_there():
    assert [entry.name for entry in VARIANTS.values()] == [
        "layernorm", "eps_1e4", "eps_1e6", "dynamic_eps", "dynamic_eps_as_written", "rmsnorm", "manual", "unbiased_var",
        "no_eps",
    ]  # fmt: skip
    assert {e.name for e in VARIANTS.values() if e.control} == {"dynamic_eps_as_written", "no_eps"}
    assert {e.name for e in VARIANTS.values() if not e.quality_run} == {"layernorm", "manual"}


@pytest.mark.parametrize("key", VARIANTS)
def test_changes_the_norm_slot_only(key):
    assert changed_slots(VARIANTS[key].apply(Recipe())) <= {"norm"}


@pytest.mark.parametrize(
    "shape", [SHAPE, dataclasses.replace(SHAPE, norm="rmsnorm", activation="swiglu", tied_head=False)]
)
@pytest.mark.parametrize("key", VARIANTS)
def test_training_agrees_with_the_oracle(key, shape):
    check = TrainingCheck(VARIANTS[key].apply(Recipe()), expectation([key]), shape, length=17)
    for seed in (1, 2):
        outcome = check(seed)
        assert outcome.passed, outcome.message
        assert outcome.max_error is not None


@pytest.mark.parametrize(("key", "x"), [(k, s) for k in VARIANTS for s in [(7, 33), (1, 1, 33), (2, 5, 33)]])
def test_operator_agrees_with_its_definition_in_double_precision(key, x):
    generator = torch.Generator().manual_seed(3)
    entry, x = VARIANTS[key], torch.randn(x, generator=generator) * 2 + 0.5
    ours = entry.apply(Recipe()).norm(33)
    truth = (entry.oracle or (lambda recipe: recipe))(Recipe()).norm(33).double()
    torch.testing.assert_close(ours(x).double(), truth(x.double()), rtol=1e-4, atol=1e-5)


def test_dynamic_epsilon_is_negative_below_189():
    assert dynamic_epsilon(188) < 0 < dynamic_epsilon(189)
    assert dynamic_epsilon(512) == pytest.approx(1e-5)
    assert dynamic_epsilon(2048) == pytest.approx(2.386e-5, rel=1e-3)


def test_clamped_epsilon_is_never_below_its_floor():
    norm = DynamicLayerNorm(8, floor=FLOOR)
    assert [norm.epsilon(batch) for batch in (1, 8, 188)] == [FLOOR] * 3
    assert norm.epsilon(4096) == dynamic_epsilon(4096)


def finite(name: str) -> dict[tuple[str, int], float]:
    rows = norm_table(registry.compose([f"norm/{name}"]).norm)
    return {(row.case, row.batch): row.finite_share for row in rows}


def test_epsilon_as_written_breaks_tiny_and_constant_rows_of_small_batches_only():
    shares = finite("dynamic_eps_as_written")
    assert shares["tiny", 8] == shares["constant", 188] == 0.0
    assert shares["constant", 189] == shares["tiny", 2048] == 1.0
    assert set(finite("dynamic_eps").values()) == {1.0}


def test_without_epsilon_constant_rows_are_not_finite():
    shares = finite("no_eps")
    assert all(share == 0.0 for (case, _), share in shares.items() if case == "constant")
    assert all(share == 1.0 for (case, _), share in shares.items() if case != "constant")


def test_unbiased_variance_fails_on_one_element_where_the_biased_one_does_not():
    one = torch.full((2, 1), 3.0)
    assert torch.isfinite(ManualLayerNorm(1)(one)).all()
    assert not torch.isfinite(ManualLayerNorm(1, correction=1)(one)).any()


def test_rmsnorm_has_no_bias_and_keeps_the_mean():
    norm = registry.compose(["norm/rmsnorm"]).norm(4)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert torch.allclose(norm(torch.full((1, 4), 5.0)), torch.ones(1, 4))
