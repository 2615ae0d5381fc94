"""The kernels for TPUs.

Tokens lie on lanes: scores and weights are [units, tokens] here, since [tokens, 8] would fill a
sixteenth of every register and of every tile in memory. The last block may hold rows past the end,
of any value: what is summed over tokens leaves them out.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from compmod_jax.kernels.routing.blocks import Blocks, choose, dot, exact_dot
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
from compmod_jax.kernels.routing.reference import Choice, First, slopes

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
  first: First | None,
  readout: jax.Array,
  bias: jax.Array,
  *,
  choice: Choice,
  keep_hidden: bool,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array | None]:
  """See `reference.route`."""
  tokens, (inner, units) = rows.shape[0], readout.shape
  tile = clip(blocks.tpu_tokens, tokens)
  inputs = [(rows, tokens_first(rows.shape, tile))]
  if first is not None:
    inputs += [whole(first[0]), whole(first[1][None])]
  inputs += [whole(readout.T), whole(bias[:, None])]
  shapes = [((units, tokens), jnp.float32, tokens_last)]
  keep_hidden = keep_hidden and first is not None
  if keep_hidden:
    shapes.append(((tokens, inner), rows.dtype, tokens_first))
  outputs = [(spec(s, tile), jax.ShapeDtypeStruct(s, dtype)) for s, dtype, spec in shapes]
  kernel = functools.partial(_route, choice=choice, first=first is not None)
  made = call(kernel, tokens, tile, inputs, outputs, interpret)
  return made[0].T, made[1] if keep_hidden else None


def _route(*refs: jax.Ref, choice: Choice, first: bool) -> None:
  rows, *layer = refs[: 3 if first else 1]
  readout, bias, weights, *kept = refs[3 if first else 1 :]
  if first:
    kernel, shift = layer
    hidden = exact_dot(rows[...], kernel[...]) + shift[...].astype(jnp.float32)
  else:
    hidden = rows[...]
  hidden = jnp.maximum(hidden, 0).astype(readout.dtype)
  for ref in kept:
    ref[...] = hidden
  scores = exact_dot(readout[...], hidden, (1, 1)) + bias[...]
  weights[...] = choose(scores, 0, choice)


def route_backward(
  rows: jax.Array,
  hidden: jax.Array | None,
  first: First | None,
  readout: jax.Array,
  weights: jax.Array,
  gradient: jax.Array,
  *,
  choice: Choice,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, First | None, jax.Array, jax.Array]:
  """See `reference.route_backward`; one pass over the rows forms all gradients."""
  tokens, tile = rows.shape[0], clip(blocks.tpu_tokens, rows.shape[0])
  hidden = rows if hidden is None else hidden
  inputs = [(hidden, tokens_first(hidden.shape, tile)), whole(readout.T)]
  inputs += [(array.T, tokens_last(array.T.shape, tile)) for array in (weights, gradient)]
  if first is not None:
    inputs += [(rows, tokens_first(rows.shape, tile)), whole(first[0])]
  row = (tokens_first(rows.shape, tile), jax.ShapeDtypeStruct(rows.shape, rows.dtype))
  sums = [total((readout.shape[1], readout.shape[0])), total((readout.shape[1], 1))]
  if first is not None:
    sums += [total(first[0].shape), total((1, first[0].shape[1]))]
  kernel = functools.partial(
    _route_backward, temperature=choice.temperature, first=first is not None, tokens=tokens
  )
  d_rows, d_readout, d_bias, *d_first = call(
    kernel, tokens, tile, inputs, [row, *sums], interpret, sums=True
  )
  d_readout = d_readout.T.astype(readout.dtype)
  if first is None:
    return d_rows, None, d_readout, d_bias[:, 0]
  d_kernel, d_shift = d_first[0].astype(first[0].dtype), d_first[1][0].astype(first[1].dtype)
  return d_rows, (d_kernel, d_shift), d_readout, d_bias[:, 0]


def _route_backward(*refs: jax.Ref, temperature: float, first: bool, tokens: int) -> None:
  hidden, readout, weights, gradient, *layer = refs[: 6 if first else 4]
  d_rows, *sums = refs[6 if first else 4 :]
  clear(sums)
  within = functools.partial(inside, tokens=tokens)
  active = within(jnp.maximum(hidden[...], 0), 0)
  errors = within(slopes(weights[...], gradient[...], temperature, 0), 1)
  exact = errors.astype(active.dtype)
  below = exact_dot(exact, readout[...], (0, 0))
  below = jnp.where(active > 0, below, 0).astype(active.dtype)
  sums[0][...] += exact_dot(exact, active)
  sums[1][...] += jnp.sum(errors, axis=1, keepdims=True)
  if not first:
    d_rows[...] = below
    return
  rows, kernel = layer
  d_rows[...] = exact_dot(below, kernel[...], (1, 1)).astype(d_rows.dtype)
  sums[2][...] += exact_dot(within(rows[...], 0), below, (0, 0))
  sums[3][...] += jnp.sum(below.astype(jnp.float32), axis=0, keepdims=True)


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
  rows, shift, readout, weights, gradient = refs[:5]
  d_rows, d_shift, d_readout, d_bias = refs[5 + extra :]
  clear([d_shift, d_readout, d_bias])
  active = inside(_active(rows, shift), 0, tokens=tokens)
  errors = slopes(weights[...], gradient[...], temperature, 0)
  errors = inside(errors, 1, tokens=tokens)
  exact = errors.astype(active.dtype)
  below = exact_dot(exact, readout[...], (0, 0))
  below = jnp.where(active > 0, below, 0).astype(active.dtype)
  d_rows[...] = below
  d_shift[...] += jnp.sum(below.astype(jnp.float32), axis=0, keepdims=True)
  d_readout[...] += exact_dot(exact, active)
  d_bias[...] += jnp.sum(errors, axis=1, keepdims=True)


def project(
  weights: jax.Array,
  heads: jax.Array,
  kernel: jax.Array,
  *,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
  """See `reference.project`."""
  tokens, tile = heads.shape[0], clip(blocks.tpu_tokens, heads.shape[0])
  inputs = [
    (weights.T, tokens_last(weights.T.shape, tile)),
    (heads, tokens_first(heads.shape, tile)),
    whole(kernel),
  ]
  shape = (tokens, kernel.shape[1])
  out = (tokens_first(shape, tile), jax.ShapeDtypeStruct(shape, heads.dtype))
  return call(_project, tokens, tile, inputs, [out], interpret)[0]


def _project(weights: jax.Ref, heads: jax.Ref, kernel: jax.Ref, out: jax.Ref) -> None:
  scale, _ = _spread(weights[...], heads)
  scaled = (scale * heads[...].astype(jnp.float32)).astype(heads.dtype)
  out[...] = dot(scaled, kernel[...]).astype(out.dtype)


def project_backward(
  weights: jax.Array,
  heads: jax.Array,
  kernel: jax.Array,
  gradient: jax.Array,
  *,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `reference.project_backward`; one pass over the rows forms all gradients."""
  tokens, tile = heads.shape[0], clip(blocks.tpu_tokens, heads.shape[0])
  lanes, row = tokens_last(weights.T.shape, tile), tokens_first(heads.shape, tile)
  inputs = [
    (weights.T, lanes),
    (heads, row),
    whole(kernel),
    (gradient, tokens_first(gradient.shape, tile)),
  ]
  outputs = [
    (lanes, jax.ShapeDtypeStruct(weights.T.shape, jnp.float32)),
    (row, jax.ShapeDtypeStruct(heads.shape, heads.dtype)),
    total(kernel.shape),
  ]
  body = functools.partial(_project_backward, tokens=tokens)
  d_weights, d_heads, d_kernel = call(body, tokens, tile, inputs, outputs, interpret, sums=True)
  return d_weights.T, d_heads, d_kernel.astype(kernel.dtype)


