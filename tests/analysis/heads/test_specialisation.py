"""Statistics from sums are those of the activations themselves."""

import numpy as np
import pytest
import scipy.stats

from compmod_jax.analysis.heads import specialisation


def test_mutual_information_is_that_of_the_definition():
  random = np.random.default_rng(0)
  joint = random.random((5, 3))
  p = joint / joint.sum()
  bits = sum(
    p[c, i] * np.log2(p[c, i] / p[c].sum() / p[:, i].sum()) for c in range(5) for i in range(3)
  )
  assert specialisation.mutual_information(joint) == pytest.approx(bits)
  several = specialisation.mutual_information(np.stack([joint, 7 * joint, np.eye(5, 3)]))
  assert several[:2] == pytest.approx([bits, bits])
  assert several[2] == pytest.approx(np.log2(3))


def test_mutual_information_is_zero_without_a_relation_and_entropy_with_certainty():
  categories, units = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.9])
  assert specialisation.mutual_information(np.outer(categories, units)) == pytest.approx(
    0, abs=1e-12
  )
  certain = np.diag([3.0, 1.0])
  assert specialisation.mutual_information(certain) == pytest.approx(specialisation.entropy([3, 1]))
  assert specialisation.entropy([1, 1, 1, 1]) == pytest.approx(2)
  assert specialisation.mutual_information(np.zeros((2, 2))) == 0


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation_is_spearmans(ties):
  random = np.random.default_rng(1)
  one, other = random.normal(size=(2, 300))
  other += one
  if ties:
    one, other = one.round(), other.round()
  expected = scipy.stats.spearmanr(one, other).statistic
  assert specialisation.spearman(one, other) == pytest.approx(expected)
  # Logarithms change no rank.
  assert specialisation.spearman(np.exp(one), np.exp(other)) == pytest.approx(expected)
  assert np.isnan(specialisation.spearman(one, np.ones(300)))


def test_correlation_from_sums_is_that_of_the_columns():
  values = np.random.default_rng(2).normal(size=(50, 4)) @ np.diag([1, 1, 3, 1]) + 5
  values[:, 3] = 2.0
  found = specialisation.correlation(values.T @ values, values.sum(0), 50)
  np.testing.assert_allclose(found[:3, :3], np.corrcoef(values[:, :3].T), rtol=1e-6)
  assert np.isnan(found[3]).all(), "a column that does not vary has none"


def test_similarity_does_not_see_rotations_and_does_see_independence():
  random = np.random.default_rng(3)
  one, other = random.normal(size=(2, 4000, 5)) @ random.normal(size=(5, 5)) + 2
  rotation = np.linalg.qr(random.normal(size=(5, 5)))[0]
  outputs = np.concatenate([one, 3 * one @ rotation - 7, other], axis=1)
  found = specialisation.linear_cka(outputs.T @ outputs, outputs.sum(0), 4000, 3)
  np.testing.assert_allclose(np.diag(found), 1)
  assert found[0, 1] == pytest.approx(1)
  assert found[0, 2] < 0.01
  x, y = one - one.mean(0), other - other.mean(0)
  norm = np.linalg.norm
  expected = norm(y.T @ x) ** 2 / norm(x.T @ x) / norm(y.T @ y)
  assert found[0, 2] == pytest.approx(expected, rel=1e-6)


def test_an_interval_over_blocks_holds_the_truth_as_often_as_it_says():
  random = np.random.default_rng(4)
  held = 0
  for _ in range(400):
    blocks = random.normal(0.3, 0.1, size=8)
    found = specialisation.estimate_from_blocks(float(blocks.mean()), blocks)
    held += found.low < 0.3 < found.high
  assert 0.92 <= held / 400 <= 0.98
  assert np.isnan(specialisation.estimate_from_blocks(0.5, [0.5]).low)
