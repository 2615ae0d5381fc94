"""Fills in what is masked in texts: batching, one jitted pass, the most probable tokens."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF
from compmod_jax.core.losses import token_nll
from compmod_jax.core.sharding import fetch
from compmod_jax.core.types import Params
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.data.pipeline import eval_batches
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.data.tokenizers.vocabulary import MASK
from compmod_jax.models.base import Encoder, valid_at
from compmod_jax.tasks.base import Batch, NoSearch, Sharing, Status, TaskModel, silent
from compmod_jax.tasks.scorer import Scored, scored

_SHORTEST = 16  # padded length of the shortest texts


class Candidate(NamedTuple):
  """A token that may stand in a masked place.

  Attributes:
    token: its text; a sub-word that begins a word has a space before it.
    probability: given the rest of the text, among all tokens.
  """

  token: str
  probability: float


class Filled(NamedTuple):
  """A text with its masks filled in.

  Attributes:
    text: each mask replaced by its best candidate, the others left masked while it was predicted.
    candidates: of every mask, best first.
  """

  text: str
  candidates: list[list[Candidate]]


@dataclasses.dataclass(frozen=True, eq=False)
class FillMask(NoSearch):
  """Fills in masks with a model; one compiled program for each padded length.

  Attributes:
    tokenizer: from text to tokens.
    batch_tokens: padded positions of a batch.
  """

  tokenizer: Tokenizer
  batch_tokens: int

  def __call__(
    self,
    model: TaskModel[Encoder],
    params: Params,
    texts: Sequence[str],
    *,
    top: int = 5,
    sharing: Sharing = Sharing(),
    status: Status = silent,
  ) -> list[Filled]:
    """Every text with its masks filled in; a text without any stays as it is.

    Texts longer than the model's positions are cut there; masks beyond have no candidates.

    Args:
      model: the model.
      params: its parameters.
      texts: raw text with MASK where something is to be filled in.
      top: candidates for each mask.
      sharing: how batches are laid over devices.
      status: shows progress.
    """
    ids = [self.encode(text, cut=model.config.max_length) for text in texts]
    found = [Filled(text, []) for text in texts]
    masked = [i for i, one in enumerate(ids) if self.tokenizer.mask in one]
    done, most = 0, self.tokenizer.vocab_size - len(self.tokenizer.controls)
    run = model.jit(_best_tokens, tokenizer=self.tokenizer, top=min(top, most))
    config = batches_for(model, self.batch_tokens)
    columns = {"tokens": Ragged([ids[i] for i in masked])}
    examples = Examples(columns, np.asarray(masked, np.int32), pad=self.tokenizer.pad)
    for batch in eval_batches(examples, config, multiple=sharing.multiple):
      best, probabilities = fetch(run(params, sharing.place(batch)))
      for row in np.flatnonzero(batch["index"] >= 0).tolist():
        number = int(batch["index"][row])
        where = np.flatnonzero(batch["tokens"][row] == self.tokenizer.mask)
        found[number] = self._filled(ids[number], where, best[row], probabilities[row])
        done += 1
      status("filled texts", done, len(masked))
    return found

  @functools.cached_property
  def scorer(self) -> "MaskedScorer":
    """Scores given texts; see `MaskedScorer`."""
    return MaskedScorer(self)

  def encode(self, text: str, *, cut: int | None = None) -> list[int]:
    """Tokens of a text between start and end token, at most `cut` if that is given.

    A mask stands for a word with the space before it, so a token that is only that space goes.
    """
    tokenizer, kept = self.tokenizer, list[int]()
    for number in tokenizer.encode(text.replace(MASK, tokenizer.mask_text)):
      if number == tokenizer.mask and kept and tokenizer.text_of(kept[-1]) == " ":
        kept.pop()
      kept.append(number)
    most = len(kept) if cut is None else cut - 2
    return [tokenizer.bos, *kept[:most], tokenizer.eos]

  def _filled(
    self, ids: list[int], where: np.ndarray, best: np.ndarray, probabilities: np.ndarray
  ) -> Filled:
    full = np.asarray(ids)
    full[where] = best[where, 0]
    candidates = [
      [
        Candidate(self.tokenizer.text_of(int(token)), float(probability))
        for token, probability in zip(best[place], probabilities[place], strict=True)
      ]
      for place in where.tolist()
    ]
    return Filled(self.tokenizer.decode(full.tolist()), candidates)


@dataclasses.dataclass(frozen=True)
class MaskedScorer:
  """Scores texts by a model that fills in masks.

  Attributes:
    fill: reads texts.
  """

  fill: FillMask

  def __call__(
    self,
    model: TaskModel[Encoder],
    params: Params,
    texts: Sequence[str],
    *,
    sharing: Sharing = Sharing(),
    status: Status = silent,
  ) -> list[Scored]:
    """Loss of every token given all the others, each masked in turn, and no end token.

    Their sum is the text's negative pseudo-log-likelihood, which is no probability: it does not sum
    to one over texts. It takes a pass for each token.

    Raises:
      UserError: a text has more tokens than the model has positions.

    Source: Salazar et al. 2020, equation 1.
    """
    tokenizer, run = self.fill.tokenizer, model.jit(_pseudo_losses, tokenizer=self.fill.tokenizer)
    for number, problem in self.too_long(model, texts).items():
      raise UserError(f"texts[{number}], {texts[number][:40]!r}, {problem}; shorten it.")
    ids = [self.fill.encode(text) for text in texts]
    found = [np.zeros(len(one) - 2, np.float32) for one in ids]
    rows = [(number, place) for number, one in enumerate(ids) for place in range(1, len(one) - 1)]
    columns = {"tokens": Ragged([ids[number] for number, _ in rows])}
    examples = Examples(columns, np.arange(len(rows), dtype=np.int32), pad=tokenizer.pad)
    done, config = 0, batches_for(model, self.fill.batch_tokens)
    for batch in eval_batches(examples, config, multiple=sharing.multiple):
      real = np.flatnonzero(batch["index"] >= 0).tolist()
      batch["place"], batch["target"] = (np.zeros(len(batch["index"]), np.int32) for _ in "pt")
      for row in real:
        place = rows[batch["index"][row]][1]
        batch["place"][row], batch["target"][row] = place, batch["tokens"][row, place]
        batch["tokens"][row, place] = tokenizer.mask
      nll = fetch(run(params, sharing.place(batch)))
      for row in real:
        number, place = rows[batch["index"][row]]
        found[number][place - 1] = nll[row]
      done += len(real)
      status("scored tokens", done, len(rows))
    return [
      scored(tokenizer, np.asarray(one[1:-1], np.int32), nll)
      for one, nll in zip(ids, found, strict=True)
    ]

  def too_long(self, model: TaskModel[Encoder], texts: Sequence[str]) -> dict[int, str]:
    """Number -> what is wrong, of every text that the model has no positions for."""
    most, lengths = model.config.max_length, [len(self.fill.encode(text)) for text in texts]
    return {
      number: f"has {length} tokens with its ends, but the model has positions for {most}"
      for number, length in enumerate(lengths)
      if length > most
    }


def batches_for(model: TaskModel[Encoder], tokens: int) -> BatchConfig:
  """Padded lengths up to the model's positions, in batches of this many padded positions."""
  longest = model.config.max_length
  buckets = [_SHORTEST << i for i in range(20) if _SHORTEST << i < longest]
  return BatchConfig(tokens=max(tokens, longest), buckets=(*buckets, longest))


