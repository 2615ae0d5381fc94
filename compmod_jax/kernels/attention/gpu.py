"""Flash attention whose heads have weights, for NVIDIA GPUs.

Queries, keys and values are columns of matrices [batch * time, columns], all of one matrix where
one product made them, so that nothing is sliced or copied. Heads leave side by side, each times its
weight: one factor where flash attention divides by the sum of a row anyway.

Blocks have sides that are powers of two and at least 16; what they hold beyond an array is masked
in every load and store, unless blocks fill it.

What a loop reads goes into products as it is, so that the loads of later turns can be under way:
no bias is added to it, and no weight multiplied. With the biases b of queries, keys and values,

    softmax(Q (K + b_k)^T) = softmax(Q K^T)     P (V + b_v) = P V + (P 1) b_v

and in the reverse pass

    C ds (V + b_v)^T = C ds V^T + (C ds b_v) 1^T

where rows of the gradient D of the logits sum to 0, so that b_k adds nothing to D K, either. What
is per query, C ds, its product with b_v and the delta, is formed before that pass. Queries with
b_q, which a program of the forward pass forms of its own block alone, it writes in their place for
the reverse pass, whose loops read those of all blocks.

What is added to logits by distance is read number by number. Its gradient sums that of the logits
over all pairs of a distance. Blocks of pairs on one diagonal of such blocks are alike in it, so a
kernel of its own adds them up, examples, too, and XLA sums the diagonals of these sums: every
program has its own order of additions, and results are the same in every run.

Source: Dao 2023 (FlashAttention-2) for blocks and the saved logsumexp; Kolios 2023, equation 5.3,
for the weights.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from compmod_jax.kernels.attention.definition import FAR
from compmod_jax.kernels.attention.distances import DistanceBias, sums_of_diagonals, windows
from compmod_jax.kernels.attention.dropout import ProbabilityDropout
from compmod_jax.kernels.attention.layout import KEY, QUERY, VALUE, Gradients, Layout
from compmod_jax.kernels.attention.visibility import HIDDEN, Visibility, same_number
from compmod_jax.kernels.routing.blocks import dot
from compmod_jax.kernels.routing.triton import (
  call,
  load,
  load_each,
  load_line,
  padded,
  store,
  store_line,
)

_LOG2E = math.log2(math.e)
_Pair = tuple[jax.Array, jax.Array]
A = TypeVar("A")
Carry = TypeVar("Carry")


class Tile(NamedTuple):
  """How a kernel is cut.

  Attributes:
    queries: of a block, a power of two and at least 16.
    keys: of a block, likewise.
    warps: of a program, each of 32 threads.
    stages: loads that are under way at once.
  """

  queries: int
  keys: int
  warps: int = 4
  stages: int = 3

  @property
  def block(self) -> tuple[int, int]:
    """Queries and keys of a block."""
    return self.queries, self.keys

  def within(self, layout: Layout) -> "Tile":
    """No larger than sequences need."""
    queries, keys = layout.queries, layout.keys
    return self._replace(
      queries=min(self.queries, padded(queries)), keys=min(self.keys, padded(keys))
    )


# Of the reverse pass, by columns of a head and whether it is float32, and by how much else takes
# registers: none, one, two or all of dropout, biases by distance and (in float32) masks.
_REVERSE = {
  (32, False): (Tile(64, 64), Tile(64, 64, 8, 2)),
  (64, False): (Tile(64, 64), Tile(64, 32, 8, 2)),
  (128, False): (Tile(32, 32, 8, 2),) * 2,
  (32, True): (Tile(64, 64), Tile(64, 64, 8, 2), Tile(32, 32, stages=2), Tile(32, 16, stages=2)),
  (64, True): (Tile(64, 64, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
  (128, True): (Tile(16, 16, 8, 2),) * 3,
}


_PROGRAMS = 1024
"""Programs that sum blocks of pairs by diagonal, about."""


def bytes_of_row(layout: Layout, dtype: DTypeLike) -> int:
  """Of a head in a block."""
  return max(32, padded(layout.head_dim)) * jnp.dtype(dtype).itemsize


def tiles(
  layout: Layout, dtype: DTypeLike, *, dropout: bool, masked: bool, biased: bool
) -> tuple[Tile, Tile]:
  """Of the forward and of the reverse pass: as large as registers allow.

  Found by compiling for an H100 (`benchmarks/registers.py`), whose programs spill none.
  """
  wide, columns = jnp.dtype(dtype) == jnp.float32, max(32, padded(layout.head_dim))
  bytes_a_row = bytes_of_row(layout, dtype)
  if bytes_a_row > 256 and dropout:
    forward = Tile(64, 16, stages=2)
  elif bytes_a_row > 128:
    forward = Tile(128, 32 if bytes_a_row > 256 and masked else 64, 8, 2)
  else:
    forward = Tile(64, 64, stages=2 if dropout else 3)
  if biased:
    forward = forward._replace(keys=max(16, forward.keys // 2))
  cuts = _REVERSE[columns, wide]
  return forward, cuts[min(dropout + biased + (masked and wide), len(cuts) - 1)]


@dataclasses.dataclass(frozen=True)
class Static:
  """What a kernel is made for.

  Attributes:
    layout: sizes, and where columns begin.
    block: queries and keys of a block.
    order: the visibility, of which the numbers are operands.
  """

  layout: Layout
  block: tuple[int, int]
  order: Visibility

  @property
  def scale(self) -> float:
    """What logits are multiplied by, for an exponential to base 2."""
    return _LOG2E / math.sqrt(self.layout.head_dim)

  def size(self, which: int) -> int:
    """Rows of a block of queries, keys or values."""
    return self.block[min(which, KEY)]

  def filled(self, which: int) -> bool:
    """Whether every block of queries, keys or values that a program is given lies in its example.

    Programs of the reverse pass have a block of queries and one of keys, of which there may be
    fewer than programs.
    """
    most = max(self.blocks(QUERY), self.blocks(KEY))
    return most * self.size(which) == self.layout.times(which)

  def blocks(self, which: int) -> int:
    """How many there are of an example."""
    return pl.cdiv(self.layout.times(which), self.size(which))


class Operands(NamedTuple, Generic[A]):
  """What kernels read, as arrays or as references to them.

  Attributes:
    matrices: those that hold queries, keys and values [batch * time, columns].
    bias: what is added to the columns of a matrix that holds all three [1, columns], float32; none
      for nothing.
    weights: of heads [batch * heads, queries], float32; none for 1.
    ids: numbers of queries [batch, queries] and of keys [batch, keys], where there are any.
    first_query: see `Visibility`.
    query_positions: see `Visibility` [batch, queries].
    penalties: see `Visibility`.
    numbers: those of a `DistanceBias`, of all heads in a line; none for nothing.
    dropout: which probabilities become 0; none for no dropout.
    key_spans: blocks of keys that a block of queries visits [batch, blocks, 4], see
      `Visibility.spans`.
  """

  matrices: tuple[A, ...]
  bias: A | None
  weights: A | None
  ids: tuple[A, A] | None
  first_query: A | None
  query_positions: A | None
  penalties: A | None
  numbers: A | None
  dropout: ProbabilityDropout | None
  key_spans: A


class Saved(NamedTuple):
  """What the forward pass leaves for the reverse pass.

  Attributes:
    logsumexp: logarithm to base 2 of the sum of a row [batch * heads, queries], without b_k.
    matrix: that of queries, keys and values with b_q added, where there is a bias.
  """

  logsumexp: jax.Array
  matrix: jax.Array | None = None


def saved_shapes(
  layout: Layout,
  matrix: jax.Array,
  *,
  bias: bool,
  projection: bool,
  block: tuple[int, ...] | None,
) -> Saved:
  """Shapes of what `forward` leaves; see there."""
  del projection, block
  lines = (layout.batch * layout.heads, layout.queries)
  written = jax.ShapeDtypeStruct(matrix.shape, matrix.dtype) if bias else None
  return Saved(jax.ShapeDtypeStruct(lines, jnp.float32), written)  # type: ignore[arg-type]


def matrices_left(matrices: tuple[jax.Array, ...], saved: Saved) -> tuple[jax.Array, ...]:
  """The matrices as the forward pass left them, so that nothing is kept twice."""
  return matrices if saved.matrix is None else (saved.matrix,)


class Reverse(NamedTuple, Generic[A]):
  """What the reverse pass reads besides.

  Attributes:
    slopes: the gradient with respect to the heads before their weights, C ds.
    delta: what the gradient of logits is less by, before probabilities [batch * heads, queries],
      float32: that of weights times the weights, and without dropout less C ds b_v.
    shift: with dropout C ds b_v; none for 0.
    logsumexp: see `Saved`.
    query_spans: blocks of queries that a block of keys visits [batch, blocks, 4].
  """

  slopes: A
  delta: A
  shift: A | None
  logsumexp: A
  query_spans: A


def forward(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  visibility: Visibility,
  *,
  layout: Layout,
  block: tuple[int, ...] | None,
  interpret: bool,
  save: bool,
  distance_bias: DistanceBias | None = None,
  dropout: ProbabilityDropout | None = None,
) -> tuple[jax.Array, Saved | None]:
  """Heads side by side [batch * queries, heads * head_dim] and, to `save`, what is read later.

  Args:
    matrices: see `Operands`.
    bias: see `Operands`.
    weights: of heads [batch * queries, heads], float32; none for 1.
    visibility: which keys a query may read.
    layout: sizes, and where columns begin.
    block: see `Tile`; none for what `tiles` says.
    interpret: run without the hardware.
    save: whether a reverse pass follows.
    distance_bias: added to the logits.
    dropout: see `Operands`.
  """
  dtype = matrices[layout.columns[QUERY][0]].dtype
  cut = _cut(block, visibility, distance_bias, dropout, layout, dtype, reverse=False)
  prepare = _prepare(matrices, bias, weights, distance_bias, visibility, dropout, layout)
  static, given, _ = prepare(cut.block)
  rows, lines = layout.batch * layout.queries, layout.batch * layout.heads
  outputs = [jax.ShapeDtypeStruct((rows, layout.heads * layout.head_dim), dtype)]
  outputs += [jax.ShapeDtypeStruct((lines, layout.queries), jnp.float32)] * save
  writes = save and bias is not None
  outputs += [jax.ShapeDtypeStruct(matrices[0].shape, dtype)] * writes
  grid = (layout.heads, static.blocks(QUERY), layout.batch)
  kernel = functools.partial(_forward, static=static)
  heads, *saved = call(
    kernel,
    grid,
    [given],
    outputs,
    interpret,
    warps=cut.warps,
    stages=cut.stages,
    # Of what is given, the matrix is the first.
    aliases={0: 2} if writes else None,
    flops=4 * layout.pairs * layout.head_dim,
  )
  return heads, Saved(*saved) if save else None


def backward(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  visibility: Visibility,
  outputs: jax.Array,
  saved: Saved,
  slopes: jax.Array,
  *,
  layout: Layout,
  block: tuple[int, ...] | None,
  interpret: bool,
  distance_bias: DistanceBias | None = None,
  dropout: ProbabilityDropout | None = None,
) -> Gradients:
  """Gradients of what is given, but for masks.

  Columns of a matrix that hold neither queries nor keys nor values are not written; in the gradient
  of the bias, what stands there means nothing.

  With the gradient ds of a head s = C o, and P its probabilities:

      dV = P^T (C ds)     a = <ds, s> = C dC     d(QK) = P (C ds V^T - a)

  (with dropout, whose mask and scale are M, dV = (M P)^T (C ds) and d(QK) = P (M C ds V^T - a))
  so that a, the delta that any reverse pass of flash attention forms, is all that the competition
  needs, and nothing is divided by C.

  Args:
    matrices: as in `forward`, and so the next three.
    bias: as in `forward`.
    weights: as in `forward`.
    visibility: as in `forward`.
    outputs: what `forward` returned.
    saved: what it saved.
    slopes: the gradient with respect to the heads.
    layout: as in `forward`.
    block: as in `forward`.
    interpret: run without the hardware.
    distance_bias: as in `forward`.
    dropout: as in `forward`.
  """
  cut = _cut(block, visibility, distance_bias, dropout, layout, outputs.dtype, reverse=True)
  matrices = matrices_left(matrices, saved)
  prepare = _prepare(matrices, bias, weights, distance_bias, visibility, dropout, layout)
  static, given, query_spans = prepare(cut.block)
  terms = _terms(given, slopes, outputs, static, interpret)
  given = given._replace(weights=None)
  reverse = Reverse(terms.slopes, terms.less, terms.shift, saved.logsumexp, query_spans)
  made = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in matrices]
  grid = (layout.key_heads, given.key_spans.shape[1], layout.batch)
  if bias is not None:
    parts = (grid[1] * grid[2], bias.shape[1])
    made.append(jax.ShapeDtypeStruct(parts, jnp.float32))
  kernel = functools.partial(_backward, static=static)
  found = call(
    kernel,
    grid,
    [given, reverse],
    made,
    interpret,
    warps=cut.warps,
    stages=cut.stages,
    # Logits are formed again, which counts nothing.
    flops=8 * layout.pairs * layout.head_dim,
  )
  count = len(matrices)
  d_bias = None if bias is None else jnp.sum(found[-1], axis=0, keepdims=True)
  delta = terms.delta.reshape(layout.batch, layout.heads, layout.queries)
  delta = delta.swapaxes(1, 2).reshape(-1, layout.heads)
  made = Gradients(tuple(found[:count]), d_bias, delta)
  if distance_bias is None:
    return made
  most = 32 if bytes_of_row(layout, outputs.dtype) <= 256 else 16
  side = min(most, padded(max(layout.queries, layout.keys)))
  static, square, _ = prepare((side, side))
  square = square._replace(weights=None)
  return made._replace(distance_bias=_of_distances(square, reverse, static, interpret))


def _of_distances(
  given: Operands[jax.Array], reverse: "Reverse[jax.Array]", static: Static, interpret: bool
) -> DistanceBias:
  """The gradient of the numbers of distances, in blocks that are squares."""
  layout, (side, _), blocks = static.layout, static.block, static.blocks(QUERY)
  diagonals = blocks + static.blocks(KEY) - 1
  parts = max(1, min(layout.batch, _PROGRAMS // (layout.heads * diagonals)))
  made = jax.ShapeDtypeStruct((layout.heads * diagonals * parts * side, side), jnp.float32)
  (found,) = call(
    functools.partial(_sum_diagonals, static=static, parts=parts),
    (layout.heads, diagonals, parts),
    [given, reverse],
    [made],
    interpret,
    warps=8,
    stages=2,
    flops=4 * layout.pairs * layout.head_dim,
  )
  sums = jnp.sum(found.reshape(layout.heads, diagonals, parts, side, side), axis=2)
  like = jax.ShapeDtypeStruct((layout.heads, layout.queries + layout.keys - 1), jnp.float32)
  spread = functools.partial(windows, queries=layout.queries, blocks=blocks, block=(side, side))
  (numbers,) = jax.linear_transpose(spread, like)(sums_of_diagonals(sums))
  return DistanceBias(numbers)


class _Terms(NamedTuple):
  """What the reverse pass needs of every query.

  Attributes:
    slopes: see `Reverse`.
    delta: the gradient of a weight times the weight [batch * heads, queries], float32.
    less: what `Reverse` calls delta.
    shift: see `Reverse`.
  """

  slopes: jax.Array
  delta: jax.Array
  less: jax.Array
  shift: jax.Array | None


def _terms(
  given: Operands[jax.Array],
  slopes: jax.Array,
  outputs: jax.Array,
  static: Static,
  interpret: bool,
) -> _Terms:
  """Formed in one pass over heads and their gradient, which XLA reads once for each."""
  layout = static.layout
  lines = jax.ShapeDtypeStruct((layout.batch * layout.heads, layout.queries), jnp.float32)
  weighted, shifted = given.weights is not None, given.bias is not None
  made = [lines, *[lines] * shifted, *[jax.ShapeDtypeStruct(slopes.shape, slopes.dtype)] * weighted]
  grid = (layout.heads, static.blocks(QUERY), layout.batch)
  kernel = functools.partial(_form_terms, static=static)
  # No matrix is read.
  unread = dict.fromkeys(("ids", "first_query", "query_positions", "penalties", "numbers"))
  own = given._replace(matrices=(), **unread)
  delta, *more = call(kernel, grid, [own, slopes, outputs], made, interpret)
  less = more.pop(0) if shifted else delta
  slopes = more.pop() if weighted else slopes
  if shifted and given.dropout is not None:
    return _Terms(slopes, delta, delta, less)
  return _Terms(slopes, delta, less, None)


def _form_terms(
  given: Operands[jax.Ref], slopes: jax.Ref, outputs: jax.Ref, *made: jax.Ref, static: Static
) -> None:
  """Of a block of queries in one head: delta; `less` or the shift; the weighted gradient."""
  head, block, number = (pl.program_id(axis) for axis in range(3))
  layout, example = static.layout, _Example(given, static, number)
  start = block * static.size(QUERY)
  place, left = (number * layout.queries + start, head * layout.head_dim), layout.queries - start
  slope, output = (
    example.load(QUERY, ref, place, left).astype(jnp.float32) for ref in (slopes, outputs)
  )
  terms, weights = slope * output, example.weights(head, start)
  slope = slope if weights is None else slope * weights[:, None]
  (delta, *more), line = made, number * layout.heads + head
  store_line(delta, line, start, jnp.sum(terms, axis=1))
  bias = example.bias(VALUE, lax.div(head, layout.group))
  if bias is not None:
    shift = slope * bias[None]
    apart = terms - shift if given.dropout is None else shift
    store_line(more.pop(0), line, start, jnp.sum(apart, axis=1))
  for ref in more:
    store(ref, place, slope, rows=left, columns=layout.head_dim)


def _cut(
  block: tuple[int, ...] | None,
  visibility: Visibility,
  distance_bias: DistanceBias | None,
  dropout: ProbabilityDropout | None,
  layout: Layout,
  dtype: DTypeLike,
  *,
  reverse: bool,
) -> Tile:
  """The given sizes or else those of `tiles`, no larger than sequences need."""
  beside = {
    "dropout": dropout is not None,
    "masked": visibility.causal or visibility.key_ids is not None,
    "biased": distance_bias is not None,
  }
  found = block or tiles(layout, dtype, **beside)[reverse]
  return Tile(*found).within(layout)


def _lines(by_token: jax.Array, layout: Layout) -> jax.Array:
  """[batch * heads, queries] from [batch * queries, heads]."""
  by_token = by_token.reshape(layout.batch, layout.queries, layout.heads)
  return by_token.swapaxes(1, 2).reshape(-1, layout.queries)


def _prepare(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  distance_bias: DistanceBias | None,
  visibility: Visibility,
  dropout: ProbabilityDropout | None,
  layout: Layout,
) -> Callable[[tuple[int, int]], tuple[Static, Operands[jax.Array], jax.Array]]:
  """From sizes of a block to operands, and spans of queries, for every example.

  There are as many spans of blocks of queries as of blocks of keys.
  """

  def spread(array: jax.Array) -> jax.Array:
    return jnp.broadcast_to(array, (layout.batch, *array.shape[1:]))

  ids = jax.tree.map(spread, visibility.numbers(layout.queries))
  positions = jax.tree.map(spread, visibility.query_positions)
  own = None if weights is None else _lines(weights, layout)
  numbers = None if distance_bias is None else distance_bias.numbers.reshape(-1)

  def cut(block: tuple[int, int]) -> tuple[Static, Operands[jax.Array], jax.Array]:
    static = Static(layout, block, visibility.order)
    most = max(static.blocks(QUERY), static.blocks(KEY))

    def fill(spans: jax.Array) -> jax.Array:
      return spread(jnp.pad(spans, ((0, 0), (0, most - spans.shape[1]), (0, 0))))

    key_spans, query_spans = map(fill, visibility.spans(layout.queries, layout.keys, block))
    first, penalties = visibility.first_query, visibility.penalties
    given = Operands(
      matrices, bias, own, ids, first, positions, penalties, numbers, dropout, key_spans=key_spans
    )
    return static, given, query_spans

  return cut


class _Example:
  """What a kernel reads of one example, block by block."""

  def __init__(self, given: Operands[jax.Ref], static: Static, number: jax.Array):
    self.given, self.static, self.number = given, static, number
    self.layout = static.layout

  def rows(self, which: int, head: jax.Array, start: jax.Array) -> jax.Array:
    """Queries, keys or values of a head without bias; zeros beyond the example or the head."""
    layout = self.layout
    matrix = self.given.matrices[layout.columns[which][0]]
    place = layout.place(which, self.number, start, head)
    return self.load(which, matrix, place, layout.times(which) - start)

  def load(
    self, which: int, matrix: jax.Ref, place: tuple[jax.Array, jax.Array], left: jax.Array
  ) -> jax.Array:
    """A block of a head's columns, of which `left` rows belong to the example."""
    width = self.layout.head_dim
    block = (self.static.size(which), padded(width))
    inside = {
      "rows": None if self.static.filled(which) else left,
      "columns": None if block[1] == width else width,
    }
    return load(matrix, place, block, **inside, whole=all(x is None for x in inside.values()))

  def bias(self, which: int, head: jax.Array) -> jax.Array | None:
    """What is to be added to the queries, keys or values of a head [columns], if anything."""
    if self.given.bias is None:
      return None
    _, column = self.layout.place(which, self.number, jnp.int32(0), head)
    width = self.layout.head_dim
    return load(self.given.bias, (0, column), (1, padded(width)), columns=width)[0]

  def visit(
    self,
    spans: jax.Ref,
    block: jax.Array,
    turn: Callable[[jax.Array, Carry, bool], Carry],
    carry: Carry,
  ) -> Carry:
    """Takes turns over the blocks that a block has to do with.

    Args:
      spans: see `Visibility.spans`.
      block: whose they are.
      turn: from the number of a block, what is carried, and whether some pairs of the block may be
        masked, to what is carried on.
      carry: what the first turn is given.
    """
    first, begin, end, past = (spans[self.number, block, one] for one in range(4))
    partial, full = (
      lambda number, carry, masked=masked: turn(number, carry, masked) for masked in (True, False)
    )
    order = self.static.order
    if self.static.filled(KEY) and not order.causal and self.given.ids is None:
      return lax.fori_loop(first, past, full, carry)
    carry = lax.fori_loop(first, begin, partial, carry)
    carry = lax.fori_loop(begin, end, full, carry)
    return lax.fori_loop(end, past, partial, carry)

  def line(self, ref: jax.Ref, head: jax.Array, start: jax.Array, other: float) -> jax.Array:
    """What a matrix [batch * heads, queries] has for a block of queries."""
    number = self.number * self.layout.heads + head
    return load_line(ref, number, start, self.static.size(QUERY), other=other)

  def weights(self, head: jax.Array, start: jax.Array) -> jax.Array | None:
    """Weight of a head at every query of a block, if it has any."""
    given = self.given.weights
    return None if given is None else self.line(given, head, start, 0.0)

  def positions(self, shape: tuple[int, ...], starts: _Pair, transposed: bool) -> _Pair:
    """Of queries and keys of a block's pairs; see `only_allowed`."""
    queries, keys = (
      start + lax.broadcasted_iota(jnp.int32, shape, axis ^ transposed)
      for axis, start in enumerate(starts)
    )
    if self.given.query_positions is not None:
      size = self.static.size(QUERY)
      own = load_line(self.given.query_positions, self.number, starts[0], size)
      queries = jnp.broadcast_to(_per_query(own, transposed), shape)
    if self.given.first_query is not None:
      queries += self.given.first_query[0]
    return queries, keys

  def logits(
    self, products: jax.Array, head: jax.Array, starts: _Pair, transposed: bool = False
  ) -> jax.Array:
    """Of a block's pairs, for an exponential to base 2, from products of queries and keys."""
    logits, given = products * self.static.scale, self.given
    if given.penalties is None and given.numbers is None:
      return logits
    queries, keys = self.positions(products.shape, starts, transposed)
    if given.penalties is not None:
      distance = jnp.abs(queries - keys).astype(jnp.float32)
      logits -= (given.penalties[head] * _LOG2E) * distance
    if given.numbers is not None:
      count = given.numbers.shape[0] // self.layout.heads
      # Numbers are those of a device's own queries.
      first = 0 if given.first_query is None else given.first_query[0]
      place = keys - queries + (first + self.layout.queries - 1)
      # Beyond the example there are none; what stands there is masked.
      place = jnp.clip(place, 0, count - 1)
      logits += load_each(given.numbers, head * count + place) * _LOG2E
    return logits

  def only_allowed(
    self, values: jax.Array, starts: _Pair, other: float, transposed: bool = False
  ) -> jax.Array:
    """Values of a block's pairs, `other` where a query does not read a key.

    Args:
      values: of pairs [queries, keys].
      starts: first query and first key of the block.
      other: see above.
      transposed: whether they are [keys, queries].
    """
    given, size = self.given, self.static.block
    queries, keys = self.positions(values.shape, starts, transposed)
    rules = [] if self.static.filled(KEY) else [keys < self.layout.keys]
    in_order = self.static.order.in_order(queries, keys)
    if in_order is not None:
      rules.append(in_order)
    if given.ids is not None:
      mine = load_line(given.ids[0], self.number, starts[0], size[0])
      others = load_line(given.ids[1], self.number, starts[1], size[1], other=HIDDEN)
      rules.append(same_number(_per_query(mine, transposed), _per_query(others, not transposed)))
    if not rules:
      return values
    return jnp.where(functools.reduce(operator.and_, rules), values, other)

  def dropout(self, head: jax.Array, start: _Pair, transposed: bool = False) -> jax.Array | float:
    """What dropout multiplies the probabilities of a block with."""
    given, whole = self.given.dropout, (self.layout.queries, self.layout.keys)
    if given is None:
      return 1.0
    keep = given.keep_of_block(self.number, head, start, self.static.block, whole)
    return jnp.where(keep.T if transposed else keep, given.scale, 0.0)


