"""The growing file of a session's rounds: whole lines, fsync, and a resume that keeps closed rounds byte for byte."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmperf.records import Sample, atomic_write, canonical_json, from_json

Line = Mapping[str, Any]
CLOSING = ("header", "memory", "round")  # a file cut after one of these is whole


class Corrupt(ValueError):
    """A rounds file that no killed session can have left behind."""


@dataclass
class Journal:
    """Header, memory lines and closed rounds of one session, on disk and as read."""

    path: Path
    header: Line
    samples: list[Sample] = field(default_factory=list)
    memory: list[Sample] = field(default_factory=list)
    rounds: int = 0

    @classmethod
    def open(cls, path: Path, header: Line, say: Callable[[str], None]) -> Journal:
        """Continue the file at `path` when it was begun with the same spec on the same machine, else begin it anew.

        A file that cannot be read is kept aside under another name, never silently dropped.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            found = cls._read(path) if path.exists() else None
        except Corrupt as error:
            aside = _aside(path)
            os.replace(path, aside)
            say(f"{path.name} cannot be continued ({error}): kept as {aside.name}, starting anew")
            found = None
        if found is not None and _same(found.header, header):
            say(f"continuing after round {found.rounds}")
            return found
        if found is not None:
            say("the spec or the machine changed: starting anew")
        journal = cls(path, header)
        with atomic_write(path, "wb") as stream:
            stream.write(_encoded([header]))
        return journal

    @classmethod
    def _read(cls, path: Path) -> Journal:
        data = path.read_bytes()
        lines, ends, position = [], [], 0
        for raw in data.split(b"\n")[:-1]:
            position += len(raw) + 1
            lines.append(_parsed(raw, len(lines) + 1))
            ends.append(position)
        keep = max((n for n, line in enumerate(lines, 1) if line["kind"] in CLOSING), default=0)
        if keep == 0 or lines[0]["kind"] != "header":
            raise Corrupt("it has no header")
        journal = cls(path, lines[0])
        for line in lines[1:keep]:
            journal._take(line)
        if ends[keep - 1] != len(data):  # the round that was being written when the session was killed
            with path.open("r+b") as stream:
                stream.truncate(ends[keep - 1])
                os.fsync(stream.fileno())
        return journal

    def _take(self, line: Line) -> None:
        body = {key: value for key, value in line.items() if key != "kind"}
        if line["kind"] == "memory":
            self.memory.append(from_json(Sample, body))
        elif line["kind"] == "sample":
            self.samples.append(from_json(Sample, body))
            if self.samples[-1].round != self.rounds + 1:
                raise Corrupt(f"a sample of round {self.samples[-1].round} stands in round {self.rounds + 1}")
        elif line["kind"] == "round":
            if line["round"] != self.rounds + 1:
                raise Corrupt(f"round {line['round']} follows round {self.rounds}")
            self.rounds += 1

    def add_memory(self, sample: Mapping[str, Any]) -> None:
        """Append one memory sample (a `Sample`'s JSON)."""
        line = {"kind": "memory", **sample}
        self._append([line])
        self._take(line)

    def add_round(self, samples: Sequence[Mapping[str, Any]], cluster: Mapping[str, Any] | None = None) -> None:
        """Append the samples of the next round and close it, in one write; on a cluster it says in which job."""
        lines = [{"kind": "sample", **sample} for sample in samples]
        place = {"cluster": cluster} if cluster else {}
        lines.append({"kind": "round", "round": self.rounds + 1, **place})
        self._append(lines)
        for line in lines:
            self._take(line)

    def _append(self, lines: Sequence[Line]) -> None:
        with self.path.open("ab", buffering=0) as stream:
            data = _encoded(lines)
            while data:
                data = data[stream.write(data) :]
            os.fsync(stream.fileno())

    def finish(self, out: Path) -> Path:
        """Write the finished session to `out` by rename (these very bytes and an end line) and drop the rounds file."""
        with atomic_write(out, "wb") as stream:
            stream.write(self.path.read_bytes() + _encoded([{"kind": "end"}]))
        self.path.unlink()
        return out


def _encoded(lines: Sequence[Line]) -> bytes:
    return b"".join(canonical_json(line).encode() + b"\n" for line in lines)


def _parsed(raw: bytes, number: int) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except ValueError:
        raise Corrupt(f"line {number} is not valid JSON") from None
    if not isinstance(line, dict) or line.get("kind") not in ("header", "memory", "sample", "round"):
        raise Corrupt(f"line {number} is of no known kind")
    return line


def _same(old: Line, new: Line) -> bool:
    keys = ("spec", "fingerprint", "environment", "node")  # a session begun on one node is not ended on another
    return all(canonical_json(old.get(key)) == canonical_json(new.get(key)) for key in keys)


def _aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.unreadable-{number}")).exists():
        number += 1
    return aside
