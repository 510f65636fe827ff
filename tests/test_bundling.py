"""Bundles: what goes in comes out, nothing unsafe comes out, and machines stand side by side without a delta."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from session_files import session_spec, timed, write_session

from lmperf.bundling import MANIFEST, bundle, merge, read_bundle
from lmperf.comparing import compare
from lmperf.records import InputError, write_json


def report(folder: Path, effects: dict[str, float], fingerprint: str) -> Path:
    """A report folder with one session of these effects."""
    spec = session_spec(list(effects))
    path = write_session(
        folder / "sessions" / "a.jsonl", spec, timed(spec, effects, noise=0.003, seed=3), fingerprint=fingerprint
    )
    compare([path], folder / "tables", folder / "results.parquet", config_hash="x", smallest_effect=0.02)
    facts = {"fingerprint": fingerprint, "device": f"<b>{fingerprint}</b>", "machine": {"os": "Linux", "torch": "2"}}
    write_json(folder / "tables" / "machine.json", facts)
    return folder


@pytest.fixture
def bundles(tmp_path: Path) -> list[Path]:
    """Two machines' bundles; the second measured one variant less and one more."""
    one = report(tmp_path / "one", {"fast": 0.5, "slow": 2.0}, "aaa")
    two = report(tmp_path / "two", {"fast": 0.9, "other": 1.0}, "bbb")
    paths = [tmp_path / "laptop.tar", tmp_path / "big server 机.tar"]
    for folder, path in zip((one, two), paths, strict=True):
        bundle(folder, path)
    return paths


def test_a_bundle_holds_the_results_byte_for_byte(tmp_path: Path, bundles: list[Path]) -> None:
    files = read_bundle(bundles[0])
    for name, data in files.items():
        assert (tmp_path / "one" / name).read_bytes() == data
    assert {"tables/results.csv", "results.parquet", "sessions/a.jsonl"} <= set(files)


def test_the_same_results_give_the_same_bytes(tmp_path: Path, bundles: list[Path]) -> None:
    bundle(tmp_path / "one", tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == bundles[0].read_bytes()


def test_machines_stand_side_by_side(tmp_path: Path, bundles: list[Path]) -> None:
    machines = merge(bundles, tmp_path / "merged")
    assert [machine.fingerprint for machine in machines] == ["aaa", "bbb"]
    rows = json.loads((tmp_path / "merged" / "side_by_side.json").read_text(encoding="utf-8"))["rows"]
    cells = {row["variant"]: row["machines"] for row in rows if row["metric"] == "step_time_s"}
    assert set(cells) == {"fast", "slow", "other"}
    assert cells["fast"]["laptop"]["ratio"] == pytest.approx(0.5, rel=0.02)
    assert cells["fast"]["big server 机"]["ratio"] == pytest.approx(0.9, rel=0.02)
    assert cells["slow"]["big server 机"] is None
    assert cells["other"]["laptop"] is None
    for row in rows:  # every answer is the machine's own, whatever stands beside it
        for label, answer in row["machines"].items():
            assert answer is None or answer["fingerprint"] == {"laptop": "aaa", "big server 机": "bbb"}[label]
    text = (tmp_path / "merged" / "index.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;aaa" in text
    assert "<b>aaa" not in text


def forged(path: Path, entries: list[tarfile.TarInfo], data: bytes = b"x") -> Path:
    """A tar file of a valid manifest and these entries."""
    with tarfile.open(path, "w") as tar:
        manifest = json.dumps({"kind": "lmperf bundle", "schema": 1, "files": {}}).encode()
        head = tarfile.TarInfo(MANIFEST)
        head.size = len(manifest)
        tar.addfile(head, io.BytesIO(manifest))
        for entry in entries:
            entry.size = len(data) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(data) if entry.isreg() else None)
    return path


@pytest.mark.parametrize(
    "name",
    ["../evil.csv", "/tmp/evil.csv", "tables/../../evil.csv", "tables/a/b.csv", "sessions/a.sh", "tables\\evil.csv",
     "./tables/a.csv", "index.html", "tables/", "other/a.csv"],
)  # fmt: skip
def test_names_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"may not be in a bundle|not as it was bundled"):
        merge([forged(tmp_path / "evil.tar", [tarfile.TarInfo(name)])], tmp_path / "out" / "deep")
    assert not list(tmp_path.rglob("evil.csv"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    entry = tarfile.TarInfo("tables/results.csv")
    entry.type, entry.linkname = kind, "/etc/passwd"
    with pytest.raises(InputError, match="may not be in a bundle"):
        read_bundle(forged(tmp_path / "evil.tar", [entry]))


def test_a_changed_or_cut_bundle_is_refused(tmp_path: Path, bundles: list[Path]) -> None:
    data = bundles[0].read_bytes()
    changed = tmp_path / "changed.tar"
    changed.write_bytes(data.replace(b"step_time_s", b"step_time_x", 1))
    with pytest.raises(InputError, match="not as it was bundled"):
        read_bundle(changed)
    cut = tmp_path / "cut.tar"
    for keep in (0, 100, 700, len(data) // 2):
        cut.write_bytes(data[:keep])
        with pytest.raises(InputError, match=r"cut\.tar"):
            read_bundle(cut)


def test_what_cannot_be_bundled_or_merged_is_one_line(tmp_path: Path, bundles: list[Path]) -> None:
    with pytest.raises(InputError, match="machine.json is missing|results.csv is missing"):
        bundle(tmp_path / "nowhere", tmp_path / "x.tar")
    with pytest.raises(InputError, match="there twice"):
        merge([bundles[0], bundles[0]], tmp_path / "merged")
    with pytest.raises(InputError, match="no such file"):
        merge([tmp_path / "none.tar"], tmp_path / "merged")


def test_the_command_line(tmp_path: Path, bundles: list[Path]) -> None:
    words = [sys.executable, "-m", "lmperf"]
    made = tmp_path / "cli.tar"
    subprocess.run([*words, "bundle", str(made), "--reports", str(tmp_path / "one")], check=True)
    merged = subprocess.run([*words, "merge", str(made), str(bundles[1]), "--out", str(tmp_path / "m")], check=True)
    assert merged.returncode == 0
    assert (tmp_path / "m" / "index.html").exists()
    bad = subprocess.run([*words, "merge", str(tmp_path / "none.tar")], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: ")
    assert bad.stderr.count("\n") == 1
