"""Documents out of Parquet, Arrow and Feather files: only the text column is read, a few rows at a time."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lmperf.corpus.decoding import CHUNK, Plain, Unreadable, to_utf8
from lmperf.corpus.events import Event, Input, Notes, Problem, Text
from lmperf.corpus.formats import text_keys

BATCH_BYTES = 8 << 20
BATCH_ROWS = 4096
_BARE = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}


def read_parquet(source: Input, stream: Plain, notes: Notes) -> Iterator[Event]:
    """One document a row of the text column."""
    yield from _guarded(source, stream, notes, _parquet_columns)


def read_arrow(source: Input, stream: Plain, notes: Notes) -> Iterator[Event]:
    """One document a row of an Arrow IPC or Feather file."""
    yield from _guarded(source, stream, notes, _arrow_columns)


def read_arrow_stream(source: Input, stream: Plain, notes: Notes) -> Iterator[Event]:
    """One document a row of an Arrow IPC stream."""
    yield from _guarded(source, stream, notes, _stream_columns)


def _guarded(source: Input, stream: Plain, notes: Notes, columns: Any) -> Iterator[Event]:
    row = 0
    try:
        with _mapped(source, stream) as mapped:
            for column in columns(pa.BufferReader(pa.py_buffer(mapped)), source.text_key):
                for value in column.to_pylist():
                    row += 1
                    yield from _value(value, row, source, notes)
                if isinstance(mapped, mmap.mmap):
                    mapped.madvise(mmap.MADV_DONTNEED)  # the pages just read would stay resident to the end
    except (pa.ArrowException, Unreadable, OSError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        yield Problem(f"after row {row}: {reason}", max(stream.offset, 1), {"offset": 0})


@contextmanager
def _mapped(source: Input, stream: Plain) -> Iterator[Any]:
    """The content as a buffer: what memory has, or the mapped file, or (compressed) a mapped temporary file."""
    if stream.compression:
        with source.spool() as spool:
            shutil.copyfileobj(stream, spool, CHUNK)
            spool.flush()
            yield mmap.mmap(spool.fileno(), 0, access=mmap.ACCESS_READ)
        return
    with source.open() as raw:
        stream.offset = raw.seek(0, 2)
        # Not closed: Arrow may hold on to the buffer a little longer; it goes when the last array does.
        yield source.data if source.data is not None else mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)


def _value(value: bytes | None, row: int, source: Input, notes: Notes) -> Iterator[Event]:
    if not value:
        notes.empty += 1
        return
    try:
        utf8, encoding = to_utf8(value, source.encoding, bounded=True)
    except Unreadable as error:
        yield Problem(str(error), len(value), {"line": row})
        return
    notes.encodings[encoding] += 1
    yield Text(utf8)


def _parquet_columns(file: Any, text_key: str | None) -> Iterator[pa.Array]:
    parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=CHUNK)
    path, kind = _column(parquet.schema_arrow, text_key)
    rows = _rows_a_batch(parquet.metadata, ".".join(path))
    for batch in parquet.iter_batches(rows, columns=[".".join(path)], use_threads=False):
        yield _as_binary(_dig(batch.column(0), path[1:]), kind)


def _rows_a_batch(metadata: Any, path: str) -> int:
    """Rows that make about `BATCH_BYTES`, by the mean of the row group with the longest values."""
    mean = 1.0
    for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
        for column in (group.column(i) for i in range(group.num_columns)):
            if column.path_in_schema == path and group.num_rows:
                mean = max(mean, column.total_uncompressed_size / group.num_rows)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / mean)))


def _arrow_columns(file: Any, text_key: str | None) -> Iterator[pa.Array]:
    reader = pa.ipc.open_file(file)
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    yield from _batches(reader.schema, batches, text_key)


def _stream_columns(file: Any, text_key: str | None) -> Iterator[pa.Array]:
    reader = pa.ipc.open_stream(file)
    yield from _batches(reader.schema, iter(reader), text_key)


def _batches(schema: pa.Schema, batches: Iterator[pa.RecordBatch], text_key: str | None) -> Iterator[pa.Array]:
    path, kind = _column(schema, text_key)
    for batch in batches:
        rows = max(1, min(BATCH_ROWS, int(BATCH_BYTES * batch.num_rows / max(1, batch.nbytes))))
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows).column(path[0])
            yield _as_binary(_dig(piece, path[1:]), kind)


def _dig(column: pa.Array, path: list[str]) -> pa.Array:
    import pyarrow.compute as pc

    for name in path:
        column = pc.struct_field(column, name)
    return column


def _as_binary(column: pa.Array, kind: pa.DataType) -> pa.Array:
    # The offsets are checked, since a damaged file's may point anywhere; each text is decoded by itself.
    if pa.types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.cast(kind)
    bare = _BARE.get(column.type)
    column = column.view(bare) if bare else column
    column.validate(full=True)
    return column.cast(pa.large_binary())


def _column(schema: pa.Schema, text_key: str | None) -> tuple[list[str], pa.DataType]:
    """The path to the text column and its type without dictionary; `Unreadable` when there is none with text."""
    for key in text_keys(text_key):
        for path in ([key], key.split(".")):
            kind = _type_at(schema, path)
            if kind is not None:
                return path, _textual(key, kind)
    names = list(schema.names)
    if len(names) == 1 and not text_key:
        return [names[0]], _textual(names[0], schema.field(0).type)
    raise Unreadable(f"no column {' or '.join(map(repr, text_keys(text_key)))}; columns: {', '.join(names)[:200]}")


def _type_at(schema: pa.Schema, path: list[str]) -> pa.DataType | None:
    if schema.names.count(path[0]) != 1:
        return None
    kind = schema.field(path[0]).type
    for name in path[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _textual(name: str, kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary)
    checks += (pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_null)
    if not any(check(kind) for check in checks):
        raise Unreadable(f"column {name!r} is {kind}, not a string")
    return kind
