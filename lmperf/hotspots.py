"""The operators in which a recorded step spends its time, with their place under this machine's roofline."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmperf.flops import BYTES, roofline

COLUMNS = (
    "operator", "self_time_us", "share", "calls", "flops", "input_shapes", "intensity", "roofline", "peak_share",
)  # fmt: skip

#: Rows that tell of the profiler or of the driver's bookkeeping, not of the step's work.
OVERHEAD = re.compile(
    r"^(ProfilerStep\*|\[memory\]|\[OutOfMemory\]|Activity Buffer Request|Lazy Function Loading|Buffer Flush"
    r"|Command Buffer Full|Instrumentation|Resource|Runtime Triggered Module Loading|Unrecognized|OVERHEAD.*)$"
)


@dataclass(frozen=True)
class Ceiling:
    """What the machine can do: matmul FLOP/s in the step's dtype and copy bytes/s, None where not measured."""

    flops: float | None
    bandwidth: float | None
    dtype: str = "float32"


def hotspots(averages: Sequence[Any], ceiling: Ceiling, device: str = "cpu") -> list[dict[str, Any]]:
    """All operators by self time, largest first: rows of COLUMNS, with `share` of the step's operator time.

    `averages` is `profiler.key_averages(group_by_input_shape=True)`; on CUDA the time is the device's.
    """
    kept = [event for event in averages if not OVERHEAD.match(event.key) and self_time(event, device) > 0]
    total = sum(self_time(event, device) for event in kept)
    ordered = sorted(kept, key=lambda event: self_time(event, device), reverse=True)
    return [hotspot(event, total, ceiling, device) for event in ordered]


def self_time(event: Any, device: str) -> float:
    """Self time in µs over all calls, on the device when it is CUDA."""
    return event.self_device_time_total if device.startswith("cuda") else event.self_cpu_time_total


def hotspot(event: Any, total: float, ceiling: Ceiling, device: str) -> dict[str, Any]:
    """One row of the table."""
    time_us = self_time(event, device)
    flops = event.flops or None
    moved = bytes_moved(event.key, event.input_shapes or [], BYTES[ceiling.dtype])
    position = roofline(flops, event.count * moved if moved else None, ceiling.flops, ceiling.bandwidth)
    if position is None and moved and flops is None and ceiling.flops and ceiling.bandwidth:
        # What the profiler counts no FLOPs for (copies, softmax, activations, norms) does a few an element at most.
        position = {"intensity": None, "bound": "memory"}
    rate = flops / (time_us * 1e-6) if flops else None
    return {
        "operator": event.key,
        "self_time_us": time_us,
        "share": time_us / total,
        "calls": event.count,
        "flops": flops,
        "input_shapes": shapes_text(event.input_shapes or []),
        "intensity": position["intensity"] if position else None,
        "roofline": position["bound"] if position else None,
        "peak_share": rate / ceiling.flops if rate and ceiling.flops else None,
    }


def shapes_text(shapes: Sequence[Any]) -> str:
    """Input shapes as text, "8x256x64 256x64"; scalars and absent inputs are left out."""
    return " ".join("x".join(map(str, shape)) for shape in shapes if shape and isinstance(shape[0], int))


def bytes_moved(operator: str, shapes: Sequence[Any], size: int) -> int | None:
    """The least bytes that one call must read and write at `size` bytes an element; None without shapes."""
    tensors = [shape for shape in shapes if shape and isinstance(shape[0], int)]
    if not tensors:
        return None
    read = sum(math.prod(shape) for shape in tensors)
    matrices = [shape for shape in tensors if len(shape) >= 2]
    if re.search(r"(mm|matmul|linear)$", operator) and len(matrices) >= 2:
        left, right = matrices[-2:]
        written = math.prod(left[:-1]) * right[-1]
    else:
        written = max(math.prod(shape) for shape in tensors)
    return size * (read + written)


def by_operator(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Shares summed over input shapes: the answer to "which operators are the top three"."""
    sums: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = sums.setdefault(row["operator"], {"operator": row["operator"], "share": 0.0, "calls": 0})
        entry["share"] += row["share"]
        entry["calls"] += row["calls"]
    return sorted(sums.values(), key=lambda entry: -entry["share"])
