"""The kernels of `tpu`: what a program does at its blocks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from compmod_jax.kernels.attention.definition import FAR
from compmod_jax.kernels.attention.layout import KEY, LANES, QUERY, VALUE
from compmod_jax.kernels.attention.tpu_operands import (
  Operands,
  Place,
  Reverse,
  Static,
  block_pair,
  key_span,
  with_bias,
)
from compmod_jax.kernels.attention.visibility import same_number
from compmod_jax.kernels.routing.blocks import dot


class _Example:
  """What a kernel reads of one of a program's examples, at a block of queries and one of keys."""

  def __init__(self, given: Operands[jax.Ref], static: Static, number: Any, place: Place):
    self.given, self.static, self.number, self.place = given, static, number, place
    block = place.query, place.key
    self.starts = tuple(b * size for b, size in zip(block, static.block, strict=True))

  def rows(self, which: int) -> jax.Array:
    """A tile of queries, keys or values."""
    rows = self.given.rows[which][self.number]
    if self.given.biases is not None:
      rows = with_bias(rows, self.given.biases[which][...])
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


def forward(
  spans: list[jax.Ref],
  given: Operands[jax.Ref],
  outputs: list[jax.Ref],
  scratch: list[jax.Ref],
  *,
  static: Static,
) -> None:
  """Of a block of queries in a tile of heads, key block by key block."""
  number, block, tile, key_block = place = Place(*(pl.program_id(axis) for axis in range(4)))
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
  first, past = key_span(static, spans, number, block)

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


