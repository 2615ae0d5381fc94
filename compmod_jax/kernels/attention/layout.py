"""Sizes of an attention, where queries, keys and values lie in matrices, and their gradients."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compmod_jax.kernels.attention.distances import DistanceBias

QUERY, KEY, VALUE = range(3)
LANES = 128
"""Columns of a TPU's tiles."""
NARROWEST = 32
"""Columns of a head there at least: kernels take the heads of a tile one by one."""
Projection = tuple[Float[Array, "features embed"], Float[Array, " embed"]]
"""W_O, features being all heads side by side, and its bias."""
Heads = Float[Array, "batch time heads head_dim"]


class Gradients(NamedTuple):
  """What the reverse pass of a kernel gives; none of what there was none of.

  Attributes:
    matrices: of matrices of queries, keys and values.
    bias: of what is added to their columns [1, columns], float32.
    delta: of weights of heads, times the weights [batch * queries, heads], float32.
    distance_bias: of numbers of distances.
    projection: of W_O and its bias.
  """

  matrices: tuple[jax.Array, ...]
  bias: jax.Array | None
  delta: jax.Array
  distance_bias: DistanceBias | None = None
  projection: Projection | None = None


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
  def paired(cls, query: Heads, key_value: Float[Array, "batch keys heads 2 head_dim"]) -> "Layout":
    """Of queries, and of keys and values that lie head by head in one matrix."""
    apart, width = cls.apart(query, key_value[..., 0, :]), query.shape[-1]
    columns = (0, 0, width), (1, 0, 2 * width), (1, width, 2 * width)
    return dataclasses.replace(apart, columns=columns)

  @classmethod
  def packed(
    cls, batch: int, time: int, heads: int, head_dim: int, by_kind: bool = False
  ) -> "Layout":
    """Of one matrix, in which each head has its queries, its keys and its values side by side.

    By kind, the queries of all heads come first, then all keys, then all values.
    """
    first, step = (heads * head_dim, head_dim) if by_kind else (head_dim, 3 * head_dim)
    columns = tuple((0, number * first, step) for number in range(3))
    return cls(batch, time, time, heads, heads, head_dim, columns)

  @property
  def group(self) -> int:
    """Heads that read the same keys."""
    return self.heads // self.key_heads

  @property
  def pairs(self) -> int:
    """Pairs of a query and a key in all heads, whether one reads the other or not."""
    return self.batch * self.heads * self.queries * self.keys

  @property
  def in_tiles(self) -> bool:
    """Whether every tile of a TPU holds whole heads of one kind, and no other columns."""
    whole = self.head_dim >= NARROWEST and LANES % self.head_dim == 0
    whole = whole and self.heads * self.head_dim % LANES == 0
    kinds = all(first % LANES == 0 and step == self.head_dim for _, first, step in self.columns)
    return whole and kinds and self.group == 1

  @property
  def tiled(self) -> "Layout":
    """The same queries, keys and values, each a matrix of its own in such tiles.

    Heads are as wide as the next power of two, from 32 on, more of them fill the last tile, and
    what several heads read each has for itself.
    """
    head_dim = max(NARROWEST, 1 << (self.head_dim - 1).bit_length())
    heads = self.heads * head_dim + -self.heads * head_dim % LANES
    heads, columns = heads // head_dim, tuple((number, 0, head_dim) for number in range(3))
    return dataclasses.replace(
      self, heads=heads, key_heads=heads, head_dim=head_dim, columns=columns
    )

  def to_tiles(self, matrices: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Matrices of this layout as those of `tiled`, filled up with zeros."""
    query, key, value = self.split(matrices)
    key, value = (jnp.repeat(one, self.group, axis=2) for one in (key, value))
    return tuple(self.fill(one) for one in (query, key, value))

  def fill(self, heads: Heads) -> jax.Array:
    """A matrix of as many heads as `tiled` has, each as wide, from heads that ask."""
    tiled, (_, _, count, width) = self.tiled, heads.shape
    more = ((0, 0), (0, 0), (0, tiled.heads - count), (0, tiled.head_dim - width))
    padded = jnp.pad(heads, more)
    return padded.reshape(-1, tiled.heads * tiled.head_dim)

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
