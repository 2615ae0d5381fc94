"""Products over rows equal products written plainly."""

import chex
import jax
import jax.numpy as jnp

from compmod_jax.core.linear import narrow_product, over_rows

ROWS = jax.random.normal(jax.random.key(0), (6, 9))
KERNEL = jax.random.normal(jax.random.key(1), (9, 2))


def test_a_function_of_rows_is_applied_to_every_position():
  inputs = ROWS.reshape(2, 3, 9)
  chex.assert_trees_all_close(over_rows(lambda rows: rows @ KERNEL, inputs), inputs @ KERNEL)


def test_the_narrow_product_has_the_value_and_the_gradients_of_a_product():
  def loss(product):
    return lambda rows, kernel: jnp.sum(jnp.sin(product(rows, kernel)))

  found, expected = (
    jax.value_and_grad(loss(product), (0, 1))(ROWS, KERNEL)
    for product in (narrow_product, jnp.matmul)
  )
  # Sums of six numbers of order one: as near as float32 adds them, in any order.
  chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_narrow_product_has_second_derivatives():
  def slope(product):
    def error(rows, kernel):
      return jnp.sum(jnp.sin(product(rows, kernel)))

    return jax.grad(lambda kernel: jnp.sum(jax.grad(error)(ROWS, kernel) ** 2))(KERNEL)

  chex.assert_trees_all_close(slope(narrow_product), slope(jnp.matmul), rtol=1e-5)
