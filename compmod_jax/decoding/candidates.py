"""The best continuations out of beams * vocab candidates, without sorting them all.

On XLA:CPU (2 cores, batch 32, 5 beams, 8,000 types, the ten best) `lax.top_k` over beams * vocab
takes 2.5 ms, ten rounds of argmax and mask 30 ms, and block maxima followed by a search inside the
best blocks 0.8 ms, the log normaliser (0.45 ms) included in each. A plain `jnp.argmax` over types
takes 2.9 ms there, so greedy search comes here too.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

_SMALL = 1024  # types; below, one top_k over everything is as fast
_BLOCK = 128


def top_candidates(
  logits: Float[Array, "batch beams vocab"],
  offsets: Float[Array, "batch beams"],
  count: int,
  forbidden: tuple[int, ...] = (),
) -> tuple[Array, Array, Array]:
  """The `count` largest of `logits[b, k, v] + offsets[b, k]` over beams and types together.

  Ties go to the lower beam, then to the lower type.

  Args:
    logits: float32; types in `forbidden` count as -inf.
    offsets: what every type of a beam gets on top, -inf for a dead beam.
    count: candidates an example; at most beams * vocab.
    forbidden: types that are never chosen.

  Returns:
    scores float32, beams int32, types int32, each [batch, count], in descending order of score.
  """
  beams, vocab = logits.shape[1:]
  block = block_size(vocab)
  if block is None or beams * -(-vocab // block) < count:
    scores = _mask(logits, forbidden) + offsets[..., None]
    scores, flat = top_k(scores.reshape(scores.shape[0], -1), count)
    return scores, flat // vocab, flat % vocab
  return _top_by_blocks(logits, offsets, count, forbidden, block)


def top_k(values: Array, count: int) -> tuple[Array, Array]:
  """`lax.top_k` that stays one.

  XLA:CPU may sort everything instead (40 times slower over beams * vocab) where a part of the
  result is sliced off: it folds that slice into its own pattern for top_k, and no longer recognises
  it. The barrier hides the slice.
  """
  return lax.optimization_barrier(lax.top_k(values, count))


def block_size(vocab: int) -> int | None:
  """Types a block: near 128, a divisor of `vocab` if there is one; None: not worth it."""
  if vocab < _SMALL:
    return None
  divisors = [size for size in range(_BLOCK // 2, 2 * _BLOCK + 1) if vocab % size == 0]
  return min(divisors, key=lambda size: abs(size - _BLOCK), default=_BLOCK)


def forbidden_mask(vocab: int, forbidden: tuple[int, ...]) -> Bool[np.ndarray, " vocab"]:
  """True at the types that are never chosen."""
  return np.isin(np.arange(vocab), np.asarray(forbidden, np.int64))


def _mask(logits: Array, forbidden: tuple[int, ...]) -> Array:
  if not forbidden:
    return logits
  return jnp.where(forbidden_mask(logits.shape[-1], forbidden)[None, None], -jnp.inf, logits)


def _top_by_blocks(logits, offsets, count, forbidden, block):
  batch, beams, vocab = logits.shape
  # The `count` best candidates lie in the `count` blocks with the largest maxima. Adding an offset
  # is monotone in floating point too, so it may be added to the maxima alone.
  maxima = _block_maxima(logits, block, forbidden) + offsets[..., None]
  blocks = maxima.shape[-1]
  chosen = top_k(maxima.reshape(batch, beams * blocks), count)[1]
  chosen = jnp.sort(chosen, -1)  # keeps candidates in order of beam and type: ties go to the lower
  beam = chosen // blocks

  types = (chosen % blocks * block)[..., None] + jnp.arange(block, dtype=jnp.int32)[None, None]
  outside = types >= vocab  # the last block may be shorter than the others
  for token in forbidden:
    outside |= types == token
  flat = beam[..., None] * vocab + jnp.minimum(types, vocab - 1)
  # Gathered from the raw logits: the masked ones then never have to exist in memory.
  scores = jnp.take_along_axis(
    logits.reshape(batch, beams * vocab), flat.reshape(batch, -1), axis=1, mode="promise_in_bounds"
  )
  scores = scores.reshape(flat.shape) + jnp.take_along_axis(offsets, beam, axis=1)[..., None]
  scores = jnp.where(outside, -jnp.inf, scores).reshape(batch, -1)
  scores, index = top_k(scores, count)
  flat = jnp.take_along_axis(flat.reshape(batch, -1), index, axis=1)
  return scores, flat // vocab, flat % vocab


def _block_maxima(logits: Array, block: int, forbidden: tuple[int, ...]) -> Array:
  *rest, vocab = logits.shape
  whole = vocab // block * block
  maxima = logits[..., :whole].reshape(*rest, -1, block).max(-1)
  if whole < vocab:
    maxima = jnp.concatenate([maxima, logits[..., whole:].max(-1, keepdims=True)], axis=-1)
  # Masking the few blocks with forbidden types is cheaper than a mask over the vocabulary.
  for index in sorted({token // block for token in forbidden if 0 <= token < vocab}):
    start = index * block
    part = logits[..., start : start + block]
    mine = tuple(token - start for token in forbidden if 0 <= token - start < block)
    maxima = maxima.at[..., index].set(_mask(part, mine).max(-1))
  return maxima
