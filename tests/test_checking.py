"""Checks catch wrong losses, gradients and optimizers, pass right ones, and cannot pass on nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lmperf import reference
from lmperf.checking import check_optimizer, check_training, compare, expectation, finite, plain_name
from lmperf.recipe import Precision, Recipe
from lmperf.records import ModelShape
from lmperf.workloads.base import CheckOutcome

SHAPE = ModelShape(vocab_size=61, context_length=16, layers=3, heads=2, kv_heads=2, d_model=16, d_ff=32)
PLUGIN = str(Path(__file__).parent / "faulty_variants.py")


def check(recipe: Recipe, *, rtol: float = 1e-4, atol: float = 1e-6, oracle: Recipe | None = Recipe()) -> CheckOutcome:
    return check_training(recipe, oracle, SHAPE, "cpu", seed=3, rtol=rtol, atol=atol, fidelity="exact")


def scaled_attention(factor: float) -> Recipe:
    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        return factor * reference.attention(q, k, v, scale=scale)

    return Recipe(attention=attention)


def wrong_gradient() -> Recipe:
    """The right output with a gradient 1 % too large."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        out = reference.attention(q, k, v, scale=scale)
        return out.detach() + 1.01 * (out - out.detach())

    return Recipe(attention=attention)


def test_the_reference_agrees_with_itself_exactly() -> None:
    outcome = check(Recipe())
    assert outcome.passed
    assert outcome.max_error == 0.0


@pytest.mark.parametrize("recipe", [scaled_attention(1.01), wrong_gradient(), scaled_attention(float("nan"))])
def test_wrong_values_wrong_gradients_and_nan_are_caught(recipe: Recipe) -> None:
    assert not check(recipe).passed


def test_another_order_of_additions_passes_and_bf16_needs_its_tolerance() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    assert check(Recipe(attention=attention)).passed
    bf16 = Recipe(precision=Precision(autocast=torch.bfloat16))
    assert not check(bf16).passed
    assert check(bf16, rtol=0.05, atol=1e-3).passed


def test_a_scaler_does_not_hide_or_fake_a_gradient() -> None:
    fp16 = Recipe(precision=Precision(autocast=torch.float16, scaler="dynamic"))
    assert check(fp16, rtol=0.05, atol=1e-3).passed


def test_a_function_of_its_own_must_at_least_be_finite() -> None:
    assert check(scaled_attention(3.0), oracle=None).passed
    assert not check(scaled_attention(float("inf")), oracle=None).passed


def test_fresh_inputs_come_from_the_seed() -> None:
    errors = {
        check_training(scaled_attention(1.0001), Recipe(), SHAPE, "cpu", s, 1.0, 1.0, "close").max_error for s in (1, 2)
    }
    assert len(errors) == 2


def test_comparing_nothing_is_no_agreement() -> None:
    assert not compare({}, {}, 1.0, 1.0).passed
    assert not compare({"a": torch.ones(1)}, {"b": torch.ones(1)}, 1.0, 1.0).passed


def test_rows_of_padding_are_left_out_and_the_message_names_the_tensor() -> None:
    assert compare({"w": torch.ones(6, 2)}, {"w": torch.ones(4, 2)}, 0.0, 0.0).passed
    outcome = compare(
        {"good": torch.ones(2), "bad": torch.ones(2)}, {"good": torch.ones(2), "bad": torch.zeros(2)}, 0, 0.5
    )
    assert not outcome.passed
    assert outcome.message.startswith("bad ")
    assert not finite({"x": torch.tensor([1.0, float("inf")])}).passed


def broken_adamw(parameters: Iterable[nn.Parameter], *, learning_rate: float, weight_decay: float = 0.1):
    return torch.optim.AdamW(reference.decay_groups(parameters, weight_decay), lr=learning_rate, betas=(0.9, 0.99))


def looped_adamw(parameters: Iterable[nn.Parameter], *, learning_rate: float, weight_decay: float = 0.1):
    groups = reference.decay_groups(parameters, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), foreach=False)


def test_an_optimizer_must_make_the_same_updates() -> None:
    before = CheckOutcome(True, "")
    assert check_optimizer(looped_adamw, 1, before) is before
    assert not check_optimizer(broken_adamw, 1, before).passed
    assert not check(Recipe(optimizer=broken_adamw)).passed


def test_names_lose_what_wrappers_put_before_them() -> None:
    assert plain_name("module._orig_mod.blocks.0.norm_1.weight") == "blocks.0.norm_1.weight"


def test_an_arm_owes_the_loosest_of_its_variants_promises() -> None:
    alone = expectation(["attention/same_thing"], [PLUGIN])
    assert (alone.oracle, alone.fidelity) == (Recipe(), "exact")
    assert expectation([]).rtol == pytest.approx(1e-4)
    assert "lmperf_plugin_faulty_variants" in sys.modules
