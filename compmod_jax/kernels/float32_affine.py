r"""Products with a float32 matrix as float32 has them, of rows in bfloat16.

The matrix units of NVIDIA GPUs take no float32 operands. There rows meet the matrix's three
bfloat16 parts, whose sum it is:

.. math:: x W = x W_1 + x W_2 + x W_3, \qquad W_i = \mathrm{bf16}(W - \textstyle\sum_{j < i} W_j)

A kernel adds up all of them, and a bias, in the same registers. As one product of XLA with three
times as many columns they are written, read and added, which moves three times as many bytes where
the matrix is narrow.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from compmod_jax.core import sharding
from compmod_jax.core.linear import narrow_product, over_rows
from compmod_jax.core.sharding import platform_of
from compmod_jax.kernels.routing import triton
from compmod_jax.kernels.routing.blocks import dot

_PARTS = 3
_ROWS, _STEP, _COLUMNS = 64, 64, 128  # of a program's rows, of a turn of its loop, of its result


def float32_affine(
  inputs: Float[Array, "batch time inner"],
  kernel: Float[Array, "inner outer"],
  bias: Float[Array, " outer"],
) -> Float[Array, "batch time outer"]:
  """inputs @ kernel + bias as float32 has it, for a kernel with many more rows than columns.

  Products of its gradient are bfloat16 where it is made of parts, as those of other layers of such
  a model are. Elsewhere than on GPUs parts do not pay: TPUs would write more than they save, and
  CPUs take half as long again.
  """
  if inputs.dtype != jnp.bfloat16 or platform_of(inputs) not in ("cuda", "gpu"):
    return over_rows(
      lambda rows: narrow_product(rows.astype(jnp.float32), kernel) + bias[None], inputs
    )
  # A device has its own examples and times.
  return sharding.on_parts(
    lambda kernel, bias, inputs: over_rows(lambda rows: split_affine(rows, kernel, bias), inputs),
    [kernel, bias, inputs],
    [(None, None), (None,), ("batch", "time", None)],
  )


@jax.custom_vjp
def split_affine(
  rows: Float[Array, "rows inner"],
  kernel: Float[Array, "inner outer"],
  bias: Float[Array, " outer"],
) -> Float[Array, "rows outer"]:
  """rows @ kernel + bias by the kernel's parts. Reverse mode, any order."""
  of_parts = functools.partial(lax.platform_dependent, default=affine_of_parts, cuda=on_gpu)
  return of_parts(rows, parts_of(kernel), bias)


def parts_of(kernel: Float[Array, "inner outer"]) -> Float[Array, "inner three_outers"]:
  """Three matrices in bfloat16, side by side, whose sum is the kernel, the largest first."""
  parts, left = list[jax.Array](), kernel
  for _ in range(_PARTS):
    # XLA may leave out a cast there and back, but not this.
    parts.append(lax.reduce_precision(left, exponent_bits=8, mantissa_bits=7))
    left = left - parts[-1]
  return jnp.concatenate(parts, axis=1).astype(jnp.bfloat16)


def affine_of_parts(
  rows: Float[Array, "rows inner"],
  parts: Float[Array, "inner three_outers"],
  bias: Float[Array, " outer"],
) -> Float[Array, "rows outer"]:
  """The sum of the products with all parts, and a bias, by XLA."""
  made = jnp.matmul(rows, parts, preferred_element_type=jnp.float32)
  first, second, third = jnp.split(made, _PARTS, axis=1)
  return third + second + first + bias[None]


def on_gpu(
  rows: Float[Array, "rows inner"],
  parts: Float[Array, "inner three_outers"],
  bias: Float[Array, " outer"],
  *,
  interpret: bool = False,
) -> Float[Array, "rows outer"]:
  """The same in one kernel."""
  (count, inner), outer = rows.shape, parts.shape[1] // _PARTS
  side = min(_COLUMNS, triton.padded(outer))
  step = min(_STEP, triton.padded(inner))
  whole = not (count % _ROWS or inner % step or outer % side)
  (made,) = triton.call(
    functools.partial(_multiply, outer=outer, side=side, step=step, whole=whole),
    (pl.cdiv(count, _ROWS), pl.cdiv(outer, side)),
    [rows, parts, bias[None]],
    [jax.ShapeDtypeStruct((count, outer), jnp.float32)],
    interpret,
    flops=2 * count * inner * parts.shape[1],
  )
  return made


def _multiply(
  rows: jax.Ref,
  parts: jax.Ref,
  bias: jax.Ref,
  made: jax.Ref,
  *,
  outer: int,
  side: int,
  step: int,
  whole: bool,
) -> None:
  """Of a block of rows and one of columns."""
  first, column = pl.program_id(0) * _ROWS, pl.program_id(1) * side

  def turn(i: jax.Array, total: jax.Array) -> jax.Array:
    own = triton.load(rows, (first, i * step), (_ROWS, step), whole=whole)
    for part in range(_PARTS):
      place, left = (i * step, part * outer + column), outer - column
      other = triton.load(parts, place, (step, side), columns=left, whole=whole)
      total += dot(own, other)
    return total

  zeros = jnp.zeros((_ROWS, side), jnp.float32)
  total = lax.fori_loop(0, pl.cdiv(rows.shape[1], step), turn, zeros)
  triton.store(made, (first, column), total + triton.load(bias, (0, column), (1, side)))


def _forward(
  rows: jax.Array, kernel: jax.Array, bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return split_affine(rows, kernel, bias), (rows, kernel)


def _backward(
  kept: tuple[jax.Array, jax.Array], errors: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  rows, kernel = kept
  d_bias, errors = jnp.sum(errors, axis=0), errors.astype(rows.dtype)
  d_kernel = jnp.matmul(rows.T, errors, preferred_element_type=jnp.float32)
  return errors @ kernel.T.astype(rows.dtype), d_kernel.astype(kernel.dtype), d_bias


split_affine.defvjp(_forward, _backward)
