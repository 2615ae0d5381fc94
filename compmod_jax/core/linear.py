"""The rows of a batch: products over all positions, and copies of examples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core import sharding


def over_rows(
  product: Callable[[jax.Array], jax.Array], inputs: Float[Array, "batch time inner"]
) -> Float[Array, "batch time outer"]:
  """Applies a function of rows [batch * time, inner] to every position.

  A product of two matrices keeps its operands where they are in both directions, on every backend;
  XLA:CPU writes transposed copies of activations and weights for the gradients of a product with
  more than two axes, which costs a tenth of a training step.
  """
  rows = product(inputs.reshape(-1, inputs.shape[-1]))
  return rows.reshape(*inputs.shape[:-1], rows.shape[-1])


def exactly(dtype: DTypeLike) -> lax.Precision | None:
  """Precision of a product whose float32 operands no device may round to fewer bits."""
  return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def affine(
  rows: Float[Array, "rows inner"],
  kernel: Float[Array, "inner outer"],
  bias: Float[Array, " outer"],
) -> Float[Array, "rows outer"]:
  """rows @ kernel + bias, in the type of the rows.

  Below float32, the bias is added to the product's float32 sums, which are rounded once: so XLA's
  products on GPUs add a float32 parameter themselves. One that is rounded first costs a pass of its
  own, which reads and writes the result again.
  """
  if rows.dtype == jnp.float32:
    return rows @ kernel + bias[None]
  return _rounded_affine(rows, kernel, bias)


@jax.custom_vjp
def _rounded_affine(rows: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
  """See `affine`. Reverse mode, any order."""
  made = jnp.matmul(rows, kernel, preferred_element_type=jnp.float32)
  return (made + bias.astype(jnp.float32)[None]).astype(rows.dtype)


def _affine_forward(
  rows: jax.Array, kernel: jax.Array, bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
  return _rounded_affine(rows, kernel, bias), (rows, kernel, bias)


def _affine_backward(
  kept: tuple[jax.Array, jax.Array, jax.Array], errors: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  rows, kernel, bias = kept
  d_bias = jnp.sum(errors, axis=0, dtype=jnp.float32).astype(bias.dtype)
  return errors @ kernel.T, rows.T @ errors, d_bias


_rounded_affine.defvjp(_affine_forward, _affine_backward)


def transposed_product(
  rows: Float[Array, "rows inner"], weight: Float[Array, "outer inner"]
) -> Float[Array, "rows outer"]:
  """rows @ weight.T, for few rows that meet the same weight again and again.

  XLA:CPU packs the right operand of every product anew, which costs much where a weight meets few
  rows; without the barrier, the weight would become that operand again.
  """
  if sharding.platform_of(rows) != "cpu":
    return lax.dot_general(rows, weight, (((1,), (1,)), ((), ())))
  return lax.optimization_barrier(lax.dot_general(weight, rows, (((1,), (1,)), ((), ())))).T


@jax.custom_vjp
def narrow_product(
  rows: Float[Array, "rows inner"], kernel: Float[Array, "inner outer"]
) -> Float[Array, "rows outer"]:
  """rows @ kernel, exact in float32, for a kernel with many more rows than columns.

  Its gradient is formed as (errors^T rows)^T: XLA:CPU is a third faster with the wide matrix on the
  right (2,048 rows, 512 by 128, 2 cores), and would turn the product round again but for the
  barrier. Reverse mode, any order.
  """
  return _product(rows, kernel)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
  return jnp.matmul(left, right, precision=exactly(left.dtype))


def _narrow_forward(
  rows: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _product(rows, kernel), (rows, kernel)


def _narrow_backward(
  kept: tuple[jax.Array, jax.Array], errors: jax.Array
) -> tuple[jax.Array, jax.Array]:
  rows, kernel = kept
  turned = lax.optimization_barrier(_product(errors.T, rows))
  return _product(errors, kernel.T), turned.T


narrow_product.defvjp(_narrow_forward, _narrow_backward)


def group_product(
  rows: Float[Array, "rows inner"], kernels: Float[Array, "groups slice outer"]
) -> Float[Array, "rows outers"]:
  """Every slice of the rows times a matrix of its own, side by side.

  Slices come first in the product: XLA:CPU takes two thirds of the time that it takes for rows
  first, forward and backward (2,048 rows, 2 slices of 64 into 128, 2 cores).
  """
  groups, width, outer = kernels.shape
  parts = rows.reshape(-1, groups, width).swapaxes(0, 1)
  made = lax.dot_general(parts, kernels, (((2,), (1,)), ((0,), (0,))))
  return made.swapaxes(0, 1).reshape(-1, groups * outer)


def rows_of_copies(state: Float[Array, "batch *copies dim"]) -> Float[Array, "rows dim"]:
  """Copies of the same examples as rows, copy by copy; without copies, the examples."""
  return state if state.ndim == 2 else state.swapaxes(0, 1).reshape(-1, state.shape[-1])


def copies_of_rows(rows: Float[Array, "rows dim"], batch: int) -> Float[Array, "batch *copies dim"]:
  """The reverse of `rows_of_copies`, for this number of examples."""
  if len(rows) == batch:
    return rows
  return rows.reshape(-1, batch, rows.shape[-1]).swapaxes(0, 1)
