"""Texts to token ids: HF `tokenizers`, or `fastokens` where it is installed and proven to give the same ids."""

from __future__ import annotations

import importlib.util
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain

import numpy as np
from tokenizers import Tokenizer

from lmperf.records import InputError

log = logging.getLogger(__name__)

ACCELERATORS = ("auto", "fastokens", "none")
FUZZ_TEXTS = 400
BATCH_BYTES = {"tokenizers": 1 << 20, "fastokens": 4 << 20}  # HF keeps about 100 bytes a token, fastokens 8
Encode = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]  # texts → ids (uint32, joined), lengths (int64)


@dataclass(frozen=True)
class Engine:
    """The library in use and its encoder; `note` says why the accelerator is or is not the one."""

    name: str  # "tokenizers" | "fastokens"
    version: str
    encode: Encode
    note: str
    batch_bytes: int  # text handed to the encoder at once


def reference_encoder(tokenizer: Tokenizer) -> Encode:
    """The encoder of HF `tokenizers`: no special tokens added, special tokens in the text encoded as plain text."""

    def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        lists = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        return np.fromiter(chain.from_iterable(lists), dtype=np.uint32, count=int(lengths.sum())), lengths

    return encode


def fastokens_encoder(tokenizer_json: str) -> Encode:
    """The encoder of `fastokens`, which hands over one flat buffer; raises `ValueError` for a file it cannot read."""
    import fastokens

    tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = tokenizer.encode_batch_flat(list(texts), add_special_tokens=False, split_special_tokens=True)
        return np.frombuffer(ids, dtype="<u4"), np.diff(np.frombuffer(offsets, dtype="<u8").astype(np.int64))

    return encode


def choose_engine(tokenizer: Tokenizer, wanted: str, first_texts: Sequence[str]) -> Engine:
    """The engine to encode with: `fastokens` only when it gives the reference's ids on `first_texts` and a fuzz set.

    `wanted` "auto" falls back to HF `tokenizers` with a log line; "fastokens" makes a missing or unequal accelerator an
    `InputError`; "none" never tries it.
    """
    reference = reference_encoder(tokenizer)
    if wanted == "none":
        return _engine("tokenizers", reference, "asked for")
    encode, reason = _try_fastokens(tokenizer, reference, first_texts)
    if encode is not None:
        return _engine("fastokens", encode, reason)
    if wanted == "fastokens":
        raise InputError(f"tokenizer.accelerator: 'fastokens' cannot be used here: {reason}; allowed: auto, none")
    log.info("tokenizing with `tokenizers`: %s", reason)
    return _engine("tokenizers", reference, reason)


def _engine(name: str, encode: Encode, note: str) -> Engine:
    return Engine(name, version(name), encode, note, BATCH_BYTES[name])


def _try_fastokens(tokenizer: Tokenizer, reference: Encode, first_texts: Sequence[str]) -> tuple[Encode | None, str]:
    if importlib.util.find_spec("fastokens") is None:
        return None, "fastokens is not installed"
    try:
        text = tokenizer.to_str()
        encode = fastokens_encoder(text)
        texts = [*first_texts, *fuzz_texts(_special_tokens(text))]
        different = first_difference(reference, encode, texts)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return None, f"fastokens refused this tokenizer ({error})"
    if different is not None:
        return None, f"fastokens gave other ids for {texts[different][:40]!r}"
    return encode, f"same ids as tokenizers on {len(texts)} texts"


def first_difference(reference: Encode, candidate: Encode, texts: Sequence[str]) -> int | None:
    """Index of the first text for which two encoders give different ids, None when there is none."""
    ids, lengths = reference(texts)
    other_ids, other_lengths = candidate(texts)
    if len(other_lengths) != len(lengths):
        return 0
    if np.array_equal(lengths, other_lengths) and np.array_equal(ids, other_ids):
        return None
    starts = np.concatenate([[0], np.cumsum(lengths)])
    other_starts = np.concatenate([[0], np.cumsum(other_lengths)])
    for index in range(len(texts)):
        mine = ids[starts[index] : starts[index + 1]]
        if not np.array_equal(mine, other_ids[other_starts[index] : other_starts[index + 1]]):
            return index
    return None


def _special_tokens(tokenizer_json: str) -> list[str]:
    added = json.loads(tokenizer_json).get("added_tokens") or []
    return [token["content"] for token in added][:20]


ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyzETAOIN",
    "0123456789.,-+%€",
    " \t\n\r\u00a0\u2028\u2029\u3000\x0b\x0c\x85",
    "éèüñçßøåœæşğıİǅﬁ",
    "ΑΒγδЖдйשלוםمرحبا",
    "我能吞下玻璃而不伤身体日本語ひらがなカタカナ한국어",
    "e\u0301a\u0308o\u0302\u0327\u200d\ufe0f\u20e3",
    "😀👩🏽🔬🇩🇪🏴𝒳𐍈",
    "\x00\x01\x1f\x7f\ufeff\ufffd\u200b\U0010ffff",
    "{}[]()<>|#_=+*/\\\"'`~!?@&;:$^",
)
SNIPPETS = (
    "'s",
    "'ll",
    "I'VE",
    "  \n\n  ",
    "   x",
    "\t\tif",
    "http://a.b/c?d=e",
    "1,000,000",
    "....",
    "A" * 300,
    " " * 70,
)


def fuzz_texts(extra: Sequence[str] = (), count: int = FUZZ_TEXTS, seed: int = 0) -> list[str]:
    """`count` random texts that mix scripts, white space, digits, controls, contractions and the strings in `extra`."""
    chance = random.Random(seed)
    snippets = (*SNIPPETS, *extra)

    def part() -> str:
        if chance.random() < 0.25:
            return chance.choice(snippets)
        return "".join(chance.choices(chance.choice(ALPHABETS), k=chance.randint(1, 12)))

    mixed = ["".join(part() for _ in range(chance.randint(1, 12))) for _ in range(count)]
    return ["", *snippets, *mixed]
