"""What the kernels of `tpu` read and write: arrays as they have them, and their blocks."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from compmod_jax.kernels.attention.distances import windows
from compmod_jax.kernels.attention.dropout import ProbabilityDropout
from compmod_jax.kernels.attention.layout import (
  KEY,
  LANES,
  QUERY,
  VALUE,
  Layout,
  Projection,
)
from compmod_jax.kernels.attention.rotation import Rotation
from compmod_jax.kernels.attention.visibility import HIDDEN, Visibility

ROWS = 1024
"""Rows of a program that takes several examples, at most."""
_LEAST = 16
"""Of a block's rows: they are a multiple of it."""
A = TypeVar("A")
Index = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Static:
  """What a kernel is made for.

  Attributes:
    layout: sizes, and where columns begin; in tiles.
    block: queries and keys of a block.
    order: the visibility, of which the numbers are operands.
    scale: what logits are multiplied by.
    first_key: position of the first key.
    all_keys: of an example, of which `layout` may have some.
    half: columns between those of a head that a rotation pairs.
  """

  layout: Layout
  block: tuple[int, int]
  order: Visibility
  scale: float
  first_key: int
  all_keys: int
  half: int

  @classmethod
  def of(
    cls, layout: Layout, side: int, visibility: Visibility, whole: Layout, first_key: int = 0
  ) -> "Static":
    """Of a layout in tiles, made of a `whole` one whose heads were not filled up yet."""
    queries, keys = (min(side, t + -t % _LEAST) for t in (layout.queries, layout.keys))
    scale = 1 / math.sqrt(whole.head_dim)
    half = whole.head_dim // 2
    return cls(layout, (queries, keys), visibility.order, scale, first_key, whole.keys, half)

  @property
  def share(self) -> int:
    """Heads of a tile."""
    return LANES // self.layout.head_dim

  @property
  def tiles(self) -> int:
    """Tiles of all heads."""
    return self.layout.heads // self.share

  def size(self, which: int) -> int:
    """Rows of a block of queries, keys or values."""
    return self.block[min(which, KEY)]

  def blocks(self, which: int) -> int:
    """How many there are of an example."""
    return pl.cdiv(self.layout.times(which), self.size(which))

  @property
  def several(self) -> bool:
    """Whether an example has several pairs of blocks."""
    return self.blocks(QUERY) * self.blocks(KEY) > 1

  def diagonal(self, query: jax.Array, key: jax.Array) -> jax.Array:
    """Number of the one that a block of queries and a block of keys are on."""
    return key - query + (self.blocks(QUERY) - 1)

  @property
  def examples(self) -> int:
    """Examples of a program."""
    most = 1 if self.several else max(1, ROWS // max(self.block))
    return max(n for n in range(1, most + 1) if self.layout.batch % n == 0)

  def column(self, which: int) -> int:
    """Number of the first tile of queries, keys or values in their matrix."""
    return self.layout.columns[which][1] // LANES


class Operands(NamedTuple, Generic[A]):
  """What kernels read, as arrays, their blocks, or references to these.

  Attributes:
    rows: matrices of queries, keys and values [batch, time, columns].
    biases: what is added to each [1, columns], float32; none for nothing.
    weights: of heads [batch, tiles, heads, queries], float32; none for 1.
    ids: numbers of queries and of keys [batch, 1, time], where there are any.
    first_query: see `Visibility` [1, 1].
    query_positions: see `Visibility` [batch, 1, queries].
    penalties: see `Visibility` [tiles, heads, 128], the same in all columns.
    numbers: see `windows` [tiles, diagonals, heads, columns], whole tiles of columns; none for
      nothing.
    dropout: which probabilities become 0; its arrays are in scalar memory.
    rotations: of queries and of keys [1, time, 128], the same in all heads of a tile.
    projection: W_O [columns, embed] and its bias [1, embed], float32; none where heads are the
      result.
  """

  rows: tuple[A, ...]
  biases: tuple[A, ...] | None
  weights: A | None
  ids: tuple[A, A] | None
  first_query: A | None
  query_positions: A | None
  penalties: A | None
  numbers: A | None
  dropout: ProbabilityDropout | None
  rotations: tuple[tuple[A, A], tuple[A, A]] | None
  projection: tuple[A, A] | None = None


class Reverse(NamedTuple, Generic[A]):
  """What the reverse pass reads besides.

  Attributes:
    outputs: the heads as they left [batch, queries, columns]; none with a projection.
    slopes: the gradient with respect to them, or to what the projection made of them.
    logsumexp: logarithm of the sum of a row [batch, tiles, heads, queries].
  """

  outputs: A | None
  slopes: A
  logsumexp: A


class Place(NamedTuple):
  """Of a program: numbers of its examples, blocks and tile, known when it runs."""

  example: Any
  query: Any
  tile: Any
  key: Any


def block_pair(static: Static, step: Any) -> tuple[Any, Any]:
  """Blocks of queries and keys of a step of the reverse pass; the last ones when all are done."""
  keys = static.blocks(KEY)
  step = jnp.minimum(step, static.blocks(QUERY) * keys - 1)
  return lax.div(step, keys), lax.rem(step, keys)


def key_span(static: Static, spans: Sequence[jax.Ref], example: Any, query: Any) -> tuple[Any, Any]:
  """Blocks of keys that a block of queries visits: the first, and one past the last."""
  at = 2 * (example * static.blocks(QUERY) + query)
  return spans[0][at], spans[0][at + 1]


def visited(
  static: Static, spans: Sequence[jax.Ref], example: Any, query: Any, key: Any
) -> jax.Array:
  """The block of keys that is in vector memory: where one is not visited, its neighbour stays."""
  if not static.several:
    return key
  first, past = key_span(static, spans, example, query)
  return jnp.clip(key, first, jnp.maximum(past - 1, first))


def operands(
  static: Static,
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  visibility: Visibility,
  *,
  numbers: Float[Array, "heads distances"] | None,
  dropout: ProbabilityDropout | None,
  rotation: Rotation | None,
  projection: Projection | None,
) -> tuple[list[jax.Array], Operands[jax.Array]]:
  """Spans of keys for every example, where it has several blocks; and the operands.

  Args:
    static: what the kernel is made for.
    matrices: in tiles.
    bias: of them.
    weights: of heads [batch * queries, heads].
    visibility: of all keys.
    numbers: added to logits by distance.
    dropout: of probabilities.
    rotation: of queries and keys.
    projection: that is inside.
  """
  layout = static.layout
  rows = tuple(
    matrices[number].reshape(layout.batch, layout.times(which), -1)
    for which, (number, _, _) in enumerate(layout.columns)
  )
  spans, ids = [], visibility.numbers(layout.queries)
  if static.several:
    found, _ = visibility.spans(layout.queries, static.all_keys, static.block)
    first = static.first_key // static.size(KEY)
    found = jnp.clip(found[..., ::3] - first, 0, static.blocks(KEY))
    spans = [jnp.broadcast_to(found, (layout.batch, *found.shape[1:])).reshape(-1)]
  if ids is not None:
    own = lax.slice_in_dim(ids[1], static.first_key, static.first_key + layout.keys, axis=1)
    ids = _filled(ids[0], static, QUERY, 0), _filled(own, static, KEY, HIDDEN)
  first, positions = visibility.first_query, visibility.query_positions
  first = None if first is None else first.reshape(1, 1)
  positions = None if positions is None else _filled(positions, static, QUERY, 0)
  penalties = visibility.penalties
  if penalties is not None:
    penalties = jnp.pad(penalties, (0, layout.heads - len(penalties)))
    penalties = jnp.broadcast_to(penalties[:, None], (layout.heads, LANES))
    penalties = penalties.reshape(static.tiles, static.share, LANES)
  given = Operands(
    rows=rows,
    biases=None if bias is None else (bias,) * 3,
    weights=_from_heads(weights, static),
    ids=ids,
    first_query=first,
    query_positions=positions,
    penalties=penalties,
    numbers=None if numbers is None else distance_lines(numbers, static),
    dropout=_filled_up(dropout, static),
    rotations=_rotations(rotation, static),
    projection=_as_rows(projection),
  )
  return spans, given


def _filled_up(dropout: ProbabilityDropout | None, static: Static) -> ProbabilityDropout | None:
  """Dropout with numbers for the heads that fill up tiles, too."""
  if dropout is None:
    return None
  heads = jnp.pad(dropout.heads, (0, static.layout.heads - len(dropout.heads)))
  return dataclasses.replace(dropout, heads=heads)


def _rotations(
  rotation: Rotation | None, static: Static
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None:
  """Those of queries and of keys as kernels have them; columns that fill up heads stay."""
  if rotation is None:
    return None
  more = static.layout.head_dim - rotation.cos.shape[-1]

  def whole(table: jax.Array, filling: float) -> jax.Array:
    filled = jnp.pad(table, ((0, 0), (0, 0), (0, more)), constant_values=filling)
    return jnp.tile(filled, static.share)

  cos, sin = whole(rotation.cos, 1.0), whole(rotation.sin, 0.0)
  own = slice(static.first_key, static.first_key + static.layout.keys)
  return (cos, sin), (cos[:, own], sin[:, own])


def distance_lines(numbers: Float[Array, "heads distances"], static: Static) -> jax.Array:
  """Numbers of distances as kernels have them; see `Operands`."""
  layout = static.layout
  lines = windows(numbers, layout.queries, static.blocks(QUERY), static.block)
  more = (layout.heads - len(numbers), -lines.shape[2] % LANES)
  lines = jnp.pad(lines, ((0, more[0]), (0, 0), (0, more[1])))
  lines = lines.reshape(static.tiles, static.share, *lines.shape[1:])
  return lines.swapaxes(1, 2)


def _filled(ids: jax.Array, static: Static, which: int, value: int) -> jax.Array:
  """Numbers [batch, 1, time] for all rows of all blocks."""
  more = static.blocks(which) * static.size(which) - ids.shape[1]
  ids = jnp.pad(ids, ((0, 0), (0, more)), constant_values=value)
  return jnp.broadcast_to(ids, (static.layout.batch, ids.shape[1]))[:, None]


def operand_specs(
  static: Static, given: Operands[jax.Array], place: Callable[..., Place]
) -> Operands[pl.BlockSpec]:
  """The blocks of operands."""
  count = static.examples

  def rows(which: int) -> pl.BlockSpec:
    def index(*ids: Any) -> Index:
      at = place(*ids)
      return at.example, at.query if which == QUERY else at.key, static.column(which) + at.tile

    return pl.BlockSpec((count, static.size(which), LANES), index)

  def bias(which: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, LANES), lambda *ids: (0, static.column(which) + place(*ids).tile))

  def numbers(which: int) -> pl.BlockSpec:
    def index(*ids: Any) -> Index:
      at = place(*ids)
      return at.example, 0, at.query if which == QUERY else at.key

    return pl.BlockSpec((count, 1, static.size(which)), index)

  def of_diagonal(array: jax.Array) -> pl.BlockSpec:
    def index(*ids: Any) -> Index:
      at = place(*ids)
      return at.tile, static.diagonal(at.query, at.key), 0, 0

    return pl.BlockSpec((None, None, *array.shape[2:]), index)

  def rotation(which: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    def index(*ids: Any) -> Index:
      at = place(*ids)
      return 0, at.query if which == QUERY else at.key, 0

    spec = pl.BlockSpec((None, static.size(which), LANES), index)
    return spec, spec

  penalties = pl.BlockSpec((None, static.share, LANES), lambda *ids: (place(*ids).tile, 0, 0))
  kinds = (QUERY, KEY, VALUE)
  return Operands(
    tuple(map(rows, kinds)),
    None if given.biases is None else tuple(map(bias, kinds)),
    None if given.weights is None else lines_spec(static, place),
    None if given.ids is None else (numbers(QUERY), numbers(KEY)),
    None if given.first_query is None else whole_spec(given.first_query.shape),
    None if given.query_positions is None else numbers(QUERY),
    None if given.penalties is None else penalties,
    None if given.numbers is None else of_diagonal(given.numbers),
    jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.SMEM), given.dropout),
    None if given.rotations is None else (rotation(QUERY), rotation(KEY)),
    None if given.projection is None else _projection_specs(given.projection, place),
  )