def _per_query(line: jax.Array, transposed: bool) -> jax.Array:
  """A number for every query, beside pairs [queries, keys], or [keys, queries] if `transposed`."""
  return line[None] if transposed else line[:, None]


def _forward(given: Operands[jax.Ref], heads: jax.Ref, *saved: jax.Ref, static: Static) -> None:
  """Of a block of queries in one head."""
  head, block, number = (pl.program_id(axis) for axis in range(3))
  layout, example = static.layout, _Example(given, static, number)
  start = block * static.size(QUERY)
  query, key_head = example.rows(QUERY, head, start), lax.div(head, layout.group)
  if (shift := example.bias(QUERY, head)) is not None:
    query = (query.astype(jnp.float32) + shift[None]).astype(query.dtype)
  for ref in saved[1:]:
    own = layout.place(QUERY, number, start, head)
    store(ref, own, query, rows=layout.queries - start, columns=layout.head_dim)
  bias = example.bias(VALUE, key_head)
  # With dropout, the probabilities that remain do not sum to 1.
  apart = bias is not None and given.dropout is not None

  def turn(
    key_block: jax.Array, carry: tuple[jax.Array, ...], masked: bool
  ) -> tuple[jax.Array, ...]:
    total, largest, mass, *kept = carry
    key_start = key_block * static.size(KEY)
    key, value = (example.rows(which, key_head, key_start) for which in (KEY, VALUE))
    logits = example.logits(dot(query, key, (1, 1)), head, (start, key_start))
    if masked:
      logits = example.only_allowed(logits, (start, key_start), FAR)
    new = jnp.maximum(largest, jnp.max(logits, axis=1))
    share = jnp.exp2(logits - new[:, None])
    if masked:
      share = example.only_allowed(share, (start, key_start), 0.0)
    shrunk = jnp.exp2(largest - new)
    mass = mass * shrunk + jnp.sum(share, axis=1)
    share = share * example.dropout(head, (start, key_start))
    kept = [one * shrunk + jnp.sum(share, axis=1) for one in kept]
    total = total * shrunk[:, None] + dot(share.astype(value.dtype), value)
    return total, new, mass, *kept

  zeros = jnp.zeros(query.shape[:1], jnp.float32)
  begin = (jnp.zeros(query.shape, jnp.float32), zeros + FAR, zeros, *[zeros] * apart)
  total, largest, mass, *kept = example.visit(given.key_spans, block, turn, begin)
  if bias is not None:
    total = total + (kept or [mass])[0][:, None] * bias[None]
  mass = jnp.where(mass > 0, mass, 1.0)
  weights = example.weights(head, start)
  scaled = total * ((1.0 if weights is None else weights) / mass)[:, None]
  place = (number * layout.queries + start, head * layout.head_dim)
  store(heads, place, scaled, rows=layout.queries - start, columns=layout.head_dim)
  for ref in saved[:1]:
    # A row that read nothing has one so large that it has no probabilities later, either.
    line = jnp.where(largest > FAR, largest + jnp.log2(mass), -FAR)
    store_line(ref, number * layout.heads + head, start, line)


