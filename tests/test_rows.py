"""Products over rows equal products written plainly."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import DEVICES

from compmod_jax.core import linear, sharding
from compmod_jax.core.linear import float32_product, narrow_product, over_rows

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


def test_rows_in_half_precision_meet_a_kernel_in_full_precision():
  """As near to double precision as float32 is; a kernel in half precision is 500 times as far."""
  rows = np.asarray(jax.random.normal(jax.random.key(0), (64, 300)).astype(jnp.bfloat16))
  kernel = jax.random.normal(jax.random.key(1), (300, 8))
  exact = rows.astype(np.float64) @ np.asarray(kernel, np.float64)

  def far(found):
    return np.abs(np.asarray(found, np.float64) - exact).max()

  found = jax.jit(linear._split_product)(rows, kernel)
  assert found.dtype == jnp.float32
  assert far(found) < 2e-5
  assert far(rows.astype(np.float32) @ kernel.astype(jnp.bfloat16).astype(np.float32)) > 1e-2


@pytest.mark.parametrize(("platform", "parts"), [(None, 1), ("tpu", 1), ("cuda", 3)])
def test_a_kernel_is_split_where_that_saves_products(platform, parts):
  with sharding.tracing_for(DEVICES[platform]) if platform else contextlib.nullcontext():
    made = str(jax.make_jaxpr(float32_product)(ROWS.astype(jnp.bfloat16), KERNEL))
  assert f"f32[{len(ROWS)},{parts * KERNEL.shape[1]}] = dot_general" in made
  assert ("Precision.HIGHEST" in made) == (parts == 1)


def test_gradients_of_the_product_of_two_precisions_are_in_the_type_of_the_rows():
  rows, kernel = ROWS.astype(jnp.bfloat16), KERNEL

  def total(product):
    return lambda rows, kernel: jnp.sum(jnp.sin(product(rows, kernel)))

  found = jax.grad(total(linear._split_product), (0, 1))(rows, kernel)
  assert [one.dtype for one in found] == [jnp.bfloat16, jnp.float32]
  expected = jax.grad(total(jnp.matmul), (0, 1))(rows.astype(jnp.float32), kernel)
  chex.assert_trees_all_close(jax.tree.map(jnp.float32, found), expected, rtol=2e-2, atol=1e-2)


def test_the_narrow_product_has_second_derivatives():
  def slope(product):
    def error(rows, kernel):
      return jnp.sum(jnp.sin(product(rows, kernel)))

    return jax.grad(lambda kernel: jnp.sum(jax.grad(error)(ROWS, kernel) ** 2))(KERNEL)

  chex.assert_trees_all_close(slope(narrow_product), slope(jnp.matmul), rtol=1e-5)
