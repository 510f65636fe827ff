"""The public interface of a causal FlashAttention-2 autograd function, as course test suites call it."""

import pytest
import torch

from lmperf.variants.attention import FlashFunction


def dense(q, k, v, is_causal):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -1e6)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def inputs(*size):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*size, generator=generator) for _ in range(4)]
    return [t.requires_grad_() for t in made[:3]] + made[3:]


SIZES = [(4, 128, 64), (2, 37, 16), (1, 1, 8), (3, 600, 16), (2, 3, 70, 24)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_log_sum_exp_and_gradients(size, is_causal):
    q, k, v, upstream = inputs(*size)
    out = FlashFunction.apply(q, k, v, is_causal)
    truth, truth_lse = dense(q, k, v, is_causal)
    torch.testing.assert_close(out, truth, rtol=1e-3, atol=1e-4)
    found = [t for t in out.grad_fn.saved_tensors if t.shape == q.shape[:-1]]
    assert len(found) == 1
    torch.testing.assert_close(found[0], truth_lse, rtol=1e-3, atol=1e-4)
    out.backward(upstream)
    for tensor, wanted in zip((q, k, v), torch.autograd.grad(truth, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(tensor.grad, wanted, rtol=1e-3, atol=1e-4)


def test_causal_is_off_when_not_given():
    q, k, v, _ = inputs(2, 9, 8)
    torch.testing.assert_close(FlashFunction.apply(q, k, v), dense(q, k, v, False)[0])


def test_only_wanted_gradients_and_no_gradient_for_the_flag():
    q, k, v, upstream = inputs(2, 9, 8)
    out = FlashFunction.apply(q.detach(), k, v, True)
    out.backward(upstream)
    assert q.grad is None
    assert k.grad is not None
    assert v.grad is not None


def test_gradients_by_finite_differences():
    q, k, v = (torch.randn(1, 5, 4, dtype=torch.float64) for _ in range(3))
    upstream = torch.randn(1, 5, 4)
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(FlashFunction.apply(*leaves, True), leaves, upstream)
    step = 1e-6
    for index, gradient in enumerate(got):
        shifted = [[t.clone() for t in (q, k, v)] for _ in range(2)]
        shifted[0][index][0, 2, 1] += step
        shifted[1][index][0, 2, 1] -= step
        high, low = (float((dense(*s, True)[0] * upstream).sum()) for s in shifted)
        assert float(gradient[0, 2, 1]) == pytest.approx((high - low) / (2 * step), abs=1e-4)


def test_a_tensor_of_other_rank_is_refused():
    with pytest.raises(ValueError, match="batch"):
        FlashFunction.apply(torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 4), True)
