"""Reading token shards: memory-mapped arrays, an epoch order that needs no state, and batches for training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa

from lmperf.records import InputError, file_sha256, read_json

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shard:
    """One token shard: `first` is the position of its first token in the split."""

    path: Path
    first: int
    tokens: int
    tokenizer_sha256: str

    def load(self) -> np.ndarray:
        """The shard's tokens, (tokens,), as a view of the mapped file; nothing is read yet."""
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
            column = reader.get_batch(0).column(0)
        except FileNotFoundError:
            raise InputError(f"{self.path}: missing; run `lmperf tokenize` again") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{self.path}: damaged ({error}); run `lmperf tokenize` again") from None
        made_by = (reader.schema.metadata or {}).get(b"tokenizer_sha256", b"").decode()
        if len(column) != self.tokens or made_by != self.tokenizer_sha256:
            raise InputError(f"{self.path}: does not belong to this manifest; run `lmperf tokenize` again")
        # Not `to_numpy`: that imports pandas, which costs every process of a measurement half a second.
        values = np.frombuffer(column.buffers()[1], dtype=column.type.to_pandas_dtype())
        return values[column.offset : column.offset + len(column)]


class MappedShards(Sequence[np.ndarray]):
    """The shards of one split as arrays, each mapped when it is first asked for; maps are not pickled."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.shards)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        if number not in self._maps:
            self._maps[number] = self.shards[number].load()
        return self._maps[number]

    def __getstate__(self) -> dict[str, Any]:
        return {"shards": self.shards, "_maps": {}}


@dataclass(frozen=True)
class TokenData:
    """The tokens of one split; cheap to pickle and to fork, since every process maps the files itself when it reads."""

    split: str
    vocab_size: int
    end_of_text: int
    size_tokens: int
    size_bytes: int  # UTF-8 bytes of the text
    mapped: MappedShards = field(repr=False)

    @classmethod
    def open(cls, tokens: Path | str, split: str, *, verify: bool = False) -> TokenData:
        """Open `split` of the folder `tokens`; `verify` checks every byte against the manifest's SHA-256."""
        folder = Path(tokens)
        manifest = read_json(folder / "manifest.json")
        if split not in manifest["splits"]:
            raise InputError(f"{folder}: no split {split!r}; it has {', '.join(sorted(manifest['splits']))}")
        entry = manifest["splits"][split]
        shards, first = [], 0
        for shard in entry["shards"]:
            shards.append(Shard(folder / shard["file"], first, shard["tokens"], manifest["tokenizer_sha256"]))
            if verify:
                _verify(shards[-1].path, shard["sha256"])
            first += shard["tokens"]
        size = {"vocab_size": manifest["vocab_size"], "end_of_text": manifest["end_of_text"]}
        return cls(split, **size, size_tokens=first, size_bytes=entry["bytes"], mapped=MappedShards(shards))

    @property
    def tokens(self) -> np.ndarray | Sequence[np.ndarray]:
        """The tokens, (tokens,), uint16 or uint32, as a zero-copy view of the file; a list of views for many shards."""
        return self.mapped[0] if len(self.mapped) == 1 else self.mapped

    def __len__(self) -> int:
        return self.size_tokens

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes a token stands for: a loss in nats a token / ln 2 / this = bits per byte."""
        return self.size_bytes / self.size_tokens

    def read_batch(self, indices: np.ndarray, length: int) -> np.ndarray:
        """The windows of `length` tokens that start at `indices`, as int64 (batch, length)."""
        return self.windows(indices, length).astype(np.int64)

    def windows(self, indices: np.ndarray, length: int) -> np.ndarray:
        """As `read_batch`, in the type of the file: one gather, the only copy between the page cache and the batch."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and (indices.min() < 0 or indices.max() + length > self.size_tokens):
            wrong = int(indices.min() if indices.min() < 0 else indices.max())
            raise IndexError(
                f"window [{wrong}, {wrong + length}) is outside the {self.size_tokens} tokens of {self.split}"
            )
        if len(self.mapped) == 1 and indices.size:
            return _sliding(self.mapped[0], length)[indices]
        out = np.empty((len(indices), length), dtype=self.mapped[0].dtype)
        for row, start in enumerate(indices.tolist()):
            self._copy(start, out[row])
        return out

    def _copy(self, start: int, out: np.ndarray) -> None:
        for number, shard in enumerate(self.mapped.shards):
            inside = start - shard.first
            if not len(out) or inside >= shard.tokens:
                continue
            part = self.mapped[number][inside : inside + len(out)]
            out[: len(part)] = part
            start, out = start + len(part), out[len(part) :]


def _verify(path: Path, expected: str) -> None:
    if not path.is_file():
        raise InputError(f"{path}: missing; run `lmperf tokenize` again")
    if file_sha256(path) != expected:
        raise InputError(f"{path}: damaged (its sha256 is not the manifest's); run `lmperf tokenize` again")


def _sliding(tokens: np.ndarray, length: int) -> np.ndarray:
    """All windows of `length` tokens as an overlapping view, (tokens - length + 1, length)."""
    step = tokens.strides[0]
    shape = (len(tokens) - length + 1, length)
    return np.lib.stride_tricks.as_strided(tokens, shape, (step, step), writeable=False)


@dataclass(frozen=True)
class Order:
    """The order in which windows of `length` + 1 tokens are read: every window once an epoch, each epoch shuffled anew.

    Windows start `length` tokens apart, so that each token is a target once. The order is a pure function of
    (`seed`, step): resuming at any step costs nothing and needs no saved state. A batch at the end of an epoch is
    filled from the next one.
    """

    tokens: int
    length: int
    batch_size: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.length < 1 or self.batch_size < 1:
            raise ValueError(f"length {self.length}, batch_size {self.batch_size}: both must be positive")
        if self.tokens < self.length + 1:
            missing = self.length + 1 - self.tokens
            raise InputError(f"{self.tokens} tokens are {missing} fewer than one window of {self.length + 1}")

    @property
    def windows(self) -> int:
        """Windows in an epoch."""
        return (self.tokens - 1) // self.length

    def batch(self, step: int) -> np.ndarray:
        """The first token of each window of batch `step` (counted over all epochs): int64 (batch_size,)."""
        if step < 0:
            raise IndexError(f"step {step}: steps are counted from 0")
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        epochs, places = np.divmod(positions, self.windows)
        if not self.shuffle:
            return places * self.length
        if epochs[0] == epochs[-1]:
            return _permutation(self.windows, self.seed, int(epochs[0]))[places] * self.length
        chosen = [
            _permutation(self.windows, self.seed, epoch)[place]
            for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True)
        ]
        return np.array(chosen, dtype=np.int64) * self.length


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count), by sorting a hash: numpy's own shuffles may change between versions."""
    offset = np.uint64((seed * 0x9E3779B97F4A7C15 + epoch * 0xD1342543DE82EF95) % (1 << 64))
    order = np.argsort(_mixed(np.arange(count, dtype=np.uint64) + _mixed(offset[None])), kind="stable")
    order.flags.writeable = False
    return order


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al. 2014), element by element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def batches(data: TokenData, order: Order, *, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches from step `start` on: inputs and targets, each a contiguous int64 tensor (batch, length)."""
    import torch  # here, so that reading tokens needs no torch

    step = start
    while True:
        rows = data.windows(order.batch(step), order.length + 1)
        both = np.empty((2, order.batch_size, order.length), dtype=np.int64)
        both[0] = rows[:, :-1]
        both[1] = rows[:, 1:]
        pair = torch.from_numpy(both)  # shares the memory
        yield pair[0], pair[1]
        step += 1
