"""Shards: walking, deduplication, re-use, damage, kills, full disks, and other programs that read them."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from ingest_helpers import run, run_folder, source, write_files

from lmperf.corpus import merging, writing
from lmperf.corpus.deduplication import Seen
from lmperf.corpus.pieces import LOOK_BACK, PIECE, pieces
from lmperf.corpus.shards import ingest, iter_texts, read_shards
from lmperf.corpus.sources import fetch_corpus
from lmperf.corpus.walking import walk
from lmperf.records import CheckFailed, InputError

PROSE = b"It was a bright day.\n"


def numbered(count: int, size: int = 300) -> dict[str, bytes]:
    """`count` different files in a few folders."""
    return {f"{n % 7}/{n:04d}.txt": f"document {n} {'word ' * (size // 5)}".encode() for n in range(count)}


def contents(out: Path) -> dict[str, bytes]:
    """Name and bytes of every shard in `out`."""
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.arrow"))}


# --- walking

NAMES = [
    "a b 文[1]'.txt",
    "new\nline.txt",
    '"quoted" $(touch x) `y`;*.txt',
    "{braces}/[x]/?.txt",
    "-rf",
    b"latin\xe9.txt",
]


def test_any_file_name_is_read_and_none_is_a_pattern(tmp_path: Path) -> None:
    files = {name: b"document %d" % number for number, name in enumerate(NAMES)}
    got = run(tmp_path / "a b [c]*", files)
    assert sorted(got.texts) == sorted(content.decode() for content in files.values())


def test_odd_names_can_be_reported(tmp_path: Path) -> None:
    got = run(tmp_path, {name: b"\x80\x81" + bytes([number]) for number, name in enumerate(NAMES)} | {"ok": PROSE})
    shown = {line["file"] for line in got.quarantine}
    assert len(shown) == len(NAMES)
    assert {"latin\\xe9.txt", "new\\nline.txt", "a b 文[1]'.txt"} <= shown


def test_links_loops_and_things_that_are_no_files(tmp_path: Path) -> None:
    root = write_files(tmp_path / "text", {"real/a.txt": b"one", ".git/x.txt": b"no", "b/__pycache__/y": b"no"})
    write_files(tmp_path, {"outside/c.txt": b"two", "elsewhere.txt": b"three"})
    (root / "0-early-link").symlink_to(root / "real")
    (root / "real/loop").symlink_to(root)
    (root / "linked").symlink_to(tmp_path / "outside")
    (root / "file-link").symlink_to(tmp_path / "elsewhere.txt")
    (root / "broken").symlink_to(tmp_path / "nowhere")
    (root / "self").symlink_to(root / "self")
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(root / "socket"))
        got = run_folder(tmp_path, root)
    assert sorted(got.texts) == ["one", "three", "two"]
    assert {line["file"] for line in got.quarantine} == {"broken", "self", "fifo", "socket"}
    assert got.source["skipped"] == {"folder already read (link or loop)": 2, "named .git": 1, "named __pycache__": 1}


def test_the_walk_is_sorted_and_each_file_comes_once(tmp_path: Path) -> None:
    write_files(tmp_path, numbered(50))
    names = [entry.name for entry in walk(tmp_path).files]
    assert names == sorted(names)
    assert len(set(names)) == 50


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/usr/bin/setpriv"), reason="root reads everything")
def test_unreadable_files_and_folders_are_reported(tmp_path: Path) -> None:
    root = write_files(tmp_path / "text", {"a.txt": PROSE, "secret.txt": b"x", "closed/b.txt": b"y"})
    for name in ("secret.txt", "closed"):
        (root / name).chmod(0)
    script = "import sys; from lmperf.corpus.walking import walk; print(walk(sys.argv[1]).problems)"
    command = [sys.executable, "-c", script, str(root)]
    if os.geteuid() == 0:
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert "closed" in answer.stdout
    assert "permission denied" in answer.stdout


def test_a_file_that_cannot_be_opened_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: bytes, *rest: int, **options: int) -> int:
        if str(path).endswith("bad.txt'"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *rest, **options)

    monkeypatch.setattr(merging.os, "open", refuse)
    got = run(tmp_path, {"bad.txt": b"x", "good.txt": PROSE})
    assert [(line["file"], line["reason"], line["bytes"]) for line in got.quarantine] == [
        ("bad.txt", "permission denied", 1)
    ]


def test_a_file_that_changes_during_the_run_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_files(tmp_path / "text", {"a.txt": b"first", "b.txt": b"old"})
    sources = [source(root)]
    fetch_corpus(sources, tmp_path / "raw")
    write = merging.ShardWriter.add

    def change(self: merging.ShardWriter, data: bytes, digest: bytes) -> None:
        (root / "b.txt").write_bytes(b"new and longer")
        write(self, data, digest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging.ShardWriter, "add", change)
        manifest = ingest(sources, tmp_path / "raw", tmp_path / "shards")
    assert list(iter_texts(tmp_path / "shards")) == ["first", "new and longer"]
    assert manifest["sources"][0]["changed"] == ["b.txt"]
    assert "b.txt changed" in caplog.text


def test_the_output_is_not_read_as_input(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": PROSE})
    for _ in range(2):
        assert run_folder(tmp_path, tmp_path).texts == [PROSE.decode()]


def test_one_file_is_a_source_too(tmp_path: Path) -> None:
    write_files(tmp_path, {"text/only.txt": PROSE, "text/other.txt": b"not this"})
    assert run_folder(tmp_path, tmp_path / "text/only.txt").texts == [PROSE.decode()]


def test_many_tiny_files(tmp_path: Path) -> None:
    got = run(tmp_path, {f"{n % 50}/{n}": b"%010d" % n for n in range(5000)})
    assert (got.source["documents"], got.source["bytes"], len(got.manifest["shards"])) == (5000, 50_000, 1)


def test_files_are_never_open_together(tmp_path: Path) -> None:
    """300,000 files are too many to hold open; so are 400 files and 100 shards where 40 are allowed."""
    root = write_files(tmp_path / "text", numbered(400))
    fetch_corpus([source(root)], tmp_path / "raw")
    code = """
