"""Pallas for TPUs: blocks of rows, sums over them, and the call."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from compmod_jax.kernels.routing.shapes import ROOM


def inside(values: jax.Array, axis: int, *, tokens: int) -> jax.Array:
  """Zeros in place of what lies past the last token."""
  if tokens % values.shape[axis] == 0:
    return values
  first = pl.program_id(0) * values.shape[axis]
  index = first + lax.broadcasted_iota(jnp.int32, values.shape, axis)
  return jnp.where(index < tokens, values, jnp.zeros_like(values))


def clear(sums: Sequence[jax.Ref]) -> None:
  """Sets sums over all blocks to zero before the first one."""

  @pl.when(pl.program_id(0) == 0)
  def _() -> None:
    for ref in sums:
      ref[...] = jnp.zeros(ref.shape, ref.dtype)


def clip(block: int, tokens: int) -> int:
  """Tokens of a block, which may be the whole array whatever its length."""
  return min(block, tokens)


def tokens_last(shape: tuple[int, ...], tile: int) -> pl.BlockSpec:
  """The block of an array [units, tokens]."""
  return pl.BlockSpec((shape[0], tile), lambda i: (0, i))


def tokens_first(shape: tuple[int, ...], tile: int) -> pl.BlockSpec:
  """The block of an array [tokens, width]."""
  return pl.BlockSpec((tile, shape[1]), lambda i: (i, 0))


def whole(array: jax.Array) -> tuple[jax.Array, pl.BlockSpec]:
  """An array that every program sees in full."""
  return array, pl.BlockSpec(array.shape, lambda i: (0, 0))


def total(shape: tuple[int, ...]) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
  """A result that all programs add to, in float32."""
  return pl.BlockSpec(shape, lambda i: (0, 0)), jax.ShapeDtypeStruct(shape, jnp.float32)


def call(
  kernel: Callable[..., None],
  tokens: int,
  tile: int,
  inputs: Sequence[tuple[jax.Array, pl.BlockSpec]],
  outputs: Sequence[tuple[pl.BlockSpec, jax.ShapeDtypeStruct]],
  interpret: bool | pltpu.InterpretParams,
  *,
  sums: bool = False,
  aliases: Mapping[int, int] | None = None,
) -> Sequence[jax.Array]:
  """Runs a kernel for every block of tokens, in order where it makes sums over them.

  Results take the place of inputs that `aliases` gives them, by number.
  """
  arrays, in_specs = zip(*inputs, strict=True)
  out_specs, out_shape = zip(*outputs, strict=True)
  return pl.pallas_call(
    kernel,
    grid=(pl.cdiv(tokens, tile),),
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary" if sums else "parallel",), vmem_limit_bytes=ROOM * 3 // 2
    ),
    interpret=interpret,
    input_output_aliases=dict(aliases or {}),
  )(*arrays)
