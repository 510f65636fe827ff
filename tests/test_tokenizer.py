"""The tokenize stage: splits, tokenizers of one's own, accelerators, and files that are whole or not there."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from corpus_helpers import prose, tree, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_helpers import run
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from lmperf.corpus import accelerator, splits, token_shards
from lmperf.corpus.datasets import TokenData
from lmperf.corpus.shards import ingest
from lmperf.corpus.sources import fetch_corpus
from lmperf.corpus.tokenizer import END_OF_TEXT, load_tokenizer, parse_tokenizer, tokenize, train_tokenizer
from lmperf.records import CheckFailed, InputError, read_json

ENGINES = {"none": "tokenizers"} | ({"fastokens": "fastokens"} if importlib.util.find_spec("fastokens") else {})
SMALL = {"vocab_size": 400, "block": 33}


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    blanks = (
        "a\u00a0  b\u3000 \n\n c\u2028  \t.\x0b  1\u00a0\u00a0 文  \n " * 20
    )  # runs that become tokens of their own
    texts = [blanks, *(prose(number) for number in range(40))]
    return parse_tokenizer(train_tokenizer(iter(texts), 400).to_str(), "test")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    english = [prose(number) for number in range(200)]
    return write_shards(
        tmp_path / "shards", {"english": english, "code": [prose(n, 60) for n in range(900, 930)]}, files=2
    )


def texts_of(out: Path, split: str) -> list[str]:
    """The documents of a split, decoded again."""
    data = TokenData.open(out, split, verify=True)
    tokens = np.concatenate([np.asarray(part) for part in data.mapped])
    ends = np.flatnonzero(tokens == data.end_of_text)
    assert len(ends)
    assert ends[-1] == len(tokens) - 1
    tokenizer = load_tokenizer(out / "tokenizer.json")
    parts = np.split(tokens, ends + 1)[:-1]
    return tokenizer.decode_batch([part[:-1].tolist() for part in parts], skip_special_tokens=False)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text, add_special_tokens=False).ids
    assert trained.decode(ids, skip_special_tokens=False) == text


WORDY = st.text(st.sampled_from("ab'sé文 \t\n\r\u00a0\u2028\u3000\x0b\x1c1.😀"), max_size=60)


@given(WORDY, st.integers(0, 200))
@settings(max_examples=400, deadline=None)
def test_a_cut_before_white_space_changes_no_token(trained: Tokenizer, text: str, wanted: int) -> None:
    data = text.encode()
    cut = splits.cut_point(pa.py_buffer(data), wanted)
    assert cut <= len(data)
    head, tail = data[:cut].decode(), data[cut:].decode()
    if head and tail[:1] in tuple(" \t\n\r"):
        ids = [trained.encode(part, add_special_tokens=False).ids for part in (text, head, tail)]
        assert ids[0] == ids[1] + ids[2]


def test_cut_without_white_space_lies_between_characters() -> None:
    data = ("文" * 1000).encode()
    assert splits.cut_point(pa.py_buffer(data), 1000) == 999
    assert splits.cut_point(pa.py_buffer(data), 5000) == 3000


def test_splits_are_disjoint_and_complete(shards: Path, tmp_path: Path) -> None:
    manifest = tokenize(shards, tmp_path / "out", **SMALL)
    parts = {name: texts_of(tmp_path / "out", name) for name in manifest["splits"]}
    core = [text for name in splits.CORE_SPLITS for text in parts[name]]
    assert sorted(core) == sorted(prose(number) for number in range(200))
    assert sorted(parts["domain.code"]) == sorted(prose(number, 60) for number in range(900, 930))
    for name, entry in manifest["splits"].items():
        assert entry["bytes"] == sum(len(text.encode()) for text in parts[name])
        assert entry["documents"] == len(parts[name])
    assert manifest == read_json(tmp_path / "out" / "manifest.json")
    assert manifest["split"]["by"] == "document"


def test_shares_are_as_asked_for(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s", {"english": [f"short text {number:05d}" for number in range(6000)]})
    chosen = splits.assign(splits.survey(folder, seed=3), training_domain="english", held_out=0.1, domain_bytes=1)
    shares = [float((chosen.split == index).mean()) for index in range(3)]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.025)


def test_adding_documents_moves_no_document_between_splits(tmp_path: Path) -> None:
    few = write_shards(tmp_path / "few", {"english": [prose(number) for number in range(150)]})
    many = write_shards(tmp_path / "many", {"english": [prose(number) for number in range(-40, 190)]})
    for folder in (few, many):
        tokenize(folder, tmp_path / f"{folder.name}-out", **SMALL)
    for name in splits.CORE_SPLITS:
        assert set(texts_of(tmp_path / "few-out", name)) <= set(texts_of(tmp_path / "many-out", name))


def test_equal_documents_fall_on_the_same_side(tmp_path: Path) -> None:
    texts = [prose(number) for number in range(150)]
    folder = write_shards(tmp_path / "s", {"english": [*texts, *texts]}, files=3)
    tokenize(folder, tmp_path / "out", **SMALL)
    sides = [set(texts_of(tmp_path / "out", name)) for name in splits.CORE_SPLITS]
    assert sum(map(len, sides)) == len(set().union(*sides)) == 150


def test_seed_changes_the_split(shards: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        tokenize(shards, tmp_path / str(seed), seed=seed, **SMALL)
    assert texts_of(tmp_path / "1", "test") != texts_of(tmp_path / "2", "test")


@pytest.mark.parametrize("texts", [["".join(prose(n) for n in range(60))], [prose(n, 3000) for n in range(3)]])
def test_few_documents_are_split_by_position(tmp_path: Path, texts: list[str]) -> None:
    folder = write_shards(tmp_path / "s", {"english": texts})
    manifest = tokenize(folder, tmp_path / "out", **SMALL)
    assert manifest["split"]["by"] == "position"
    parts = [texts_of(tmp_path / "out", name) for name in splits.CORE_SPLITS]
    assert ["".join(pieces) for pieces in zip(*parts, strict=True)] == texts
    total = sum(entry["bytes"] for entry in manifest["splits"].values())
    assert manifest["splits"]["validation"]["bytes"] / total == pytest.approx(0.05, rel=0.2)


def test_a_corpus_of_one_token_is_one_clear_error(tmp_path: Path) -> None:
    """From the file on: the message says how many tokens are missing, and nothing is left behind."""
    got = run(tmp_path, {"a.txt": b"a"})
    assert got.texts == ["a"]
    with pytest.raises(InputError, match="0 tokens, 257 fewer than one block of 257") as error:
        tokenize(got.out, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("text", ["a", "word", "the of and " * 30])
def test_too_little_text_says_how_much_is_missing(tmp_path: Path, text: str) -> None:
    folder = write_shards(tmp_path / "s", {"english": [text]})
    with pytest.raises(InputError, match=r"(train|validation) split .*\d+ tokens, \d+ fewer than one block of 257"):
        tokenize(folder, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_validation_smaller_than_a_block_is_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"validation split of domain 'english' has \d+ tokens"):
        tokenize(shards, tmp_path / "out", vocab_size=400, block=100_000 // 40)


def test_no_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no document"):
        tokenize(write_shards(tmp_path / "s", {"english": []}), tmp_path / "out")
    with pytest.raises(InputError, match="no such file"):
        tokenize(tmp_path / "nowhere", tmp_path / "out")


def test_a_small_further_domain_is_left_out_with_its_reason(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s", {"english": [prose(n) for n in range(150)], "a/b 文": ["tiny"]})
    manifest = tokenize(folder, tmp_path / "out", **SMALL)
    assert "fewer than one block" in manifest["left_out"]["domain.a/b 文"]
    assert set(manifest["splits"]) == set(splits.CORE_SPLITS)


def test_a_domain_may_be_called_anything(tmp_path: Path) -> None:
    odd = ["../up", "a b 文[1]'", "x" * 300]
    folder = write_shards(tmp_path / "s", {"english": [prose(n) for n in range(150)]})
    named = {name: [prose(1000 + i), prose(2000 + i)] for i, name in enumerate(odd)}
    merged = merge(folder, named, tmp_path)
    manifest = tokenize(merged, tmp_path / "out", **SMALL)
    for name in odd:
        assert sorted(texts_of(tmp_path / "out", f"domain.{name}")) == sorted(named[name])
    assert set(manifest["splits"]) == {*splits.CORE_SPLITS, *(f"domain.{name}" for name in odd)}


def merge(folder: Path, named: dict[str, list[str]], tmp_path: Path) -> Path:
    """Add shards whose domain names cannot stand in a file name."""
    manifest = read_json(folder / "manifest.json")
    for index, (name, texts) in enumerate(named.items()):
        other = write_shards(tmp_path / f"part{index}", {"plain": texts})
        table = pa.ipc.open_file(str(other / "plain-0.arrow")).read_all()
        table = table.set_column(3, "domain", pa.array([name] * len(texts)))
        path = folder / f"odd-{index}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        manifest["shards"].append({"file": path.name, "sha256": token_shards.file_sha256(path)})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_further_domains_are_capped_and_this_is_recorded(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmperf.corpus.tokenizer.DOMAIN_BYTES", 3000)
    manifest = tokenize(shards, tmp_path / "out", **SMALL)
    assert 2990 <= manifest["splits"]["domain.code"]["bytes"] <= 3000
    assert manifest["split"]["capped_domains"]["code"]["documents"] == 30


def test_missing_training_domain_falls_back_to_the_largest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_shards(tmp_path / "s", {"notes": [prose(1)] * 2, "mine": [prose(n) for n in range(150)]})
    manifest = tokenize(folder, tmp_path / "out", **SMALL)
    assert manifest["training_domain"] == "mine"
    assert "'english'" in caplog.text


def test_special_tokens_in_raw_text_are_plain_text(tmp_path: Path) -> None:
    texts = [f"{prose(n)}{END_OF_TEXT} and </s> [SEP] {n}" for n in range(150)]
    folder = write_shards(tmp_path / "s", {"english": texts})
    for engine in ENGINES:
        manifest = tokenize(folder, tmp_path / engine, accelerator=engine, **SMALL)
        assert sorted(t for name in manifest["splits"] for t in texts_of(tmp_path / engine, name)) == sorted(texts)


def test_texts_of_any_script_come_back(tmp_path: Path) -> None:
    """Groups of ASCII are cut out of one string, all others are decoded one by one; both give the texts."""
    texts = [text for n in range(60) for text in (prose(n), f"{n} 天下大勢 {prose(n)}", f"😀 é {n}", f"{n}")]
    folder = write_shards(tmp_path / "s", {"english": texts}, rows=len(texts))
    manifest = tokenize(folder, tmp_path / "out", **SMALL)
    assert sorted(t for name in manifest["splits"] for t in texts_of(tmp_path / "out", name)) == sorted(texts)


def test_a_folder_of_one_sentence_files(tmp_path: Path) -> None:
    texts = [f"Sentence {number:04d}." for number in range(2000)]
    got = run(tmp_path, {f"{number % 40}/{number}.txt": text.encode() for number, text in enumerate(texts)})
    manifest = tokenize(got.out, tmp_path / "out", vocab_size=400, block=129)
    assert manifest["split"]["by"] == "document"
    assert sorted(t for name in manifest["splits"] for t in texts_of(tmp_path / "out", name)) == texts


def test_a_megabyte_without_white_space(tmp_path: Path) -> None:
    texts = ["abcdefghij" * 150_000, "文" * 400_000, *(prose(n) for n in range(200))]
    folder = write_shards(tmp_path / "s", {"english": texts})
    manifest = tokenize(folder, tmp_path / "out", held_out=0.01, **SMALL)
    assert manifest["split"]["cut_documents"] == 2
    found = [text for name in splits.CORE_SPLITS for text in texts_of(tmp_path / "out", name)]
    whole = sum(len(text) for text in texts)
    assert sum(map(len, found)) == whole


def test_pieces_change_no_token(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokenize(shards, tmp_path / "whole", **SMALL)
    monkeypatch.setattr(splits, "PIECE_BYTES", 100)
    monkeypatch.setattr(accelerator, "BATCH_BYTES", dict.fromkeys(accelerator.BATCH_BYTES, 1000))
    cut = tokenize(shards, tmp_path / "cut", **SMALL)
    assert cut["splits"] == whole["splits"]


def test_shards_do_not_depend_on_how_much_is_encoded_at_once(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_shards, "SHARD_BYTES", 4000)
    for size in (1, 3000, 10**6):
        monkeypatch.setattr(accelerator, "BATCH_BYTES", dict.fromkeys(accelerator.BATCH_BYTES, size))
        manifest = tokenize(shards, tmp_path / str(size), **SMALL)
    assert tree(tmp_path / "1") == tree(tmp_path / "3000") == tree(tmp_path / "1000000")
    *full, last = manifest["splits"]["train"]["shards"]
    assert {shard["tokens"] for shard in full} == {2000}
    assert len(full) > 5
    assert sum(shard["documents"] for shard in (*full, last)) == manifest["splits"]["train"]["documents"]


@pytest.mark.parametrize("vocabulary", [70_000, 65_536])
def test_ids_are_never_wrapped(tmp_path: Path, vocabulary: int) -> None:
    own = tmp_path / "own.json"
    words = {f"w{n}": n for n in range(vocabulary - 2)} | {"[UNK]": vocabulary - 2, "</s>": vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(own))
    texts = [" ".join(f"w{(n * 991 + k * 7919) % (vocabulary - 2)}" for k in range(80)) for n in range(150)]
    manifest = tokenize(
        write_shards(tmp_path / "s", {"english": texts}), tmp_path / "out", block=33, tokenizer_file=str(own)
    )
    assert manifest["dtype"] == ("uint16" if vocabulary <= 65_536 else "uint32")
    assert manifest["end_of_text"] == vocabulary - 1
    assert sorted(t for name in manifest["splits"] for t in texts_of(tmp_path / "out", name)) == sorted(texts)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == own.read_bytes()


def test_the_writer_refuses_an_id_that_does_not_fit(tmp_path: Path) -> None:
    writer = token_shards.SplitWriter(tmp_path, "train", np.dtype(np.uint16), {})
    with pytest.raises(ValueError, match="65536 does not fit uint16"):
        writer.add(np.array([1, 65_536], dtype=np.uint32), ends=np.array([1]), size=2)


def test_own_tokenizer_with_truncation_and_without_an_end_token(
    trained: Tokenizer, shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer(models.BPE(**bpe_of(trained)))
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=5000)
    tokenizer.save(str(tmp_path / "own.json"))
    manifest = tokenize(shards, tmp_path / "out", tokenizer_file=str(tmp_path / "own.json"), block=33)
    assert manifest["lossless"] is False
    assert "bits per byte" in caplog.text
    saved = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert saved.token_to_id(END_OF_TEXT) == manifest["end_of_text"] == manifest["vocab_size"] - 1
    assert 15_000 < manifest["splits"]["train"]["tokens"] < 100_000  # neither cut to 5 nor padded to 5,000 a document


def bpe_of(tokenizer: Tokenizer) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = {token: number - 1 for token, number in model["vocab"].items() if token != END_OF_TEXT}
    return {"vocab": vocabulary, "merges": [tuple(pair) for pair in model["merges"]]}


BAD_TOKENIZERS = {
    "not JSON": ("{", "not valid JSON"),
    "no model": ("{}", "'model' is missing"),
    "a list": ("[]", "'model' is missing"),
    "empty model": ('{"model": {"type": "BPE"}}', "cannot read it"),
    "dropout": ('{"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.1}}', "dropout is 0.1"),
}


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_a_bad_tokenizer_is_one_clear_error(shards: Path, tmp_path: Path, name: str) -> None:
    content, message = BAD_TOKENIZERS[name]
    path = tmp_path / "own.json"
    path.write_text(content)
    with pytest.raises(InputError, match=f"own.json.*{message}"):
        tokenize(shards, tmp_path / "out", tokenizer_file=str(path))


def test_a_tokenizer_that_is_not_there(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such tokenizer file"):
        tokenize(shards, tmp_path / "out", tokenizer_file=str(tmp_path / "none.json"))
    with pytest.raises(InputError, match="not a tokenizer"):
        tokenize(shards, tmp_path / "out", tokenizer_file=str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 256),
        ("held_out", 0.0),
        ("held_out", 0.5),
        ("sample_bytes", 0),
        ("block", 1),
        ("accelerator", "gpu"),
    ],
)
def test_bad_arguments_are_named(shards: Path, tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=key):
        tokenize(shards, tmp_path / "out", **{key: value})


def test_engines_write_the_same_bytes(shards: Path, tmp_path: Path) -> None:
    if len(ENGINES) < 2:
        pytest.skip("fastokens is not installed")
    for wanted, engine in ENGINES.items():
        assert tokenize(shards, tmp_path / wanted, accelerator=wanted, **SMALL)["engine"] == engine
    first, second = (tree(tmp_path / wanted) for wanted in ENGINES)
    first.pop("manifest.json")
    second.pop("manifest.json")
    assert first == second


def wrong_ids(tokenizer_json: str) -> accelerator.Encode:
    """An accelerator that is wrong about one rare text only."""
    tokenizer = parse_tokenizer(tokenizer_json, "test")
    right = accelerator.reference_encoder(tokenizer)

    def encode(texts: Any) -> tuple[np.ndarray, np.ndarray]:
        return right(["1000000" if text == "1,000,000" else text for text in texts])

    return encode


def test_an_accelerator_with_other_ids_is_not_used(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(accelerator, "fastokens_encoder", wrong_ids)
    monkeypatch.setattr(accelerator.importlib.util, "find_spec", lambda name: name)
    manifest = tokenize(shards, tmp_path / "out", **SMALL)
    assert manifest["engine"] == "tokenizers"
    assert "other ids for '1,000,000'" in manifest["engine_note"]
    assert "other ids" in caplog.text
    with pytest.raises(InputError, match="fastokens"):
        tokenize(shards, tmp_path / "out", accelerator="fastokens", **SMALL)


def test_without_the_accelerator_the_default_is_used(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator.importlib.util, "find_spec", lambda name: None)
    assert tokenize(shards, tmp_path / "out", **SMALL)["engine"] == "tokenizers"
    with pytest.raises(InputError, match="not installed"):
        tokenize(shards, tmp_path / "out", accelerator="fastokens", **SMALL)


def test_a_flipped_bit_in_a_text_shard_is_found_and_named(shards: Path, tmp_path: Path) -> None:
    path = shards / "english-1.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"english-1\.arrow.*sha256"):
        tokenize(shards, tmp_path / "out", **SMALL)


def test_no_damage_of_a_text_shard_is_taken_for_anything_else(shards: Path, tmp_path: Path) -> None:
    """Shards are read before their hashes are known: whatever that stumbles over, the damaged file is the error."""
    tokenize(shards, tmp_path / "out", **SMALL)
    before, path = tree(tmp_path / "out"), shards / "english-1.arrow"
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(InputError, match=r"english-1\.arrow.*sha256"):
            tokenize(shards, tmp_path / "out", **SMALL)
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"english-1\.arrow.*sha256"):
            tokenize(shards, tmp_path / "out", **SMALL)
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_same_bytes_in_another_process(shards: Path, tmp_path: Path, threads: str) -> None:
    tokenize(shards, tmp_path / "here", accelerator="none", **SMALL)
    process = start(shards, tmp_path / "there", RAYON_NUM_THREADS=threads, PYTHONHASHSEED=threads)
    assert process.wait() == 0
    assert tree(tmp_path / "here") == tree(tmp_path / "there")


def start(shards: Path, out: Path, limit: int | None = None, **extra: str) -> subprocess.Popen[str]:
    code = f"""
