"""This machine: what it is, a fingerprint that says whether two results may be compared, and what it can do at best."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch

from lmperf.datasheets import datasheet_bandwidth, datasheet_peak
from lmperf.records import InputError, digest

__all__ = ["datasheet_bandwidth", "datasheet_peak", "fingerprint", "machine", "measure_peaks"]

#: Instruction sets that decide which dtype is fast: our name → the flag in /proc/cpuinfo (x86 and Arm).
INSTRUCTION_FLAGS = {
    "avx2": "avx2", "fma": "fma", "avx512": "avx512f", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16", "amx_bf16": "amx_bf16", "amx_int8": "amx_int8", "amx_fp16": "amx_fp16",
    "f16c": "f16c", "neon": "asimd", "arm_fp16": "fphp", "arm_bf16": "bf16", "arm_i8mm": "i8mm", "sve": "sve",
}  # fmt: skip
DTYPES = {"float64": torch.float64, "float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16,
          "float16": torch.float16}  # fmt: skip
SMALLEST_PROBE = 256  # products below this are mostly overhead
COPY_BYTES = 256 << 20  # well beyond common last-level caches


@lru_cache(maxsize=1)
def _static() -> dict[str, Any]:
    flags = cpu_flags()
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "cpu": {
            "model": cpu_model(),
            "cores": psutil.cpu_count(logical=False),
            "threads": psutil.cpu_count(logical=True),
            "architecture": platform.machine(),
            "instruction_sets": sorted(name for name, flag in INSTRUCTION_FLAGS.items() if flag in flags),
            "bf16": bool(flags & {"amx_bf16", "avx512_bf16", "bf16"}),
            "fp16": bool(flags & {"avx512_fp16", "amx_fp16", "fphp"}),
            "torch_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "gpu": gpus[0]["name"] if gpus else None,
        "driver": nvidia_driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """Facts about this machine: CPU with instruction sets, memory, GPUs and driver, torch, OS, Python; no names."""
    return {**_static(), "gpus": [dict(gpu) for gpu in _static()["gpus"]], "cpu": dict(_static()["cpu"])}


def device_name(device: str, facts: dict[str, Any] | None = None) -> str:
    """The name to print and to look up for a device, "cpu" or "cuda": the CPU's model or the GPU's name."""
    facts = facts or machine()
    return facts["cpu"]["model"] if device.startswith("cpu") else facts["gpu"] or "no CUDA device"


def fingerprint(facts: dict[str, Any]) -> str:
    """12 hex digits of the facts that bear on speed; the same at any load, memory rounded to whole GiB."""
    kept = {key: value for key, value in facts.items() if key != "memory_bytes"}
    return digest({**kept, "memory_gib": round(facts["memory_bytes"] / 2**30)}, 12)


def cpu_flags() -> frozenset[str]:
    """Feature flags of the first CPU in /proc/cpuinfo; empty where that does not exist."""
    for key in ("flags", "Features"):
        if value := _cpuinfo(key):
            return frozenset(value.split())
    return frozenset()


def cpu_model() -> str:
    """The CPU's model name, as far as the system tells it."""
    if name := _cpuinfo("model name"):
        return name
    if platform.system() == "Darwin" and (name := _answer(["sysctl", "-n", "machdep.cpu.brand_string"])):
        return name
    return platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.split("\t")[0].strip() == key), None)


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def nvidia_driver() -> str | None:
    """The NVIDIA driver's version, None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    answer = _answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.splitlines()[0].strip() if answer else None


def _answer(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def measure_peaks(
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"), sizes: Sequence[int] = (1024, 2048),
    seconds: float = 0.5, *, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """The best rates reached here: FLOP/s of square matrix products on random data per dtype, bytes/s of a copy.

    `seconds` is spent on each dtype and size.  {"device", "threads", "load_average", "flops": {dtype: {"best", "size",
    "by_size"}}, "copy_bytes_per_s", "unsupported": {dtype: reason}}.  A format that is emulated here is tried at the
    sizes that can be afforded.  A use of these numbers is honest only for runs of the same minutes: neighbours halve
    them.
    """
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise InputError(f"peaks: dtype {unknown[0]!r} is unknown; allowed: {', '.join(DTYPES)}")
    found: dict[str, Any] = {}
    unsupported: dict[str, str] = {}
    for name in dtypes:
        try:
            fitting = sorted({affordable_size(name, size, seconds, device) for size in sizes})
            by_size = {str(size): matmul_rate(name, size, seconds, device) for size in fitting}
        except RuntimeError as error:
            unsupported[name] = str(error).splitlines()[0][:200]
            continue
        size, best = max(by_size.items(), key=lambda item: item[1])
        found[name] = {"best": best, "size": int(size), "by_size": by_size}
    return {
        "device": device, "threads": torch.get_num_threads(), "load_average": load_average(), "seconds": seconds,
        "flops": found, "copy_bytes_per_s": copy_rate(seconds, device), "unsupported": unsupported,
    }  # fmt: skip


def load_average() -> float | None:
    """The load average of the last minute, None where the system does not tell it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


@torch.no_grad()
def affordable_size(dtype: str, size: int, seconds: float, device: str = "cpu") -> int:
    """`size`, halved until one product of it takes at most `seconds` on a CPU, but not below 256.

    A CPU without instructions for a half precision takes a hundred times as long for it: 2 s for a product of 1024.
    """
    if device != "cpu" or size <= SMALLEST_PROBE:
        return size
    rate = matmul_rate(dtype, SMALLEST_PROBE // 2, 0.0, device)
    while size > SMALLEST_PROBE and 2 * size**3 / rate > seconds:
        size //= 2
    return size


@torch.no_grad()
def matmul_rate(dtype: str, size: int, seconds: float, device: str = "cpu") -> float:
    """FLOP/s of the fastest of the (size × size) products done in `seconds`."""
    if dtype == "tf32" and not device.startswith("cuda"):
        raise RuntimeError("TF32 exists on CUDA devices only")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    a = torch.randn(size, size, device=device).to(DTYPES[dtype])
    b = torch.randn(size, size, device=device).to(DTYPES[dtype])
    out = torch.empty_like(a)
    try:
        return 2 * size**3 / fastest(lambda: torch.mm(a, b, out=out), seconds, device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@torch.no_grad()
def copy_rate(seconds: float, device: str = "cpu", size: int = COPY_BYTES) -> float:
    """Bytes/s, read and written, of the fastest copy of a `size`-byte tensor."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / fastest(lambda: target.copy_(source), seconds, device)


def fastest(call: Callable[[], object], seconds: float, device: str = "cpu") -> float:
    """Seconds of the fastest of the calls made in `seconds` (at least three, after one that is not counted)."""
    synchronise = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    call()
    synchronise()
    best, done, end = float("inf"), 0, time.perf_counter() + seconds
    while done < 3 or time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        synchronise()
        best = min(best, (time.perf_counter_ns() - start) / 1e9)
        done += 1
    return best
