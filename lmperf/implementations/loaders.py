"""Batch loaders: where the tokens come from (a store) and who fetches them (this process or workers)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lmperf.corpus.datasets import Order, TokenData
from lmperf.implementations import small_files
from lmperf.implementations.derived import derived, split_key
from lmperf.recipe import Recipe
from lmperf.records import atomic_write
from lmperf.reference import Batches, LoaderSource

NO_TARGET = -100  # F.cross_entropy leaves such targets out


class Store(Protocol):
    """Tokens of one split, wherever they lie."""

    def windows(self, indices: np.ndarray, length: int) -> np.ndarray:
        """The windows of `length` tokens that start at `indices`: (batch, length), any integer type."""
        ...


class ArrayStore:
    """Tokens in one array (in memory, or mapped from a flat file)."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def windows(self, indices: np.ndarray, length: int) -> np.ndarray:
        """See `Store.windows`."""
        return np.lib.stride_tricks.sliding_window_view(self.tokens, length)[indices]


def all_tokens(data: TokenData) -> np.ndarray:
    """Every token of a split as one array (tokens,), copied only where the split has several shards."""
    tokens = data.tokens
    return tokens if isinstance(tokens, np.ndarray) else np.concatenate(list(tokens))


def flat_file(source: LoaderSource) -> Path:
    """The split's tokens as one headerless binary file, made on first use (outside the clock)."""
    data = TokenData.open(source.tokens, source.split)
    path = derived(source) / f"{split_key(source)}.bin"
    if not path.is_file():
        with atomic_write(path, "wb") as stream:
            all_tokens(data).tofile(stream)
    return path


def open_arrow(source: LoaderSource) -> Store:
    """Memory-mapped Arrow shards: the baseline's store."""
    return TokenData.open(source.tokens, source.split)


def open_flat(source: LoaderSource) -> Store:
    """The flat file, memory-mapped."""
    kind = TokenData.open(source.tokens, source.split).mapped[0].dtype
    return ArrayStore(np.memmap(flat_file(source), dtype=kind, mode="r"))


def open_memory(source: LoaderSource) -> Store:
    """All tokens copied into this process's memory."""
    return ArrayStore(all_tokens(TokenData.open(source.tokens, source.split)).copy())


def open_small_files(source: LoaderSource) -> Store:
    """Thousands of text files, each read and tokenised whenever a window needs it."""
    return small_files.FileStore(small_files.prepare(source), source.tokens / "tokenizer.json")


STORES: dict[str, Callable[[LoaderSource], Store]] = {
    "arrow": open_arrow,
    "flat": open_flat,
    "memory": open_memory,
    "small_files": open_small_files,
}


def prepare(name: str, source: LoaderSource) -> None:
    """Write the files that store `name` reads, once; never inside a worker or the clock."""
    if name == "flat":
        flat_file(source)
    elif name == "small_files":
        small_files.prepare(source)


