"""The kernels for TPUs.

Tokens lie on lanes: scores and weights are [units, tokens] here, since [tokens, 8] would fill a
sixteenth of every register and of every tile in memory. The last block may hold rows past the end,
of any value: what is summed over tokens leaves them out.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from compmod_jax.kernels.routing.blocks import Blocks, choose, exact_dot
from compmod_jax.kernels.routing.mosaic import (
  call,
  clear,
  clip,
  inside,
  tokens_first,
  tokens_last,
  total,
  whole,
)
from compmod_jax.kernels.routing.reference import Choice, slopes

_LANES = 128


def softmax(
  scores: jax.Array, *, choice: Choice, blocks: Blocks, interpret: bool | pltpu.InterpretParams
) -> jax.Array:
  """See `reference.softmax`."""
  kernel = functools.partial(_softmax, choice=choice)
  return _over_scores(kernel, [scores], blocks, interpret)


def softmax_backward(
  weights: jax.Array,
  gradient: jax.Array,
  *,
  choice: Choice,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
  """See `reference.softmax_backward`."""
  kernel = functools.partial(_softmax_backward, temperature=choice.temperature)
  return _over_scores(kernel, [weights, gradient], blocks, interpret)


def _over_scores(
  kernel: Callable[..., None],
  arrays: list[jax.Array],
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
  tokens, units = arrays[0].shape
  tile = clip(blocks.tpu_softmax, tokens)
  lanes = tokens_last((units, tokens), tile)
  out = (lanes, jax.ShapeDtypeStruct((units, tokens), jnp.float32))
  inputs = [(array.T, lanes) for array in arrays]
  return call(kernel, tokens, tile, inputs, [out], interpret)[0].T


def _softmax(scores: jax.Ref, weights: jax.Ref, *, choice: Choice) -> None:
  weights[...] = choose(scores[...].astype(jnp.float32), 0, choice)


def _softmax_backward(
  weights: jax.Ref, gradient: jax.Ref, errors: jax.Ref, *, temperature: float
) -> None:
  errors[...] = slopes(weights[...], gradient[...], temperature, 0)


def route(
  rows: jax.Array,
  readout: jax.Array,
  bias: jax.Array,
  *,
  choice: Choice,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
  """See `reference.route`."""
  tokens, units = rows.shape[0], readout.shape[1]
  tile, shape = clip(blocks.tpu_tokens, tokens), (units, tokens)
  inputs = [(rows, tokens_first(rows.shape, tile)), whole(readout.T), whole(bias[:, None])]
  out = (tokens_last(shape, tile), jax.ShapeDtypeStruct(shape, jnp.float32))
  kernel = functools.partial(_route, choice=choice)
  return call(kernel, tokens, tile, inputs, [out], interpret)[0].T


def _route(
  rows: jax.Ref, readout: jax.Ref, bias: jax.Ref, weights: jax.Ref, *, choice: Choice
) -> None:
  hidden = jnp.maximum(rows[...], 0).astype(readout.dtype)
  weights[...] = choose(exact_dot(readout[...], hidden, (1, 1)) + bias[...], 0, choice)


def route_backward(
  rows: jax.Array,
  readout: jax.Array,
  weights: jax.Array,
  gradient: jax.Array,
  *,
  choice: Choice,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `reference.route_backward`; one pass over the rows forms all gradients."""
  tokens, tile = rows.shape[0], clip(blocks.tpu_tokens, rows.shape[0])
  row = tokens_first(rows.shape, tile)
  inputs = [(rows, row), whole(readout.T)]
  inputs += [(array.T, tokens_last(array.T.shape, tile)) for array in (weights, gradient)]
  outputs = [(row, jax.ShapeDtypeStruct(rows.shape, rows.dtype))]
  outputs += [total((readout.shape[1], readout.shape[0])), total((readout.shape[1], 1))]
  kernel = functools.partial(_route_backward, temperature=choice.temperature, tokens=tokens)
  d_rows, d_readout, d_bias = call(kernel, tokens, tile, inputs, outputs, interpret, sums=True)
  return d_rows, d_readout.T.astype(readout.dtype), d_bias[:, 0]


def _route_backward(*refs: jax.Ref, temperature: float, tokens: int) -> None:
  rows, *shared, d_rows, d_readout, d_bias = refs
  clear([d_readout, d_bias])
  active = inside(jnp.maximum(rows[...], 0), 0, tokens=tokens)
  errors, below = _errors(active, shared, tokens, temperature)
  d_rows[...] = below
  d_readout[...] += exact_dot(errors.astype(active.dtype), active)
  d_bias[...] += jnp.sum(errors, axis=1, keepdims=True)


