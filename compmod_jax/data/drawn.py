"""Data sets whose training batches are drawn without end, each from seeds and its number alone."""

import abc
from typing import ClassVar

import numpy as np

from compmod_jax.core.errors import check
from compmod_jax.data import pipeline
from compmod_jax.data.base import C, Dataset, TrainIterator


class DrawnDataset(Dataset[C]):
  """A data set whose training batches are drawn; it has no tokenizer, and no parts to train on.

  What batch i holds follows from seeds and i. Every process draws the whole batch and takes its own
  rows, so that the number of processes changes nothing.

  Attributes:
    drawn: what the rows of a batch are, in the plural.
    no_parts: why a phase can train on no part of them.
  """

  drawn: ClassVar[str]
  no_parts: ClassVar[str]

  @property
  @abc.abstractmethod
  def batch_rows(self) -> int:
    """Rows of a training batch, before they are made a multiple of some number."""

  @abc.abstractmethod
  def draw(self, random: np.random.Generator, rows: int) -> pipeline.Batch:
    """A training batch, columns of [rows, ...]."""

  def seeds(self, seed: int) -> tuple[int, ...]:
    """What batches are drawn from besides their number, for this seed of training."""
    return (seed,)

  def epoch(self, rows: int) -> int:
    """How many batches, each of this number of rows, are called an epoch."""
    return 100

  def check(self) -> None:
    """Nothing can be missing where all is drawn."""

  def files(self) -> dict[str, bytes]:
    """None: there is no tokenizer."""
    return {}

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """See `Dataset`.

    Raises:
      UserError: a part of the training data is asked for.
    """
    pipeline.check_processes(multiple, process, processes)
    check(part == "all", f"phases.part is {part!r}, but {self.no_parts}. Set it to 'all'.")
    rows = pipeline.rows_of_batch(self.batch_rows, multiple)
    epoch = self.epoch(rows)
    batches = _Drawn(self, self.seeds(seed), rows, (process, processes))
    return pipeline.iterate(batches, prefetch=4), epoch


class _Drawn:
  """Batch i of a drawn data set, the rows of one of several processes."""

  def __init__(
    self, data: DrawnDataset[C], seeds: tuple[int, ...], rows: int, share: tuple[int, int]
  ):
    self._data, self._seeds, self._rows = data, seeds, rows
    first, mine = share[0] * (rows // share[1]), rows // share[1]
    self._mine = slice(first, first + mine)

  def __len__(self) -> int:
    return pipeline.ENDLESS

  def __repr__(self) -> str:
    return self._data.drawn

  def __getitem__(self, index: int) -> pipeline.Batch:
    batch = self._data.draw(np.random.default_rng([*self._seeds, int(index)]), self._rows)
    return {name: column[self._mine] for name, column in batch.items()}