def as_pair(rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Windows (batch, length + 1) → inputs and targets, int64 (batch, length)."""
    both = np.empty((2, rows.shape[0], rows.shape[1] - 1), dtype=np.int64)
    both[0], both[1] = rows[:, :-1], rows[:, 1:]
    pair = torch.from_numpy(both)
    return pair[0], pair[1]


class PackedSteps(Dataset[tuple[Tensor, Tensor]]):
    """Batch number → (x, y); the store opens when the first batch is read, in the process that reads it."""

    def __init__(self, source: LoaderSource, store: str, read_ahead: int = 1) -> None:
        self.source, self.store_name, self.read_ahead = source, store, read_ahead
        tokens = len(TokenData.open(source.tokens, source.split))
        self.order = Order(tokens, source.length, source.batch_size, source.seed)
        self.batches_per_epoch = max(1, self.order.windows // source.batch_size)
        self._store: Store | None = None
        self._block: dict[int, np.ndarray] = {}

    @property
    def store(self) -> Store:
        """The opened store of this process."""
        if self._store is None:
            self._store = STORES[self.store_name](self.source)
        return self._store

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_block": {}}

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        if self.read_ahead == 1:
            return as_pair(self.store.windows(self.order.batch(step), self.source.length + 1))
        if step not in self._block:
            self._block = self._read_block(step)
        return as_pair(self._block.pop(step))

    def _read_block(self, first: int) -> dict[int, np.ndarray]:
        """The next `read_ahead` batches, their windows fetched in the order in which they lie in the file."""
        starts = np.stack([self.order.batch(first + number) for number in range(self.read_ahead)])
        order = np.argsort(starts, axis=None, kind="stable")
        rows = self.store.windows(starts.ravel()[order], self.source.length + 1)
        back = np.empty_like(rows)
        back[order] = rows
        return dict(enumerate(back.reshape(*starts.shape, -1), first))


class PaddedSteps(Dataset[tuple[Tensor, Tensor]]):
    """Batch number → (x, y), one stretch of one document a row, filled up with end-of-text and `NO_TARGET`.

    No row mixes two documents; documents longer than `length` give several rows.  Each token but the first of a
    row is a target once, so an epoch has the same text as the packed one and more rows.
    """

    def __init__(self, source: LoaderSource) -> None:
        self.source = source
        self.data = TokenData.open(source.tokens, source.split)
        self.starts, self.sizes = document_rows(all_tokens(self.data), self.data.end_of_text, source.length)
        self.order = Order(len(self.starts) + 1, 1, source.batch_size, source.seed)
        self.batches_per_epoch = max(1, len(self.starts) // source.batch_size)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        rows = self.order.batch(step)
        x = np.full((len(rows), self.source.length), self.data.end_of_text, dtype=np.int64)
        y = np.full_like(x, NO_TARGET)
        for number, row in enumerate(rows.tolist()):
            start, size = int(self.starts[row]), int(self.sizes[row])
            window = self.data.windows(np.array([start]), size)[0]
            x[number, : size - 1], y[number, : size - 1] = window[:-1], window[1:]
        return torch.from_numpy(x), torch.from_numpy(y)


def document_rows(tokens: np.ndarray, end_of_text: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """First token and size (2 … length + 1) of every padded row; rows of one document share one token at the seam."""
    ends = np.flatnonzero(tokens == end_of_text) + 1
    firsts = np.concatenate([[0], ends])
    stops = np.append(ends, len(tokens))
    starts, sizes = [], []
    for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True):
        for start in range(first, stop - 1, length):
            starts.append(start)
            sizes.append(min(length + 1, stop - start))
    return np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64)


class Steps:
    """A sampler that gives the batch numbers from `first` to `last` in order."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last))

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Loader:
    """A loader slot: `loader(source)` gives endless (x, y) int64 batches (batch, length), resuming at `source.start`.

    store: a name in `STORES`, or "padded".  workers: processes that fetch (0: this one).  prefetch: batches each
    worker holds ready (PyTorch's default is 2).  persistent: workers survive the end of an epoch.  pin: page-locked
    host memory.  read_ahead: batches whose windows are fetched together, in file order.
    """

    store: str = "arrow"
    workers: int = 0
    prefetch: int | None = None
    persistent: bool = False
    pin: bool = False
    read_ahead: int = 1

    def __call__(self, source: LoaderSource) -> Batches:
        if self.pin and not torch.cuda.is_available():
            raise NotImplementedError("pin_memory needs a CUDA device: page-locked memory has no use without one")
        prepare(self.store, source)
        steps = PaddedSteps(source) if self.store == "padded" else PackedSteps(source, self.store, self.read_ahead)
        if self.workers == 0 and not self.pin:
            return (steps[number] for number in itertools.count(source.start))
        return self._with_workers(steps, source.start)

    def _with_workers(self, steps: PackedSteps | PaddedSteps, start: int) -> Batches:
        sampler = Steps(0, 0)
        with warnings.catch_warnings():  # more workers than cores is what workers_4 may be about
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
                steps, batch_size=None, sampler=sampler, num_workers=self.workers, pin_memory=self.pin,
                prefetch_factor=self.prefetch, persistent_workers=self.persistent,
            )  # fmt: skip
        while True:  # one pass is one epoch: workers that do not persist are started again for each
            size = steps.batches_per_epoch
            sampler.first, sampler.last = start, (start // size + 1) * size
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                epoch = iter(loader)
            yield from epoch
            start = sampler.last


def with_loader(recipe: Recipe, **changes: Any) -> Recipe:
    """`recipe` with these fields of its loader changed; starts from the plain Arrow loader."""
    current = recipe.loader if isinstance(recipe.loader, Loader) else Loader()
    return recipe.replace(loader=replace(current, **changes))
