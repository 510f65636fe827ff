"""Where a result comes from: code, packages, settings of the process, seeds; nothing that names a person or a host."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import re
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lmperf.machine import load_average

ROOT = Path(__file__).resolve().parent.parent
LOCK_FILES = ("requirements.lock", "requirements-lock.txt", "uv.lock", "pylock.toml", "requirements.txt")
PACKAGES = (
    "lmperf", "torch", "numpy", "pyarrow", "tokenizers", "fastokens", "scipy", "pandas", "psutil", "pydantic",
    "matplotlib", "tensorboard", "jinja2", "typer", "rich", "snakemake", "triton", "torchao", "flash-attn", "xformers",
)  # fmt: skip
ENVIRONMENT = re.compile(
    r"^(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|MALLOC|GLIBC|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|CUBLAS|NCCL|GLOO|TRITON)_"
    r"|^(LD_PRELOAD|PYTHONHASHSEED|PYTHONMALLOC|ONEDNN_\w+)$"
)


def provenance(spec: Any) -> dict[str, Any]:
    """All that is needed to know which code ran under which settings; paths are cut to what names no one."""
    return {
        "git": git_state(),
        "lock_file": lock_file(),
        "packages": packages(),
        "torch_build": torch_build(),
        "threads": {"intra": torch.get_num_threads(), "inter": torch.get_num_interop_threads()},
        "environment": environment(),
        "affinity": affinity(),
        "governor": governor(),
        "load_average": load_average(),
        "seeds": {"seed": getattr(spec, "seed", None), "torch": torch.initial_seed()},
        "argv": [scrub(word) for word in sys.argv],
        "python": platform.python_version(),
        "code": getattr(spec, "code", None),
        "data_sha256": data_hash(getattr(spec, "data", None)),
        "cluster": cluster_job(),
    }


def cluster_job() -> dict[str, Any] | None:
    """Scheduler, job number, count of nodes and a label for the node; None outside a cluster's job.

    The label tells nodes apart without naming them: a hash of the node's name with the machine's own secret number.
    """
    job, node = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURMD_NODENAME")
    if not job or not node:
        return None
    return {
        "scheduler": "slurm",
        "job": job,
        "partition": os.environ.get("SLURM_JOB_PARTITION"),
        "nodes": int(os.environ.get("SLURM_JOB_NUM_NODES", "1")),
        "node": hashlib.sha256(f"{machine_number()} {node}".encode()).hexdigest()[:8],
    }


def machine_number() -> str:
    """The system's own random number of this installation, never published; empty where there is none."""
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def scrub(text: str) -> str:
    """`text` without the home folder, the user's name or the host's: known folders shortened, the rest cut to names."""
    for folder, name in ((str(ROOT), "."), (os.getcwd(), "."), (str(Path.home()), "~")):
        if len(folder) > 1:
            text = re.sub(re.escape(folder) + r"(?=/|$|[\s:'\"])", name, text)
    text = re.sub(r"(?<![\w.~-])/(?:[^/\s:'\"]+/)+", "…/", text)
    for word in sorted(_names(), key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", "…", text)
    return text


def scrubbed(value: Any) -> Any:
    """JSON-like `value` with every text in it put through `scrub`."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {key: scrubbed(item) for key, item in value.items()}
    return [scrubbed(item) for item in value] if isinstance(value, list | tuple) else value


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    common = {"", "root", "user", "runner", "localhost", "lmperf", "python", "torch"}
    names = {name for name in (user, platform.node()) if name.lower() not in common and len(name) > 2}
    return tuple(names)


@lru_cache(maxsize=1)
def git_state() -> dict[str, Any] | None:
    """Commit, whether the tree differs from it and a hash of the difference (new sources too); None outside git."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    difference = (_git("diff", "HEAD", "--", ".") or "").encode()
    new = (_git("ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")
    for name in sorted(name for name in new if name.endswith((".py", ".smk", ".yaml", "Snakefile"))):
        difference += name.encode() + (ROOT / name).read_bytes()
    return {
        "commit": commit,
        "dirty": bool(difference),
        "diff_sha256": hashlib.sha256(difference).hexdigest() if difference else None,
    }


def _git(*words: str) -> str | None:
    # The checkout must be the package's own: an installed copy inside someone's repository has no commit.
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


@lru_cache(maxsize=1)
def lock_file() -> dict[str, str] | None:
    """Name and SHA-256 of the lock file, None when there is none."""
    for name in LOCK_FILES:
        if (ROOT / name).is_file():
            return {"name": name, "sha256": hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}
    return None


@lru_cache(maxsize=1)
def packages() -> dict[str, str]:
    """Versions of the packages that bear on a result, as far as installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def torch_build() -> dict[str, Any]:
    """Version, compiler, maths libraries and devices that torch was built with."""
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    kept = [line for line in lines if line.startswith(("GCC", "clang", "Intel", "OpenMP", "LAPACK", "CPU capability"))]
    return {
        "version": torch.__version__, "git": torch.version.git_version, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "libraries": kept,
        "float32_matmul_precision": matmul_precision(),
    }  # fmt: skip


def matmul_precision() -> str | None:
    """The process's float32 matmul precision; None when PyTorch will not tell it (set through two interfaces)."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def environment() -> dict[str, str]:
    """Environment variables that change how fast a process is, without paths."""
    return {name: scrub(value) for name, value in sorted(os.environ.items()) if ENVIRONMENT.search(name)}


def affinity() -> list[int] | None:
    """Numbers of the CPUs that this process may use, None where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def governor() -> str | None:
    """The frequency governor of the first CPU, None where there is none (virtual machines)."""
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
    except OSError:
        return None


def data_hash(tokens: str | None) -> str | None:
    """SHA-256 of the token manifest (which holds every shard's own), None without data."""
    try:
        return hashlib.sha256((Path(tokens) / "manifest.json").read_bytes()).hexdigest() if tokens else None
    except OSError:
        return None
