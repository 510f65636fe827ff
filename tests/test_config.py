"""The configuration is strict: each fault is one line that names the key, the value and what is allowed."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lmperf.config import Config, json_schema, load, overlay, parse
from lmperf.records import InputError

ROOT = Path(__file__).parents[1]


def minimal(**changes):
    base = {
        "corpus": {"sources": [{"name": "mine", "kind": "files", "path": "text"}]},
        "measure": {"sessions": [{"axis": "norm", "workload": "training_step", "variants": ["rmsnorm"]}]},
    }
    return overlay(base, changes)


def test_every_shipped_configuration_is_valid():
    for preset in [None, *sorted((ROOT / "workflow" / "presets").glob("*.yaml"))]:
        config = load([ROOT / "config.yaml", *([preset] if preset else [])])
        assert isinstance(config, Config)


def test_defaults_of_the_types_and_of_the_file_agree():
    written = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    for section in ("tokenizer", "profile", "cluster", "output"):
        assert set(written[section]) == set(Config.model_fields[section].annotation.model_fields), section


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"seeed": 1}, ["'seeed'", "did you mean 'seed'"]),
        ({"model": {"d_modle": 64}}, ["model.d_modle", "did you mean 'd_model'"]),
        ({"model": {"size": "bsae"}}, ["'bsae'", "did you mean 'base'", "allowed: tiny"]),
        ({"model": {"d_model": 130, "heads": 4}}, ["d_model 130", "heads 4"]),
        ({"model": {"heads": 4, "kv_heads": 3}}, ["heads 4", "kv_heads 3"]),
        ({"tokenizer": {"vocab_size": 100}}, ["tokenizer.vocab_size", "100", "257"]),
        ({"seed": "one"}, ["seed", "'one'", "integer"]),
        ({"device": "gpu"}, ["device", "'gpu'", "'cuda'"]),
        ({"quality": {"variants": ["attention/windo"]}}, ["attention/windo", "did you mean 'attention/window'"]),
        ({"quality": {"variants": ["measured", "atention"]}}, ["'atention'", "did you mean 'attention'", "axis/name"]),
        ({"quality": {"variants": ["mesured"]}}, ["quality.variants", "did you mean 'measured'"]),
        ({"ablation": {"stack": ["nonsense/x"]}}, ["ablation.stack", "nonsense/x"]),
        ({"corpus": {"sources": [{"name": "mine", "kind": "files"}]}}, ["corpus.sources.0", "path"]),
        ({"corpus": {"sources": []}}, ["corpus.sources"]),
        ({"plugins": ["nowhere.py"]}, ["plugins", "nowhere.py"]),
    ],
)
def test_a_fault_is_one_line_that_names_it(changes, parts):
    with pytest.raises(InputError) as caught:
        parse(minimal(**changes))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("session", "parts"),
    [
        ({"axis": "atention", "workload": "training_step"}, ["'atention'", "did you mean 'attention'"]),
        ({"axis": "norm", "workload": "trainingstep"}, ["'trainingstep'", "did you mean 'training_step'"]),
        ({"axis": "norm", "workload": "training_step", "variants": ["rmsnrm"]}, ["norm/rmsnrm", "norm/rmsnorm"]),
        ({"axis": "norm"}, ["workload"]),
    ],
)
def test_a_faulty_session_is_named(session, parts):
    with pytest.raises(InputError) as caught:
        parse(minimal(measure={"sessions": [session]}))
    assert all(part in str(caught.value) for part in ["measure.sessions.0", *parts])


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2", "\x00", "just words"])
def test_a_broken_file_is_named(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"bad\.yaml"):
        load([file])


def test_overlays_merge_mappings_and_replace_lists():
    merged = overlay({"a": {"x": 1, "y": [1, 2]}, "b": 1}, {"a": {"y": [3]}})
    assert merged == {"a": {"x": 1, "y": [3]}, "b": 1}


def test_set_changes_one_key():
    config = load([ROOT / "config.yaml"], ["measure.rounds=15", "model.size=tiny"])
    assert (config.measure.rounds, config.model.size) == (15, "tiny")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(sorted(Config.model_fields)), value=json_values)
def test_no_value_makes_anything_but_a_config_or_one_clear_line(key, value):
    message = ""
    try:
        parse(minimal() | {key: value})
    except InputError as error:
        message = str(error)
    assert "\n" not in message


def test_the_schema_file_is_current():
    file = ROOT / "workflow" / "schemas" / "config.schema.json"
    assert json.loads(file.read_text(encoding="utf-8")) == json_schema(), "run: lmperf schema > " + str(file)
