"""Flash attention whose heads have weights, for NVIDIA GPUs.

Queries, keys and values are columns of matrices [batch * time, columns], all of one matrix where
one product made them, so that nothing is sliced or copied. Heads leave side by side, each times its
weight: one factor where flash attention divides by the sum of a row anyway.

Blocks have sides that are powers of two and at least 16; what they hold beyond an array is masked
in every load and store.

Source: Dao 2023 (FlashAttention-2) for blocks and the saved logsumexp; Kolios 2023, equation 5.3,
for the weights.
"""

import dataclasses
import functools
import math
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from compmod_jax.kernels.attention.definition import FAR
from compmod_jax.kernels.attention.dropout import ProbabilityDropout
from compmod_jax.kernels.attention.layout import KEY, QUERY, VALUE, Layout
from compmod_jax.kernels.attention.visibility import HIDDEN, Visibility, same_number
from compmod_jax.kernels.routing.blocks import dot
from compmod_jax.kernels.routing.triton import (
  call,
  load,
  load_column,
  load_line,
  padded,
  store,
  store_line,
)

_LOG2E = math.log2(math.e)
_Pair = tuple[jax.Array, jax.Array]
A = TypeVar("A")


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


# Of the reverse pass, by columns of a head and whether it is float32: without and with dropout.
_REVERSE = {
  (32, False): (Tile(64, 64), Tile(64, 64, 8, 2)),
  (64, False): (Tile(64, 64), Tile(64, 32, 8, 2)),
  (128, False): (Tile(32, 32, 8, 2),) * 2,
  (32, True): (Tile(64, 64), Tile(64, 64, 8, 2)),
  (64, True): (Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
  (128, True): (Tile(16, 16, 8, 2),) * 2,
}


def tiles(layout: Layout, dtype: DTypeLike, dropout: bool) -> tuple[Tile, Tile]:
  """Of the forward and of the reverse pass: as large as registers allow.

  Found by compiling for an H100 (`benchmarks/registers.py`), whose programs spill none.
  """
  wide, columns = jnp.dtype(dtype) == jnp.float32, max(32, padded(layout.head_dim))
  if columns * jnp.dtype(dtype).itemsize > 128:
    forward = Tile(128, 64, 8, 2)
  else:
    forward = Tile(64, 64, stages=2) if dropout else Tile(128, 64)
  return forward, _REVERSE[columns, wide][dropout]


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

  def blocks(self, which: int) -> int:
    """How many there are of an example."""
    return pl.cdiv(self.layout.times(which), self.size(which))


class Operands(NamedTuple, Generic[A]):
  """What kernels read, as arrays or as references to them.

  Attributes:
    matrices: those that hold queries, keys and values [batch * time, columns].
    bias: what is added to the columns of a matrix that holds all three [1, columns], float32; none
      for nothing.
    weights: of heads [batch * queries, heads], float32; none for 1.
    ids: numbers of queries [batch, queries] and of keys [batch, keys], where there are any.
    dropout: which probabilities become 0; none for no dropout.
    key_spans: blocks of keys that a block of queries visits [batch, blocks, 2].
  """

  matrices: tuple[A, ...]
  bias: A | None
  weights: A | None
  ids: tuple[A, A] | None
  dropout: ProbabilityDropout | None
  key_spans: A


class Reverse(NamedTuple, Generic[A]):
  """What the reverse pass reads besides.

  Attributes:
    outputs: the heads as they left.
    slopes: the gradient with respect to them.
    logsumexp: logarithm to base 2 of the sum of a row [batch * heads, queries].
    query_spans: blocks of queries that a block of keys visits [batch, blocks, 2].
  """

  outputs: A
  slopes: A
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
  dropout: ProbabilityDropout | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Heads side by side [batch * queries, heads * head_dim] and, to `save`, the logsumexp.

  Args:
    matrices: see `Operands`.
    bias: see `Operands`.
    weights: see `Operands`.
    visibility: which keys a query may read.
    layout: sizes, and where columns begin.
    block: see `Tile`; none for what `tiles` says.
    interpret: run without the hardware.
    save: whether a reverse pass follows.
    dropout: see `Operands`.
  """
  dtype = matrices[layout.columns[QUERY][0]].dtype
  cut = Tile(*block or tiles(layout, dtype, dropout is not None)[0]).within(layout)
  static, given, _ = _prepare(matrices, bias, weights, visibility, dropout, layout, cut.block)
  rows, lines = layout.batch * layout.queries, layout.batch * layout.heads
  outputs = [jax.ShapeDtypeStruct((rows, layout.heads * layout.head_dim), dtype)]
  outputs += [jax.ShapeDtypeStruct((lines, layout.queries), jnp.float32)] * save
  grid = (layout.heads, static.blocks(QUERY), layout.batch)
  kernel = functools.partial(_forward, static=static)
  heads, *logsumexp = call(
    kernel,
    grid,
    [given],
    outputs,
    interpret,
    warps=cut.warps,
    stages=cut.stages,
    flops=4 * layout.pairs * layout.head_dim,
  )
  return heads, logsumexp[0] if save else None


def backward(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  visibility: Visibility,
  outputs: jax.Array,
  logsumexp: jax.Array,
  slopes: jax.Array,
  *,
  layout: Layout,
  block: tuple[int, ...] | None,
  interpret: bool,
  dropout: ProbabilityDropout | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array | None, jax.Array]:
  """Gradients of matrices and bias; [batch * queries, heads], that of a weight times the weight.

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
    logsumexp: what it saved.
    slopes: the gradient with respect to the heads.
    layout: as in `forward`.
    block: as in `forward`.
    interpret: run without the hardware.
    dropout: as in `forward`.
  """
  cut = Tile(*block or tiles(layout, outputs.dtype, dropout is not None)[1]).within(layout)
  static, given, query_spans = _prepare(
    matrices, bias, weights, visibility, dropout, layout, cut.block
  )
  reverse = Reverse(outputs, slopes, logsumexp, query_spans)
  made = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in matrices]
  made.append(jax.ShapeDtypeStruct(logsumexp.shape, jnp.float32))
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
  by_head = found[count].reshape(layout.batch, layout.heads, layout.queries)
  d_bias = None if bias is None else jnp.sum(found[-1], axis=0, keepdims=True)
  return tuple(found[:count]), d_bias, by_head.swapaxes(1, 2).reshape(-1, layout.heads)


def _prepare(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  visibility: Visibility,
  dropout: ProbabilityDropout | None,
  layout: Layout,
  block: tuple[int, int],
) -> tuple[Static, Operands[jax.Array], jax.Array]:
  """Operands, and spans of queries, for every example; as many blocks of queries as of keys."""
  static = Static(layout, block, visibility.order)
  most = max(static.blocks(QUERY), static.blocks(KEY))

  def spread(array: jax.Array) -> jax.Array:
    return jnp.broadcast_to(array, (layout.batch, *array.shape[1:]))

  def fill(spans: jax.Array) -> jax.Array:
    return spread(jnp.pad(spans, ((0, 0), (0, most - spans.shape[1]), (0, 0))))

  ids = jax.tree.map(spread, visibility.numbers(layout.queries))
  key_spans, query_spans = map(fill, visibility.spans(layout.queries, layout.keys, block))
  return static, Operands(matrices, bias, weights, ids, dropout, key_spans), query_spans


class _Example:
  """What a kernel reads of one example, block by block."""

  def __init__(self, given: Operands[jax.Ref], static: Static, number: jax.Array):
    self.given, self.static, self.number = given, static, number
    self.layout = static.layout

  def rows(self, which: int, head: jax.Array, start: jax.Array) -> jax.Array:
    """Queries, keys or values of a head; zeros beyond the example or the head."""
    layout = self.layout
    matrix = self.given.matrices[layout.columns[which][0]]
    block = (self.static.size(which), padded(layout.head_dim))
    place, left = layout.place(which, self.number, start, head), layout.times(which) - start
    rows = load(matrix, place, block, rows=left, columns=layout.head_dim)
    if self.given.bias is None:
      return rows
    bias = load(self.given.bias, (0, place[1]), (1, block[1]), columns=layout.head_dim)
    return (rows.astype(jnp.float32) + bias).astype(rows.dtype)

  def keys_and_values(self, head: jax.Array, start: jax.Array) -> _Pair:
    """Keys and values of a head."""
    return self.rows(KEY, head, start), self.rows(VALUE, head, start)

  def span(self, spans: jax.Ref, block: jax.Array) -> _Pair:
    """The first block to visit, and one past the last."""
    return spans[self.number, block, 0], spans[self.number, block, 1]

  def weights(self, head: jax.Array, start: jax.Array) -> jax.Array:
    """Weight of a head at every query of a block."""
    size = self.static.size(QUERY)
    if self.given.weights is None:
      return jnp.ones((size,), jnp.float32)
    place, left = self.number * self.layout.queries + start, self.layout.queries - start
    return load_column(self.given.weights, place, head, size, rows=left)

  def allowed(self, query_start: jax.Array, key_start: jax.Array) -> jax.Array:
    """Which keys of a block every query of a block reads."""
    given, size = self.given, self.static.block
    queries = query_start + lax.broadcasted_iota(jnp.int32, size, 0)
    keys = key_start + lax.broadcasted_iota(jnp.int32, size, 1)
    allowed = keys < self.layout.keys
    in_order = self.static.order.in_order(queries, keys)
    if in_order is not None:
      allowed = allowed & in_order
    if given.ids is not None:
      mine = load_line(given.ids[0], self.number, query_start, size[0])
      others = load_line(given.ids[1], self.number, key_start, size[1], other=HIDDEN)
      allowed = allowed & same_number(mine[:, None], others[None])
    return allowed

  def dropout(self, head: jax.Array, start: _Pair) -> jax.Array | float:
    """What dropout multiplies the probabilities of a block with."""
    given, whole = self.given.dropout, (self.layout.queries, self.layout.keys)
    if given is None:
      return 1.0
    keep = given.keep_of_block(self.number, head, start, self.static.block, whole)
    return jnp.where(keep, given.scale, 0.0)


class _Reversed(_Example):
  """The same in the reverse pass."""

  def __init__(
    self, given: Operands[jax.Ref], reverse: Reverse[jax.Ref], static: Static, number: jax.Array
  ):
    super().__init__(given, static, number)
    self.reverse = reverse

  def logsumexp(self, head: jax.Array, start: jax.Array) -> jax.Array:
    """Logarithm of the sum of a row; beyond the example so large that nothing is left."""
    line = self.number * self.layout.heads + head
    return load_line(self.reverse.logsumexp, line, start, self.static.size(QUERY), other=-FAR)

  def slope(self, head: jax.Array, start: jax.Array) -> _Pair:
    """The gradient of a head times its weight; and the gradient of the weight times the weight."""
    layout = self.layout
    place = (self.number * layout.queries + start, head * layout.head_dim)
    block = (self.static.size(QUERY), padded(layout.head_dim))
    slope, output = (
      load(one, place, block, rows=layout.queries - start, columns=layout.head_dim)
      for one in (self.reverse.slopes, self.reverse.outputs)
    )
    delta = jnp.sum(slope.astype(jnp.float32) * output.astype(jnp.float32), axis=1)
    if self.given.weights is None:
      return slope, delta
    return (slope * self.weights(head, start)[:, None]).astype(slope.dtype), delta


def _forward(given: Operands[jax.Ref], heads: jax.Ref, *logsumexp: jax.Ref, static: Static) -> None:
  """Of a block of queries in one head."""
  head, block, number = (pl.program_id(axis) for axis in range(3))
  layout, example = static.layout, _Example(given, static, number)
  start = block * static.size(QUERY)
  query, key_head = example.rows(QUERY, head, start), lax.div(head, layout.group)

  def visit(key_block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    total, largest, mass = carry
    key_start = key_block * static.size(KEY)
    key, value = example.keys_and_values(key_head, key_start)
    allowed = example.allowed(start, key_start)
    logits = jnp.where(allowed, dot(query, key, (1, 1)) * static.scale, FAR)
    new = jnp.maximum(largest, jnp.max(logits, axis=1))
    share = jnp.where(allowed, jnp.exp2(logits - new[:, None]), 0.0)
    shrunk = jnp.exp2(largest - new)
    mass = mass * shrunk + jnp.sum(share, axis=1)
    share = share * example.dropout(head, (start, key_start))
    return total * shrunk[:, None] + dot(share.astype(value.dtype), value), new, mass

  zeros = jnp.zeros(query.shape[:1], jnp.float32)
  begin = (jnp.zeros(query.shape, jnp.float32), zeros + FAR, zeros)
  total, largest, mass = lax.fori_loop(*example.span(given.key_spans, block), visit, begin)
  mass = jnp.where(mass > 0, mass, 1.0)
  scaled = total * (example.weights(head, start) / mass)[:, None]
  place = (number * layout.queries + start, head * layout.head_dim)
  store(heads, place, scaled, rows=layout.queries - start, columns=layout.head_dim)
  for ref in logsumexp:
    # A row that read nothing has one so large that it has no probabilities later, either.
    line = jnp.where(largest > FAR, largest + jnp.log2(mass), -FAR)
    store_line(ref, number * layout.heads + head, start, line)


def _backward(
  given: Operands[jax.Ref], reverse: Reverse[jax.Ref], *outputs: jax.Ref, static: Static
) -> None:
  """Of a block of keys, and of the queries with its number, in all heads of a group."""
  count = len(given.matrices)
  gradients, delta, parts = outputs[:count], outputs[count], outputs[count + 1 :]
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

  def errors(
    head: jax.Array, slope: _Pair, query: jax.Array, key_value: _Pair, starts: _Pair
  ) -> _Pair:
    """Probabilities of a block behind dropout, and the gradient of its logits."""
    logits = dot(query, key_value[0], (1, 1)) * static.scale
    share = jnp.exp2(logits - example.logsumexp(head, starts[0])[:, None])
    share = jnp.where(example.allowed(*starts), share, 0.0)
    dropout = example.dropout(head, starts)
    d_share = dropout * dot(slope[0], key_value[1], (1, 1))
    return share * dropout, share * (d_share - slope[1][:, None])

  key_start = block * static.size(KEY)
  key_value = example.keys_and_values(key_head, key_start)

  def over_queries(head: jax.Array, sums: _Pair) -> _Pair:
    def visit(query_block: jax.Array, sums: _Pair) -> _Pair:
      start = query_block * static.size(QUERY)
      query, slope = example.rows(QUERY, head, start), example.slope(head, start)
      share, error = errors(head, slope, query, key_value, (start, key_start))
      d_value = sums[1] + dot(share.astype(slope[0].dtype), slope[0], (0, 0))
      return sums[0] + dot(error.astype(query.dtype), query, (0, 0)), d_value

    return lax.fori_loop(*example.span(reverse.query_spans, block), visit, sums)

  zeros = jnp.zeros(key_value[0].shape, jnp.float32)
  sums = (zeros, zeros)
  for head in heads:
    sums = over_queries(head, sums)
  put(KEY, key_head, key_start, sums[0] * factor)
  put(VALUE, key_head, key_start, sums[1])

  start = block * static.size(QUERY)

  def over_keys(head: jax.Array) -> None:
    query, slope = example.rows(QUERY, head, start), example.slope(head, start)
    store_line(delta, number * layout.heads + head, start, slope[1])

    def visit(key_block: jax.Array, total: jax.Array) -> jax.Array:
      first = key_block * static.size(KEY)
      pair = example.keys_and_values(key_head, first)
      _, error = errors(head, slope, query, pair, (start, first))
      return total + dot(error.astype(query.dtype), pair[0])

    span = example.span(given.key_spans, block)
    total = lax.fori_loop(*span, visit, jnp.zeros(query.shape, jnp.float32))
    put(QUERY, head, start, total * factor)

  for head in heads:
    over_keys(head)
