"""The workflow itself: it parses without torch, lints, refuses bad configuration, and names its jobs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMOKE = ("--configfile", str(ROOT / "workflow" / "presets" / "smoke.yaml"))


def snakemake(*words, cwd, **environment):
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), *words]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_a_dry_run_names_every_stage_and_loads_no_torch(tmp_path):
    stub = tmp_path / "stub" / "torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('torch was imported at parse')\n")
    work = tmp_path / "a b 文"
    work.mkdir()
    done = snakemake("-n", *SMOKE, cwd=work, PYTHONPATH=str(stub.parent))
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout + done.stderr
    for rule in (
        "fetch_corpus",
        "ingest",
        "tokenize",
        "profile",
        "measure",
        "train",
        "compare",
        "ablate",
        "report",
        "all",
    ):
        assert rule in text


def test_bad_configuration_is_one_line_and_exit_code_2(tmp_path):
    done = snakemake("-n", *SMOKE, "--config", "modle=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "did you mean 'model'" in done.stderr


def test_the_linter_is_content(tmp_path):
    done = snakemake("--lint", *SMOKE, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_only_call():
    for path in [ROOT / "Snakefile", *sorted((ROOT / "workflow" / "rules").glob("*.smk"))]:
        text = path.read_text(encoding="utf-8")
        assert "\n    run:" not in text, path
        assert "\ndef " not in text, path
