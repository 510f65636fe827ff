"""Analytic FLOPs, bytes and parameters against closed forms, the real model and PyTorch's counter."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmperf import flops
from lmperf.model import build
from lmperf.recipe import Recipe
from lmperf.records import ModelShape

SHAPES = {
    "plain": (ModelShape(128, 64, 2, 4, 4, 64, 256), 2, 64),
    "grouped": (ModelShape(200, 64, 3, 8, 2, 64, 128), 1, 48),
    "one kv head, untied": (ModelShape(96, 32, 1, 4, 1, 32, 96, tied_head=False), 3, 17),
    "modern": (ModelShape(256, 128, 2, 4, 2, 64, 192, "rotary", "swiglu", "rmsnorm"), 2, 128),
    "wide": (ModelShape(512, 32, 1, 2, 2, 256, 1024), 2, 32),
}


def tokens(shape: ModelShape, batch: int, length: int):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocab_size, (2, batch, length), generator=generator)


@pytest.mark.parametrize(("shape", "batch", "length"), SHAPES.values(), ids=SHAPES)
def test_parameters_are_those_of_the_real_model(shape, batch, length):
    model = build(shape, Recipe(), seed=0)
    assert flops.parameter_count(shape) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("shape", "batch", "length"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backward", [False, True])
def test_the_full_convention_agrees_with_the_counter(shape, batch, length, backward):
    model = build(shape, Recipe(), seed=0)
    counted = flops.count_step(model, *tokens(shape, batch, length), backward=backward)
    full = flops.step_flops(shape, batch, length, "full", backward=backward)
    assert full["total"] == pytest.approx(counted["total"], rel=0.01)
    assert flops.counter_mismatch(full, counted) is None
    assert all(p.grad is None for p in model.parameters())


def test_the_counter_sees_fused_attention_too():
    from torch.nn import functional as F

    shape, batch, length = SHAPES["plain"]
    fused = Recipe(attention=lambda q, k, v, *, scale=None: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    counted = flops.count_step(build(shape, fused, seed=0), *tokens(shape, batch, length))
    assert flops.step_flops(shape, batch, length, "full")["total"] == pytest.approx(counted["total"], rel=0.01)


def test_a_mismatch_is_told():
    assert "+100.0%" in flops.counter_mismatch({"total": 200}, {"total": 100})
    assert "no FLOPs" in flops.counter_mismatch({"total": 200}, {"total": 0})


@given(st.integers(0, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_attention_pairs_are_those_of_the_mask(queries, past, window):
    keys = queries + past
    seen = sum(
        1 for q in range(queries) for k in range(keys) if k <= past + q and (window is None or k > past + q - window)
    )
    assert flops.attention_pairs(queries, keys, window=window) == seen


def test_attention_flops_by_hand():
    assert flops.attention_flops(2, 4, 4, 3, 3, 8, causal=False) == 2 * 2 * 2 * 4 * 9 * 8
    assert flops.attention_flops(2, 4, 2, 3, 3, 8) == 2 * 2 * 2 * 4 * 6 * 8
    assert flops.attention_flops(1, 1, 1, 3, 3, 8, backward=True) == 3 * flops.attention_flops(1, 1, 1, 3, 3, 8)


@pytest.mark.parametrize("heads", [(4, 3), (4, 0)])
def test_heads_that_do_not_group_are_refused(heads):
    with pytest.raises(ValueError, match="kv_heads"):
        flops.attention_flops(1, *heads, 3, 3, 8)


def test_more_queries_than_keys_are_refused():
    with pytest.raises(ValueError, match="queries=4"):
        flops.attention_pairs(4, 3)


def test_palm_is_six_n_and_twelve_l_d_t():
    shape, batch, length = SHAPES["plain"]
    n = flops.parameter_count(shape, lookup_tables=False)
    assert n == flops.parameter_count(shape) - shape.context_length * shape.d_model
    expected = (6 * n + 12 * shape.layers * shape.d_model * length) * batch * length
    assert flops.step_flops(shape, batch, length, "palm")["total"] == expected


def test_exact_counts_the_causal_half_the_window_and_grouped_heads():
    shape, batch, length = SHAPES["plain"]
    exact, full = (flops.step_flops(shape, batch, length, name)["groups"] for name in ("exact", "full"))
    assert exact["attention_scores"] / full["attention_scores"] == pytest.approx((length + 1) / (2 * length))
    assert exact["feed_forward"] == full["feed_forward"]
    narrow = flops.step_flops(shape, batch, length, "exact", window=8)["groups"]
    assert narrow["attention_scores"] < exact["attention_scores"] / 3
    grouped = flops.step_flops(dataclasses.replace(shape, kv_heads=1), batch, length)["groups"]
    assert grouped["attention_scores"] == exact["attention_scores"]
    assert grouped["qkv_projection"] == exact["qkv_projection"] // 2


def test_recomputation_counts_for_the_hardware_only():
    shape, batch, length = SHAPES["modern"]
    plain = flops.step_flops(shape, batch, length)
    again = flops.step_flops(shape, batch, length, recomputed_layers=shape.layers)
    forward = flops.step_flops(shape, batch, length, backward=False)
    assert again["total"] == plain["total"] == plain["hardware_total"] == 3 * forward["total"]
    assert again["hardware_total"] - again["total"] == forward["total"] - forward["groups"]["head"]
    assert flops.mfu(again, 2.0, 1e9) == flops.mfu(plain, 2.0, 1e9)
    assert flops.hfu(again, 2.0, 1e9) > flops.hfu(plain, 2.0, 1e9)


@pytest.mark.parametrize("convention", flops.CONVENTIONS)
def test_a_recipe_changes_shape_and_vocabulary(convention):
    shape, batch, length = SHAPES["plain"]
    recipe = Recipe(reshape=(lambda s: dataclasses.replace(s, layers=1),), pad_vocab_to=100)
    changed = dataclasses.replace(shape, layers=1, vocab_size=200)
    expected = flops.step_flops(changed, batch, length, convention)
    assert flops.recipe_flops(recipe, shape, batch, length, convention) == expected


def test_an_unknown_convention_is_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'exact'"):
        flops.step_flops(SHAPES["plain"][0], 1, 8, "exakt")


def test_decoding_one_token_at_a_time_adds_up_to_the_prefill():
    shape = SHAPES["grouped"][0]
    one_by_one = sum(flops.decode_flops(shape, 2, past) for past in range(16))
    assert one_by_one == flops.step_flops(shape, 2, 16, backward=False)["total"]


def test_bytes_of_the_cache_and_of_a_decoding_step():
    shape = ModelShape(100, 64, 3, 8, 2, 64, 128)
    assert flops.kv_cache_bytes(shape, 2, 10, "bfloat16") == 2 * 3 * 2 * 2 * 10 * 8 * 2
    more = flops.decode_bytes(shape, 2, 10) - flops.decode_bytes(shape, 2, 0)
    assert more == flops.kv_cache_bytes(shape, 2, 10)
    assert flops.parameter_bytes(shape, "bfloat16") == 2 * flops.parameter_count(shape)


def test_an_unknown_peak_gives_no_utilisation():
    counted = {"total": 10.0, "hardware_total": 20.0}
    assert flops.mfu(counted, 1.0, None) is None
    assert flops.mfu(counted, None, 100.0) is None
    assert flops.hfu(counted, 1.0, None) is None
    assert flops.mbu(None, 1.0, 5.0) is None
    assert flops.mfu(counted, 1.0, 100.0) == 0.1
    assert flops.hfu(counted, 1.0, 100.0) == 0.2


def test_the_roofline_turns_where_both_limits_meet():
    low = flops.roofline(9.0, 1.0, 100.0, 10.0)
    high = flops.roofline(11.0, 1.0, 100.0, 10.0)
    assert (low["bound"], low["attainable"]) == ("memory", 90.0)
    assert (high["bound"], high["attainable"]) == ("compute", 100.0)
    assert flops.roofline(1.0, 1.0, None, 10.0) is None


def test_more_than_the_peak_is_implausible():
    assert flops.implausible(50.0, 1.0, 100.0) is None
    assert flops.implausible(50.0, 1.0, None) is None
    assert "2.00 times the peak" in flops.implausible(200.0, 1.0, 100.0)


def test_a_constant_time_for_more_work_is_implausible():
    assert flops.implausible(None, None, None, [(1e9, 0.02), (4e9, 0.08)]) is None
    assert flops.implausible(None, None, None, [(1e9, 0.02), (1.5e9, 0.02)]) is None
    assert "4.0 times the FLOPs" in flops.implausible(None, None, None, [(4e9, 0.021), (1e9, 0.02)])
    assert flops.constant_time([(1e6, 1e-5), (4e6, 1e-5)]) is None, "launch overhead"


def test_analytic_flops_load_no_torch():
    import subprocess
    import sys

    code = "import sys, lmperf.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
