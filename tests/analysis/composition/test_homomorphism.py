"""Homomorphism error: representations of which the operations are known, and ridge by refitting."""

import numpy as np

from compmod_jax.analysis.composition.homomorphism import (
  ADDITIVE,
  LINEAR,
  MEAN,
  Changes,
  homomorphism_errors,
  ridge,
)

WORDS = [(1, 2), (1, 3), (2, 5)]


def changes(chance, operation, pairs=240, dim=6):
  """Pairs of three kinds, of which the second is what `operation` makes of kind and first."""
  words = [WORDS[number] for number in chance.integers(len(WORDS), size=pairs)]
  base = chance.normal(size=(pairs, dim))
  return Changes(words, base, np.array([operation(*one) for one in zip(words, base, strict=True)]))


def relative(operation, pairs=240):
  """Errors, relative to those of no operation, on other pairs than those of the estimate."""
  chance = np.random.default_rng(0)
  train, test = changes(chance, operation, pairs), changes(chance, operation)
  one = homomorphism_errors(train, test, chance)
  total = one.identity.sum()
  found = {label: squares.sum() / total for label, squares in one.found.items()}
  return found, {label: squares.sum() / total for label, squares in one.shuffled.items()}


def test_additive_representations_have_no_error():
  vectors = dict(zip(WORDS, np.random.default_rng(1).normal(size=(3, 6)), strict=True))
  found, shuffled = relative(lambda words, base: base + vectors[words])
  assert found[ADDITIVE] < 1e-20
  assert found[LINEAR] < 1e-20
  assert min(shuffled.values()) > 0.5


def test_linear_representations_have_an_error_of_additive_operations_alone():
  matrices = dict(zip(WORDS, np.random.default_rng(2).normal(size=(3, 6, 6)), strict=True))
  found, shuffled = relative(lambda words, base: base @ matrices[words] + 1)
  assert found[LINEAR] < 1e-4
  assert found[ADDITIVE] > 0.5
  assert min(shuffled.values()) > 0.3


def test_random_representations_are_predicted_by_their_mean_at_best():
  chance = np.random.default_rng(3)
  found, shuffled = relative(lambda words, base: chance.normal(size=len(base)), pairs=3000)
  np.testing.assert_allclose(found[ADDITIVE], 1, atol=0.02)
  np.testing.assert_allclose(shuffled[ADDITIVE], 1, atol=0.02)
  # Of r and an independent r' of the same distribution: E|r' - mean|^2 / E|r' - r|^2.
  for value in (found[MEAN], found[LINEAR], shuffled[LINEAR]):
    np.testing.assert_allclose(value, 0.5, atol=0.03)


def test_words_that_training_lacks_are_left_out():
  chance = np.random.default_rng(4)
  train = Changes([(1, 2)], np.zeros((1, 2)), np.ones((1, 2)))
  test = Changes([(1, 3), (1, 2)], chance.normal(size=(2, 2)), chance.normal(size=(2, 2)))
  one = homomorphism_errors(train, test, chance)
  assert one.words == [(1, 2)]
  expected = np.square(test.source[1] - test.base[1] - 1).sum()
  np.testing.assert_allclose(one.found[ADDITIVE], [expected])
  np.testing.assert_allclose(one.found[LINEAR], [expected])  # of one pair there is no map
  assert homomorphism_errors(train, test._replace(words=[(7, 8)] * 2), chance).words == []


def test_the_penalty_is_the_best_on_examples_that_are_left_out():
  chance = np.random.default_rng(5)
  x = chance.normal(size=(12, 8))
  y = x @ chance.normal(size=(8, 3)) + 2 * chance.normal(size=(12, 3))
  x, y = x - x.mean(axis=0), y - y.mean(axis=0)
  size = np.square(np.linalg.svd(x, compute_uv=False)).mean()

  def fit(x, y, penalty):
    centred, rest = x - x.mean(axis=0), y - y.mean(axis=0)
    w = np.linalg.solve(centred.T @ centred + penalty * size * np.eye(8), centred.T @ rest)
    return w, y.mean(axis=0) - x.mean(axis=0) @ w

  def left_out(penalty):
    total = 0.0
    for place in range(12):
      rest = np.arange(12) != place
      w, shift = fit(x[rest], y[rest], penalty)
      total += np.square(x[place] @ w + shift - y[place]).sum()
    return total

  penalties = [10.0, 1.0, 0.1, 0.01, 0.001]
  best = min(penalties, key=left_out)
  assert best not in (penalties[0], penalties[-1])
  np.testing.assert_allclose(ridge(x, y), fit(x, y, best)[0], atol=1e-10)
  noise = chance.normal(size=(12, 3))
  assert np.abs(ridge(x, noise - noise.mean(axis=0))).max() < 0.2
