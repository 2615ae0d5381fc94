"""Episodes: small training sets with questions on them, drawn from an ordinary data set.

An episode is some rows that belong together, such as blocks of one document: its support, which a
learner adapts to, and its query, on which it is scored afterwards. A batch of episodes has the
columns of the data set with one axis more,

    {"tokens": [episodes, support + query, time], "index": [episodes, support + query]}

the rows of the support first. Devices, processes and micro-batches share whole episodes, since the
first axis of a batch is what they share. Where an episode is of several classes
(`data.class_episodes`), numbered anew in each, there is a column of their numbers besides.

Source: Vinyals et al. 2016, section 4 (episodes).
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import jax
import numpy as np

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check, check_choice
from compmod_jax.data import pipeline
from compmod_jax.data.base import Batch, D, DatasetAround, TrainIterator
from compmod_jax.data.buckets import BatchConfig, edges_for
from compmod_jax.data.examples import Examples
from compmod_jax.data.subsets import subset_numbers

# Keeps the draw of episodes apart from others of the same seed.
_STREAM = 0xE915


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
  """How episodes are drawn from a data set."""

  support: int = 2
  """Rows of an episode that a learner adapts to."""
  query: int = 2
  """Further rows of it, on which the adapted learner is scored."""
  batch: int = 8
  """Episodes of a global batch."""
  within: Literal["document", "text"] = "document"
  """What the rows of an episode have in common: they begin in one document, or follow each other
  wherever documents end."""

  def __post_init__(self):
    check_least(self, "episodes.", support=1, query=1, batch=1)
    check_choice("episodes.within", self.within, ("document", "text"))

  @property
  def rows(self) -> int:
    """Rows of an episode."""
    return self.support + self.query

  def describe(self) -> str:
    """What an episode holds, in a few words."""
    return f"{self.support} + {self.query} rows (support + query)"


def split_episode(batch: Mapping[str, Any], support: int) -> tuple[Batch, Batch]:
  """Support and query of one episode.

  Args:
    batch: its columns, [rows, ...].
    support: the first so many rows are the support.
  """
  first = {name: column[:support] for name, column in batch.items()}
  return first, {name: column[support:] for name, column in batch.items()}


def flat(batch: Mapping[str, Any]) -> Batch:
  """The rows of all episodes below each other: [episodes, rows, ...] to [episodes * rows, ...]."""
  return {name: column.reshape(-1, *column.shape[2:]) for name, column in batch.items()}


def episode_shapes(
  shapes: Mapping[str, jax.ShapeDtypeStruct], episodes: int, rows: int
) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes [episodes, rows, ...] of a batch, given those of one of rows [any, ...]."""
  return {
    name: jax.ShapeDtypeStruct((episodes, rows, *leaf.shape[1:]), leaf.dtype)
    for name, leaf in shapes.items()
  }


class HasExamples(Protocol):
  """What a data set has to have besides the contract of all."""

  @property
  def batch(self) -> BatchConfig:
    """How its examples are padded."""
    ...

  def examples(self, split: str) -> Examples:
    """The examples of a split, numbered from 0 by `index`."""
    ...


Groups = Callable[[str], np.ndarray]
"""Name of a split -> the group of every example, whole numbers [examples]: an episode is of one."""


def episode_plan(groups: np.ndarray, rows: int, *, seed: int, epoch: int) -> np.ndarray:
  """An epoch's episodes: numbers of their examples, [episodes, rows].

  A group of n examples gives n // rows episodes without a common example; which ones, their order,
  and which examples are left over, is drawn anew in every epoch. The number of episodes is the same
  in all.

  Args:
    groups: of every example, [examples].
    rows: examples of an episode.
    seed: of the run, >= 0.
    epoch: from 0.
  """
  draw = np.random.default_rng([seed, epoch, _STREAM])
  order = draw.permutation(len(groups))
  return draw.permutation(_cut(groups, order, rows))


def fixed_episodes(groups: np.ndarray, rows: int) -> np.ndarray:
  """The episodes of evaluation, [episodes, rows]: neighbours in a group, in the groups' order."""
  return _cut(groups, np.arange(len(groups)), rows)


