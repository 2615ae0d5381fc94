"""What the positions of a modulated model read, and how open its gates are there."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.qa.tagger import OTHER, SPECIAL, tag_words
from compmod_jax.data.qa.unified import LABELS, PASSAGE, QUESTION
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.layers.reading_strategies import PARTS_OF_SPEECH
from compmod_jax.mechanisms.modulation import CLOSED, OPEN
from compmod_jax.metrics.bootstrap import bootstrap_interval
from compmod_jax.metrics.statistics import loss_statistics
from compmod_jax.models.nemot import LM
from compmod_jax.tasks.base import Batch
from compmod_jax.tasks.causal_lm import CausalLM
from compmod_jax.tasks.question_answering import Answering

GatedTask = Answering | CausalLM
ALL, KIND, PART, TASK = "all", "kind of token", "part of speech", "task"
KINDS = ("passage", "question", "option", "label", "marker", "separator", "answer")
"""Of the tokens of a question: markers are `<p>` and `<q>`, the separator is `<sep>`, and the label
that answers in multiple choice is an answer."""
TEXT_KINDS = ("text", "end of document")
LEAST_TEXTS = 10  # fewer are no ground for an interval
BINS = 20  # of the histogram, of equal width from 0 to 1

_PASSAGE, _QUESTION, _OPTION, _LABEL, _MARKER, _SEPARATOR, _ANSWER = range(len(KINDS))


class Tokens(NamedTuple):
  """What the positions of a batch read.

  Attributes:
    counted: positions from which a token is predicted, each token once, bool [batch, time].
    groups: ALL, KIND, PART and TASK -> number of the category of every position, int [batch, time].
  """

  counted: np.ndarray
  groups: Mapping[str, np.ndarray]


def categories(task: GatedTask) -> dict[str, tuple[str, ...]]:
  """ALL, KIND, PART and TASK -> the names of their categories."""
  kinds, tasks = TEXT_KINDS, (LM,)
  if isinstance(task, Answering):
    kinds, tasks = KINDS, task.model.config.output_tasks() or ()
  return {ALL: (ALL,), KIND: kinds, PART: PARTS_OF_SPEECH, TASK: tasks}


def read_batch(task: GatedTask, batch: Batch, *, windows: bool = False) -> Tokens:
  """Which positions of a batch count, and what they read.

  Args:
    task: whose batch it is.
    batch: of evaluation: with its questions' answers, or windows of text.
    windows: count all of every window, not only the tokens that no window had before.
  """
  ids, tokenizer = np.asarray(batch["tokens"]), task.dataset.tokenizer
  real = (ids[:, 1:] != tokenizer.pad) & (np.asarray(batch["index"]) >= 0)[:, None]
  new = real if windows else np.asarray(batch.get("counted", real), bool)
  counted = real & new
  ids, nothing = ids[:, :-1], np.zeros(real.shape, np.int64)
  specials = tokenizer.controls - {tokenizer.unk}
  tasks, kinds = nothing, (ids == tokenizer.eos).astype(np.int64)
  if isinstance(task, Answering):
    specials |= frozenset(task.dataset.question_tokenizer.special_ids.values())
    names = categories(task)[TASK]
    rows = [names.index(name) for name, count in blocks_of(batch) for _ in range(count)]
    tasks, kinds = nothing + np.array(rows)[:, None], kinds_of(task, batch)
  parts = nothing.copy()
  for row in np.flatnonzero(counted.any(axis=1)).tolist():
    length = int(np.flatnonzero(counted[row])[-1]) + 1
    parts[row, :length] = parts_of_speech(tokenizer, ids[row, :length].tolist(), specials)
  return Tokens(counted, {ALL: nothing, KIND: kinds, PART: parts, TASK: tasks})


def kinds_of(task: Answering, batch: Batch) -> np.ndarray:
  """Number in KINDS of the token that every position of a question reads, int [batch, time].

  Padding counts as answer.
  """
  ids, special = np.asarray(batch["tokens"])[:, :-1], task.dataset.question_tokenizer.special_ids
  places = np.arange(ids.shape[1])[None]
  answer = np.asarray(batch["answer"])[:, :1]
  first, last = (np.asarray(batch["options"])[:, side, None] for side in (0, 1))
  marked = ids == special[QUESTION]
  question = np.where(marked.any(axis=1), marked.argmax(axis=1), 0)[:, None]
  label = np.isin(ids, [special[name] for name in LABELS])
  kinds = np.where(places < question, _PASSAGE, _QUESTION)
  inside = (places >= first) & (places < last)
  kinds = np.where(inside, np.where(label, _LABEL, _OPTION), kinds)
  kinds = np.where(marked | (ids == special[PASSAGE]), _MARKER, kinds)
  kinds = np.where(places == answer - 1, _SEPARATOR, kinds)
  return np.where(places >= answer, _ANSWER, kinds)


def parts_of_speech(
  tokenizer: Tokenizer, ids: Sequence[int], specials: frozenset[int]
) -> list[int]:
  """Number in PARTS_OF_SPEECH of every token's word.

  What stands between special tokens is tagged separately, the answer too; see `tagger.tag_words`.

  Args:
    tokenizer: whose tokens these are.
    ids: tokens of one text.
    specials: those that stand for no word.
  """
  found: list[int] = []
  for special, some in itertools.groupby(ids, specials.__contains__):
    run = list(some)
    found += [SPECIAL] * len(run) if special else _parts(tokenizer, run)
  return found


def _parts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
  """Classes of tokens by the word that holds their first character other than a blank."""
  blank = " " if tokenizer.kind == "words" else ""
  pieces = [blank + tokenizer.text_of(number) for number in ids]
  text, place, found = "".join(pieces), 0, []
  classes = [OTHER] * (len(text) + 1)
  for start, stop, part in tag_words(text):
    classes[start:stop] = [part] * (stop - start)
  for piece in pieces:
    first = place
    while first < len(text) and text[first].isspace():
      first += 1
    found.append(classes[first])
    place += len(piece)
  return found


class Cell(NamedTuple):
  """The gate at the tokens of a category.

  Attributes:
    group: ALL, KIND, PART or TASK.
    category: its name.
    tokens: how many.
    mean: over tokens and channels.
    low: of the mean's 95 % bootstrap interval over texts; NaN where fewer than `LEAST_TEXTS` of
      them have any.
    high: the same.
    spread: standard deviation over tokens and channels.
    closed: share of values below 0.1.
    open: share above 0.9.
    bins: shares of BINS intervals of equal width, float64.
    texts: how many have such tokens.
  """

  group: str
  category: str
  tokens: int
  mean: float
  low: float
  high: float
  spread: float
  closed: float
  open: float
  bins: np.ndarray
  texts: int = 0


class Totals:
  """Sums of a gate over the counted tokens of all texts.

  Attributes:
    tokens: how many were counted.
    channels: sums over tokens of every channel and of its square, float64 [2, width].
  """

  def __init__(self, groups: Mapping[str, Sequence[str]], numbers: np.ndarray, width: int):
    self.tokens, self.channels = 0, np.zeros((2, width))
    self._groups, self._numbers = groups, numbers
    self._sums = {name: np.zeros((len(each), 5 + BINS)) for name, each in groups.items()}
    self._texts = {name: np.zeros((len(numbers), len(each), 2)) for name, each in groups.items()}

  def add(self, gate: jax.Array, read: Tokens, index: np.ndarray) -> None:
    """Counts a batch in.

    Args:
      gate: its values, [batch, time, width].
      read: what its positions read.
      index: number of every row's text, one of those given when this was made.
    """
    found = jax.device_get(_summary(gate, jnp.asarray(read.counted)))
    values, channels = (np.asarray(part, np.float64) for part in found)
    rows, places = np.nonzero(read.counted)
    values, texts = values[rows, places], np.searchsorted(self._numbers, index[rows])
    self.tokens, self.channels = self.tokens + len(rows), self.channels + channels
    for name, ids in read.groups.items():
      chosen = ids[rows, places]
      self._sums[name] += np.eye(len(self._groups[name]))[chosen].T @ values
      np.add.at(self._texts[name], (texts, chosen), values[:, :2])

  @property
  def means(self) -> np.ndarray:
    """Mean of every channel over tokens, float64 [width]."""
    return self.channels[0] / self.tokens

  @property
  def deviations(self) -> np.ndarray:
    """Standard deviation of every channel over tokens, float64 [width]."""
    return np.sqrt(np.maximum(self.channels[1] / self.tokens - self.means**2, 0))

  def cells(self, *, seed: int = 0, samples: int = 1000) -> list[Cell]:
    """A cell for every category that has tokens.

    Args:
      seed: of the bootstrap.
      samples: its resampled sets of texts.
    """
    found = []
    for group, names in self._groups.items():
      for number, name in enumerate(names):
        sums = self._sums[group][number]
        if not sums[1]:
          continue
        mean, square, closed, open_, *bins = (sums[[0, *range(2, len(sums))]] / sums[1]).tolist()
        # Texts without such tokens add nothing to the mean, drawn or not.
        texts = self._texts[group][:, number]
        texts = texts[texts[:, 1] > 0]
        low = high = math.nan
        if len(texts) >= LEAST_TEXTS:
          interval = bootstrap_interval(loss_statistics(*texts.T), seed=seed, samples=samples)
          low, high = interval.low, interval.high
        spread = max(square - mean**2, 0.0) ** 0.5
        found.append(
          Cell(
            group, name, int(sums[1]), mean, low, high, spread, closed, open_, np.array(bins),
            len(texts),
          )
        )  # fmt: skip
    return found


class Spread(NamedTuple):
  """Where a gate varies.

  Attributes:
    channels: standard deviation of the channels' means.
    tokens: standard deviation over tokens within a channel, root mean square over channels.
    share: per cent of the whole variance that is over tokens.
  """

  channels: float
  tokens: float
  share: float


def spread(total: Totals) -> Spread:
  """Where a gate varies: between channels or over tokens."""
  between, within = float(np.var(total.means)), float(np.mean(total.deviations**2))
  return Spread(between**0.5, within**0.5, 100 * within / max(between + within, 1e-12))


@jax.jit
def _summary(gate: jax.Array, counted: jax.Array) -> tuple[jax.Array, Any]:
  """Of every token mean, 1, mean square, shares closed, open and of bins; sums of channels."""
  edges = np.linspace(0, 1, BINS + 1)[1:-1].tolist()

  def share(which: jax.Array) -> jax.Array:
    return jnp.mean(which.astype(jnp.float32), axis=-1)

  one = jnp.ones(gate.shape[:-1], jnp.float32)
  below = [0 * one, *(share(gate < edge) for edge in edges), one]
  bins = [high - low for low, high in itertools.pairwise(below)]
  mean, square = jnp.mean(gate, axis=-1), jnp.mean(gate**2, axis=-1)
  values = jnp.stack([mean, one, square, share(gate < CLOSED), share(gate > OPEN), *bins], axis=-1)
  kept = jnp.where(counted[..., None], gate, 0)
  return values, jnp.stack([jnp.sum(kept, axis=(0, 1)), jnp.sum(kept**2, axis=(0, 1))])
