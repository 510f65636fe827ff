"""A large document as pieces of bounded size, cut at the same places whatever it came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

PIECE = 4 << 20
LOOK_BACK = 1 << 16


def pieces(stream: BinaryIO) -> Iterator[bytes]:
    """The UTF-8 of `stream` in pieces of at most `PIECE` bytes, ended after a line, a blank, or else a character."""
    held = b""
    while chunk := stream.read(PIECE - len(held)):
        data = held + chunk
        if len(data) < PIECE:
            held = data
            continue
        cut = _cut(data)
        yield data[:cut]
        held = data[cut:]
    if held:
        yield held


def _cut(data: bytes) -> int:
    start = len(data) - LOOK_BACK
    for mark in (b"\n", b" "):
        at = data.rfind(mark, start)
        if at >= 0:
            return at + 1
    end = len(data)
    # The last character may go on in the next piece: cut before its first byte.
    while end > start and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if data[end - 1] >= 0xC0 else len(data)