def _logits(
  model: TaskModel[Encoder],
  params: Params,
  tokens: jax.Array,
  pad: int,
  positions: jax.Array | None = None,
) -> jax.Array:
  real, config = tokens != pad, model.config
  intermediates = OFF.editing(model.edits).apart()
  intermediates = intermediates.knowing(lambda site: valid_at(config, site, real, positions))
  return model.module.apply(
    {"params": params}, tokens, positions=positions, intermediates=intermediates
  )


def _best_tokens(
  model: TaskModel[Encoder], params: Params, batch: Batch, *, tokenizer: Tokenizer, top: int
) -> tuple[jax.Array, jax.Array]:
  """The best ordinary tokens of every position and their probabilities, [rows, time, top]."""
  ordinary = np.ones(tokenizer.vocab_size, bool)
  ordinary[list(tokenizer.controls)] = False
  logits = _logits(model, params, batch["tokens"], tokenizer.pad)
  probabilities = jax.nn.softmax(logits, axis=-1)
  best, which = jax.lax.top_k(jnp.where(ordinary, probabilities, -1.0), top)
  return which.astype(jnp.int32), best


def _pseudo_losses(
  model: TaskModel[Encoder], params: Params, batch: Batch, *, tokenizer: Tokenizer
) -> jax.Array:
  """Loss of the one masked token of every row, in nats."""
  logits = _logits(model, params, batch["tokens"], tokenizer.pad, batch["place"][:, None])
  return token_nll(logits, batch["target"][:, None])[:, 0]
