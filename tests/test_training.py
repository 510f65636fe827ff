"""Quality runs: determinism, pairing by seed, evaluation, typed failures, stability and generalisation."""

import dataclasses
import json
import math
import multiprocessing
import sys

import pytest
import torch
from helpers_tokens import VOCABULARY, english, write_tokens

from lmperf import evaluation, preparation, registry, schedule, training
from lmperf.model import build
from lmperf.recipe import Precision, Recipe
from lmperf.records import InputError, ModelShape, QualitySpec, from_json, read_json
from lmperf.stability import StepRecord, changes, loss_spikes, quantile, stability, why_diverged

SHAPE = ModelShape(VOCABULARY, 64, 1, 2, 1, 32, 64, "rotary", "swiglu", "rmsnorm")

PLUGIN = '''
"""Variants for tests."""
import time
import torch
from torch import nn
from lmperf.recipe import Precision, Stage, Transform
from lmperf.registry import variant

@variant("attention", requires=("package:no_such_package_anywhere",))
def absent(recipe):
    """Needs a package that is not there."""
    return recipe

def fail(message):
    def attention(q, k, v, *, scale=None):
        raise RuntimeError(message)
    return attention

@variant("attention")
def crashes(recipe):
    """Raises."""
    return recipe.replace(attention=fail("boom in /somewhere/secret/file.py"))

@variant("attention")
def hungry(recipe):
    """Runs out of memory."""
    return recipe.replace(attention=fail("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"))

def not_a_number(q, k, v, *, scale=None):
    return q * float("nan")

@variant("attention")
def nan(recipe):
    """Gives no number."""
    return recipe.replace(attention=not_a_number)

def refuse(q, k, v, *, scale=None):
    raise NotImplementedError("no backward here")

@variant("attention")
def refuses(recipe):
    """Is not made for this."""
    return recipe.replace(attention=refuse)

@variant("precision")
def half_scaled(recipe):
    """fp16 with a scaler."""
    return recipe.replace(precision=Precision(autocast=torch.float16, scaler="dynamic"))

def forget(model, context):
    x, y = next(context.batches())
    assert x.shape == y.shape
    with torch.no_grad():
        model.norm.weight.zero_()
    return model

@variant("compression")
def forgets(recipe):
    """Forgets everything after training."""
    return recipe.extend(finish=(Transform(Stage.COMPRESSION, "forget", forget),))
'''


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    registry.variants()
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    path = tmp_path / "quality_plugin.py"
    path.write_text(PLUGIN)
    yield str(path)
    sys.modules.pop("lmperf_plugin_quality_plugin", None)


@pytest.fixture
def spec(tokens):
    return QualitySpec(
        run="baseline.s0", recipe="baseline", variants=(), seed=0, model=SHAPE, batch_size=4, sequence_length=32,
        steps=24, learning_rate=5e-3, device="cpu", data=str(tokens), warmup_steps=4, evaluate_every=8,
        evaluation_batches=2,
    )  # fmt: skip


def run(spec, tmp_path, **changed):
    return training.train(dataclasses.replace(spec, **changed), tmp_path / "run.json")


