"""Which jobs the real workflow would run after each kind of change: the exact set, from Snakemake's own dry runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_workflow import AFTER, ALL, CONFIG, CORPUS, MEASURES, TRAINS, Lab

pytestmark = pytest.mark.skipif(
    "LMPERF_SLOW" not in os.environ, reason="the re-run table takes many minutes: set LMPERF_SLOW=1 to run it"
)

NORM = {"measure norm.training_step", "train norm-rmsnorm.s1234"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """One complete, real run in a folder with a space and Chinese characters in its name."""
    made = Lab.make(tmp_path_factory.mktemp("re run 重跑"))
    done = made.snakemake(timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert (made.work / "reports" / "index.html").stat().st_size > 1000
    return made


@contextmanager
def edited(path: Path, change: Callable[[str], str]) -> Iterator[None]:
    """A file with changed text, put back afterwards with its old times."""
    before, times = path.read_bytes(), path.stat()
    text = change(before.decode())
    assert text.encode() != before
    path.write_text(text, encoding="utf-8")
    yield
    path.write_bytes(before)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replaced(old: str, new: str) -> Callable[[str], str]:
    """A change of the first `old` to `new`."""
    return lambda text: text.replace(old, new, 1)


def test_unchanged_does_nothing(lab: Lab) -> None:
    assert lab.pending() == {}
    assert "Nothing to be done" in lab.snakemake().stdout


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("kind: files, domain", "kind: files, text_key: body, domain", ALL),
        ("tokenizer:", "  shard_bytes: 131072\ntokenizer:", ALL - {"fetch_corpus"}),
        ("vocab_size: 270", "vocab_size: 280", ALL - {"fetch_corpus", "ingest"}),
        ("trace_budget_bytes: 1000000", "trace_budget_bytes: 900000", {"profile", "ablate", "report"}),
        ("blocks: 2", "blocks: 3", {"profile"} | MEASURES | AFTER),
        ("variants: all}", "variants: all, rounds: 3}", {"measure norm.training_step"} | AFTER),
        ("steps: 20", "steps: 21", TRAINS | {"ablate", "report"}),
        ("ablation: {", "report: {title: Another}\nablation: {", {"report"}),
        ("ablation: {", "cluster: {mem_mb: 123, partition: other}\nablation: {", set()),
        ("# The smallest run", "# A remark", set()),
    ],
)
def test_config_key_reruns_its_stage(lab: Lab, old: str, new: str, expected: set[str]) -> None:
    assert old in CONFIG
    with edited(lab.work / "tiny.yaml", replaced(old, new)):
        assert set(lab.pending()) == set(expected)


def test_touched_inputs_rerun_nothing(lab: Lab) -> None:
    for name in ("texts/text-000.txt", "data/raw/manifest.json", "data/tokens/manifest.json", "tiny.yaml"):
        os.utime(lab.work / name)
    for path in lab.package.rglob("*.py"):
        os.utime(path)
    assert lab.pending() == {}


def test_edited_axis_reruns_its_jobs(lab: Lab) -> None:
    with edited(lab.package / "variants" / "norm.py", lambda text: text + "\n# edited\n"):
        assert set(lab.pending()) == NORM | AFTER


def test_added_variant_reruns_its_axis(lab: Lab) -> None:
    added = (
        '\n\n@variant("norm", fidelity="exact", rtol=1e-5, atol=1e-5)\n'
        'def mine(recipe: Recipe) -> Recipe:\n    """Mine."""\n    return recipe\n'
    )
    with edited(lab.package / "variants" / "norm.py", lambda text: text + added):
        assert set(lab.pending()) == NORM | AFTER


def test_edited_figure_reruns_the_report(lab: Lab) -> None:
    with edited(lab.package / "figures.py", lambda text: text + "\n# edited\n"):
        assert set(lab.pending()) == {"report"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("comparing.py", AFTER),
        ("sessions.py", MEASURES | AFTER),
        ("training.py", TRAINS | {"profile", "ablate", "report"}),
        ("corpus/tokenizer.py", ALL - {"fetch_corpus", "ingest"}),
        ("running.py", set()),
        ("doctor.py", set()),
    ],
)
def test_edited_module_reruns_its_stage(lab: Lab, name: str, expected: set[str]) -> None:
    with edited(lab.package / name, lambda text: text + "\n# edited\n"):
        assert set(lab.pending()) == set(expected)


def test_added_raw_file_reruns_ingest_and_what_follows(lab: Lab) -> None:
    added = lab.work / "texts" / "one more 文.txt"
    added.write_text("A text that was not there before.", encoding="utf-8")
    try:
        assert set(lab.pending()) == ALL - {"fetch_corpus"}
    finally:
        added.unlink()
    assert lab.pending() == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("data/tokens/manifest.json", ALL - {"fetch_corpus", "ingest"}),
        ("reports/sessions/norm.training_step.jsonl", {"measure norm.training_step"} | AFTER),
        ("reports/quality/baseline.s1234.json", {"train baseline.s1234", "ablate", "report"}),
        ("reports/tables/claims.csv", {"ablate", "report"}),
        ("reports/index.html", {"report"}),
    ],
)
def test_deleted_output_is_made_again(lab: Lab, name: str, expected: set[str]) -> None:
    path = lab.work / name
    kept = path.with_name(path.name + ".kept")
    path.rename(kept)
    try:
        # Snakemake wants every output that leads to the report only where the report itself would be asked for again.
        assert set(lab.pending("--", name, "all")) == set(expected)
    finally:
        kept.rename(path)


def test_other_working_directory_changes_nothing(lab: Lab) -> None:
    other = lab.work.with_name("elsewhere 别处")
    lab.work.rename(other)
    try:
        assert Lab(lab.project, other).pending() == {}
    finally:
        other.rename(lab.work)


def test_reasons_are_one_line_each(lab: Lab) -> None:
    with edited(lab.work / "tiny.yaml", replaced("steps: 20", "steps: 21")):
        reasons = lab.pending()
    assert all(reason and "\n" not in reason for reason in reasons.values())
    assert "Params have changed" in reasons["train baseline.s1234"]


def test_real_rerun_runs_just_that(lab: Lab) -> None:
    with edited(lab.work / "tiny.yaml", replaced("ablation: {", "report: {title: Another title}\nablation: {")):
        done = lab.snakemake()
        assert done.returncode == 0, done.stdout[-3000:]
        assert re.findall(r"Finished jobid: \d+ \(Rule: (\w+)\)", done.stdout) in (["report"], ["report", "all"])
        assert "Another title" in (lab.work / "reports" / "index.html").read_text(encoding="utf-8")


def test_the_whole_is_named() -> None:
    assert ALL == CORPUS | {"profile"} | MEASURES | TRAINS | AFTER
