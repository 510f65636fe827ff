"""The statistics hold what they promise, by simulation: coverage, error rates, honest detectable effects."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lmperf import statistics as s
from lmperf.design import minimum_rounds

SESSIONS = 3000
ROUNDS = (3, 4, 5, 6, 7, 8, 9, 11, 13, 15)
NOISES = ("normal", "bursty", "contention")


def arm_noise(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Log of one process sample's time around its true value, for each kind of disturbance."""
    jitter = rng.normal(0, 0.01, shape)
    if kind == "normal":
        return jitter
    if kind == "bursty":  # now and then something takes the machine for a while: times up to several fold
        return jitter + (rng.random(shape) < 0.15) * rng.exponential(0.5, shape)
    return jitter + rng.exponential(0.04, shape)  # contention only ever adds time


def log_ratios(kind: str, rounds: int, *, arms: int = 1, sessions: int = SESSIONS, seed: int = 0) -> np.ndarray:
    """Simulated paired log ratios without effect, (sessions, arms, rounds), against the round's one baseline sample."""
    rng = np.random.default_rng([seed, rounds, NOISES.index(kind)])
    baseline = arm_noise(kind, rng, (sessions, 1, rounds))
    return arm_noise(kind, rng, (sessions, arms, rounds)) - baseline


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_the_95_percent_interval_covers_at_least_93(kind, rounds):
    values = 0.1 + log_ratios(kind, rounds)[:, 0]
    _, low, high = s.log_bounds(values)
    assert np.mean((low <= 0.1) & (0.1 <= high)) >= 0.93


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("rounds", [3, 4, 5, 6])
def test_the_interval_is_student_below_six_rounds_and_all_of_the_data_at_six(kind, rounds):
    """No percentile bootstrap: with few rounds the bounds are the ones that theory gives."""
    values = log_ratios(kind, rounds, sessions=50)[:, 0]
    _, low, high = s.log_bounds(values)
    if rounds == 6:
        assert np.allclose(low, values.min(-1))
        assert np.allclose(high, values.max(-1))
    reference = stats.t.interval(0.95, rounds - 1, values.mean(-1), values.std(-1, ddof=1) / math.sqrt(rounds))
    if rounds < 6:
        assert np.allclose(low, reference[0])
        assert np.allclose(high, reference[1])


def wrong_share(values: np.ndarray, truth: np.ndarray, delta: float, same_delta: float | None = None) -> float:
    """Share of sessions in which any arm gets a word that is false for its true log effect."""
    wrong = 0
    for session in values:
        findings = s.judge_arms({str(i): row for i, row in enumerate(session)}, delta, same_delta=same_delta)
        words = [findings[str(i)].verdict for i in range(len(truth))]
        wrong += any(
            is_wrong(word, effect, same_delta or delta if word == "same" else delta)
            for word, effect in zip(words, truth, strict=True)
        )
    return wrong / len(values)


def is_wrong(word: str, effect: float, delta: float) -> bool:
    """Whether the verdict claims what is not so: beyond a margin not passed, or between margins that were passed."""
    low, high = math.log1p(-delta), math.log1p(delta)
    return (
        (word == "faster" and effect >= low)
        or (word == "slower" and effect <= high)
        or (word in ("same", "small difference") and not low <= effect <= high)
    )


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("rounds", [3, 5, 6, 9, 15])
def test_any_false_verdict_in_a_session_of_five_arms_is_rarer_than_5_percent(kind, rounds):
    delta = 0.02
    on_the_margin = math.log1p(delta) * (1 + 1e-9)  # the hardest truth: just outside, so "same" is false
    truth = np.array([0.0, math.log1p(-delta), on_the_margin, -0.25, 0.2])
    values = log_ratios(kind, rounds, arms=5, sessions=200) + truth[:, None]
    assert wrong_share(values, truth, delta) <= 0.05


@pytest.mark.parametrize("rounds", [3, 6, 9])
def test_a_margin_widened_by_noise_makes_nothing_the_same(rounds):
    """With a floor of 8 % an effect just over the 2 % of interest is not called "same" more often than 5 %."""
    truth = np.full(3, math.log(1.0201))
    values = log_ratios("normal", rounds, arms=3, sessions=200) + truth[:, None]
    assert wrong_share(values, truth, 0.08, 0.02) <= 0.05


@pytest.mark.parametrize("kind", NOISES)
def test_identical_code_is_never_called_faster_or_slower_more_often_than_5_percent(kind):
    values = log_ratios(kind, 9, arms=7, sessions=200, seed=3)
    assert wrong_share(values, np.zeros(7), 1e-9) <= 0.05


