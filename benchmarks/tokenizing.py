"""Tokens a second of the tokenize stage against the bare library and against `datasets.map`, cold, in one run.

The text is the Python source that ships with the interpreter (one document a file), or `--shards FOLDER`. Every arm
runs in a fresh process (the libraries cache words), the arms take turns, imports are outside the clock, the shards'
pages are dropped before each; every library uses all cores, as it does by itself. All arms use one tokenizer, trained
beforehand; the stage is timed from the text shards on disk to the finished token shards with their hashes, the bare
libraries only from a list of strings to ids.
The stage first checks the accelerator against HF `tokenizers`, a fixed cost; the accelerator is therefore compared with
its own `encode_batch` on a large corpus (the same files several times, a number put before each).
Wanted: stage ≥ 0.8 of `encode_batch` of the library in use; ≥ 1.5 of `datasets.map` with the default, ≥ 8 with the
accelerator. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ARMS = {  # name → library, whether on the large corpus
    "encode_batch (tokenizers)": ("tokenizers", False),
    "stage (tokenizers)": ("tokenizers", False),
    "stage (fastokens)": ("fastokens", False),
    "datasets.map (tokenizers)": ("datasets", False),
    "encode_batch (fastokens), large": ("fastokens", True),
    "stage (fastokens), large": ("fastokens", True),
}
WANTED = (
    ("stage (tokenizers)", "encode_batch (tokenizers)", 0.8),
    ("stage (fastokens), large", "encode_batch (fastokens), large", 0.8),
    ("stage (tokenizers)", "datasets.map (tokenizers)", 1.5),
    ("stage (fastokens)", "datasets.map (tokenizers)", 8.0),
)


def write_text_shards(folder: Path, limit: int, copies: int = 1) -> None:
    """Up to `limit` bytes of standard-library source, `copies` times, as one text shard with its manifest."""
    import hashlib

    import pyarrow as pa

    from lmperf.records import file_sha256, write_json

    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if size >= limit:
            break
        try:
            texts.append(path.read_bytes().decode())
        except UnicodeDecodeError:
            continue
        size += len(texts[-1].encode())
    texts = [f"# {number}\n{text}" for number in range(copies) for text in texts]
    folder.mkdir()
    names = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts]
    columns = {
        "text": pa.array(texts, pa.large_string()),
        "document": pa.array(names),
        "source": pa.array(["stdlib"] * len(texts)),
        "domain": pa.array(["english"] * len(texts)),
    }
    table = pa.table(columns)
    path = folder / "stdlib-0.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=256)
    write_json(folder / "manifest.json", {"schema": 1, "shards": [{"file": path.name, "sha256": file_sha256(path)}]})


def read_texts(shards: Path) -> list[str]:
    """All texts of the shards as Python strings."""
    import pyarrow as pa

    from lmperf.corpus.shards import shard_paths

    tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in shard_paths(shards, verify=False)]
    return [text for table in tables for text in table.column("text").to_pylist()]


def run_stage(shards: Path, work: Path, engine: str) -> tuple[float, int]:
    """Seconds and tokens of the whole stage with a given tokenizer."""
    from lmperf.corpus.tokenizer import tokenize

    accelerator = "none"
    if engine == "fastokens":
        import fastokens  # noqa: F401 - imports are outside the clock

        accelerator = "fastokens"
    begin = time.perf_counter()
    manifest = tokenize(
        shards, work / "out", tokenizer_file=str(work / "tokenizer.json"), accelerator=accelerator, block=257
    )
    seconds = time.perf_counter() - begin
    return seconds, sum(entry["tokens"] for entry in manifest["splits"].values())


def run_encode_batch(shards: Path, work: Path, engine: str) -> tuple[float, int]:
    """Seconds and tokens of one bare `encode_batch` over all texts, which are in memory before the clock starts."""
    texts = read_texts(shards)
    if engine == "fastokens":
        import fastokens

        tokenizer = fastokens.Tokenizer.from_file(str(work / "tokenizer.json"))
        begin = time.perf_counter()
        encodings = tokenizer.encode_batch(texts, split_special_tokens=True)
    else:
        from lmperf.corpus.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(work / "tokenizer.json")
        begin = time.perf_counter()
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    seconds = time.perf_counter() - begin
    return seconds, sum(len(encoding) for encoding in encodings)


def run_datasets_map(shards: Path, work: Path, engine: str) -> tuple[float, int]:
    """Seconds and tokens of `datasets.map`, batched, with HF `tokenizers`, writing its own Arrow cache."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf")}
    import datasets

    from lmperf.corpus.shards import shard_paths
    from lmperf.corpus.tokenizer import load_tokenizer

    datasets.disable_progress_bars()
    files = [str(path) for path in shard_paths(shards, verify=False)]
    tokenizer = load_tokenizer(work / "tokenizer.json")
    begin = time.perf_counter()
    source = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(work / "cache"))
    mapped = source.map(
        lambda batch: {"ids": [e.ids for e in tokenizer.encode_batch(batch["text"], add_special_tokens=False)]},
        batched=True,
        remove_columns=source.column_names,
    )
    seconds = time.perf_counter() - begin
    return seconds, sum(len(chunk.values) for chunk in mapped.data.column("ids").chunks)


