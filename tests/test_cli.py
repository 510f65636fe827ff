"""The command line: documented exit codes, one clear line for bad input, JSON that parses, no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERBS = (
    "fetch-corpus", "ingest", "tokenize", "profile", "measure", "train", "compare", "ablate", "report", "run",
    "variants", "plan", "doctor", "qualify", "diff", "status", "schema",
)  # fmt: skip


def lmperf(*words, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-m", "lmperf", *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_every_verb_is_there_and_helps_with_an_example():
    import typer

    from lmperf.cli import app

    commands = typer.main.get_command(app).commands
    assert set(VERBS) <= set(commands)
    for name, command in commands.items():
        assert f"lmperf {name}" in (command.help or ""), f"{name} shows no example"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["plan", "--set", "modle.size=tiny"], ["modle", "did you mean 'model'"]),
        (["plan", "--set", "model.size"], ["--set", "key=value"]),
        (["plan", "--config", "nowhere.yaml"], ["nowhere.yaml", "no such"]),
        (["measure", "--session", "atention.training_step"], ["atention.training_step", "allowed:"]),
        (["measure", "--spec", "{not json"], ["--spec", "not valid JSON"]),
        (["variants", "--axis", "atention"], ["'atention'", "did you mean 'attention'"]),
        (["diff", "nowhere-old", "nowhere-new"], ["nowhere-old"]),
        (["mesure"], ["mesure"]),
        (["plan", "--nonsense"], ["--nonsense"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, parts):
    done = lmperf(*words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert all(part in lines[0] for part in parts), lines[0]


def test_json_of_the_machine_readable_verbs_parses():
    rows = json.loads(lmperf("variants", "--json").stdout)
    keys = {"axis", "name", "summary", "fidelity", "requires", "available", "reason", "source"}
    assert all(set(row) == keys for row in rows)
    assert all(row["available"] == (row["reason"] is None) for row in rows)
    plan = json.loads(lmperf("plan", "--json").stdout)
    assert {"sessions", "quality_runs", "predicted_s"} <= set(plan)
    doctor = json.loads(lmperf("doctor", "--json").stdout)
    assert {"machine", "can_run", "checklist"} <= set(doctor)


def test_the_source_of_a_variant_is_where_it_says():
    for row in json.loads(lmperf("variants", "--json").stdout):
        path, _, line = row["source"].rpartition(":")
        text = (ROOT / path).read_text(encoding="utf-8").splitlines()[int(line) - 1 :]
        assert any(f"def {row['name']}(" in near for near in text[:25]), row["source"]


def test_the_catalogue_read_from_source_is_the_registry():
    from lmperf.catalogue import catalogue
    from lmperf.registry import variants

    # Other tests of this process may have registered plugins of their own.
    read = catalogue()
    registered = {key: entry for key, entry in variants().items() if "/lmperf/variants/" in entry.source}
    assert set(read) == set(registered)
    for key, entry in registered.items():
        found = read[key]
        assert (found.fidelity, found.requires, found.baseline, found.control, found.quality_run, found.summary) == (
            entry.fidelity, entry.requires, entry.baseline, entry.control, entry.quality_run, entry.summary,
        ), key  # fmt: skip


def test_a_plugin_adds_a_variant_everywhere(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from lmperf.registry import variant\n\n\n"
        '@variant("norm", fidelity="exact")\n'
        "def my_norm(recipe):\n"
        '    """A norm of my own."""\n'
        "    return recipe\n"
    )
    rows = json.loads(lmperf("variants", "--axis", "norm", "--plugin", str(plugin), "--json").stdout)
    assert "my_norm" in [row["name"] for row in rows]
    done = lmperf(
        "plan", "--json", "--set", f"plugins=['{plugin}']",
        "--set", "measure.sessions=[{axis: norm, workload: training_step, variants: [my_norm]}]",
    )  # fmt: skip
    assert json.loads(done.stdout)["sessions"][0]["arms"] == ["my_norm"]
