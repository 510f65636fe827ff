"""Documents out of one file of any format; nothing is dropped in silence."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lmperf.corpus.columnar import read_arrow, read_arrow_stream, read_parquet
from lmperf.corpus.decoding import Plain, Unreadable, mark_of
from lmperf.corpus.events import HEAD, Event, Input, Notes, Problem
from lmperf.corpus.formats import recognise
from lmperf.corpus.records import read_json_array, read_json_object, read_jsonl
from lmperf.corpus.tables import read_table
from lmperf.corpus.texts import read_html, read_text

READERS = {
    "text": read_text,
    "html": read_html,
    "jsonl": read_jsonl,
    "json": read_json_array,
    "object": read_json_object,
    "csv": partial(read_table, delimiter=","),
    "tsv": partial(read_table, delimiter="\t"),
    "parquet": read_parquet,
    "arrow": read_arrow,
    "stream": read_arrow_stream,
}


def read_documents(source: Input, notes: Notes) -> Iterator[Event]:
    """Every document and every problem of one file, in order."""
    with source.plain() as stream:
        head = stream.peek(HEAD)
        kind = recognise(head, source.name, source.text_key, source.encoding)
        notes.formats[f"{kind}.{stream.compression}" if stream.compression else kind] += 1
        if mark_of(head):
            notes.cleaning["byte_order_mark"] += 1
        if kind.startswith("binary:"):
            yield Problem(f"{kind[7:]}: no text", _drain(stream), {"offset": 0})
        else:
            yield from READERS[kind](source, stream, notes)
        notes.content_bytes += stream.offset


def _drain(stream: Plain) -> int:
    try:
        while stream.read(1 << 20):
            pass
    except Unreadable:
        pass  # already being set aside; only its size is wanted
    return stream.offset
