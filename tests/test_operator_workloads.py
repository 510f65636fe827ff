"""The operator workloads: what they run, count and check, and that the check can fail."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lmperf import reference, registry
from lmperf.recipe import Recipe
from lmperf.records import ArmSpec, Cell, InputError, ModelShape, SessionSpec
from lmperf.workloads import operator
from lmperf.workloads.base import Setting, Unsupported, get_workload
from lmperf.workloads.operands import operation

MODEL = ModelShape(vocab_size=301, context_length=64, layers=1, heads=4, kv_heads=4, d_model=48, d_ff=96)
CELLS = {
    "attention": [{"length": 70, "head_dim": 16, "heads": 4, "batch": 2}],
    "norm": [{"rows": 33, "dim": 48}],
    "matmul": [{"n": 70}, {"operand": "qkv"}, {"operand": "gate_up"}, {"operand": "loss"}],
}
BOTH = ("operator_forward", "operator_forward_backward")


def setting(axis, name, params, *, recipe=None, dtype="float32", workload=BOTH[0]):
    keys = () if name == "baseline" else (f"{axis}/{name}",)
    arm, cell = ArmSpec(name, keys), Cell("cell", params)
    spec = SessionSpec(
        session=f"{axis}.operator", axis=axis, workload=workload, arms=(arm,), cells=(cell,), model=MODEL, batch_size=2,
        sequence_length=16, rounds=3, seed=0, device="cpu", dtype=dtype,
    )  # fmt: skip
    return Setting(spec, arm, cell, recipe or registry.compose(keys), seed=1, scratch=Path("unused"))


def runnable(axis):
    entries = registry.variants(axis).values()
    slow = ("compiled", "flex", "flex_window")
    plugin = "faulty_variants"
    return [e.name for e in entries if not e.unavailable() and e.name not in slow and plugin not in e.source]


ARMS = [(axis, name, params) for axis in CELLS for name in ["baseline", *runnable(axis)] for params in CELLS[axis]]


@pytest.mark.parametrize("workload", BOTH)
@pytest.mark.parametrize(("axis", "name", "params"), ARMS, ids=lambda item: str(item))
def test_every_arm_runs_and_agrees(axis, name, params, workload):
    arm = setting(axis, name, params)
    if reason := operator.cannot_run(arm, operation(arm, arm.recipe), workload == BOTH[1]):
        assert axis == "matmul"
        assert params.get("operand", "matmul") in reason
        with pytest.raises(Unsupported, match="does not change"):
            get_workload(workload)(arm)
        return
    prepared = get_workload(workload)(arm)
    for _ in range(6):
        prepared.step()
    for seed in (1, 2):
        outcome = prepared.check(seed)
        assert outcome.passed, outcome.message


def test_each_matmul_variant_is_measured_by_some_operand():
    for entry in registry.variants("matmul").values():
        if entry.baseline or entry.apply(Recipe()).transforms:  # a change of the whole model is no operator's
            continue
        reasons = []
        for params in CELLS["matmul"]:
            arm = setting("matmul", entry.name, params)
            reasons.append(operator.cannot_run(arm, operation(arm, arm.recipe), False))
        assert None in reasons, entry.key


def test_inputs_rotate_and_gradients_are_those_of_the_step():
    seen = []

    def spy(q, k, v, *, scale=None):
        seen.append(q.data_ptr())
        return reference.attention(q, k, v, scale=scale)

    arm = setting("attention", "baseline", CELLS["attention"][0], recipe=Recipe(attention=spy))
    for workload in BOTH:
        step = get_workload(workload)(arm).step
        seen.clear()
        answers = [step() for _ in range(8)]
        assert len(set(seen)) >= 4
        assert seen[:4] == seen[4:]
    assert [g.shape for g in answers[0]] == [torch.Size((2, 4, 70, 16))] * 3
    assert torch.equal(answers[0][0], answers[4][0])
    assert not torch.equal(answers[0][0], answers[1][0])


def test_one_set_of_inputs_is_held_where_memory_is_weighed():
    step = get_workload(BOTH[1])(setting("norm", "baseline", {**CELLS["norm"][0], "input_sets": 1})).step
    assert torch.equal(step()[0], step()[0])


def test_forward_records_no_gradient_graph():
    prepared = get_workload(BOTH[0])(setting("norm", "baseline", CELLS["norm"][0]))
    assert not prepared.step().requires_grad


@pytest.mark.parametrize(
    ("params", "grouped"), [({"length": 70, "head_dim": 16, "heads": 4, "batch": 2}, 4), ({"kv_heads": 2}, 2)]
)
def test_tokens_and_flops_of_attention(params, grouped):
    prepared = get_workload(BOTH[1])(
        setting("attention", "baseline", {"length": 70, "head_dim": 16, "heads": 4, **params})
    )
    assert prepared.tokens_per_step == 140
    assert prepared.flops_per_step == 3 * 4 * 2 * 4 * 16 * (70 * 71 // 2)


def test_a_window_counts_the_keys_that_it_sees():
    cell = {"length": 400, "head_dim": 8, "heads": 1, "batch": 1}
    flops = [get_workload(BOTH[0])(setting("attention", n, cell)).flops_per_step for n in ("baseline", "window", "lsh")]
    assert flops[1] == 4 * 8 * (128 * 129 // 2 + 128 * (400 - 128))
    assert flops[1] < flops[0]
    assert flops[2] is None  # how many keys share a bucket is in the data


def test_lsh_reports_recall_and_the_others_do_not():
    cell = {"length": 300, "head_dim": 16, "heads": 2, "batch": 1}
    once = get_workload(BOTH[0])(setting("attention", "lsh", cell)).once
    assert once["topk_recall"][0] == "share"
    assert 0.1 < once["topk_recall"][1] < 1
    assert not get_workload(BOTH[0])(setting("attention", "chunked", cell)).once


def test_strided_keys_are_laid_out_before_the_clock():
    arm = setting("attention", "strided_kv", CELLS["attention"][0])
    found = operation(arm, arm.recipe)
    q, k, v = found.arrange(found.inputs(torch.Generator().manual_seed(0)))
    assert (q.stride(-1), k.stride(-1), v.stride(-1)) == (1, 2, 2)
    assert operator.leaves((k,))[0].stride(-1) == 2


def test_grouped_arms_get_grouped_keys():
    arm = setting("attention", "mqa", CELLS["attention"][0])
    _, k, _ = operation(arm, arm.recipe).inputs(torch.Generator().manual_seed(0))
    assert k.shape[1] == 1


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.01 * gradient


def faulty(kind):
    def attention(q, k, v, *, scale=None):
        if kind == "value":
            return 1.01 * reference.attention(q, k, v, scale=scale)
        if kind == "alignment":  # the first query aligned to the first key: wrong with a cache
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        if kind == "nan" and q.shape[-2] == 67:
            return reference.attention(q, k, v, scale=scale) * float("nan")
        if kind == "gradient":
            q = WrongBackward.apply(q)
        return reference.attention(q, k, v, scale=scale)

    return attention


@pytest.mark.parametrize(
    ("kind", "workload", "passes"),
    [("value", BOTH[0], False), ("alignment", BOTH[0], False), ("nan", BOTH[0], False), ("gradient", BOTH[1], False),
     ("gradient", BOTH[0], True), ("none", BOTH[1], True)],
)  # fmt: skip
def test_the_check_fails_for_faulty_attention(kind, workload, passes):
    arm = setting("attention", "baseline", CELLS["attention"][0], recipe=Recipe(attention=faulty(kind)))
    assert get_workload(workload)(arm).check(1).passed is passes


def test_the_check_fails_for_a_faulty_norm_matmul_and_loss():
    class Norm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + 1e-2

    faults = [
        ("norm", CELLS["norm"][0], Recipe(norm=Norm)),
        ("matmul", {"n": 64}, Recipe(matmul=lambda a, b: a @ b * 1.01)),
        ("matmul", {"operand": "loss"}, Recipe(loss=lambda h, w, t: 1.01 * reference.cross_entropy(h, w, t))),
    ]
    for axis, params, recipe in faults:
        assert not get_workload(BOTH[0])(setting(axis, "baseline", params, recipe=recipe)).check(1).passed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["baseline", "chunked", "sdpa_flash", "window", "gqa"])
def test_16_bit_sessions_are_checked_within_their_rounding(name, dtype):
    arm = setting("attention", name, CELLS["attention"][0], dtype=dtype)
    outcome = get_workload(BOTH[1])(arm).check(1)
    assert outcome.passed, outcome.message
    assert outcome.max_error > 1e-5


@pytest.mark.parametrize("name", ["flex", "flex_window"])
def test_flex_is_unsupported_for_training_on_a_cpu(name):
    with pytest.raises(Unsupported, match="backward"):
        get_workload(BOTH[1])(setting("attention", name, CELLS["attention"][0]))


def test_bad_input_names_what_is_allowed():
    with pytest.raises(InputError, match="qkv"):
        get_workload(BOTH[0])(setting("matmul", "baseline", {"operand": "qvk"}))
    with pytest.raises(InputError, match="attention"):
        get_workload(BOTH[0])(setting("graph", "baseline", {}))
    with pytest.raises(InputError, match="bfloat16"):
        get_workload(BOTH[0])(setting("norm", "baseline", {}, dtype="float31"))
