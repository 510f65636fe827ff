"""Decoding: every cache gives the tokens of no cache; a wrong block of the prefix cache is never believed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lmperf import model, reference, registry
from lmperf.caching import DynamicCache, StaticCache, kv_cache_bytes
from lmperf.catalogue import catalogue
from lmperf.implementations.continuous import ContinuousBatch, Request
from lmperf.implementations.decoding import PromptLookup, StaticCompiled, find_draft, static_cache_for
from lmperf.implementations.prefix_cache import PrefixCache, WithPrefixCache, weights_version
from lmperf.recipe import BuildContext, Recipe
from lmperf.records import ArmSpec, Cell, InputError, ModelShape, SessionSpec
from lmperf.workloads.base import Prepared, Setting, get_workload
from lmperf.workloads.generation import Prompts, same_tokens, sizes_of

NAMES = (
    "no_cache", "dynamic_cache", "static_cache", "static_compiled", "prefix_cache", "int8_weights", "prompt_lookup",
    "continuous_batch",
)  # fmt: skip
EXACT = ("dynamic_cache", "static_cache", "prefix_cache", "prefix_cache_64", "prompt_lookup", "continuous_batch")
SHAPE = ModelShape(vocab_size=61, context_length=300, layers=2, heads=4, kv_heads=4, d_model=32, d_ff=64)


def built(shape: ModelShape = SHAPE, seed: int = 3) -> nn.Module:
    return model.build(shape, Recipe(), seed=seed).eval()


def prompts(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(SHAPE.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def answer(generate: object, net: nn.Module, prompt: Tensor, count: int) -> Tensor:
    found = list(generate(net, prompt, count))  # type: ignore[operator]
    return torch.stack(found) if found else torch.empty(0, len(prompt), dtype=torch.long)


def setting_of(name: str, **params: object) -> Setting:
    arm = ArmSpec(name, () if name == "baseline" else (f"generation/{name}",))
    spec = SessionSpec(
        session="generation", axis="generation", workload="prefill_decode", arms=(arm,), cells=(), batch_size=2,
        sequence_length=32, rounds=3, seed=1, device="cpu", model=SHAPE,
    )  # fmt: skip
    return Setting(spec, arm, Cell("cell", params), registry.compose(arm.variants), seed=11, scratch=Path())


def prepared(name: str, **params: object) -> Prepared:
    return get_workload("prefill_decode")(setting_of(name, **params))


def test_every_name_of_the_catalogue_is_registered() -> None:
    assert set(NAMES) <= {entry.name for entry in catalogue().values() if entry.axis == "generation"}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    "change", [{}, {"position": "rotary"}, {"kv_heads": 2}, {"norm": "rmsnorm", "tied_head": False}]
)
def test_greedy_tokens_are_those_without_a_cache(name: str, change: dict[str, object]) -> None:
    net = built(replace(SHAPE, **change))  # type: ignore[arg-type]
    generate = registry.compose([f"generation/{name}"]).generate
    for batch, length, count in ((1, 1, 5), (3, 150, 6), (2, 70, 1), (1, 5, 0)):
        prompt = prompts(batch, length)
        true = answer(reference.generate_without_cache, net, prompt, count)
        for _ in range(2):  # the second time the prompt is known
            assert same_tokens(net, prompt, answer(generate, net, prompt, count), true).passed


@pytest.mark.parametrize("name", [*EXACT, "int8_weights"])
def test_other_attention_is_used_in_decoding(name: str) -> None:
    called = []

    def spy(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        called.append(k.shape[2])
        return reference.attention(q, k, v, scale=scale)

    recipe = registry.compose([f"generation/{name}"]).replace(attention=spy)
    answer(recipe.generate, model.build(SHAPE, recipe, seed=1), prompts(1, 9), 3)
    assert max(called) == 11


def test_compiled_step_makes_one_graph_for_all_lengths() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    net, generate = built(replace(SHAPE, layers=1)), StaticCompiled(backend="eager")  # no code is generated
    for batch, length, count in ((2, 9, 6), (2, 30, 4), (2, 9, 3)):
        prompt = prompts(batch, length)
        true = answer(reference.generate_without_cache, net, prompt, count)
        assert same_tokens(net, prompt, answer(generate, net, prompt, count), true).passed
    assert counters["stats"]["unique_graphs"] == 1


def test_caches_hold_what_was_put_in() -> None:
    k, v = torch.randn(2, 1, 4, 3, 8).unbind(0)
    for cache in (DynamicCache(), StaticCache(replace(SHAPE, layers=1, d_model=32, heads=4), 1, 6)):
        first = cache.update(0, k[:, :, :1], v[:, :, :1])
        cache.advance(1)
        second = cache.update(0, k[:, :, 1:], v[:, :, 1:])
        cache.advance(2)
        assert torch.equal(second[0], k)
        assert torch.equal(second[1], v)
        assert first[0].shape[2] == 1
        assert cache.length == 3
        cache.crop(1)
        assert torch.equal(cache.update(0, k[:, :, 1:], v[:, :, 1:])[0], k)


def test_static_cache_refuses_more_than_its_capacity() -> None:
    net = built()
    cache = static_cache_for(net, prompts(1, 4), 2)
    assert cache.nbytes == kv_cache_bytes(SHAPE, 1, 6)
    with torch.no_grad(), pytest.raises(ValueError, match="capacity is 6"):
        net(prompts(1, 7), cache=cache)


def fill(cache: PrefixCache, net: nn.Module, prompt: Tensor) -> None:
    held = DynamicCache()
    with torch.no_grad():
        net(prompt[None], cache=held)
    cache.store(prompt, 0, held, cache.match(prompt, weights_version(net)), weights_version(net))


def test_prefix_blocks_are_shared_and_counted() -> None:
    net, generate = built(), WithPrefixCache(block=64)
    head = prompts(1, 130)
    for number in range(3):
        answer(generate, net, torch.cat([head, prompts(1, 20, seed=number)], dim=1), 2)
    cache = generate.cache(net)
    assert (cache.asked_tokens, cache.hit_tokens) == (450, 256)
    assert len(cache.blocks) == 2
    generate.cache(net).clear()
    assert (cache.hit_rate, cache.nbytes) == (None, 0)


def test_at_least_one_token_is_computed() -> None:
    net, cache, prompt = built(), PrefixCache(block=16), prompts(1, 32)[0]
    fill(cache, net, prompt)
    assert len(cache.match(prompt, weights_version(net))) == 1
    assert len(cache.match(prompts(1, 33)[0][:0], weights_version(net))) == 0


def test_a_collision_of_hashes_is_caught() -> None:
    net = built()
    cache = PrefixCache(
        block=16, hash=lambda before, tokens: bytes([len(before) % 7]) * 4
    )  # nearly every hash is equal
    one, other = prompts(1, 40, seed=1)[0], prompts(1, 40, seed=2)[0]
    fill(cache, net, one)
    assert cache.match(other, weights_version(net)) == []
    assert cache.rejected == 1


def test_equal_tokens_after_another_beginning_are_no_hit() -> None:
    net, cache = built(), PrefixCache(block=16, hash=lambda before, tokens: tokens[:16])  # forgets what came before
    one, other = prompts(1, 40, seed=1)[0], prompts(1, 40, seed=2)[0]
    mixed = torch.cat([other[:16], one[16:]])  # its second block has the tokens of `one`'s second block
    fill(cache, net, one)
    fill(cache, net, other)
    found = cache.match(mixed, weights_version(net))
    assert len(found) == 1
    assert cache.rejected == 1


@pytest.mark.parametrize("change", ["weights", "keys"])
def test_a_stale_block_is_caught(change: str) -> None:
    net, cache, prompt = built(), PrefixCache(block=16), prompts(1, 40)[0]
    fill(cache, net, prompt)
    assert len(cache.match(prompt, weights_version(net))) == 2
    with torch.no_grad():
        if change == "weights":
            net.blocks[0].feed_forward.up.weight[0, 0] += 1e-3
        else:
            next(iter(cache.blocks.values())).layers[0][0][0, 3] += 0.5
    assert cache.match(prompt, weights_version(net)) == []
    assert cache.rejected == 1


def test_the_prefix_cache_keeps_to_its_size() -> None:
    net, prompt = built(), prompts(1, 100)[0]
    cache = PrefixCache(block=16, most_bytes=3 * 2 * 2 * 16 * 32 * 4)
    fill(cache, net, prompt)
    assert len(cache.blocks) == 3
    assert cache.nbytes == cache.most_bytes


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 4), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_a_draft_is_what_followed_the_same_words(tokens: list[int], longest: int, most: int) -> None:
    draft = find_draft(tokens, longest, most)
    assert len(draft) <= most
    places = [i for i in range(1, len(tokens)) if tokens[i : i + len(draft)] == draft and tokens[i - 1] == tokens[-1]]
    assert not draft or places


def test_prompt_lookup_reads_fewer_times_than_it_writes() -> None:
    net, calls = built(), itertools.count()

    def count(*_: object) -> None:
        next(calls)

    net.register_forward_pre_hook(count)
    prompt = prompts(1, 40)
    true = answer(reference.generate_without_cache, net, prompt, 60)
    before = next(calls)
    got = answer(PromptLookup(), net, prompt, 60)
    assert same_tokens(net, prompt, got, true).passed
    assert next(calls) - before - 1 < 60  # untrained models repeat themselves: some drafts are right


def served(net: nn.Module, requests: list[Request], slots: int) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in requests]
    for number, token in ContinuousBatch(slots).serve(net, requests):
        made[number].append(int(token))
    return made


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_requests_of_all_lengths_join_and_leave(position: str) -> None:
    net = built(replace(SHAPE, position=position, kv_heads=2))
    sizes = [(5, 9), (12, 1), (5, 4), (30, 7), (1, 12), (12, 0), (8, 3)]
    requests = [Request(prompts(1, length, seed=length)[0], count) for length, count in sizes]
    for slots in (1, 3, 8):
        for request, tokens in zip(requests, served(net, requests, slots), strict=True):
            true = answer(reference.generate_without_cache, net, request.prompt[None], request.new_tokens)
            assert same_tokens(net, request.prompt[None], torch.tensor(tokens).view(-1, 1), true).passed


def test_a_free_slot_is_filled_before_the_batch_is_done() -> None:
    requests = [Request(prompts(1, 6, seed=n)[0], count) for n, count in enumerate((2, 10, 3))]
    order = [number for number, _ in ContinuousBatch(2).serve(built(), requests)]
    assert order.index(2) < len(order) - 1 - order[::-1].index(1)  # the third starts while the second still runs


@pytest.mark.parametrize("name", ["baseline", *EXACT, "int8_weights"])
def test_workload(name: str) -> None:
    run = prepared(name, prompt=140, new_tokens=5, batch=2, shared_prefix=130)
    assert run.check is not None
    assert run.check(7).passed
    for _ in range(2):
        run.step()
    values = run.observations.values
    assert run.tokens_per_step == 10
    assert all(value > 0 for key in ("ttft_s", "itl_s", "generated_tokens_per_s") for value in values[key])
    assert ("kv_cache_bytes" in run.once) == (name != "baseline")
    if name == "prefix_cache":
        assert values["hit_rate"] == [0.0, 128 / 140]


def test_workload_with_answers_of_different_lengths() -> None:
    for name in ("baseline", "continuous_batch"):
        run = prepared(name, prompt=6, new_tokens=8, batch=5, ragged=True)
        run.step()
        assert run.tokens_per_step == sum((2, 4, 5, 6, 8))
        assert run.observations.values["ttft_s"][0] > 0


def test_caches_decode_in_bf16_too() -> None:
    setting = setting_of("static_cache", prompt=20, new_tokens=6, batch=2)
    recipe = registry.compose(["generation/static_cache", "precision/bf16_pure"])
    run = get_workload("prefill_decode")(replace(setting, recipe=recipe))
    run.step()
    assert run.check is not None
    assert run.check(3).passed
    assert run.once["kv_cache_bytes"][1] == kv_cache_bytes(SHAPE, 2, 26, element_bytes=2)


def test_no_prompt_comes_twice_and_arms_have_their_own() -> None:
    def some(name: str) -> Iterator[tuple[int, ...]]:
        setting = setting_of(name, prompt=12, new_tokens=2, shared_prefix=4)
        source = Prompts(setting, sizes_of(setting), 61)
        return (tuple(source.next()[0].tolist()) for _ in range(100))

    first, second = list(some("baseline")), list(some("dynamic_cache"))
    assert len({*first, *second}) == 200
    assert len({prompt[:4] for prompt in first}) == 1


def test_a_wrong_generator_fails_the_check() -> None:
    setting = setting_of("baseline", prompt=8, new_tokens=4)

    def shifted(net: nn.Module, prompt: Tensor, count: int) -> Iterator[Tensor]:
        return ((token + 1) % 61 for token in reference.generate_without_cache(net, prompt, count))

    run = get_workload("prefill_decode")(replace(setting, recipe=setting.recipe.replace(generate=shifted)))
    assert run.check is not None
    assert not run.check(3).passed
    short = setting.recipe.replace(generate=lambda n, p, c: reference.generate_without_cache(n, p, c - 1))
    run = get_workload("prefill_decode")(replace(setting, recipe=short))
    assert run.check is not None
    assert not run.check(3).passed


def test_int8_weights_are_made_after_training_and_are_near() -> None:
    recipe = registry.compose(["generation/int8_weights"])
    dense = model.build(SHAPE, recipe, seed=2)
    assert all(p.dtype == torch.float32 for p in dense.parameters())
    before = dense(prompts(2, 9)).detach()
    small = model.apply_transforms(dense, recipe.finish, BuildContext(SHAPE))
    with torch.no_grad():
        after = small(prompts(2, 9))
    assert 0 < float((after - before).norm() / before.norm()) < 0.05


def test_bad_cells_are_named() -> None:
    with pytest.raises(InputError, match="shared_prefix 9"):
        prepared("baseline", prompt=9, shared_prefix=9)
