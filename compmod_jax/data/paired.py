"""Batches of two parts of the training data: rows of the large part, and others of the small one.

What is learned at two levels needs both in every step (`tasks.bilevel`): a batch is of episodes,
whose support is of the large part and whose query is of the small one,

    {"source": [episodes, support, time], "query/source": [episodes, query, time], ...}

both padded to one length. The rows of the large part are those of a phase that trains on it alone,
batch by batch; for each batch as many rows as are asked for are drawn from those of the small part
that have its length. Devices and micro-batches share whole episodes: there is one for each.
"""

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from compmod_jax.core.errors import check
from compmod_jax.data import pipeline
from compmod_jax.data.base import Batch, D, DatasetAround, TrainIterator
from compmod_jax.data.buckets import BatchConfig, edges_for
from compmod_jax.data.episodes import flat
from compmod_jax.data.examples import Examples
from compmod_jax.data.subsets import subset_numbers

QUERY = "query/"
"""What names of the columns of the small part begin with."""

# Keeps the draw of queries apart from the order of the large part, of the same seed.
_STREAM = 0x9A12


def split_parts(batch: Mapping[str, Any]) -> tuple[Batch, Batch]:
  """Support and query: the columns of the large part, and those of the small one."""
  support = {name: column for name, column in batch.items() if not name.startswith(QUERY)}
  query = {
    name.removeprefix(QUERY): column for name, column in batch.items() if name.startswith(QUERY)
  }
  return support, query


def query_rows(support: int, share: float) -> int:
  """Rows of the query of an episode with so many of the support: a share of them, at least one."""
  return max(1, round(share * support))


@dataclasses.dataclass(frozen=True)
class _Parts:
  """Both parts of the training examples.

  Attributes:
    large: examples of the large part.
    small: those of the small one.
    config: how they are padded; its buckets are known.
    share: rows of a query for each row of the support.
  """

  large: Examples
  small: Examples
  config: BatchConfig
  share: float

  def members(self, bucket: int) -> np.ndarray:
    """Numbers of the small part's examples of a padded length, of shorter ones if it has none.

    Raises:
      UserError: it has no shorter one either.
    """
    lengths, edges = self.small.lengths, edges_for(self.large.lengths, self.config)
    below = max((edge for edge in edges if edge < bucket), default=0)
    fitting = np.flatnonzero(lengths <= bucket)
    check(
      len(fitting) > 0,
      f"No example of the small part has {bucket} tokens or fewer, as some of the large part have;"
      " a batch is of one padded length. Raise task.small_share, or choose fewer buckets.",
    )
    same = fitting[lengths[fitting] > below]
    return same if len(same) else fitting


