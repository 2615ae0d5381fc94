"""Sizes of an attention, and where queries, keys and values lie in matrices."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

QUERY, KEY, VALUE = range(3)
Heads = Float[Array, "batch time heads head_dim"]


@dataclasses.dataclass(frozen=True)
class Layout:
  """Queries, keys and values as columns of matrices [batch * time, columns].

  Attributes:
    batch: examples.
    queries: positions of an example that ask.
    keys: positions of an example that are read.
    heads: heads that ask.
    key_heads: heads that are read, each by `heads / key_heads` of those that ask.
    head_dim: columns of a head.
    columns: of queries, of keys and of values: number of their matrix, first column, and columns
      from one head to the next.
  """

  batch: int
  queries: int
  keys: int
  heads: int
  key_heads: int
  head_dim: int
  columns: tuple[tuple[int, int, int], ...]

  @classmethod
  def apart(cls, query: Heads, key: Heads) -> "Layout":
    """Of queries, keys and values that are matrices of their own."""
    (batch, queries, heads, head_dim), (keys, key_heads) = query.shape, key.shape[1:3]
    columns = tuple((number, 0, head_dim) for number in range(3))
    return cls(batch, queries, keys, heads, key_heads, head_dim, columns)

  @classmethod
  def packed(cls, batch: int, time: int, heads: int, head_dim: int) -> "Layout":
    """Of one matrix, in which each head has its queries, its keys and its values side by side."""
    columns = tuple((0, number * head_dim, 3 * head_dim) for number in range(3))
    return cls(batch, time, time, heads, heads, head_dim, columns)

  @property
  def group(self) -> int:
    """Heads that read the same keys."""
    return self.heads // self.key_heads

  @property
  def pairs(self) -> int:
    """Pairs of a query and a key in all heads, whether one reads the other or not."""
    return self.batch * self.heads * self.queries * self.keys

  def times(self, which: int) -> int:
    """Positions of queries, keys or values."""
    return self.queries if which == QUERY else self.keys

  def heads_of(self, which: int) -> int:
    """Heads of queries, keys or values."""
    return self.heads if which == QUERY else self.key_heads

  def place(
    self, which: int, example: jax.Array, start: jax.Array, head: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Row and column of its matrix where a block begins."""
    _, first, step = self.columns[which]
    return example * self.times(which) + start, first + head * step

  def split(self, matrices: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values [batch, time, heads, head_dim]."""

    def one(which: int) -> jax.Array:
      matrix, first, step = self.columns[which]
      heads = self.heads_of(which)
      # The last head ends where its own columns do, not where another head would begin.
      columns = matrices[matrix][:, first : first + (heads - 1) * step + self.head_dim]
      padded = jnp.pad(columns, ((0, 0), (0, step - self.head_dim)))
      rows = padded.reshape(self.batch, self.times(which), heads, step)
      return rows[..., : self.head_dim]

    return one(QUERY), one(KEY), one(VALUE)
