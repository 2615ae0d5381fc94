"""Pallas Triton: loads and stores with masks, and the call; no other file knows it."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import PyTree

with warnings.catch_warnings():
  warnings.simplefilter("ignore", DeprecationWarning)  # of Triton, from jax 0.11 on
  from jax.experimental.pallas import triton as plt

_LEAST = 16  # of the sides of a matrix product


def padded(side: int) -> int:
  """Side of a block that holds `side` elements and can be multiplied."""
  return max(_LEAST, pl.next_power_of_2(side))


def _mask(
  ref: jax.Ref,
  start: Sequence[jax.Array | int],
  shape: Sequence[int],
  rows: jax.Array | int | None,
  columns: jax.Array | int | None,
) -> jax.Array:
  """What of a block lies in the array, and in its own first `rows` and `columns`."""
  inside = []
  for axis, own in enumerate((rows, columns)):
    index = jnp.arange(shape[axis])
    mine = start[axis] + index < ref.shape[axis]
    inside.append(mine if own is None else mine & (index < own))
  return inside[0][:, None] & inside[1][None]


def _at(ref: jax.Ref, start: Sequence[jax.Array | int], shape: Sequence[int]) -> Any:
  # A block may reach beyond the array, which Pallas refuses of a start that it knows.
  row, column = (jnp.int32(one) if isinstance(one, int) else one for one in start)
  return ref.at[pl.ds(row, shape[0]), pl.ds(column, shape[1])]


def load(
  ref: jax.Ref,
  start: Sequence[jax.Array | int],
  shape: tuple[int, int],
  *,
  rows: jax.Array | int | None = None,
  columns: jax.Array | int | None = None,
  other: float = 0.0,
  whole: bool = False,
) -> jax.Array:
  """A block of a matrix, `other` beyond the matrix or beyond the block's own rows and columns.

  Nothing is beyond them where the block is `whole`.
  """
  if whole:
    return plt.load(_at(ref, start, shape))
  mask = _mask(ref, start, shape, rows, columns)
  return plt.load(_at(ref, start, shape), mask=mask, other=other)


def store(
  ref: jax.Ref,
  start: Sequence[jax.Array | int],
  block: jax.Array,
  *,
  rows: jax.Array | int | None = None,
  columns: int | None = None,
) -> None:
  """Writes a block into a matrix, as far as it lies inside and in its own rows and columns."""
  mask = _mask(ref, start, block.shape, rows, columns)
  plt.store(_at(ref, start, block.shape), block.astype(ref.dtype), mask=mask)


def load_line(
  ref: jax.Ref, row: jax.Array | int, start: jax.Array | int, size: int, *, other: float | int = 0
) -> jax.Array:
  """A part of a row of a matrix [size], `other` beyond its end."""
  mask = start + jnp.arange(size) < ref.shape[1]
  return plt.load(ref.at[row, pl.ds(start, size)], mask=mask, other=other)


def load_each(ref: jax.Ref, places: jax.Array) -> jax.Array:
  """What stands at each of these places of a line."""
  return plt.load(ref.at[places])


def store_line(ref: jax.Ref, row: jax.Array | int, start: jax.Array | int, line: jax.Array) -> None:
  """Writes a part of a row of a matrix, as far as it lies inside."""
  (size,) = line.shape
  mask = start + jnp.arange(size) < ref.shape[1]
  plt.store(ref.at[row, pl.ds(start, size)], line.astype(ref.dtype), mask=mask)


def join(parts: jax.Array, splits: int, dtype: DTypeLike) -> jax.Array:
  """The sum of matrices that lie one below another."""
  return jnp.sum(parts.reshape(splits, -1, parts.shape[1]), axis=0).astype(dtype)


def call(
  kernel: Callable[..., None],
  grid: tuple[int, ...],
  arrays: Sequence[PyTree],
  outputs: Sequence[jax.ShapeDtypeStruct],
  interpret: bool,
  *,
  warps: int = 4,
  stages: int = 3,
  aliases: Mapping[int, int] | None = None,
  flops: int | None = None,
) -> Sequence[jax.Array]:
  """Runs a kernel, which sees whole arrays, for every point of a grid.

  Args:
    kernel: from references to arrays and outputs to nothing.
    grid: how many programs there are along each axis.
    arrays: what it reads; trees of arrays, too.
    outputs: what it writes.
    interpret: run without the hardware.
    warps: of a program.
    stages: loads that are under way at once.
    aliases: number of an array -> number of the output that takes its place in memory.
    flops: operations of its products, where loops hide how many there are.
  """
  return pl.pallas_call(
    kernel,
    grid=grid,
    out_shape=outputs,
    # Without these, Pallas takes its other GPU compiler.
    compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
    interpret=interpret,
    input_output_aliases=dict(aliases or {}),
    cost_estimate=None
    if flops is None
    else pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0),
  )(*arrays)
