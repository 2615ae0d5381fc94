r"""Products of rows with the matrix of their group, for groups of any sizes.

Rows are sorted by group: the first `sizes[0]` belong to group 0, the next `sizes[1]` to group 1,
and so on. With :math:`g(n)` the group of row n,

.. math::
   \mathrm{product:} \quad y_n = x_n W_{g(n)} \;\mathrm{or}\; x_n W_{g(n)}^\top, \qquad
   \mathrm{outer:} \quad W_g = \sum_{n : g(n) = g} x_n^\top y_n

Rows after the last group give zeros and add nothing. The derivatives of each are made of the two
again, so both can be differentiated (in reverse mode) as often as one likes.

Implementations: `blocked` walks over blocks of rows of one group, only as many as a group fills,
and fits any device; `ragged` is `jax.lax.ragged_dot`, one kernel on TPU, but a masked product with
all matrices on CPU and CUDA. `auto`: the platform that a program is compiled for decides.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from compmod_jax import errors

Grouped = Literal["auto", "blocked", "ragged"]

BLOCK = 128


def product(
  rows: Float[Array, "rows inner"],
  kernels: Float[Array, "..."],
  sizes: Int[Array, " groups"],
  *,
  axis: int = 0,
  transposed: bool = False,
  implementation: Grouped = "auto",
  block: int = BLOCK,
) -> Float[Array, "rows outer"]:
  """Every row times the matrix of its group, or times its transpose.

  Args:
    rows: sorted by group.
    kernels: [groups, inner, outer] with the axis of groups moved to `axis`; where `transposed`,
      inner and outer change places.
    sizes: rows of each group; their sum is at most the number of rows.
    axis: place of the groups in `kernels`, so that no copy is made for another layout.
    transposed: multiply with the transpose of each matrix.
    implementation: how; `auto` as the platform decides.
    block: rows taken at once by `blocked`.
  """
  return _product(rows, kernels, sizes, axis, transposed, implementation, block)


def outer(
  left: Float[Array, "rows inner"],
  right: Float[Array, "rows outer"],
  sizes: Int[Array, " groups"],
  *,
  axis: int = 0,
  implementation: Grouped = "auto",
  block: int = BLOCK,
) -> Float[Array, "..."]:
  """Sum over each group's rows of their outer products, in the layout of `product`'s kernels.

  Args:
    left: rows sorted by group.
    right: rows in the same order.
    sizes: rows of each group.
    axis: place of the groups in the result.
    implementation: how; `auto` as the platform decides.
    block: rows taken at once by `blocked`.
  """
  return _outer(left, right, sizes, axis, implementation, block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _product(
  rows: jax.Array,
  kernels: jax.Array,
  sizes: jax.Array,
  axis: int,
  transposed: bool,
  implementation: Grouped,
  block: int,
) -> jax.Array:
  ways = {
    "blocked": functools.partial(_blocked_product, axis=axis, transposed=transposed, block=block),
    "ragged": functools.partial(_ragged_product, axis=axis, transposed=transposed),
  }
  return _run(ways, implementation, rows, kernels, sizes)


def _product_forward(rows: Any, kernels: Any, sizes: Any, *static: Any) -> Any:
  return _product(rows, kernels, sizes, *static), (rows, kernels, sizes)


def _product_backward(
  axis: int, transposed: bool, implementation: Any, block: int, kept: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  rows, kernels, sizes = kept
  left, right = (gradient, rows) if transposed else (rows, gradient)
  return (
    _product(gradient, kernels, sizes, axis, not transposed, implementation, block),
    _outer(left, right, sizes, axis, implementation, block),
    None,
  )


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _outer(
  left: jax.Array,
  right: jax.Array,
  sizes: jax.Array,
  axis: int,
  implementation: Grouped,
  block: int,
) -> jax.Array:
  ways = {
    "blocked": functools.partial(_blocked_outer, axis=axis, block=block),
    "ragged": functools.partial(_ragged_outer, axis=axis),
  }
  return _run(ways, implementation, left, right, sizes)


def _outer_forward(left: Any, right: Any, sizes: Any, *static: Any) -> Any:
  return _outer(left, right, sizes, *static), (left, right, sizes)


def _outer_backward(
  axis: int, implementation: Any, block: int, kept: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  left, right, sizes = kept
  return (
    _product(right, gradient, sizes, axis, True, implementation, block),
    _product(left, gradient, sizes, axis, False, implementation, block),
    None,
  )


_outer.defvjp(_outer_forward, _outer_backward)


def _run(ways: dict[str, Callable[..., jax.Array]], name: str, *args: Any) -> jax.Array:
  """Runs the named way, or that of the platform which the program is compiled for."""
  if name != "auto":
    errors.check_choice("implementation", name, ("auto", *ways))
    return ways[name](*args)
  return lax.platform_dependent(*args, tpu=ways["ragged"], default=ways["blocked"])


def _blocked_product(
  rows: jax.Array, kernels: jax.Array, sizes: jax.Array, *, axis: int, transposed: bool, block: int
) -> jax.Array:
  def group(number: jax.Array, result: jax.Array) -> jax.Array:
    kernel = lax.dynamic_index_in_dim(kernels, number, axis, keepdims=False)

    def one(place: jax.Array, mine: jax.Array, result: jax.Array) -> jax.Array:
      part = lax.dynamic_slice_in_dim(rows, place, mine.shape[0])
      made = part @ (kernel.T if transposed else kernel)
      old = lax.dynamic_slice_in_dim(result, place, mine.shape[0])
      return lax.dynamic_update_slice_in_dim(result, jnp.where(mine, made, old), place, 0)

    return _over_blocks(one, result, number, sizes, rows.shape[0], block)

  matrix = kernels.shape[:axis] + kernels.shape[axis + 1 :]
  width = matrix[0] if transposed else matrix[1]
  return lax.fori_loop(0, sizes.shape[0], group, jnp.zeros((rows.shape[0], width), rows.dtype))


def _blocked_outer(
  left: jax.Array, right: jax.Array, sizes: jax.Array, *, axis: int, block: int
) -> jax.Array:
  shape = (left.shape[1], right.shape[1])

  def group(number: jax.Array, result: jax.Array) -> jax.Array:
    def one(place: jax.Array, mine: jax.Array, total: jax.Array) -> jax.Array:
      one = lax.dynamic_slice_in_dim(left, place, mine.shape[0])
      two = lax.dynamic_slice_in_dim(right, place, mine.shape[0])
      product = jnp.matmul(jnp.where(mine, one, 0).T, two, preferred_element_type=jnp.float32)
      return total + product

    zeros = jnp.zeros(shape, jnp.float32)
    total = _over_blocks(one, zeros, number, sizes, left.shape[0], block)
    return lax.dynamic_update_index_in_dim(result, total.astype(left.dtype), number, axis)

  groups = sizes.shape[0]
  whole = (*shape[:axis], groups, *shape[axis:])
  return lax.fori_loop(0, groups, group, jnp.zeros(whole, left.dtype))


def _over_blocks(
  body: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
  start: jax.Array,
  group: jax.Array,
  sizes: jax.Array,
  rows: int,
  block: int,
) -> jax.Array:
  """Folds `body(first row, which rows are the group's [block, 1], result)` over a group's blocks.

  The last block of all is moved back so that it ends with the rows.
  """
  block = min(block, rows)
  first = jnp.sum(jnp.where(jnp.arange(sizes.shape[0]) < group, sizes, 0))
  end = first + sizes[group]

  def step(number: jax.Array, result: jax.Array) -> jax.Array:
    begin = first + number * block
    place = jnp.minimum(begin, rows - block)
    row = place + jnp.arange(block)[:, None]
    return body(place, (row >= begin) & (row < end), result)

  return lax.fori_loop(0, (sizes[group] + block - 1) // block, step, start)


def _ragged_product(
  rows: jax.Array, kernels: jax.Array, sizes: jax.Array, *, axis: int, transposed: bool
) -> jax.Array:
  kernels = jnp.moveaxis(kernels, axis, 0)
  kernels = jnp.swapaxes(kernels, 1, 2) if transposed else kernels
  made = lax.ragged_dot(rows, kernels, sizes)
  return jnp.where(jnp.arange(rows.shape[0])[:, None] < jnp.sum(sizes), made, 0)


def _ragged_outer(left: jax.Array, right: jax.Array, sizes: jax.Array, *, axis: int) -> jax.Array:
  numbers = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  return jnp.moveaxis(lax.ragged_dot_general(left, right, sizes, numbers), 0, axis)