def _projection_specs(
  projection: tuple[jax.Array, jax.Array], place: Callable[..., Place]
) -> tuple[pl.BlockSpec, pl.BlockSpec]:
  """The rows of W_O that belong to a tile, and its bias."""
  kernel, bias = projection
  rows = pl.BlockSpec((LANES, kernel.shape[1]), lambda *ids: (place(*ids).tile, 0))
  return rows, whole_spec(bias.shape)


def whole_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
  """An array that every program has in full."""
  return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def results_spec(
  static: Static, projection: Projection | None, place: Callable[..., Place]
) -> pl.BlockSpec:
  """The block of heads side by side, or of what the projection makes of all of them."""

  def index(*ids: Any) -> Index:
    at = place(*ids)
    return at.example, at.query, at.tile if projection is None else 0

  columns = LANES if projection is None else projection[0].shape[1]
  return pl.BlockSpec((static.examples, static.size(QUERY), columns), index)


def lines_spec(static: Static, place: Callable[..., Place]) -> pl.BlockSpec:
  """The block of numbers for every head and position."""

  def index(*ids: Any) -> Index:
    at = place(*ids)
    return at.example, at.tile, 0, at.query

  return pl.BlockSpec((static.examples, None, static.share, static.size(QUERY)), index)


def lines_shape(static: Static) -> tuple[int, ...]:
  """Of numbers for every head and position as kernels have them."""
  rows = static.blocks(QUERY) * static.size(QUERY)
  return static.layout.batch, static.tiles, static.share, rows


