"""Workloads `loading` (one step = one batch fetched) and `loading_in_step` (share of a training step spent waiting)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lmperf import model, reference
from lmperf.implementations import page_cache
from lmperf.implementations.loaders import NO_TARGET, Loader, prepare
from lmperf.recipe import Recipe
from lmperf.records import InputError
from lmperf.reference import Batches, LoaderSource
from lmperf.workloads.base import CheckOutcome, Observations, Prepared, Setting, Unsupported, workload

CHECKED_BATCHES = 5
CACHES = ("warm", "cold")


def source_of(setting: Setting) -> LoaderSource:
    """What the cell's loader reads: the session's token shards, its split (cell `split`, default train) and order."""
    if setting.spec.data is None:
        raise InputError("loading: the session names no data folder; run `lmperf tokenize` first and set `data`")
    return LoaderSource(
        tokens=Path(setting.spec.data),
        split=str(setting.param("split", "train")),
        batch_size=int(setting.param("batch", setting.spec.batch_size)),
        length=int(setting.param("length", setting.spec.sequence_length)),
        seed=setting.seed,
        texts=None if setting.spec.texts is None else Path(setting.spec.texts),
        scratch=setting.scratch,
    )


class Feed:
    """A loader that counts what it gave out, so that it can be opened again (cold) at the same place."""

    def __init__(self, recipe: Recipe, source: LoaderSource) -> None:
        self.recipe, self.source, self.given = recipe, source, source.start
        self.start_s = 0.0
        self.cold = False  # nothing was read since the pages were dropped
        if isinstance(recipe.loader, Loader):
            prepare(recipe.loader.store, source)
        self.batches: Batches = iter(())
        self.open()

    def open(self) -> None:
        """Start the loader where it stands; `start_s` is the time to its first batch, workers' start included."""
        started = time.perf_counter()
        self.batches = iter(self.recipe.loader(replace(self.source, start=self.given)))
        self.next()
        self.start_s = time.perf_counter() - started

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next (x, y), int64 (batch, length)."""
        self.given += 1
        return next(self.batches)

    def close(self) -> None:
        """End the workers, if any: dropping the loader's generator does it."""
        closing = getattr(self.batches, "close", None)
        if closing is not None:
            closing()
        self.batches = iter(())

    def make_cold(self) -> None:
        """Let go of the files, drop their pages from the page cache, and open the loader again.

        Workers are started (and so hold their first batches); without workers nothing is read, since one window
        makes the kernel read far ahead.
        """
        self.close()
        page_cache.drop(self.source.tokens)
        self.cold = True
        if isinstance(self.recipe.loader, Loader) and self.recipe.loader.workers:
            self.open()
        else:
            self.batches = iter(self.recipe.loader(replace(self.source, start=self.given)))


def open_feed(setting: Setting) -> Feed:
    """The cell's loader, started; a loader that cannot run here is `Unsupported`."""
    cache = setting.param("cache", "warm")
    if cache not in CACHES:
        raise InputError(f"cell cache: {cache!r}; allowed: {', '.join(CACHES)}")
    try:
        feed = Feed(setting.recipe, source_of(setting))
    except NotImplementedError as error:
        raise Unsupported(str(error)) from None
    return feed


def once_of(feed: Feed) -> dict[str, tuple[str, float]]:
    """Start-up time and proportional memory, told once."""
    workers = page_cache.children(os.getpid())
    values = {"worker_start_s": ("s", feed.start_s)}
    own = page_cache.proportional_bytes(os.getpid())
    shares = [page_cache.proportional_bytes(pid) for pid in workers]
    if own is not None:
        values["loader_process_pss_bytes"] = ("bytes", own)
    if workers and None not in shares:
        values["worker_pss_bytes"] = ("bytes", float(sum(share for share in shares if share is not None)))
    return values


@workload("loading")
def loading(setting: Setting) -> Prepared:
    """One step = one batch fetched (cell: batch, length, split, cache "warm" | "cold"); padding is no token."""
    feed = open_feed(setting)
    cold = setting.param("cache", "warm") == "cold"
    once = {**once_of(feed), **useful_share(feed)}
    seen = Observations()
    if cold:
        feed.make_cold()

    def step() -> object:
        if not feed.cold:
            return feed.next()
        started, feed.cold = time.perf_counter(), False
        batch = feed.next()
        seen.add("cold_batch_s", "s", time.perf_counter() - started)
        return batch

    return Prepared(
        step=step,
        check=lambda seed: check_loader(setting.recipe, replace(source_of(setting), seed=seed)),
        tokens_per_step=once["useful_token_share"][1] * feed.source.batch_size * feed.source.length,
        observations=seen,
        once=once,
        close=feed.close,
        before_block=feed.make_cold if cold else nothing,
    )