@pytest.mark.usefixtures("plugin")
def test_a_run_learns_and_is_told_whole(spec, tmp_path):
    outcome = run(spec, tmp_path)
    assert outcome["status"] == "ok"
    assert [point["step"] for point in outcome["curve"]] == [0, 8, 16, 24]
    assert [point["tokens"] for point in outcome["curve"]] == [0, 1024, 2048, 3072]
    losses = [point["loss"] for point in outcome["curve"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert outcome["final"]["bits_per_byte"] == pytest.approx(losses[-1] / math.log(2), rel=0.01)
    assert outcome["held_out"]["bits_per_byte"] > 0
    assert set(outcome["domains"]) == {"code"}
    assert outcome["gradient_underflow"]["total"] < 0.2
    assert outcome["dtypes"]["parameters"] == outcome["dtypes"]["logits"] == "float32"
    assert outcome["peak_memory_bytes"] is None
    assert outcome["tokens_per_s"] > 0
    assert read_json(tmp_path / "run.json") == json.loads(json.dumps(outcome))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    assert from_json(QualitySpec, outcome["spec"]).run == "baseline.s0"
    assert str(tmp_path.parent) not in (tmp_path / "run.json").read_text()


def test_one_spec_gives_one_curve(spec, tmp_path):
    first, again, other = (run(spec, tmp_path, seed=seed, steps=8)["curve"] for seed in (0, 0, 1))
    assert [p["loss"] for p in first] == [p["loss"] for p in again]
    assert [p["loss"] for p in first] != [p["loss"] for p in other]


def test_runs_of_one_seed_read_the_same_batches(spec, tmp_path):
    def read(seed, recipe):
        batches = training.batches_of(dataclasses.replace(spec, seed=seed), recipe, tmp_path)
        return [next(batches)[0] for _ in range(3)]

    mine, paired, other = read(0, Recipe()), read(0, Recipe(accumulate=2)), read(1, Recipe())
    assert all(torch.equal(a, b) for a, b in zip(mine, paired, strict=True))
    assert not torch.equal(mine[0], other[0])


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("attention/absent", "unsupported", "no_such_package_anywhere"),
        ("attention/refuses", "unsupported", "no backward here"),
        ("attention/crashes", "crashed", "boom"),
        ("attention/hungry", "oom_host", "allocate memory"),
        ("attention/nan", "unstable", "not finite"),
    ],
)
def test_a_failing_recipe_gives_a_typed_outcome(spec, tmp_path, plugin, name, status, words):
    outcome = run(spec, tmp_path, variants=(name,), recipe=name, plugins=(plugin,))
    assert outcome["status"] == status
    assert words in outcome["reason"]
    assert "secret/" not in outcome["reason"]
    assert outcome["final"] == {"loss": None, "bits_per_byte": None}
    assert read_json(tmp_path / "run.json")["status"] == status


def test_a_run_without_hope_ends_early(spec, tmp_path, plugin, monkeypatch):
    monkeypatch.setattr(training, "HOPELESS", 5)
    outcome = run(spec, tmp_path, variants=("attention/nan",), plugins=(plugin,), evaluate_every=1000)
    assert outcome["stability"]["nonfinite_steps"] == 5
    assert outcome["curve"][-1]["step"] == 5


def test_the_time_limit_is_kept(spec, tmp_path):
    outcome = run(spec, tmp_path, time_limit_s=0.0)
    assert outcome["status"] == "timeout"
    assert "step 1 of 24" in outcome["reason"]


def test_a_learning_rate_that_destroys_the_model_is_unstable(spec, tmp_path):
    outcome = run(spec, tmp_path, learning_rate=30.0, clip=1e9, stressed=True)
    assert outcome["status"] == "unstable"
    assert outcome["stability"]["diverged"]
    assert outcome["reason"] == outcome["stability"]["diverged_reason"]


def test_bad_input_writes_nothing(spec, tmp_path):
    with pytest.raises(InputError, match="vocabulary of 129; the model's holds 64"):
        run(spec, tmp_path, model=dataclasses.replace(SHAPE, vocab_size=64))
    with pytest.raises(InputError, match="attention/nonesuch"):
        run(spec, tmp_path, variants=("attention/nonesuch",))
    assert not (tmp_path / "run.json").exists()


def test_after_training_transforms_are_evaluated_too(spec, tmp_path, plugin):
    outcome = run(spec, tmp_path, variants=("compression/forgets",), plugins=(plugin,))
    assert outcome["before_finish"]["loss"] == outcome["curve"][-1]["loss"]
    assert outcome["final"]["loss"] > outcome["before_finish"]["loss"] + 1
    assert outcome["held_out"]["loss"] == pytest.approx(math.log(VOCABULARY), rel=0.05)


def test_the_loss_scale_is_recorded(spec, tmp_path, plugin):
    outcome = run(spec, tmp_path, variants=("precision/half_scaled",), plugins=(plugin,), steps=8)
    assert outcome["stability"]["scale"][0][1] == 65536.0
    assert outcome["stability"]["skipped_scaler_steps"] == len(outcome["stability"]["skipped_at"])
    assert outcome["stability"]["steps"] == 8
    assert outcome["dtypes"]["logits"] == "float16"
    assert outcome["dtypes"]["gradients"] == "float32"
    assert run(spec, tmp_path, steps=8)["stability"]["skipped_scaler_steps"] is None