import json, resource, sys
from pathlib import Path
from lmperf.corpus.shards import ingest
from lmperf.corpus.tokenizer import tokenize
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
sources, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
assert len(ingest(sources, folder / "raw", folder / "shards", shard_bytes=1000)["shards"]) > 80
tokenize(folder / "shards", folder / "tokens", vocab_size=300, block=33, accelerator="none")
"""
    command = [sys.executable, "-c", code, json.dumps([source(root)]), str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- deduplication and quarantine


def test_equal_documents_are_kept_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    composed, decomposed = "caf\u00e9 au lait", "cafe\u0301 au lait"
    files = {"a": composed.encode(), "b": f"\r\n{decomposed}  ".encode(), "c": b"other", "d": composed.encode("utf-16")}
    got = run(tmp_path, files)
    assert got.texts == [composed, "other"]
    assert got.source["duplicates"] == 2
    assert got.source["duplicate_share"] > 0.3
    assert "duplicates" in caplog.text


def test_nearly_equal_documents_are_all_kept(tmp_path: Path) -> None:
    files = {f"{n:03d}": PROSE * 50 + b"%d" % n for n in range(200)}
    got = run(tmp_path, files)
    assert (len(got.texts), got.source["duplicates"]) == (200, 0)


def test_documents_of_a_later_source_are_compared_with_the_earlier(tmp_path: Path) -> None:
    folders = {name: write_files(tmp_path / name, {"x": PROSE, name: name.encode()}) for name in "ab"}
    sources = [source(folder) | {"name": name} for name, folder in folders.items()]
    fetch_corpus(sources, tmp_path / "raw")
    manifest = ingest(sources, tmp_path / "raw", tmp_path / "shards")
    assert [(row[0], row[3]) for row in read_shards(tmp_path / "shards")] == [
        ("a", "a"),
        ("a", PROSE.decode()),
        ("b", "b"),
    ]
    assert [record["duplicates"] for record in manifest["sources"]] == [0, 1]


def test_the_set_of_digests_is_exact_at_any_size() -> None:
    chance = random.Random(0)
    keys = [chance.randbytes(15) + bytes([n % 3]) for n in range(500)]  # some end in NUL
    small, truth = Seen(recent=7), set()
    for key in chance.choices(keys, k=3000):
        assert small.add(key) == (key not in truth)
        truth.add(key)


def test_too_much_quarantine_fails_and_leaves_earlier_outputs(tmp_path: Path) -> None:
    good = {"a.txt": PROSE * 4}
    first = run(tmp_path, good)
    with pytest.raises(CheckFailed, match="max_quarantine") as error:
        run(tmp_path, {"b.txt": b"\xff" * 8}, limits={"max_quarantine": 0.05})
    assert "\n" not in str(error.value)
    assert json.loads((first.out / "manifest.json").read_text()) == first.manifest
    assert (first.out / "quarantine.jsonl").read_text().count("b.txt") == 1
    assert run(tmp_path, {}, limits={"max_quarantine": 0.2}).texts == [good["a.txt"].decode()]


def test_no_document_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="no document"):
        run(tmp_path, {"a": b"", "b": b"  "})


# --- shards

SMALL = {"shard_bytes": 8000}


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    files = numbered(300)
    one, two = (run(tmp_path / name, files, limits=SMALL) for name in ("one", "two"))
    assert contents(one.out) == contents(two.out)
    assert len(contents(one.out)) > 5
    assert one.texts == [files[name].decode() for name in sorted(files)]


@pytest.mark.parametrize("name", ["0/0000a.txt", "3/0500.txt", "6/zzz.txt"])
def test_adding_one_file_to_a_thousand_rewrites_only_what_it_touches(tmp_path: Path, name: str) -> None:
    before = run(tmp_path, numbered(1000), limits=SMALL)
    old = contents(before.out)
    after = run(tmp_path, {name: b"a new document"}, limits=SMALL)
    new = contents(after.out)
    written = set(new) - set(old)
    assert len(written) <= 2  # the shard it falls into, or two where it ends one
    assert all(new[shard] == old[shard] for shard in set(new) & set(old))
    assert {shard["file"] for shard in after.manifest["shards"] if not shard["reused"]} == written
    assert after.manifest["totals"]["shards_reused"] == len(new) - len(written) > 20
    assert set(new) == {shard["file"] for shard in after.manifest["shards"]}  # stale ones are gone


def test_a_flipped_bit_is_found_named_and_mended(tmp_path: Path) -> None:
    got = run(tmp_path, numbered(100), limits=SMALL)
    victim = got.out / got.manifest["shards"][2]["file"]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(InputError, match=victim.name):
        list(read_shards(got.out))
    again = run(tmp_path, {}, limits=SMALL)
    assert again.texts == got.texts
    assert [shard["file"] for shard in again.manifest["shards"] if not shard["reused"]] == [victim.name]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    got = run(tmp_path, {"a": PROSE})
    (got.out / got.manifest["shards"][0]["file"]).unlink()
    with pytest.raises(InputError, match=got.manifest["shards"][0]["file"]):
        list(read_shards(got.out))


def test_schema_and_totals(tmp_path: Path) -> None:
    got = run(tmp_path, numbered(10))
    record = got.manifest["shards"][0]
    with pa.memory_map(str(got.out / record["file"])) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
        assert table.schema.names == ["text", "document", "source", "domain"]
        assert table.schema.field("text").type == pa.large_string()
        table.validate(full=True)
        assert {len(document) for document in table["document"].to_pylist()} == {32}
    assert record["documents"] == 10 == got.manifest["totals"]["documents"]
    assert record["bytes"] == sum(len(text.encode()) for text in got.texts) == got.manifest["totals"]["bytes"]


def test_a_large_document_is_one_row(tmp_path: Path) -> None:
    text = "".join(f"line {n} 文\n" for n in range(700_000))
    assert len(text.encode()) > 8 << 20
    got = run(tmp_path, {"a": text.encode(), "b": PROSE}, limits={"shard_bytes": 1 << 20})
    assert got.texts == [text, PROSE.decode()]


@pytest.mark.parametrize("unit", [b"x", "文".encode(), b"word ", b"line\n", "😀".encode()])
def test_pieces_join_to_the_whole_and_end_between_characters(tmp_path: Path, unit: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"." + unit * (2 * PIECE // len(unit)) + b"end")
    with open(path, "rb") as stream:
        found = list(pieces(stream))
    assert b"".join(found) == path.read_bytes()
    assert all(piece.decode() is not None and len(piece) <= PIECE for piece in found)
    assert all(len(piece) > PIECE - LOOK_BACK for piece in found[:-1])


def shard_path(tmp_path: Path) -> tuple[str, list[str]]:
    """One shard, in a folder with a blank in its name, and its texts."""
    got = run(tmp_path / "a b", numbered(20))
    return str(got.out / got.manifest["shards"][0]["file"]), got.texts


def test_polars_reads_the_shards(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    path, expected = shard_path(tmp_path)
    assert polars.read_ipc(path)["text"].to_list() == expected


def test_datasets_reads_the_shards(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    path, expected = shard_path(tmp_path)
    loaded = datasets.load_dataset("arrow", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    assert list(loaded["text"]) == expected


def test_duckdb_reads_the_shards(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    path, expected = shard_path(tmp_path)
    shard = pa.ipc.open_file(pa.memory_map(path)).read_all()
    assert duckdb.from_arrow(shard).project("text").fetchall() == [(text,) for text in expected]


def test_pandas_reads_the_shards(tmp_path: Path) -> None:
    path, expected = shard_path(tmp_path)
    assert pa.ipc.open_file(path).read_pandas()["text"].tolist() == expected


# --- kills and full disks

SCRIPT = """
import json, sys
from pathlib import Path
from lmperf.corpus.shards import ingest
ingest(json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), shard_bytes=20000)
"""


def test_ten_kills_leave_the_same_bytes(tmp_path: Path) -> None:
    files = numbered(3000, 600) | {"big.txt": b"".join(b"line %d\n" % n for n in range(900_000))}
    undisturbed = run(tmp_path, files, limits={"shard_bytes": 20_000})
    out = tmp_path / "killed"
    command = [sys.executable, "-c", SCRIPT, json.dumps([source(tmp_path / "text")]), str(tmp_path / "raw"), str(out)]
    chance, killed = random.Random(5), 0
    for _ in range(10):
        process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
        deadline = time.monotonic() + 20
        while not out.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.35))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        if (out / "manifest.json").exists():
            list(read_shards(out))  # what stands is whole
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    assert killed >= 5
    assert contents(out) == contents(undisturbed.out)
    assert {path.name for path in out.iterdir()} == {path.name for path in undisturbed.out.iterdir()}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Path:
    """A file system of 2 MiB, or a skip that says why not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("big", [False, True])
