"""Which jobs the real workflow would run after each kind of change: the exact set, from Snakemake's own dry runs.

One case of each kind runs always; LMPERF_SLOW=1 runs the whole table (about 3 s a case).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_workflow import AFTER, ALL, CONFIG, CORPUS, MEASURES, TRAINS, Lab, Whole, slow

NORM = {"measure norm.training_step", "train norm-rmsnorm.s1234"}


@pytest.fixture
def lab(whole: Whole) -> Lab:
    """A folder whose run is complete."""
    return whole.lab


def also(*values: object) -> object:
    """A case of the whole table."""
    return pytest.param(*values, marks=slow)


@contextmanager
def edited(path: Path, change: Callable[[str], str]) -> Iterator[None]:
    """A file with changed text, put back afterwards with its old times."""
    before, times = path.read_bytes(), path.stat()
    text = change(before.decode())
    assert text.encode() != before
    path.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replaced(old: str, new: str) -> Callable[[str], str]:
    """A change of the first `old` to `new`."""
    return lambda text: text.replace(old, new, 1)


def remark(text: str) -> str:
    """`text` with one more line that changes nothing."""
    return text + "\n# edited\n"


def test_the_whole_is_named() -> None:
    assert ALL == CORPUS | {"profile"} | MEASURES | TRAINS | AFTER


def status(lab: Lab) -> dict[str, str]:
    """The jobs that `lmperf status` names, under the rules' names, each with its reason."""
    config = ["--config", str(lab.project / "config.yaml"), "--config", "tiny.yaml"]
    words = [sys.executable, "-m", "lmperf", "status", "--json", *config]
    text = subprocess.run(words, cwd=lab.work, env=lab.environment(), check=True, capture_output=True).stdout
    return {row["step"].replace("fetch-corpus", "fetch_corpus"): row["reason"] for row in json.loads(text)}


def test_unchanged_does_nothing(lab: Lab) -> None:
    assert "Nothing to be done" in lab.snakemake().stdout
    assert status(lab) == {}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        also("kind: files, domain", "kind: files, text_key: body, domain", ALL),
        also("tokenizer:", "  shard_bytes: 131072\ntokenizer:", ALL - {"fetch_corpus"}),
        also("vocab_size: 270", "vocab_size: 280", ALL - {"fetch_corpus", "ingest"}),
        also("trace_budget_bytes: 1000000", "trace_budget_bytes: 900000", {"profile", "ablate", "report"}),
        also("blocks: 2", "blocks: 3", {"profile"} | MEASURES | AFTER),
        also("  blocks: 2", "  smallest_effect: 0.05\n  blocks: 2", AFTER),
        also("variants: all}", "variants: all, rounds: 3}", {"measure norm.training_step"} | AFTER),
        ("steps: 20", "steps: 21", TRAINS | {"ablate", "report"}),
        also("ablation: {", "report: {title: Another}\nablation: {", {"report"}),
        also("ablation: {", "cluster: {mem_mb: 123, partition: other}\nablation: {", set()),
        also("# The smallest run", "# A remark", set()),
    ],
)
def test_config_key_reruns_its_stage(lab: Lab, old: str, new: str, expected: set[str]) -> None:
    assert old in CONFIG
    with edited(lab.work / "tiny.yaml", replaced(old, new)):
        jobs, told = lab.pending(), status(lab)
    assert set(jobs) == set(told) == set(expected)
    assert not any("\n" in why for why in told.values())
    assert all("Params have changed" in why or "updated by another job" in why for why in jobs.values())


def test_touched_inputs_rerun_nothing(lab: Lab) -> None:
    for name in ("texts/text-000.txt", "data/raw/manifest.json", "data/tokens/manifest.json", "tiny.yaml"):
        os.utime(lab.work / name)
    for path in lab.package.rglob("*.py"):
        os.utime(path)
    assert lab.pending() == {}


def test_edited_axis_reruns_its_jobs(lab: Lab) -> None:
    with edited(lab.package / "variants" / "norm.py", remark):
        assert set(lab.pending()) == NORM | AFTER


def test_added_variant_reruns_its_axis(lab: Lab) -> None:
    added = (
        '\n\n@variant("norm", fidelity="exact", rtol=1e-5, atol=1e-5)\n'
        'def mine(recipe: Recipe) -> Recipe:\n    """Mine."""\n    return recipe\n'
    )
    with edited(lab.package / "variants" / "norm.py", lambda text: text + added):
        assert set(lab.pending()) == NORM | AFTER


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("figures.py", {"report"}),
        also("comparing.py", AFTER),
        also("sessions.py", MEASURES | AFTER),
        also("training.py", TRAINS | {"profile", "ablate", "report"}),
        also("corpus/tokenizer.py", ALL - {"fetch_corpus", "ingest"}),
        also("environments.py", {"profile"} | MEASURES | TRAINS | AFTER),
        also("running.py", set()),
        also("doctor.py", set()),
    ],
)
def test_edited_module_reruns_its_stage(lab: Lab, name: str, expected: set[str]) -> None:
    with edited(lab.package / name, remark):
        assert set(lab.pending()) == set(expected)


def test_added_raw_file_reruns_ingest_and_what_follows(lab: Lab) -> None:
    added = lab.work / "texts" / "one more 文.txt"
    added.write_text("A text that was not there before.", encoding="utf-8")
    try:
        assert set(lab.pending()) == ALL - {"fetch_corpus"}
    finally:
        added.unlink()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        also("data/tokens/manifest.json", ALL - {"fetch_corpus", "ingest"}),
        ("reports/sessions/norm.training_step.jsonl", {"measure norm.training_step"} | AFTER),
        also("reports/quality/baseline.s1234.json", {"train baseline.s1234", "ablate", "report"}),
        also("reports/tables/claims.csv", {"ablate", "report"}),
        also("reports/index.html", {"report"}),
    ],
)
def test_deleted_output_is_made_again(lab: Lab, name: str, expected: set[str]) -> None:
    path = lab.work / name
    kept = path.with_name(path.name + ".kept")
    path.rename(kept)
    try:
        assert set(lab.pending()) == set(expected)
    finally:
        kept.rename(path)


def test_moved_folder_and_reinstalled_package_change_nothing(lab: Lab) -> None:
    """Another working directory; the same version of everything at another place, with other times."""
    elsewhere = lab.work.parent / "elsewhere 别处"
    elsewhere.mkdir()
    shutil.copytree(lab.project, elsewhere / "project again", copy_function=shutil.copy)
    moved = Lab(elsewhere / "project again", lab.work.rename(elsewhere / "work again 又"))
    try:
        assert moved.pending() == {}
    finally:
        moved.work.rename(lab.work)


def test_real_rerun_runs_just_that(lab: Lab) -> None:
    page = lab.work / "reports" / "index.html"
    with edited(lab.work / "tiny.yaml", replaced("ablation: {", "report: {title: Another title}\nablation: {")):
        assert finished_rules(lab) == ["report"]
        assert "Another title" in page.read_text(encoding="utf-8")
    assert finished_rules(lab) == ["report"]
    assert "Another title" not in page.read_text(encoding="utf-8")


def finished_rules(lab: Lab) -> list[str]:
    """Run the workflow for real; the rules that it shows as finished, `all` left out."""
    done = lab.snakemake()
    assert done.returncode == 0, done.stdout[-3000:]
    return [rule for rule in re.findall(r"Finished jobid: \d+ \(Rule: (\w+)\)", done.stdout) if rule != "all"]
