"""Contracts of data: what sources load, and the batches that a task trains on and is scored on."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.data.fingerprint import Fingerprints

Metric = Literal["bleu", "exact_match"]
Batch = Mapping[str, Any]
"""Name of a column -> its values, [rows, ...]; `index`, the number of every row, is -1 in rows that
only fill up a batch."""


Relations = Sequence[tuple[str, int, int]]
"""Gold syntax of a text: (relation, dependent, head), with the numbers of words between blanks."""


class DataError(UserError):
  """The content of a data file is wrong: it is damaged, empty, misaligned or not text."""


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Source sentences and their translations, as raw text.

  Args:
    source: one sentence each, untokenised; may be decoded lazily. Indexed by number and by slice.
    target: the translations, as many as there are sources.
    where: the number of a pair -> where it stands, such as `train.de:17` (lines count from 1) or
      `grammar:train[17]`.
    info: gold annotations of every pair, or None where the source has none.
    metric: what translations of these pairs are scored with.
    relations: the number of a pair -> `source` and `target`, which of their words depend on which;
      None where the source does not know.

  Raises:
    UserError: the sides, or the annotations, differ in number.
  """

  source: Sequence[str]
  target: Sequence[str]
  where: Callable[[int], str]
  info: Sequence[Mapping[str, Any]] | None = None
  metric: Metric = "bleu"
  relations: Callable[[int], Mapping[str, Relations]] | None = None

  def __post_init__(self) -> None:
    check(
      len(self.source) == len(self.target),
      f"There are {len(self.source)} source and {len(self.target)} target sentences; every source"
      " sentence needs exactly one translation.",
    )
    check(
      self.info is None or len(self.info) == len(self.source),
      f"There are {len(self.source)} sentence pairs but {len(self.info or ())} annotations; give"
      " one for each pair or none at all.",
    )

  def __len__(self) -> int:
    return len(self.source)

  def select(self, numbers: Sequence[int]) -> "Pairs":
    """The pairs with these numbers, in this order; `where` still tells their original places."""
    numbers = [int(number) for number in numbers]
    known = self.relations
    return Pairs(
      source=[self.source[number] for number in numbers],
      target=[self.target[number] for number in numbers],
      where=lambda i: self.where(numbers[i]),
      info=None if self.info is None else [self.info[number] for number in numbers],
      metric=self.metric,
      relations=None if known is None else lambda i: known(numbers[i]),
    )


@dataclasses.dataclass(frozen=True)
class ClassExamples:
  """Examples by class, such as pictures.

  Args:
    inputs: [examples, ...]: uint8 for pictures, whose 0 to 255 models see as 0 to 1, strings
      [examples] for texts, token numbers for what a data set made of them; else floats.
    classes: the class of every example, from 0, int [examples].
    names: of the classes, which tell them apart over splits.
    groups: of every class, where an episode is of classes of one group, such as the values of one
      property; none where any classes may meet.

  Raises:
    UserError: the numbers of inputs and classes differ, or a class has no name or no group.
  """

  inputs: np.ndarray
  classes: np.ndarray
  names: tuple[str, ...]
  groups: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    check(
      len(self.inputs) == len(self.classes),
      f"There are {len(self.inputs)} inputs but classes of {len(self.classes)}; give one for each.",
    )
    top = int(self.classes.max(initial=-1))
    check(
      self.classes.min(initial=0) >= 0 and top < len(self.names),
      f"classes goes up to {top}, but names has {len(self.names)}; number classes from 0, and give"
      " each a name.",
    )
    check(
      not self.groups or len(self.groups) == len(self.names),
      f"There are {len(self.names)} classes but {len(self.groups)} groups; give one for each class,"
      " or none at all.",
    )

  def __len__(self) -> int:
    return len(self.inputs)


@runtime_checkable
class NamesSplits(Protocol):
  """A data configuration of any task."""

  def splits(self) -> tuple[str, ...]:
    """Names of the splits, `train` among them."""
    ...


@runtime_checkable
class HasSplits(NamesSplits, Protocol):
  """A data configuration of sentence pairs."""

  def load(self, split: str) -> Pairs:
    """The pairs of a split."""
    ...


@runtime_checkable
class HasPublishedCounts(Protocol):
  """A data configuration of a published set."""

  @property
  def published_counts(self) -> Mapping[str, int]:
    """Split -> examples of the published one, as far as that is known."""
    ...


@runtime_checkable
class HasClasses(NamesSplits, Protocol):
  """A data configuration of examples by class; those of two splits are different classes."""

  def load(self, split: str) -> ClassExamples:
    """The examples of a split."""
    ...

  def describe(self) -> str:
    """What the classes are, in a few words."""
    ...


