"""Texts into pairs: corrupted text and what it lacks; several tasks as one, by their prefixes."""

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np

from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.base import DataError, Metric, Pairs
from compmod_jax.data.corruption import SpansConfig, corrupt_spans
from compmod_jax.data.sources.cogs import CogsData
from compmod_jax.data.sources.documents import GrammarTopics
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.sources.tfds import TfdsData
from compmod_jax.data.synthetic.expressions import ArithmeticData, ListOpsData, TableLookupData
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.lengths import LengthData
from compmod_jax.data.synthetic.mlc import MlcData
from compmod_jax.data.synthetic.pcfg_set import PcfgSetData
from compmod_jax.data.synthetic.scan import ScanData
from compmod_jax.data.text_tokenizer import DocumentData


def sentinels(count: int) -> tuple[str, ...]:
  """T5's names of its sentinels, for the tokenizer's `special_tokens`."""
  return tuple(f"<extra_id_{i}>" for i in range(count))


@dataclasses.dataclass(frozen=True)
class SpanCorruptionData:
  """Documents with spans of words cut out as sources, and the spans as targets, as T5 is trained.

  Spans are of whole words, where T5's are of its tokens: pairs do not depend on a tokenizer.
  What is cut out of a text depends on `seed`, the split, the text's number and the draw alone.
  """

  data: DocumentData = GrammarTopics()
  """Where documents come from."""
  words: int = 64
  """Documents are cut into texts of at most this many words."""
  spans: SpansConfig = SpansConfig()
  """How much is cut out."""
  sentinels: int = 100
  """Sentinels <extra_id_0>, ...; the tokenizer's special tokens should be the same."""
  draws: int = 1
  """How many pairs are made of every training text, each with other spans."""
  seed: int = 0
  """Of the spans."""
  metric: Metric = "bleu"
  """What outputs are scored with."""

  source_language = "corrupted text"
  target_language = "missing spans"

  def __post_init__(self) -> None:
    check(self.words >= 2, f"words is {self.words}; a text needs two to lose one: give 2 or more.")
    check(
      self.sentinels >= 2,
      f"sentinels is {self.sentinels}; one span needs two, one in its place and one at the end of"
      " the target: give 2 or more.",
    )
    check(self.draws >= 1, f"draws is {self.draws}; give at least 1.")
    check(self.seed >= 0, f"seed is {self.seed}; it must not be negative.")

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: those of the documents."""
    return self.data.splits()

  def load(self, split: str) -> Pairs:
    """The pairs of a split. Texts of one word are left out.

    Raises:
      UserError: unknown split.
      DataError: a document has one of the sentinels, or there is no text.
    """
    check_choice("split", split, self.splits())
    names, source, target, places = sentinels(self.sentinels), [], [], []
    number = 0
    for place, document in self.data.load(split).placed():
      words = document.split()
      for name in set(names).intersection(words):
        raise DataError(f"{place} has the word {name}, which marks a span; take it out.")
      for start in range(0, len(words) - 1, self.words):
        text = words[start : start + self.words]
        for draw in range((self.draws if split == "train" else 1) if len(text) > 1 else 0):
          random = np.random.default_rng([self.seed, zlib.crc32(split.encode()), number, draw])
          pair = corrupt_spans(text, names, random, self.spans)
          for side, made in zip((source, target), pair, strict=True):
            side.append(" ".join(made))
          places.append(place)
        number += 1
    if not source:
      raise DataError(f"The split {split!r} of {self.data.describe()} has no text of two words.")
    return Pairs(source, target, where=lambda i: places[i], metric=self.metric)


Systematic = (
  ScanData
  | CogsData
  | PcfgSetData
  | TableLookupData
  | ArithmeticData
  | ListOpsData
  | LengthData
  | MlcData
)
"""Pairs that are scored on others than those of training."""
PairData = GrammarData | Systematic | TextData | TfdsData | SpanCorruptionData


@dataclasses.dataclass(frozen=True)
class PrefixedData:
  """One of the tasks of a mixture."""

  name: str
  """Of the task; its test splits are called NAME_SPLIT."""
  prefix: str
  """What every source of it begins with, such as `translate German to English:`."""
  data: PairData
  """Where its pairs come from."""
  tests: tuple[str, ...] = ("test",)
  """Splits that are scored by themselves at the end."""

  def __post_init__(self) -> None:
    check(bool(self.name), "name is empty; name the task.")
    for split in self.tests:
      check_choice(f"tests of {self.name}", split, self.data.splits())


@dataclasses.dataclass(frozen=True)
class TextToTextData:
  r"""Several tasks in one, each known by the prefix of its sources.

  A training batch holds examples in proportion to the sizes of the tasks' training sets, each
  counted up to a limit K:

  .. math:: r_m = \min(e_m, K) \big/ \sum_n \min(e_n, K)

  Source: Raffel et al. 2020, section 3.5.2.
  """

  tasks: tuple[PrefixedData, ...]
  """The tasks."""
  limit: int = 0
  """K: most training pairs of a task, the first ones; 0 for all."""
  metric: Metric = "bleu"
  """What outputs are scored with."""

  source_language = "inputs"
  target_language = "targets"

  def __post_init__(self) -> None:
    names = [task.name for task in self.tasks]
    check(bool(names), "tasks is empty; give at least one.")
    check(len(set(names)) == len(names), f"tasks have the names {names}; give different ones.")
    check(self.limit >= 0, f"limit is {self.limit}; it must not be negative.")

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: train and valid, of all tasks, and each task's tests."""
    tests = (f"{task.name}_{split}" for task in self.tasks for split in task.tests)
    return ("train", "valid", *tests)

  def load(self, split: str) -> Pairs:
    """The pairs of a split, one task after the other.

    Raises:
      UserError: unknown split, or what the task's own data raise.
    """
    check_choice("split", split, self.splits())
    if split not in ("train", "valid"):
      wanted = {f"{task.name}_{name}": (task, name) for task in self.tasks for name in task.tests}
      task, split = wanted[split]
      return self._joined([task], split)
    return self._joined(self.tasks, split)

  def _joined(self, tasks: Sequence[PrefixedData], split: str) -> Pairs:
    source, target, origins = [], [], []
    for task in tasks:
      pairs = task.data.load(split)
      count = min(len(pairs), self.limit or len(pairs)) if split == "train" else len(pairs)
      source += [f"{task.prefix} {text}" for text in pairs.source[:count]]
      target += list(pairs.target[:count])
      origins += [(pairs.where, i) for i in range(count)]
    return Pairs(source, target, where=lambda i: origins[i][0](origins[i][1]), metric=self.metric)
