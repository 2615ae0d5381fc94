"""Flash attention whose heads have weights, for TPUs.

Queries, keys and values are tiles of 128 columns, each of whole heads of one kind: of one matrix
[batch * time, columns], where one product made them by kind, or of three. Heads that share a tile
are kept apart by zeros in the columns of the others: a matrix unit multiplies 128 columns anyway.
What lies otherwise is brought into such tiles first, which costs copies (`Layout.to_tiles`).

A program takes a tile of heads: several examples where these are short, or else a block of queries
and a block of keys of one. What lies beyond an array has any value and is replaced by zeros.

A number for every head and position, such as a weight, lies in memory as [batch, tiles, heads of a
tile, time], and in a kernel as [time, 128], the same in all columns of a head.

What is added to logits by distance is one line of numbers for every diagonal of blocks of pairs.
In a kernel a block is made of its line, and the gradient of a line of that of its blocks, by
rolling rows against each other.

The output projection may be inside. Where a program has all keys of its examples, heads are then
written nowhere, and the reverse pass forms them again; else they are kept for it.

Source: Dao 2023 (FlashAttention-2) for blocks and the saved logsumexp; Kolios 2023, equation 5.3,
for the weights.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.kernels.attention.definition import FAR
from compmod_jax.kernels.attention.distances import DistanceBias, windows
from compmod_jax.kernels.attention.dropout import ProbabilityDropout
from compmod_jax.kernels.attention.layout import (
  KEY,
  LANES,
  QUERY,
  VALUE,
  Gradients,
  Layout,
  Projection,
)
from compmod_jax.kernels.attention.rotation import Rotation
from compmod_jax.kernels.attention.visibility import HIDDEN, Visibility, same_number
from compmod_jax.kernels.routing.blocks import dot
from compmod_jax.kernels.routing.shapes import ROOM

_ROWS = 1024
"""Rows of a program that takes several examples, at most."""
_LEAST = 16
"""Of a block's rows: they are a multiple of it."""
A = TypeVar("A")
_Index = tuple[Any, ...]


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
    most = 1 if self.several else max(1, _ROWS // max(self.block))
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


def takes_projection(layout: Layout, embed: int, block: tuple[int, int]) -> bool:
  """Whether the output projection may be inside.

  Args:
    layout: sizes, and where columns begin.
    embed: columns of the projection.
    block: as in `forward`.
  """
  # A matrix, its float32 gradient, and blocks of rows of them and of their sums.
  needed = embed * (layout.heads * layout.head_dim * 8 + 2 * _ROWS * 12)
  fits = layout.keys <= block[1] and embed % LANES == 0 and needed <= ROOM
  return layout.in_tiles and fits


def keeps_heads(layout: Layout, block: tuple[int, int]) -> bool:
  """Whether heads are kept for the reverse pass where the projection is inside."""
  return max(layout.queries, layout.keys) > block[0]


def saved_shapes(
  layout: Layout,
  matrix: jax.Array,
  *,
  bias: bool,
  projection: bool,
  block: tuple[int, int],
) -> Any:
  """Shapes of what `forward` leaves for the reverse pass; see there."""
  del bias
  lines = (layout.batch * layout.heads, layout.queries)
  logsumexp = jax.ShapeDtypeStruct(lines, jnp.float32)
  if not projection or not keeps_heads(layout, block):
    return logsumexp
  heads = (layout.batch, layout.queries, layout.heads * layout.head_dim)
  return logsumexp, jax.ShapeDtypeStruct(heads, matrix.dtype)


def matrices_left(matrices: tuple[jax.Array, ...], saved: Any) -> tuple[jax.Array, ...]:
  """The matrices as the forward pass left them: as they were."""
  del saved
  return matrices


def forward(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  visibility: Visibility,
  *,
  layout: Layout,
  block: tuple[int, int],
  interpret: bool | pltpu.InterpretParams,
  save: bool,
  distance_bias: DistanceBias | None = None,
  dropout: ProbabilityDropout | None = None,
  rotation: Rotation | None = None,
  projection: Projection | None = None,
) -> tuple[jax.Array, jax.Array | tuple[jax.Array, jax.Array] | None]:
  """Heads side by side [batch * queries, heads * head_dim] and, to `save`, the logsumexp.

  With a projection its result, in place of the heads [batch * queries, embed]; these are then saved
  beside the logsumexp where `keeps_heads`.

  Args:
    matrices: that hold queries, keys and values [batch * time, columns].
    bias: what is added to the columns of a matrix that holds all three [1, columns], float32.
    weights: of heads [batch * queries, heads], float32.
    visibility: which keys a query may read.
    layout: sizes, and where columns begin.
    block: queries and keys of a block, a multiple of 128; keys of a reverse pass.
    interpret: run without the hardware.
    save: whether a reverse pass follows.
    distance_bias: added to the logits.
    dropout: which probabilities become 0; none for no dropout.
    rotation: of queries and keys, of all examples alike; none for as they are.
    projection: where `takes_projection`.
  """
  matrices, bias, tiled = _to_tiles(matrices, bias, layout)
  static = Static.of(tiled, block[0], visibility, layout)
  numbers = None if distance_bias is None else _windows(distance_bias.numbers, static)
  own = _from_heads(weights, static)
  spans, given = _operands(static, matrices, bias, own, numbers, visibility)
  given = given._replace(
    dropout=_filled_up(dropout, static),
    rotations=_rotations(rotation, static),
    projection=_as_rows(projection),
  )
  rows, columns = given.rows[QUERY], static.tiles * LANES
  flops = 4 * layout.pairs * layout.head_dim
  scratch = [pltpu.VMEM((static.size(QUERY), LANES), jnp.float32)] * (3 if static.several else 0)
  if projection is not None:
    inner, columns = projection[0].shape
    flops += 2 * layout.batch * layout.queries * inner * columns
    size = static.examples, static.size(QUERY), columns
    scratch.append(pltpu.VMEM(size, jnp.float32))
  outputs = [jax.ShapeDtypeStruct((*rows.shape[:2], columns), rows.dtype)]
  outputs += [jax.ShapeDtypeStruct(_lines_shape(static), jnp.float32)] * save
  kept = save and projection is not None and keeps_heads(layout, block)
  outputs += [jax.ShapeDtypeStruct((*rows.shape[:2], static.tiles * LANES), rows.dtype)] * kept

  def place(example: Any, query: Any, tile: Any, key: Any, *spans: jax.Ref) -> _Place:
    return _Place(example, query, tile, _visited(static, spans, example, query, key))

  out_specs = [_results_spec(static, given.projection, place), _lines_spec(static, place)]
  out_specs.append(_results_spec(static, None, place))
  heads, *saved = _call(
    functools.partial(_forward, static=static),
    (layout.batch // static.examples, static.blocks(QUERY), static.tiles, static.blocks(KEY)),
    spans,
    [given],
    [_specs(static, given, place)],
    outputs,
    out_specs[: len(outputs)],
    scratch=scratch,
    ordered=1 if projection is None else 2,
    flops=flops,
    interpret=interpret,
  )
  made = heads.reshape(-1, heads.shape[2]) if projection else _from_tiles(heads, layout)
  if not save:
    return made, None
  logsumexp = _to_heads(saved[0], layout).reshape(-1, layout.queries)
  return made, (logsumexp, saved[1]) if kept else logsumexp


def backward(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  visibility: Visibility,
  outputs: jax.Array | None,
  logsumexp: jax.Array | tuple[jax.Array, jax.Array],
  slopes: jax.Array,
  *,
  layout: Layout,
  block: tuple[int, int],
  interpret: bool | pltpu.InterpretParams,
  distance_bias: DistanceBias | None = None,
  dropout: ProbabilityDropout | None = None,
  rotation: Rotation | None = None,
  projection: Projection | None = None,
) -> Gradients:
  """See `gpu.backward`; the same formulas.

  One pass over all pairs of blocks forms all gradients: those of keys and values are summed in
  vector memory, of `block[1]` keys at once; where there are more, those of queries are sums of
  several such passes.
  """
  if isinstance(logsumexp, tuple):
    logsumexp, outputs = logsumexp
  lines = logsumexp.reshape(layout.batch, layout.heads, layout.queries)
  run = functools.partial(
    _backward_pass,
    weights=weights,
    outputs=outputs,
    logsumexp=lines,
    slopes=slopes,
    layout=layout,
    side=block[0],
    interpret=interpret,
    dropout=dropout,
    rotation=rotation,
    projection=projection,
  )
  numbers = None if distance_bias is None else distance_bias.numbers
  if layout.in_tiles and layout.keys <= block[1]:
    return run(matrices, bias, numbers, visibility, 0, matrices[0].dtype)

  def arrange(matrices: tuple[jax.Array, ...], bias: jax.Array | None) -> tuple[jax.Array, ...]:
    return layout.to_tiles(matrices if bias is None else (_shifted(matrices[0], bias),))

  (query, *read), back = jax.vjp(arrange, matrices, bias)
  read = [one.reshape(layout.batch, layout.keys, -1) for one in read]
  dtype = query.dtype if layout.keys <= block[1] else jnp.float32

  def of_keys(first: int) -> Gradients:
    part = slice(first, min(first + block[1], layout.keys))
    own = [one[:, part].reshape(-1, one.shape[2]) for one in read]
    # The distances of all queries from these keys.
    near = None if numbers is None else numbers[:, first : part.stop + layout.queries - 1]
    return run((query, *own), None, near, visibility, first, dtype)

  starts = range(0, layout.keys, block[1])
  found = [of_keys(first) for first in starts]
  d_query = functools.reduce(jnp.add, [one.matrices[QUERY] for one in found])
  joined = [
    jnp.concatenate(
      [one.matrices[which].reshape(layout.batch, -1, query.shape[1]) for one in found], axis=1
    ).reshape(layout.batch * layout.keys, -1)
    for which in (KEY, VALUE)
  ]
  gradients, d_bias = back((d_query.astype(query.dtype), *joined))
  made = Gradients(gradients, d_bias, found[0].delta)
  if numbers is None:
    return made
  total = jnp.zeros(numbers.shape, jnp.float32)
  for first, one in zip(starts, found, strict=True):
    assert one.distance_bias is not None
    near = one.distance_bias.numbers
    total = total.at[:, first : first + near.shape[1]].add(near)
  return made._replace(distance_bias=DistanceBias(total))


def _backward_pass(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  numbers: Float[Array, "heads distances"] | None,
  visibility: Visibility,
  first_key: int,
  dtype: DTypeLike,
  *,
  weights: jax.Array | None,
  outputs: jax.Array | None,
  logsumexp: jax.Array,
  slopes: jax.Array,
  layout: Layout,
  side: int,
  interpret: bool | pltpu.InterpretParams,
  dropout: ProbabilityDropout | None,
  rotation: Rotation | None,
  projection: Projection | None,
) -> Gradients:
  """Gradients of matrices in tiles, which hold the keys from `first_key` on; `dtype` of queries.

  And of the numbers of distances from these keys.
  """
  tiled = layout if layout.in_tiles else layout.tiled
  if len(matrices) > 1:
    tiled = dataclasses.replace(layout.tiled, keys=matrices[KEY].shape[0] // layout.batch)
  static = Static.of(tiled, side, visibility, layout, first_key)
  own = _from_heads(weights, static)
  near = None if numbers is None else _windows(numbers, static)
  spans, given = _operands(static, matrices, bias, own, near, visibility)
  given = given._replace(
    dropout=_filled_up(dropout, static),
    rotations=_rotations(rotation, static),
    projection=_as_rows(projection),
  )
  lines = _as_lines(logsumexp, static, -FAR)
  heads = None if outputs is None else _in_tiles(outputs, layout)
  by_row = (layout.batch, layout.queries, -1)
  errors = _in_tiles(slopes, layout) if projection is None else slopes.reshape(by_row)
  reverse = Reverse(heads, errors, lines)
  pairs, keys = static.blocks(QUERY) * static.blocks(KEY), static.blocks(KEY)

  def place(example: Any, tile: Any, step: Any, *spans: jax.Ref) -> _Place:
    query, key = _pair(static, step)
    return _Place(example, query, tile, _visited(static, spans, example, query, key))

  def written(which: int) -> Callable[..., _Index]:
    """Where gradients go in a matrix that holds `which` alone, or all three."""

    def index(example: Any, tile: Any, step: Any, *_: jax.Ref) -> _Index:
      query, _ = _pair(static, step)
      rows = [query, *(jnp.clip(step - first, 0, keys - 1) for first in (pairs, pairs + keys))]
      columns = [static.column(one) + tile for one in (QUERY, KEY, VALUE)]
      if len(matrices) > 1:
        return example, rows[which], columns[which]
      turn = (step >= pairs).astype(jnp.int32) + (step >= pairs + keys)
      row, column = (
        jnp.where(turn == 0, one[QUERY], jnp.where(turn == 1, one[KEY], one[VALUE]))
        for one in (rows, columns)
      )
      return example, row, column

    return index

  made, specs = [], []
  for which, one in enumerate(given.rows[: len(matrices)]):
    made.append(jax.ShapeDtypeStruct(one.shape, dtype if which == QUERY else one.dtype))
    size = (static.examples, static.size(which), LANES)
    specs.append(pl.BlockSpec(size, written(which)))
  made.append(jax.ShapeDtypeStruct(reverse.logsumexp.shape, jnp.float32))
  specs.append(_lines_spec(static, place))
  programs = layout.batch // static.examples
  if bias is not None:

    def part(*step: Any) -> _Index:
      example, row, column = written(QUERY)(*step)
      return example * static.blocks(QUERY) + row, 0, column

    parts = (programs * static.blocks(QUERY), 1, bias.shape[1])
    made.append(jax.ShapeDtypeStruct(parts, jnp.float32))
    specs.append(pl.BlockSpec((1, 1, LANES), part))

  if near is not None:
    shape = (programs, *near.shape)
    made.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    specs.append(pl.BlockSpec((None, None, *shape[2:]), lambda n, tile, _, *s: (n, tile, 0, 0, 0)))

  def room(rows: int) -> Any:
    return pltpu.VMEM((static.examples, rows, LANES), jnp.float32)

  # Logits are formed again, which counts nothing.
  flops = 8 * layout.batch * layout.heads * layout.queries * tiled.keys * layout.head_dim
  if projection is not None:
    kernel = projection[0]
    flops += 4 * layout.batch * layout.queries * kernel.size
    made += [
      jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (kernel.shape, (1, kernel.shape[1]))
    ]
    specs += [_whole_spec(one.shape) for one in made[-2:]]
  heads_spec = None if heads is None else _results_spec(static, None, place)
  found = _call(
    functools.partial(_backward, static=static, matrices=len(matrices)),
    (programs, static.tiles, pairs + 2 * keys),
    spans,
    [given, reverse],
    [
      _specs(static, given, place),
      Reverse(
        heads_spec,
        _results_spec(static, given.projection, place),
        _lines_spec(static, place),
      ),
    ],
    made,
    specs,
    scratch=[room(static.size(QUERY)), *[room(keys * static.size(KEY))] * 2],
    ordered=1 if projection is None else 3,
    flops=flops,
    interpret=interpret,
  )
  first, *rest = found[len(matrices) :]
  of = Gradients(
    tuple(one.reshape(-1, one.shape[2]) for one in found[: len(matrices)]),
    None if bias is None else jnp.sum(rest.pop(0), axis=0),
    _to_heads(first, layout).swapaxes(1, 2).reshape(-1, layout.heads),
  )
  if numbers is not None:
    spread = functools.partial(_windows, static=static)
    (d_numbers,) = jax.linear_transpose(spread, numbers)(jnp.sum(rest.pop(0), axis=0))
    of = of._replace(distance_bias=DistanceBias(d_numbers))
  if projection is None:
    return of
  d_projection = rest[0].astype(projection[0].dtype), rest[1][0].astype(projection[1].dtype)
  return of._replace(projection=d_projection)


# What kernels are given.


class _Place(NamedTuple):
  """Of a program: numbers of its examples, blocks and tile, known when it runs."""

  example: Any
  query: Any
  tile: Any
  key: Any


def _pair(static: Static, step: Any) -> tuple[Any, Any]:
  """Blocks of queries and keys of a step of the reverse pass; the last ones when all are done."""
  keys = static.blocks(KEY)
  step = jnp.minimum(step, static.blocks(QUERY) * keys - 1)
  return lax.div(step, keys), lax.rem(step, keys)


def _span(static: Static, spans: Sequence[jax.Ref], example: Any, query: Any) -> tuple[Any, Any]:
  """Blocks of keys that a block of queries visits: the first, and one past the last."""
  at = 2 * (example * static.blocks(QUERY) + query)
  return spans[0][at], spans[0][at + 1]


def _visited(
  static: Static, spans: Sequence[jax.Ref], example: Any, query: Any, key: Any
) -> jax.Array:
  """The block of keys that is in vector memory: where one is not visited, its neighbour stays."""
  if not static.several:
    return key
  first, past = _span(static, spans, example, query)
  return jnp.clip(key, first, jnp.maximum(past - 1, first))


def _operands(
  static: Static,
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  numbers: jax.Array | None,
  visibility: Visibility,
) -> tuple[list[jax.Array], Operands[jax.Array]]:
  """Spans of keys for every example, where it has several blocks; and the operands.

  Args:
    static: what the kernel is made for.
    matrices: in tiles.
    bias: of them.
    weights: as lines.
    numbers: of distances; see `Operands`.
    visibility: of all keys.
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
  biases = None if bias is None else (bias,) * 3
  given = Operands(
    rows, biases, weights, ids, first, positions, penalties, numbers, dropout=None, rotations=None
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


def _windows(numbers: Float[Array, "heads distances"], static: Static) -> jax.Array:
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


def _specs(
  static: Static, given: Operands[jax.Array], place: Callable[..., _Place]
) -> Operands[pl.BlockSpec]:
  """The blocks of operands."""
  count = static.examples

  def rows(which: int) -> pl.BlockSpec:
    def index(*ids: Any) -> _Index:
      at = place(*ids)
      return at.example, at.query if which == QUERY else at.key, static.column(which) + at.tile

    return pl.BlockSpec((count, static.size(which), LANES), index)

  def bias(which: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, LANES), lambda *ids: (0, static.column(which) + place(*ids).tile))

  def numbers(which: int) -> pl.BlockSpec:
    def index(*ids: Any) -> _Index:
      at = place(*ids)
      return at.example, 0, at.query if which == QUERY else at.key

    return pl.BlockSpec((count, 1, static.size(which)), index)

  def of_diagonal(array: jax.Array) -> pl.BlockSpec:
    def index(*ids: Any) -> _Index:
      at = place(*ids)
      return at.tile, static.diagonal(at.query, at.key), 0, 0

    return pl.BlockSpec((None, None, *array.shape[2:]), index)

  def rotation(which: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    def index(*ids: Any) -> _Index:
      at = place(*ids)
      return 0, at.query if which == QUERY else at.key, 0

    spec = pl.BlockSpec((None, static.size(which), LANES), index)
    return spec, spec

  penalties = pl.BlockSpec((None, static.share, LANES), lambda *ids: (place(*ids).tile, 0, 0))
  kinds = (QUERY, KEY, VALUE)
  return Operands(
    tuple(map(rows, kinds)),
    None if given.biases is None else tuple(map(bias, kinds)),
    None if given.weights is None else _lines_spec(static, place),
    None if given.ids is None else (numbers(QUERY), numbers(KEY)),
    None if given.first_query is None else _whole_spec(given.first_query.shape),
    None if given.query_positions is None else numbers(QUERY),
    None if given.penalties is None else penalties,
    None if given.numbers is None else of_diagonal(given.numbers),
    jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.SMEM), given.dropout),
    None if given.rotations is None else (rotation(QUERY), rotation(KEY)),
    None if given.projection is None else _projection_specs(given.projection, place),
  )


def _projection_specs(
  projection: tuple[jax.Array, jax.Array], place: Callable[..., _Place]
) -> tuple[pl.BlockSpec, pl.BlockSpec]:
  """The rows of W_O that belong to a tile, and its bias."""
  kernel, bias = projection
  rows = pl.BlockSpec((LANES, kernel.shape[1]), lambda *ids: (place(*ids).tile, 0))
  return rows, _whole_spec(bias.shape)


def _whole_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
  """An array that every program has in full."""
  return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _results_spec(
  static: Static, projection: Projection | None, place: Callable[..., _Place]
) -> pl.BlockSpec:
  """The block of heads side by side, or of what the projection makes of all of them."""

  def index(*ids: Any) -> _Index:
    at = place(*ids)
    return at.example, at.query, at.tile if projection is None else 0

  columns = LANES if projection is None else projection[0].shape[1]
  return pl.BlockSpec((static.examples, static.size(QUERY), columns), index)


def _lines_spec(static: Static, place: Callable[..., _Place]) -> pl.BlockSpec:
  """The block of numbers for every head and position."""

  def index(*ids: Any) -> _Index:
    at = place(*ids)
    return at.example, at.tile, 0, at.query

  return pl.BlockSpec((static.examples, None, static.share, static.size(QUERY)), index)


def _lines_shape(static: Static) -> tuple[int, ...]:
  rows = static.blocks(QUERY) * static.size(QUERY)
  return static.layout.batch, static.tiles, static.share, rows


def _as_lines(heads: jax.Array, static: Static, value: float = 0.0) -> jax.Array:
  """Numbers [batch, heads, queries] as kernels have them, `value` where there are none."""
  shape = _lines_shape(static)
  more = (shape[1] * shape[2] - heads.shape[1], shape[3] - heads.shape[2])
  padded = jnp.pad(heads, ((0, 0), (0, more[0]), (0, more[1])), constant_values=value)
  return padded.reshape(shape)


def _from_heads(weights: jax.Array | None, static: Static) -> jax.Array | None:
  """Weights [batch * queries, heads] as kernels have them."""
  if weights is None:
    return None
  layout = static.layout
  by_row = weights.reshape(layout.batch, layout.queries, weights.shape[1])
  return _as_lines(by_row.swapaxes(1, 2), static)


def _to_heads(lines: jax.Array, layout: Layout) -> jax.Array:
  """Numbers [batch, heads, queries] from those of a kernel."""
  joined = lines.reshape(layout.batch, -1, lines.shape[3])
  return joined[:, : layout.heads, : layout.queries]


def _to_tiles(
  matrices: tuple[jax.Array, ...], bias: jax.Array | None, layout: Layout
) -> tuple[tuple[jax.Array, ...], jax.Array | None, Layout]:
  """Matrices, bias and layout in tiles; the bias is added where they are copied anyway."""
  if layout.in_tiles:
    return matrices, bias, layout
  shifted = matrices if bias is None else (_shifted(matrices[0], bias),)
  return layout.to_tiles(shifted), None, layout.tiled


def _as_rows(projection: Projection | None) -> Projection | None:
  """A projection whose bias is a row."""
  if projection is None:
    return None
  kernel, bias = projection
  return kernel, bias.astype(jnp.float32)[None]


def _shifted(rows: jax.Array, bias: jax.Array) -> jax.Array:
  return (rows.astype(jnp.float32) + bias).astype(rows.dtype)


def _in_tiles(heads: jax.Array, layout: Layout) -> jax.Array:
  """Heads side by side [batch, queries, columns], filled up where they fill no tiles."""
  if not layout.in_tiles:
    heads = heads.reshape(layout.batch, layout.queries, layout.heads, layout.head_dim)
    heads = layout.fill(heads)
  return heads.reshape(layout.batch, layout.queries, -1)


def _from_tiles(heads: jax.Array, layout: Layout) -> jax.Array:
  """And back [batch * queries, columns]."""
  if not layout.in_tiles:
    apart = heads.reshape(*heads.shape[:2], layout.tiled.heads, layout.tiled.head_dim)
    heads = apart[:, :, : layout.heads, : layout.head_dim]
  return heads.reshape(layout.batch * layout.queries, -1)


def _call(
  kernel: Callable[..., None],
  grid: tuple[int, ...],
  spans: list[jax.Array],
  arrays: list[Any],
  in_specs: list[Any],
  outputs: list[jax.ShapeDtypeStruct],
  out_specs: list[pl.BlockSpec],
  *,
  scratch: list[Any],
  ordered: int,
  flops: int,
  interpret: bool | pltpu.InterpretParams,
) -> Sequence[jax.Array]:
  """Runs a kernel, of lists of references, the last `ordered` axes of whose grid are in order."""

  def run(*refs: Any) -> None:
    first, second = len(spans) + len(arrays), len(spans) + len(arrays) + len(outputs)
    kernel(
      list(refs[: len(spans)]),
      *refs[len(spans) : first],
      list(refs[first:second]),
      list(refs[second:]),
    )

  axes: list[Any] = ["parallel"] * (len(grid) - ordered) + ["arbitrary"] * ordered
  return pl.pallas_call(
    run,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(spans),
      grid=grid,
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=scratch,
    ),
    out_shape=outputs,
    compiler_params=pltpu.CompilerParams(dimension_semantics=axes, vmem_limit_bytes=ROOM * 3 // 2),
    cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0),
    name=getattr(kernel, "func", kernel).__name__,
    interpret=interpret,
  )(*spans, *arrays)


# The kernels.


class _Example:
  """What a kernel reads of one of a program's examples, at a block of queries and one of keys."""

  def __init__(self, given: Operands[jax.Ref], static: Static, number: Any, place: _Place):
    self.given, self.static, self.number, self.place = given, static, number, place
    block = place.query, place.key
    self.starts = tuple(b * size for b, size in zip(block, static.block, strict=True))

  def rows(self, which: int) -> jax.Array:
    """A tile of queries, keys or values."""
    rows = self.given.rows[which][self.number]
    if self.given.biases is not None:
      rows = _shifted(rows, self.given.biases[which][...])
    if self.given.rotations is not None and which != VALUE:
      cos, sin = (table[...] for table in self.given.rotations[which])
      wide = rows.astype(jnp.float32)
      rows = (wide * cos + self._paired(wide) * sin).astype(rows.dtype)
    return self.within(rows, which)

  def turned_back(self, slopes: jax.Array, which: int) -> jax.Array:
    """The gradient of queries or keys before their rotation, float32."""
    if self.given.rotations is None:
      return slopes
    cos, sin = (table[...] for table in self.given.rotations[which])
    return self.within(slopes * cos - self._paired(slopes) * sin, which)

  def _paired(self, rows: jax.Array) -> jax.Array:
    """The column that every column of a head is turned with."""
    half = self.static.half
    in_head = lax.rem(_lane(rows.shape), self.static.layout.head_dim)
    return jnp.where(in_head < half, pltpu.roll(rows, LANES - half, 1), pltpu.roll(rows, half, 1))

  def within(self, rows: jax.Array, which: int) -> jax.Array:
    """Zeros in rows beyond the example."""
    time, size = self.static.layout.times(which), self.static.size(which)
    if time % size == 0:
      return rows
    index = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where(index < time - self.starts[min(which, KEY)], rows, jnp.zeros_like(rows))

  def positions(self) -> tuple[jax.Array, jax.Array]:
    """Of queries and keys of the block's pairs."""
    queries, keys = (lax.broadcasted_iota(jnp.int32, self.static.block, axis) for axis in range(2))
    keys = keys + (self.starts[1] + self.static.first_key)
    if self.given.query_positions is not None:
      own = _as_column(self.given.query_positions[self.number])
      return jnp.broadcast_to(own, self.static.block), keys
    if self.given.first_query is not None:
      queries = queries + self.given.first_query[...]
    return queries + self.starts[0], keys

  def distance(self) -> jax.Array | None:
    """Between queries and keys of the block's pairs, float32; none where nothing depends on it."""
    if self.given.penalties is None:
      return None
    queries, keys = self.positions()
    return jnp.abs(queries - keys).astype(jnp.float32)

  def logits(
    self, query: jax.Array, key: jax.Array, head: int, distance: jax.Array | None
  ) -> jax.Array:
    """Of the block's pairs in a head, from its queries and what `distance` returned."""
    logits, given = dot(query, key, (1, 1)) * self.static.scale, self.given
    if distance is not None:
      assert given.penalties is not None
      logits = logits - given.penalties[head : head + 1, :1] * distance
    if given.numbers is not None:
      logits = logits + _of_pairs(given.numbers[head : head + 1], self.static.block)
    return logits

  def dropout(self, head: int) -> jax.Array | None:
    """What dropout multiplies the block's probabilities in a head with; none for 1."""
    dropout, static = self.given.dropout, self.static
    if dropout is None:
      return None
    keep = dropout.keep_of_block(
      self.place.example * static.examples + self.number,
      self.place.tile * static.share + head,
      (self.starts[0], self.starts[1] + static.first_key),
      static.block,
      (static.layout.queries, static.all_keys),
      by_product=True,
    )
    return jnp.where(keep, dropout.scale, 0.0)

  def allowed(self) -> jax.Array | None:
    """Which keys of the block every query of its block reads; none for all."""
    given, static, found = self.given, self.static, []
    if static.layout.keys % static.size(KEY):
      keys = lax.broadcasted_iota(jnp.int32, static.block, 1)
      found.append(keys < static.layout.keys - self.starts[1])
    found.append(static.order.in_order(*self.positions()))
    if given.ids is not None:
      own, others = (ids[self.number] for ids in given.ids)
      found.append(same_number(_as_column(own), others))
    found = [one for one in found if one is not None]
    return functools.reduce(jnp.logical_and, found) if found else None


def _as_column(line: jax.Array) -> jax.Array:
  """Numbers of queries as a column, which lie along lanes in memory."""
  return jnp.broadcast_to(line, (LANES, line.shape[1])).T[:, :1]


def _lane(shape: tuple[int, ...]) -> jax.Array:
  return lax.broadcasted_iota(jnp.int32, shape, 1)


def _only(tile: jax.Array, head: int, static: Static) -> jax.Array:
  """Zeros in the columns of other heads."""
  if static.share == 1:
    return tile
  width, lane = static.layout.head_dim, _lane(tile.shape)
  mine = (lane >= head * width) & (lane < (head + 1) * width)
  return jnp.where(mine, tile, jnp.zeros_like(tile))


def _spread(heads: list[jax.Array], static: Static) -> jax.Array:
  """A tile that has the columns of each head from its own array [rows, 1 or 128]."""
  shape = (heads[0].shape[0], LANES)
  tile = jnp.broadcast_to(heads[0], shape)
  for head, one in enumerate(heads[1:], start=1):
    tile = jnp.where(_lane(shape) >= head * static.layout.head_dim, one, tile)
  return tile


def _times(values: jax.Array, factors: jax.Array | None) -> jax.Array:
  return values if factors is None else values * factors


def _column(tile: jax.Array, head: int, static: Static) -> jax.Array:
  """One column of a head [rows, 1]."""
  first = head * static.layout.head_dim
  return tile[:, first : first + 1]


def _of_pairs(line: jax.Array, block: tuple[int, int]) -> jax.Array:
  """What every pair of a block has of a line [1, columns] of `windows`."""
  queries, keys = block
  rows, width = line, line.shape[1]
  # The upper half of twice as many rows begins as many numbers later as it has rows.
  while len(rows) < queries:
    rows = jnp.concatenate([pltpu.roll(rows, width - len(rows), 1), rows])
  return rows[len(rows) - queries :, :keys]


def _sums_of_diagonals(pairs: jax.Array, width: int) -> jax.Array:
  """And back: a line [1, columns] of the sums of pairs that have the same number."""
  queries, keys = pairs.shape
  more = pl.next_power_of_2(queries) - queries
  rows = jnp.pad(pairs, ((more, 0), (0, width - keys)))
  while len(rows) > 1:
    half = len(rows) // 2
    rows = pltpu.roll(rows[:half], half, 1) + rows[half:]
  return rows


def _from_lines(lines: jax.Array, static: Static) -> jax.Array:
  """A tile from numbers [heads, rows]."""
  width = static.layout.head_dim
  parts = [
    jnp.broadcast_to(lines[head : head + 1], (width, lines.shape[1]))
    for head in range(static.share)
  ]
  return jnp.concatenate(parts, axis=0).T


def _into_lines(tile: jax.Array, static: Static) -> jax.Array:
  """And back, from one column of each head."""
  turned, width = tile.T, static.layout.head_dim
  parts = [turned[head * width : head * width + 1] for head in range(static.share)]
  return jnp.concatenate(parts, axis=0)


_State = tuple[jax.Array, jax.Array, jax.Array]
"""Sum of values, largest logit and sum of exponentials, of every row [queries, 128]."""


def _forward(
  spans: list[jax.Ref],
  given: Operands[jax.Ref],
  outputs: list[jax.Ref],
  scratch: list[jax.Ref],
  *,
  static: Static,
) -> None:
  """Of a block of queries in a tile of heads, key block by key block."""
  number, block, tile, key_block = place = _Place(*(pl.program_id(axis) for axis in range(4)))
  heads, *saved = outputs

  def begin() -> _State:
    zeros = jnp.zeros((static.size(QUERY), LANES), jnp.float32)
    return zeros, zeros + FAR, zeros

  def visit(n: Any, state: _State) -> _State:
    example = _Example(given, static, n, place)
    query, key, value = (example.rows(which) for which in (QUERY, KEY, VALUE))
    allowed, (total, largest, mass) = example.allowed(), state
    distance = example.distance()
    added, sums, new = [], [], []
    for head in range(static.share):
      logits = example.logits(_only(query, head, static), key, head, distance)
      logits = logits if allowed is None else jnp.where(allowed, logits, FAR)
      most = jnp.max(logits, axis=1, keepdims=True)
      new.append(jnp.maximum(_column(largest, head, static), most))
      share = jnp.exp(logits - new[-1])
      share = share if allowed is None else jnp.where(allowed, share, 0.0)
      sums.append(jnp.sum(share, axis=1, keepdims=True))
      share = _times(share, example.dropout(head))
      added.append(dot(share.astype(value.dtype), value))
    most = _spread(new, static)
    shrunk = jnp.exp(largest - most)
    total = total * shrunk + _spread(added, static)
    return total, most, mass * shrunk + _spread(sums, static)

  def finish(n: Any, state: _State) -> None:
    total, largest, mass = state
    mass = jnp.where(mass > 0, mass, 1.0)
    scaled = total / mass
    if given.weights is not None:
      scaled = scaled * _from_lines(given.weights[n], static)
    scaled = scaled.astype(heads.dtype)
    if given.projection is None:
      heads[n] = scaled
    else:
      _add_projected(n, tile, scaled, given.projection, scratch[-1])
    if saved[1:]:
      saved[1][n] = scaled
    for ref in saved[:1]:
      # A row that read nothing has one so large that it has no probabilities later, either.
      line = jnp.where(largest > FAR, largest + jnp.log(mass), -FAR)
      ref[n] = _into_lines(line, static)

  def write_projected() -> None:
    if given.projection is not None:

      @pl.when((tile == static.tiles - 1) & (key_block == static.blocks(KEY) - 1))
      def _() -> None:
        heads[...] = scratch[-1][...].astype(heads.dtype)

  if not static.several:
    pl.loop(0, static.examples)(lambda n: finish(n, visit(n, begin())))
    write_projected()
    return
  first, past = _span(static, spans, number, block)

  def keep(state: _State) -> None:
    for ref, one in zip(scratch[:3], state, strict=True):
      ref[...] = one

  def kept() -> _State:
    total, largest, mass = (ref[...] for ref in scratch[:3])
    return total, largest, mass

  pl.when(key_block == 0)(lambda: keep(begin()))
  pl.when((first <= key_block) & (key_block < past))(lambda: keep(visit(0, kept())))
  pl.when(key_block == static.blocks(KEY) - 1)(lambda: finish(0, kept()))
  write_projected()


def _add_projected(
  n: Any, tile: Any, heads: jax.Array, projection: tuple[jax.Ref, jax.Ref], sums: jax.Ref
) -> None:
  """Adds what a tile of heads contributes to the projection; its bias comes with the first one."""
  kernel, bias = projection
  made = dot(heads, kernel[...])

  @pl.when(tile == 0)
  def _() -> None:
    sums[n] = made + bias[...]

  @pl.when(tile > 0)
  def _() -> None:
    sums[n] += made


def _backward(
  spans: list[jax.Ref],
  given: Operands[jax.Ref],
  reverse: Reverse[jax.Ref],
  outputs: list[jax.Ref],
  scratch: list[jax.Ref],
  *,
  static: Static,
  matrices: int,
) -> None:
  """Of all pairs of blocks of a tile of heads, one after the other.

  Queries' gradients are written when their last block of keys is done; then, block by block, those
  of keys, and those of values. Heads that were not kept are formed again, which takes all keys in
  one block.
  """
  gradients, delta, *parts = outputs[:matrices], *outputs[matrices:]
  projection, numbers = given.projection, given.numbers
  d_projection = [] if projection is None else [parts.pop(-2), parts.pop()]
  d_numbers = None if numbers is None else parts.pop()
  d_query, d_key, d_value = scratch
  number, tile, step = (pl.program_id(axis) for axis in range(3))
  keys = static.blocks(KEY)
  (block, key_block), pairs = _pair(static, step), static.blocks(QUERY) * keys
  place, at_pairs = _Place(number, block, tile, key_block), step < pairs

  def put(which: int, values: jax.Array) -> None:
    ref = gradients[static.layout.columns[which][0]]
    ref[...] = values.astype(ref.dtype)
    for one in parts:
      one[0] = jnp.sum(jnp.sum(values, axis=0), axis=0, keepdims=True)

  def sums_of(products: jax.Array) -> jax.Array:
    """The sum of each head's columns."""
    own = [_only(products, head, static) for head in range(static.share)]
    return _spread([jnp.sum(one, axis=1, keepdims=True) for one in own], static)

  def slope(example: _Example) -> jax.Array:
    """The gradient of heads times their weights."""
    slope = example.within(reverse.slopes[example.number], QUERY)
    if projection is None:
      return slope
    return dot(slope, projection[0][...], (1, 1)).astype(slope.dtype)

  def delta_of(example: _Example) -> jax.Array:
    """That of weights times the weights, where heads were kept."""
    return sums_of(slope(example).astype(jnp.float32) * kept(example).astype(jnp.float32))

  def kept(example: _Example) -> jax.Array:
    assert reverse.outputs is not None
    return example.within(reverse.outputs[example.number], QUERY)

  def add_to_kernel(example: _Example, heads: jax.Array) -> None:
    """Adds to the gradient of the projection's matrix."""
    rows = pl.ds(tile * LANES, LANES)
    slope = example.within(reverse.slopes[example.number], QUERY)
    d_projection[0][rows] += dot(heads, slope, (0, 0))

  def visit(n: Any) -> None:
    example = _Example(given, static, n, place)
    query, key, value = (example.rows(which) for which in (QUERY, KEY, VALUE))
    logsumexp, allowed = _from_lines(reverse.logsumexp[n], static), example.allowed()
    asked = [_only(query, head, static) for head in range(static.share)]
    distance, dropout = example.distance(), [example.dropout(n) for n in range(static.share)]
    shares = []
    for head, one in enumerate(asked):
      logits = example.logits(one, key, head, distance)
      share = jnp.exp(logits - _column(logsumexp, head, static))
      shares.append(share if allowed is None else jnp.where(allowed, share, 0.0))
    back = slope(example)
    weights = None if given.weights is None else _from_lines(given.weights[n], static)
    if reverse.outputs is not None:
      sums = delta_of(example)
    else:
      left = map(_times, shares, dropout)
      heads = _spread([dot(one.astype(value.dtype), value) for one in left], static)
      heads = (heads if weights is None else heads * weights).astype(back.dtype)
      sums = sums_of(back.astype(jnp.float32) * heads.astype(jnp.float32))
      delta[n] = _into_lines(sums, static)
      add_to_kernel(example, heads)
    back = back if weights is None else (back * weights).astype(back.dtype)
    of_query, of_line = [], []
    of_key = of_value = jnp.zeros(key.shape, jnp.float32)
    for head, (one, share, factors) in enumerate(zip(asked, shares, dropout, strict=True)):
      own = _only(back, head, static)
      slopes = _times(dot(own, value, (1, 1)), factors)
      error, share = share * (slopes - _column(sums, head, static)), _times(share, factors)
      if numbers is not None:
        of_line.append(_sums_of_diagonals(error, numbers.shape[1]))
      share, error = share.astype(query.dtype), error.astype(query.dtype)
      of_query.append(dot(error, key))
      of_key = of_key + dot(error, one, (0, 0))
      of_value = of_value + dot(share, own, (0, 0))
    at = pl.ds(key_block * static.size(KEY), static.size(KEY))
    if d_numbers is not None:
      d_numbers[static.diagonal(block, key_block)] += jnp.concatenate(of_line)
    d_query[n] += example.turned_back(_spread(of_query, static), QUERY)
    d_key[n, at] += example.turned_back(of_key, KEY)
    d_value[n, at] += of_value

  def over_examples(do: Callable[[Any], None]) -> None:
    pl.loop(0, static.examples)(do)

  @pl.when(step == 0)
  def _() -> None:
    d_key[...] = jnp.zeros(d_key.shape, jnp.float32)
    d_value[...] = jnp.zeros(d_value.shape, jnp.float32)
    if d_numbers is not None:
      d_numbers[...] = jnp.zeros(d_numbers.shape, jnp.float32)

  if projection is not None:

    @pl.when((number == 0) & (tile == 0) & (step == 0))
    def _() -> None:
      for ref in d_projection:
        ref[...] = jnp.zeros(ref.shape, jnp.float32)

    @pl.when((tile == 0) & at_pairs & (key_block == 0))
    def _() -> None:
      @over_examples
      def _(n: Any) -> None:
        example = _Example(given, static, n, place)
        rows = example.within(reverse.slopes[n], QUERY).astype(jnp.float32)
        d_projection[1][...] += jnp.sum(rows, axis=0, keepdims=True)

  @pl.when(at_pairs & (key_block == 0))
  def _() -> None:
    d_query[...] = jnp.zeros(d_query.shape, jnp.float32)
    if reverse.outputs is not None:

      @over_examples
      def _(n: Any) -> None:
        example = _Example(given, static, n, place)
        delta[n] = _into_lines(delta_of(example), static)
        if projection is not None:
          add_to_kernel(example, kept(example))

  seen = at_pairs
  if static.several:
    first, past = _span(static, spans, number, block)
    seen = at_pairs & (first <= key_block) & (key_block < past)
  pl.when(seen)(lambda: over_examples(visit))

  def ready(ref: jax.Ref, first: int) -> jax.Array:
    return ref[:, pl.ds((step - first) * static.size(KEY), static.size(KEY))]

  last = at_pairs & (key_block == keys - 1)
  pl.when(last)(lambda: put(QUERY, d_query[...] * static.scale))
  turn = (step >= pairs) & (step < pairs + keys)
  pl.when(turn)(lambda: put(KEY, ready(d_key, pairs) * static.scale))
  pl.when(step >= pairs + keys)(lambda: put(VALUE, ready(d_value, pairs + keys)))
