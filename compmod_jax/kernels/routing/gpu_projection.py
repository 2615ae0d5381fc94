"""The output projection of weighted heads, for NVIDIA GPUs; see `gpu`."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from compmod_jax.kernels.routing.blocks import Blocks, dot
from compmod_jax.kernels.routing.triton import (
  call,
  join,
  load,
  padded,
  store,
  store_part,
  sum_over_tokens,
)


def project(
  weights: jax.Array, heads: jax.Array, kernel: jax.Array, *, blocks: Blocks, interpret: bool
) -> jax.Array:
  """See `reference.project`."""
  shape = (heads.shape[0], kernel.shape[1])
  grid = (pl.cdiv(shape[0], blocks.gpu_tokens), pl.cdiv(shape[1], blocks.gpu_columns))
  out = jax.ShapeDtypeStruct(shape, heads.dtype)
  body = functools.partial(_project, blocks=blocks)
  return call(body, grid, [weights, heads, kernel], [out], interpret, warps=8)[0]


def _project(
  weights: jax.Ref, heads: jax.Ref, kernel: jax.Ref, out: jax.Ref, *, blocks: Blocks
) -> None:
  tokens, columns = blocks.gpu_tokens, blocks.gpu_columns
  start, column = pl.program_id(0) * tokens, pl.program_id(1) * columns
  units = weights.shape[1]
  width = heads.shape[1] // units

  def add(head: jax.Array, total: jax.Array) -> jax.Array:
    scaled = _scaled(weights, heads, start, head, tokens)
    right = load(kernel, (head * width, column), (padded(width), columns), rows=width)
    return total + dot(scaled, right)

  total = lax.fori_loop(0, units, add, jnp.zeros((tokens, columns), jnp.float32))
  store(out, (start, column), total)


def project_backward(
  weights: jax.Array,
  heads: jax.Array,
  kernel: jax.Array,
  gradient: jax.Array,
  *,
  blocks: Blocks,
  interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `reference.project_backward`.

  Two kernels: scaled heads are formed in registers by each. Left to XLA, the second would write
  them and read them again, twice the bytes of `heads`.
  """
  tokens, units = weights.shape
  d_weights, d_heads = call(
    functools.partial(_heads_backward, blocks=blocks),
    (pl.cdiv(tokens, blocks.gpu_tokens), units),
    [weights, heads, kernel, gradient],
    [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (weights, heads)],
    interpret,
  )
  tiles = units, pl.cdiv(kernel.shape[1], blocks.gpu_columns)
  splits = blocks.splits(tiles)
  (parts,) = call(
    functools.partial(_kernel_backward, splits=splits, blocks=blocks),
    (*tiles, splits),
    [weights, heads, gradient],
    [jax.ShapeDtypeStruct((splits * kernel.shape[0], kernel.shape[1]), jnp.float32)],
    interpret,
  )
  return d_weights, d_heads, join(parts, splits, kernel.dtype)


def _heads_backward(
  weights: jax.Ref,
  heads: jax.Ref,
  kernel: jax.Ref,
  gradient: jax.Ref,
  d_weights: jax.Ref,
  d_heads: jax.Ref,
  *,
  blocks: Blocks,
) -> None:
  tokens, chunk, head = blocks.gpu_tokens, blocks.gpu_inner, pl.program_id(1)
  start, width = pl.program_id(0) * tokens, heads.shape[1] // weights.shape[1]
  block = (tokens, padded(width))

  def add(i: jax.Array, total: jax.Array) -> jax.Array:
    left = load(gradient, (start, i * chunk), (tokens, chunk))
    right = load(kernel, (head * width, i * chunk), (block[1], chunk), rows=width)
    return total + dot(left, right, (1, 1))

  turns = pl.cdiv(kernel.shape[1], chunk)
  scaled = lax.fori_loop(0, turns, add, jnp.zeros(block, jnp.float32))
  values = load(heads, (start, head * width), block, columns=width).astype(jnp.float32)
  scale = load(weights, (start, head), (tokens, 1))
  store(d_weights, (start, head), jnp.sum(scaled * values, axis=1)[:, None])
  store(d_heads, (start, head * width), scale * scaled, columns=width)


def _kernel_backward(
  weights: jax.Ref,
  heads: jax.Ref,
  gradient: jax.Ref,
  parts: jax.Ref,
  *,
  splits: int,
  blocks: Blocks,
) -> None:
  head, column = pl.program_id(0), pl.program_id(1) * blocks.gpu_columns
  chunk, width = blocks.gpu_inner, heads.shape[1] // weights.shape[1]

  def term(start: jax.Array) -> jax.Array:
    scaled = _scaled(weights, heads, start, head, chunk)
    return dot(scaled, load(gradient, (start, column), (chunk, blocks.gpu_columns)), (0, 0))

  shape = (padded(width), blocks.gpu_columns)
  share = sum_over_tokens(term, heads.shape[0], shape, chunk, splits)
  store_part(parts, heads.shape[1], (head * width, column), share, rows=width)


def _scaled(
  weights: jax.Ref, heads: jax.Ref, start: jax.Array, head: jax.Array, tokens: int
) -> jax.Array:
  """One head's outputs at some tokens times its weights."""
  width = heads.shape[1] // weights.shape[1]
  values = load(heads, (start, head * width), (tokens, padded(width)), columns=width)
  scale = load(weights, (start, head), (tokens, 1))
  return (scale * values.astype(jnp.float32)).astype(values.dtype)
