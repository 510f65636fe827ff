"""The report from made-up tables: what a user wrote is escaped, failures are shown, figures and event files exist."""

import html.parser
import json

import pytest
from session_files import quality_run, session_spec, swept_session, timed, write_session

from lmperf import figures, quantities, views
from lmperf.records import Sample, write_json
from lmperf.reporting import write_report
from lmperf.stages import ablate, compare

EVIL = "<script>alert(1)</script>"
MACHINE = {
    "device": EVIL,
    "fingerprint": "machine-1",
    "machine": {
        "cpu": {"model": "x", "cores": 2, "instruction_sets": ["avx2"], "bf16": False},
        "gpu": None, "memory_bytes": 2**33, "os": "Linux", "python": "3.11", "torch": "2.13", "gpus": [], "cuda": None,
    },
    "peaks": {},
}  # fmt: skip
PROFILE = {
    "step_s": 0.01, "tokens_per_s": 1e4, "memory": {"peak_memory_bytes": 2**20}, "overhead_factor": 1.1,
    "warmup": {"curve_s": [0.03, 0.02, 0.01]}, "trace": {"file": "t.gz", "bytes": 1}, "status": "ok",
}  # fmt: skip


def on_a_cluster(lines):
    """A session's lines with what its header holds when it ran on a node with two GPUs."""
    gpus = [{"name": "GPU-1", "memory_bytes": 2**30}] * 2
    lines[0] |= {"node": "ab12cd34", "provenance": {"machine": {**MACHINE["machine"], "gpus": gpus}}}
    return lines


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A whole reports folder made from made-up sessions and quality runs."""
    top = tmp_path_factory.mktemp("a b 文")
    data, reports = top / "data", top / "reports"
    write_json(data / "raw" / "manifest.json", {"sources": [{"name": "mine", "domain": "english", "licence": EVIL,
               "status": "ok", "reason": None, "reproducible": True}]})  # fmt: skip
    write_json(data / "shards" / "manifest.json", {"sources": [{"name": "mine", "documents": 3, "bytes": 10,
               "quarantined_bytes": 0, "duplicates": 0}], "totals": {"documents": 3, "bytes": 10},
               "shards": [{}, {"reused": True}],
               "reproducible": True})  # fmt: skip
    write_json(data / "tokens" / "manifest.json", {"vocab_size": 300, "dtype": "uint16", "engine": "tokenizers",
               "splits": {"train": {"tokens": 5, "bytes": 10}}})  # fmt: skip
    write_json(reports / "tables" / "machine.json", MACHINE)
    write_json(reports / "profile" / "profile.json", PROFILE)
    spec = session_spec(["sdpa_flash", "window", "chunked"])
    samples = [s for s in timed(spec, {"sdpa_flash": 0.5, "window": 1.5}) if s.arm != "chunked"]
    samples.append(Sample("chunked", "T=128", 1, status="oom_host", reason=EVIL, phase="build"))
    write_session(
        reports / "sessions" / "attention.training_step.jsonl", spec, samples, {"baseline": 100.0, "window": 50.0}
    )
    costs = {name: (lambda n, f=f: f * n) for f, name in enumerate(("baseline", "sdpa_flash", "chunked"), 1)}
    swept = reports / "sessions" / "attention.operator_forward_backward.jsonl"
    swept_session(swept, costs, costs, change=on_a_cluster)
    for seed in range(3):
        for recipe, final in (("baseline", 2.0), ("attention/window", 2.1)):
            run = quality_run(recipe, seed, final)
            write_json(reports / "quality" / f"{run['spec']['run'].replace('/', '-')}.json", run)
    config = {"plugins": [], "ablation": {"stack": []}, "model": {}, "training": {}, "quality": {}}
    sessions = ["attention.training_step", "attention.operator_forward_backward"]
    common = {"sessions": sessions, "smallest_effect": 0.02, "config_hash": "c", "config": config}
    names = sorted(path.stem for path in (reports / "quality").glob("*.json"))
    compare(common, data, reports, str)
    ablate({**common, "quality": names, "stack": [], "interactions": []}, data, reports, str)
    write_report({**common, "title": EVIL, "left_out": ["norm/rmsnorm"]}, data, reports)
    return reports


class Outside(html.parser.HTMLParser):
    """Collects what a page would load or run."""

    def __init__(self):
        super().__init__()
        self.found, self.scripts = [], 0

    def handle_starttag(self, tag, attributes):
        self.scripts += tag == "script"
        self.found += [
            value for name, value in attributes if name in ("src", "href") and not value.startswith(("data:", "#"))
        ]


def test_the_page_is_self_contained_and_escaped(report):
    text = (report / "index.html").read_text(encoding="utf-8")
    parser = Outside()
    parser.feed(text)
    assert (parser.found, parser.scripts) == ([], 0)
    assert EVIL not in text
    assert "&lt;script&gt;" in text


def test_numbers_stand_with_interval_n_and_verdict(report):
    rows = {row["variant"]: row for row in views.cells_as_rows(report) if row["workload"] == "training_step"}
    assert rows["sdpa_flash"]["speedup"] == pytest.approx(2.0, rel=0.02)
    assert rows["sdpa_flash"]["speedup_low"] < 2 < rows["sdpa_flash"]["speedup_high"] * 1.02
    assert (rows["sdpa_flash"]["verdict"], rows["window"]["verdict"]) == ("faster", "slower")
    text = (report / "index.html").read_text(encoding="utf-8")
    assert "oom_host" in text
    assert "norm/rmsnorm" in text


def test_figures_and_event_files_exist(report):
    names = {path.stem for path in (report / "figures").glob("*.svg")}
    assert {"overview", "warmup", "quality", "axis-attention-training-step"} <= names
    assert {f"sweep-attention-operator-forward-backward-{what}" for what in ("time", "memory")} <= names
    assert len(list((report / "tensorboard").rglob("events.out.*"))) == 6


def test_event_files_hold_the_curves(report):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(report / "tensorboard" / "baseline.s0")).Reload()
    run = json.loads((report / "quality" / "baseline.s0.json").read_text())
    scalars = events.Scalars("validation/bits_per_byte")
    assert [s.value for s in scalars] == pytest.approx([p["bits_per_byte"] for p in run["curve"]], rel=1e-5)


def test_equal_data_gives_equal_figures(tmp_path):
    rows = [{"label": "a", "speedup": 1.5, "low": 1.4, "high": 1.6, "verdict": "faster", "floor": 0.01}]
    first, second = (
        figures.save(figures.forest(rows, "t"), tmp_path / name).read_bytes() for name in ("1.svg", "2.svg")
    )
    assert first == second


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.0123, "s", "12.3 ms"), (2.5, "s", "2.5 s"), (None, "s", "–"), (3 * 2**20, "bytes", "3.0 MiB"),
     (float("nan"), "s", "–"), (12_345.0, "tokens/s", "12.3 ktokens/s"), (2e12, "FLOP/s", "2 TFLOP/s"), ("", "s", "–"),
     (0.9996e-3, "s", "1 ms"), (0.034, "share", "3.4 %")],
)  # fmt: skip
def test_quantities_read_well(value, unit, text):
    assert quantities.show_quantity(value, unit) == text


def test_every_cell_of_the_page_has_a_heading_for_its_card(report):
    text = (report / "index.html").read_text(encoding="utf-8")
    assert text.count("<td") == text.count("<td data-label=") > 100


def test_the_page_says_where_each_session_ran_and_what_was_reused(report):
    text = (report / "index.html").read_text(encoding="utf-8")
    assert "2 × GPU-1 (1.0 GiB)" in text
    assert "ab12cd34" in text
    assert "not recorded" in text  # the other session's header names no machine
    assert "no delta is formed across" in text
    assert "1 of 2 shards taken over unchanged from the run before" in text


def test_the_attention_sweep_stands_on_the_page(report):
    text = (report / "index.html").read_text(encoding="utf-8")
    for expected in ("Growth with length", "No pair crosses in the measured range", "memory ÷ sdpa_flash", "1.5×"):
        assert expected in text


def arm(variant, shape, **changes):
    """A line of a comparison table, as far as the forest figure reads it."""
    base = {
        "axis": "attention",
        "session": "s",
        "speedup": 1.0,
        "speedup_low": None,
        "speedup_high": None,
        "verdict": "same",
    }
    unknown = {"speedup_low": None, "speedup_high": None, "noise_floor": None}
    return {**base, **unknown, "variant": variant, "shape": shape, **changes}


def test_a_forest_names_only_what_differs_and_stays_readable():
    shapes = [f"length={n} heads=4" for n in (128, 256)]
    rows = [arm("a", shape) for shape in shapes] + [arm("b", shapes[0], speedup=None)]
    assert [row["label"] for row in views.forest_rows(rows)] == ["a  length=128", "a  length=256"]
    many = [arm(f"v{n}", shape) for shape in shapes for n in range(30)]
    assert [row["label"] for row in views.forest_rows(many)] == [f"v{n}" for n in range(30)]  # at the last shape
    assert views.forest_rows([arm("a", "x"), arm("b", "x", axis="norm")])[1]["label"] == "norm/b"


@pytest.mark.parametrize("name", ["short", "a variant with a very long name"])
def test_many_lines_stay_distinct_and_clear_of_their_legend(name):
    styles = [tuple(figures.line_style(number).values()) for number in range(60)]
    assert len(set(styles)) == 60
    figure = figures.sweep({f"{name} {n}": [(128, 1.0), (256, 2.0)] for n in range(17)}, "s", "t", {})
    figure.canvas.draw()
    legend, axes = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert legend.y1 < axes.y0
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
    assert axes.height > 1.8 * figure.dpi


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.1), (0.8, 1.4), (0.11, 1.3), (0.3, 2.5), (0.05, 9), (1e-3, 1e3)])
def test_ticks_of_a_ratio_axis_are_round_and_apart(low, high):
    ticks = figures.ratio_ticks(low, high)
    assert 1 in ticks
    assert 3 <= len(ticks) <= 7
    assert low <= ticks[0] < ticks[-1] <= high


def test_quality_curves_are_also_drawn_as_distances_to_the_baseline():
    lines = {"baseline": [(0, 4.0), (1, 2.0)], "worse": [(0, 4.0), (1, 2.1), (2, 1.0)]}
    assert figures.difference_to_baseline(lines)["worse"] == [(0, 0.0), (1, pytest.approx(5))]
    assert figures.difference_to_baseline({"worse": lines["worse"], "other": lines["worse"]}) == {}
    assert len(figures.curves(lines).axes) == 2


def test_a_failure_at_many_shapes_is_one_line():
    same = {
        "axis": "a",
        "variant": "v",
        "session": "s",
        "metric": "step_time_s",
        "status": "unsupported",
        "reason": "x",
    }
    rows = [{**same, "shape": shape} for shape in ("T=1", "T=2")]
    rows += [{**same, "shape": "T=4", "status": "ok"}, {**same, "shape": "T=4", "reason": "other"}]
    assert [line["shape"] for line in views.failures(rows)] == ["T=1; T=2", "T=4"]
