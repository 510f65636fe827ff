"""Ingestion: speed on many small files against plain Python reading, and peak resident memory on one large source.

`python benchmarks/ingest.py [--quick] [--folder F]` makes its texts in a temporary folder and prints, last, JSON:
  small_files.ratio      merging 40,000 small files, as a share of the speed of reading the same files with plain Python
                         in the same run (walk, sort, open, read as UTF-8; median of alternating rounds); wanted >= 0.5
  large_source.peak_mib  peak resident memory (VmHWM of a fresh process) while a 3 GB source of mixed sizes with one
                         500 MB line is merged; wanted < 600
--quick makes both ten times smaller; its ratio is still a ratio, its peak says little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MIB = 1 << 20
WORDS = "the of and a to in is it you that he was for on are with as his they be at one have this from or had".split()


def main() -> int:
    """Run both measurements; exit 1 when one misses what is wanted of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten times smaller")
    parser.add_argument("--folder", type=Path, help="where the texts are made (default: a temporary folder)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(Path(arguments.child))
    scale = 10 if arguments.quick else 1
    with tempfile.TemporaryDirectory(prefix="lmperf-ingest-", dir=arguments.folder) as name:
        small = small_files(Path(name) / "small", 40_000 // scale, rounds=5)
        large = large_source(Path(name) / "large", 3000 * MIB // scale, 500 * MIB // scale)
    print(json.dumps({"quick": arguments.quick, "small_files": small, "large_source": large}))
    return 0 if small["ratio"] >= 0.5 and large["peak_mib"] < 600 else 1


def small_files(folder: Path, count: int, rounds: int) -> dict[str, float]:
    """Times of reading and of merging `count` files, in alternation."""
    size = make_small(folder / "text", count)
    prepare(folder)
    read_plainly(folder / "text")  # both find the files in the page cache
    plain, merged = [], []
    for _ in range(rounds):
        plain.append(timed(lambda: read_plainly(folder / "text")))
        merged.append(timed(lambda: merge(folder)))
    plain_s, merged_s = statistics.median(plain), statistics.median(merged)
    ratio = plain_s / merged_s
    print(f"{count} files, {size / MIB:.0f} MiB: plain {plain_s:.2f} s, merged {merged_s:.2f} s, ratio {ratio:.2f}")
    return {"files": count, "plain_s": plain_s, "merged_s": merged_s, "ratio": ratio}


def large_source(folder: Path, total: int, line: int) -> dict[str, float]:
    """Peak resident memory of a fresh process that merges a source of `total` bytes with one line of `line` bytes."""
    make_large(folder / "text", total, line)
    prepare(folder)
    answer = subprocess.run(
        [sys.executable, __file__, "--child", str(folder)], check=True, capture_output=True, text=True
    )
    result = json.loads(answer.stdout)
    print(f"{total / MIB:.0f} MiB with a line of {line / MIB:.0f} MiB: peak {result['peak_mib']:.0f} MiB resident")
    return result


def child(folder: Path) -> int:
    """In a process of its own: merge, and report the peak."""
    seconds = timed(lambda: merge(folder))
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"peak_mib": peak / 1024, "seconds": seconds}))
    return 0


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_plainly(folder: Path) -> int:
    """What a script would do: walk, sort, open, read."""
    paths = sorted(os.path.join(directory, file) for directory, _, files in os.walk(folder) for file in files)
    characters = 0
    for path in paths:
        with open(path, encoding="utf-8") as stream:
            characters += len(stream.read())
    return characters


def prepare(folder: Path) -> None:
    """The manifest that fetch-corpus would write."""
    from lmperf.corpus.sources import fetch_corpus

    fetch_corpus(sources(folder), folder / "raw")


def sources(folder: Path) -> list[dict[str, str]]:
    """The one source of a measurement."""
    return [{"name": "texts", "kind": "files", "domain": "english", "path": str(folder / "text")}]


def merge(folder: Path) -> None:
    """Ingest from nothing, so that no shard is taken over."""
    from lmperf.corpus.shards import ingest

    with tempfile.TemporaryDirectory(dir=folder) as out:
        ingest(sources(folder), folder / "raw", Path(out))


def make_small(folder: Path, count: int) -> int:
    """`count` distinct files of 200 to 4,000 bytes in folders of 200; returns their bytes."""
    chance, total = random.Random(0), 0
    for number in range(count):
        if number % 200 == 0:
            directory = folder / f"{number // 200:04d}"
            directory.mkdir(parents=True)
        text = f"{number} " + " ".join(chance.choices(WORDS, k=chance.randint(50, 1000)))
        total += (directory / f"{number}.txt").write_bytes(text.encode())
    return total


def make_large(folder: Path, total: int, line: int) -> None:
    """A JSON-lines file with the long line in its middle, a text file of a tenth, and mixed files for the rest."""
    folder.mkdir(parents=True)
    chance = random.Random(1)
    with open(folder / "lines.jsonl", "wb") as stream:
        stream.writelines(records(chance, 20_000, 0))
        stream.write(b'{"id": 1, "text": "')
        stream.writelines(blocks(line, 1))
        stream.write(b'"}\n')
        stream.writelines(records(chance, 20_000, 20_000))
    left, number = total - line, 0
    while left > 0:
        size = min(left, int(10 ** chance.uniform(3, 8.2)))
        with open(folder / f"{number:05d}.txt", "wb") as stream:
            stream.writelines(blocks(size, number + 2))
        left, number = left - size, number + 1


def records(chance: random.Random, count: int, first: int) -> Iterator[bytes]:
    """JSON lines of about 1 kB."""
    for number in range(first, first + count):
        yield json.dumps({"text": f"{number} " + " ".join(chance.choices(WORDS, k=200))}).encode() + b"\n"


def blocks(size: int, seed: int) -> Iterator[bytes]:
    """`size` bytes of text without a line feed, different for each seed."""
    block = " ".join(random.Random(seed).choices(WORDS, k=50_000)).encode()
    while size > 0:
        yield block[:size]
        size -= len(block)


if __name__ == "__main__":
    sys.exit(main())