import resource, sys
from pathlib import Path
from lmperf.corpus.tokenizer import tokenize
from lmperf.records import CheckFailed
limit = {limit!r}
if limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try: tokenize(Path({str(shards)!r}), Path({str(out)!r}), vocab_size=400, block=33, accelerator="none")
except CheckFailed as error: sys.exit(str(error))
"""
    return subprocess.Popen([sys.executable, "-c", code], env=environment(**extra), stderr=subprocess.PIPE, text=True)


def test_killed_at_random_moments_and_run_again(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tokenize(shards, tmp_path / "expected", accelerator="none", **SMALL)
    expected = tree(tmp_path / "expected")
    code = (
        f"import corpus_helpers as c; c.run_and_kill({str(shards)!r}, {str(out)!r}, {str(tmp_path / 'expected')!r}, 10)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5  # really killed, not finished before
    tokenize(shards, out, accelerator="none", **SMALL)
    assert tree(out) == expected
    assert not list(out.glob(".building-*"))


def test_pandas_stays_out(shards: Path, tmp_path: Path) -> None:
    """Arrow's own conversions import it, half a second of every process that touches a token."""
    code = f"""
import sys
from pathlib import Path
from lmperf.corpus.datasets import TokenData
from lmperf.corpus.tokenizer import tokenize
tokenize(Path({str(shards)!r}), Path({str(tmp_path / "out")!r}), vocab_size=400, block=33)
TokenData.open({str(tmp_path / "out")!r}, "train").tokens[:10]
sys.exit("pandas" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


def environment(**extra: str) -> dict[str, str]:
    folders = (Path(__file__).parents[1], Path(__file__).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **extra}


def test_a_file_too_large_for_the_disk_is_one_clear_error(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tokenize(shards, out, **SMALL)
    before = tree(out)
    largest = max(len(data) for data in before.values())
    process = start(shards, out, limit=largest - 1000)
    assert process.wait() == 1
    assert "no space to write" in process.stderr.read()
    assert tree(out) == before


def test_a_full_disk_keeps_what_was_there(shards: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=112k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        tokenize(shards, disk / "out", **SMALL)
        before = tree(disk / "out")
        with pytest.raises(CheckFailed, match="no space"):
            tokenize(shards, disk / "out", **SMALL)
        assert tree(disk / "out") == before
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_place_that_cannot_be_written_to_is_named(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"file.*cannot be written"):
            tokenize(shards, out, **SMALL)


def test_a_run_whose_folder_was_taken_over_says_so(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_over(message: str) -> None:
        if message.startswith("tokenized"):
            for left in (tmp_path / "out").glob(".building-*"):
                left.rmdir()

    with pytest.raises(CheckFailed, match="another run"):
        tokenize(shards, tmp_path / "out", progress=takes_over, **SMALL)


def test_a_stop_while_files_are_renamed_leaves_no_mixture(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(shards, tmp_path / "out", seed=1, **SMALL)
    real, count = os.replace, 0

    def stops(source: Path, target: Path) -> None:
        nonlocal count
        count += target.parent == tmp_path / "out"
        if count == 2:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        tokenize(shards, tmp_path / "out", seed=2, **SMALL)
    with pytest.raises(InputError, match="manifest"):
        TokenData.open(tmp_path / "out", "train")


def test_files_of_an_earlier_run_are_replaced(shards: Path, tmp_path: Path) -> None:
    tokenize(shards, tmp_path / "out", **SMALL)
    english = write_shards(tmp_path / "other", {"english": [prose(number) for number in range(200)]})
    manifest = tokenize(english, tmp_path / "out", **SMALL)
    files = {shard["file"] for entry in manifest["splits"].values() for shard in entry["shards"]}
    assert set(tree(tmp_path / "out")) == {*files, "manifest.json", "tokenizer.json"}


def test_the_sample_is_capped_and_no_document_fills_it(tmp_path: Path) -> None:
    texts = ["zyx " * 50_000, *(prose(n) for n in range(300))]
    folder = write_shards(tmp_path / "s", {"english": texts})
    found = splits.survey(folder, seed=1)
    chosen = splits.assign(found, training_domain="english", held_out=0.05, domain_bytes=1000)
    sample = splits.training_sample(found, chosen, 16_000)
    assert 15_000 <= sum(sample.values()) <= 16_000
    assert max(sample.values()) <= 2000
    assert all(chosen.split[number] == 0 for number in sample)


def anonymous_bytes() -> int:
    """Memory of this process that is not mapped from files."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def test_memory_is_bounded_whatever_the_size_of_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document of 160 MB is never held as a whole: an encoder that counts memory stands in for the real one."""
    size = 160 << 20
    folder = write_shards(tmp_path / "s", {"english": [prose(1) * (size // len(prose(1)))]})
    gc.collect()
    before, peak = anonymous_bytes(), 0

    def encode(texts: Any) -> tuple[np.ndarray, np.ndarray]:
        nonlocal peak
        peak = max(peak, anonymous_bytes() - before)
        lengths = np.array([len(text) // 16 for text in texts], dtype=np.int64)
        return np.ones(int(lengths.sum()), dtype=np.uint32), lengths

    engine = accelerator.Engine("counting", "0", encode, "test", batch_bytes=8 << 20)
    monkeypatch.setattr("lmperf.corpus.tokenizer.choose_engine", lambda *_: engine)
    manifest = tokenize(folder, tmp_path / "out", sample_bytes=100_000, **SMALL)
    assert manifest["split"]["by"] == "position"
    assert 0 < peak < 100 << 20


def test_a_folder_is_ingested_tokenized_and_read(tmp_path: Path) -> None:
    """The whole way of a user's own folder: nothing is lost between the files and the decoded tokens."""
    for number in range(120):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"a b {number}.txt").write_text(prose(number))
    sources = [{"name": "own", "kind": "files", "path": str(tmp_path / "texts"), "domain": "mine"}]
    fetch_corpus(sources, tmp_path / "raw")
    ingest(sources, tmp_path / "raw", tmp_path / "shards")
    manifest = tokenize(tmp_path / "shards", tmp_path / "out", **SMALL)
    assert manifest["training_domain"] == "mine"
    found = sorted(text for name in manifest["splits"] for text in texts_of(tmp_path / "out", name))
    assert [text.strip() for text in found] == sorted(prose(number).strip() for number in range(120))
