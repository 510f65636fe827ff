"""What happens to the numbers: one row a recipe and learning rate, controls in plain words, the page's section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from session_files import quality_run, write_quality

from lmperf.catalogue import catalogue
from lmperf.precision_tables import PRECISION_COLUMNS, precision_section, precision_table, scale_lines
from lmperf.qualities import quality_table
from lmperf.reporting import environment
from lmperf.tables import read_csv

SCALER, UNSCALED, FROZEN = (f"precision/{n}" for n in ("fp16_autocast_scaler", "fp16_unscaled", "fp16_no_update"))
HALF = {"parameters": "float32", "logits": "float16", "products of fp32 matrices": "highest"}


def run(recipe: str, seed: int, final: float = 2.0, zeros: float = 0.0, **steady: Any) -> dict[str, Any]:
    """A quality run of 200 steps with its formats, its share of zero gradients and its stability record."""
    made = quality_run(recipe, seed, final + 0.003 * seed)
    made["stability"] |= {"steps": 200, "scale": [], "skipped_scaler_steps": None, **steady}
    return made | {"dtypes": HALF, "gradient_underflow": {"total": zeros, "blocks.0": zeros / 2, "blocks.1": 2 * zeros}}


def scaled(recipe: str, seed: int, skipped: int, scale: list[list[float]], **changes: Any) -> dict[str, Any]:
    """A run with a loss scaler."""
    return run(recipe, seed, skipped_scaler_steps=skipped, nonfinite_steps=skipped, scale=scale, **changes)


@pytest.fixture
def tables(tmp_path: Path):
    """(precision.csv as text, quality.csv as text) of three seeds of the baseline, the scaler's recipe and others."""

    def build(*runs: dict[str, Any]) -> tuple[list[dict[str, str | None]], list[dict[str, str | None]]]:
        down = [[0, 65536.0], [2, 32768.0], [150, 65536.0]]
        known = [run("baseline", seed) for seed in range(3)]
        known += [scaled(SCALER, seed, seed, down[: seed + 1]) for seed in range(3)]
        files = write_quality(tmp_path / "quality", [*known, *runs])
        precision_table(files, tmp_path)
        quality_table(files, tmp_path)
        return read_csv(tmp_path / "precision.csv"), read_csv(tmp_path / "quality.csv")

    return build


def test_medians_over_seeds_with_formats_scale_and_the_worst_layer(tables):
    rows, _ = tables(run("norm/rmsnorm", 0), *(run(UNSCALED, seed, zeros=0.1 * (seed + 1)) for seed in range(3)))
    assert tuple(rows[0]) == PRECISION_COLUMNS
    assert [row["recipe"] for row in rows] == ["baseline", SCALER, UNSCALED]  # no other axis
    _, scaler, unscaled = rows
    assert (scaler["logits"], scaler["fp32_products"], scaler["master_weights"]) == ("float16", "highest", None)
    keys = ("n", "scale_first", "scale_last", "scale_min", "scale_max", "skipped_steps")
    assert [float(scaler[key]) for key in keys] == [3, 65536, 65536, 32768, 65536, 1]
    assert unscaled["skipped_steps"] is None
    assert (float(unscaled["underflow_total"]), unscaled["underflow_worst_layer"]) == (pytest.approx(0.2), "blocks.1")
    assert float(unscaled["underflow_worst"]) == pytest.approx(0.4)
    assert (float(scaler["underflow_worst"]), scaler["underflow_worst_layer"]) == (0.0, None)


def test_a_run_that_could_not_be_is_a_row_with_its_reason(tables):
    bare = {"stability": None, "final": None, "curve": [], "dtypes": None}
    refused = quality_run("precision/fp8", 0, 2.0, status="unsupported", reason="no CUDA device") | bare
    row = tables(refused)[0][-1]
    assert (row["status"], row["reason"], row["dtypes_reason"], row["n"]) == (
        "unsupported", "no CUDA device", "no CUDA device", "0",
    )  # fmt: skip
    assert (row["scale_last"], row["underflow_total"]) == (None, None)


@pytest.mark.parametrize(
    ("control", "harm", "words"),
    [
        ([run(UNSCALED, s) for s in range(3)], False, "no harm was shown here: bits per byte 1.0000"),
        ([run(UNSCALED, s, zeros=0.3) for s in range(3)], False, "its fault showed here (30.00% of the gradients"),
        ([run(UNSCALED, s, final=2.2) for s in range(3)], True, "its harm showed here: bits per byte 1.09"),
        ([run(UNSCALED, s, diverged=s > 0) for s in range(3)], True, "67% of the seeds diverged"),
        ([scaled(FROZEN, s, 90, [[0, 65536.0]]) for s in range(3)], True, "90 of 200 steps skipped"),
        ([scaled(FROZEN, s, 2, [[0, 65536.0]]) for s in range(3)], False, "2 of 200 steps skipped"),
        ([], None, "no quality run"),
    ],
)
def test_each_control_has_one_plain_line(tables, control, harm, words):
    recipe = control[0]["spec"]["recipe"] if control else UNSCALED
    section = precision_section(*tables(*control), catalogue())
    assert {line["recipe"] for line in section["controls"]} == {UNSCALED, FROZEN}
    line = next(line for line in section["controls"] if line["recipe"] == recipe)
    assert line["harm"] is harm
    assert words in line["text"]


def test_the_scale_is_a_line_of_medians_for_recipes_with_a_scaler():
    runs = [run("baseline", 0), *(scaled(SCALER, s, 0, [[0, 4.0], [10 + s, 2.0]]) for s in range(3))]
    assert scale_lines(runs) == {SCALER: [(0, 4.0), (10, 4.0), (11, 2.0), (12, 2.0), (200, 2.0)]}


def test_the_section_stands_in_the_page(tables):
    section = precision_section(*tables(), catalogue())
    text = environment().get_template("precision.html.j2").render(precision=section, figures={})
    assert SCALER in text
    assert "<th>logits</th>" in text
    assert "<th>moments</th>" not in text
    assert "65,536" in text
    alone = precision_section([], [], catalogue())
    assert environment().get_template("precision.html.j2").render(precision=alone, figures={}).strip() == ""