def _cut(groups: np.ndarray, order: np.ndarray, rows: int) -> np.ndarray:
  """Cuts every group, whose examples are taken in this order, into episodes."""
  order = order[np.argsort(groups[order], kind="stable")]
  _, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
  place = np.arange(len(order)) - np.repeat(starts, sizes)  # of an example in its group
  return order[place < np.repeat(sizes // rows * rows, sizes)].reshape(-1, rows)


class EpisodeSource(Protocol):
  """A split as episodes at random access."""

  def __len__(self) -> int:
    """Episodes of an epoch."""
    ...

  def plan(self, seed: int, epoch: int) -> np.ndarray:
    """An epoch's episodes: numbers of their examples, [episodes, rows]."""
    ...

  def batch(self, episodes: np.ndarray, size: int, first: int = 0) -> pipeline.Batch:
    """Episodes `first` to `first + size` of these; those beyond the last are filler."""
    ...


@dataclasses.dataclass(frozen=True)
class _Source:
  """Examples of which episodes are drawn, and their groups."""

  examples: Examples
  groups: np.ndarray
  length: int  # padded
  rows: int

  def __len__(self) -> int:
    return len(fixed_episodes(self.groups, self.rows))

  def plan(self, seed: int, epoch: int) -> np.ndarray:
    """See `episode_plan`."""
    return episode_plan(self.groups, self.rows, seed=seed, epoch=epoch)

  def batch(self, episodes: np.ndarray, size: int, first: int = 0) -> pipeline.Batch:
    """Episodes `first` to `first + size` of these; those beyond the last are filler."""
    mine = episodes[first : first + size]
    numbers, rows = mine.reshape(-1), size * episodes.shape[1]
    made = pipeline.assemble(self.examples, self.length, numbers, rows)
    return {name: x.reshape(size, -1, *x.shape[1:]) for name, x in made.items()}


class EpisodeBatches:
  """Batch i of an endless sequence of epochs of episodes, at random access.

  Attributes:
    per_epoch: batches of an epoch.
  """

  def __init__(self, source: EpisodeSource, size: int, seed: int, part: tuple[int, int]):
    """Arguments: episodes; how many a batch has; which of how many processes reads."""
    self._source, self._size, self._seed = source, size, seed
    self._part, self._lock = part, threading.Lock()
    self._held: tuple[int, np.ndarray] | None = None
    self.per_epoch = -(-len(source) // size)

  def __len__(self) -> int:
    return pipeline.ENDLESS

  def __repr__(self) -> str:
    return f"batches of {self._size} episodes"

  def __getitem__(self, index: int) -> pipeline.Batch:
    epoch, place = divmod(int(index), self.per_epoch)
    process, processes = self._part
    mine = self._size // processes
    episodes = self._plan(epoch)[place * self._size :][: self._size]
    return self._source.batch(episodes, mine, process * mine)

  def _plan(self, epoch: int) -> np.ndarray:
    with self._lock:
      if self._held is None or self._held[0] != epoch:
        self._held = epoch, self._source.plan(self._seed, epoch)
      return self._held[1]


class EpisodeDataset(DatasetAround[D]):
  """A data set whose training batches are episodes; all else is that of the data set inside.

  Batches of evaluation (`eval_batches`) are its rows one by one, as other evaluators and analyses
  read them; `episodes` gives a split as episodes.

  Attributes:
    dataset: the data set inside; it has `examples(split)` and `batch` (`HasExamples`).
    episode_config: how episodes are drawn.
    groups: which examples may share an episode; those that follow each other, if not given.
  """

  def __init__(self, dataset: D, config: EpisodeConfig, groups: Groups | None = None):
    super().__init__(dataset)
    self.episode_config = config
    self.groups = self._neighbours if groups is None else groups

  def _neighbours(self, split: str) -> np.ndarray:
    inside: Any = self.dataset
    return np.arange(len(inside.examples(split))) // self.episode_config.rows

  def _source(self, split: str, part: str = "all", seed: int = 0) -> _Source:
    inside: Any = self.dataset
    examples, groups = inside.examples(split), np.asarray(self.groups(split))
    if part != "all":
      share = inside.config.small_share
      numbers = subset_numbers(part, len(examples), small_share=share, seed=seed)
      examples, groups = examples.select(numbers), groups[numbers]
    rows = self.episode_config.rows
    _, sizes = np.unique(groups, return_counts=True)
    largest = sizes.max(initial=0)
    check(
      largest >= rows,
      f"episodes.support + episodes.query is {rows} rows of one group, but the largest of the split"
      f" {split!r} has {largest}. Ask for fewer rows, make rows shorter (task.length), or set"
      " episodes.within to 'text'.",
    )
    return _Source(examples, groups, edges_for(examples.lengths, inside.batch)[-1], rows)

  def _size(self, multiple: int) -> int:
    """Episodes of a batch."""
    return pipeline.rows_of_batch(self.episode_config.batch, multiple)

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """An endless iterator over batches of episodes, and how many make an epoch.

    Args:
      part: of the training data; see `data.subsets`.
      seed: of the episodes, and of the split into parts.
      multiple: the episodes of a batch are a multiple of this.
      process: which process reads, from 0; it gets its episodes of every batch.
      processes: how many read.

    Raises:
      UserError: no group has enough rows for an episode.
    """
    pipeline.check_processes(multiple, process, processes)
    source = self._source("train", part, seed)
    epochs = EpisodeBatches(source, self._size(multiple), seed, (process, processes))
    inside: Any = self.dataset
    return pipeline.iterate(epochs, inside.batch.prefetch), epochs.per_epoch

  def episodes(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches in which every episode of a split is once; always the same ones.

    Rows that are left over in a group are in none.
    """
    source, size = self._source(split), self._size(multiple)
    found = fixed_episodes(source.groups, self.episode_config.rows)
    for start in range(0, len(found), size):
      yield source.batch(found[start : start + size], size)

  def flat(self, batch: Batch) -> Batch:
    """The rows of a training batch as `eval_batches` has them."""
    return flat(batch)

  def trained_shapes(
    self, shapes: Mapping[str, jax.ShapeDtypeStruct], multiple: int
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of episodes, given those of one of rows."""
    return episode_shapes(shapes, self._size(multiple), self.episode_config.rows)

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    config = self.episode_config
    return f"batches of {config.batch} episodes, each {config.describe()}"

  def check(self) -> None:
    """Loads what will be scored; every split of it has to have an episode.

    Raises:
      UserError: a split is missing, damaged or empty, or has no group that is large enough.
    """
    self.dataset.check()
    for split in ("train", *self.final_splits()):
      self._source(split)

  def notes(self) -> list[str]:
    """Sentences on the training data."""
    source = self._source("train")
    found = fixed_episodes(source.groups, self.episode_config.rows)
    left = len(source.examples) - found.size
    return [
      *self.dataset.notes(),
      f"{len(found):,} training episodes an epoch, each {self.episode_config.describe()};"
      f" {left:,} rows are left over",
    ]
