"""Biases of logits that are one number a head and distance between query and key."""

import dataclasses
from typing import overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistanceBias:
  """What is added to the logits of queries and keys.

  Attributes:
    numbers: of every distance, position of the query minus that of the key, from the largest on: of
      T queries and as many keys T - 1 to 1 - T. Of S keys and Q queries, the first of which stands
      at the position of key f, f + Q - 1 to f + 1 - S.
  """

  numbers: Float[Array, "heads distances"]

  def dense(self) -> Float[Array, "1 heads queries keys"]:
    """The same for every pair of as many queries as keys."""
    return of_pairs(self.numbers)[None]

  def of_queries(self, first: Int[Array, ""], count: int) -> "DistanceBias":
    """Of `count` of as many queries as keys, from `first` on, and all keys."""
    time = (self.numbers.shape[1] + 1) // 2
    start, size = time - count - first, time + count - 1
    return DistanceBias(lax.dynamic_slice_in_dim(self.numbers, start, size, axis=1))


Bias = Float[Array, "#batch #heads #own_queries own_keys"] | DistanceBias
"""What is added to logits."""


@overload
def dense(bias: Bias) -> Float[Array, "#batch #heads #own_queries own_keys"]: ...
@overload
def dense(bias: None) -> None: ...
def dense(bias: Bias | None) -> Float[Array, "#batch #heads #own_queries own_keys"] | None:
  """A bias in full."""
  return bias.dense() if isinstance(bias, DistanceBias) else bias


@jax.custom_vjp
def of_pairs(numbers: Float[Array, "heads distances"]) -> Float[Array, "heads queries keys"]:
  """For every pair of positions the number of its distance. Reverse mode, any order.

  Args:
    numbers: see `DistanceBias`.
  """
  return _of_pairs(numbers)


def sums_of_distances(
  pairs: Float[Array, "heads queries keys"],
) -> Float[Array, "heads distances"]:
  """For every distance the sum over its pairs, which are those of `of_pairs`."""
  heads, time, _ = pairs.shape

  def transposed(pairs: jax.Array) -> jax.Array:
    like = jax.ShapeDtypeStruct((heads, 2 * time - 1), pairs.dtype)
    return jax.linear_transpose(_of_pairs, like)(pairs)[0]

  def in_turn(pairs: jax.Array) -> jax.Array:
    """Row after row, which takes a CPU a tenth of the time."""

    def add(row: jax.Array, total: jax.Array) -> jax.Array:
      first = time - 1 - row
      so_far = lax.dynamic_slice_in_dim(total, first, time, axis=1)
      return lax.dynamic_update_slice_in_dim(total, so_far + pairs[:, row], first, axis=1)

    return lax.fori_loop(0, time, add, jnp.zeros((heads, 2 * time - 1), pairs.dtype))

  return lax.platform_dependent(pairs, cpu=in_turn, default=transposed)


def _of_pairs(numbers: jax.Array) -> jax.Array:
  heads, distances = numbers.shape
  rows = (heads, (distances + 1) // 2, distances)
  return shifted(jnp.broadcast_to(numbers[:, None], rows))


def shifted(every: Float[Array, "*outer time distances"]) -> Float[Array, "*outer time keys"]:
  """Of row t the T numbers from column T - 1 - t on, of 2T - 1 or of T.

  Rows that are one number shorter begin one number earlier each.
  """
  *outer, time, distances = every.shape
  if time == 1:
    return every
  if distances == time:
    every = jnp.pad(every, [(0, 0)] * (every.ndim - 1) + [(0, 1)])
    distances += 1
  flat = every.reshape(*outer, time * distances)
  flat = flat[..., time - 1 : time - 1 + time * (distances - 1)]
  return flat.reshape(*outer, time, distances - 1)[..., :time]


of_pairs.defvjp(
  lambda numbers: (_of_pairs(numbers), None), lambda _, slope: (sums_of_distances(slope),)
)


def windows(
  numbers: Float[Array, "heads distances"], queries: int, blocks: int, block: tuple[int, int]
) -> Float[Array, "heads diagonals numbers"]:
  """Of every diagonal of blocks of pairs, which are alike, the numbers that their pairs have.

  Query r and key c of a block of Q queries and S keys have number `Q - 1 - r + c` of Q + S. The
  first diagonal has the last block of queries and the first of keys.

  Args:
    numbers: see `DistanceBias`.
    queries: how many.
    blocks: how many of queries.
    block: Q and S; equal, unless there is but one block of queries, or of keys.
  """
  side, step = block[0], block[0] if blocks > 1 else block[1]
  before, keys = blocks * side - queries, numbers.shape[1] + 1 - queries
  diagonals = blocks + -(-keys // block[1]) - 1
  places = jnp.arange(diagonals)[:, None] * step + jnp.arange(sum(block))[None]
  after = (diagonals - 1) * step + sum(block) - before - numbers.shape[1]
  return jnp.pad(numbers, ((0, 0), (before, after)))[:, places]


def sums_of_diagonals(
  pairs: Float[Array, "*outer side side"],
) -> Float[Array, "*outer two_sides"]:
  """The sums of pairs of a block that have the same of the numbers of `windows`."""
  *outer, side, _ = pairs.shape
  wide = jnp.pad(pairs[..., ::-1, :], [(0, 0)] * (len(outer) + 1) + [(0, side)])
  # A row less one column: each row begins one column later than the one before.
  flat = wide.reshape(*outer, -1)[..., : side * (2 * side - 1)]
  sums = jnp.sum(flat.reshape(*outer, side, 2 * side - 1), axis=-2)
  return jnp.pad(sums, [(0, 0)] * len(outer) + [(0, 1)])
