"""Texts by class as episodes: the grammar's sentences by hidden property, questions, own files."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import UserError, check, check_choice, short_list
from compmod_jax.core.untrusted import parse_json
from compmod_jax.data import pipeline
from compmod_jax.data.base import ClassExamples, DataError, TrainIterator
from compmod_jax.data.class_episodes import (
  ClassEpisodeConfig,
  ClassEpisodes,
  ClassTaskConfig,
  two_rows,
)
from compmod_jax.data.episodes import EpisodeBatches
from compmod_jax.data.qa.file_sets import DEVELOPMENT_SETS
from compmod_jax.data.sources.text import expand_folder, read_lines
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.grammar.properties import PROPERTIES
from compmod_jax.data.text_tokenizer import FILE
from compmod_jax.data.tokenizers import Tokenizer

SPLITS = ("train", "valid", "test")
_VALID = ("negation", "determiner", "adverb class", "object animacy")
_TEST = ("number", "tense", "relative clauses", "animacy", "verb class", "question")
_TRAIN = tuple(name for name in PROPERTIES if name not in (*_VALID, *_TEST))


@dataclasses.dataclass(frozen=True)
class SentenceData:
  """English sentences of the project's grammar by hidden property.

  A class is a value of a property, such as `tense: past`, and an episode is of values of one. The
  properties of meta-training, validation and test are disjoint, and so are their sentences. Example
  e of a class is the e-th sentence of its split that has this value: a function of (seed, property,
  class, example). Values that fewer sentences have than `examples` are left out. Needs no files.
  """

  seed: int = 0
  """Of the sentences."""
  sentences: int = 30_000
  """Sentences of meta-training that are drawn; validation and test have a fifth of it each."""
  examples: int = 60
  """Sentences of a class."""
  words: int = 12
  """Longest sentence, in words."""
  train: tuple[str, ...] = _TRAIN
  """Properties of meta-training."""
  valid: tuple[str, ...] = _VALID
  """Properties of validation."""
  test: tuple[str, ...] = _TEST
  """Properties of the test."""

  def __post_init__(self):
    check_least(self, "task.data.", seed=0, sentences=5, examples=2, words=5)
    seen = dict[str, str]()
    for split in SPLITS:
      own = getattr(self, split)
      check(bool(own), f"task.data.{split} is empty; give one property at least.")
      for name in own:
        check_choice(f"task.data.{split}", name, PROPERTIES)
        before = seen.setdefault(name, split)
        check(
          before == split and own.count(name) == 1,
          f"task.data has the property {name!r} in {before!r} and {split!r}; what is learned about"
          " learning is tested on properties that were never seen. Keep it in one, once.",
        )

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return SPLITS

  def describe(self) -> str:
    """What the classes are, in a few words."""
    return "sentences of the grammar by hidden property"

  def load(self, split: str) -> ClassExamples:
    """The sentences of a split by class, drawn once in a process; inputs are texts.

    Raises:
      UserError: unknown split, or a property with fewer than two classes.
    """
    check_choice("split", split, SPLITS)
    return _sentences(self, split)


@functools.lru_cache(maxsize=8)
def _sentences(data: SentenceData, split: str) -> ClassExamples:
  few = max(1, data.sentences // 5)
  grammar = GrammarData(seed=data.seed, train=data.sentences, valid=few, test=few)
  wanted: tuple[str, ...] = getattr(data, split)
  held = dict[tuple[str, str], list[str]]()
  seen = set[str]()
  for text, values in grammar.with_properties(split):
    if text in seen or text.count(" ") >= data.words:
      continue
    seen.add(text)
    for name in wanted:
      if name in values:
        own = held.setdefault((name, values[name]), [])
        if len(own) < data.examples:
          own.append(text)
  classes = sorted(key for key, own in held.items() if len(own) == data.examples)
  groups = [name for name, _ in classes]
  poor = [name for name in wanted if groups.count(name) < 2]
  check(
    not poor,
    f"task.data.{split} has {short_list(poor)}, of which fewer than two values are those of"
    f" {data.examples} sentences of {data.words} words at most. Draw more task.data.sentences, ask"
    " for fewer task.data.examples, or leave the property out.",
  )
  return ClassExamples(
    np.array([text for key in classes for text in held[key]]),
    np.repeat(np.arange(len(classes)), data.examples),
    tuple(f"{name}: {value}" for name, value in classes),
    tuple(groups),
  )


@dataclasses.dataclass(frozen=True)
class QuestionsBySet:
  """Questions by the set that they are from, of the sets in `$COMPMOD_DATA/qa`.

  A class is a set, such as BoolQ or a domain of SubjQA.
  """

  examples: int = 300
  """Questions of a class, the first ones of its first split."""
  train: tuple[str, ...] = (
    "arc_easy",
    "boolq",
    "openbookqa",
    "race_middle",
    "siqa",
    "subjqa_electronics",
    "subjqa_grocery",
  )
  """Sets of meta-training."""
  valid: tuple[str, ...] = ("mctest", "subjqa_restaurants")
  """Sets of validation."""
  test: tuple[str, ...] = ("fairytaleqa", "piqa", "subjqa_tripadvisor", "winogrande")
  """Sets of the test."""

  def __post_init__(self):
    check_least(self, "task.data.", examples=2)
    for split in SPLITS:
      for name in getattr(self, split):
        check_choice(f"task.data.{split}", name, DEVELOPMENT_SETS)

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return SPLITS

  def describe(self) -> str:
    """What the classes are, in a few words."""
    return "questions by the set that they are from"

  def load(self, split: str) -> ClassExamples:
    """The questions of a split by set; inputs are texts.

    Raises:
      UserError: unknown split, no such files, or a set with too few questions.
      DataError: files that are damaged.
    """
    check_choice("split", split, SPLITS)
    names: tuple[str, ...] = getattr(self, split)
    texts = list[str]()
    for name in names:
      data = DEVELOPMENT_SETS[name]
      found = data.load(data.splits()[0]).items
      own = list(dict.fromkeys(" ".join(one.question.split()) for one in found))[: self.examples]
      check(
        len(own) == self.examples,
        f"task.data.examples is {self.examples}, but {name!r} has {len(own)} different questions."
        " Ask for fewer, or leave the set out.",
      )
      texts += own
    classes = np.repeat(np.arange(len(names)), self.examples)
    return ClassExamples(np.array(texts, object), classes, names)


@dataclasses.dataclass(frozen=True)
class TextLines:
  """Texts of one's own: FOLDER/train.jsonl, valid.jsonl and test.jsonl, also gzipped (.gz).

  A line is an example, {"class": "a name", "text": "..."}; with a "group" besides, such as the name
  of a property or of a set of texts, an episode is of classes of one group.
  """

  folder: str
  """Where the files are; may start with an environment variable."""

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return SPLITS

  def describe(self) -> str:
    """What the classes are, in a few words."""
    return f"classes of texts in {self.folder}"

  def load(self, split: str) -> ClassExamples:
    """The texts of a split by class, by name.

    Raises:
      UserError: unknown split, or no such file.
      DataError: a line is no such object, or some lines have a group and others none.
    """
    check_choice("split", split, SPLITS)
    folder = expand_folder(self.folder)
    files = (folder / f"{split}.jsonl", folder / f"{split}.jsonl.gz")
    file = next((file for file in files if file.is_file()), None)
    if file is None:
      raise UserError(
        f"task.data.folder is {self.folder!r}, but there is no file {files[0]}; give a folder with"
        f" {', '.join(f'{name}.jsonl' for name in SPLITS)}."
      )
    keys, texts = list[tuple[str, str]](), list[str]()
    for number, line in enumerate(read_lines(file), start=1):
      if line.strip():
        group, name, text = _read(f"{file}:{number}", line)
        keys.append((group, name))
        texts.append(text)
    if not keys:
      raise DataError(f"{file} has no examples.")
    known = sorted({*keys})
    grouped = {bool(group) for group, _ in known}
    if len(grouped) > 1:
      raise DataError(f'{file} has lines with a "group" and lines without; give all one, or none.')
    number_of = {key: number for number, key in enumerate(known)}
    return ClassExamples(
      np.array(texts, object),  # else each takes the memory of the longest
      np.array([number_of[key] for key in keys]),
      tuple(f"{group}: {name}" if group else name for group, name in known),
      tuple(group for group, _ in known) if True in grouped else (),
    )


def _read(where: str, line: str) -> tuple[str, str, str]:
  """Group, class and text of a line."""
  try:
    one: Any = parse_json(line, surrogates=False)
  except ValueError as error:
    raise DataError(f"{where} is not JSON ({error}).") from error
  fields = (
    [one.get(name, "") for name in ("group", "class", "text")] if isinstance(one, dict) else []
  )
  if (
    not fields or not all(isinstance(x, str) for x in fields) or not all(map(str.strip, fields[1:]))
  ):
    raise DataError(f'{where} is not like {{"class": "a name", "text": "some words"}}.')
  group, name, text = fields
  return group, name, " ".join(text.split())


class TextTaskConfig(ClassTaskConfig, Protocol):
  """What a task's configuration says about episodes of texts."""

  @property
  def length(self) -> int:
    """Most tokens of a text, its start and end included."""
    ...

  @property
  def mixed_ways(self) -> tuple[int, ...]:
    """Numbers of classes of training batches, in turn; none for as many as in evaluation."""
    ...

  def scored(self) -> Sequence[ClassEpisodeConfig]:
    """What the episodes hold that are scored."""
    ...