def as_lines(heads: jax.Array, static: Static, value: float = 0.0) -> jax.Array:
  """Numbers [batch, heads, queries] as kernels have them, `value` where there are none."""
  shape = lines_shape(static)
  more = (shape[1] * shape[2] - heads.shape[1], shape[3] - heads.shape[2])
  padded = jnp.pad(heads, ((0, 0), (0, more[0]), (0, more[1])), constant_values=value)
  return padded.reshape(shape)


def _from_heads(weights: jax.Array | None, static: Static) -> jax.Array | None:
  """Weights [batch * queries, heads] as kernels have them."""
  if weights is None:
    return None
  layout = static.layout
  by_row = weights.reshape(layout.batch, layout.queries, weights.shape[1])
  return as_lines(by_row.swapaxes(1, 2), static)


def to_heads(lines: jax.Array, layout: Layout) -> jax.Array:
  """Numbers [batch, heads, queries] from those of a kernel."""
  joined = lines.reshape(layout.batch, -1, lines.shape[3])
  return joined[:, : layout.heads, : layout.queries]


def _as_rows(projection: Projection | None) -> Projection | None:
  """A projection whose bias is a row."""
  if projection is None:
    return None
  kernel, bias = projection
  return kernel, bias.astype(jnp.float32)[None]


def with_bias(rows: jax.Array, bias: jax.Array) -> jax.Array:
  """Rows with a bias, added in float32, of their type."""
  return (rows.astype(jnp.float32) + bias).astype(rows.dtype)
