"""Where each session ran: the kind of node, and on a cluster which one, from the first line of its file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmperf.records import InputError


def session_facts(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Each session's header in brief: rounds, arms, threads, and on which node of which type it ran."""
    facts = []
    for name in names:
        with (folder / f"{name}.jsonl").open(encoding="utf-8") as stream:
            try:
                header = json.loads(stream.readline())
            except json.JSONDecodeError:
                raise InputError(f"{folder / name}.jsonl: its first line is not valid JSON") from None
        spec = header["spec"]
        facts.append({"name": name, "rounds": spec["rounds"], "arms": len(spec["arms"]), "threads": spec["threads"],
                      "fingerprint": header["fingerprint"], "seed": spec["seed"], "device": spec["device"],
                      "node": header.get("node"), **node_type(header)})  # fmt: skip
    return facts


def node_type(header: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of node that a session's header records: processor, instruction sets, memory, GPUs with their count."""
    machine = header.get("provenance", {}).get("machine") or {}
    cpu = machine.get("cpu") or {}
    gpus = Counter((gpu["name"], gpu.get("memory_bytes")) for gpu in machine.get("gpus") or ())
    return {
        "cpu": cpu.get("model"),
        "cores": cpu.get("cores") or cpu.get("threads"),
        "instruction_sets": cpu.get("instruction_sets") or [],
        "memory_bytes": machine.get("memory_bytes"),
        "gpus": [{"name": name, "memory_bytes": size, "count": count} for (name, size), count in gpus.items()],
    }