class _Row(NamedTuple):
  """What the reverse pass knows of a block of queries in one head.

  Attributes:
    logsumexp: see `Saved`; beyond the example so large that nothing is left.
    delta: see `Reverse`.
    shift: see `Reverse`.
    slope: the gradient with respect to the head before its weight.
  """

  logsumexp: jax.Array
  delta: jax.Array
  shift: jax.Array | None
  slope: jax.Array


class _Reversed(_Example):
  """What a kernel of the reverse pass reads of one example, block by block."""

  def __init__(
    self,
    given: Operands[jax.Ref],
    reverse: Reverse[jax.Ref],
    static: Static,
    number: jax.Array,
  ):
    super().__init__(given, static, number)
    self.reverse = reverse

  def row(self, head: jax.Array, start: jax.Array) -> _Row:
    """Of the block of queries that begins there."""
    reverse, layout = self.reverse, self.layout
    place = (self.number * layout.queries + start, head * layout.head_dim)
    return _Row(
      self.line(reverse.logsumexp, head, start, -FAR),
      self.line(reverse.delta, head, start, 0.0),
      None if reverse.shift is None else self.line(reverse.shift, head, start, 0.0),
      self.load(QUERY, reverse.slopes, place, layout.queries - start),
    )

  def errors(
    self,
    head: jax.Array,
    one: _Row,
    products: jax.Array,
    d_heads: jax.Array,
    starts: _Pair,
    masked: bool,
    transposed: bool = False,
  ) -> _Pair:
    """Probabilities of a block behind dropout, and the gradient of its logits."""
    logits = self.logits(products, head, starts, transposed)
    share = jnp.exp2(logits - _per_query(one.logsumexp, transposed))
    if masked:
      share = self.only_allowed(share, starts, 0.0, transposed)
    kept = self.dropout(head, starts, transposed)
    if one.shift is not None:
      d_heads += _per_query(one.shift, transposed)
    return share * kept, share * (kept * d_heads - _per_query(one.delta, transposed))


