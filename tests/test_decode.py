"""The decode workload: a cached token agrees with the uncached forward pass of a dense model with the same weights."""

from pathlib import Path

import pytest
import torch

from lmperf import registry
from lmperf.records import ArmSpec, Cell, InputError, ModelShape, SessionSpec
from lmperf.workloads.base import Setting, get_workload
from lmperf.workloads.decode import FixedCache, finished_model

SHAPE = ModelShape(vocab_size=61, context_length=24, layers=2, heads=4, kv_heads=2, d_model=32, d_ff=64)
HERE = [key for key, entry in registry.variants("compression").items() if entry.unavailable() is None]


def setting(scratch: Path, keys: tuple[str, ...] = (), shape: ModelShape = SHAPE, **params: int) -> Setting:
    arm, cell = ArmSpec("arm", keys), Cell("cell", params)
    spec = SessionSpec(
        session="compression.decode", axis="compression", workload="decode", arms=(arm,), cells=(cell,), model=shape,
        batch_size=1, sequence_length=16, rounds=1, seed=0, device="cpu",
    )  # fmt: skip
    return Setting(spec, arm, cell, registry.compose(keys), 5, scratch)


@pytest.mark.parametrize("key", HERE)
def test_every_arm_agrees_with_its_dense_twin_and_reports_its_size(key, tmp_path):
    prepared = get_workload("decode")(setting(tmp_path, (key,), length=9))
    assert prepared.tokens_per_step == 1.0
    assert [prepared.step().shape for _ in range(5)] == [(1,)] * 5
    for seed in (1, 2):
        outcome = prepared.check(seed)
        assert outcome.passed, outcome.message
    assert {"model_bytes", "model_disk_bytes", "flops_dense", "flops_effective"} == set(prepared.once)
    assert prepared.once["flops_effective"][1] <= prepared.once["flops_dense"][1] == prepared.flops_per_step


@pytest.mark.parametrize("keys", [("matmul/fused_qkv", "norm/rmsnorm"), ("attention/gqa", "compression/int8_dynamic")])
def test_other_axes_compose(keys, tmp_path):
    known = registry.variants()
    if any(key not in known for key in keys):
        pytest.skip(f"not registered yet: {[k for k in keys if k not in known]}")
    outcome = get_workload("decode")(setting(tmp_path, keys, length=3, batch=2)).check(4)
    assert outcome.passed, outcome.message


def test_a_wrong_weight_fails_the_check(tmp_path):
    prepared = get_workload("decode")(setting(tmp_path, ("compression/int8_weight_only",), length=9))
    layer = prepared.model.blocks[0].feed_forward.down
    good = layer.dense_weight()
    layer.dense_weight = lambda: good.flip(0)
    assert not prepared.check(1).passed


def test_a_cache_that_loses_a_token_fails_the_check(tmp_path, monkeypatch):
    prepared = get_workload("decode")(setting(tmp_path, length=9))
    monkeypatch.setattr(FixedCache, "advance", lambda self, tokens: setattr(self, "length", self.length + tokens - 1))
    assert not prepared.check(1).passed


@pytest.mark.parametrize("length", [0, 24, 99])
def test_lengths_outside_the_context_are_refused(length, tmp_path):
    with pytest.raises(InputError, match="allowed: 1 to 23"):
        get_workload("decode")(setting(tmp_path, length=length))


def test_the_cache_returns_everything_so_far_and_can_be_set_back():
    cache = FixedCache(layers=1, capacity=4)
    first = torch.randn(1, 2, 3, 5)
    cache.update(0, first, first)
    cache.advance(3)
    one = torch.randn(1, 2, 1, 5)
    k, _ = cache.update(0, one, one)
    assert torch.equal(k, torch.cat([first, one], dim=2))
    cache.length = 3
    other = torch.randn(1, 2, 1, 5)
    assert torch.equal(cache.update(0, other, other)[1][:, :, 3:], other)


def test_decoding_leaves_the_model_in_evaluation_mode(tmp_path):
    assert not finished_model(setting(tmp_path)).training
