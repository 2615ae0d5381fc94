"""Which keys a query may read, as kernels know it: by order and by numbers of segments; and how
much less it reads of those that are far.

A rule that cannot be said so is formed in full, [batch, heads, queries, keys], and attention then
runs without a kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SHARED = 0
"""Number of keys that every query reads."""
HIDDEN = -1
"""Number of keys that no query reads."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
  """A query reads the keys that order and numbers both allow.

  By order it reads all keys or, where `causal`, those at its own position and before; of these,
  with a `window`, the last `window` ones alone. Keys of the prefix are always in order. By number
  it reads keys of its own number and those of number 0; where a key has the number -1, nobody does.

  Attributes:
    causal: whether order counts; query i then stands at the position of key i, or of key
      `first_query` + i.
    prefix: keys in front that all queries read, as far as order counts.
    window: keys that a query reads at most, its own included; needs `causal`.
    query_ids: numbers of queries, at least 0; all 0 where there are none.
    key_ids: numbers of keys, at least -1; all 0 where there are none.
    first_query: where a device has some of the queries and all keys, the number of its first; 0
      where there is none.
    query_positions: where queries stand, if not one after the other; key i stands at i. Without
      `first_query` and `penalties`.
    penalties: what the logits of each head are less by for every position between query and key
      (Press et al. 2022), float32; they have no gradient. None for nothing.
  """

  causal: bool = dataclasses.field(default=False, metadata={"static": True})
  prefix: int = dataclasses.field(default=0, metadata={"static": True})
  window: int | None = dataclasses.field(default=None, metadata={"static": True})
  query_ids: Int[Array, "#batch queries"] | None = None
  key_ids: Int[Array, "#batch keys"] | None = None
  first_query: Int[Array, " 1"] | None = None
  query_positions: Int[Array, "#batch queries"] | None = None
  penalties: Float[Array, " heads"] | None = None

  def __post_init__(self) -> None:
    if self.query_ids is not None and self.key_ids is None:
      raise ValueError("visibility.query_ids has numbers and key_ids none; give both.")
    if self.window is not None and not (self.causal and self.window >= 1):
      raise ValueError(
        f"visibility.window is {self.window} and causal {self.causal}; a window is at least 1 and"
        " needs a causal order."
      )

    if self.query_positions is not None:
      for field in ("first_query", "penalties"):
        if getattr(self, field) is not None:
          raise ValueError(
            f"visibility.{field} is given, and query_positions, too; give one of them."
          )

  @property
  def order(self) -> "Visibility":
    """What is static of it."""
    arrays = ("query_ids", "key_ids", "first_query", "query_positions", "penalties")
    return dataclasses.replace(self, **dict.fromkeys(arrays))

  def in_order(
    self, queries: Int[Array, "*shape"], keys: Int[Array, "*shape"]
  ) -> Bool[Array, "*shape"] | None:
    """Whether order allows pairs of positions; None where it allows all."""
    if not self.causal:
      return None
    seen = keys <= queries
    if self.window is not None:
      seen = seen & (queries - keys < self.window)
    return seen | (keys < self.prefix) if self.prefix else seen

  def dense(self, queries: int, keys: int) -> Bool[Array, "#batch 1 #queries #keys"] | None:
    """The rule in full; None where every query reads every key."""
    allowed = self.in_order(self._positions(queries)[:, :, None], jnp.arange(keys)[None, None])
    allowed = None if allowed is None else allowed[:, None]
    ids = self.numbers(queries)
    if ids is None:
      return allowed
    numbered = same_number(ids[0][:, None, :, None], ids[1][:, None, None, :])
    return numbered if allowed is None else numbered & allowed

  def penalty(self, queries: int, keys: int) -> Float[Array, "1 heads queries keys"] | None:
    """What logits are less by; None for nothing."""
    if self.penalties is None:
      return None
    distance = jnp.abs(self._positions(queries)[:, :, None] - jnp.arange(keys)[None, None])
    return self.penalties[None, :, None, None] * distance[:, None].astype(jnp.float32)

  def spans(
    self, queries: int, keys: int, block: tuple[int, int]
  ) -> tuple[Int[Array, "#batch query_blocks 4"], Int[Array, "#batch key_blocks 4"]]:
    """Which blocks a kernel has to visit, and among them full ones, in which every pair is visible.

    Of each kind the first and one past the last: [first, first full, past the full, past]. Blocks
    in which nothing is visible are left out at both ends, not in between; full blocks are the first
    that are next to each other. Numbers of a block are known by their least and largest alone, so
    that there may be more to visit, and fewer full, than need be.

    Args:
      queries: how many.
      keys: how many.
      block: queries and keys of a block.

    Returns:
      Blocks of keys for every block of queries; blocks of queries for every block of keys.
    """
    rows, columns = -(-queries // block[0]), -(-keys // block[1])
    first_q, last_q = _extremes(self._positions(queries), rows, block[0])
    first_k = jnp.arange(columns) * block[1]
    last_k = jnp.minimum(first_k + block[1], keys) - 1
    met = jnp.ones((1, rows, columns), bool)
    # A block that ends beyond the keys has pairs that are none.
    full = jnp.broadcast_to(first_k + block[1] <= keys, met.shape)
    if self.causal:
      first, last = first_q[:, :, None], last_q[:, :, None]
      seen, all_seen = first_k[None, None] <= last, last_k[None, None] <= first
      if self.window is not None:
        seen = seen & (first - last_k[None, None] < self.window)
        all_seen = all_seen & (last - first_k[None, None] < self.window)
      met = met & (seen | (first_k < self.prefix)[None, None])
      full = full & (all_seen | (last_k < self.prefix)[None, None])
    ids = self.numbers(queries)
    if ids is not None:
      low_q, high_q = _extremes(ids[0], rows, block[0])
      low_k, high_k = _extremes(ids[1], columns, block[1])
      shared = (low_k <= SHARED) & (high_k >= SHARED)
      overlap = (low_q[:, :, None] <= high_k[:, None]) & (low_k[:, None] <= high_q[:, :, None])
      met = met & (overlap | shared[:, None]) & (high_k > HIDDEN)[:, None]
      one = (low_q == high_q)[:, :, None] & (low_k == high_k)[:, None]
      same = one & (low_q[:, :, None] == low_k[:, None])
      all_shared = (low_k == SHARED) & (high_k == SHARED)
      full = full & (same | all_shared[:, None])
    return _span(met, full), _span(met.swapaxes(1, 2), full.swapaxes(1, 2))

  def _positions(self, queries: int) -> Int[Array, "#batch queries"]:
    """Those of all queries; or of those that a device has."""
    if self.query_positions is not None:
      return self.query_positions
    positions = jnp.arange(queries)[None]
    return positions if self.first_query is None else positions + self.first_query[None]

  def numbers(
    self, queries: int
  ) -> tuple[Int[Array, "#batch queries"], Int[Array, "#batch keys"]] | None:
    """Numbers of queries and of keys; None where all keys may be read."""
    if self.key_ids is None:
      return None
    own = jnp.zeros((1, queries), jnp.int32) if self.query_ids is None else self.query_ids
    return own, self.key_ids


def same_number(queries: Int[Array, "*shape"], keys: Int[Array, "*shape"]) -> Bool[Array, "*shape"]:
  """Whether numbers allow pairs."""
  return (queries == keys) | (keys == SHARED)


def _extremes(ids: jax.Array, blocks: int, size: int) -> tuple[jax.Array, jax.Array]:
  """Least and largest number, or position, of every block, [batch, blocks]."""
  padded = jnp.pad(ids, ((0, 0), (0, blocks * size - ids.shape[1])), mode="edge")
  split = padded.reshape(len(ids), blocks, size)
  return jnp.min(split, axis=-1), jnp.max(split, axis=-1)


def _span(
  met: Bool[Array, "batch blocks others"], full: Bool[Array, "#batch blocks others"]
) -> Int[Array, "batch blocks 4"]:
  """See `Visibility.spans`; all are 0 where nothing is met."""
  others = met.shape[-1]
  first = jnp.argmax(met, axis=-1)
  past = others - jnp.argmax(met[..., ::-1], axis=-1)
  full = met & full
  some_full = jnp.any(full, axis=-1)
  begin = jnp.where(some_full, jnp.argmax(full, axis=-1), first)
  ended = ~full & (jnp.arange(others)[None, None] >= begin[..., None])
  end = jnp.where(jnp.any(ended, axis=-1), jnp.argmax(ended, axis=-1), others)
  end = jnp.where(some_full, end, first)
  some = jnp.any(met, axis=-1)
  spans = jnp.stack([first, begin, end, past], axis=-1)
  return jnp.where(some[..., None], spans, 0).astype(jnp.int32)
