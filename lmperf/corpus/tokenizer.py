"""The tokenize stage: text shards → `tokenizer.json`, token shards for every split, and their manifest."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lmperf.corpus import splits
from lmperf.corpus.accelerator import ACCELERATORS, Engine, choose_engine
from lmperf.corpus.encoding import encode_splits
from lmperf.corpus.shards import HashCheck
from lmperf.corpus.split_texts import pieces, sample_texts
from lmperf.corpus.token_shards import token_dtype
from lmperf.records import CheckFailed, InputError, write_json

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
SMALLEST_VOCABULARY = 257  # the 256 bytes and the end of a text
DOMAIN_BYTES = 2 << 20  # text kept of each further domain: enough for a stable loss, small enough to be read often
LONGEST_TOKEN = 64  # bytes; one long run of the same characters must not fill the vocabulary with its halves
TRAINING_CHARACTERS = 4096  # the trainer's time and memory grow with the square of an unbroken piece
LOSSLESS_CHARACTERS = 500  # of each of the first 100 texts: decoded again and compared
EQUALITY_BYTES = 128 << 10  # text of this run on which an accelerator has to agree first
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer ready to encode: the JSON text to save, the size of its id space and its end-of-text id."""

    tokenizer: Tokenizer
    text: str
    vocab_size: int
    end_of_text: int
    lossless: bool  # decode(encode(text)) == text on the first documents

    @property
    def sha256(self) -> str:
        """SHA-256 of `tokenizer.json`: stands in the manifest and in every token shard."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def tokenize(
    shards: Path,
    out: Path,
    *,
    vocab_size: int = 1024,
    sample_bytes: int = 8 << 20,
    tokenizer_file: str | None = None,
    accelerator: str = "auto",
    training_domain: str = "english",
    held_out: float = 0.05,
    block: int = 257,
    seed: int = 1234,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Turn the text shards in `shards` into token shards in `out` and return the manifest written there.

    The same shards and arguments give the same bytes. Nothing in `out` changes before all of it is complete; the
    manifest is written last. Raises `InputError` when a split has fewer than
    `block` tokens, `CheckFailed` when the disk is full.
    """
    _check_arguments(vocab_size, sample_bytes, held_out, block, accelerator)
    own = None if tokenizer_file is None else _read(Path(tokenizer_file))
    asked = {"vocab_size": vocab_size, "sample_bytes": sample_bytes, "training_domain": training_domain, "seed": seed}
    with HashCheck(Path(shards)) as check:

        def say(message: str) -> None:
            check.look()
            (progress or _silent)(message)

        say("surveying the shards")
        found = splits.survey(Path(shards), seed=seed)
        check.start()
        chosen = splits.assign(found, training_domain=training_domain, held_out=held_out, domain_bytes=DOMAIN_BYTES)
        sample = splits.training_sample(found, chosen, sample_bytes)
        say("training the tokenizer" if own is None else "own tokenizer")
        texts = _first_texts(found, chosen)
        text = _train(found, chosen, sample, vocab_size) if own is None else own
        loaded = _loaded(text, tokenizer_file or "the trained tokenizer", texts)
        engine = choose_engine(loaded.tokenizer, accelerator, texts)
        with _building(Path(out)) as building:
            written = encode_splits(
                found,
                chosen,
                engine,
                building,
                vocab_size=loaded.vocab_size,
                end_of_text=loaded.end_of_text,
                metadata={"tokenizer_sha256": loaded.sha256, "end_of_text": str(loaded.end_of_text)},
                progress=say,
            )
            left_out = _check_sizes(written, block, chosen, Path(shards))
            manifest = _manifest(loaded, engine, written, left_out, block)
            manifest["split"] = splits.describe(found, chosen)
            manifest["training_domain"] = chosen.training_domain
            manifest["sample"] = {"documents": len(sample), "bytes": sum(sample.values())}
            manifest["asked"] = {**asked, "tokenizer_file": own is not None, "held_out": held_out}
            check.wait()
            _publish(building, Path(out), loaded.text, manifest)
    say(f"{manifest['splits']['train']['tokens']} training tokens")
    return manifest


