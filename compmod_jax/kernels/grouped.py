r"""Products of rows with the matrix of their group, for groups of any sizes.

Rows are sorted by group: the first `sizes[0]` belong to group 0, the next `sizes[1]` to group 1,
and so on. With :math:`g(n)` the group of row n,

.. math::
   \mathrm{product:} \quad y_n = x_n W_{g(n)} \;\mathrm{or}\; x_n W_{g(n)}^\top, \qquad
   \mathrm{outer:} \quad W_g = \sum_{n : g(n) = g} x_n^\top y_n

Rows after the last group give zeros and add nothing. The derivatives of each are made of the two
again, so both can be differentiated (in reverse mode) as often as one likes.

Implementations:

- `blocked` walks over blocks of rows of one group, only as many as the groups fill: for CPU.
- `batched` lays all groups out in blocks, each beside a copy of its matrix, for one batched product
  without a loop, whose every turn would wait for the host: for CUDA.
- `ragged` is `jax.lax.ragged_dot` for the product: one kernel on TPU, but a masked product with
  all matrices on CPU and CUDA.
- `mosaic` and `triton` are these two with the outer product in a kernel (`grouped_outer`), which
  is interpreted elsewhere. `ragged` on TPU and `batched` on CUDA take the same kernels, since what
  XLA makes of an outer product in batches moves a float32 result for every block of rows.
- `auto`: the platform that a program is compiled for decides.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors, scopes

Grouped = Literal["auto", "blocked", "batched", "ragged", "mosaic", "triton"]

BLOCK = 128
# Of `batched`: large enough that copies of matrices cost less than their products, small enough
# that at most an eighth of the rows is filling.
_MOST, _LEAST, _SHARE = 512, 16, 8
_IN_KERNELS = (jnp.float32, jnp.bfloat16)


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
  """See `product`. Reverse mode, any order."""
  how = {"axis": axis, "transposed": transposed}
  blocked = functools.partial(_blocked_product, **how, block=block)
  batched, ragged = (functools.partial(f, **how) for f in (_batched_product, _ragged_product))
  implementations = {"blocked": blocked, "batched": batched, "ragged": ragged}
  implementations |= {"mosaic": ragged, "triton": batched}
  return _run(implementations, implementation, rows, kernels, sizes)


_Kept = tuple[jax.Array, jax.Array, jax.Array]  # for the backward pass: the three arguments


def _product_forward(
  rows: jax.Array,
  kernels: jax.Array,
  sizes: jax.Array,
  axis: int,
  transposed: bool,
  implementation: Grouped,
  block: int,
) -> tuple[jax.Array, _Kept]:
  kept = rows, kernels, sizes
  return _product(rows, kernels, sizes, axis, transposed, implementation, block), kept


def _product_backward(
  axis: int,
  transposed: bool,
  implementation: Grouped,
  block: int,
  kept: _Kept,
  gradient: jax.Array,
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
  """See `outer`. Reverse mode, any order."""
  from compmod_jax.kernels import grouped_outer  # Pallas takes long to import, and few need it

  blocked = functools.partial(_blocked_outer, axis=axis, block=block)
  batched = functools.partial(_batched_outer, axis=axis)
  on_tpu, on_gpu = (
    functools.partial(_outer_in_kernel, axis=axis, kernel=kernel, platform=platform)
    for kernel, platform in ((grouped_outer.on_tpu, "tpu"), (grouped_outer.on_gpu, "cuda"))
  )
  implementations = {
    "blocked": blocked,
    "batched": functools.partial(on_gpu, elsewhere=batched),
    "ragged": functools.partial(on_tpu, elsewhere=batched),
    "mosaic": on_tpu,
    "triton": on_gpu,
  }
  return _run(implementations, implementation, left, right, sizes)


def _outer_forward(
  left: jax.Array,
  right: jax.Array,
  sizes: jax.Array,
  axis: int,
  implementation: Grouped,
  block: int,
) -> tuple[jax.Array, _Kept]:
  return _outer(left, right, sizes, axis, implementation, block), (left, right, sizes)


def _outer_backward(
  axis: int, implementation: Grouped, block: int, kept: _Kept, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  left, right, sizes = kept
  return (
    _product(right, gradient, sizes, axis, True, implementation, block),
    _product(left, gradient, sizes, axis, False, implementation, block),
    None,
  )


_outer.defvjp(_outer_forward, _outer_backward)


def _run(
  implementations: dict[str, Callable[..., jax.Array]], name: str, *args: jax.Array
) -> jax.Array:
  """Runs the named way, or that of the platform which the program is compiled for."""
  if name != "auto":
    errors.check_choice("implementation", name, ("auto", *implementations))
    return implementations[name](*args)
  return lax.platform_dependent(
    *args,
    tpu=implementations["ragged"],
    cuda=implementations["batched"],
    rocm=implementations["batched"],
    default=implementations["blocked"],
  )


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

    return _scan_blocks(one, result, number, sizes, rows.shape[0], block)

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
    total = _scan_blocks(one, zeros, number, sizes, left.shape[0], block)
    return lax.dynamic_update_index_in_dim(result, total.astype(left.dtype), number, axis)

  groups = sizes.shape[0]
  whole = (*shape[:axis], groups, *shape[axis:])
  return lax.fori_loop(0, groups, group, jnp.zeros(whole, left.dtype))


def _scan_blocks(
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


class _Layout(NamedTuple):
  """Rows in blocks of one group each.

  Attributes:
    group: of each block.
    row: in each place of each block, [blocks, block].
    filled: which places hold a row; the others hold any.
    place: of each row.
    grouped: which rows belong to a group.
  """

  group: jax.Array
  row: jax.Array
  filled: jax.Array
  place: jax.Array
  grouped: jax.Array


def _lay_out(sizes: jax.Array, rows: int) -> _Layout:
  groups = sizes.shape[0]
  fitting = max(1, rows // (_SHARE * groups))
  block = max(_LEAST, min(_MOST, 2 ** int(math.log2(fitting))))
  ends, used = jnp.cumsum(sizes), (sizes + block - 1) // block
  last = jnp.cumsum(used)
  number = jnp.arange(rows // block + groups)  # as many as any sizes need
  group = jnp.minimum(jnp.sum(number[:, None] >= last[None], axis=1), groups - 1)
  first = (ends - sizes)[group] + (number - (last - used)[group]) * block
  row = first[:, None] + jnp.arange(block)[None]
  filled = row < ends[group][:, None]
  one = jnp.arange(rows)
  mine = jnp.minimum(jnp.sum(one[:, None] >= ends[None], axis=1), groups - 1)
  place = (last - used)[mine] * block + one - (ends - sizes)[mine]
  grouped = one < ends[-1]
  return _Layout(group, jnp.where(filled, row, 0), filled, jnp.where(grouped, place, 0), grouped)


def _batched_product(
  rows: jax.Array, kernels: jax.Array, sizes: jax.Array, *, axis: int, transposed: bool
) -> jax.Array:
  layout = _lay_out(sizes, rows.shape[0])
  copies = jnp.moveaxis(kernels, axis, 0)[layout.group]
  made = jnp.einsum("bnd,bfd->bnf" if transposed else "bnd,bdf->bnf", rows[layout.row], copies)
  made = made.reshape(-1, made.shape[-1])[layout.place]
  return jnp.where(layout.grouped[:, None], made, 0)


def _batched_outer(left: jax.Array, right: jax.Array, sizes: jax.Array, *, axis: int) -> jax.Array:
  layout = _lay_out(sizes, left.shape[0])
  left_blocks = jnp.where(layout.filled[..., None], left[layout.row], 0)
  right_blocks = right[layout.row]
  made = jnp.einsum("bnd,bnf->bdf", left_blocks, right_blocks, preferred_element_type=jnp.float32)
  member = (layout.group[:, None] == jnp.arange(sizes.shape[0])[None]).astype(jnp.float32)
  with jax.named_scope(scopes.SELECTION):
    summed = jnp.einsum("bg,bdf->gdf", member, made, precision=lax.Precision.HIGHEST)
  return jnp.moveaxis(summed.astype(left.dtype), 0, axis)


def _outer_in_kernel(
  left: jax.Array,
  right: jax.Array,
  sizes: jax.Array,
  *,
  axis: int,
  kernel: Callable[..., jax.Array],
  platform: str,
  elsewhere: Callable[..., jax.Array] | None = None,
) -> jax.Array:
  """By a kernel on its platform; on others another way, or the kernel interpreted."""

  def run(left: jax.Array, right: jax.Array, sizes: jax.Array, **options: bool) -> jax.Array:
    return jnp.moveaxis(kernel(left, right, sizes, **options), 0, axis)

  if left.dtype != right.dtype or left.dtype not in _IN_KERNELS:
    return _batched_outer(left, right, sizes, axis=axis)
  return lax.platform_dependent(
    *(left, right, sizes),
    **{platform: run},
    default=elsewhere or functools.partial(run, interpret=True),
  )


def _ragged_product(
  rows: jax.Array, kernels: jax.Array, sizes: jax.Array, *, axis: int, transposed: bool
) -> jax.Array:
  kernels = jnp.moveaxis(kernels, axis, 0)
  kernels = jnp.swapaxes(kernels, 1, 2) if transposed else kernels
  made = lax.ragged_dot(rows, kernels, sizes)
  return jnp.where(jnp.arange(rows.shape[0])[:, None] < jnp.sum(sizes), made, 0)