C = TypeVar("C", bound=TextTaskConfig, covariant=True)


class _InTurn:
  """Batches of several sources, one after the other; see `pipeline.iterate`."""

  def __init__(self, sources: Sequence[EpisodeBatches]):
    self._sources = sources

  def __len__(self) -> int:
    return pipeline.ENDLESS

  def __repr__(self) -> str:
    return f"{self._sources[0]} of {len(self._sources)} kinds in turn"

  def __getitem__(self, index: int) -> pipeline.Batch:
    turn, number = divmod(int(index), len(self._sources))
    return self._sources[number][turn]


class TextEpisodes(ClassEpisodes[C]):
  """Texts by class as episodes of token numbers, [episodes, rows, length].

  Attributes:
    tokenizer: from text to tokens.
  """

  def __init__(self, config: C, tokenizer: Tokenizer):
    super().__init__(config)
    self.tokenizer = tokenizer
    self._cut = dict[str, int]()

  def tokens(self, texts: Sequence[str] | np.ndarray) -> np.ndarray:
    """Texts as rows of tokens with a start and an end, padded; what is too long is cut."""
    length, tokenizer = self.config.length, self.tokenizer
    found = np.full((len(texts), length), tokenizer.pad, np.int32)
    for row, ids in zip(found, tokenizer.encode_batch(map(str, texts)), strict=True):
      ids = [tokenizer.bos, *ids[: length - 2], tokenizer.eos]
      row[: len(ids)] = ids
    return found

  def classes(self, split: str) -> ClassExamples:
    """The examples of a split as tokens; loaded once."""
    if split not in self._loaded:
      check_choice("split", split, self.splits())
      found = self.config.data.load(split)
      tokens = self.tokens(found.inputs)
      self._cut[split] = int(np.sum(tokens[:, -1] != self.tokenizer.pad))
      self._loaded[split] = dataclasses.replace(found, inputs=tokens)
    return self._loaded[split]

  def check(self) -> None:
    """Loads all splits.

    Raises:
      UserError: a class or a group is in two splits, or a split has too few for its episodes.
    """
    super().check()
    for config in self._trained:
      self.source("train", config)
    for split in self.final_splits():
      for config in self.config.scored():
        self.source(split, config)

  @property
  def _trained(self) -> list[ClassEpisodeConfig]:
    """What the batches of training hold, in turn."""
    each = self.config.mixed_ways or (self.trained.ways,)
    return [dataclasses.replace(self.trained, ways=ways) for ways in each]

  def notes(self) -> list[str]:
    """Sentences on the classes."""
    long = [f"{split} {count}" for split, count in self._cut.items() if count]
    return [
      *super().notes(),
      *([f"texts as long as task.length or cut to it: {', '.join(long)}"] if long else []),
    ]

  def files(self) -> dict[str, bytes]:
    """The tokenizer."""
    return {FILE: self.tokenizer.to_bytes()}

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """An endless iterator over batches of episodes, and how many make an epoch; see `Dataset`."""
    pipeline.check_processes(multiple, process, processes)
    sources = [
      EpisodeBatches(
        self.source("train", config, part=part, seed=seed),
        self._size(multiple),
        seed,
        (process, processes),
      )
      for config in self._trained
    ]
    batches = sources[0] if len(sources) == 1 else _InTurn(sources)
    return pipeline.iterate(batches, prefetch=4), sum(source.per_epoch for source in sources)

  def example(self) -> dict[str, jax.Array]:
    """Two rows of a token each; no text is loaded for them."""
    inputs = np.full((2, self.config.length), self.tokenizer.pad, np.int32)
    inputs[:, 0] = self.tokenizer.bos
    return two_rows(jnp.asarray(inputs))

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    ways = self.config.mixed_ways
    mixed = f", of {', '.join(map(str, ways))} classes in turn" if len(ways) > 1 else ""
    return super().describe_batches() + mixed

  def texts(self, split: str) -> Iterator[str]:
    """The texts of a split, to train a tokenizer on."""
    return map(str, self.config.data.load(split).inputs)
