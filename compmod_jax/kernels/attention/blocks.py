r"""Attention on CPUs: a few heads of one example at a time, whose logits stay in a core's cache.

As one operation for all, attention and its derivative write and read arrays of all pairs of
positions of all heads and examples several times; beyond some MB they wait for memory. Here two
loops, over groups of heads and over examples, hold the logits of one group at a time. The reverse
pass forms probabilities again, from queries, keys, and the largest logit and the sum of each row:

.. math::
   P_{ij} = e^{S_{ij} - m_i} / l_i, \qquad dS = P \odot (dO\, V^T - \delta), \qquad
   \delta_i = \sum_d dO_{id} O_{id}

and sums the gradient of a bias that examples share as it goes. Where no query reads a later
position, queries are cut into a few parts, each of which has keys up to its own end.

Source: Dao et al. 2022 (FlashAttention), algorithms 1 and 4, without their blocks of keys.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from compmod_jax.kernels.attention.distances import (
  Bias,
  DistanceBias,
  of_pairs,
  sums_of_distances,
)
from compmod_jax.kernels.attention.dropout import ProbabilityDropout

_BLOCK = 2**18  # logits of a block at most, if one head of an example has no more
_FEW = 2**15  # logits of an example that are too few for a turn of a loop
_ALL = 2**18  # logits of all examples that stay in the cache as they are
_PARTS, _QUERIES = 8, 128  # parts of causal attention at most, and queries of one at least
_HIDDEN = float(jnp.finfo(jnp.float32).min)  # logit of a key that is not read

_Arrays = tuple[jax.Array, ...]


class Chosen(NamedTuple):
  """Queries that count, which come before all others of their head.

  Attributes:
    counts: how many [batch, heads].
    positions: where queries stand [batch, heads, queries], in order as far as they count. Each
      reads the key of its position and those before. None: all keys.
  """

  counts: jax.Array
  positions: jax.Array | None = None


class _Pairs(NamedTuple):
  """What pairs of positions have beside queries and keys; each may be none.

  Attributes:
    bias: [1 or batch, heads, queries, keys]; or the numbers of distances, [1, heads, distances].
    allowed: [1 or batch, 1 or heads, 1 or queries, keys].
    dropout: of probabilities.
    chosen: which queries count.
  """

  bias: jax.Array | None
  allowed: jax.Array | None
  dropout: ProbabilityDropout | None
  chosen: Chosen | None


class _Kept(NamedTuple):
  """What the reverse pass reads: `lines` are the largest logit and one over the sum of each row."""

  rows: _Arrays
  pairs: _Pairs
  heads: jax.Array
  lines: _Arrays


class _Own(NamedTuple):
  """The same of one block.

  Attributes:
    bias: [group, queries, keys].
    allowed: [1 or group, 1 or queries, keys].
    keep: which probabilities remain, [group, queries, keys].
    chosen: which queries count: how many, and positions [queries]; the group is one head.
  """

  bias: jax.Array | None
  allowed: jax.Array | None
  keep: jax.Array | None
  chosen: Chosen | None


class _Part(NamedTuple):
  """Some queries, and the keys that they may read."""

  queries: slice
  keys: slice


_as_one = contextvars.ContextVar("as_one", default=False)


@contextlib.contextmanager
def as_one() -> Iterator[None]:
  """A context in which attention is traced as one operation: to count operations, or to compare."""
  token = _as_one.set(True)
  try:
    yield
  finally:
    _as_one.reset(token)


def pays(batch: int, heads: int, queries: int, keys: int) -> bool:
  """Whether attention of these sizes is faster in blocks than as one operation."""
  of_example = heads * queries * keys
  return not _as_one.get() and of_example >= _FEW and batch * of_example >= _ALL


def attention_in_blocks(
  query: Float[Array, "batch queries heads head_dim"],
  key: Float[Array, "batch keys heads head_dim"],
  value: Float[Array, "batch keys heads head_dim"],
  bias: Bias | None = None,
  allowed: Bool[Array, "#batch #heads #queries keys"] | None = None,
  dropout: ProbabilityDropout | None = None,
  *,
  causal: bool = False,
  chosen: Chosen | None = None,
) -> Float[Array, "batch queries heads head_dim"]:
  r"""Attention, :math:`\mathrm{softmax}(Q K^T / \sqrt{D} + B) V`, in each head.

  A query that may read no key reads all alike, as `jax.nn.dot_product_attention` has it; of causal
  attention, some of the first ones. Reverse mode, any order.

  Args:
    query: Q.
    key: K.
    value: V.
    bias: B, added to the logits; of every head.
    allowed: which keys a query may read; none for all.
    dropout: which probabilities become 0; none for no dropout.
    causal: `allowed` hides all later positions, so that they need not be looked at. There are as
      many queries as keys.
    chosen: which queries of a head count; of those behind them, some or all are zeros. Without
      bias, dropout and `causal`. None for all.
  """
  several = causal or chosen is not None
  heads = query.shape[2]
  parts = _parts(query.shape[1], key.shape[1], causal=causal, several=several)
  pairs = query.shape[1] // len(parts) * key.shape[1]
  group = max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * pairs <= _BLOCK))
  group = 1 if chosen is not None else group
  run = jax.custom_vjp(lambda rows, pairs: _forward(rows, pairs, group, parts)[0])
  run.defvjp(
    lambda rows, pairs: _forward(rows, pairs, group, parts),
    lambda kept, slope: _backward(kept, slope, group, parts),
  )
  given = bias.numbers[None] if isinstance(bias, DistanceBias) else bias
  return run((query, key, value), _Pairs(given, allowed, dropout, chosen))


def _parts(queries: int, keys: int, *, causal: bool, several: bool) -> tuple[_Part, ...]:
  """The queries of an example in order; each part reads no key that the next ones do not."""
  count = max(1, min(_PARTS, queries // _QUERIES)) if several else 1
  ends = [queries * n // count for n in range(count + 1)]
  return tuple(
    _Part(slice(start, end), slice(end if causal else keys))
    for start, end in itertools.pairwise(ends)
  )


def _forward(
  rows: _Arrays, pairs: _Pairs, group: int, parts: tuple[_Part, ...]
) -> tuple[jax.Array, _Kept]:
  """The heads, and what the reverse pass reads."""

  def of_part(rows: _Arrays, own: _Own, part: _Part) -> tuple[jax.Array, _Arrays]:
    query, key, value = rows[0][:, part.queries], *(one[:, part.keys] for one in rows[1:])
    own = _of_part(own, part)
    logits = _logits(query, key, own)
    largest = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - largest[..., None])
    total = jnp.sum(weights, axis=-1)
    weights = _dropped(weights, own.keep, pairs.dropout).astype(value.dtype)
    heads = jnp.einsum("hts,hsd->htd", weights, value, preferred_element_type=jnp.float32)
    return (heads / total[..., None]).astype(value.dtype), (largest, 1 / total)

  def block(rows: _Arrays, lines: _Arrays, own: _Own) -> tuple[PyTree, _Arrays]:
    made = [_where_chosen(of_part, own, part, len(rows[1][0]))(rows, own) for part in parts]
    return jax.tree.map(lambda *ones: jnp.concatenate(ones, axis=1), *made), ()

  (heads, lines), _ = _in_turn(block, rows, (), pairs, group, parts)
  heads = _rows_together(heads)
  return heads, _Kept(rows, pairs, heads, tuple(map(_lines_together, lines)))


def _backward(
  kept: _Kept, slope: jax.Array, group: int, parts: tuple[_Part, ...]
) -> tuple[_Arrays, _Pairs]:
  """Gradients of queries, keys, values and bias."""
  rows, pairs, heads, lines = kept
  scale = 1 / jnp.sqrt(jnp.float32(rows[0].shape[-1]))
  delta = jnp.einsum("bthd,bthd->bht", slope, heads, preferred_element_type=jnp.float32)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def of_part(
    rows: _Arrays, lines: _Arrays, own: _Own, part: _Part
  ) -> tuple[_Arrays, jax.Array | None]:
    query, slope = (one[:, part.queries] for one in (rows[0], rows[3]))
    key, value = (one[:, part.keys] for one in rows[1:3])
    largest, over_total, delta = (one[:, part.queries] for one in lines)
    own = _of_part(own, part)
    weights = jnp.exp(_logits(query, key, own) - largest[..., None]) * over_total[..., None]
    read = _dropped(weights, own.keep, pairs.dropout).astype(value.dtype)
    d_value = product("hts,htd->hsd", read, slope)
    d_weights = _dropped(product("htd,hsd->hts", slope, value), own.keep, pairs.dropout)
    d_logits = weights * (d_weights - delta[..., None])
    if own.allowed is not None:  # those of a query that may read no key, too
      d_logits = jnp.where(own.allowed, d_logits, 0.0)
    d_scores = (d_logits * scale).astype(query.dtype)
    d_query = product("hts,hsd->htd", d_scores, key)
    made = d_query, product("hts,htd->hsd", d_scores, query), d_value
    return made, None if pairs.bias is None else d_logits

  def block(rows: _Arrays, lines: _Arrays, own: _Own) -> tuple[PyTree, _Arrays]:
    query, key, value, _ = rows
    d_queries, slopes, d_rows = [], [], [jnp.zeros(one.shape, jnp.float32) for one in (key, value)]
    for part in parts:
      work = _where_chosen(of_part, own, part, len(key[0]))
      (d_query, *more), of_logits = work(rows, lines, own)
      d_rows = [
        total.at[:, : one.shape[1]].add(one) for total, one in zip(d_rows, more, strict=True)
      ]
      d_queries.append(d_query)
      slopes.append(of_logits)
    made = (jnp.concatenate(d_queries, axis=1), *d_rows)
    return tuple(one.astype(query.dtype) for one in made), tuple(slopes)

  made, d_bias = _in_turn(block, (*rows, slope), (*lines, delta), pairs, group, parts, slopes=True)
  if pairs.bias is not None:
    d_bias = jnp.swapaxes(d_bias, 0, 1).reshape(pairs.bias.shape).astype(pairs.bias.dtype)
  return tuple(map(_rows_together, made)), _Pairs(d_bias, None, None, None)


def _of_part(own: _Own, part: _Part) -> _Own:
  """What the pairs of a part have."""

  def cut(one: jax.Array | None) -> jax.Array | None:
    if one is None:
      return None
    return one[:, part.queries if one.shape[1] > 1 else slice(None), part.keys]

  allowed = cut(own.allowed)
  if own.chosen is not None and own.chosen.positions is not None:
    places = jnp.arange(part.keys.stop)[None]
    seen = (places <= own.chosen.positions[part.queries, None])[None]
    allowed = seen if allowed is None else seen & allowed
  return _Own(cut(own.bias), allowed, cut(own.keep), own.chosen)


def _where_chosen(
  work: Callable[..., PyTree], own: _Own, part: _Part, keys: int
) -> Callable[..., PyTree]:
  """The work of a part, or zeros in its place where none of its queries count.

  Where queries read keys up to their positions, with half of the keys where none reads others.
  """
  whole = functools.partial(work, part=part)
  if own.chosen is None:
    return whole
  counts, positions = own.chosen

  def of_some(*args: PyTree) -> PyTree:
    shapes = jax.eval_shape(whole, *args)
    ways = [lambda *_: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes), whole]
    way = (part.queries.start < counts).astype(jnp.int32)
    if positions is not None and keys > 1:
      some = part._replace(keys=slice(keys // 2))

      def with_half(*args: PyTree) -> PyTree:
        return jax.tree.map(_filled, work(*args, part=some), shapes)

      ways = [*ways[:1], with_half, whole]
      last = positions[jnp.clip(counts, 1, part.queries.stop) - 1]
      way = jnp.where(last < keys // 2, way, 2 * way)
    return lax.switch(way, ways, *args)

  return of_some


def _filled(rows: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
  """Zeros behind what fewer keys gave [group, keys, head_dim]."""
  return jnp.pad(
    rows, [(0, whole - own) for whole, own in zip(like.shape, rows.shape, strict=True)]
  )


def _logits(query: jax.Array, key: jax.Array, own: _Own) -> jax.Array:
  """Those of one block, [heads, queries, keys]."""
  logits = jnp.einsum("htd,hsd->hts", query, key, preferred_element_type=jnp.float32)
  logits = logits / jnp.sqrt(jnp.float32(query.shape[-1]))
  logits = logits if own.bias is None else logits + own.bias
  return logits if own.allowed is None else jnp.where(own.allowed, logits, _HIDDEN)


def _dropped(
  weights: jax.Array, keep: jax.Array | None, dropout: ProbabilityDropout | None
) -> jax.Array:
  if keep is None or dropout is None:
    return weights
  return jnp.where(keep, weights * dropout.scale, 0.0)


def _in_turn(
  block: Callable[[_Arrays, _Arrays, _Own], tuple[PyTree, _Arrays]],
  rows: _Arrays,
  lines: _Arrays,
  pairs: _Pairs,
  group: int,
  parts: tuple[_Part, ...],
  *,
  slopes: bool = False,
) -> tuple[PyTree, PyTree]:
  """Runs a block for every group of heads and, within it, every example.

  Args:
    block: of rows [group, time, head_dim], lines [group, time] and what its pairs have; returns a
      tree of arrays, and the gradient of each part's logits.
    rows: [batch, time, heads, head_dim] each.
    lines: [batch, heads, time] each.
    pairs: of all.
    group: heads of a block.
    parts: of an example's queries.
    slopes: return the gradient of the bias, if there is one.

  Returns:
    The trees [groups, batch, group, ...], and the gradient [groups, 1 or batch, group, ...], which
    has the other dimensions of the bias.
  """
  examples, (queries, keys) = len(rows[0]), (rows[0].shape[1], rows[1].shape[1])
  bias, allowed, dropout, chosen = pairs
  alike = allowed is None or allowed.shape[1] == 1  # in all heads
  by_distance = bias is not None and bias.ndim == 3

  def of_heads(_: None, mine: PyTree) -> tuple[None, PyTree]:
    rows, lines, bias, of_these, numbers, counts = mine
    bias = of_pairs(bias[0])[None] if by_distance else bias
    masked = allowed if alike else of_these
    each = [None if one is None or len(one) < examples else one for one in (bias, masked)]

    def own(all_: jax.Array | None, of_example: jax.Array | None) -> jax.Array | None:
      return all_[0] if of_example is None and all_ is not None else of_example

    def of_example(total: jax.Array | None, mine: PyTree) -> tuple[jax.Array | None, PyTree]:
      rows, lines, each, number, count = mine
      keep = None
      if dropout is not None:
        here = dataclasses.replace(dropout, examples=number[None], heads=numbers)
        keep = here.keep(queries, keys)[0]
      counted = jax.tree.map(lambda one: one[0], count)
      pairs = _Own(own(bias, each[0]), own(masked, each[1]), keep, counted)
      made, found = block(rows, lines, pairs)
      if not slopes or bias is None:
        return None, (made, None)
      slope = jnp.zeros((group, queries, keys), jnp.float32) if total is None else total
      for part, one in zip(parts, found, strict=True):
        slope = slope.at[:, part.queries, part.keys].add(one)
      return (None, (made, slope)) if total is None else (slope, (made, None))

    summed = slopes and bias is not None and len(bias) < examples
    total = jnp.zeros((group, queries, keys), jnp.float32) if summed else None
    numbers_of_examples = None if dropout is None else dropout.examples
    of_examples = rows, lines, each, numbers_of_examples, counts
    total, (made, of_each) = lax.scan(of_example, total, of_examples)
    slope = of_each if total is None else total[None]
    if slopes and by_distance:
      slope = sums_of_distances(slope[0])[None]
    return None, (made, slope)

  by_group = (
    tuple(_rows_apart(one, group) for one in rows),
    tuple(_lines_apart(one, group) for one in lines),
    None if bias is None else _lines_apart(bias, group),
    None if allowed is None or alike else _lines_apart(allowed, group),
    None if dropout is None else dropout.heads.reshape(-1, group),
    jax.tree.map(lambda one: _lines_apart(one, group), chosen),
  )
  return lax.scan(of_heads, None, by_group)[1]


def _rows_apart(rows: jax.Array, group: int) -> jax.Array:
  """[batch, time, heads, head_dim] -> [groups, batch, group, time, head_dim]."""
  batch, time, _, width = rows.shape
  return rows.reshape(batch, time, -1, group, width).transpose(2, 0, 3, 1, 4)


def _rows_together(rows: jax.Array) -> jax.Array:
  """The way back."""
  _, batch, _, time, width = rows.shape
  return rows.transpose(1, 3, 0, 2, 4).reshape(batch, time, -1, width)


def _lines_apart(lines: jax.Array, group: int) -> jax.Array:
  """[batch, heads, ...] -> [groups, batch, group, ...]."""
  return jnp.swapaxes(lines.reshape(len(lines), -1, group, *lines.shape[2:]), 0, 1)


def _lines_together(lines: jax.Array) -> jax.Array:
  """The way back, [batch, heads, time]."""
  return jnp.swapaxes(lines, 0, 1).reshape(lines.shape[1], -1, lines.shape[-1])
