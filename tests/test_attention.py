"""The attention axis beyond the contract that every variant shares: memory, causality, dtypes, recall, guards."""

import dataclasses
import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lmperf import reference, registry
from lmperf.implementations import chunked, flex, grouped, guards, lsh, sdpa, window
from lmperf.implementations.facts import facts_of
from lmperf.model import LanguageModel
from lmperf.recipe import Recipe
from lmperf.records import ModelShape

FUNCTIONS = {
    "reference": reference.attention,
    "chunked": chunked.chunked,
    "flash": sdpa.flash_backend,
    "window": window.sliding_window,
    "lsh": lsh.lsh,
    "grouped": grouped.grouped,
    "scale_offset": guards.scale_offset,
    "qk_norm": guards.qk_norm,
    "softcap": guards.softcap,
}


def tensors(batch=1, heads=2, kv_heads=2, queries=40, keys=40, d=16, seed=0, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    made = [torch.randn(batch, h, length, d, generator=generator).to(dtype) for h, length in sizes]
    return [t.requires_grad_() for t in made] if grad else made


def relative_error(got, wanted):
    got, wanted = got.detach().float(), wanted.detach().float()
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_output_depends_on_what_comes_later(name):
    q, k, v = tensors(queries=300, keys=300)
    whole = FUNCTIONS[name](q, k, v)
    for at in (1, 129, 256):
        changed = [t.clone() for t in (q, k, v)]
        for t in changed:
            t[:, :, at:] = 5 * torch.randn_like(t[:, :, at:])
        torch.testing.assert_close(FUNCTIONS[name](*changed)[:, :, :at], whole[:, :, :at], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_decoding_against_a_cache_gives_the_rows_of_the_whole(name):
    q, k, v = tensors(queries=300, keys=300, heads=4)
    whole = FUNCTIONS[name](q, k, v)
    for new in (1, 7, 150):
        torch.testing.assert_close(FUNCTIONS[name](q[:, :, -new:], k, v), whole[:, :, -new:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("blocks", [(16, 16), (16, 48), (64, 16), (7, 5), (1, 1), (512, 512)])
@pytest.mark.parametrize(("queries", "keys"), [(33, 33), (1, 1), (5, 50), (48, 48), (1, 37)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_chunked_agrees_for_every_tiling(blocks, queries, keys, kv_heads):
    q, k, v = tensors(queries=queries, keys=keys, heads=2, kv_heads=kv_heads, grad=True)
    upstream = torch.randn(q.shape)
    out, lse = chunked.tiled_attention(q, k, v, scale=0.3, blocks=blocks)
    truth = reference.attention(q, k, v, scale=0.3)
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for a, b in zip(got, torch.autograd.grad(truth, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    scores = q @ reference.repeat_heads(k, 2).transpose(-2, -1) * 0.3
    hidden = ~reference.causal_mask(queries, keys)
    torch.testing.assert_close(lse, scores.masked_fill(hidden, -math.inf).logsumexp(-1), rtol=1e-4, atol=1e-5)


def test_chunked_survives_large_scores():
    q, k, v = (t * 40 for t in tensors(queries=65, keys=65))
    out, _ = chunked.tiled_attention(q, k, v, blocks=(16, 16))
    torch.testing.assert_close(out, reference.attention(q, k, v), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("name", ["chunked", "softcap", "lsh"])
def test_16_bit_inputs_are_accumulated_in_fp32(name, dtype, bound):
    function = FUNCTIONS[name]
    narrow = tensors(queries=130, keys=130, dtype=dtype, grad=True)
    wide = [t.detach().float().requires_grad_() for t in narrow]
    out, truth = function(*narrow), function(*wide)
    assert out.dtype == dtype
    assert relative_error(out, truth) < bound
    upstream = torch.randn(out.shape).to(dtype)
    got = torch.autograd.grad(out, narrow, upstream)
    wanted = torch.autograd.grad(truth, wide, upstream.float())
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < bound


def test_autocast_does_not_lower_the_tiles():
    q, k, v = tensors(queries=70, keys=70)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = chunked.chunked(q, k, v)
    torch.testing.assert_close(out, reference.attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_capped_scores_differ_from_plain_ones_where_they_are_large():
    q, k, v = (t * 12 for t in tensors(queries=65, keys=65, grad=True))
    upstream = torch.randn(q.shape)
    out, truth = guards.softcap(q, k, v), guards.naive_softcap(q, k, v)
    torch.testing.assert_close(out, truth, rtol=1e-3, atol=1e-3)
    assert relative_error(out, reference.attention(q, k, v)) > 1e-2
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for a, b in zip(got, torch.autograd.grad(truth, (q, k, v), upstream), strict=True):
        assert relative_error(a, b) < 1e-3


def test_the_offset_scales_logits_as_published():
    assert guards.offset_scale(64, None) * 8 == pytest.approx(8 / 8.07)
    assert guards.offset_scale(64, 1 / 8) == pytest.approx(guards.offset_scale(64, None))


def peak_tensor_bytes(call):
    """Peak of allocated bytes while `call` runs, from the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        call()
    events = [e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def forward_backward_peak(function, length):
    q, k, v = tensors(queries=length, keys=length, grad=True)
    return peak_tensor_bytes(lambda: function(q, k, v).sum().backward())


def test_chunked_keeps_no_score_matrix():
    one, two = (forward_backward_peak(chunked.chunked, n) for n in (1024, 2048))
    naive = forward_backward_peak(reference.attention, 2048)
    scores = 2 * 2048**2 * 4
    assert naive > 3 * scores
    assert two < scores
    assert two < 2.5 * one  # linear in the length, not quadratic


def test_window_memory_is_linear_in_length():
    one, two = (forward_backward_peak(window.sliding_window, n) for n in (1024, 2048))
    assert two < 2.5 * one


def test_lsh_sees_the_keys_of_its_definition_and_recall_is_their_share():
    q, k, _ = tensors(heads=1, kv_heads=1, queries=500, keys=500)
    seen = lsh.candidates(q[0], k[0], torch.arange(500))[0]
    assert bool(seen.diagonal().all())
    assert not bool(seen.triu(1).any())
    scores = (q[0, 0] @ k[0, 0].T).masked_fill(~reference.causal_mask(500, 500), -math.inf)
    top = scores.topk(16, dim=-1)
    real = top.values.isfinite()
    by_hand = (seen.gather(1, top.indices) & real).sum() / real.sum()
    assert lsh.lsh_recall(q, k, sample=500) == pytest.approx(float(by_hand))


def test_lsh_recall_is_high_for_keys_that_equal_the_queries_and_complete_for_few():
    keys = torch.nn.functional.normalize(torch.randn(1, 2, 400, 16), dim=-1)
    assert lsh.lsh_recall(keys, keys, top=1) == 1.0  # the best key of each query is its own
    q, k, _ = tensors(queries=400, keys=400)
    assert 0.1 < lsh.lsh_recall(q, k) < 1.0


def test_lsh_is_never_called_exact():
    entry = registry.get("attention/lsh")
    assert entry.fidelity == "quality"
    assert entry.quality_run
    assert facts_of(entry.apply(Recipe()).attention).recall is lsh.lsh_recall


def test_lsh_with_all_keys_in_one_bucket_stays_linear_and_right():
    q, k, v = tensors(queries=600, keys=600)
    q[:], k[:] = q[:, :, :1], q[:, :, :1]  # one direction: one bucket, ties everywhere
    torch.testing.assert_close(lsh.lsh(q, k, v), lsh.naive_lsh(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 300), (127, 127), (128, 128), (129, 129), (300, 300), (5, 400)]
)
def test_window_sees_the_last_keys_only(queries, keys):
    q, k, v = tensors(queries=queries, keys=keys, grad=True)
    upstream = torch.randn(q.shape)
    out, truth = window.sliding_window(q, k, v), window.naive_window(q, k, v)
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for a, b in zip(got, torch.autograd.grad(truth, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    row = window.window_mask(queries, keys, 128)[-1]
    assert row.sum() == min(keys, 128)
    assert bool(row[-1])


def test_grouped_heads_shrink_the_projection():
    shape = ModelShape(d_model=64, heads=4, kv_heads=4)
    for name, kv_heads in (("gqa", 2), ("mqa", 1)):
        changed = registry.get(f"attention/{name}").apply(Recipe()).shape(shape)
        assert (changed.heads, changed.kv_heads) == (4, kv_heads)


def test_gqa_keeps_an_attention_that_a_stack_chose():
    stack = registry.compose(["attention/sdpa_flash", "attention/gqa"])
    assert stack.attention is sdpa.flash_backend
    assert stack.shape(ModelShape()).kv_heads == 2


def test_spread_keys_are_the_same_numbers_with_gaps():
    _, k, _ = tensors()
    apart = grouped.spread(k)
    assert apart.stride(-1) == 2
    assert torch.equal(apart, k)
    assert grouped.spread(apart) is apart


def test_fewer_keys_than_queries_are_refused():
    q, k, v = tensors(queries=5, keys=4)
    with pytest.raises(ValueError, match="keys"):
        chunked.chunked(q, k, v)


def test_flex_says_why_it_cannot_train_on_a_cpu():
    with pytest.raises(NotImplementedError, match="backward"):
        flex.flex(*tensors(grad=True))


def test_a_cache_of_a_real_model_decodes_like_the_whole():
    class Cache:
        def __init__(self):
            self.length, self.held = 0, {}

        def update(self, layer, k, v):
            if layer in self.held:
                k, v = (torch.cat(both, dim=2) for both in zip(self.held[layer], (k, v), strict=True))
            self.held[layer] = (k, v)
            return k, v

        def advance(self, tokens):
            self.length += tokens

    shape = ModelShape(vocab_size=50, context_length=200, layers=2, heads=4, kv_heads=2, d_model=32, d_ff=64)
    tokens = torch.randint(50, (2, 150))
    for name in ("chunked", "sdpa_flash", "window", "lsh"):
        recipe = registry.get(f"attention/{name}").apply(Recipe())
        model = LanguageModel(dataclasses.replace(shape), recipe).eval()
        cache = Cache()
        with torch.no_grad():
            whole = model(tokens)
            parts = [model(part, cache=cache) for part in (tokens[:, :140], tokens[:, 140:149], tokens[:, 149:])]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-3, atol=1e-4)