def test_several_processes_train_as_one(spec, tmp_path):
    single = run(spec, tmp_path, steps=6)
    joined = run(spec, tmp_path, steps=6, variants=("distributed/ddp_flat",))
    assert joined["status"] == "ok"
    assert (joined["dtypes"], "several processes" in joined["dtypes_reason"]) == (None, True)
    assert joined["final"]["loss"] == pytest.approx(single["final"]["loss"], rel=1e-3)
    assert joined["curve"][-1]["tokens"] == single["curve"][-1]["tokens"]
    assert multiprocessing.active_children() == []


def test_a_batch_that_cannot_be_shared_is_bad_input(spec, tmp_path):
    with pytest.raises(InputError, match="batch_size: 3 cannot be shared by 2"):
        run(spec, tmp_path, batch_size=3, variants=("distributed/ddp_flat",))


def test_sharded_parameters_are_refused_with_a_reason(spec, tmp_path, monkeypatch):
    def sharded(*args, **kwargs):
        model = build(*args, **kwargs)
        model.norm.weight.full_tensor = None
        return model

    monkeypatch.setattr(preparation, "build", sharded)
    outcome = run(spec, tmp_path)
    assert outcome["status"] == "unsupported"
    assert "sharded" in outcome["reason"]


def test_longer_contexts_need_rotary_positions(spec, tmp_path):
    rotary = run(spec, tmp_path, steps=8)
    assert rotary["long_context"]["length"] == 64
    assert rotary["long_context"]["gain"] == pytest.approx(
        rotary["long_context"]["bits_per_byte_at_trained_length"] - rotary["long_context"]["bits_per_byte"]
    )
    learned = run(spec, tmp_path, steps=8, model=dataclasses.replace(SHAPE, position="learned"))
    assert learned["long_context"] is None
    assert "rotary" in learned["long_context_reason"]
    short = run(spec, tmp_path, steps=8, long_context=1000)
    assert short["long_context"] is None
    assert short["status"] == "ok"


def test_the_target_is_reached_between_two_evaluations(spec, tmp_path):
    curve = [{"bits_per_byte": b, "wall_s": s} for b, s in ((4.0, 0.0), (3.0, 10.0), (None, 15.0), (2.0, 20.0))]
    assert training.time_to_target(curve, 2.5)["time_to_target_s"] == 15.0
    assert training.time_to_target(curve, 3.5)["time_to_target_s"] == 5.0
    assert training.time_to_target(curve, 1.0) == {
        "time_to_target_s": None, "target": {"bits_per_byte": 1.0, "reached": False}
    }  # fmt: skip
    outcome = run(spec, tmp_path, steps=8, options={"target_bits_per_byte": 0.01})
    assert outcome["target"]["reached"] is False


def test_the_learning_rate_warms_up_and_falls_along_a_cosine():
    rates = [schedule.learning_rate_factor(step, 100, 10) for step in range(100)]
    assert rates[0] == 0.1
    assert rates[9] == rates[10] == 1.0
    assert rates[-1] == pytest.approx(schedule.FINAL_RATE)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert schedule.learning_rate_factor(0, 1, 20) == 1.0


def test_rates_are_scaled_by_group_and_in_place_where_they_are_tensors():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr": torch.tensor(1.0)}, {"params": weights[1:], "lr": 2.0}])
    tensor = optimizer.param_groups[0]["lr"]
    schedule.set_rates(optimizer, (1.0, 2.0), 0.25)
    assert optimizer.param_groups[0]["lr"] is tensor
    assert (tensor.item(), optimizer.param_groups[1]["lr"]) == (0.25, 0.5)


def test_held_out_windows_are_even_and_know_no_seed(tokens):
    windows = evaluation.held_out_windows(tokens, "validation", length=32, batch_size=3, batches=4)
    assert sum(len(batch) for batch in windows.batches) == 12
    text = torch.cat([torch.from_numpy(batch) for batch in windows.batches])
    assert torch.equal(text[0, :32], torch.tensor(list(english()[160_000:160_032])))
    assert len({tuple(row.tolist()) for row in text}) == 12
    pairs = list(windows.pairs("cpu"))
    assert all(torch.equal(x[:, 1:], y[:, :-1]) for x, y in pairs)
    cut = windows.cut(16)
    assert sum(len(batch) for batch in cut.batches) == 24
    with pytest.raises(ValueError, match="does not divide"):
        windows.cut(5)


