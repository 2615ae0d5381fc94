"""How surprising every token of a text is to a language model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.data.pipeline import eval_batches
from compmod_jax.data.tokenizer import Tokenizer
from compmod_jax.errors import check
from compmod_jax.sharding import fetch
from compmod_jax.tasks.base import Batch, Sharing, Status, silent

_SHORTEST = 8  # padded length of the shortest texts
_TOKENS = 4096  # padded positions of a batch


class Scored(NamedTuple):
  """A text and what a model makes of it.

  Attributes:
    tokens: token numbers, the end token last, int32 [tokens].
    words: their texts.
    nll: negative log-likelihood of each given those before, in nats, float32 [tokens].
    error: the error signal before recoding at each; empty where nothing is recoded.
    error_after: the same after it.
    nll_after: what `nll` would be from the recoded top state.
    unknown: how many tokens are unknown words.
  """

  tokens: np.ndarray
  words: list[str]
  nll: np.ndarray
  error: np.ndarray
  error_after: np.ndarray
  nll_after: np.ndarray
  unknown: int

  @property
  def surprisal(self) -> np.ndarray:
    """Surprisal of every token in bits."""
    return self.nll / np.log(2)

  @property
  def total(self) -> float:
    """Negative log-likelihood of the whole text in nats."""
    return float(np.sum(self.nll, dtype=np.float64))


class Scorer:
  """Scores texts one by one, each from the start, after an end token.

  Attributes:
    tokenizer: from text to tokens.
    run: from parameters and a batch to what `Scored` holds of every token, each [batch, time]:
      `nll`, and where something is recoded `error`, `error_after` and `nll_after`.
    longest: the model's positions; None where a text may have any length.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    run: Callable[[Any, Batch], dict[str, jax.Array]],
    longest: int | None = None,
  ):
    self.tokenizer, self.longest = tokenizer, longest
    buckets = tuple(_SHORTEST << i for i in range(9))
    if longest is not None:
      buckets = (*(length for length in buckets if length < longest), longest)
    self._batch = BatchConfig(tokens=max(_TOKENS, buckets[-1]), buckets=buckets)
    self._run = jax.jit(run)

  def __call__(
    self,
    params: Any,
    texts: Sequence[str],
    *,
    labels: Sequence[float] | None = None,
    sharing: Sharing = Sharing(),
    status: Status = silent,
  ) -> list[Scored]:
    """Every text's tokens with their losses, in the order given; `labels` for weak supervision.

    Raises:
      UserError: a text has more tokens than the model has positions.
    """
    ids = self.encode(texts)
    for number, one in enumerate(ids):
      check(
        self.longest is None or len(one) <= self.longest,
        f"texts[{number}], {texts[number][:40]!r}, has {len(one)} tokens with its end, but the"
        f" model has positions for {self.longest}; shorten it.",
      )
    found: dict[int, Scored] = {}
    for batch in self._batches(ids, sharing.multiple):
      if labels is not None:
        own = np.asarray([*labels, 0.0], np.float32)[batch["index"]]
        batch["label"] = np.repeat(own[:, None], batch["tokens"].shape[1], axis=1)
      values = fetch(self._run(params, sharing.place(batch)))
      for row in np.flatnonzero(batch["index"] >= 0).tolist():
        number = int(batch["index"][row])
        tokens = np.asarray(ids[number], np.int32)
        some = {name: value[row, : len(tokens)] for name, value in values.items()}
        found[number] = self._scored(tokens, some)
      status("scored texts", len(found), len(texts))
    return [found[number] for number in range(len(texts))]

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    """Token numbers of every text and its end."""
    return [[*ids, self.tokenizer.eos] for ids in self.tokenizer.encode_batch(list(texts))]

  def batch(self, texts: Sequence[str]) -> dict[str, jax.Array]:
    """All texts as one padded batch."""
    ids = self.encode(texts)
    padded = np.full((len(ids), max(map(len, ids))), self.tokenizer.pad, np.int32)
    for row, one in zip(padded, ids, strict=True):
      row[: len(one)] = one
    made = self._shifted({"targets": padded, "index": np.arange(len(ids))})
    return {name: jnp.asarray(value) for name, value in made.items()}

  def _batches(self, ids: list[list[int]], multiple: int) -> Iterator[dict[str, np.ndarray]]:
    columns = {"targets": Ragged(ids)}
    numbers = np.arange(len(ids), dtype=np.int32)
    examples = Examples(columns, numbers, pad=self.tokenizer.pad)
    for batch in eval_batches(examples, self._batch, multiple=multiple):
      yield self._shifted(batch)

  def _shifted(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch with what is read before every target."""
    targets = batch["targets"]
    start = np.full((len(targets), 1), self.tokenizer.eos, targets.dtype)
    tokens = np.concatenate([start, targets[:, :-1]], axis=1)
    counted = (targets != self.tokenizer.pad).astype(np.int32)
    return {**batch, "tokens": tokens, "counted": counted}

  def _scored(self, tokens: np.ndarray, values: Mapping[str, np.ndarray]) -> Scored:
    empty = np.zeros(0, np.float32)
    return Scored(
      tokens,
      [self.tokenizer.text_of(int(number)) for number in tokens[:-1]] + ["</s>"],
      values["nll"],
      values.get("error", empty),
      values.get("error_after", empty),
      values.get("nll_after", empty),
      int(np.sum(tokens == self.tokenizer.unk)),
    )
