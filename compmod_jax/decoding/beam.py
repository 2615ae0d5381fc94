"""Beam search with as many finished as living hypotheses, traceable under `jit`."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from compmod_jax.core.errors import check, check_choice
from compmod_jax.decoding.candidates import top_candidates, top_k
from compmod_jax.decoding.loops import Growth, until_done
from compmod_jax.decoding.types import (
  Cache,
  Decoded,
  Record,
  Step,
  check_cache,
  check_search,
  first_tokens,
  permute_cache,
  rows_of_record,
  start_records,
  take_beams,
)

Stop = Literal["filled", "bound", "limit"]


class _Living(NamedTuple):
  tokens: Int[Array, "batch beams time"]
  log_probs: Float[Array, "batch beams"]  # -inf: no hypothesis here


class _Finished(NamedTuple):
  tokens: Int[Array, "batch beams time"]
  scores: Float[Array, "batch beams"]  # descending; -inf: no hypothesis here
  lengths: Int[Array, "batch beams"]
  records: PyTree


class _State(NamedTuple):
  position: Int[Array, ""]
  limit: Int[Array, " batch"]
  done: Bool[Array, " batch"]
  last: Int[Array, "batch beams"]
  living: _Living
  finished: _Finished
  cache: Cache


class _Settings(NamedTuple):
  step: Step
  record: Record | None
  eos: int
  forbidden: tuple[int, ...]
  length_penalty: float
  n_best: int
  stop: Stop
  cut: bool


def beam_search(
  step: Step,
  cache: Cache,
  *,
  batch: int,
  beams: int,
  max_length: int,
  limit: ArrayLike,
  bos: ArrayLike,
  eos: int,
  pad: int = 0,
  length_penalty: float = 1.0,
  n_best: int = 1,
  forbidden: tuple[int, ...] = (),
  stop: Stop = "filled",
  cut: bool = False,
  record: Record | None = None,
  narrow: bool = False,
  growth: Growth | None = None,
) -> Decoded:
  r"""Searches for the hypotheses with the best length-normalised log probability.

  .. math:: \mathrm{score}(y) = \frac{\log p(y)}{|y|^{\lambda}}, \quad y_{|y|} = \mathrm{eos}

  Every step ranks all continuations of the `beams` living hypotheses of an example. Those among
  the best `beams` that end are finished; the best `beams` that do not end live on. The `beams`
  finished hypotheses with the best scores are kept. At an example's limit only the end token is
  allowed, so every hypothesis finishes and none is longer than the limit. Ties go to the better
  placed hypothesis, then to the lower token. With `stop="filled"` one beam is greedy search.

  An example is done when no living hypothesis can still reach its `n_best` best, since the score of
  anything that grows from one with log probability l is at most l / limit ** length_penalty (this
  never changes what is returned), and otherwise when `stop` says so:

  - `filled`: `beams` hypotheses are finished (what fairseq does, and Hugging Face with
    `early_stopping=True`); favours hypotheses found early, and ends long before the limit;
  - `bound`: not before the bound above says so; with a length penalty above 0 that is often late;
  - `limit`: only at its limit, the bound unused (what the other two are tested against).

  Args:
    step: see `compmod_jax.decoding.types.Step`.
    cache: the state before the start token; leaves [batch, beams, ...] or [batch, 1, ...].
    batch: examples.
    beams: living hypotheses an example, at least 1.
    max_length: static length of the result, end token included, at least 1.
    limit: int32 [batch], tokens an example may have, end token included; 0: a filler row.
    bos: start token, the first input; never part of the result. One for all, or one for each
      example [batch].
    eos: end token.
    pad: what fills the result after the end token.
    length_penalty: the exponent, 0 or more.
    n_best: hypotheses returned an example, at most `beams`.
    forbidden: tokens never produced. Log probabilities remain the model's own, not renormalised.
    stop: see above.
    cut: at an example's limit, hypotheses stop as they stand instead of ending with the end token.
    record: picks what is returned with each hypothesis; None costs nothing.
    narrow: go on with fewer rows as examples get done, for which `step` must be able to run; see
      `compmod_jax.decoding.loops`.
    growth: of a cache that is shorter than the search at first; None: it has its whole length.

  Returns:
    `Decoded`, best hypothesis first. `records` are those of the cache after the step that read the
    token before the end token.

  Raises:
    UserError: a setting out of range, or a cache leaf of the wrong shape.

  Source: Graves 2012; scores and the `filled` rule as in fairseq (Ott et al. 2019).
  """
  check_search(
    batch=batch, max_length=max_length, eos=eos, forbidden=forbidden, length_penalty=length_penalty
  )
  check(beams >= 1, f"beams is {beams}; it must be at least 1.")
  check(1 <= n_best <= beams, f"n_best is {n_best}; it must lie between 1 and beams ({beams}).")
  check_choice("stop", stop, ("filled", "bound", "limit"))
  check_cache(cache, batch, beams)
  limit = jnp.minimum(jnp.asarray(limit, jnp.int32), max_length)
  settings = _Settings(step, record, eos, forbidden, length_penalty, n_best, stop, cut)

  blank = jnp.full((batch, beams, max_length), pad, jnp.int32)
  nothing = jnp.full((batch, beams), -jnp.inf, jnp.float32)
  state = _State(
    position=jnp.zeros((), jnp.int32),
    limit=limit,
    done=limit <= 0,
    last=first_tokens(bos, batch, beams),
    living=_Living(blank, nothing.at[:, 0].set(0.0)),  # the beams start equal: one counts
    finished=_Finished(
      blank,
      nothing.at[:, 0].set(jnp.where(limit <= 0, 0.0, -jnp.inf)),
      jnp.zeros((batch, beams), jnp.int32),
      start_records(cache, record, batch, beams),
    ),
    cache=cache,
  )
  state = until_done(lambda s: _advance(s, settings), state, narrow=narrow, growth=growth)
  found = jax.tree.map(lambda leaf: leaf[:, :n_best], state.finished)
  return Decoded(*found[:3], records=None if record is None else found.records)


def _advance(state: _State, settings: _Settings) -> _State:
  """One token for every living hypothesis."""
  beams = state.last.shape[1]
  logits, cache = settings.step(state.cache, state.last)
  logits = logits.astype(jnp.float32)
  scores, parents, tokens = _candidates(logits, state, settings)
  ends = (tokens == settings.eos) | (state.position + 1 >= state.limit)[:, None]

  records = rows_of_record(cache, settings.record, state.done.shape[0], beams)
  ending = jnp.where(ends & ~state.done[:, None], scores, -jnp.inf)[:, :beams]
  chosen = parents[:, :beams], tokens[:, :beams]
  finished = _finish(state, settings, ending, *chosen, records)

  log_probs, chosen = top_k(jnp.where(ends, -jnp.inf, scores), beams)
  parents = jnp.take_along_axis(parents, chosen, axis=1)
  tokens = jnp.take_along_axis(tokens, chosen, axis=1)
  living = _Living(
    take_beams(state.living.tokens, parents).at[:, :, state.position].set(tokens), log_probs
  )
  return _State(
    position=state.position + 1,
    limit=state.limit,
    done=state.done | _is_done(state.position + 1, state.limit, living, finished, settings),
    last=tokens,
    living=living,
    finished=finished,
    cache=permute_cache(cache, parents),
  )


def _candidates(logits: Array, state: _State, settings: _Settings) -> tuple[Array, Array, Array]:
  """The best 2 * beams continuations (enough that beams of them do not end), best first.

  At an example's limit they are the ends of its living hypotheses instead, and nothing else, unless
  hypotheses are cut there.
  """
  beams, vocab = logits.shape[1:]
  count = min(2 * beams, beams * vocab)
  check(
    count >= beams + 1,
    f"the step's logits have {vocab} types for {beams} beams; at least 2 types are needed.",
  )
  offsets = state.living.log_probs - jax.nn.logsumexp(logits, axis=-1)
  scores, parents, tokens = top_candidates(logits, offsets, count, settings.forbidden)

  if settings.cut:
    return scores, parents, tokens
  ends = logits[:, :, settings.eos] + offsets
  ends = jnp.pad(ends, ((0, 0), (0, count - beams)), constant_values=-jnp.inf)
  places = jnp.minimum(jnp.arange(count, dtype=jnp.int32), beams - 1)[None]
  last = (state.position + 1 >= state.limit)[:, None]
  return (
    jnp.where(last, ends, scores),
    jnp.where(last, places, parents),
    jnp.where(last, settings.eos, tokens),
  )


def _finish(
  state: _State,
  settings: _Settings,
  ending: Array,
  parents: Array,
  last: Array,
  records: PyTree,
) -> _Finished:
  """Merges hypotheses that end now with the finished.

  Args:
    state: before this step.
    settings: of the search.
    ending: their log probabilities; -inf: none.
    parents: the living hypotheses that they continue.
    last: their last tokens.
    records: of the living hypotheses.
  """
  old, beams = state.finished, parents.shape[1]
  length = state.position + 1
  scores = ending / length.astype(jnp.float32) ** settings.length_penalty
  scores, index = top_k(jnp.concatenate([old.scores, scores], axis=1), beams)
  valid = scores > -jnp.inf
  new = (index >= beams) & valid
  number = jnp.maximum(index - beams, 0)
  # Row of [old rows, rows of the living] that each kept hypothesis comes from.
  source = jnp.where(new, beams + jnp.take_along_axis(parents, number, axis=1), index)
  # With fewer than `beams` valid ones the last old row is empty: it fills the places left over.
  source = jnp.where(valid, source, beams - 1)

  def merge(old_rows, living_rows):
    return take_beams(jnp.concatenate([old_rows, living_rows], axis=1), source)

  tokens = merge(old.tokens, state.living.tokens)
  here = jnp.arange(tokens.shape[-1]) == state.position
  last = jnp.take_along_axis(last, number, axis=1)[..., None]
  return _Finished(
    jnp.where(new[..., None] & here[None, None], last, tokens),
    scores,
    jnp.where(new, length, jnp.take_along_axis(old.lengths, jnp.minimum(source, beams - 1), 1)),
    jax.tree.map(merge, old.records, records),
  )


def _is_done(
  position: Array, limit: Array, living: _Living, finished: _Finished, settings: _Settings
) -> Bool[Array, " batch"]:
  at_limit = position >= limit
  if settings.stop == "limit":
    return at_limit
  longest = jnp.maximum(limit, 1).astype(jnp.float32)
  bound = living.log_probs.max(-1) / longest**settings.length_penalty
  hopeless = bound <= finished.scores[:, settings.n_best - 1]
  if settings.stop == "bound":
    return at_limit | hopeless
  return at_limit | hopeless | (finished.scores > -jnp.inf).all(-1)
