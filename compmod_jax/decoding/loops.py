"""Searches that go on with fewer rows as examples get done, and with longer caches as outputs grow.

A step costs as much for an example that is done as for one that is not, and as much for positions
of a cache that are not written yet as for others. Shapes of compiled programs are fixed, so a
search of 32 examples is three loops: over all of them, over the last 16, and over the last 4; and a
search of up to 1,200 tokens has them three times: for 300, for 600 and for all. Each loop is
compiled by itself, so only the searches that are asked to have several.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from compmod_jax.decoding.types import Cache

_PARTS = (2, 8)  # of the rows, in the loops after the first
_MOST_IN_ONE = 8  # rows for which one loop is enough
_SHORT = 256  # positions of a cache that are not worth fewer


@dataclasses.dataclass(frozen=True)
class Growth:
  """How a search's cache gets longer.

  Attributes:
    lengths: ascending numbers of positions: that of the cache at first, and those that it grows to;
      the last one is the search's `max_length`.
    grown: the cache with room for as many positions, nothing in the new ones.
  """

  lengths: tuple[int, ...]
  grown: Callable[[Cache, int], Cache]


def lengths_of_growth(longest: int) -> tuple[int, ...]:
  """`longest` positions, half of them and so on, not below 256; ascending.

  Args:
    longest: output, in tokens.
  """
  half = -(-longest // 2)
  return (*(lengths_of_growth(half) if half >= _SHORT else ()), longest)


def room_for(cache: Cache, shapes: PyTree) -> Cache:
  """The cache with zeros behind its leaves, as many as these shapes have more."""

  def fill(leaf: Array, shape: jax.ShapeDtypeStruct) -> Array:
    new = [after - before for before, after in zip(leaf.shape, shape.shape, strict=True)]
    return jnp.pad(leaf, [(0, more) for more in new]) if any(new) else leaf

  return jax.tree.map(fill, cache, shapes)


class Search(Protocol):
  """The state of a search, a named tuple. Leaves start with [batch, ...], or are scalars."""

  @property
  def position(self) -> Int[Array, ""]:
    """Tokens that every living example has."""
    ...

  @property
  def done(self) -> Bool[Array, "batch *beams"]:
    """Whether nothing more is searched for."""
    ...

  @property
  def cache(self) -> Cache:
    """The model's, see `compmod_jax.decoding.types`."""
    ...


S = TypeVar("S", bound=Any)  # a `Search`


def until_done(
  advance: Callable[[S], S], state: S, *, narrow: bool, growth: Growth | None = None
) -> S:
  """The state once every example is done.

  Args:
    advance: one step, for any number of rows.
    state: a `Search`.
    narrow: go on with fewer rows as examples get done.
    growth: of the cache; None: it has room for all positions.
  """
  rows = len(state.done)
  sizes = [rows // part for part in _PARTS] if narrow and rows > _MOST_IN_ONE else []
  if growth is not None:
    for length, next_length in itertools.pairwise(growth.lengths):
      state = _until(advance, state, sizes, length)
      state = state._replace(cache=growth.grown(state.cache, next_length))
  return _until(advance, state, sizes, None)


def _until(advance: Callable[[S], S], state: S, sizes: list[int], end: int | None) -> S:
  """The state at a position (None: whatever it is), or once every example is done before."""
  fewer, *rest = sizes or [0]

  def more(state: S) -> Bool[Array, ""]:
    left = jnp.sum(_living(state)) > fewer
    return left if end is None else left & (state.position < end)

  state = lax.while_loop(more, advance, state)
  if not sizes:
    return state
  chosen = jnp.argsort(~_living(state), stable=True)[:fewer]
  found = _until(advance, _rows(state, chosen), rest, end)

  def put(old: Array, new: Array) -> Array:
    return old.at[chosen].set(new, unique_indices=True) if old.ndim else new

  def put_cache(old: Array, new: Array) -> Array:
    return put(old, new) if old.ndim >= 2 else new

  cache = jax.tree.map(put_cache, state.cache, found.cache)
  return jax.tree.map(put, state._replace(cache=()), found._replace(cache=()))._replace(cache=cache)


def _living(state: Search) -> Bool[Array, " batch"]:
  return ~state.done.reshape(len(state.done), -1).all(axis=1)


def _rows(state: S, chosen: Int[Array, " rows"]) -> S:
  """The search of these examples alone."""
  rest = jax.tree.map(lambda leaf: leaf[chosen] if leaf.ndim else leaf, state._replace(cache=()))
  cache = jax.tree.map(lambda leaf: leaf[chosen] if leaf.ndim >= 2 else leaf, state.cache)
  return rest._replace(cache=cache)
