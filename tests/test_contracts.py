"""What every registered variant owes, whatever its axis: a new one is covered here without a line of test.

A variant builds, changes only its axis's slots, agrees with its oracle (or the reference) in loss and gradients on
fresh inputs of two seeds at its stated fidelity, composes with one variant of each other axis, and says why where it
cannot run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from corpus_helpers import prose, write_shards
from torch import distributed

import lmperf
from lmperf import model, reference, registry
from lmperf.catalogue import AXES, catalogue
from lmperf.checking import Expectation, TrainingCheck, check_forward, compare, expectation, random_tokens
from lmperf.corpus.tokenizer import tokenize
from lmperf.implementations.facts import facts_of
from lmperf.recipe import Attention, Recipe, changed_slots
from lmperf.records import ModelShape
from lmperf.reference import LoaderSource
from lmperf.workloads.base import CheckOutcome, Unsupported

SHAPE = ModelShape(vocab_size=67, context_length=48, layers=2, heads=4, kv_heads=4, d_model=32, d_ff=64)
SHAPES = {
    "plain": SHAPE,
    "modern": ModelShape(
        vocab_size=65, context_length=40, layers=2, heads=4, kv_heads=2, d_model=32, d_ff=48, position="rotary",
        activation="swiglu", norm="rmsnorm", tied_head=False,
    ),
}  # fmt: skip

# Other tests may have loaded plugins of faulty variants: only the package's own owe this contract.
HERE = str(Path(lmperf.__file__).parent)
ENTRIES = {key: entry for key, entry in registry.variants().items() if entry.source.startswith(HERE)}
RUNNABLE = [key for key, entry in ENTRIES.items() if entry.unavailable() is None]
UNAVAILABLE = [key for key, entry in ENTRIES.items() if entry.unavailable() is not None]
COMPILED = [key for key in RUNNABLE if "cxx" in ENTRIES[key].requires]  # seconds each: checked once, at one shape
QUICK = [key for key in RUNNABLE if key not in COMPILED]
ATTENTION = [key for key in QUICK if ENTRIES[key].axis == "attention"]


@pytest.fixture(scope="module", autouse=True)
def one_process_group() -> Iterator[None]:
    """A group of one rank, so that distributed variants build here (their ranks are tested with their workload)."""
    started = not distributed.is_initialized()
    if started:
        distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    if started:
        distributed.destroy_process_group()
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contracts")
    write_shards(folder / "shards", {"english": [prose(number, words=60) for number in range(40)]})
    tokenize(folder / "shards", folder / "tokens", vocab_size=300, block=33, accelerator="none", held_out=0.1)
    return folder / "tokens"


@pytest.mark.parametrize("key", ENTRIES)
def test_changes_only_the_slots_of_its_axis(key: str) -> None:
    entry = ENTRIES[key]
    for base in (Recipe(), Recipe(accumulate=3, pad_vocab_to=8)):
        changed = {name for name in vars(base) if getattr(entry.apply(base), name) != getattr(base, name)}
        assert changed <= registry.AXIS_SLOTS[entry.axis]
    if entry.baseline:
        assert not changed_slots(entry.apply(Recipe()))


@pytest.mark.parametrize("axis", AXES)
def test_each_axis_has_one_baseline(axis: str) -> None:
    of_axis = [entry for entry in ENTRIES.values() if entry.axis == axis]
    assert sum(entry.baseline for entry in of_axis) == (1 if of_axis else 0)


@pytest.mark.parametrize("key", ENTRIES)
def test_describes_itself_in_one_line_and_as_the_catalogue_says(key: str) -> None:
    entry, listed = ENTRIES[key], catalogue()[key]
    assert 10 < len(entry.summary) < 130
    assert (listed.summary, listed.fidelity, listed.requires) == (entry.summary, entry.fidelity, entry.requires)
    assert (listed.baseline, listed.control, listed.quality_run) == (entry.baseline, entry.control, entry.quality_run)
    if entry.fidelity == "quality" and not entry.control:
        assert entry.quality_run, "a different function owes a quality run"


@pytest.mark.parametrize("key", UNAVAILABLE)
def test_says_why_it_cannot_run(key: str) -> None:
    assert len(ENTRIES[key].unavailable() or "") > 5
    assert isinstance(ENTRIES[key].apply(Recipe()), Recipe)  # describing a variant needs nothing that is missing


def outcomes(recipe: Recipe, expected: Expectation, shape: ModelShape) -> Iterator[CheckOutcome]:
    """Loss and gradients of two seeds; logits only where the recipe has no backward pass."""
    check = TrainingCheck(recipe, expected, shape, length=37)
    trained = any(p.requires_grad for p in check.arm.model.parameters())
    for seed in (1, 2):
        if trained:
            yield check(seed)
            continue
        x, _ = random_tokens(shape.vocab_size, 3, 37, seed)
        yield check_forward(check.arm.model, check.truth.model if check.truth else None, x, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key", QUICK)
def test_agrees_with_its_oracle_in_loss_and_gradients(key: str, shape: str) -> None:
    recipe = ENTRIES[key].apply(Recipe())
    try:
        for outcome in outcomes(recipe, expectation([key]), SHAPES[shape]):
            assert outcome.passed, outcome.message
    except (NotImplementedError, Unsupported) as reason:
        pytest.skip(f"{key}: {reason}")


@pytest.mark.parametrize("key", COMPILED)
def test_compiled_variants_agree_at_one_shape(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    if ENTRIES[key].axis != "attention" and "LMPERF_COMPILE_TESTS" not in os.environ:
        # Generating C++ for a whole model takes minutes on two cores: its capture and gradients are checked here, the
        # generated code by every measurement's own check, and here when LMPERF_COMPILE_TESTS is set.
        real = torch.compile
        monkeypatch.setattr(torch, "compile", lambda *args, **options: real(*args, backend="aot_eager"))
    recipe, expected = ENTRIES[key].apply(Recipe()), expectation([key])
    if facts_of(recipe.attention).no_cpu_backward:
        q, k, v = heads(1, 2, 2, 40, 40)
        with torch.no_grad():
            got, wanted = recipe.attention(q, k, v), expected.oracle.attention(q, k, v)
        outcome = compare({"output": got}, {"output": wanted}, expected.rtol, expected.atol)
        if not outcome.passed and "AVX512" not in torch.backends.cpu.get_cpu_capability():
            # Seen with torch 2.13 on an AVX2 CPU; a session's own check calls such an arm `incorrect`.
            pytest.skip(f"{key}: PyTorch's compiled kernel is wrong on this CPU: {outcome.message}")
    else:
        outcome = TrainingCheck(recipe, expected, SHAPE, length=37)(1)
    assert outcome.passed, outcome.message


def heads(batch: int, q_heads: int, kv_heads: int, queries: int, keys: int, d: int = 16) -> list[torch.Tensor]:
    sizes = ((q_heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(batch, h, length, d) for h, length in sizes]


#: batch, heads, kv_heads, queries, keys, d: odd, one token, no block divides it, grouped, with a cache.
ODD_SHAPES = [
    (2, 3, 3, 37, 37, 24), (1, 2, 2, 1, 1, 16), (1, 2, 2, 521, 521, 8), (2, 4, 2, 67, 67, 16), (1, 4, 1, 70, 70, 16),
    (1, 2, 2, 1, 90, 16), (2, 4, 2, 5, 301, 16), (1, 2, 1, 200, 331, 16),
]  # fmt: skip


def attention_outcome(got: Attention, wanted: Attention, size: tuple[int, ...], expected: Expectation) -> CheckOutcome:
    tensors = [t.requires_grad_() for t in heads(*size)]
    upstream = torch.randn_like(tensors[0])
    sides = []
    for function in (got, wanted):
        out = function(*tensors)
        gradients = torch.autograd.grad(out, tensors, upstream)
        sides.append(dict(zip(("output", "dq", "dk", "dv"), (out, *gradients), strict=True)))
    return compare(sides[0], sides[1], expected.rtol, expected.atol)


@pytest.mark.parametrize("size", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("key", ATTENTION)
def test_attention_agrees_at_odd_shapes(key: str, size: tuple[int, ...]) -> None:
    expected = expectation([key])
    assert expected.oracle is not None, "an attention has a naive form"
    function = ENTRIES[key].apply(Recipe()).attention
    for seed in (3, 4):
        torch.manual_seed(seed)
        outcome = attention_outcome(function, expected.oracle.attention, size, expected)
        assert outcome.passed, outcome.message


@pytest.mark.parametrize("key", ATTENTION)
def test_attention_takes_a_scale_and_transposed_views(key: str) -> None:
    function, truth = ENTRIES[key].apply(Recipe()).attention, expectation([key]).oracle.attention
    q, k, v = (torch.randn(2, 45, 4, 16).transpose(1, 2) for _ in range(3))
    torch.testing.assert_close(function(q, k, v, scale=0.5), truth(q, k, v, scale=0.5), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("key", [key for key in QUICK if ENTRIES[key].apply(Recipe()).generate != Recipe().generate])
def test_decodes_the_tokens_of_the_reference(key: str) -> None:
    entry = ENTRIES[key]
    recipe = entry.apply(Recipe())
    truth, arm = model.build(SHAPE, Recipe(), seed=3), model.build(SHAPE, recipe, seed=3)
    prompt = torch.randint(SHAPE.vocab_size, (2, 7), generator=torch.Generator().manual_seed(1))
    wanted = torch.stack(list(reference.generate_without_cache(truth, prompt, 9)))
    got = torch.stack(list(recipe.generate(arm, prompt, 9)))
    assert got.shape == wanted.shape
    if entry.fidelity == "exact":
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("key", [key for key in QUICK if ENTRIES[key].apply(Recipe()).loader != Recipe().loader])
def test_loads_the_batches_of_the_reference(key: str, tokens: Path, tmp_path: Path) -> None:
    entry = ENTRIES[key]
    source = LoaderSource(tokens=tokens, split="train", batch_size=2, length=16, seed=5, start=3, scratch=tmp_path)
    got = list(itertools.islice(entry.apply(Recipe()).loader(source), 4))
    wanted = list(itertools.islice(reference.arrow_loader(source), 4))
    assert all(x.dtype == torch.int64 and x.shape == y.shape for x, y in got)
    if entry.fidelity == "exact":
        for ours, theirs in zip(got, wanted, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("key", [key for key in QUICK if ENTRIES[key].apply(Recipe()).matmul != Recipe().matmul])
def test_multiplies_like_the_reference(key: str) -> None:
    a, b = torch.randn(67, 131), torch.randn(131, 35)
    torch.testing.assert_close(ENTRIES[key].apply(Recipe()).matmul(a, b), a @ b, rtol=1e-4, atol=1e-4)


def partner(axis: str) -> str | None:
    """One variant of an axis that changes something and runs in a moment."""
    usable = [k for k in QUICK if ENTRIES[k].axis == axis and not ENTRIES[k].baseline and not ENTRIES[k].control]
    exact = [k for k in usable if ENTRIES[k].fidelity == "exact"]
    return next(iter(exact or usable), None)


OUTSIDE_THE_STEP = {"loader", "generate", "matmul", "environment", "finish"}
PARTNERS = {axis: key for axis in AXES if (key := partner(axis)) is not None}


@pytest.mark.parametrize("key", QUICK)
def test_composes_with_one_variant_of_each_other_axis(key: str) -> None:
    x, y = random_tokens(SHAPE.vocab_size, 4, 24, seed=1)
    for axis, other in PARTNERS.items():
        if axis == ENTRIES[key].axis:
            continue
        recipe = registry.compose([other, key])
        turned = registry.compose([key, other])
        assert changed_slots(recipe) == changed_slots(turned)
        assert [t.name for t in recipe.transforms] == [t.name for t in turned.transforms]  # one written order
        if any(changed_slots(ENTRIES[k].apply(Recipe())) <= OUTSIDE_THE_STEP for k in (key, other)):
            continue  # one of the two is not part of the training step: the other alone has been run above
        refusal, loss = None, torch.zeros(())
        try:
            loss = one_loss(recipe, x, y)
        except (NotImplementedError, Unsupported) as error:
            refusal = str(error)
        assert refusal is None or len(refusal) > 10, other  # refusing is allowed, silence is not
        assert torch.isfinite(loss) or ENTRIES[key].control, other


def one_loss(recipe: Recipe, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model.apply_runtime(recipe)
    built = model.build(SHAPE, recipe, seed=1)
    if any(p.requires_grad for p in built.parameters()):
        return model.TrainingStep(built, recipe, learning_rate=1e-3)(x, y).loss
    with torch.no_grad():
        return built(x, y)
