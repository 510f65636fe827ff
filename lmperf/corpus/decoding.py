"""Bytes to UTF-8: compression by magic number; encoding by mark, strict UTF-8 or declaration, else an error."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from lmperf.records import InputError

CHUNK = 1 << 20
AUTO = "auto"
_NUL_SHARE = 10  # more than one NUL in this many bytes is no text in UTF-8 (but may be UTF-16 without a mark)
_AUTO_SAMPLE = 1 << 20

_MARKS = (  # the longer marks first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_COMPRESSIONS = (
    (b"\x1f\x8b\x08", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ\0", "xz"),
    (b"BZh", "bzip2"),
)


class Unreadable(ValueError):
    """Content that cannot be read as what it is; the message says why."""


def check_encoding(key: str, encoding: str | None) -> None:
    """Raise `InputError` where `encoding` is neither None, "auto" nor the name of a text encoding that Python knows."""
    if encoding is None:
        return
    if encoding == AUTO:
        try:
            import charset_normalizer  # noqa: F401
        except ImportError:
            raise InputError(
                f"{key}: 'auto' needs the package charset-normalizer; install it or name the encoding"
            ) from None
        return
    try:
        codecs.lookup(encoding)
        b"a".decode(encoding, "ignore")
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError, TypeError, AttributeError):
        raise InputError(
            f"{key}: {encoding!r} is no text encoding; allowed: auto, or a Python codec such as gb18030"
        ) from None


def mark_of(data: bytes) -> tuple[bytes, str] | None:
    """The byte-order mark at the start of `data` and its encoding, or None."""
    return next(((mark, name) for mark, name in _MARKS if data.startswith(mark)), None)


def candidates(head: bytes, declared: str | None) -> list[str]:
    """The encodings to try for content that starts with `head`, in their fixed order: mark, UTF-8, the declared one."""
    mark = mark_of(head)
    names = [mark[1]] if mark else []
    if "utf-8" not in names:
        names.append("utf-8")
    if declared == AUTO:
        names += [name for name in [_guess(head[:_AUTO_SAMPLE])] if name]
    elif declared:
        names.append(declared)
    return names


def to_utf8(data: bytes, declared: str | None, *, bounded: bool = False) -> tuple[bytes, str]:
    """`data` as UTF-8 without a mark, and the encoding it was in; `Unreadable` when no allowed encoding fits.

    `bounded`: the format around it says where this text begins and ends, so that a mark or NULs in UTF-8 belong to it.
    """
    if is_utf8(data) if bounded else data.isascii() and not _is_binary(data):
        return data, "utf-8"
    reason = ""
    for encoding in candidates(data, declared):
        try:
            content = _without_mark(data, encoding)
            utf8 = content.decode(encoding).encode()
        except UnicodeError as error:
            reason = reason or f"not valid {encoding} at byte {getattr(error, 'start', 0)}"
            continue
        if encoding == "utf-8" and _is_binary(data):
            reason = "NUL bytes: no text, or UTF-16 without a mark"
            continue
        return utf8, encoding
    raise Unreadable(reason + ("" if declared else "; declare the source's encoding"))


def utf8_chunks(stream: BinaryIO, encoding: str) -> Iterator[bytes]:
    """`stream` in `encoding` as UTF-8 pieces that end between characters; `Unreadable` at the first bad byte."""
    decoder = codecs.getincrementaldecoder(encoding)()
    first, offset, nuls = True, 0, 0
    while True:
        chunk = stream.read(CHUNK)
        piece = _without_mark(chunk, encoding) if first else chunk
        first = False
        try:
            utf8 = decoder.decode(piece, final=not chunk).encode()
        except UnicodeError as error:
            raise Unreadable(f"not valid {encoding} near byte {offset + getattr(error, 'start', 0)}") from None
        offset, nuls = offset + len(chunk), nuls + chunk.count(0)
        if encoding == "utf-8" and nuls * _NUL_SHARE > offset:
            raise Unreadable("NUL bytes: no text, or UTF-16 without a mark")
        if utf8:
            yield utf8
        if not chunk:
            return


def is_utf8(data: bytes) -> bool:
    """Whether `data` is valid UTF-8."""
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_binary(data: bytes) -> bool:
    return 0 in data and data.count(0) * _NUL_SHARE > len(data)


def _without_mark(data: bytes, encoding: str) -> bytes:
    mark = mark_of(data)
    return data[len(mark[0]) :] if mark and codecs.lookup(mark[1]) == codecs.lookup(encoding) else data


def _guess(sample: bytes) -> str | None:
    import charset_normalizer

    best = charset_normalizer.from_bytes(sample).best()
    return best.encoding if best else None


class Plain:
    """A readable byte stream with its compression taken off; damage raises `Unreadable` after all data before it."""

    def __init__(self, raw: BinaryIO) -> None:
        head = raw.read(8)
        raw.seek(0)
        self.compression = next((name for magic, name in _COMPRESSIONS if head.startswith(magic)), None)
        self.offset = 0
        self._raw = raw
        self._pushed = b""
        self._damage: str | None = None
        self._read = _reader(raw, self.compression)

    def read(self, size: int = CHUNK) -> bytes:
        """Up to `size` bytes, fewer only where the stream gives fewer at once; empty at the end."""
        if self._pushed:
            data, self._pushed = self._pushed[:size], self._pushed[size:]
        else:
            data = self._read_whole(size)
        self.offset += len(data)
        return data

    def _read_whole(self, size: int) -> bytes:
        if self._damage is None:
            try:
                return self._read(size)
            except (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError) as error:
                what = f"{self.compression} data truncated or damaged" if self.compression else "read error"
                self._damage = f"{what} after {self.offset} bytes ({error})"
        raise Unreadable(self._damage)

    def read_up_to(self, size: int) -> bytes:
        """`size` bytes, or all there are."""
        pieces, missing = [], size
        while missing and (piece := self.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def peek(self, size: int) -> bytes:
        """The next `size` bytes (fewer at the end or before damage) without consuming them."""
        pieces = []
        try:
            while sum(map(len, pieces)) < size and (piece := self.read(size)):
                pieces.append(piece)
        except Unreadable:
            pass  # the damage is met again, and told, when the content is read
        head = b"".join(pieces)
        self.offset -= len(head)
        self._pushed = head + self._pushed
        return head

    def close(self) -> None:
        """Close the underlying file."""
        self._raw.close()

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reader(raw: BinaryIO, compression: str | None):
    # read1, not read: on damage it has already given every byte before it.
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw).read1
    if compression == "bzip2":
        return bz2.BZ2File(raw).read1
    if compression == "xz":
        return lzma.LZMAFile(raw).read1
    if compression == "zstd":
        inner = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return lambda size: inner.read(min(size, 1 << 16))
    return io.BufferedReader(raw).read if isinstance(raw, io.RawIOBase) else raw.read