def nothing() -> None:
    """The default between blocks."""


def useful_share(feed: Feed) -> dict[str, tuple[str, float]]:
    """Share of targets that are text (not padding), over the next 8 batches."""
    targets = torch.stack([feed.next()[1] for _ in range(8)])
    return {"useful_token_share": ("ratio", float((targets != NO_TARGET).double().mean()))}


def check_loader(recipe: Recipe, source: LoaderSource) -> CheckOutcome:
    """The same batches in the same order as the baseline's loader, from the start and resumed; padded by its rules."""
    if isinstance(recipe.loader, Loader) and recipe.loader.store == "padded":
        return check_padded(recipe, source)
    for start in (0, 1 + source.seed % 7):
        at = replace(source, start=start)
        got, true = iter(recipe.loader(at)), reference.arrow_loader(at)
        for number in range(CHECKED_BATCHES):
            pairs = zip(next(got), next(true), strict=True)
            if not all(torch.equal(a, b) for a, b in pairs):
                return CheckOutcome(False, f"batch {start + number} differs from the baseline's")
        del got
    return CheckOutcome(True, f"{2 * CHECKED_BATCHES} batches equal, resumed in the middle too", 0.0)


def check_padded(recipe: Recipe, source: LoaderSource) -> CheckOutcome:
    """Every padded row is text of one document: targets follow inputs, padding only after them, no end inside."""
    from lmperf.corpus.datasets import TokenData

    end = TokenData.open(source.tokens, source.split).end_of_text
    batches = iter(recipe.loader(source))
    for _ in range(CHECKED_BATCHES):
        x, y = next(batches)
        for inputs, targets in zip(x, y, strict=True):
            size = int((targets != NO_TARGET).sum())
            follows = torch.equal(inputs[1:size], targets[: size - 1])
            if not follows or bool((targets[size:] != NO_TARGET).any()) or bool((inputs[:size] == end).any()):
                return CheckOutcome(False, "a padded row is not a stretch of one document")
    return CheckOutcome(True, f"{CHECKED_BATCHES * source.batch_size} rows hold one document each", 0.0)


@dataclass(frozen=True)
class Consumer:
    """What happens with a batch: the real training step, or an accelerator's step stood in for by sleeping."""

    compute: Callable[[torch.Tensor, torch.Tensor], object]
    model: object = None


def consumer_of(setting: Setting, source: LoaderSource) -> Consumer:
    """The training step of the recipe, or `emulated_step_s` seconds in which this process uses no core."""
    emulated = setting.param("emulated_step_s")
    if emulated is not None:
        seconds = float(emulated)
        return Consumer(lambda x, y: time.sleep(seconds))
    vocabulary = max(setting.spec.model.vocab_size, _vocabulary(source))
    length = max(setting.spec.model.context_length, source.length)
    shape = replace(setting.spec.model, vocab_size=vocabulary, context_length=length)
    built = model.build(shape, setting.recipe, seed=setting.spec.seed, device=setting.device)
    step = model.TrainingStep(built, setting.recipe, learning_rate=setting.spec.learning_rate, device=setting.device)
    pinned = isinstance(setting.recipe.loader, Loader) and setting.recipe.loader.pin

    def compute(x: torch.Tensor, y: torch.Tensor) -> object:
        return step(x.to(setting.device, non_blocking=pinned), y.to(setting.device, non_blocking=pinned))

    return Consumer(compute, built)


def _vocabulary(source: LoaderSource) -> int:
    from lmperf.corpus.datasets import TokenData

    return TokenData.open(source.tokens, source.split).vocab_size


@workload("loading_in_step")
def loading_in_step(setting: Setting) -> Prepared:
    """One step = wait for a batch, then compute with it; observes wait_share (cell: emulated_step_s, cache, …)."""
    feed = open_feed(setting)
    consumer = consumer_of(setting, feed.source)
    once, cold = once_of(feed), setting.param("cache", "warm") == "cold"
    seen = Observations()
    if cold:
        feed.make_cold()

    def step() -> None:
        started = time.perf_counter()
        x, y = feed.next()
        arrived = time.perf_counter()
        consumer.compute(x, y)
        if setting.device.startswith("cuda"):
            torch.cuda.synchronize()
        total = time.perf_counter() - started
        seen.add("wait_s", "s", arrived - started)
        seen.add("wait_share", "ratio", (arrived - started) / total)

    return Prepared(
        step=step,
        check=lambda seed: check_loader(setting.recipe, replace(source_of(setting), seed=seed)),
        tokens_per_step=float(feed.source.batch_size * feed.source.length),
        observations=seen,
        once=once,
        close=feed.close,
        model=consumer.model,
        before_block=feed.make_cold if cold else nothing,
    )