def backward(
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
  number, tile, step = (pl.program_id(axis) for axis in range(3))
  keys = static.blocks(KEY)
  (block, key_block), pairs = block_pair(static, step), static.blocks(QUERY) * keys
  at = _Reverse(
    given, reverse, outputs, scratch, static, matrices, Place(number, block, tile, key_block)
  )
  at_pairs = step < pairs

  pl.when(step == 0)(at.begin_tile)
  if given.projection is not None:
    pl.when((number == 0) & (tile == 0) & (step == 0))(at.begin_projection)
    pl.when((tile == 0) & at_pairs & (key_block == 0))(at.over_examples(at.add_to_bias))
  pl.when(at_pairs & (key_block == 0))(at.begin_queries)

  seen = at_pairs
  if static.several:
    first, past = key_span(static, spans, number, block)
    seen = at_pairs & (first <= key_block) & (key_block < past)
  pl.when(seen)(at.over_examples(at.visit))

  def ready(ref: jax.Ref, first: int) -> jax.Array:
    return ref[:, pl.ds((step - first) * static.size(KEY), static.size(KEY))]

  last = at_pairs & (key_block == keys - 1)
  pl.when(last)(lambda: at.put(QUERY, at.d_query[...] * static.scale))
  turn = (step >= pairs) & (step < pairs + keys)
  pl.when(turn)(lambda: at.put(KEY, ready(at.d_key, pairs) * static.scale))
  pl.when(step >= pairs + keys)(lambda: at.put(VALUE, ready(at.d_value, pairs + keys)))


class _Reverse:
  """The reverse pass at a block of queries and one of keys: what is read, summed and written.

  Attributes:
    d_query, d_key, d_value: sums, of the block of queries and of all keys, float32.
    gradients: where those are written.
    delta: and the sums over a head of its gradients times itself.
    parts: and the sums of each program's gradients over rows, where matrices have a bias.
    d_numbers: sums, of the numbers of distances.
    d_kernel, d_bias: sums, of the projection.
  """

  def __init__(
    self,
    given: Operands[jax.Ref],
    reverse: Reverse[jax.Ref],
    outputs: list[jax.Ref],
    scratch: list[jax.Ref],
    static: Static,
    matrices: int,
    place: Place,
  ):
    self.given, self.reverse, self.static, self.place = given, reverse, static, place
    self.gradients, self.delta, *parts = outputs[:matrices], *outputs[matrices:]
    self.d_kernel, self.d_bias = (None,) * 2 if given.projection is None else parts[-2:]
    parts = parts if given.projection is None else parts[:-2]
    self.d_numbers = None if given.numbers is None else parts.pop()
    self.parts = parts
    self.d_query, self.d_key, self.d_value = scratch

  def over_examples(self, do: Callable[[_Example], None]) -> Callable[[], None]:
    """What does something for every example of the program."""

    def run() -> None:
      pl.loop(0, self.static.examples)(
        lambda n: do(_Example(self.given, self.static, n, self.place))
      )

    return run

  def begin_tile(self) -> None:
    """Zeros what is summed over all queries of a tile."""
    for ref in (self.d_key, self.d_value, self.d_numbers):
      if ref is not None:
        ref[...] = jnp.zeros(ref.shape, jnp.float32)

  def begin_projection(self) -> None:
    """Zeros what is summed over all programs."""
    for ref in (self.d_kernel, self.d_bias):
      assert ref is not None
      ref[...] = jnp.zeros(ref.shape, jnp.float32)

  def begin_queries(self) -> None:
    """Zeros what is summed over the keys of a block of queries; takes what their heads tell."""
    self.d_query[...] = jnp.zeros(self.d_query.shape, jnp.float32)
    if self.reverse.outputs is not None:
      self.over_examples(self.take_kept)()

  def take_kept(self, example: _Example) -> None:
    """Writes what follows from heads that were kept."""
    self.delta[example.number] = _into_lines(self.delta_of(example), self.static)
    if self.given.projection is not None:
      self.add_to_kernel(example, self.kept(example))

  def add_to_bias(self, example: _Example) -> None:
    """Adds to the gradient of the projection's bias."""
    rows = example.within(self.reverse.slopes[example.number], QUERY).astype(jnp.float32)
    assert self.d_bias is not None
    self.d_bias[...] += jnp.sum(rows, axis=0, keepdims=True)

  def add_to_kernel(self, example: _Example, heads: jax.Array) -> None:
    """Adds to the gradient of the projection's matrix."""
    rows = pl.ds(self.place.tile * LANES, LANES)
    slope = example.within(self.reverse.slopes[example.number], QUERY)
    assert self.d_kernel is not None
    self.d_kernel[rows] += dot(heads, slope, (0, 0))

  def put(self, which: int, values: jax.Array) -> None:
    """Writes a block of the gradient of queries, keys or values."""
    ref = self.gradients[self.static.layout.columns[which][0]]
    ref[...] = values.astype(ref.dtype)
    for one in self.parts:
      one[0] = jnp.sum(jnp.sum(values, axis=0), axis=0, keepdims=True)

  def slope(self, example: _Example) -> jax.Array:
    """The gradient of heads times their weights."""
    slope = example.within(self.reverse.slopes[example.number], QUERY)
    if self.given.projection is None:
      return slope
    return dot(slope, self.given.projection[0][...], (1, 1)).astype(slope.dtype)

  def kept(self, example: _Example) -> jax.Array:
    """The heads, where they were kept."""
    assert self.reverse.outputs is not None
    return example.within(self.reverse.outputs[example.number], QUERY)

  def delta_of(self, example: _Example) -> jax.Array:
    """The gradient of weights times the weights, where heads were kept."""
    products = self.slope(example).astype(jnp.float32) * self.kept(example).astype(jnp.float32)
    return self.sums_of(products)

  def sums_of(self, products: jax.Array) -> jax.Array:
    """The sum of each head's columns."""
    own = [_only(products, head, self.static) for head in range(self.static.share)]
    return _spread([jnp.sum(one, axis=1, keepdims=True) for one in own], self.static)

  def visit(self, example: _Example) -> None:
    """Adds what the pairs of the two blocks contribute."""
    static, number = self.static, example.number
    query, key, value = (example.rows(which) for which in (QUERY, KEY, VALUE))
    asked, shares, dropout = self._probabilities(example, query, key)
    back = self.slope(example)
    weights = self.given.weights
    weights = None if weights is None else _from_lines(weights[number], static)
    if self.reverse.outputs is not None:
      sums = self.delta_of(example)
    else:
      left = map(_times, shares, dropout)
      heads = _spread([dot(one.astype(value.dtype), value) for one in left], static)
      heads = (heads if weights is None else heads * weights).astype(back.dtype)
      sums = self.sums_of(back.astype(jnp.float32) * heads.astype(jnp.float32))
      self.delta[number] = _into_lines(sums, static)
      self.add_to_kernel(example, heads)
    back = back if weights is None else (back * weights).astype(back.dtype)
    of_query, of_line = [], []
    of_key = of_value = jnp.zeros(key.shape, jnp.float32)
    for head, (one, share, factors) in enumerate(zip(asked, shares, dropout, strict=True)):
      own = _only(back, head, static)
      slopes = _times(dot(own, value, (1, 1)), factors)
      error, share = share * (slopes - _column(sums, head, static)), _times(share, factors)
      if self.given.numbers is not None:
        of_line.append(_sums_of_diagonals(error, self.given.numbers.shape[1]))
      share, error = share.astype(query.dtype), error.astype(query.dtype)
      of_query.append(dot(error, key))
      of_key = of_key + dot(error, one, (0, 0))
      of_value = of_value + dot(share, own, (0, 0))
    at = pl.ds(self.place.key * static.size(KEY), static.size(KEY))
    if self.d_numbers is not None:
      diagonal = static.diagonal(self.place.query, self.place.key)
      self.d_numbers[diagonal] += jnp.concatenate(of_line)
    self.d_query[number] += example.turned_back(_spread(of_query, static), QUERY)
    self.d_key[number, at] += example.turned_back(of_key, KEY)
    self.d_value[number, at] += of_value

  def _probabilities(
    self, example: _Example, query: jax.Array, key: jax.Array
  ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array | None]]:
    """Queries of every head; its probabilities before dropout; what that multiplies them with."""
    static = self.static
    logsumexp = _from_lines(self.reverse.logsumexp[example.number], static)
    allowed = example.allowed()
    asked = [_only(query, head, static) for head in range(static.share)]
    distance = example.distance()
    dropout = [example.dropout(head) for head in range(static.share)]
    shares = []
    for head, one in enumerate(asked):
      logits = example.logits(one, key, head, distance)
      share = jnp.exp(logits - _column(logsumexp, head, static))
      shares.append(share if allowed is None else jnp.where(allowed, share, 0.0))
    return asked, shares, dropout
