"""A folder of files, ingested: what the tests of reading, cleaning and shards share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmperf.corpus.shards import ingest, read_shards
from lmperf.corpus.sources import fetch_corpus


@dataclass(frozen=True)
class Ingested:
    """The manifest, the texts in order, and the quarantine's lines."""

    manifest: dict[str, Any]
    texts: list[str]
    quarantine: list[dict[str, Any]]
    out: Path

    @property
    def source(self) -> dict[str, Any]:
        """The manifest's record of the first source."""
        return self.manifest["sources"][0]


def write_files(folder: Path, files: Mapping[str | bytes, bytes]) -> Path:
    """Write `files` (name → content) below `folder`; names may be bytes that are no UTF-8."""
    for name, content in files.items():
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as stream:
            stream.write(content)
    return folder


def source(path: Path, **options: Any) -> dict[str, Any]:
    """A source of kind `files`."""
    return {"name": "mine", "kind": "files", "domain": "english", "path": str(path), **options}


def run(
    tmp_path: Path, files: Mapping[str | bytes, bytes], *, limits: Mapping[str, Any] | None = None, **options: Any
) -> Ingested:
    """Write `files`, fetch and ingest them; nothing is refused for too much quarantine unless `limits` says so."""
    write_files(tmp_path / "text", files)
    return run_folder(tmp_path, tmp_path / "text", limits=limits, **options)


def run_folder(tmp_path: Path, folder: Path, *, limits: Mapping[str, Any] | None = None, **options: Any) -> Ingested:
    """Fetch and ingest what lies in `folder`."""
    sources, out = [source(folder, **options)], tmp_path / "shards"
    fetch_corpus(sources, tmp_path / "raw")
    manifest = ingest(sources, tmp_path / "raw", out, **{"max_quarantine": 1.0, **(limits or {})})
    return collect(manifest, out)


def collect(manifest: dict[str, Any], out: Path) -> Ingested:
    """Read back what `ingest` wrote."""
    lines = (out / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    return Ingested(manifest, [row[3] for row in read_shards(out)], [json.loads(line) for line in lines], out)
