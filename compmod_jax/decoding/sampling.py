"""Decoding without search: every hypothesis takes one token at a time, greedily or by chance."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from compmod_jax.core.errors import check
from compmod_jax.decoding import candidates
from compmod_jax.decoding.loops import Growth, until_done
from compmod_jax.decoding.types import (
  Cache,
  Decoded,
  Record,
  Step,
  check_cache,
  check_search,
  first_tokens,
  rows_of_record,
  start_records,
  take_beams,
)

_Choose = Callable[[Array, Array], Array]  # (logits, position) -> tokens [batch, beams]


class _State(NamedTuple):
  position: Int[Array, ""]
  limit: Int[Array, " batch"]
  done: Bool[Array, "batch beams"]
  last: Int[Array, "batch beams"]
  tokens: Int[Array, "batch beams time"]
  log_probs: Float[Array, "batch beams"]
  lengths: Int[Array, "batch beams"]
  records: PyTree
  cache: Cache


def greedy(
  step: Step,
  cache: Cache,
  *,
  batch: int,
  max_length: int,
  limit: ArrayLike,
  bos: ArrayLike,
  eos: int,
  pad: int = 0,
  length_penalty: float = 1.0,
  forbidden: tuple[int, ...] = (),
  cut: bool = False,
  record: Record | None = None,
  narrow: bool = False,
  growth: Growth | None = None,
) -> Decoded:
  """Takes the most probable token at every step; at an example's limit, the end token.

  With `cut`, the hypothesis stops at its limit as it stands. Ties go to the lower token. Arguments
  and errors as in `beam_search`, the cache for one beam.

  Returns:
    `Decoded` with one hypothesis an example; `length_penalty` matters to its score alone.
  """
  return _walk(
    step,
    cache,
    lambda logits, _: _most_probable(logits, forbidden),
    batch=batch,
    beams=1,
    max_length=max_length,
    limit=limit,
    bos=bos,
    eos=eos,
    pad=pad,
    length_penalty=length_penalty,
    forbidden=forbidden,
    cut=cut,
    record=record,
    narrow=narrow,
    growth=growth,
  )


def _most_probable(logits: Array, forbidden: tuple[int, ...]) -> Int[Array, "batch 1"]:
  return candidates.top_candidates(logits, jnp.zeros((len(logits), 1)), 1, forbidden)[2]


def sample(
  step: Step,
  cache: Cache,
  *,
  rng: Array,
  batch: int,
  max_length: int,
  limit: ArrayLike,
  bos: ArrayLike,
  eos: int,
  pad: int = 0,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  length_penalty: float = 1.0,
  n_best: int = 1,
  forbidden: tuple[int, ...] = (),
  cut: bool = False,
  record: Record | None = None,
  growth: Growth | None = None,
) -> Decoded:
  r"""Draws `n_best` independent hypotheses of every example, token by token.

  .. math:: y_t \sim \mathrm{softmax}(z / \tau) \text{ restricted and renormalised}

  First the forbidden tokens go, then all but the `top_k` most probable, then all but the smallest
  set of the most probable whose (renormalised) probability reaches `top_p`; one always stays.
  At an example's limit the end token is taken, or with `cut` the hypothesis stops as it stands. The
  other arguments are as in `beam_search`.

  Args:
    rng: key; the same key, cache and shapes give the same hypotheses. Or a key for each example,
      [batch]: then its draws do not depend on the other examples.
    temperature: tau, dimensionless, above 0.
    top_k: 0 keeps all.
    top_p: in (0, 1]; 1 keeps all.
    n_best: draws an example; the cache has that many beams.

  Returns:
    `Decoded` in descending order of score, which is the model's own (temperature 1, nothing left
    out). Draws may be equal.

  Raises:
    UserError: a setting out of range, or a cache leaf of the wrong shape.

  Source: top-k Fan et al. 2018; top-p (nucleus) Holtzman et al. 2020.
  """
  check(temperature > 0, f"temperature is {temperature}; it must be above 0, or use greedy search.")
  check(top_k >= 0, f"top_k is {top_k}; it must be 0 (keep all tokens) or more.")
  check(0 < top_p <= 1, f"top_p is {top_p}; it must lie in (0, 1], where 1 keeps all tokens.")
  check(n_best >= 1, f"n_best is {n_best}; it must be at least 1.")

  own, fold = _one_each(rng), jax.random.fold_in

  def choose(logits, position):
    key = jax.vmap(jax.random.fold_in, (0, None))(rng, position) if own else fold(rng, position)
    return _draw(key, logits, temperature, top_k, top_p, forbidden)

  found = _walk(
    step,
    cache,
    choose,
    batch=batch,
    beams=n_best,
    max_length=max_length,
    limit=limit,
    bos=bos,
    eos=eos,
    pad=pad,
    length_penalty=length_penalty,
    forbidden=forbidden,
    cut=cut,
    record=record,
    narrow=False,
    growth=growth,
  )
  order = jnp.argsort(-found.scores, axis=1, stable=True)
  return jax.tree.map(lambda leaf: take_beams(leaf, order), found)


def restricted(
  logits: Float[Array, "batch beams vocab"],
  *,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  forbidden: tuple[int, ...] = (),
) -> tuple[Float[Array, "batch beams kept"], Int[Array, "batch beams kept"] | None]:
  """What `sample` draws from: logits of the tokens that may be drawn, -inf for the others.

  Arguments as in `sample`.

  Returns:
    Logits, and the tokens that they belong to, most probable first; None: all tokens in order.
  """
  vocab, logits = logits.shape[-1], logits / temperature
  if forbidden:
    logits = jnp.where(candidates.forbidden_mask(vocab, forbidden)[None, None], -jnp.inf, logits)
  kept = min(top_k, vocab) if top_k else vocab
  if kept == vocab and top_p == 1:
    return logits, None
  logits, types = candidates.top_k(logits, kept)
  if top_p < 1:
    probabilities = jax.nn.softmax(logits)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    inside = (before < top_p).at[..., 0].set(True)
    logits = jnp.where(inside, logits, -jnp.inf)
  return logits, types


def _draw(
  key: Array,
  logits: Array,
  temperature: float,
  top_k: int,
  top_p: float,
  forbidden: tuple[int, ...],
) -> Int[Array, "batch beams"]:
  logits, types = restricted(
    logits, temperature=temperature, top_k=top_k, top_p=top_p, forbidden=forbidden
  )
  categorical = jax.vmap(jax.random.categorical) if _one_each(key) else jax.random.categorical
  place = categorical(key, logits).astype(jnp.int32)
  if types is None:
    return place
  return jnp.take_along_axis(types, place[..., None], axis=-1)[..., 0]


def _one_each(key: Array) -> bool:
  """Whether these are keys, one for each example, rather than one key."""
  return jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 1


def _walk(
  step: Step,
  cache: Cache,
  choose: _Choose,
  *,
  batch: int,
  beams: int,
  max_length: int,
  limit: ArrayLike,
  bos: ArrayLike,
  eos: int,
  pad: int,
  length_penalty: float,
  forbidden: tuple[int, ...],
  cut: bool,
  record: Record | None,
  narrow: bool,
  growth: Growth | None,
) -> Decoded:
  check_search(
    batch=batch, max_length=max_length, eos=eos, forbidden=forbidden, length_penalty=length_penalty
  )
  check_cache(cache, batch, beams)
  limit = jnp.minimum(jnp.asarray(limit, jnp.int32), max_length)
  zeros = jnp.zeros((batch, beams), jnp.int32)
  state = _State(
    position=jnp.zeros((), jnp.int32),
    limit=limit,
    done=jnp.broadcast_to((limit <= 0)[:, None], (batch, beams)),
    last=first_tokens(bos, batch, beams),
    tokens=jnp.full((batch, beams, max_length), pad, jnp.int32),
    log_probs=zeros.astype(jnp.float32),
    lengths=zeros,
    records=start_records(cache, record, batch, beams),
    cache=cache,
  )

  def advance(state: _State) -> _State:
    logits, cache = step(state.cache, state.last)
    logits = logits.astype(jnp.float32)
    last_place = (state.position + 1 >= state.limit)[:, None]
    tokens = choose(logits, state.position)
    tokens = tokens if cut else jnp.where(last_place, eos, tokens)
    log_probs = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    log_probs = log_probs - jax.nn.logsumexp(logits, axis=-1)
    ends = ((tokens == eos) | last_place) & ~state.done

    def keep(old, new):
      return jnp.where(ends.reshape(ends.shape + (1,) * (new.ndim - 2)), new, old)

    return _State(
      position=state.position + 1,
      limit=state.limit,
      done=state.done | ends,
      last=tokens,
      tokens=state.tokens.at[:, :, state.position].set(jnp.where(state.done, pad, tokens)),
      log_probs=state.log_probs + jnp.where(state.done, 0.0, log_probs),
      lengths=state.lengths + ~state.done,
      records=jax.tree.map(keep, state.records, rows_of_record(cache, record, *tokens.shape)),
      cache=cache,
    )

  state = until_done(advance, state, narrow=narrow, growth=growth)
  lengths = jnp.maximum(state.lengths, 1).astype(jnp.float32)
  return Decoded(
    state.tokens,
    state.log_probs / lengths**length_penalty,
    state.lengths,
    None if record is None else state.records,
  )
