"""Dropout of attention probabilities that a kernel draws again where it needs it."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from compmod_jax.core.random_bits import PER_COUNTER, bits_at, threefry
from compmod_jax.kernels.routing.blocks import dot

_RANGE = 2**16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProbabilityDropout:
  """Which probabilities become 0, a function of a key and of their place in the whole array.

  The bits are those of `random_bits(key, (examples, heads, queries, keys))`: a device with some of
  the examples and heads drops what one device with all of them would.

  Attributes:
    dropped: how many of 65,536.
    all_heads: heads of the whole array.
    words: of the key.
    examples: numbers of the examples.
    heads: numbers of the heads.
    all_queries: queries of the whole array, where a device has some of them; none for all.
    first_query: the number of the first of these.
  """

  dropped: int = dataclasses.field(metadata={"static": True})
  all_heads: int = dataclasses.field(metadata={"static": True})
  words: UInt32[Array, " 2"]
  examples: UInt32[Array, " batch"]
  heads: UInt32[Array, " heads"]
  all_queries: int | None = dataclasses.field(default=None, metadata={"static": True})
  first_query: Int[Array, " 1"] | None = None

  @classmethod
  def of(cls, key: jax.Array, rate: float, batch: int, heads: int) -> "ProbabilityDropout":
    """Of a whole array.

    Args:
      key: any JAX key.
      rate: probability, at least 0 and below 1, rounded to a multiple of 2**-16.
      batch: examples.
      heads: of each.
    """
    words = jax.random.key_data(key).reshape(-1)[:2]
    of_examples, of_heads = (jnp.arange(size, dtype=jnp.uint32) for size in (batch, heads))
    return cls(round(rate * _RANGE), heads, words, of_examples, of_heads)

  @property
  def scale(self) -> float:
    """What remaining probabilities are multiplied by."""
    return 1 / (1 - self.dropped / _RANGE)

  def keep(self, queries: int, keys: int) -> Bool[Array, "batch heads {queries} {keys}"]:
    """Which probabilities remain."""
    blocks = -(-keys // PER_COUNTER)
    place = self.examples[:, None, None, None]
    rows = jnp.arange(queries, dtype=jnp.uint32)
    if self.first_query is not None:
      rows = rows + self.first_query.astype(jnp.uint32)
    inner = self.heads, rows, jnp.arange(blocks, dtype=jnp.uint32)
    sizes = self.all_heads, self.all_queries or queries, blocks
    for axis, (size, own) in enumerate(zip(sizes, inner, strict=True)):
      place = place * np.uint32(size) + jnp.expand_dims(own, [a for a in range(4) if a != axis + 1])
    bits = bits_at(self.words, place)[..., :keys]
    return lax.optimization_barrier(bits >= np.uint16(self.dropped))

  def keep_of_block(
    self,
    example: jax.Array,
    head: jax.Array,
    start: tuple[jax.Array, jax.Array],
    size: tuple[int, int],
    whole: tuple[int, int],
    *,
    by_product: bool = False,
  ) -> Bool[Array, "queries keys"]:
    """The same of a block inside a kernel, which holds references in place of arrays.

    Args:
      example: which of `examples`.
      head: which of `heads`.
      start: first query and first key, a multiple of 4.
      size: queries and keys of the block.
      whole: queries and keys of an example.
      by_product: columns are not interleaved, which TPUs cannot do, but repeated by a product.
    """
    inner = (size[0], size[1] // PER_COUNTER)
    line = self.examples[example] * np.uint32(self.all_heads) + self.heads[head]
    first = start[0] if self.first_query is None else start[0] + self.first_query[0]
    query = first + lax.broadcasted_iota(jnp.int32, inner, 0)
    block = lax.div(start[1], PER_COUNTER) + lax.broadcasted_iota(jnp.int32, inner, 1)
    row = line * np.uint32(self.all_queries or whole[0]) + query.astype(jnp.uint32)
    place = row * np.uint32(-(-whole[1] // PER_COUNTER)) + block.astype(jnp.uint32)
    words = threefry((self.words[0], self.words[1]), place)
    low = [word & np.uint32(_RANGE - 1) for word in words]
    high = [word >> np.uint32(16) for word in words]
    if by_product:
      numbers = (half.astype(jnp.int32) for word in zip(low, high, strict=True) for half in word)
      return _repeated([number >= self.dropped for number in numbers])
    halves = jnp.stack(low, axis=-1), jnp.stack(high, axis=-1)
    return jnp.stack(halves, axis=-1).reshape(size) >= np.uint32(self.dropped)


def _repeated(kept: list[Bool[Array, "queries counters"]]) -> Bool[Array, "queries keys"]:
  """Decisions on each of the keys of a counter, in the order of keys."""
  # They are the bits of one number, which bfloat16 holds.
  numbers = [one.astype(jnp.int32) << bit for bit, one in enumerate(kept)]
  together = functools.reduce(operator.add, numbers).astype(jnp.bfloat16)
  queries, counters = together.shape
  repeat = (counters, counters * len(kept))
  counter, key = (lax.broadcasted_iota(jnp.int32, repeat, axis) for axis in range(2))
  own = lax.div(key, len(kept)) == counter
  repeated = dot(together, own.astype(jnp.bfloat16)).astype(jnp.int32)
  bit = lax.rem(lax.broadcasted_iota(jnp.int32, (queries, repeat[1]), 1), len(kept))
  return ((repeated >> bit) & 1) == 1
