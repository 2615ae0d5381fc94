"""What kernels share: sizes of blocks, and the competition inside a block."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from compmod_jax.core.linear import exactly
from compmod_jax.kernels.routing.reference import MASKED, Choice


@dataclasses.dataclass(frozen=True)
class Blocks:
  """How much each program of a kernel takes."""

  tpu_softmax: int = 2048
  """Tokens of the softmax by itself, a multiple of 128."""
  tpu_tokens: int = 512
  """Tokens of the other TPU kernels, a multiple of 128."""
  gpu_elements: int = 4096
  """Scores of the softmax by itself; far more do not fit into registers."""
  gpu_route: int = 64
  """Tokens of the inference network, a power of two."""

  def of_type(self, dtype: DTypeLike) -> "Blocks":
    """Half as many tokens of the inference network in float32, whose exact products need room.

    With all of them an H100's registers do not hold a block.
    """
    exact = jnp.dtype(dtype) == jnp.float32
    tokens = max(16, self.gpu_route // 2) if exact else self.gpu_route
    return dataclasses.replace(self, gpu_route=tokens)


def choose(scores: jax.Array, axis: int, choice: Choice) -> jax.Array:
  """Weights of a block of scores, float32, whose units lie along `axis`.

  The same as the reference's `softmax`; ranks are counted one unit at a time, so that nothing
  larger than the block is formed.
  """
  scores = scores / choice.temperature
  allowed = scores != -jnp.inf
  scores = jnp.where(allowed, scores, MASKED)
  if choice.rule == "soft":
    return _softmax(scores, allowed, axis)
  order = _rank(scores, axis)
  if choice.rule == "top_k":
    # Units may be padded: the number to keep has been filled in before.
    assert choice.keep is not None
    return _softmax(scores, allowed & (order < choice.keep), axis)
  large = _softmax(scores, allowed, axis) >= choice.threshold
  return _softmax(scores, allowed & (large | (order < 1)), axis)


def _rank(scores: jax.Array, axis: int) -> jax.Array:
  index = lax.broadcasted_iota(jnp.int32, scores.shape, axis)

  def count(unit: jax.Array, order: jax.Array) -> jax.Array:
    other = jnp.sum(jnp.where(index == unit, scores, 0.0), axis=axis, keepdims=True)
    other = jnp.broadcast_to(other, scores.shape)
    beats = (other > scores) | ((other == scores) & (unit < index))
    return order + beats.astype(jnp.int32)

  return lax.fori_loop(0, scores.shape[axis], count, jnp.zeros(scores.shape, jnp.int32))


def _softmax(scores: jax.Array, active: jax.Array, axis: int) -> jax.Array:
  scores = jnp.where(active, scores, MASKED)
  numerator = jnp.exp(scores - jnp.max(scores, axis=axis, keepdims=True))
  numerator = jnp.where(active, numerator, 0.0)
  total = jnp.sum(numerator, axis=axis, keepdims=True)
  return numerator / jnp.where(total > 0, total, 1.0)


def dot(
  left: jax.Array,
  right: jax.Array,
  contract: tuple[int, int] = (1, 0),
  precision: lax.Precision | None = None,
) -> jax.Array:
  """Product of two matrices in float32, over axis `contract[0]` of one and `[1]` of the other."""
  dimensions = (((contract[0],), (contract[1],)), ((), ()))
  return lax.dot_general(
    left, right, dimensions, precision=precision, preferred_element_type=jnp.float32
  )


def exact_dot(left: jax.Array, right: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
  """The same product; float32 operands are not rounded for it."""
  return dot(left, right, contract, exactly(left.dtype))