def test_a_split_smaller_than_a_batch_gives_fewer_windows_and_one_too_small_is_bad_input(tmp_path):
    folder = write_tokens(tmp_path, {"validation": b"x" * 100})
    windows = evaluation.held_out_windows(folder, "validation", length=32, batch_size=8, batches=4)
    assert sum(len(batch) for batch in windows.batches) == 3
    with pytest.raises(InputError, match="one window needs 201"):
        evaluation.held_out_windows(folder, "validation", length=200, batch_size=1, batches=1)


def test_the_softmax_is_scored_in_fp32_and_padding_rows_have_no_part(tokens):
    windows = evaluation.held_out_windows(tokens, "validation", length=32, batch_size=4, batches=2)
    truth = evaluation.evaluate(build(SHAPE, Recipe(), seed=0), Recipe(), windows, "cpu")
    coarse = Recipe(precision=Precision(parameters=torch.bfloat16))
    found = evaluation.evaluate(build(SHAPE, coarse, seed=0), coarse, windows, "cpu")
    assert found.dtype == torch.float64
    assert found.mean().item() == pytest.approx(truth.mean().item(), rel=2e-3)
    padded = Recipe(pad_vocab_to=64)
    same = evaluation.evaluate(build(SHAPE, padded, seed=0), padded, windows, "cpu")
    assert torch.allclose(same, truth, atol=1e-5)


def test_evaluation_puts_the_mode_back(tokens):
    windows = evaluation.held_out_windows(tokens, "validation", length=32, batch_size=4, batches=1)
    model = build(SHAPE, Recipe(), seed=0).train()
    evaluation.evaluate(model, Recipe(), windows, "cpu")
    assert model.training
    assert evaluation.score(torch.tensor([1.0, math.nan]), 1.0) == {"loss": None, "bits_per_byte": None}


def falling(steps, spike_at=()):
    return [3.0 + 2.0 * math.exp(-s / 30) + 0.05 * math.sin(s) + (3.0 if s in spike_at else 0.0) for s in range(steps)]


def test_spikes_are_found_where_they_are():
    assert loss_spikes(falling(200)) == []
    assert loss_spikes(falling(200, (50, 120))) == [50, 120]
    assert loss_spikes([1.0] * 60) == []
    assert loss_spikes([math.nan] * 60) == []


def test_a_quantile_ignores_what_is_not_finite():
    assert quantile([1.0, 2.0, 3.0, math.nan, math.inf], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert quantile([math.nan], 0.99) is None


def test_a_scale_keeps_only_its_changes():
    assert changes([4.0, 4.0, 2.0, 2.0, 4.0]) == [[0, 4.0], [2, 2.0], [4, 4.0]]
    assert changes([]) == []


@pytest.mark.parametrize(
    ("evaluations", "words"),
    [
        ([5.0, 3.0, 2.5], None),
        ([5.0, 3.0, None], "not finite"),
        ([5.0, 3.0, 5.1], "untrained"),
        ([9.0, 2.0, 4.0], "best"),
        ([5.0], None),
    ],
)
def test_divergence_has_a_reason(evaluations, words):
    reason = why_diverged(StepRecord(losses=[1.0], norms=[1.0], skipped=[False]), evaluations)
    assert reason is None if words is None else words in reason


def test_stability_counts():
    record = StepRecord()
    for step, loss in enumerate(falling(60, (40,))):
        record.add(loss, 1.0 if step else math.inf, step < 2, 2.0 ** -min(step, 2))
    found = stability(record, [5.0, 3.0])
    assert (found["steps"], found["nonfinite_steps"], found["nonfinite_losses"]) == (60, 1, 0)
    assert found["nonfinite_gradients"] == 1
    assert found["skipped_at"] == [0, 1]
    assert found["loss_spikes"] == 1
    assert found["skipped_scaler_steps"] == 2
    assert found["grad_norm_p99"] == 1.0
    assert found["scale"] == [[0, 1.0], [1, 0.5], [2, 0.25]]
    assert record.trailing_failures() == 0
