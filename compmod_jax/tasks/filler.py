"""Fills in what is masked in texts: batching, one jitted pass, the most probable tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.data.pipeline import eval_batches
from compmod_jax.data.tokenizer import Tokenizer
from compmod_jax.data.vocabulary import MASK
from compmod_jax.models.encoder import Encoder
from compmod_jax.sharding import fetch
from compmod_jax.sites import OFF, Edit
from compmod_jax.tasks.base import Batch, Sharing, Status, silent
from compmod_jax.tasks.modulated import EncoderMode

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
    taps = self.taps.apart()
    logits: Any = self.model.apply({"params": params}, batch["tokens"], taps=taps)
    probabilities = jax.nn.softmax(logits, axis=-1)
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