class _PairedBatches:
  """Batch i of an endless sequence of epochs of the large part, at random access."""

  def __init__(self, parts: _Parts, seed: int, episodes: int, process: tuple[int, int]):
    """Arguments: both parts; of order and draw; of a batch; which of how many processes reads."""
    self._parts, self._seed, self._episodes, self._process = parts, seed, episodes, process
    self._lock = threading.Lock()
    self._held: tuple[int, list[tuple[int, np.ndarray, np.ndarray]]] | None = None
    self.per_epoch = pipeline.batches_per_epoch(parts.large, parts.config, episodes)

  def __len__(self) -> int:
    return pipeline.ENDLESS

  def __repr__(self) -> str:
    return f"batches of {len(self._parts.large)} and {len(self._parts.small)} examples"

  def __getitem__(self, index: int) -> pipeline.Batch:
    epoch, place = divmod(int(index), self.per_epoch)
    bucket, support, query = self._plan(epoch)[place]
    rows = pipeline.rows_of(bucket, self._parts.config, self._episodes)
    large = pipeline.assemble(self._parts.large, bucket, support, rows)
    small = pipeline.assemble(self._parts.small, bucket, query, len(query))
    mine = self._episodes // self._process[1]
    first = self._process[0] * mine

    def episodes(column: np.ndarray) -> np.ndarray:
      # Neighbours go to different episodes, so that each has its share of rows that only fill up.
      whole = column.reshape(-1, self._episodes, *column.shape[1:]).swapaxes(0, 1)
      return np.ascontiguousarray(whole[first : first + mine])

    found = {name: episodes(column) for name, column in large.items()}
    return found | {f"{QUERY}{name}": episodes(column) for name, column in small.items()}

  def _plan(self, epoch: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    with self._lock:
      if self._held is None or self._held[0] != epoch:
        self._held = epoch, self._drawn(epoch)
      return self._held[1]

  def _drawn(self, epoch: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """(padded length, rows of the large part, rows of the small part) of an epoch's batches.

    Rows of the small part come again only once all others of their length have come.
    """
    parts, plan = (
      self._parts,
      pipeline.batch_plan(
        self._parts.large.lengths,
        self._parts.config,
        seed=self._seed,
        epoch=epoch,
        multiple=self._episodes,
      ),
    )
    draw = np.random.default_rng([self._seed, epoch, _STREAM])
    queries = dict[int, np.ndarray]()
    for bucket in sorted({bucket for bucket, _ in plan}):
      places = [place for place, (length, _) in enumerate(plan) if length == bucket]
      support = pipeline.rows_of(bucket, parts.config, self._episodes) // self._episodes
      rows = query_rows(support, parts.share) * self._episodes
      members = parts.members(bucket)
      turns = -(-rows * len(places) // len(members))
      order = np.concatenate([draw.permutation(members) for _ in range(turns)])
      queries |= zip(places, order[: rows * len(places)].reshape(-1, rows), strict=True)
    return [(bucket, numbers, queries[place]) for place, (bucket, numbers) in enumerate(plan)]


class PairedDataset(DatasetAround[D]):
  """A data set whose training batches hold rows of both parts; all else is as inside.

  Attributes:
    dataset: the data set inside; it has `examples(split)` and `batch` (`episodes.HasExamples`), and
      `small_share` in its configuration.
    share: rows of the small part in a batch for each row of the large one.
  """

  def __init__(self, dataset: D, share: float):
    super().__init__(dataset)
    self.share = share

  def _parts(self, seed: int) -> _Parts:
    inside: Any = self.dataset
    examples, share = inside.examples("train"), inside.config.small_share
    large, small = (
      examples.select(subset_numbers(part, len(examples), small_share=share, seed=seed))
      for part in ("large", "small")
    )
    return _Parts(large, small, inside.batch.resolve(examples.lengths), self.share)

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """An endless iterator over batches of both parts, and how many make an epoch of the large one.

    Args:
      part: all; a batch has both parts.
      seed: of order and draw, and of the split into parts.
      multiple: episodes of a batch.
      process: which process reads, from 0; it gets its episodes of every batch.
      processes: how many read.

    Raises:
      UserError: one part alone is asked for, or the small part lacks a length.
    """
    pipeline.check_processes(multiple, process, processes)
    check(
      part == "all",
      f"phases.part is {part!r}, but task.bilevel is set, whose batches hold rows of both parts."
      " Set it to 'all', or leave task.bilevel out.",
    )
    parts = self._parts(seed)
    for bucket in edges_for(parts.large.lengths, parts.config):
      if (parts.large.lengths <= bucket).any():
        parts.members(bucket)  # raises
    batches = _PairedBatches(parts, seed, multiple, (process, processes))
    return pipeline.iterate(batches, parts.config.prefetch), batches.per_epoch

  def flat(self, batch: Batch) -> Batch:
    """The rows of the large part as `eval_batches` has them."""
    return flat(split_parts(batch)[0])

  def trained_shapes(
    self, shapes: Mapping[str, jax.ShapeDtypeStruct], multiple: int
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of episodes, given those of one of the large part's rows."""

    def shaped(leaf: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((multiple, rows, *leaf.shape[1:]), leaf.dtype)

    rows = {name: leaf.shape[0] // multiple for name, leaf in shapes.items()}
    found = {name: shaped(leaf, rows[name]) for name, leaf in shapes.items()}
    return found | {
      f"{QUERY}{name}": shaped(leaf, query_rows(rows[name], self.share))
      for name, leaf in shapes.items()
    }

  def notes(self) -> list[str]:
    """Sentences on the training data."""
    return [
      *self.dataset.notes(),
      f"every batch of the large part is paired with {self.share:g} times as many rows of the small"
      " part",
    ]

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    return f"{self.dataset.describe_batches()}, and rows of the small part"
