"""Cleaning of UTF-8 text, declared and counted, and the hash by which equal documents are found."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

DECLARED = {
    "nul": "NUL characters removed",
    "control": "other control characters removed (C0 but for tab and line feed, DEL, C1 but for U+0085)",
    "page_break": "form feeds and vertical tabs made line feeds",
    "crlf": "CRLF made LF",
    "cr": "lone CR made LF",
    "surrogate": "lone surrogates (from JSON escapes) made U+FFFD",
    "byte_order_mark": "byte-order marks removed",
}

_C0 = bytes(c for c in range(0x20) if c not in b"\t\n") + b"\x7f"
_REMOVED = bytes(c for c in _C0 if c not in b"\0\r\x0b\x0c")
_C1 = re.compile(rb"\xc2[\x80-\x84\x86-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BREAKS = bytes.maketrans(b"\r\x0b\x0c", b"\n\n\n")


def clean(data: bytes, counts: Counter[str]) -> bytes:
    """UTF-8 `data` cleaned as `DECLARED` says; each change is counted in `counts`. Clean text comes back as it is."""
    if len(data.translate(None, _C0)) != len(data):
        data = _clean_c0(data, counts)
    if b"\xc2" in data:  # the first byte of all C1 characters, and of few others
        data, removed = _C1.subn(b"", data)
        if removed:
            counts["control"] += removed
    return data


def _clean_c0(data: bytes, counts: Counter[str]) -> bytes:
    found = {"nul": data.count(b"\0"), "page_break": data.count(b"\x0b") + data.count(b"\x0c")}
    data = data.replace(b"\0", b"")
    found["crlf"] = data.count(b"\r\n")
    data = data.replace(b"\r\n", b"\n")
    found["cr"] = data.count(b"\r")
    before = len(data)
    data = data.translate(_BREAKS, _REMOVED)
    found["control"] = before - len(data)
    counts.update({key: count for key, count in found.items() if count})
    return data


def clean_chunks(chunks: Iterable[bytes], counts: Counter[str]) -> Iterator[bytes]:
    """`clean` over the pieces of one text; a CR at a piece's end waits for the LF that may follow."""
    held = b""
    for chunk in chunks:
        piece = held + chunk
        held = b"\r" if piece.endswith(b"\r") else b""
        if cleaned := clean(piece[: len(piece) - len(held)], counts):
            yield cleaned
    if held:
        yield clean(held, counts)


def encode(text: str, counts: Counter[str]) -> bytes:
    """`text` as UTF-8; lone surrogates, which no UTF-8 can hold, become U+FFFD and are counted."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        # A pair written as two escapes is one character: json has joined it already, what is left is alone.
        counts["surrogate"] += len(_SURROGATE.findall(text))
        return _SURROGATE.sub("\ufffd", text).encode()


def normalised(data: bytes, *, strip: bool = True) -> bytes:
    """Cleaned UTF-8 `data` as it is hashed: NFC, and without white space at either end."""
    if not data.isascii():
        text = data.decode()
        if not unicodedata.is_normalized("NFC", text):
            data = unicodedata.normalize("NFC", text).encode()
    return data.strip() if strip else data


def digest_of_pieces(pieces: Iterable[bytes]) -> bytes:
    """The first 16 bytes of the SHA-256 of all pieces: a large document's identity."""
    total = hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return total.digest()[:16]
