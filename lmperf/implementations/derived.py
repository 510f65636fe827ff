"""Files derived from the token shards for one variant (a flat copy, thousands of small texts), made once and kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lmperf.records import digest, read_json
from lmperf.reference import LoaderSource


def split_key(source: LoaderSource) -> str:
    """A name for derived files that changes with the split's content: `<split>-<hash of its shards and tokenizer>`."""
    manifest = read_json(source.tokens / "manifest.json")
    shards = [shard["sha256"] for shard in manifest["splits"][source.split]["shards"]]
    return f"{source.split}-{digest([manifest['tokenizer_sha256'], shards])}"


def derived(source: LoaderSource) -> Path:
    """The folder for derived files: beside the tokens, else in the sample's scratch, else a temporary one."""
    beside = source.tokens / ".derived"
    if os.access(source.tokens, os.W_OK):
        beside.mkdir(exist_ok=True)
        return beside
    scratch = source.scratch or Path(tempfile.gettempdir()) / "lmperf-derived"
    scratch.mkdir(parents=True, exist_ok=True)
    return scratch