def _sum_diagonals(
  given: Operands[jax.Ref],
  reverse: Reverse[jax.Ref],
  sums: jax.Ref,
  *,
  static: Static,
  parts: int,
) -> None:
  """The gradient of logits, summed over blocks of a diagonal and every `parts`-th example."""
  head, diagonal, part = (pl.program_id(axis) for axis in range(3))
  layout, (side, _), blocks = static.layout, static.block, static.blocks(QUERY)
  key_head = lax.div(head, layout.group)
  # Of block i of queries, block i + later of keys.
  later = diagonal - (blocks - 1)

  def of_example(turn: jax.Array, total: jax.Array) -> jax.Array:
    number = part + turn * parts
    example = _Reversed(given, reverse, static, number)

    def of_block(block: jax.Array, total: jax.Array) -> jax.Array:
      start, first = block * side, (block + later) * side
      query, one = example.rows(QUERY, head, start), example.row(head, start)
      key, value = (example.rows(which, key_head, first) for which in (KEY, VALUE))
      products, d_heads = dot(query, key, (1, 1)), dot(one.slope, value, (1, 1))
      return total + example.errors(head, one, products, d_heads, (start, first), masked=True)[1]

    def where_met(block: jax.Array, total: jax.Array) -> jax.Array:
      spans = given.key_spans
      met = (spans[number, block, 0] <= block + later) & (block + later < spans[number, block, 3])
      return lax.cond(met, of_block, lambda _, total: total, block, total)

    least, past = jnp.maximum(-later, 0), jnp.minimum(static.blocks(KEY) - later, blocks)
    return lax.fori_loop(least, past, where_met, total)

  turns = lax.div(layout.batch - part + (parts - 1), parts)
  total = lax.fori_loop(0, turns, of_example, jnp.zeros((side, side), jnp.float32))
  line = (head * pl.num_programs(1) + diagonal) * parts + part
  store(sums, (line * side, 0), total)


