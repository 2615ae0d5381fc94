"""Fills in what is masked in texts: batching, one jitted pass, the most probable tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF, Edit
from compmod_jax.core.losses import token_nll
from compmod_jax.core.sharding import fetch
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.data.pipeline import eval_batches
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.data.tokenizers.vocabulary import MASK
from compmod_jax.models.encoder import Encoder
from compmod_jax.tasks.base import Batch, Sharing, Status, silent
from compmod_jax.tasks.modulated import EncoderMode, with_auxiliary
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


class Filler:
  """Fills in masks with a model; compiled once for each padded length.

  Attributes:
    model: the encoder, or a modulated model in encoder mode.
    tokenizer: from text to tokens.
    batch_tokens: padded positions of a batch.
    taps: the edits under which the model runs.
  """

  def __init__(
    self,
    model: Encoder | EncoderMode,
    tokenizer: Tokenizer,
    batch_tokens: int,
    edits: Mapping[str, Edit] | None = None,
  ):
    self.model, self.tokenizer = model, tokenizer
    longest = model.config.max_length
    buckets = [_SHORTEST << i for i in range(20) if _SHORTEST << i < longest]
    self.batch = BatchConfig(tokens=max(batch_tokens, longest), buckets=(*buckets, longest))
    self.taps = OFF.editing(edits or {})
    self._probabilities = jax.jit(self._run, static_argnames="top")
    self._losses = jax.jit(self._pseudo_losses)
    self._ordinary = np.ones(tokenizer.vocab_size, bool)
    self._ordinary[list(tokenizer.controls)] = False

  def __call__(
    self,
    params: Any,
    texts: Sequence[str],
    *,
    top: int = 5,
    sharing: Sharing = Sharing(),
    status: Status = silent,
  ) -> list[Filled]:
    """Every text with its masks filled in; a text without any stays as it is.

    Texts longer than the model's positions are cut there; masks beyond have no candidates.

    Args:
      params: the model's parameters.
      texts: raw text with MASK where something is to be filled in.
      top: candidates for each mask.
      sharing: how batches are laid over devices.
      status: shows progress.
    """
    ids = [self.encode(text) for text in texts]
    found = [Filled(text, []) for text in texts]
    masked = [i for i, one in enumerate(ids) if self.tokenizer.mask in one]
    done = 0
    for batch in self._batches(ids, masked, sharing.multiple):
      best, probabilities = fetch(
        self._probabilities(params, sharing.place(batch), top=min(top, self._ordinary.sum()))
      )
      for row in np.flatnonzero(batch["index"] >= 0).tolist():
        number = int(batch["index"][row])
        where = np.flatnonzero(batch["tokens"][row] == self.tokenizer.mask)
        found[number] = self._filled(ids[number], where, best[row], probabilities[row])
        done += 1
      status("filled texts", done, len(masked))
    return found

  def score(
    self,
    params: Any,
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
    for number, problem in self.too_long(texts).items():
      raise UserError(f"texts[{number}], {texts[number][:40]!r}, {problem}; shorten it.")
    ids = [self.encode(text) for text in texts]
    found = [np.zeros(len(one) - 2, np.float32) for one in ids]
    rows = [(number, place) for number, one in enumerate(ids) for place in range(1, len(one) - 1)]
    columns = {"tokens": Ragged([ids[number] for number, _ in rows])}
    examples = Examples(columns, np.arange(len(rows), dtype=np.int32), pad=self.tokenizer.pad)
    done = 0
    for batch in eval_batches(examples, self.batch, multiple=sharing.multiple):
      real = np.flatnonzero(batch["index"] >= 0).tolist()
      batch["place"], batch["target"] = (np.zeros(len(batch["index"]), np.int32) for _ in "pt")
      for row in real:
        place = rows[batch["index"][row]][1]
        batch["place"][row], batch["target"][row] = place, batch["tokens"][row, place]
        batch["tokens"][row, place] = self.tokenizer.mask
      nll = fetch(self._losses(params, sharing.place(batch)))
      for row in real:
        number, place = rows[batch["index"][row]]
        found[number][place - 1] = nll[row]
      done += len(real)
      status("scored tokens", done, len(rows))
    return [
      scored(self.tokenizer, np.asarray(one[1:-1], np.int32), nll)
      for one, nll in zip(ids, found, strict=True)
    ]

  def too_long(self, texts: Sequence[str]) -> dict[int, str]:
    """Number -> what is wrong, of every text that the model has no positions for."""
    most, lengths = self.model.config.max_length, [len(self.encode(t, cut=False)) for t in texts]
    return {
      number: f"has {length} tokens with its ends, but the model has positions for {most}"
      for number, length in enumerate(lengths)
      if length > most
    }

  def _pseudo_losses(self, params: Any, batch: Batch) -> jax.Array:
    """Loss of the one masked token of every row, in nats."""
    logits = self._logits(params, batch["tokens"], batch["place"][:, None])
    return token_nll(logits, batch["target"][:, None])[:, 0]

  def _logits(
    self, params: Any, tokens: jax.Array, positions: jax.Array | None = None
  ) -> jax.Array:
    real, config = tokens != self.tokenizer.pad, self.model.config
    taps = self.taps.apart().knowing(lambda site: with_auxiliary(config, site, real, positions))
    logits: Any = self.model.apply({"params": params}, tokens, positions=positions, taps=taps)
    return logits

  def encode(self, text: str, *, cut: bool = True) -> list[int]:
    """Tokens of a text between start and end token, cut to the model's positions unless told.

    A mask stands for a word with the space before it, so a token that is only that space goes.
    """
    tokenizer, kept = self.tokenizer, list[int]()
    for number in tokenizer.encode(text.replace(MASK, tokenizer.mask_text)):
      if number == tokenizer.mask and kept and tokenizer.text_of(kept[-1]) == " ":
        kept.pop()
      kept.append(number)
    most = self.model.config.max_length - 2 if cut else len(kept)
    return [tokenizer.bos, *kept[:most], tokenizer.eos]

  def _batches(self, ids: list[list[int]], kept: list[int], multiple: int) -> Iterator[Batch]:
    columns = {"tokens": Ragged([ids[i] for i in kept])}
    examples = Examples(columns, np.asarray(kept, np.int32), pad=self.tokenizer.pad)
    return eval_batches(examples, self.batch, multiple=multiple)

  def _run(self, params: Any, batch: Batch, *, top: int) -> tuple[jax.Array, jax.Array]:
    """The best tokens of every position and their probabilities, [rows, time, top]."""
    probabilities = jax.nn.softmax(self._logits(params, batch["tokens"]), axis=-1)
    best, which = jax.lax.top_k(jnp.where(self._ordinary, probabilities, -1.0), top)
    return which.astype(jnp.int32), best

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
