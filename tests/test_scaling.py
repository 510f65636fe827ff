"""Growth exponents and cross-over lengths."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmperf.scaling import crossover, growth_exponent

LENGTHS = (128, 256, 512, 1024, 2048)


@settings(deadline=None)  # the first call imports scipy
@given(st.floats(0.1, 3.0), st.floats(1e-6, 1e3))
def test_a_power_law_gives_back_its_exponent(exponent, factor):
    found = growth_exponent(LENGTHS, [factor * n**exponent for n in LENGTHS])
    assert found.exponent == pytest.approx(exponent, abs=1e-6)
    assert found.low == pytest.approx(exponent, abs=1e-5)
    assert found.high == pytest.approx(exponent, abs=1e-5)


def test_the_interval_holds_the_slope_of_a_noisy_law_and_widens_with_noise():
    def noisy(noise):
        values = [n**2 * (1 + noise * (-1) ** index) for index, n in enumerate(LENGTHS)]
        return growth_exponent(LENGTHS, values)

    small, large = noisy(0.01), noisy(0.2)
    assert small.low < 2 < small.high
    assert large.high - large.low > 5 * (small.high - small.low)


def test_fixed_costs_are_left_behind_by_fitting_the_longest():
    values = [1e6 + n**2 for n in LENGTHS]
    everything, tail = growth_exponent(LENGTHS, values), growth_exponent(LENGTHS, values, last=2)
    assert everything.exponent < tail.exponent
    assert tail.points == 2
    assert tail.low is None


def test_missing_values_are_left_out_and_one_length_gives_nothing():
    assert growth_exponent(LENGTHS, [None, 1.0, None, 16.0, None]).exponent == pytest.approx(2)
    assert growth_exponent(LENGTHS, [None, 1.0, None, None, None]) is None
    assert growth_exponent((64, 64), [1.0, 2.0]) is None


def test_order_of_lengths_does_not_matter():
    assert growth_exponent((1024, 128, 512), [1024, 128, 512]).exponent == pytest.approx(1)
    assert crossover((1024, 256), [1024, 256], [512, 512]) == pytest.approx(512)


def test_crossover_of_a_quadratic_and_a_linear_cost():
    quadratic, linear = [n**2 for n in LENGTHS], [700 * n for n in LENGTHS]
    assert crossover(LENGTHS, quadratic, linear) == pytest.approx(700)
    assert crossover(LENGTHS, linear, quadratic) == pytest.approx(700)


def test_curves_that_do_not_cross():
    assert crossover(LENGTHS, LENGTHS, [2 * n for n in LENGTHS]) is None
    assert crossover((1, 2, 4), [1, 3, 4], [2, 3, 8]) is None  # they touch
    assert crossover((1, 2), [1, None], [2, 1]) is None


def test_a_crossing_in_an_equal_point_and_the_last_of_two():
    assert crossover((1, 2, 4), [1, 3, 9], [2, 3, 5]) == pytest.approx(
        1 * 2 ** (2 * 0.6931471805599453 / (0.6931471805599453 + 0.5877866649021191)), rel=1e-6
    )
    assert crossover((1, 2, 4), [2, 1, 4], [1, 2, 2]) > 2


@pytest.mark.parametrize(("lengths", "values"), [((1, 2), (1.0,)), ((0, 2), (1.0, 2.0)), ((1, 2), (float("nan"), 1.0))])
def test_impossible_input_is_refused(lengths, values):
    with pytest.raises(ValueError, match="match|positive"):
        growth_exponent(lengths, values)


def test_no_torch_is_loaded():
    code = "import sys, lmperf.scaling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