def _errors(
  active: jax.Array, shared: Sequence[jax.Ref], tokens: int, temperature: float
) -> tuple[jax.Array, jax.Array]:
  """Errors of scores [units, tokens], and errors before the relu of hidden units."""
  readout, weights, gradient = shared
  errors = inside(slopes(weights[...], gradient[...], temperature, 0), 1, tokens=tokens)
  below = exact_dot(errors.astype(active.dtype), readout[...], (0, 0))
  return errors, jnp.where(active > 0, below, 0).astype(active.dtype)


def route_columns(
  rows: jax.Array,
  shift: jax.Array,
  readout: jax.Array,
  bias: jax.Array,
  *,
  column: int,
  choice: Choice,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
  """See `gpu.route_columns`."""
  (tokens, _), (width, units) = rows.shape, readout.shape
  tile = clip(blocks.tpu_tokens, tokens)
  inputs = [*_columns(rows, shift, column, width, tile), whole(readout.T), whole(bias[:, None])]
  shape = (units, tokens)
  out = (tokens_last(shape, tile), jax.ShapeDtypeStruct(shape, jnp.float32))
  kernel = functools.partial(_route_columns, choice=choice)
  return call(kernel, tokens, tile, inputs, [out], interpret)[0].T


def _columns(
  rows: jax.Array, shift: jax.Array, column: int, width: int, tile: int
) -> list[tuple[jax.Array, pl.BlockSpec]]:
  """The columns of a matrix and of its bias from `column` on, where they are a block of it.

  Else they are copied.
  """
  if not _is_block(column, width):
    rows, shift = (lax.slice_in_dim(one, column, column + width, axis=1) for one in (rows, shift))
    column = 0
  at = column // width
  return [
    (rows, pl.BlockSpec((tile, width), lambda i: (i, at))),
    (shift, pl.BlockSpec((1, width), lambda i: (0, at))),
  ]


def _is_block(column: int, width: int) -> bool:
  return width % _LANES == 0 and column % width == 0


def _route_columns(*refs: jax.Ref, choice: Choice) -> None:
  rows, shift, readout, bias, weights = refs
  active = _active(rows, shift)
  weights[...] = choose(exact_dot(readout[...], active, (1, 1)) + bias[...], 0, choice)


def _active(rows: jax.Ref, shift: jax.Ref) -> jax.Array:
  """The first layer, rounded to the type of the rows, behind its relu."""
  hidden = (rows[...].astype(jnp.float32) + shift[...]).astype(rows.dtype)
  return jnp.maximum(hidden, 0)


def route_columns_backward(
  rows: jax.Array,
  shift: jax.Array,
  readout: jax.Array,
  weights: jax.Array,
  gradient: jax.Array,
  into: jax.Array,
  *,
  column: int,
  choice: Choice,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """See `gpu.route_columns_backward`."""
  (tokens, columns), (width, units) = rows.shape, readout.shape
  tile, inside_it = clip(blocks.tpu_tokens, tokens), _is_block(column, width)
  inputs = [*_columns(rows, shift, column, width, tile), whole(readout.T)]
  inputs += [(array.T, tokens_last(array.T.shape, tile)) for array in (weights, gradient)]
  at, below = (column // width, columns) if inside_it else (0, width)
  row = pl.BlockSpec((tile, width), lambda i: (i, at))
  outputs = [(row, jax.ShapeDtypeStruct((tokens, below), rows.dtype))]
  outputs += [total((1, width)), total((units, width)), total((units, 1))]
  if inside_it:
    inputs.append((into, pl.BlockSpec(memory_space=pl.ANY)))
  kernel = functools.partial(
    _route_columns_backward, temperature=choice.temperature, tokens=tokens, extra=inside_it
  )
  aliases = {len(inputs) - 1: 0} if inside_it else None
  d_rows, d_shift, d_readout, d_bias = call(
    kernel, tokens, tile, inputs, outputs, interpret, sums=True, aliases=aliases
  )
  if not inside_it:
    d_rows = lax.dynamic_update_slice_in_dim(into, d_rows, column, axis=1)
  return d_rows, d_shift[0], d_readout.T.astype(readout.dtype), d_bias[:, 0]


def _route_columns_backward(*refs: jax.Ref, temperature: float, tokens: int, extra: bool) -> None:
  rows, shift, *shared = refs[:5]
  d_rows, d_shift, d_readout, d_bias = refs[5 + extra :]
  clear([d_shift, d_readout, d_bias])
  active = inside(_active(rows, shift), 0, tokens=tokens)
  errors, below = _errors(active, shared, tokens, temperature)
  d_rows[...] = below
  d_shift[...] += jnp.sum(below.astype(jnp.float32), axis=0, keepdims=True)
  d_readout[...] += exact_dot(errors.astype(active.dtype), active)
  d_bias[...] += jnp.sum(errors, axis=1, keepdims=True)
