"""The kernels for NVIDIA GPUs.

Blocks have sides that are powers of two, and at least 16 where they are multiplied. What they hold
beyond an array is masked in every load and store: units that do not exist get scores of minus
infinity.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from compmod_jax.kernels.routing.blocks import Blocks, choose, exact_dot
from compmod_jax.kernels.routing.reference import Choice, slopes
from compmod_jax.kernels.routing.triton import call, join, load, padded, store


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
  readout: jax.Array,
  bias: jax.Array,
  *,
  choice: Choice,
  blocks: Blocks,
  interpret: bool,
) -> jax.Array:
  """See `reference.route`."""
  blocks = blocks.of_type(rows.dtype)
  out = jax.ShapeDtypeStruct((rows.shape[0], readout.shape[1]), jnp.float32)
  kernel = functools.partial(_route, choice=choice, tokens=blocks.gpu_route)
  grid = (pl.cdiv(rows.shape[0], blocks.gpu_route),)
  return call(kernel, grid, [rows, readout, bias[None]], [out], interpret)[0]


def _route(
  rows: jax.Ref,
  readout: jax.Ref,
  bias: jax.Ref,
  weights: jax.Ref,
  *,
  choice: Choice,
  tokens: int,
) -> None:
  start = pl.program_id(0) * tokens
  active = _active(rows, readout, start, tokens)
  _weigh(active.astype(readout.dtype), readout, bias, weights, start, choice)


def _active(rows: jax.Ref, readout: jax.Ref, start: jax.Array, tokens: int) -> jax.Array:
  """Hidden units at some tokens, behind their relu."""
  return jnp.maximum(load(rows, (start, 0), (tokens, padded(readout.shape[0]))), 0)


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


def route_backward(
  rows: jax.Array,
  readout: jax.Array,
  weights: jax.Array,
  gradient: jax.Array,
  *,
  choice: Choice,
  blocks: Blocks,
  interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `reference.route_backward`."""
  blocks = blocks.of_type(rows.dtype)
  programs, (width, units) = pl.cdiv(rows.shape[0], blocks.gpu_route), readout.shape
  kernel = functools.partial(
    _route_backward, temperature=choice.temperature, tokens=blocks.gpu_route
  )
  d_rows, d_readout, d_bias = call(
    kernel,
    (programs,),
    [rows, readout, weights, gradient],
    [
      jax.ShapeDtypeStruct(rows.shape, rows.dtype),
      jax.ShapeDtypeStruct((programs * width, units), jnp.float32),
      jax.ShapeDtypeStruct((programs, units), jnp.float32),
    ],
    interpret,
  )
  return d_rows, join(d_readout, programs, readout.dtype), jnp.sum(d_bias, axis=0)


def _route_backward(*refs: jax.Ref, temperature: float, tokens: int) -> None:
  rows, *shared, d_rows, d_readout, d_bias = refs
  program, width = pl.program_id(0), shared[0].shape[0]
  start = program * tokens
  active = _active(rows, shared[0], start, tokens)
  errors, below = _errors(active, shared, start, temperature)
  store(d_rows, (start, 0), below)
  exact = errors.astype(active.dtype)
  store(d_readout, (program * width, 0), exact_dot(active, exact, (0, 0)), rows=width)
  store(d_bias, (program, 0), jnp.sum(errors, axis=0)[None])


def _errors(
  active: jax.Array, shared: Sequence[jax.Ref], start: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
  """Errors of scores, and errors before the relu of hidden units, at some tokens."""
  readout, weights, gradient = shared
  (tokens, inner), units = active.shape, padded(readout.shape[1])
  block, slope = (load(ref, (start, 0), (tokens, units)) for ref in (weights, gradient))
  errors = slopes(block, slope, temperature, 1)
  below = exact_dot(errors.astype(active.dtype), load(readout, (0, 0), (inner, units)), (1, 1))
  return errors, jnp.where(active > 0, below, 0).astype(active.dtype)


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
  errors, below = _errors(active, shared, start, temperature)
  exact = errors.astype(active.dtype)
  store(d_rows, (start, column), below, columns=width)
  store(d_shift, (program, 0), jnp.sum(below.astype(jnp.float32), axis=0)[None])
  store(d_readout, (program * width, 0), exact_dot(active, exact, (0, 0)), rows=width)
  store(d_bias, (program, 0), jnp.sum(errors, axis=0)[None])
