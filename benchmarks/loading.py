"""Batches a second of `lmperf.corpus.datasets.batches` against three other ways to read the same tokens, in one run.

nanoGPT's way: random slices of one `np.memmap`, each converted, then stacked (the map is opened once here, which is
kinder to it than its own loop). torch's DataLoader: a map-style dataset of windows over the same file and order,
without workers and with two. HF `datasets` in torch format: a table of windows, read by lists of rows. All arms are
built before the clock, checked (targets are the inputs shifted by one), and take turns; the median round counts.
Wanted: at least 1.0 of the best. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lmperf.corpus.datasets import Order, TokenData, batches
from lmperf.corpus.token_shards import SplitWriter
from lmperf.records import write_json

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
SHAPES = {"8 x 256": (8, 256), "32 x 1024": (32, 1024)}  # batch x length


def write_tokens(folder: Path, count: int) -> None:
    """`count` random tokens as one Arrow shard with its manifest, and as the flat file that nanoGPT reads."""
    tokens = np.random.default_rng(0).integers(0, 50_000, count, dtype=np.uint16)
    tokens.tofile(folder / "train.bin")
    writer = SplitWriter(folder, "train", tokens.dtype, {"tokenizer_sha256": "none"})
    writer.add(tokens, ends=np.array([count - 1]), size=count)
    manifest = {"schema": 1, "vocab_size": 50_000, "end_of_text": 0, "tokenizer_sha256": "none"}
    write_json(folder / "manifest.json", {**manifest, "splits": {"train": writer.close()}})


def ours(folder: Path, batch: int, length: int) -> Batches:
    """lmperf's own batches."""
    data = TokenData.open(folder, "train")
    return batches(data, Order(len(data), length, batch, seed=1))


def memmap_slices(folder: Path, batch: int, length: int) -> Batches:
    """Random slices of a `np.memmap`, converted one by one and stacked."""
    data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
    while True:
        starts = torch.randint(len(data) - length, (batch,)).tolist()
        x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in starts])
        yield x, y


class WindowDataset(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Window `i` of the split, as inputs and targets."""

    def __init__(self, data: TokenData, length: int) -> None:
        self.data, self.length = data, length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        row = torch.from_numpy(self.data.tokens[start : start + self.length + 1].astype(np.int64))
        return row[:-1], row[1:]


def data_loader(folder: Path, batch: int, length: int, workers: int) -> Batches:
    """torch's DataLoader over the same windows, shuffled."""
    data = TokenData.open(folder, "train")
    dataset = WindowDataset(data, length)
    options: dict[str, Any] = {"persistent_workers": True} if workers else {}
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=batch, shuffle=True, drop_last=True, num_workers=workers, **options
    )
    while True:
        yield from loader


def hf_datasets(folder: Path, batch: int, length: int) -> Batches:
    """HF `datasets` in torch format: rows are windows, read from an Arrow file that is memory-mapped."""
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    tokens = np.fromfile(folder / "train.bin", dtype=np.uint16)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
    values = pa.array(windows.reshape(-1), pa.uint16())
    path = folder / f"windows-{length}.arrow"
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(values, length + 1)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = datasets.Dataset.from_file(str(path)).with_format("torch", dtype=torch.int64)
    for step in itertools.count():
        per_epoch = len(data) // batch
        if step % per_epoch == 0:
            order = torch.randperm(len(data)).tolist()
        first = (step % per_epoch) * batch
        rows = data[order[first : first + batch]]["tokens"]
        yield rows[:, :-1], rows[:, 1:]


ARMS: dict[str, Callable[[Path, int, int], Batches]] = {
    "lmperf": ours,
    "np.memmap slices": memmap_slices,
    "DataLoader, 0 workers": lambda *args: data_loader(*args, workers=0),
    "DataLoader, 2 workers": lambda *args: data_loader(*args, workers=2),
    "datasets, torch format": hf_datasets,
}


def check(name: str, stream: Batches, batch: int, length: int) -> None:
    """Refuse an arm whose targets are not its inputs shifted by one, or of the wrong type or shape."""
    x, y = next(stream)
    if x.shape != (batch, length) or y.dtype != torch.int64 or not torch.equal(x[:, 1:], y[:, :-1]):
        raise RuntimeError(f"{name}: wrong batch {tuple(x.shape)} {y.dtype}")


def rate(stream: Batches, seconds: float) -> float:
    """Batches a second over at least `seconds`."""
    begin, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < seconds:
        for _ in range(10):
            next(stream)
        count += 10
    return count / spent


def compare(folder: Path, batch: int, length: int, rounds: int, seconds: float) -> dict[str, float]:
    """Median batches/s of every installed arm, the arms taking turns."""
    streams = {}
    for name, make in ARMS.items():
        if name.startswith("datasets") and importlib.util.find_spec("datasets") is None:
            print(f"  {name:24s} not installed: datasets")
            continue
        streams[name] = make(folder, batch, length)
        check(name, streams[name], batch, length)
    rates: dict[str, list[float]] = {name: [] for name in streams}
    names = list(streams)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rates[name].append(rate(streams[name], seconds))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds of 0.2 s an arm instead of 9 of 0.5 s")
    quick = parser.parse_args().quick
    results = {}
    with tempfile.TemporaryDirectory() as name:
        write_tokens(Path(name), 8_000_000 if quick else 30_000_000)
        for label, (batch, length) in SHAPES.items():
            print(f"batch x length = {label}")
            rates = compare(Path(name), batch, length, rounds=3 if quick else 9, seconds=0.2 if quick else 0.5)
            for arm, value in rates.items():
                print(f"  {arm:24s} {value:12,.0f} batches/s")
            ratio = rates["lmperf"] / max(value for arm, value in rates.items() if arm != "lmperf")
            print(f"  lmperf / best other: {ratio:.2f} (wanted 1.0: {'met' if ratio >= 1 else 'NOT met'})")
            results[label] = {"batches_per_s": rates, "ratio_to_best": ratio, "wanted": 1.0, "met": ratio >= 1}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