def test_a_full_disk_is_one_clear_error(tmp_path: Path, tiny_disk: Path, big: bool) -> None:
    root = write_files(tmp_path / "text", {"a.txt": PROSE})
    sources = [source(root)]
    fetch_corpus(sources, tmp_path / "raw")
    ingest(sources, tmp_path / "raw", tiny_disk / "out")
    before = {path.name: path.read_bytes() for path in (tiny_disk / "out").iterdir()}
    more = {"big.txt": b"".join(b"line %d\n" % n for n in range(900_000))} if big else numbered(8000, 500)
    write_files(root, more)
    with pytest.raises(CheckFailed, match="no space left") as error:
        ingest(sources, tmp_path / "raw", tiny_disk / "out")
    assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in (tiny_disk / "out").iterdir()} == before


def test_boundaries_follow_the_planned_size(tmp_path: Path) -> None:
    writer = writing.ShardWriter(tmp_path, "s", "d", 50_000)
    chance = np.random.default_rng(0)
    for _ in range(4000):
        writer.add(b"x" * 500, chance.bytes(16))
    writer.finish()
    sizes = [shard.bytes for shard in writer.shards]
    assert sum(sizes) == 2_000_000
    assert max(sizes) <= writing.LONGEST_RUN * 50_000 + 500
    assert 25_000 < np.mean(sizes) < 100_000
