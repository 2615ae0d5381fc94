"""The sum of three products in bfloat16 and a bias, for NVIDIA GPUs."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from compmod_jax.kernels.float32_affine import PARTS
from compmod_jax.kernels.routing import triton
from compmod_jax.kernels.routing.blocks import dot

_ROWS, _STEP, _COLUMNS = 64, 64, 128  # of a program's rows, of a turn of its loop, of its result


def affine_of_parts(
  rows: Float[Array, "rows inner"],
  parts: Float[Array, "inner three_outers"],
  bias: Float[Array, " outer"],
  *,
  interpret: bool = False,
) -> Float[Array, "rows outer"]:
  """See `float32_affine.affine_of_parts`."""
  (count, inner), outer = rows.shape, parts.shape[1] // PARTS
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
    for part in range(PARTS):
      place, left = (i * step, part * outer + column), outer - column
      other = triton.load(parts, place, (step, side), columns=left, whole=whole)
      total += dot(own, other)
    return total

  zeros = jnp.zeros((_ROWS, side), jnp.float32)
  total = lax.fori_loop(0, pl.cdiv(rows.shape[1], step), turn, zeros)
  triton.store(made, (first, column), total + triton.load(bias, (0, column), (1, side)))