def _project_backward(
  weights: jax.Ref,
  heads: jax.Ref,
  kernel: jax.Ref,
  gradient: jax.Ref,
  d_weights: jax.Ref,
  d_heads: jax.Ref,
  d_kernel: jax.Ref,
  *,
  tokens: int,
) -> None:
  clear([d_kernel])
  # Weights past the end would meet other rows' features in the product that spreads them.
  scale, member = _spread(inside(weights[...], 1, tokens=tokens), heads)
  errors = inside(gradient[...], 0, tokens=tokens)
  values = inside(heads[...], 0, tokens=tokens)
  scaled = dot(errors, kernel[...], (1, 1))
  d_heads[...] = (scale * scaled).astype(d_heads.dtype)
  products = (scaled * values.astype(jnp.float32)).astype(heads.dtype)
  d_weights[...] = exact_dot(member, products, (1, 1))
  d_kernel[...] += dot((scale * values.astype(jnp.float32)).astype(heads.dtype), errors, (0, 0))


def _spread(weights: jax.Array, heads: jax.Ref) -> tuple[jax.Array, jax.Array]:
  """Weights [tokens, features] of every feature's head; which features are whose, as 0 and 1."""
  units, width = weights.shape[0], heads.shape[1]
  unit = lax.broadcasted_iota(jnp.int32, (units, width), 0)
  feature = lax.broadcasted_iota(jnp.int32, (units, width), 1)
  begin = unit * (width // units)
  member = (feature >= begin) & (feature < begin + width // units)
  member = member.astype(jnp.float32).astype(heads.dtype)
  return exact_dot(weights.astype(heads.dtype), member, (0, 0)), member