def _backward(
  given: Operands[jax.Ref], reverse: Reverse[jax.Ref], *outputs: jax.Ref, static: Static
) -> None:
  """Of a block of keys, and of the queries with its number, in all heads of a group."""
  count = len(given.matrices)
  gradients, parts = outputs[:count], outputs[count:]
  key_head, block, number = (pl.program_id(axis) for axis in range(3))
  layout, example = static.layout, _Reversed(given, reverse, static, number)
  heads = [key_head * layout.group + one for one in range(layout.group)]
  factor = 1 / math.sqrt(layout.head_dim)

  def put(which: int, head: jax.Array, start: jax.Array, values: jax.Array) -> None:
    ref, left = gradients[layout.columns[which][0]], layout.times(which) - start
    place = layout.place(which, number, start, head)
    store(ref, place, values, rows=left, columns=layout.head_dim)
    for one in parts:
      line = number * given.key_spans.shape[1] + block
      store(one, (line, place[1]), jnp.sum(values, axis=0)[None], columns=layout.head_dim)

  key_start = block * static.size(KEY)
  key, value = (example.rows(which, key_head, key_start) for which in (KEY, VALUE))

  def over_queries(head: jax.Array, sums: _Pair) -> _Pair:
    def turn(query_block: jax.Array, sums: _Pair, masked: bool) -> _Pair:
      start = query_block * static.size(QUERY)
      query, one = example.rows(QUERY, head, start), example.row(head, start)
      # [keys, queries]: so the products below take what registers hold, and transpose nothing.
      products, d_heads = dot(key, query, (1, 1)), dot(value, one.slope, (1, 1))
      starts = start, key_start
      share, error = example.errors(head, one, products, d_heads, starts, masked, transposed=True)
      d_key, d_value = sums
      d_value += dot(share.astype(query.dtype), one.slope)
      d_key += dot(error.astype(query.dtype), query)
      return d_key, d_value

    return example.visit(reverse.query_spans, block, turn, sums)

  zeros = jnp.zeros(key.shape, jnp.float32)
  sums = (zeros, zeros)
  for head in heads:
    sums = over_queries(head, sums)
  put(KEY, key_head, key_start, sums[0] * factor)
  put(VALUE, key_head, key_start, sums[1])

  start = block * static.size(QUERY)

  def over_keys(head: jax.Array) -> None:
    query, one = example.rows(QUERY, head, start), example.row(head, start)

    def turn(key_block: jax.Array, total: jax.Array, masked: bool) -> jax.Array:
      first = key_block * static.size(KEY)
      key, value = (example.rows(which, key_head, first) for which in (KEY, VALUE))
      products, d_heads = dot(query, key, (1, 1)), dot(one.slope, value, (1, 1))
      _, error = example.errors(head, one, products, d_heads, (start, first), masked)
      return total + dot(error.astype(query.dtype), key)

    nothing = jnp.zeros(query.shape, jnp.float32)
    total = example.visit(given.key_spans, block, turn, nothing)
    put(QUERY, head, start, total * factor)

  for head in heads:
    over_keys(head)
