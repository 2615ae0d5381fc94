"""Programs whose products with weights have operands in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.rounding import rounded


def test_products_in_bfloat16_round_matrices_of_weights_alone():
  random = np.random.default_rng(0)
  rows, weights = (random.standard_normal(s).astype(np.float32) for s in ((6, 8), (8, 5)))
  stacked = random.standard_normal((3, 6, 8)).astype(np.float32)

  def products(rows, weights, stacked):
    exact = jax.lax.dot(rows, weights, precision=jax.lax.Precision.HIGHEST)
    looped = jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ weights @ weights.T), rows)
    return rows @ weights, looped, exact, stacked @ stacked.swapaxes(1, 2)

  found = jax.jit(rounded(products))(rows, weights, stacked)
  plain = jax.jit(products)(rows, weights, stacked)
  half = [jnp.asarray(one, jnp.bfloat16).astype(jnp.float32) for one in (rows, weights)]
  np.testing.assert_allclose(found[0], half[0] @ half[1], rtol=1e-6, atol=1e-6)
  assert 1e-6 < np.abs(found[1] - plain[1]).max() < 0.05
  np.testing.assert_array_equal(found[2], plain[2])
  np.testing.assert_array_equal(found[3], plain[3])


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_products_of_few_rows_have_these_rows(rows):
  left, right = np.ones((rows, 8), np.float32), np.ones((8, 5), np.float32)
  np.testing.assert_array_equal(rounded(jnp.matmul)(left, right), np.full((rows, 5), 8.0))


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_are_rounded_but_for_the_sums_over_rows(remat):
  """A linear loss: the gradient of weights is exact, that of rows is made with rounded weights."""
  random = np.random.default_rng(0)
  rows, weights, errors = (
    random.standard_normal(s).astype(np.float32) for s in ((6, 8), (8, 5), (6, 5))
  )

  def loss(rows, weights):
    return jnp.sum((rows @ weights) * errors)

  slopes = jax.grad(jax.checkpoint(loss) if remat else loss, (0, 1))
  of_rows, of_weights = jax.jit(rounded(slopes))(rows, weights)
  np.testing.assert_allclose(of_weights, rows.T @ errors, rtol=1e-6, atol=1e-6)
  half = [jnp.asarray(one, jnp.bfloat16).astype(jnp.float32) for one in (errors, weights)]
  np.testing.assert_allclose(of_rows, half[0] @ half[1].T, rtol=1e-6, atol=1e-6)
  assert np.abs(of_rows - errors @ weights.T).max() > 1e-4


def test_recomputed_products_are_rounded():
  random = np.random.default_rng(0)
  rows, weights = (random.standard_normal(s).astype(np.float32) for s in ((6, 8), (8, 5)))
  found = jax.jit(rounded(jax.checkpoint(jnp.matmul)))(rows, weights)
  assert np.abs(found - rows @ weights).max() > 1e-4
