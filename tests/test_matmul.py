"""The matmul axis: merged layers start as the separate ones, own backward passes are right, sizes are what they say."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from lmperf import reference, registry
from lmperf.checking import TrainingCheck, expectation
from lmperf.implementations.blocked import blocked_matmul
from lmperf.implementations.losses import CHUNK, chunked_cross_entropy
from lmperf.implementations.projections import FusedGateUp, FusedQKV
from lmperf.model import TrainingStep, build
from lmperf.recipe import Recipe, changed_slots
from lmperf.records import ModelShape

SHAPE = ModelShape(vocab_size=61, context_length=24, layers=2, heads=4, kv_heads=2, d_model=32, d_ff=70)
GATED = dataclasses.replace(SHAPE, activation="swiglu", position="rotary", tied_head=False)
VARIANTS = registry.variants("matmul")
SLOTS = registry.AXIS_SLOTS["matmul"]


def test_every_name_of_the_catalogue_is_there():
    assert [entry.name for entry in VARIANTS.values()] == [
        "separate_qkv", "fused_qkv", "fused_gate_up", "aligned_64", "unaligned", "padded_vocab", "blocked_loop",
        "chunked_loss", "bias_free",
    ]  # fmt: skip
    assert {e.name for e in VARIANTS.values() if e.quality_run} == {"padded_vocab", "bias_free"}


@pytest.mark.parametrize("key", VARIANTS)
def test_changes_its_slots_only(key):
    assert changed_slots(VARIANTS[key].apply(Recipe())) <= SLOTS


@pytest.mark.parametrize("shape", [SHAPE, GATED], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("key", VARIANTS)
def test_training_agrees_with_the_oracle(key, shape):
    if key == "matmul/fused_gate_up" and shape.activation == "gelu":
        with pytest.raises(NotImplementedError, match="swiglu"):
            build(shape, VARIANTS[key].apply(Recipe()), seed=0)
        return
    check = TrainingCheck(VARIANTS[key].apply(Recipe()), expectation([key]), shape, length=17)
    for seed in (1, 2):
        outcome = check(seed)
        assert outcome.passed, outcome.message
        assert outcome.max_error is not None


@pytest.mark.parametrize(
    ("fused", "separate", "merged", "parts"),
    [
        (FusedQKV, reference.SeparateQKV, "qkv", ("query", "key", "value")),
        (FusedGateUp, reference.FeedForward, "gate_up", ("gate", "up")),
    ],
)
def test_merged_layers_compute_what_separate_ones_do_gradients_too(fused, separate, merged, parts):
    torch.manual_seed(0)
    truth, ours = separate(GATED), fused(GATED)
    ours.load_state_dict(truth.state_dict())  # strict: every name is taken
    x = torch.randn(3, 5, GATED.d_model)
    got, true = (torch.cat(y, -1) if isinstance(y, tuple) else y for y in (ours(x), truth(x)))
    torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-6)
    got.square().sum().backward()
    true.square().sum().backward()
    joined = torch.cat([getattr(truth, part).weight.grad for part in parts])
    torch.testing.assert_close(getattr(ours, merged).weight.grad, joined, rtol=1e-4, atol=1e-5)


def test_merged_layers_train_like_separate_ones_for_several_steps():
    tokens = torch.randint(61, (4, 25), generator=torch.Generator().manual_seed(0))
    losses = []
    for keys in ([], ["matmul/fused_qkv"]):
        recipe = registry.compose(keys)
        step = TrainingStep(build(SHAPE, recipe, seed=3), recipe, learning_rate=1e-2)
        losses.append([float(step(tokens[:, :-1], tokens[:, 1:]).loss) for _ in range(5)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(("name", "width"), [("aligned_64", 128), ("unaligned", 125)])
def test_feed_forward_width(name, width):
    assert registry.compose([f"matmul/{name}"]).shape(SHAPE).d_ff == width


def test_aligned_sizes_are_left_alone():
    aligned = dataclasses.replace(SHAPE, d_ff=1024)
    assert registry.compose(["matmul/aligned_64"]).shape(aligned) == aligned


def test_padded_rows_start_at_zero_and_never_leave_through_logits():
    model = build(SHAPE, registry.compose(["matmul/padded_vocab"]), seed=0)
    assert model.embedding.weight.shape == (64, 32)
    assert (model.embedding.weight[61:] == 0).all()
    assert model.logits(torch.zeros(2, 32)).shape == (2, 61)


def test_bias_free_removes_every_linear_bias():
    model = build(SHAPE, registry.compose(["matmul/bias_free"]), seed=0)
    assert all(m.bias is None for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert any(name.endswith("norm_1.bias") for name, _ in model.named_parameters())


@pytest.mark.parametrize("tokens", [1, 7, CHUNK, CHUNK + 1])
def test_chunked_loss_and_both_gradients(tokens):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(1, tokens, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(37, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(37, (1, tokens), generator=generator)
    pairs = [(loss, torch.autograd.grad(3 * loss, (hidden, head))) for loss in (
        chunked_cross_entropy(hidden, head, targets), reference.cross_entropy(hidden, head, targets)
    )]  # fmt: skip
    (ours, mine), (true, theirs) = pairs
    torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-6)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_chunked_loss_needs_no_gradient_and_leaves_a_frozen_head_alone():
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4)
    targets = torch.arange(5)
    chunked_cross_entropy(hidden, head, targets).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, head, targets)
    torch.testing.assert_close(loss, reference.cross_entropy(hidden, head, targets))


def test_chunked_loss_never_makes_the_full_logits():
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            nonlocal largest
            out = function(*arguments, **(keywords or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, head = torch.randn(4 * CHUNK, 8, requires_grad=True), torch.randn(301, 8, requires_grad=True)
    with Watch():
        chunked_cross_entropy(hidden, head, torch.zeros(4 * CHUNK, dtype=torch.long)).backward()
    assert largest == CHUNK * 301


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunked_loss_under_autocast(dtype):
    hidden, head = torch.randn(40, 16, requires_grad=True), torch.randn(33, 16, requires_grad=True)
    targets = torch.randint(33, (40,))
    with torch.autocast("cpu", dtype):
        loss = chunked_cross_entropy(hidden, head, targets)
    loss.backward()
    true = reference.cross_entropy(hidden, head, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, true, rtol=2e-2, atol=0)
    wanted = torch.autograd.grad(true, head)[0]
    assert (head.grad - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize(("m", "k", "n"), [(64, 64, 64), (1, 5, 1), (67, 131, 35), (128, 192, 64)])
def test_blocked_product_forward_and_backward(m, k, n):
    generator = torch.Generator().manual_seed(m)
    a = torch.randn(2, m, k, generator=generator, dtype=torch.float64, requires_grad=True)
    b = torch.randn(k, n, generator=generator, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, m, n, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(blocked_matmul(a, b), a @ b)
    mine = torch.autograd.grad(blocked_matmul(a, b), (a, b), upstream)
    for ours, true in zip(mine, torch.autograd.grad(a @ b, (a, b), upstream), strict=True):
        torch.testing.assert_close(ours, true)


def test_blocked_product_takes_one_matrix_on_the_right():
    with pytest.raises(NotImplementedError, match="one matrix"):
        blocked_matmul(torch.ones(2, 3, 3), torch.ones(2, 3, 3))


def test_merged_views_feed_attention_that_wants_heads():
    q, k, v = FusedQKV(SHAPE)(torch.randn(2, 5, 32))
    assert [t.shape[-1] for t in (q, k, v)] == [32, 16, 16]
    assert torch.isfinite(F.scaled_dot_product_attention(q, q, q)).all()
