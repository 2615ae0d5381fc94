"""The kernels for NVIDIA GPUs.

Blocks have sides that are powers of two, and at least 16 where they are multiplied. What they hold
beyond an array is masked in every load and store: units that do not exist get scores of minus
infinity.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from compmod_jax.kernels.routing.blocks import Blocks, choose, exact_dot
from compmod_jax.kernels.routing.gpu_projection import project, project_backward
from compmod_jax.kernels.routing.reference import Choice, First, slopes
from compmod_jax.kernels.routing.triton import (
  call,
  join,
  load,
  padded,
  store,
  store_part,
  sum_over_tokens,
)

__all__ = [
  "project",
  "project_backward",
  "route",
  "route_backward",
  "route_columns",
  "route_columns_backward",
  "softmax",
  "softmax_backward",
]


def softmax(scores: jax.Array, *, choice: Choice, blocks: Blocks, interpret: bool) -> jax.Array:
  """See `reference.softmax`."""
  return _over_scores(functools.partial(_softmax, choice=choice), [scores], blocks, interpret)


def softmax_backward(
  weights: jax.Array, gradient: jax.Array, *, choice: Choice, blocks: Blocks, interpret: bool
) -> jax.Array:
  """See `reference.softmax_backward`."""
  kernel = functools.partial(_softmax_backward, temperature=choice.temperature)
  return _over_scores(kernel, [weights, gradient], blocks, interpret)


def _over_scores(
  kernel: Callable[..., None], arrays: list[jax.Array], blocks: Blocks, interpret: bool
) -> jax.Array:
  tokens, units = arrays[0].shape
  shape = (max(1, blocks.gpu_elements // pl.next_power_of_2(units)), pl.next_power_of_2(units))
  out = jax.ShapeDtypeStruct((tokens, units), jnp.float32)
  body = functools.partial(kernel, shape=shape)
  return call(body, (pl.cdiv(tokens, shape[0]),), arrays, [out], interpret)[0]


def _softmax(scores: jax.Ref, weights: jax.Ref, *, choice: Choice, shape: tuple[int, int]) -> None:
  start = (pl.program_id(0) * shape[0], 0)
  block = load(scores, start, shape, other=-jnp.inf).astype(jnp.float32)
  store(weights, start, choose(block, 1, choice))


def _softmax_backward(
  weights: jax.Ref,
  gradient: jax.Ref,
  errors: jax.Ref,
  *,
  temperature: float,
  shape: tuple[int, int],
) -> None:
  start = (pl.program_id(0) * shape[0], 0)
  block, slope = load(weights, start, shape), load(gradient, start, shape)
  store(errors, start, slopes(block, slope, temperature, 1))


def route(
  rows: jax.Array,
  first: First | None,
  readout: jax.Array,
  bias: jax.Array,
  *,
  choice: Choice,
  keep_hidden: bool,
  blocks: Blocks,
  interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
  """See `reference.route`."""
  blocks = blocks.of_type(rows.dtype)
  tokens, (inner, units) = rows.shape[0], readout.shape
  shifts = [] if first is None else [first[0], first[1][None]]
  outputs = [jax.ShapeDtypeStruct((tokens, units), jnp.float32)]
  keep_hidden = keep_hidden and first is not None
  if keep_hidden:
    outputs.append(jax.ShapeDtypeStruct((tokens, inner), rows.dtype))
  kernel = functools.partial(_route, choice=choice, first=first is not None, blocks=blocks)
  grid = (pl.cdiv(tokens, blocks.gpu_route),)
  made = call(kernel, grid, [rows, *shifts, readout, bias[None]], outputs, interpret)
  return made[0], made[1] if keep_hidden else None


def route_columns(
  rows: jax.Array,
  shift: jax.Array,
  readout: jax.Array,
  bias: jax.Array,
  *,
  column: int,
  choice: Choice,
  blocks: Blocks,
  interpret: bool,
) -> jax.Array:
  """Weights from the columns of a matrix, from `column` on, that hold the first layer.

  Args:
    rows: the matrix [tokens, columns].
    shift: the layer's bias, in its columns of [1, columns].
    readout: as in `reference.route`, and so the others.
    bias: c.
    column: where the layer begins.
    choice: which units stay.
    blocks: sizes of blocks.
    interpret: run without the hardware.
  """
  blocks = blocks.of_type(rows.dtype)
  outputs = [jax.ShapeDtypeStruct((rows.shape[0], readout.shape[1]), jnp.float32)]
  kernel = functools.partial(_route_columns, column=column, choice=choice, tokens=blocks.gpu_route)
  grid = (pl.cdiv(rows.shape[0], blocks.gpu_route),)
  return call(kernel, grid, [rows, shift, readout, bias[None]], outputs, interpret)[0]


def _route_columns(*refs: jax.Ref, column: int, choice: Choice, tokens: int) -> None:
  rows, shift, readout, bias, weights = refs
  start = pl.program_id(0) * tokens
  hidden = _shifted(rows, shift, readout.shape[0], start, tokens, column)
  _weigh(jnp.maximum(hidden, 0), readout, bias, weights, start, choice)


def _shifted(
  rows: jax.Ref, shift: jax.Ref, width: int, start: jax.Array, tokens: int, column: int
) -> jax.Array:
  """The first layer before its relu, rounded to the type of the rows."""
  block = (tokens, padded(width))
  hidden = load(rows, (start, column), block, columns=width).astype(jnp.float32)
  bias = load(shift, (0, column), (1, block[1]), columns=width)
  return (hidden + bias).astype(rows.dtype)


def _weigh(
  hidden: jax.Array,
  readout: jax.Ref,
  bias: jax.Ref,
  weights: jax.Ref,
  start: jax.Array,
  choice: Choice,
) -> None:
  """Writes the weights that hidden units give, behind their relu."""
  inner, units = hidden.shape[1], padded(readout.shape[1])
  scores = exact_dot(hidden, load(readout, (0, 0), (inner, units)))
  scores += load(bias, (0, 0), (1, units), other=-jnp.inf)
  store(weights, (start, 0), choose(scores, 1, choice))


def _route(*refs: jax.Ref, choice: Choice, first: bool, blocks: Blocks) -> None:
  rows, *layer = refs[: 3 if first else 1]
  readout, bias, weights, *kept = refs[3 if first else 1 :]
  tokens, start = blocks.gpu_route, pl.program_id(0) * blocks.gpu_route
  inner = padded(readout.shape[0])
  if first:
    (kernel, shift), chunk = layer, blocks.gpu_inner

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
      left = load(rows, (start, i * chunk), (tokens, chunk))
      return total + exact_dot(left, load(kernel, (i * chunk, 0), (chunk, inner)))

    turns = pl.cdiv(rows.shape[1], chunk)
    hidden = lax.fori_loop(0, turns, add, jnp.zeros((tokens, inner), jnp.float32))
    hidden += load(shift, (0, 0), (1, inner)).astype(jnp.float32)
  else:
    hidden = load(rows, (start, 0), (tokens, inner))
  hidden = jnp.maximum(hidden, 0).astype(readout.dtype)
  for ref in kept:
    store(ref, (start, 0), hidden)
  _weigh(hidden, readout, bias, weights, start, choice)


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
  interpret: bool,
) -> tuple[jax.Array, First | None, jax.Array, jax.Array]:
  """See `reference.route_backward`.

  With a first layer in two kernels: the gradient of its matrix is a sum over all tokens, and
  programs share no memory. The second forms the hidden errors again: to write and read them would
  be twice the bytes, and XLA's product adds twice as many partial sums.
  """
  hidden, blocks = rows if hidden is None else hidden, blocks.of_type(rows.dtype)
  programs, (width, units) = pl.cdiv(rows.shape[0], blocks.gpu_route), readout.shape
  shared = [hidden, readout, weights, gradient]
  kernel = functools.partial(
    _route_backward, temperature=choice.temperature, first=first is not None, blocks=blocks
  )
  d_rows, d_readout, d_bias, d_shift = call(
    kernel,
    (programs,),
    shared if first is None else [*shared, first[0]],
    [
      jax.ShapeDtypeStruct(rows.shape, rows.dtype),
      jax.ShapeDtypeStruct((programs * width, units), jnp.float32),
      jax.ShapeDtypeStruct((programs, units), jnp.float32),
      jax.ShapeDtypeStruct((programs, width), jnp.float32),
    ],
    interpret,
  )
  d_readout, d_bias = join(d_readout, programs, readout.dtype), jnp.sum(d_bias, axis=0)
  if first is None:
    return d_rows, None, d_readout, d_bias
  tiles = tuple(pl.cdiv(side, blocks.gpu_inner) for side in first[0].shape)
  splits = blocks.splits(tiles)
  parts = jax.ShapeDtypeStruct((splits * first[0].shape[0], width), jnp.float32)
  kernel = functools.partial(
    _first_backward, temperature=choice.temperature, splits=splits, blocks=blocks
  )
  (parts,) = call(kernel, (*tiles, splits), [*shared, rows], [parts], interpret)
  d_first = join(parts, splits, first[0].dtype), jnp.sum(d_shift, axis=0).astype(first[1].dtype)
  return d_rows, d_first, d_readout, d_bias


def _route_backward(*refs: jax.Ref, temperature: float, first: bool, blocks: Blocks) -> None:
  *shared, d_rows, d_readout, d_bias, d_shift = refs
  kernel = shared.pop() if first else None
  program, tokens, chunk = pl.program_id(0), blocks.gpu_route, blocks.gpu_inner
  start, width = program * tokens, shared[1].shape[0]
  columns = (0, padded(width))
  active, errors, below = _errors(shared, start, tokens, columns, temperature)
  exact = errors.astype(active.dtype)
  store(d_readout, (program * width, 0), exact_dot(active, exact, (0, 0)), rows=width)
  store(d_bias, (program, 0), jnp.sum(errors, axis=0)[None])
  store(d_shift, (program, 0), jnp.sum(below.astype(jnp.float32), axis=0)[None])
  if kernel is None:
    store(d_rows, (start, 0), below)
    return

  @pl.loop(0, pl.cdiv(d_rows.shape[1], chunk))
  def _(i: jax.Array) -> None:
    down = exact_dot(below, load(kernel, (i * chunk, 0), (chunk, padded(width))), (1, 1))
    store(d_rows, (start, i * chunk), down)


def _first_backward(*refs: jax.Ref, temperature: float, splits: int, blocks: Blocks) -> None:
  *shared, rows, parts = refs
  chunk = blocks.gpu_inner
  row, column = pl.program_id(0) * chunk, pl.program_id(1) * chunk

  def term(start: jax.Array) -> jax.Array:
    _, _, below = _errors(shared, start, chunk, (column, chunk), temperature)
    return exact_dot(load(rows, (start, row), (chunk, chunk)), below, (0, 0))

  share = sum_over_tokens(term, rows.shape[0], (chunk, chunk), chunk, splits)
  store_part(parts, rows.shape[1], (row, column), share)


def _errors(
  shared: Sequence[jax.Ref],
  start: jax.Array,
  tokens: int,
  columns: tuple[jax.Array | int, int],
  temperature: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Hidden activations, errors of scores, and errors before the relu, at some tokens.

  Of the hidden units, those from `columns[0]` on, `columns[1]` of them.
  """
  active = jnp.maximum(load(shared[0], (start, columns[0]), (tokens, columns[1])), 0)
  return _errors_below(active, shared[1:], start, columns[0], temperature)


