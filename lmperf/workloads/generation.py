"""Workload `prefill_decode`: prompts read and answered greedily; time to first token, inter-token latency, tokens/s."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from lmperf import model, reference
from lmperf.caching import kv_cache_bytes
from lmperf.checking import model_of
from lmperf.corpus.datasets import TokenData
from lmperf.implementations.continuous import Request
from lmperf.implementations.prefix_cache import WithPrefixCache
from lmperf.recipe import BuildContext, Recipe
from lmperf.records import InputError, ModelShape, digest
from lmperf.workloads.base import CheckOutcome, Observations, Prepared, Setting, Unsupported, workload

POOL = 64  # prompts made at once; a further pool follows, so that no prompt ever comes twice
CHECKED_TOKENS = 16
#: Logits nearer than this share of the largest may be ordered either way by rounding: in fp32, in 16 bits.
TIE, TIE_16 = 1e-4, 5e-2


@dataclass(frozen=True)
class Sizes:
    """One cell: prompts (batch, prompt), answers of new_tokens; the first `shared` tokens are the same in all prompts.

    ragged: answers of different lengths (a quarter to all of new_tokens), as in a service.
    """

    batch: int
    prompt: int
    new_tokens: int
    shared: int
    ragged: bool


def sizes_of(setting: Setting) -> Sizes:
    """The cell's sizes (params batch, prompt, new_tokens, shared_prefix, ragged)."""
    prompt = int(setting.param("prompt", setting.spec.sequence_length // 2))
    shared = int(setting.param("shared_prefix", prompt // 2))
    new_tokens = int(setting.param("new_tokens", setting.param("output", 32)))
    if prompt < 1 or new_tokens < 1 or not 0 <= shared < prompt:
        allowed = "prompt and new_tokens at least 1, shared_prefix below prompt"
        raise InputError(f"cell prompt {prompt}, new_tokens {new_tokens}, shared_prefix {shared}; allowed: {allowed}")
    return Sizes(int(setting.param("batch", 1)), prompt, new_tokens, shared, bool(setting.param("ragged", False)))


class Prompts:
    """Endless prompts (batch, prompt) that never repeat: a fixed shared beginning, then text (or random tokens)."""

    def __init__(self, setting: Setting, sizes: Sizes, vocab_size: int) -> None:
        self.sizes, self.vocab_size, self.device = sizes, vocab_size, setting.device
        # Each arm has prompts of its own: nothing that one arm left anywhere can help another.
        self.random = np.random.default_rng([setting.seed, int(digest(setting.arm.name), 16)])
        self.data = token_data(setting)
        self.head = self._tokens(1, sizes.shared)
        self.pool: Iterator[Tensor] = iter(())

    def next(self) -> Tensor:
        """The next prompts, int64 (batch, prompt)."""
        found = next(self.pool, None)
        if found is None:
            tails = self._tokens(POOL * self.sizes.batch, self.sizes.prompt - self.sizes.shared)
            whole = np.concatenate([np.repeat(self.head, len(tails), axis=0), tails], axis=1)
            pool = torch.from_numpy(whole).view(POOL, self.sizes.batch, self.sizes.prompt).to(self.device)
            self.pool = iter(pool)
            found = next(self.pool)
        return found

    def _tokens(self, rows: int, length: int) -> np.ndarray:
        if self.data is None or len(self.data) < 4 * max(1, length):
            return self.random.integers(self.vocab_size, size=(rows, length))
        starts = self.random.integers(len(self.data) - length, size=rows)
        found: np.ndarray = self.data.windows(starts, length).astype(np.int64) if length else np.empty((rows, 0), int)
        return found


def token_data(setting: Setting) -> TokenData | None:
    """The session's training tokens, where it names any."""
    return None if setting.spec.data is None else TokenData.open(setting.spec.data, "train")


def built_model(setting: Setting, sizes: Sizes) -> tuple[nn.Module, ModelShape]:
    """The arm's model after `transforms` and `finish`, in evaluation mode, with room for prompt and answer."""
    data = token_data(setting)
    base = setting.spec.model
    shape = replace(
        base,
        context_length=max(base.context_length, sizes.prompt + sizes.new_tokens),
        vocab_size=max(base.vocab_size, 0 if data is None else data.vocab_size),
    )
    recipe = setting.recipe
    context = BuildContext(shape=recipe.shape(shape), device=setting.device, seed=setting.spec.seed)
    model.apply_runtime(recipe)
    built = model.build(shape, recipe, seed=setting.spec.seed, device=setting.device, context=context)
    return model_of(model.apply_transforms(built, recipe.finish, context).eval()), recipe.shape(shape)


@dataclass
class Clocked:
    """Runs one batch of prompts through a generate slot and notes when tokens came."""

    recipe: Recipe
    model: nn.Module
    device: str
    seen: Observations

    def stamp(self) -> float:
        """The time in seconds, after the device has done what it was given."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    def answer(self, prompt: Tensor, new_tokens: int) -> None:
        """All rows answered with `new_tokens` each."""
        started = self.stamp()
        with model.autocast(self.recipe, self.device):
            came = [self.stamp() for _ in self.recipe.generate(self.model, prompt, new_tokens)]
        self.seen.add("ttft_s", "s", came[0] - started)
        if len(came) > 1:  # tokens of one pass come together, so the mean over the answer, not a single gap
            self.seen.add("itl_s", "s", (came[-1] - came[0]) / (len(came) - 1))
        self.seen.add("generated_tokens_per_s", "tokens/s", prompt.shape[0] * new_tokens / (came[-1] - started))

    def serve(self, requests: list[Request], slots: int) -> None:
        """Requests of different lengths: continuously where the slot can, else in batches as long as their longest."""
        started = self.stamp()
        first: dict[int, float] = {}
        server = getattr(self.recipe.generate, "serve", None)
        with model.autocast(self.recipe, self.device):
            if server is not None:
                for number, _ in server(self.model, requests):
                    first.setdefault(number, self.stamp() - started)
            else:
                for begin in range(0, len(requests), slots):
                    self._static_batch(requests[begin : begin + slots], begin, first, started)
        self.seen.add("ttft_s", "s", median(first.values()))
        useful = sum(request.new_tokens for request in requests)
        self.seen.add("generated_tokens_per_s", "tokens/s", useful / (self.stamp() - started))

    def _static_batch(self, requests: list[Request], begin: int, first: dict[int, float], started: float) -> None:
        prompt = torch.stack([request.prompt for request in requests])
        for _ in self.recipe.generate(self.model, prompt, max(request.new_tokens for request in requests)):
            for number in range(len(requests)):
                first.setdefault(begin + number, self.stamp() - started)


@workload("prefill_decode")
def prefill_decode(setting: Setting) -> Prepared:
    """One step = one batch of new prompts answered (cell: prompt, new_tokens, batch, shared_prefix, ragged)."""
    sizes = sizes_of(setting)
    try:
        built, shape = built_model(setting, sizes)
    except NotImplementedError as error:
        raise Unsupported(str(error)) from None
    prompts = Prompts(setting, sizes, shape.vocab_size)
    seen = Observations()
    clocked = Clocked(setting.recipe, built, setting.device, seen)
    lengths = ragged_lengths(sizes)
    generate = setting.recipe.generate
    forget(generate, built)

    def step() -> None:
        prompt = prompts.next()
        if sizes.ragged:
            slots = int(getattr(generate, "slots", 8))
            clocked.serve([Request(row, n) for row, n in zip(prompt, lengths, strict=True)], slots)
        else:
            clocked.answer(prompt, sizes.new_tokens)
        note_hits(generate, built, seen)

    return Prepared(
        step=step,
        check=lambda seed: check(setting, built, sizes, seed),
        tokens_per_step=float(sum(lengths)),
        observations=seen,
        once=once_of(setting.recipe, shape, sizes),
        model=built,
    )


def ragged_lengths(sizes: Sizes) -> list[int]:
    """Tokens wanted by each request: all the same, or spread evenly from a quarter of new_tokens to all of it."""
    if not sizes.ragged:
        return [sizes.new_tokens] * sizes.batch
    lowest = max(1, sizes.new_tokens // 4)
    spread = np.linspace(lowest, sizes.new_tokens, sizes.batch).round().astype(int).tolist()
    return [spread[(7 * number) % len(spread)] if len(spread) % 7 else spread[number] for number in range(len(spread))]


def once_of(recipe: Recipe, shape: ModelShape, sizes: Sizes) -> dict[str, tuple[str, float]]:
    """Bytes of keys and values at the end of an answer, for slots that keep them."""
    if recipe.generate is reference.generate_without_cache:
        return {}
    size = torch.finfo(recipe.precision.parameters).bits // 8
    held = kv_cache_bytes(shape, sizes.batch, sizes.prompt + sizes.new_tokens, element_bytes=size)
    return {"kv_cache_bytes": ("bytes", float(held))}


def forget(generate: object, built: nn.Module) -> None:
    """Empty the prefix cache, where there is one."""
    if isinstance(generate, WithPrefixCache):
        generate.cache(built).clear()


def note_hits(generate: object, built: nn.Module, seen: Observations) -> None:
    """Observe the prefix cache's share of tokens found in this step."""
    if not isinstance(generate, WithPrefixCache):
        return
    cache = generate.cache(built)
    if cache.hit_rate is not None:
        seen.add("hit_rate", "ratio", cache.hit_rate)
        seen.add("prefix_cache_bytes", "bytes", float(cache.nbytes))
    cache.asked_tokens = cache.hit_tokens = 0


def check(setting: Setting, built: nn.Module, sizes: Sizes, seed: int) -> CheckOutcome:
    """Greedy tokens on fresh prompts against decoding without a cache, twice (the second time a prefix is known)."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(built.shape.vocab_size, (sizes.batch, sizes.prompt), generator=generator).to(setting.device)
    count = min(sizes.new_tokens, CHECKED_TOKENS)
    generate, precision = setting.recipe.generate, setting.recipe.precision
    full = precision.autocast is None and precision.parameters == torch.float32 and precision.matmul == "highest"
    with model.autocast(setting.recipe, setting.device):
        true = torch.stack(list(reference.generate_without_cache(built, prompt, count)))
        outcome = CheckOutcome(False, "not compared")
        for _ in range(2):
            got = torch.stack(list(generate(built, prompt, count)))
            outcome = same_tokens(built, prompt, got, true, TIE if full else TIE_16)
            if not outcome.passed:
                break
    forget(generate, built)
    return outcome


@torch.no_grad()
def same_tokens(built: nn.Module, prompt: Tensor, got: Tensor, true: Tensor, tie: float = TIE) -> CheckOutcome:
    """Whether got equals true (new_tokens, batch); a first difference between two logits that are a tie is none."""
    if got.shape != true.shape:
        return CheckOutcome(False, f"{tuple(got.shape)} tokens instead of {tuple(true.shape)}")
    ties = 0
    for row in range(true.shape[1]):
        differing = (got[:, row] != true[:, row]).nonzero()
        if not len(differing):
            continue
        place = int(differing[0])
        text = torch.cat([prompt[row], true[:place, row]])[None]
        logits = built.logits(built(text)[:, -1])[0].float()
        gap = float(logits[true[place, row]] - logits[got[place, row]]) / float(logits.abs().max())
        if gap > tie:
            return CheckOutcome(False, f"row {row}: token {place} differs, its logit is {gap:.2g} lower", gap)
        ties += 1  # from here on the two texts differ, and both are greedy
    return CheckOutcome(True, f"{true.numel()} tokens agree with decoding without a cache; ties: {ties}", 0.0)
