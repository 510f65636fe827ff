"""A folder of token shards in the format of data/tokens, from real English text that ships with Python."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

END_OF_TEXT = 128
VOCABULARY = 129


def english(limit: int = 200_000) -> bytes:
    """The language reference that Python carries for its help system, as ASCII bytes."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return text.encode("ascii", "ignore")[:limit]


def code(limit: int = 30_000) -> bytes:
    """Python source from the standard library, as ASCII bytes."""
    return Path(json.__file__.replace("__init__", "decoder")).read_bytes().decode().encode("ascii", "ignore")[:limit]


def write_tokens(folder: Path, texts: Mapping[str, bytes] | None = None) -> Path:
    """Write byte-level token shards and their manifest; the default is English in three splits, code as a domain."""
    if texts is None:
        text = english()
        first, second = int(len(text) * 0.8), int(len(text) * 0.9)
        texts = {
            "train": text[:first],
            "validation": text[first:second],
            "test": text[second:],
            "domain.code": code(),
        }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.dumps({"model": {"type": "byte-level stand-in"}}).encode()
    (folder / "tokenizer.json").write_bytes(tokenizer)
    name = hashlib.sha256(tokenizer).hexdigest()
    splits = {split: _write_split(folder, split, text, name) for split, text in texts.items()}
    manifest = {
        "schema": 1, "vocab_size": VOCABULARY, "dtype": "uint16", "tokenizer_sha256": name,
        "end_of_text": END_OF_TEXT, "splits": splits, "engine": "stand-in",
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def _write_split(folder: Path, split: str, text: bytes, tokenizer: str) -> dict[str, object]:
    tokens = np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), np.uint16(END_OF_TEXT))
    schema = pa.schema(
        [pa.field("tokens", pa.uint16(), nullable=False)], {"tokenizer_sha256": tokenizer, "split": split}
    )
    path = folder / f"{split}-00000.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(tokens)], schema=schema))
    shard = {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "tokens": len(tokens),
        "documents": 1,
    }
    return {"shards": [shard], "tokens": len(tokens), "documents": 1, "bytes": len(text)}
