"""Text shards written by hand, for tests of what reads them."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from lmperf.records import file_sha256, write_json

WORDS = "the of and to in that is was he for it with as his on be at by had not are but from or have an they".split()


def prose(number: int, words: int = 120) -> str:
    """A text of `words` words that differs from every other `number`'s."""
    state = number * 2654435761 + 1
    chosen = []
    for _ in range(words):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        chosen.append(WORDS[(state >> 33) % len(WORDS)] + (str(number) if (state >> 40) % 7 == 0 else ""))
    return f"Text {number}: " + " ".join(chosen) + ".\n"


def write_shards(folder: Path, domains: Mapping[str, Sequence[str]], *, files: int = 1, rows: int = 64) -> Path:
    """Write `domains` (name → texts) as `files` shards each, in record batches of `rows`, with their manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema(
        [("text", pa.large_string()), ("document", pa.string()), ("source", pa.string()), ("domain", pa.string())]
    )
    entries = []
    for domain, texts in domains.items():
        for number in range(files):
            path = folder / f"{domain.replace('/', '_')}-{number}.arrow"
            part = texts[number::files]
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for first in range(0, len(part), rows):
                    chunk = part[first : first + rows]
                    names = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in chunk]
                    columns = [pa.array(chunk, pa.large_string()), names, [domain] * len(chunk), [domain] * len(chunk)]
                    writer.write_batch(pa.record_batch([pa.array(c) for c in columns], schema=schema))
            size = sum(len(text.encode()) for text in part)
            entry = {"file": path.name, "sha256": file_sha256(path), "documents": len(part), "bytes": size}
            entries.append({**entry, "source": domain})
    write_json(folder / "manifest.json", {"schema": 1, "sources": [], "shards": entries})
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def run_and_kill(shards: str, out: str, expected: str, times: int) -> None:
    """Start the tokenize stage `times` times and kill each at a random moment; prints how many had not yet finished.

    Every attempt is a fork of this process, which has imported everything and started no thread. After each kill,
    either there is no manifest or everything is as in `expected`.
    """
    chance, killed, folder, whole = random.Random(7), 0, Path(out), tree(Path(expected))
    undisturbed = _begin(shards, folder.with_name("undisturbed"))
    began = time.monotonic()
    os.waitpid(undisturbed, 0)
    span = time.monotonic() - began
    for _ in range(times):
        child = _begin(shards, folder)
        time.sleep(chance.random() * span)
        os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        if (folder / "manifest.json").exists() and tree(folder) != whole:
            raise AssertionError("a manifest stands over files that are not its own")
    sys.stdout.write(f"{killed}\n")


def _begin(shards: str, folder: Path) -> int:
    """The process id of a fork that runs the tokenize stage, as soon as it has begun to write."""
    from lmperf.corpus.tokenizer import tokenize

    left = set(folder.glob(".building-*"))
    if not (child := os.fork()):
        tokenize(Path(shards), folder, vocab_size=400, block=33, accelerator="none")
        os._exit(0)
    began = time.monotonic()
    while not set(folder.glob(".building-*")) - left and time.monotonic() - began < 10:
        time.sleep(0.001)
    return child