def _silent(message: str) -> None:
    del message


def _check_arguments(vocab_size: int, sample_bytes: int, held_out: float, block: int, accelerator: str) -> None:
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"tokenizer.vocab_size: {vocab_size}; a byte-level vocabulary has at least {SMALLEST_VOCABULARY}"
        )
    if sample_bytes < 1:
        raise InputError(f"tokenizer.sample_bytes: {sample_bytes}; it must be positive")
    if not 0 < held_out < 0.5:
        raise InputError(f"tokenizer.held_out: {held_out}; it must lie between 0 and 0.5 (validation and test each)")
    if block < 2:
        raise InputError(f"block: {block}; a block holds at least two tokens")
    if accelerator not in ACCELERATORS:
        raise InputError(f"tokenizer.accelerator: {accelerator!r} is unknown; allowed: {', '.join(ACCELERATORS)}")


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer (Sennrich et al. 2016; byte alphabet as in GPT-2) of at most `vocab_size` ids.

    Id 0 is the end of a text; every byte has an id, so that any text can be encoded and decoded without loss.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=LONGEST_TOKEN,
    )
    tokenizer.train_from_iterator(_short(texts), trainer)
    return tokenizer


def _short(texts: Iterator[str]) -> Iterator[str]:
    """`texts` cut into strings of at most `TRAINING_CHARACTERS`, before white space where there is any."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = start + TRAINING_CHARACTERS
            if stop < len(text):
                space = max(text.rfind(" ", start, stop), text.rfind("\n", start, stop))
                stop = space if space > start else stop
            yield text[start:stop]
            start = stop


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a `tokenizer.json` for encoding raw text: nothing truncated or padded, special tokens read as plain text."""
    return parse_tokenizer(_read(path), str(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such tokenizer file") from None
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise InputError(f"{path}: not a tokenizer.json ({error})") from None


def parse_tokenizer(text: str, name: str) -> Tokenizer:
    """As `load_tokenizer`, from the JSON text; `name` is used in messages."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}: not valid JSON ({error})") from None
    if not isinstance(value, dict) or not isinstance(value.get("model"), dict):
        raise InputError(f"{name}: no tokenizer of the HF `tokenizers` library: key 'model' is missing")
    if value["model"].get("dropout"):
        raise InputError(f"{name}: model.dropout is {value['model']['dropout']}: ids would be random; set it to null")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises bare `Exception` for every fault in the file
        raise InputError(f"{name}: the HF `tokenizers` library cannot read it ({error})") from None
    tokenizer.encode_special_tokens = True  # not saved in the file: set after every load
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _train(found: splits.Survey, chosen: splits.Assignment, sample: Mapping[int, int], vocab_size: int) -> str:
    tokenizer = train_tokenizer(sample_texts(found, chosen, sample), vocab_size)
    if (size := tokenizer.get_vocab_size()) < vocab_size:
        log.warning("the text gives only %d of the %d tokens asked for", size, vocab_size)
    return tokenizer.to_str(pretty=True)


def _loaded(text: str, name: str, first_texts: list[str]) -> LoadedTokenizer:
    tokenizer = parse_tokenizer(text, name)
    end, added = _end_of_text(tokenizer)
    if added:
        text = tokenizer.to_str(pretty=True)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    lossless = _lossless(tokenizer, first_texts)
    if not lossless:
        log.warning("%s: decoding does not give the text back; bits per byte are not comparable", name)
    return LoadedTokenizer(tokenizer, text, size, end, lossless)


def _end_of_text(tokenizer: Tokenizer) -> tuple[int, bool]:
    """The id that ends a document, and whether it had to be added to a user's tokenizer that has none."""
    for name in KNOWN_END_TOKENS:
        if (found := tokenizer.token_to_id(name)) is not None:
            return found, False
    tokenizer.add_special_tokens([END_OF_TEXT])
    return int(tokenizer.token_to_id(END_OF_TEXT)), True


def _lossless(tokenizer: Tokenizer, texts: list[str]) -> bool:
    texts = [text[:LOSSLESS_CHARACTERS] for text in texts[:100]]
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    decoded = tokenizer.decode_batch([encoding.ids for encoding in encodings], skip_special_tokens=False)
    return decoded == texts


def _first_texts(found: splits.Survey, chosen: splits.Assignment) -> list[str]:
    texts: list[str] = []
    size = 0
    for text in islice((text for group in pieces(found, chosen) for text in group.texts), 1000):
        texts.append(text[: EQUALITY_BYTES - size])
        size += len(texts[-1])
        if size >= EQUALITY_BYTES:
            break
    return texts


def _check_sizes(
    written: dict[str, dict[str, Any]], block: int, chosen: splits.Assignment, shards: Path
) -> dict[str, str]:
    """Refuse a core split below one block; a further domain that is too small is left out, with its reason."""
    left_out = {}
    for name, entry in written.items():
        missing = block - entry["tokens"]
        if missing <= 0:
            continue
        reason = f"{entry['tokens']} tokens, {missing} fewer than one block of {block}"
        if name in splits.CORE_SPLITS:
            hint = "add text, shorten the sequence, or raise tokenizer.held_out"
            raise InputError(f"{shards}: the {name} split of domain {chosen.training_domain!r} has {reason}: {hint}")
        log.warning("%s is left out: %s", name, reason)
        left_out[name] = reason
    return left_out


def _manifest(
    loaded: LoadedTokenizer, engine: Engine, written: dict[str, dict[str, Any]], left_out: dict[str, str], block: int
) -> dict[str, Any]:
    return {
        "schema": 1,
        "vocab_size": loaded.vocab_size,
        "dtype": token_dtype(loaded.vocab_size).name,
        "tokenizer_sha256": loaded.sha256,
        "end_of_text": loaded.end_of_text,
        "lossless": loaded.lossless,
        "block": block,
        "engine": engine.name,
        "engine_version": engine.version,
        "engine_note": engine.note,
        "splits": {name: entry for name, entry in written.items() if name not in left_out},
        "left_out": left_out,
    }


@contextlib.contextmanager
def _building(out: Path) -> Iterator[Path]:
    """A fresh folder inside `out` in which everything is made; what killed runs left there is removed first.

    Its name is new every time: an orphan of a killed run may still be writing and must not meet this run's files.
    """
    building = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        for left in out.glob(".building-*"):
            shutil.rmtree(left, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=out))
        yield building
    except OSError as error:
        if error.errno in FULL:
            raise CheckFailed(
                f"{out}: no space to write ({os.strerror(error.errno)}); what was there is kept"
            ) from None
        if building is None:
            raise InputError(f"{out}: cannot be written to ({error.strerror})") from None
        if not building.exists():
            raise CheckFailed(f"{out}: another run of the tokenize stage took this folder over") from None
        raise
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)


def _publish(building: Path, out: Path, tokenizer_text: str, manifest: dict[str, Any]) -> None:
    """Move the finished files to their names. Between the two manifests there is none, so no mixture is ever read."""
    (building / "tokenizer.json").write_text(tokenizer_text, encoding="utf-8")
    write_json(building / "manifest.json", manifest)
    files = [shard["file"] for entry in manifest["splits"].values() for shard in entry["shards"]]
    (out / "manifest.json").unlink(missing_ok=True)
    for path in sorted(out.glob("*-?????.arrow")):
        if path.name not in files:
            path.unlink()
    for name in (*files, "tokenizer.json", "manifest.json"):
        os.replace(building / name, out / name)