class Splits:
  """The splits of a data configuration, each loaded once."""

  def __init__(self, config: HasSplits):
    self.config = config
    self._loaded: dict[str, Pairs] = {}

  def __getitem__(self, split: str) -> Pairs:
    if split not in self._loaded:
      check_choice("split", split, self.config.splits())
      self._loaded[split] = self.config.load(split)
    return self._loaded[split]


@runtime_checkable
class TrainIterator(Protocol):
  """An endless iterator over batches whose state can be saved and restored exactly."""

  def __next__(self) -> Mapping[str, np.ndarray]: ...

  def get_state(self) -> dict[str, Any]:
    """The position, as JSON can hold it."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a position that `get_state` gave."""
    ...


class HasData(Protocol):
  """The configuration of a task."""

  @property
  def data(self) -> NamesSplits:
    """Where examples come from."""
    ...


C = TypeVar("C", bound=HasData, covariant=True)


class Dataset(abc.ABC, Generic[C]):
  """Examples of a task as batches of token numbers, with the tokenizers that made them.

  Attributes:
    config: the task's configuration; `config.data` says where the examples come from.
  """

  config: C

  # What there is.

  def splits(self) -> tuple[str, ...]:
    """Names of all splits, that of training among them."""
    return self.config.data.splits()

  def final_splits(self) -> tuple[str, ...]:
    """Names of the splits that are scored at the end of training: all but the training split."""
    return tuple(split for split in self.splits() if split != "train")

  @abc.abstractmethod
  def check(self) -> None:
    """Loads what will be scored, so that what is missing is known before training, not after.

    Raises:
      UserError: a split is missing, damaged or empty.
    """

  @abc.abstractmethod
  def notes(self) -> list[str]:
    """Sentences on the training data: how much there is, and what was left out."""

  @abc.abstractmethod
  def fingerprints(self) -> Fingerprints:
    """Part of the training data -> what identifies its examples, as they are trained on."""

  @abc.abstractmethod
  def files(self) -> dict[str, bytes]:
    """What must be kept with the parameters to use them: tokenizers."""

  def resolved_config(self) -> C:
    """The configuration with everything in it that was chosen from the training data."""
    return self.config

  # Batches.

  @abc.abstractmethod
  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """Training batches, and how many make an epoch.

    Args:
      part: of the training data; see `data.subsets`.
      seed: of the order, and of the split into parts.
      multiple: the rows of a batch are a multiple of this.
      process: which process reads, from 0; it gets its rows of every batch.
      processes: how many read.
    """

  @abc.abstractmethod
  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterable[Batch]:
    """Batches in which every example of a split is once, as they are scored."""

  def flat(self, batch: Batch) -> Batch:
    """A training batch with the columns that the model's forward pass reads, [rows, ...]."""
    return batch

  def trained_shapes(
    self, shapes: Mapping[str, jax.ShapeDtypeStruct], multiple: int
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a training batch, given those of one of rows; `multiple` as in `train_batches`."""
    return dict(shapes)

  @abc.abstractmethod
  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""

  @abc.abstractmethod
  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""


D = TypeVar("D", bound=Dataset[Any])


class DatasetAround(Dataset[Any], Generic[D]):
  """A data set around another, whose training batches are of another kind; all else is as inside.

  Attributes:
    dataset: the data set inside.
  """

  def __init__(self, dataset: D):
    self.dataset, self.config = dataset, dataset.config

  def __getattr__(self, name: str) -> Any:
    """What the data set inside has besides the contract: its tokenizer, for example."""
    if name.startswith("__") or "dataset" not in self.__dict__:
      raise AttributeError(name)
    return getattr(self.dataset, name)

  def splits(self) -> tuple[str, ...]:
    """Names of all splits."""
    return self.dataset.splits()

  def final_splits(self) -> tuple[str, ...]:
    """Names of the splits that are scored at the end of training."""
    return self.dataset.final_splits()

  def check(self) -> None:
    """Loads what will be scored."""
    self.dataset.check()

  def notes(self) -> list[str]:
    """Sentences on the training data."""
    return self.dataset.notes()

  def fingerprints(self) -> Fingerprints:
    """What identifies the training examples."""
    return self.dataset.fingerprints()

  def files(self) -> dict[str, bytes]:
    """Tokenizers."""
    return self.dataset.files()

  def resolved_config(self) -> Any:
    """The configuration with everything in it that was chosen from the training data."""
    return self.dataset.resolved_config()

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterable[Batch]:
    """Batches in which every example of a split is once, in rows."""
    return self.dataset.eval_batches(split, multiple=multiple)

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, in rows."""
    return self.dataset.example()
