"""The baseline's profile: hotspots, traces within their budget, warm-up curve, memory and utilisation."""

import dataclasses
import gzip
import json
import os
import platform
from types import SimpleNamespace

import pytest
import torch
from helpers_tokens import VOCABULARY, write_tokens

from lmperf import flops, hotspots, profiling, tracing
from lmperf.records import ArmSpec, Cell, CheckFailed, InputError, ModelShape, SessionSpec, read_json
from lmperf.tables import read_csv

LAYER = torch.nn.Linear(64, 64)
SHAPE = ModelShape(VOCABULARY, 64, 2, 2, 2, 64, 128)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    tokens = write_tokens(tmp_path_factory.mktemp("data") / "tokens")
    return SessionSpec(
        session="profile", axis="attention", workload="training_step", arms=(ArmSpec("baseline"),),
        cells=(Cell("default"),), model=SHAPE, batch_size=4, sequence_length=32, rounds=1, seed=0, device="cpu",
        threads=1, data=str(tokens), options={"peak_seconds": 0.01, "peak_sizes": [64, 128]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def profiled(spec, tmp_path_factory):
    reports = tmp_path_factory.mktemp("reports")
    answer = profiling.profile_baseline(spec, reports / "profile", tables=reports / "tables", top=5)
    return reports, answer


def test_the_hotspots_are_a_table_by_self_time(profiled):
    reports, answer = profiled
    rows = read_csv(reports / "tables/hotspots.csv")
    assert list(rows[0]) == list(hotspots.COLUMNS)
    assert len(rows) == 5
    times = [float(row["self_time_us"]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert all(float(row["share"]) > 0 for row in rows)
    assert sum(entry["share"] for entry in answer["operators"]) == pytest.approx(1.0)
    names = {entry["operator"] for entry in answer["operators"]}
    assert {"aten::mm", "aten::bmm", "aten::_softmax"} <= names
    assert not any(name.startswith(("ProfilerStep", "[memory]")) for name in names)


def test_the_trace_is_gzip_json_without_names(profiled):
    reports, answer = profiled
    (path,) = (reports / "profile/trace").iterdir()
    assert path.name == answer["trace"]["file"]
    assert path.name.startswith("baseline.")
    assert path.name.endswith(".pt.trace.json.gz")
    assert path.stat().st_size == answer["trace"]["bytes"] <= answer["trace"]["budget_bytes"]
    assert answer["trace"]["messages"] == []
    text = gzip.decompress(path.read_bytes()).decode()
    trace = json.loads(text)
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    assert f'"{platform.node()}"' not in text
    assert str(reports) not in text


def test_exactly_the_scheduled_steps_are_recorded(profiled):
    _, answer = profiled
    calls = {entry["operator"]: entry["calls"] for entry in answer["operators"]}
    assert calls["aten::_softmax"] == tracing.ACTIVE * SHAPE.layers


def test_times_memory_and_flops_of_the_step(profiled):
    _, answer = profiled
    assert answer["status"] == "ok"
    assert answer["tokens_per_s"] == pytest.approx(4 * 32 / answer["step_s"])
    assert len(answer["warmup"]["curve_s"]) == profiling.CURVE_STEPS
    assert set(answer["warmup"]["mean_over_steady"]) == {"0", "1", "2", "5", "10"}
    assert answer["overhead_factor"] > 0.5
    assert answer["flops"]["full"]["total"] == pytest.approx(answer["flops"]["counted"]["total"], rel=0.01)
    assert answer["flops"]["mismatch"] is None
    table = answer["memory"]["table"]
    assert table["parameters"] == 4 * flops.parameter_count(SHAPE)
    assert table["moments"] == pytest.approx(2 * table["parameters"], rel=0.01)
    assert answer["memory"]["peak_memory_bytes"] > table["parameters"] + table["moments"] + table["activations"] // 2


def test_utilisation_is_null_where_the_peak_is_unknown(profiled):
    reports, answer = profiled
    rows = {(row["what"], row["dtype"], row["source"]): row for row in read_csv(reports / "tables/utilisation.csv")}
    assert list(next(iter(rows.values()))) == list(profiling.UTILISATION_COLUMNS)
    measured = rows["training_step_exact", "float32", "measured"]
    rate = answer["flops"]["exact"]["total"] / answer["step_s"]
    assert float(measured["achieved"]) == pytest.approx(rate)
    assert float(measured["share"]) == pytest.approx(rate / answer["peaks"]["flops"]["float32"]["best"])
    datasheet = rows["training_step_exact", "float32", "datasheet"]
    assert datasheet["peak"] is None
    assert datasheet["share"] is None
    assert ("copy", "bytes", "datasheet") in rows


def test_machine_facts_stand_beside_the_tables(profiled):
    reports, answer = profiled
    found = read_json(reports / "tables/machine.json")
    assert found["fingerprint"] == answer["fingerprint"]
    assert found["schema"] == 1
    assert found["peaks"]["flops"]["float32"]["best"] > 0
    assert set(found["datasheet"]["flops"].values()) == {None}
    assert read_json(reports / "profile/profile.json") == json.loads(json.dumps(answer))


def small_step():
    for _ in range(20):
        LAYER(torch.ones(8, 64)).sum().backward()


def test_the_budget_is_kept_by_recording_less_and_old_traces_go(tmp_path):
    out = tmp_path / "trace"
    full, whole = tracing.record_within(small_step, "cpu", out, 1 << 30)
    assert (whole.detail, whole.messages) == (tracing.Detail(), ())
    recording, less = tracing.record_within(small_step, "cpu", out, whole.size * 2 // 3)
    assert recording.detail == full.detail, "the table comes from the full recording whatever the trace"
    assert less.detail == tracing.Detail(shapes=False, memory=False, active=1)
    assert less.size == less.path.stat().st_size <= whole.size * 2 // 3
    assert list(out.iterdir()) == [less.path]
    assert len(less.messages) == 3
    assert all("recording less" in message for message in less.messages)
    assert os.listdir(tmp_path) == ["trace"]


def test_no_trace_at_all_where_none_fits(tmp_path):
    recording, trace = tracing.record_within(small_step, "cpu", tmp_path / "trace", 100)
    assert (trace.path, trace.size, trace.detail) == (None, None, None)
    assert "none was kept" in trace.messages[-1]
    assert list((tmp_path / "trace").iterdir()) == []
    assert recording.profiler.events()


def test_nothing_recorded_is_an_error():
    def forget(profiler):
        profiler.events = list

    with pytest.raises(CheckFailed, match="no event"):
        tracing.record(lambda: torch.ones(1), "cpu", tracing.Detail(), forget)


def test_a_trace_is_cleaned_of_paths_and_hosts(tmp_path):
    path = tmp_path / "a.json.gz"
    text = '{"host_name": "ada-laptop",\n"traceName": "/home/ada/x/t.json", "n": "a::b",\n"d": 3}\n'
    path.write_bytes(gzip.compress(text.encode()))
    tracing.anonymise(path)
    assert json.loads(gzip.decompress(path.read_bytes())) == {
        "host_name": "", "traceName": "…/t.json", "n": "a::b", "d": 3
    }  # fmt: skip
    assert os.listdir(tmp_path) == ["a.json.gz"]


def event(key, time_us, flops=0, shapes=(), count=1):
    return SimpleNamespace(
        key=key, self_cpu_time_total=time_us, self_device_time_total=2 * time_us, flops=flops, input_shapes=shapes,
        count=count,
    )  # fmt: skip


def test_a_hotspot_lies_under_the_roofline_where_its_numbers_say():
    ceiling = hotspots.Ceiling(flops=1e12, bandwidth=1e10)
    mm = event("aten::mm", 1000.0, 2 * 512**3, [[512, 512], [512, 512]])
    thin = event("aten::bmm", 100.0, 2 * 4 * 64, [[4, 1, 64], [4, 64, 1]])
    rows = hotspots.hotspots([thin, mm, event("ProfilerStep*", 9e9), event("aten::gelu", 10.0, 0, [[4, 8]])], ceiling)
    assert [row["operator"] for row in rows] == ["aten::mm", "aten::bmm", "aten::gelu"]
    assert rows[0]["intensity"] == pytest.approx(2 * 512**3 / (3 * 4 * 512**2))
    assert [row["roofline"] for row in rows] == ["memory", "memory", "memory"]
    assert rows[2]["intensity"] is None
    assert rows[0]["peak_share"] == pytest.approx(2 * 512**3 / 1e-3 / 1e12)
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    fast = hotspots.hotspots([mm], hotspots.Ceiling(flops=1e11, bandwidth=1e10))
    assert fast[0]["roofline"] == "compute"
    unknown = hotspots.hotspots([mm], hotspots.Ceiling(None, None))
    assert unknown[0]["roofline"] is None
    assert hotspots.hotspots([event("step", 5.0)], ceiling)[0]["roofline"] is None, "no shapes, no position"
    assert unknown[0]["peak_share"] is None


def test_overhead_rows_of_a_device_are_left_out():
    rows = [event("Activity Buffer Request", 50.0), event("ampere_sgemm", 10.0), event("Lazy Function Loading", 9.0)]
    found = hotspots.hotspots(rows, hotspots.Ceiling(None, None), "cuda")
    assert [(row["operator"], row["self_time_us"], row["share"]) for row in found] == [("ampere_sgemm", 20.0, 1.0)]


@pytest.mark.parametrize(
    ("operator", "shapes", "elements"),
    [
        ("aten::mm", [[2, 3], [3, 5]], 6 + 15 + 10),
        ("aten::addmm", [[5], [2, 3], [3, 5], [], []], 5 + 6 + 15 + 10),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 7 * (6 + 15 + 10)),
        ("aten::gelu", [[4, 8]], 64),
        ("aten::add", [[4, 8], [8], []], 32 + 8 + 32),
    ],
)
def test_bytes_are_what_is_read_and_written_once(operator, shapes, elements):
    assert hotspots.bytes_moved(operator, shapes, 4) == 4 * elements
    assert hotspots.bytes_moved(operator, [[], None], 4) is None


def test_warm_up_is_told_by_the_steps_thrown_away():
    told = profiling.describe_warmup([10.0, 4.0, *[2.0] * 28], 2.0)
    assert told["first_over_steady"] == 5.0
    assert told["mean_over_steady"] == {"0": 1.25, "1": 1.05, "2": 1.0, "5": 1.0, "10": 1.0}


def test_a_step_that_cannot_run_leaves_its_reason_and_the_machine(spec, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(profiling, "build", fail)
    answer = profiling.profile_baseline(spec, tmp_path / "profile", tables=tmp_path / "tables")
    assert answer["status"] == "oom_host"
    assert answer["step_s"] is None
    assert answer["memory"]["peak_memory_bytes"] is None
    assert read_csv(tmp_path / "tables/hotspots.csv") == []
    rows = read_csv(tmp_path / "tables/utilisation.csv")
    assert [row["achieved"] for row in rows if row["what"].startswith("training_step")] == [None] * 4
    assert read_json(tmp_path / "tables/machine.json")["peaks"]["copy_bytes_per_s"] > 0


def test_bad_input_is_told_in_one_line(spec, tmp_path):
    small = dataclasses.replace(spec, model=dataclasses.replace(SHAPE, vocab_size=8))
    with pytest.raises(InputError, match="vocabulary of 8"):
        profiling.profile_baseline(small, tmp_path / "profile", tables=tmp_path / "tables")
    with pytest.raises(InputError, match="data is not set"):
        profiling.profile_baseline(
            dataclasses.replace(spec, data=None), tmp_path / "profile", tables=tmp_path / "tables"
        )
