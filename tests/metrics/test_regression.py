"""The coefficient of determination, beside figures by hand."""

import numpy as np
import pytest

from compmod_jax.metrics.regression import determination


def test_it_is_the_share_of_the_variance_that_is_predicted():
  values = np.array([1.0, 2.0, 3.0, 6.0])  # mean 3, squares about it: 4 + 1 + 0 + 9
  assert determination(np.float64(0), values) == 1
  assert determination(np.float64(14), values) == 0
  assert determination(np.float64(3.5), values) == pytest.approx(0.75)
  assert determination(np.float64(28), values) == -1


def test_every_column_has_its_own():
  values = np.array([[1.0, 0.0], [3.0, 10.0]])
  np.testing.assert_allclose(determination(np.array([1.0, 5.0]), values), [0.5, 0.9])


def test_values_far_from_zero_lose_no_digits():
  values = np.float32(4096) + np.float32([0, 1, 2, 3])
  assert determination(np.float64(2.5), values) == pytest.approx(0.5)
