"""Intervals and tests are the textbook's; the promised difference is found as often as said."""

import math

import numpy as np
import pytest
from scipy import stats

from compmod_jax.core.errors import UserError
from compmod_jax.metrics.significance import detectable, holm, mean_interval, paired_test


def test_the_interval_is_students():
  found = mean_interval([1.0, 2.0, 6.0])
  low, high = stats.t.interval(0.95, 2, loc=3.0, scale=stats.sem([1.0, 2.0, 6.0]))
  assert found.mean == pytest.approx(3.0)
  assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))


def test_a_single_run_has_no_interval_and_none_is_an_error():
  assert math.isnan(mean_interval([2.0]).half)
  with pytest.raises(UserError, match="at least one run"):
    mean_interval([])


def test_the_paired_test_is_scipys():
  random = np.random.default_rng(0)
  a, b = random.normal(size=5), random.normal(0.5, size=5)
  assert paired_test(a.tolist(), b.tolist()).p == pytest.approx(stats.ttest_rel(a, b).pvalue)


def test_equal_runs_differ_by_nothing_and_a_constant_shift_is_certain():
  assert paired_test([1.0, 2.0], [1.0, 2.0]).p == 1.0
  assert paired_test([2.0, 3.0], [1.0, 2.0]).p == 0.0


def test_unequal_seeds_are_refused():
  with pytest.raises(UserError, match="same seeds"):
    paired_test([1.0, 2.0], [1.0])


def test_holms_correction_of_a_worked_example():
  # 4 x 0.005, 3 x 0.01, 2 x 0.03; the last may not fall below the one before.
  assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_what_was_not_tested_does_not_count_in_the_correction():
  found = holm([0.02, math.nan, 0.9])
  assert found[0] == pytest.approx(0.04)
  assert math.isnan(found[1])


@pytest.mark.parametrize("runs", [3, 5])
def test_the_detectable_difference_is_found_with_the_promised_power(runs):
  random = np.random.default_rng(runs)
  difference = detectable(2.0, runs, alpha=0.05, power=0.8)
  draws = random.normal(difference, 2.0, (20_000, runs))
  found = stats.ttest_1samp(draws, 0, axis=1).pvalue <= 0.05
  half = 4 * math.sqrt(0.8 * 0.2 / len(draws))
  assert abs(found.mean() - 0.8) < half


def test_one_run_detects_nothing():
  assert detectable(1.0, 1) == math.inf
