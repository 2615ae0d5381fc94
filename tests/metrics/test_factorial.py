"""Effects of a factorial are those of least squares, and of a textbook's example."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from compmod_jax.core.errors import UserError
from compmod_jax.metrics.factorial import analyse
from compmod_jax.metrics.significance import paired_test

FACTORS = ("a", "b", "c")
SETTINGS = [frozenset(on) for n in range(4) for on in itertools.combinations(FACTORS, n)]


def draw(blocks=3, seed=0):
  random = np.random.default_rng(seed)
  return {s: {b: float(random.normal(10 * b, 2)) for b in range(blocks)} for s in SETTINGS}


def by_least_squares(values, blocks):
  """Effects, halves of their intervals and p-values, from the normal equations."""
  names = [on for n in range(1, 4) for on in itertools.combinations(FACTORS, n)]
  rows, targets = [], []
  for setting, by_block in values.items():
    for block, value in by_block.items():
      signs = [math.prod(1 if f in setting else -1 for f in on) / 2 for on in names]
      rows.append([*signs, *(float(block == b) for b in range(blocks))])
      targets.append(value)
  x, y = np.array(rows), np.array(targets)
  found = np.linalg.solve(x.T @ x, x.T @ y)
  freedom = len(y) - x.shape[1]
  variance = ((y - x @ found) ** 2).sum() / freedom
  errors = np.sqrt(variance * np.diag(np.linalg.inv(x.T @ x)))
  p = 2 * stats.t.sf(abs(found / errors), freedom)
  return names, found, stats.t.ppf(0.975, freedom) * errors, p, freedom


@pytest.mark.parametrize("blocks", [2, 3])
def test_effects_intervals_and_p_values_are_those_of_least_squares(blocks):
  values = draw(blocks)
  found = analyse(values, FACTORS)
  names, sizes, halves, p, freedom = by_least_squares(values, blocks)
  assert [effect.factors for effect in found.effects] == names
  assert [e.size.mean for e in found.effects] == pytest.approx(sizes[: len(names)].tolist())
  assert [e.size.half for e in found.effects] == pytest.approx(halves[: len(names)].tolist())
  assert [e.p for e in found.effects] == pytest.approx(p[: len(names)].tolist())
  assert found.freedom == freedom


def test_effects_of_a_textbooks_pilot_plant():
  # Box, Hunter and Hunter, the 2^3 pilot plant: mean yields of duplicate runs.
  means = {"": 60, "T": 72, "C": 54, "K": 52, "TC": 68, "TK": 83, "CK": 45, "TCK": 80}
  values = {frozenset(name): {0: float(mean)} for name, mean in means.items()}
  found = {e.name: e.size.mean for e in analyse(values, ("T", "C", "K")).effects}
  expected = {
    "T": 23, "C": -5, "K": 1.5, "T x C": 1.5, "T x K": 10, "C x K": 0, "T x C x K": 0.5,
  }  # fmt: skip
  assert found == pytest.approx(expected)


def test_with_one_factor_it_is_the_paired_test():
  values = {frozenset(): {0: 1.0, 1: 4.0, 2: 2.5}, frozenset("a"): {0: 2.0, 1: 4.5, 2: 5.0}}
  (effect,) = analyse(values, ("a",)).effects
  paired = paired_test([2.0, 4.5, 5.0], [1.0, 4.0, 2.5])
  assert effect.size[:2] == pytest.approx(paired.difference[:2])
  assert (effect.p, effect.corrected) == pytest.approx((paired.p, paired.p))


def test_what_a_seed_adds_to_all_its_runs_changes_nothing():
  values = draw()
  shifted = {s: {b: v + 1000 * b for b, v in by.items()} for s, by in values.items()}
  one, two = analyse(values, FACTORS), analyse(shifted, FACTORS)
  assert [e.p for e in one.effects] == pytest.approx([e.p for e in two.effects])
  assert one.deviation == pytest.approx(two.deviation)


def test_no_effect_is_found_as_often_as_the_level_says():
  p = [e.p for seed in range(150) for e in analyse(draw(seed=seed), FACTORS).effects]
  assert stats.kstest(p, "uniform").pvalue > 0.001


def test_one_block_has_effects_but_no_intervals():
  found = analyse(draw(1), FACTORS)
  assert all(math.isnan(e.size.half) and math.isnan(e.p) for e in found.effects)


def test_published_figures_have_the_same_contrasts():
  published = {setting: 1.0 + 2.0 * ("a" in setting) for setting in SETTINGS}
  found = {e.name: e.published for e in analyse(draw(), FACTORS, published).effects}
  assert found.pop("a") == pytest.approx(2.0)
  assert list(found.values()) == pytest.approx([0.0] * 6)
  one = dict(list(published.items())[1:])
  assert all(e.published is None for e in analyse(draw(), FACTORS, one).effects)


def test_an_incomplete_factorial_is_refused():
  values = draw()
  with pytest.raises(UserError, match="needs all 8"):
    analyse({s: by for s, by in values.items() if s}, FACTORS)
  del values[frozenset("a")][2]
  with pytest.raises(UserError, match="every setting needs a run in each block"):
    analyse(values, FACTORS)