def _errors_below(
  active: jax.Array,
  shared: Sequence[jax.Ref],
  start: jax.Array,
  first_unit: jax.Array | int,
  temperature: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The same from hidden activations, the first of which belongs to `first_unit`."""
  readout, weights, gradient = shared
  (tokens, inner), units = active.shape, padded(readout.shape[1])
  block, slope = (load(ref, (start, 0), (tokens, units)) for ref in (weights, gradient))
  errors = slopes(block, slope, temperature, 1)
  matrix = load(readout, (first_unit, 0), (inner, units))
  below = exact_dot(errors.astype(active.dtype), matrix, (1, 1))
  return active, errors, jnp.where(active > 0, below, 0).astype(active.dtype)


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
  interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Gradients of `route_columns` with respect to rows, shift [hidden], readout and bias.

  Args:
    rows: as in `route_columns`, and so those that have the same names.
    shift: as there.
    readout: as there.
    weights: what it returned.
    gradient: with respect to them.
    into: the gradient of the other columns, an array whose place the result takes.
    column: as there.
    choice: as there.
    blocks: as there.
    interpret: as there.
  """
  blocks = blocks.of_type(rows.dtype)
  programs, (width, units) = pl.cdiv(rows.shape[0], blocks.gpu_route), readout.shape
  kernel = functools.partial(
    _route_columns_backward,
    column=column,
    temperature=choice.temperature,
    tokens=blocks.gpu_route,
  )
  d_rows, d_shift, d_readout, d_bias = call(
    kernel,
    (programs,),
    [rows, shift, readout, weights, gradient, into],
    [
      jax.ShapeDtypeStruct(rows.shape, rows.dtype),
      jax.ShapeDtypeStruct((programs, width), jnp.float32),
      jax.ShapeDtypeStruct((programs * width, units), jnp.float32),
      jax.ShapeDtypeStruct((programs, units), jnp.float32),
    ],
    interpret,
    aliases={5: 0},
  )
  sums = (jnp.sum(one, axis=0) for one in (d_shift, d_bias))
  d_shift, d_bias = sums
  return d_rows, d_shift, join(d_readout, programs, readout.dtype), d_bias


def _route_columns_backward(*refs: jax.Ref, column: int, temperature: float, tokens: int) -> None:
  rows, shift, *shared, _, d_rows, d_shift, d_readout, d_bias = refs
  program, width = pl.program_id(0), shared[0].shape[0]
  start = program * tokens
  active = jnp.maximum(_shifted(rows, shift, width, start, tokens, column), 0)
  active, errors, below = _errors_below(active, shared, start, 0, temperature)
  exact = errors.astype(active.dtype)
  store(d_rows, (start, column), below, columns=width)
  store(d_shift, (program, 0), jnp.sum(below.astype(jnp.float32), axis=0)[None])
  store(d_readout, (program * width, 0), exact_dot(active, exact, (0, 0)), rows=width)
  store(d_bias, (program, 0), jnp.sum(errors, axis=0)[None])
