"""What a few seeds can tell: intervals of means, paired tests, corrections, power."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from compmod_jax.core.errors import check


class Mean(NamedTuple):
  """A mean over runs.

  Attributes:
    mean: of the runs.
    half: half the width of the 95 % interval; NaN for a single run.
    runs: how many.
  """

  mean: float
  half: float
  runs: int


def mean_interval(values: Sequence[float], level: float = 0.95) -> Mean:
  r"""Mean and Student's interval, :math:`\bar x \pm t_{n-1} s / \sqrt n`.

  Args:
    values: one a run, independent and about normal.
    level: coverage, between 0 and 1.

  Raises:
    UserError: no value.
  """
  array = np.asarray(values, np.float64)
  check(array.size > 0, "values is empty; a mean needs at least one run.")
  n = array.size
  if n == 1:
    return Mean(float(array[0]), math.nan, 1)
  quantile = stats.t.ppf((1 + level) / 2, n - 1)
  return Mean(float(array.mean()), float(quantile * array.std(ddof=1) / math.sqrt(n)), n)


class Paired(NamedTuple):
  """A comparison of two settings that were run with the same seeds.

  Attributes:
    difference: mean of the pairs' differences, with its interval.
    p: two-sided p-value of a difference of zero; NaN for fewer than two pairs.
    deviation: standard deviation of the differences; NaN for fewer than two pairs.
  """

  difference: Mean
  p: float
  deviation: float


def unpaired_p(first: Sequence[float], second: Sequence[float]) -> float:
  """Two-sided p-value of equal means of independent runs, variances unequal; NaN for single runs.

  Source: Welch 1947.
  """
  if min(len(first), len(second)) < 2:
    return math.nan
  spread = float(np.ptp(first)) + float(np.ptp(second))
  if spread == 0:
    return 1.0 if np.mean(first) == np.mean(second) else 0.0
  found: Any = stats.ttest_ind(first, second, equal_var=False)
  return float(found.pvalue)


def paired_test(values: Sequence[float], reference: Sequence[float]) -> Paired:
  """Student's t-test on the differences of runs with the same seeds.

  Args:
    values: one a seed.
    reference: the same seeds, in the same order.

  Raises:
    UserError: unequal or empty.
  """
  check(
    len(values) == len(reference),
    f"values has {len(values)} runs and reference {len(reference)}; a paired test needs the same"
    " seeds on both sides.",
  )
  differences = np.asarray(values, np.float64) - np.asarray(reference, np.float64)
  difference, n = mean_interval(differences.tolist()), len(differences)
  if n < 2:
    return Paired(difference, math.nan, math.nan)
  deviation = float(differences.std(ddof=1))
  if deviation == 0:
    return Paired(difference, 1.0 if difference.mean == 0 else 0.0, 0.0)
  statistic = difference.mean / (deviation / math.sqrt(n))
  return Paired(difference, float(2 * stats.t.sf(abs(statistic), n - 1)), deviation)


def holm(p_values: Sequence[float]) -> list[float]:
  """p-values corrected for their number, by Holm's step-down rule; NaN stays and does not count.

  Rejecting where a corrected value is at most alpha keeps the chance of any false rejection at
  alpha, whatever the dependence of the tests.

  Source: Holm 1979, A simple sequentially rejective multiple test procedure.
  """
  array = np.asarray(p_values, np.float64)
  order = [int(i) for i in np.argsort(array, kind="stable") if not math.isnan(array[i])]
  corrected, highest = array.copy(), 0.0
  for place, i in enumerate(order):
    highest = max(highest, min(1.0, (len(order) - place) * float(array[i])))
    corrected[i] = highest
  return corrected.tolist()


def detectable(deviation: float, runs: int, *, alpha: float = 0.05, power: float = 0.8) -> float:
  """Smallest mean difference that a two-sided paired t-test finds with the given power.

  Exact, by the noncentral t distribution.

  Args:
    deviation: standard deviation of the pairs' differences.
    runs: pairs; fewer than 2 find nothing (infinity).
    alpha: level of the test; divide by the number of tests to correct for it.
    power: probability of finding it.
  """
  if runs < 2 or math.isnan(deviation):
    return math.inf
  freedom = runs - 1
  critical = float(stats.t.ppf(1 - alpha / 2, freedom))

  def missing(shift: float) -> float:
    upper = float(stats.nct.sf(critical, freedom, shift))
    # Far from zero the other tail is nothing, and its numbers are the least exact.
    lower = float(stats.nct.cdf(-critical, freedom, shift)) if shift < 5 else 0.0
    return upper + lower - power

  highest = 2 * critical + 10
  while missing(highest) < 0:
    highest *= 2
  shift: Any = optimize.brentq(missing, 1e-6, highest)
  return float(shift) * deviation / math.sqrt(runs)