RUNNERS = {"stage": run_stage, "encode_batch": run_encode_batch, "datasets.map": run_datasets_map}


def drop_pages(folder: Path) -> None:
    """Ask the kernel to forget the cached pages of the text shards."""
    for path in folder.glob("*.arrow"):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one_arm(name: str, shards: Path, tokenizer: Path) -> None:
    """What the fresh process of an arm does: print its seconds and tokens as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        seconds, tokens = RUNNERS[name.split()[0]](shards, work, ARMS[name][0])
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


def measure(name: str, shards: Path, tokenizer: Path) -> dict[str, float]:
    """Run one arm in a fresh process with cold pages."""
    drop_pages(shards)
    command = [sys.executable, __file__, "--arm", name, "--shards", str(shards), "--tokenizer", str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(shards: Path, large: Path, tokenizer: Path, rounds: int) -> dict[str, float]:
    """Median tokens/s of every installed arm, the arms taking turns."""
    installed = {name: large if big else shards for name, (lib, big) in ARMS.items() if importlib.util.find_spec(lib)}
    for name in ARMS.keys() - installed.keys():
        print(f"{name:32s} not installed: {ARMS[name][0]}")
    rates: dict[str, list[float]] = {name: [] for name in installed}
    for number in range(rounds):
        order = list(installed)[number % len(installed) :] + list(installed)[: number % len(installed)]
        for name in order:
            sample = measure(name, installed[name], tokenizer)
            rates[name].append(sample["tokens"] / sample["seconds"])
    return {name: statistics.median(values) for name, values in rates.items()}


def report(rates: dict[str, float]) -> None:
    """Print the rates, the ratios and whether each is what is wanted; last a line of JSON."""
    for name, rate in rates.items():
        print(f"{name:32s} {rate:14,.0f} tokens/s")
    ratios = {}
    for mine, peer, wanted in WANTED:
        if mine in rates and peer in rates:
            ratio = rates[mine] / rates[peer]
            ratios[f"{mine} / {peer}"] = {"ratio": ratio, "wanted": wanted, "met": ratio >= wanted}
            print(f"{mine} / {peer}: {ratio:.2f} (wanted {wanted}: {'met' if ratio >= wanted else 'NOT met'})")
    print(json.dumps({"tokens_per_s": rates, "ratios": ratios}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 MB (large 16) and one round, not 16 (128) and three")
    parser.add_argument("--shards", type=Path, help="text shards of one's own (a folder with manifest.json)")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    if options.arm:
        one_arm(options.arm, options.shards, options.tokenizer)
        return
    from lmperf.corpus.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        shards, large = options.shards or Path(folder) / "shards", options.shards or Path(folder) / "large"
        if not options.shards:
            size = (4 if options.quick else 16) << 20
            write_text_shards(shards, size)
            write_text_shards(large, size, copies=4 if options.quick else 8)
        tokenizer = Path(folder) / "tokenizer.json"
        train_tokenizer(iter([text[:10_000] for text in read_texts(shards)[:300]]), 1024).save(str(tokenizer))
        report(compare(shards, large, tokenizer, rounds=1 if options.quick else 3))


if __name__ == "__main__":
    main()
