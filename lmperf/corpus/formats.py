"""Recognise what a file holds by its content; the name only decides where the content leaves two readings open."""

from __future__ import annotations

import codecs
import csv
import json
import re
from typing import Any

from lmperf.corpus.decoding import AUTO, mark_of

DEFAULT_KEYS = ("text", "content")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
_PACKED = re.compile(r"\.(gz|zst|zstd|bz2|xz)$")
_BINARY = (
    (b"\x89PNG", "PNG image"), (b"\xff\xd8\xff", "JPEG image"), (b"GIF8", "GIF image"), (b"%PDF-", "PDF"),
    (b"PK\x03\x04", "ZIP archive"), (b"\x7fELF", "ELF binary"), (b"SQLite format 3\0", "SQLite database"),
    (b"FEA1", "Feather version 1"), (b"\x1f\x8b", "gzip in a compressed file"), (b"7z\xbc\xaf\x27\x1c", "7z archive"),
)  # fmt: skip
_HTML = re.compile(rb"\s*(?:<\?xml[^>]*\?>\s*|<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)
_OBJECT_START = re.compile(rb'\s*\{\s*"(?:[^"\\\n]|\\.){0,200}"\s*:')
_ARRAY_START = re.compile(rb"\s*\[\s*(?=[{\"\]])")
# Anything a plain text cannot begin with, or that asks for a closer look: one match decides for most small files.
_SPECIAL = re.compile(
    rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ|PAR1|ARROW1|\xff|\xfe|\0\0|\xef\xbb\xbf|FEA1|\x89PNG|GIF8|%PDF-|PK\x03\x04|\x7fELF"
    rb"|SQLite|7z\xbc|\s*[\[{<]"
)


def text_keys(text_key: str | None) -> tuple[str, ...]:
    """The columns that may hold the text: the declared one alone, or the usual names."""
    return (text_key,) if text_key else DEFAULT_KEYS


def suffix_of(name: bytes) -> str:
    """The lower-case suffix of a file name, without a compression's suffix."""
    base = _PACKED.sub("", name.rpartition(b"/")[2].decode("utf-8", "replace").lower())
    return "." + base.rpartition(".")[2] if "." in base else ""


def is_plain(data: bytes, name: bytes, keys: tuple[bytes, ...]) -> bool:
    """Whether `data` is surely one plain text: no magic number, mark, bracket or header line with a text column."""
    if _SPECIAL.match(data) or name.endswith((b".csv", b".tsv")):
        return False
    end = data.find(b"\n", 0, 2000)
    if end < 0:
        return True
    for key in keys:  # a generator would cost as much as all the rest of this function
        if data.find(key, 0, end) >= 0:
            return False
    return True


def recognise(head: bytes, name: bytes, text_key: str | None, encoding: str | None = None) -> str:
    """The format of content that begins with `head`: a key of `reading.READERS`, or "binary:" and what it is."""
    if kind := _binary(head):
        return kind
    head = _head_as_utf8(head, encoding)
    suffix = suffix_of(name)
    if kind := _json_kind(head, suffix, text_key):
        return kind
    if _HTML.match(head) or (suffix in (".html", ".htm", ".xhtml") and b"<" in head):
        return "html"
    return _table_kind(head, suffix, text_key) or "text"


def _head_as_utf8(head: bytes, encoding: str | None) -> bytes:
    mark = mark_of(head)
    if mark:
        return head[len(mark[0]) :].decode(mark[1], "ignore").encode("utf-8", "ignore")
    if encoding in (None, AUTO) or (0 not in head and _starts_as_utf8(head)):
        return head
    return head.decode(encoding, "ignore").encode("utf-8", "ignore")


def _starts_as_utf8(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _binary(head: bytes) -> str | None:
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1"):
        return "arrow"
    if head.startswith(b"\xff\xff\xff\xff") and 0 < int.from_bytes(head[4:8], "little") < 1 << 24:
        return "stream"
    return next((f"binary:{kind}" for magic, kind in _BINARY if head.startswith(magic)), None)


def _json_kind(head: bytes, suffix: str, text_key: str | None) -> str | None:
    start = head.lstrip()[:1]
    if start == b"{":
        return _object_kind(head, suffix, text_key)
    if match := _ARRAY_START.match(head):
        return _array_kind(head[match.end() :], suffix, text_key)
    return "jsonl" if suffix in JSONL_SUFFIXES else None


def _object_kind(head: bytes, suffix: str, text_key: str | None) -> str | None:
    if suffix in JSONL_SUFFIXES:
        return "jsonl"
    lines = [line for line in head.split(b"\n")[:20] if line.strip()]
    records = [record for record in map(_loads, lines) if isinstance(record, dict)]
    if any(key in record for record in records for key in text_keys(text_key)):
        return "jsonl"
    if records and (text_key or len(records) > 1):
        return "jsonl"
    if not records and len(lines) == 1 and len(head) >= 65536 and _OBJECT_START.match(head):
        return "jsonl"  # one line longer than what was looked at
    return "object" if suffix == ".json" else None


def _array_kind(rest: bytes, suffix: str, text_key: str | None) -> str | None:
    text = rest.decode("utf-8", "replace")
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        long_element = len(rest) > 60000 and _OBJECT_START.match(rest)
        return "json" if suffix == ".json" or long_element else None
    if text[end:].lstrip()[:1] not in (",", "]", ""):
        return None
    if isinstance(value, dict):
        known = text_key or any(key in value for key in DEFAULT_KEYS)
        return "json" if known else None
    return "json" if isinstance(value, str) else None


def _loads(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None


def _table_kind(head: bytes, suffix: str, text_key: str | None) -> str | None:
    if suffix in (".csv", ".tsv"):
        return suffix[1:]
    first, _, rest = head.partition(b"\n")
    if len(first) > 2000 or not rest.strip():
        return None
    for kind, delimiter in (("csv", ","), ("tsv", "\t")):
        cells = _cells(first, delimiter)
        names = len(cells) > 1 and all(re.fullmatch(r"[\w.-]{1,64}", cell) for cell in cells)
        # A header alone proves nothing ("text,next" may open a poem): the next line must have as many cells.
        if names and any(key in cells for key in text_keys(text_key)) and _same_width(rest, delimiter, len(cells)):
            return kind
    return None


def _cells(line: bytes, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line.decode("utf-8", "replace").rstrip("\r")], delimiter=delimiter), [])
    except csv.Error:
        return []


def _same_width(rest: bytes, delimiter: str, width: int) -> bool:
    lines = rest.decode("utf-8", "replace").splitlines(keepends=True)
    try:
        return len(next(csv.reader(lines, delimiter=delimiter), [])) == width
    except csv.Error:
        return False
