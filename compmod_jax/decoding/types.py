"""What every search shares: the step's contract, the result, and how a cache is reordered.

A cache is any pytree. Its leaves are of three kinds, distinguished by shape alone:

- `[batch, beams, ...]`: the state of one hypothesis; reordered with the hypotheses;
- `[batch, 1, ...]`: shared by all hypotheses of an example (encoder outputs); never moved;
- fewer than two axes (a position counter): passed through.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree

from compmod_jax.core.errors import check

Cache: TypeAlias = PyTree
"""State of a search, as the module's docstring says."""
Step = Callable[[Cache, Array], tuple[Array, Cache]]
"""`step(cache, tokens int32 [batch, beams]) -> (logits [batch, beams, vocab], cache)`.

The tokens are those chosen last (the start token at first); the position is the cache's business.
The new cache has the old one's shapes and dtypes.
"""
Record = Callable[[Cache], PyTree]
"""`record(cache)` picks what is kept of each hypothesis: a pytree of `[batch, beams, ...]`."""


class Decoded(NamedTuple):
  """Hypotheses of every example, best first.

  Where fewer than `n_best` hypotheses exist, the rest have score -inf, length 0 and only padding.
  An example whose limit is 0 has one hypothesis: empty, length 0, score 0.
  """

  tokens: Int[Array, "batch n_best time"]
  """Token ids without the start token, end token included, then padding."""
  scores: Float[Array, "batch n_best"]
  """log probability in nats / length ** length_penalty; a length counts the end token."""
  lengths: Int[Array, "batch n_best"]
  """Tokens produced, end token included."""
  records: PyTree = None
  """`record(cache)` of each hypothesis as it was when its end token was chosen, or None."""


def take_beams(leaf: Array, index: Int[Array, "batch chosen"]) -> Array:
  """Rows `leaf[b, index[b]]`: `[batch, beams, ...]` -> `[batch, chosen, ...]`.

  Batched rather than one gather over batch * beams rows, so that a sharded batch stays where it is.
  """
  return jax.vmap(lambda rows, i: rows.at[i].get(mode="promise_in_bounds"))(leaf, index)


def permute_cache(cache: Cache, parents: Int[Array, "batch beams"]) -> Cache:
  """The cache whose hypothesis k continues what was hypothesis `parents[:, k]`."""
  beams = parents.shape[1]
  if beams == 1:
    return cache

  def permute(leaf):
    return take_beams(leaf, parents) if leaf.ndim >= 2 and leaf.shape[1] == beams else leaf

  return jax.tree.map(permute, cache)


def check_cache(cache: Cache, batch: int, beams: int) -> None:
  """Raises `UserError` unless every leaf is of one of the three kinds in the module's docstring."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
    shape = jnp.shape(leaf)
    check(
      len(shape) < 2 or (shape[0] == batch and shape[1] in (1, beams)),
      f"cache{jax.tree_util.keystr(path)} has shape {shape}; a leaf with two or more axes must "
      f"start with [{batch}, {beams}] (one row a hypothesis) or [{batch}, 1] (shared). Build the "
      "cache for this batch and this number of beams.",
    )


def first_tokens(bos: ArrayLike, batch: int, beams: int) -> Int[Array, "batch beams"]:
  """What every hypothesis starts from: one token for all, or one for each example [batch]."""
  return jnp.broadcast_to(jnp.asarray(bos, jnp.int32).reshape(-1, 1), (batch, beams))


def start_records(cache: Cache, record: Record | None, batch: int, beams: int) -> PyTree:
  """Zeros of the shape of `rows_of_record`, to be overwritten as hypotheses finish."""
  shapes = jax.eval_shape(lambda c: rows_of_record(c, record, batch, beams), cache)
  return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def rows_of_record(cache: Cache, record: Record | None, batch: int, beams: int) -> PyTree:
  """`record(cache)` with one row a hypothesis (shared leaves are broadcast); () without record."""
  if record is None:
    return ()
  return jax.tree.map(
    lambda leaf: jnp.broadcast_to(leaf, (batch, beams, *leaf.shape[2:])), record(cache)
  )


def check_search(
  *,
  batch: int,
  max_length: int,
  eos: int,
  forbidden: tuple[int, ...],
  length_penalty: float,
) -> None:
  """Raises `UserError` for the settings that all searches share."""
  check(batch >= 1, f"batch is {batch}; it must be at least 1.")
  check(max_length >= 1, f"max_length is {max_length}; it must be at least 1.")
  check(
    eos not in forbidden,
    f"forbidden contains the end token {eos}; then no hypothesis could end. Take it out.",
  )
  check(
    length_penalty >= 0,
    f"length_penalty is {length_penalty}; it must be 0 or more (0 compares plain log "
    "probabilities, 1 compares their means over tokens).",
  )