@pytest.mark.parametrize("rounds", [6, 9, 15])
def test_an_effect_of_the_stated_size_is_found_as_often_as_promised(rounds):
    """Injecting each noise level's own stated detectable effect, at least about 80 % of sessions show it."""
    values = log_ratios("normal", rounds, sessions=400)[:, 0]
    stated = np.median([s.detectable_effect(row, 0.02) for row in values[:200]])
    shifted = values + math.log1p(stated)
    found = [s.verdict(s.interval(row), 0.02) == "slower" for row in shifted]
    assert np.mean(found) >= 0.75


def test_few_rounds_for_many_arms_can_show_nothing():
    values = np.full(9, -0.5) + np.linspace(-0.01, 0.01, 9)
    assert minimum_rounds(10) == 9
    assert s.detectable_effect(values, 0.02, arms=10) is not None
    assert minimum_rounds(20) == 10
    assert s.detectable_effect(values, 0.02, arms=20) is None
    findings = s.judge_arms({str(i): values for i in range(20)}, 0.02)
    assert {f.verdict for f in findings.values()} == {"inconclusive"}
    findings = s.judge_arms({str(i): values for i in range(10)}, 0.02)
    assert {f.verdict for f in findings.values()} == {"faster"}


@pytest.mark.parametrize("arms", [1, 2, 3, 7, 12, 25])
def test_minimum_rounds_is_the_first_n_whose_smallest_p_survives_holm(arms):
    n = minimum_rounds(arms)
    assert arms * 2 * 0.5**n <= 0.05 < arms * 2 * 0.5 ** (n - 1)


@pytest.mark.parametrize("n", [6, 9, 14])
def test_signed_rank_agrees_with_scipy_without_ties(n):
    values = np.random.default_rng(n).normal(0.3, 1, n)
    assert s.signed_rank_p(values) == pytest.approx(stats.wilcoxon(values, method="exact").pvalue)
    one_sided = stats.wilcoxon(values - 0.1, alternative="less", method="exact").pvalue
    assert s.one_sided_p(values, 0.1) == pytest.approx(one_sided)


def test_holm_by_hand():
    assert s.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert s.holm([]) == []
    assert s.holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1, 1).map(lambda x: round(x, 6)), min_size=6, max_size=15),
    st.floats(-1, 1),
)
def test_interval_and_test_never_disagree(values, bound):
    _, low, high = s.log_bounds(values)
    assert (s.one_sided_p(values, bound) <= 0.025) == (high < bound)
    assert (s.one_sided_p(-np.array(values), -bound) <= 0.025) == (low > bound)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=15))
def test_the_inverse_ratio_gives_the_mirrored_interval(values):
    ours, mirrored = s.interval(values), s.interval([-v for v in values])
    assert ours.inverse().low == pytest.approx(mirrored.low)
    assert ours.inverse().high == pytest.approx(mirrored.high)
    assert ours.low <= ours.estimate * (1 + 1e-12)
    assert ours.estimate <= ours.high * (1 + 1e-12)


def test_below_three_rounds_there_is_no_interval_and_no_claim():
    assert s.interval([0.1, 0.1]) is None
    assert s.verdict(None, 0.02) == "inconclusive"
    assert s.judge_arms({"a": [-0.7, -0.7]}, 0.02)["a"].verdict == "inconclusive"
    assert s.interval([0.1, 0.2, 0.15]).indicative
    assert not s.interval([0.1] * 6).indicative


def test_a_value_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        s.interval([0.1, float("nan"), 0.2])


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.5, 0.6, "faster"),
        (1.5, 1.6, "slower"),
        (0.99, 1.01, "same"),
        (1.005, 1.01, "small difference"),
        (0.97, 0.99, "inconclusive"),
        (0.9, 1.1, "inconclusive"),
    ],
)
def test_words(low, high, word):
    found = s.Interval((low + high) / 2, low, high, 9, "signed rank", False)
    assert s.verdict(found, 0.02) == word
    assert s.verdict(found, 0.02, capped=True) == "inconclusive"
    assert s.verdict(found, 0.02, p_holm=0.06) == "inconclusive"
    opposite = {"faster": "slower", "slower": "faster"}.get(word, word)
    assert s.verdict(found, 0.02, lower_is_better=False) == opposite
    size = {"faster": "better", "slower": "worse"}.get(word, word)
    assert s.verdict(found, 0.02, words=s.SIZE_WORDS) == size


def test_binomial_interval_against_known_values():
    assert s.binomial_interval(0, 40) == pytest.approx((0.0, 0.0881), abs=1e-3)
    assert s.binomial_interval(40, 40)[1] == 1.0
    assert s.binomial_interval(2, 40) == pytest.approx((0.0061, 0.1692), abs=1e-3)
    with pytest.raises(ValueError, match="not allowed"):
        s.binomial_interval(3, 2)
