"""Searches that go on with fewer rows once many of a batch are done.

A step costs as much for an example that is done as for one that is not. Shapes of compiled programs
are fixed, so a search of 32 examples is three loops: over all of them, over the last 16, and over
the last 4. Each loop is compiled by itself, so only the searches that are asked to have several.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from compmod_jax.decoding.types import Cache

_PARTS = (2, 8)  # of the rows, in the loops after the first
_MOST_IN_ONE = 8  # rows for which one loop is enough


class Search(Protocol):
  """The state of a search, a named tuple. Leaves start with [batch, ...], or are scalars."""

  @property
  def done(self) -> Bool[Array, "batch *beams"]:
    """Whether nothing more is searched for."""
    ...

  @property
  def cache(self) -> Cache:
    """The model's, see `compmod_jax.decoding.types`."""
    ...


S = TypeVar("S", bound=Any)  # a `Search`


def until_done(advance: Callable[[S], S], state: S, *, narrow: bool) -> S:
  """The state once every example is done; without its cache if `narrow`.

  Args:
    advance: one step, for any number of rows.
    state: a `Search`.
    narrow: go on with fewer rows as examples get done.
  """
  rows = len(state.done)
  sizes = [rows // part for part in _PARTS] if narrow and rows > _MOST_IN_ONE else []
  return _until_done(advance, state, sizes)


def _until_done(advance: Callable[[S], S], state: S, sizes: list[int]) -> S:
  if not sizes:
    return lax.while_loop(lambda s: ~s.done.all(), advance, state)
  fewer, *rest = sizes
  state = lax.while_loop(lambda s: jnp.sum(_living(s)) > fewer, advance, state)
  chosen = jnp.argsort(~_living(state), stable=True)[:fewer]
  found = _until_done(advance, _rows(state, chosen), rest)._replace(cache=())

  def put(old: Array, new: Array) -> Array:
    return old.at[chosen].set(new, unique_indices=True) if old.ndim else new

  return jax.tree.map(put, state._replace(cache=()), found)


def _living(state: Search) -> Bool[Array, " batch"]:
  return ~state.done.reshape(len(state.done), -1).all(axis=1)


def _rows(state: S, chosen: Int[Array, " rows"]) -> S:
  """The search of these examples alone."""
  rest = jax.tree.map(lambda leaf: leaf[chosen] if leaf.ndim else leaf, state._replace(cache=()))
  cache = jax.tree.map(lambda leaf: leaf[chosen] if leaf.ndim >= 2 else leaf, state.cache)
  return rest._replace(cache=cache)
