"""Machine facts, fingerprint, measured and datasheet peaks, provenance."""

import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmperf import machine as machines
from lmperf import provenance as origin
from lmperf.datasheets import DATASHEETS
from lmperf.records import InputError


def test_the_facts_say_what_decides_speed():
    facts = machines.machine()
    assert facts["cpu"]["model"]
    assert facts["cpu"]["threads"] >= 1
    assert facts["memory_bytes"] > 2**28
    assert facts["torch"] == torch.__version__
    assert facts["python"] == platform.python_version()
    assert set(facts["cpu"]["instruction_sets"]) <= set(machines.INSTRUCTION_FLAGS)
    json.dumps(facts, allow_nan=False)


def test_the_facts_name_no_one():
    text = json.dumps(machines.machine())
    assert str(Path.home()) not in text
    for name in {platform.node(), getpass.getuser()} - {"", "root", "localhost"}:
        if len(name) > 3:
            assert name not in text


@pytest.mark.parametrize(
    ("info", "sets"),
    [
        ("model name\t: A CPU\nflags\t\t: fpu avx2 fma avx512f amx_bf16\n", {"avx2", "fma", "avx512", "amx_bf16"}),
        ("Features\t: fp asimd fphp bf16 sve\n", {"neon", "arm_fp16", "arm_bf16", "sve"}),
        ("", set()),
    ],
)
def test_instruction_sets_are_read_from_x86_and_arm(monkeypatch, info, sets):
    def value(key: str) -> str | None:
        lines = (line.partition(":") for line in info.splitlines())
        return next((text.strip() for name, _, text in lines if name.strip() == key), None)

    monkeypatch.setattr(machines, "_cpuinfo", value)
    flags = machines.cpu_flags()
    assert {name for name, flag in machines.INSTRUCTION_FLAGS.items() if flag in flags} == sets


def test_the_fingerprint_is_the_same_in_another_process_and_at_another_thread_count():
    code = "from lmperf.machine import *; print(fingerprint(machine()))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": n}, capture_output=True, text=True,
            check=True,
        ).stdout.strip()
        for n in ("1", "2")
    }  # fmt: skip
    assert found == {machines.fingerprint(machines.machine())}
    assert len(found.pop()) == 12


def test_the_fingerprint_knows_another_machine_but_not_a_few_reserved_pages():
    facts = machines.machine()
    mine = machines.fingerprint(facts)
    gib = round(facts["memory_bytes"] / 2**30)
    near = [machines.fingerprint({**facts, "memory_bytes": gib * 2**30 + pages * 4096}) for pages in (-5, 0, 5)]
    assert set(near) == {mine}
    for key, value in (("torch", "0.0"), ("gpu", "other"), ("memory_bytes", 2 * facts["memory_bytes"] + 2**31)):
        assert machines.fingerprint({**facts, key: value}) != mine
    assert machines.fingerprint({**facts, "cpu": {**facts["cpu"], "model": "other"}}) != mine


def test_peaks_are_measured_per_dtype_and_size():
    peaks = machines.measure_peaks(("float32", "bfloat16", "tf32"), (64, 128), 0.01)
    entry = peaks["flops"]["float32"]
    assert set(entry["by_size"]) == {"64", "128"}
    assert entry["best"] == entry["by_size"][str(entry["size"])] == max(entry["by_size"].values())
    assert 1e8 < entry["best"] < 1e14
    assert 1e8 < peaks["copy_bytes_per_s"] < 1e13
    assert peaks["threads"] == torch.get_num_threads()
    assert "TF32" in peaks["unsupported"]["tf32"]
    assert "tf32" not in peaks["flops"]


def test_a_rate_is_work_over_the_fastest_call(monkeypatch):
    ticks = iter([0, 5_000_000_000, 6_000_000_000, 8_000_000_000, 9_000_000_000, 13_000_000_000])
    monkeypatch.setattr(machines.time, "perf_counter_ns", lambda: next(ticks))
    assert machines.fastest(lambda: None, seconds=0.0) == 2.0


def test_an_unknown_dtype_is_bad_input():
    with pytest.raises(InputError, match="float13"):
        machines.measure_peaks(("float13",), (64,), 0.01)


def test_datasheet_peaks_need_the_exact_device():
    assert machines.datasheet_peak("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert machines.datasheet_peak("NVIDIA H100 80GB HBM3", "float8") == 1979e12
    assert machines.datasheet_peak("NVIDIA A100", "bfloat16") is None
    assert machines.datasheet_peak("Tesla T4", "bfloat16") is None
    assert machines.datasheet_peak(machines.machine()["cpu"]["model"], "float32") is None
    assert machines.datasheet_peak(None, "float32") is None
    assert machines.datasheet_peak("NVIDIA H200", "bandwidth") is None
    assert machines.datasheet_bandwidth("NVIDIA H200") == 4.8e12


def test_datasheet_figures_are_in_a_sane_order():
    for name, entry in DATASHEETS.items():
        assert 1e12 < entry["float32"] <= entry["float16"] < 1e16, name
        assert 1e11 < entry["bandwidth"] < 1e13, name
        if "float8" in entry:
            assert 1.9 < entry["float8"] / entry["bfloat16"] < 2.1, name


def test_provenance_holds_what_a_result_needs(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")

    class Spec:
        seed, code, data = 7, "abc", str(tmp_path)

    found = origin.provenance(Spec())
    assert found["seeds"]["seed"] == 7
    assert found["code"] == "abc"
    assert len(found["data_sha256"]) == 64
    assert found["packages"]["torch"] == torch.__version__
    assert found["threads"]["intra"] == torch.get_num_threads()
    assert set(found) >= {
        "git",
        "lock_file",
        "torch_build",
        "environment",
        "affinity",
        "governor",
        "load_average",
        "argv",
    }
    json.dumps(found, allow_nan=False)


def test_provenance_without_data_or_git(monkeypatch, tmp_path):
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    origin.git_state.cache_clear()
    origin.lock_file.cache_clear()
    try:
        found = origin.provenance(None)
    finally:
        monkeypatch.undo()
        origin.git_state.cache_clear()
        origin.lock_file.cache_clear()
    assert found["git"] is None
    assert found["lock_file"] is None
    assert found["data_sha256"] is None


def test_a_dirty_tree_is_told_from_a_clean_one(monkeypatch, tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", *words], check=True)

    def state():
        origin.git_state.cache_clear()
        return origin.git_state()

    git("init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git("add", "a.py")
    git("commit", "-q", "-m", "one")
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    clean = state()
    assert clean["dirty"] is False
    assert clean["diff_sha256"] is None
    (tmp_path / "a.py").write_text("2\n")
    changed = state()
    (tmp_path / "b.py").write_text("3\n")
    added = state()
    assert changed["dirty"]
    assert len({changed["diff_sha256"], added["diff_sha256"]}) == 2
    monkeypatch.undo()
    origin.git_state.cache_clear()


def test_paths_and_names_are_cut_out(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    monkeypatch.setattr(origin, "_names", lambda: ("ada", "ada-laptop"))
    assert origin.scrub("/home/ada/x/y.json") == "~/x/y.json"
    assert origin.scrub("--data=/mnt/disk/ada/tokens") == "--data=…/tokens"
    assert origin.scrub("ada@ada-laptop: 3 adamw steps, 10.5/s of a/b") == "…@…: 3 adamw steps, 10.5/s of a/b"
    assert origin.scrub(str(origin.ROOT / "data")) == "./data"
