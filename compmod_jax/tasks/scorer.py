"""How probable every token of a text is to a model: of running text, and of translations."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core.errors import UserError
from compmod_jax.core.losses import token_nll
from compmod_jax.core.sharding import fetch
from compmod_jax.core.types import Params
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.data.pipeline import eval_batches
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.tasks.base import Batch, Sharing, Status, TaskModel, silent

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
  def log_probabilities(self) -> np.ndarray:
    """Log-probability of every token in nats."""
    return -self.nll

  @property
  def log_probability(self) -> float:
    """That of the whole text, the sum over its tokens, in nats."""
    return 0.0 - self.total

  @property
  def surprisal(self) -> np.ndarray:
    """Surprisal of every token in bits."""
    return self.nll / np.log(2)

  @property
  def total(self) -> float:
    """Negative log-likelihood of the whole text in nats."""
    return float(np.sum(self.nll, dtype=np.float64))


_NOTHING = np.zeros(0, np.float32)


def _longest(model: TaskModel[Any]) -> int | None:
  """The model's positions; None where a text may have any length."""
  return getattr(model.config, "max_length", None)


@dataclasses.dataclass(frozen=True, eq=False)
class Scorer:
  """Scores texts one by one, each from the start, after an end token.

  Attributes:
    tokenizer: from text to tokens.
    run: from a model, parameters and a batch to what `Scored` holds of every token, each [batch,
      time]: `nll`, and where something is recoded `error`, `error_after` and `nll_after`.
  """

  tokenizer: Tokenizer
  run: Callable[[Any, Params, Batch], dict[str, jax.Array]]

  def __call__(
    self,
    model: TaskModel[Any],
    params: Params,
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
    for number, problem in self.too_long(model, texts).items():
      raise UserError(f"texts[{number}], {texts[number][:40]!r}, {problem}; shorten it.")
    found: dict[int, Scored] = {}
    for batch in self._batches(ids, _longest(model), sharing.multiple):
      if labels is not None:
        own = np.asarray([*labels, 0.0], np.float32)[batch["index"]]
        batch["label"] = np.repeat(own[:, None], batch["tokens"].shape[1], axis=1)
      values = fetch(model.jit(self.run)(params, sharing.place(batch)))
      for row in np.flatnonzero(batch["index"] >= 0).tolist():
        number = int(batch["index"][row])
        tokens = np.asarray(ids[number], np.int32)
        some = {name: value[row, : len(tokens)] for name, value in values.items()}
        found[number] = self._scored(tokens, some)
      status("scored texts", len(found), len(texts))
    return [found[number] for number in range(len(texts))]

  def too_long(self, model: TaskModel[Any], texts: Sequence[str]) -> dict[int, str]:
    """Number -> what is wrong, of every text that the model has no positions for."""
    longest = _longest(model)
    return {
      number: f"has {len(one)} tokens with its end, but the model has positions for {longest}"
      for number, one in enumerate(self.encode(texts))
      if longest is not None and len(one) > longest
    }

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
    return jax.device_put(dict(made))

  def _batches(
    self, ids: list[list[int]], longest: int | None, multiple: int
  ) -> Iterator[dict[str, np.ndarray]]:
    buckets = tuple(_SHORTEST << i for i in range(9))
    if longest is not None:
      buckets = (*(length for length in buckets if length < longest), longest)
    config = BatchConfig(tokens=max(_TOKENS, buckets[-1]), buckets=buckets)
    columns = {"targets": Ragged(ids)}
    numbers = np.arange(len(ids), dtype=np.int32)
    examples = Examples(columns, numbers, pad=self.tokenizer.pad)
    for batch in eval_batches(examples, config, multiple=multiple):
      yield self._shifted(batch)

  def _shifted(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch with what is read before every target."""
    targets = batch["targets"]
    start = np.full((len(targets), 1), self.tokenizer.eos, targets.dtype)
    tokens = np.concatenate([start, targets[:, :-1]], axis=1)
    counted = (targets != self.tokenizer.pad).astype(np.int32)
    return {**batch, "tokens": tokens, "counted": counted}

  def _scored(self, tokens: np.ndarray, values: Mapping[str, np.ndarray]) -> Scored:
    more = (values.get(name, _NOTHING) for name in ("error", "error_after", "nll_after"))
    return scored(self.tokenizer, tokens, values["nll"], *more)


def scored(
  tokenizer: Tokenizer,
  tokens: np.ndarray,
  nll: np.ndarray,
  error: np.ndarray = _NOTHING,
  error_after: np.ndarray = _NOTHING,
  nll_after: np.ndarray = _NOTHING,
) -> Scored:
  """A text with its scores; its end token is called `</s>` whatever the tokenizer calls it."""
  eos = tokenizer.eos
  words = ["</s>" if number == eos else tokenizer.text_of(number) for number in tokens.tolist()]
  unknown = int(np.sum(tokens == tokenizer.unk))
  return Scored(tokens, words, nll, error, error_after, nll_after, unknown)


def _pair_losses(model: TaskModel[Any], params: Params, batch: Batch) -> jax.Array:
  """Loss of every target token in nats, [batch, time]."""
  return token_nll(model.forward(params, batch), jnp.asarray(batch["target"]))


@dataclasses.dataclass(frozen=True, eq=False)
class PairScorer:
  """Scores translations: every target token given the source and the target tokens before it.

  Attributes:
    source: from text to source tokens.
    target: from text to target tokens.
    batch: padded lengths, and padded positions of a batch.
  """

  source: Tokenizer
  target: Tokenizer
  batch: BatchConfig

  def __call__(
    self,
    model: TaskModel[Any],
    params: Params,
    pairs: Sequence[tuple[str, str]],
    *,
    sharing: Sharing = Sharing(),
    status: Status = silent,
  ) -> list[Scored]:
    """Every target's tokens with their losses, in the order given.

    Raises:
      UserError: a side has more tokens than the model has positions.
    """
    longest = model.config.max_length
    buckets = (*(length for length in self.batch.buckets if length < longest), longest)
    config = BatchConfig(tokens=max(self.batch.tokens, longest), buckets=buckets)
    for number, problem in self.too_long(model, pairs).items():
      raise UserError(f"pairs[{number}] {problem}; shorten it.")
    sides = self.encode(pairs)
    columns = {name: Ragged(ids) for name, ids in zip(("source", "target"), sides, strict=True)}
    examples = Examples(columns, np.arange(len(pairs), dtype=np.int32), pad=self.source.pad)
    found: dict[int, Scored] = {}
    for batch in eval_batches(examples, config, multiple=sharing.multiple):
      nll = fetch(model.jit(_pair_losses)(params, sharing.place(batch)))
      for row in np.flatnonzero(batch["index"] >= 0).tolist():
        number = int(batch["index"][row])
        tokens = np.asarray(sides[1][number], np.int32)
        found[number] = scored(self.target, tokens, nll[row, : len(tokens)])
      status("scored pairs", len(found), len(pairs))
    return [found[number] for number in range(len(pairs))]

  def too_long(self, model: TaskModel[Any], pairs: Sequence[tuple[str, str]]) -> dict[int, str]:
    """Number -> what is wrong, of every pair with a side that the model has no positions for."""
    found, config = {}, model.config
    for number, (source, target) in enumerate(zip(*self.encode(pairs), strict=True)):
      name, count, most = "source", len(source), config.max_length
      if count <= most:
        name, count, most = "target", len(target), config.room_for_target(len(source))
      if count > most:
        found[number] = (
          f"has {count} tokens with its end in its {name}, but the model has positions for {most}"
        )
    return found

  def encode(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
    """Token numbers of all sources and of all targets, each with its end."""
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    return (
      [[*ids, self.source.eos] for ids in self.source.encode_batch(sources)],
      [[*ids, self.target.eos] for ids in self.target.encode_batch(targets)],
    )
