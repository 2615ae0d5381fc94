"""Sentence pairs to batches of few fixed shapes, in an order that can be resumed exactly.

An epoch's batches are planned globally, from (seed, epoch) and the lengths alone; a process then
reads its rows of every batch. So the number of processes changes nothing, and the position in the
order is one number.
"""

import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from compmod_jax.core import extras
from compmod_jax.core.errors import UserError, check
from compmod_jax.data.base import TrainIterator
from compmod_jax.data.buckets import BatchConfig, auto_buckets, edges_for
from compmod_jax.data.examples import Examples, Ragged, tokenise

__all__ = [
  "ENDLESS",
  "Batch",
  "BatchConfig",
  "Examples",
  "Plan",
  "Ragged",
  "assemble",
  "auto_buckets",
  "batch_plan",
  "batches_per_epoch",
  "check_processes",
  "eval_batches",
  "filled",
  "iterate",
  "padding_share",
  "rows_of_batch",
  "scored_rows",
  "tokenise",
  "train_batches",
]

Batch = dict[str, np.ndarray]
Plan = list[tuple[int, np.ndarray]]

ENDLESS = 1 << 62


def rows_of_batch(rows: int, multiple: int) -> int:
  """Rows of a global batch: the largest multiple of a number up to `rows`, at least that number."""
  return max(multiple, rows // multiple * multiple)


def scored_rows(rows: int, count: int, multiple: int) -> int:
  """Rows of batches in which `count` examples are scored: as few as hold `rows`, and a multiple."""
  return -(-min(rows, count) // multiple) * multiple


def filled(batch: Batch, rows: int) -> Batch:
  """A batch with filler below its own rows: zeros, and -1 in `index`.

  Args:
    batch: columns [own rows, ...], `index` among them.
    rows: own rows and filler together.
  """
  more = rows - len(batch["index"])
  return {
    name: np.pad(
      column,
      [(0, more), *[(0, 0)] * (column.ndim - 1)],
      constant_values=filler(name),
    )
    for name, column in batch.items()
  }


def filler(column: str) -> int:
  """What rows that fill up a batch hold: -1 in place of a row's number, 0 elsewhere."""
  return -1 if column.rpartition("/")[2] == "index" else 0


def rows_of(bucket: int, config: BatchConfig, multiple: int = 1) -> int:
  """Rows of a global batch padded to a length: as many as its token budget has, or `multiple`."""
  return rows_of_batch(config.tokens // bucket, multiple)


def _fitting(rows: int, count: int, multiple: int) -> int:
  """Rows with which as many batches hold `count` examples, with little filler."""
  even = -(-count // -(-count // rows))
  unit = min(8, 1 << (even - 1).bit_length())
  unit = -(-unit // multiple) * multiple
  return min(rows, -(-even // unit) * unit)


def _members(lengths: np.ndarray, edges: tuple[int, ...]) -> list[tuple[int, np.ndarray]]:
  """(bucket, numbers of its examples) for every bucket that has any."""
  check(
    lengths.max(initial=0) <= edges[-1],
    f"An example has {lengths.max(initial=0)} tokens, but the last bucket is {edges[-1]}; the"
    " examples were tokenised under another configuration: use that one's buckets and ceiling.",
  )
  place = np.searchsorted(edges, lengths)
  members = ((edge, np.flatnonzero(place == i)) for i, edge in enumerate(edges))
  return [(edge, numbers) for edge, numbers in members if len(numbers)]


def batch_plan(
  lengths: np.ndarray, config: BatchConfig, *, seed: int, epoch: int, multiple: int = 1
) -> Plan:
  """An epoch's batches, for all processes together.

  Every example is in exactly one batch. Which examples share a batch and the order of batches are
  random, but for the short ones that come first in a curriculum; their number and shapes are the
  same in every epoch.

  Args:
    lengths: tokens of every example's longest side, int [n].
    config: token budget and buckets.
    seed: of the run, >= 0.
    epoch: from 0.
    multiple: the rows of a batch are a multiple of this (devices times micro-batches).

  Returns:
    (padded length, example numbers) of every batch; fewer numbers than rows where a bucket ends.

  Raises:
    UserError: an example is longer than the last bucket.
  """
  random = np.random.default_rng([seed, epoch])
  batches: Plan = []
  for bucket, numbers in _members(np.asarray(lengths), edges_for(lengths, config)):
    rows = rows_of(bucket, config, multiple)
    shuffled = random.permutation(numbers)
    batches += [(bucket, shuffled[i : i + rows]) for i in range(0, len(shuffled), rows)]
  order = [batches[i] for i in random.permutation(len(batches))]
  by_length = sorted(range(len(order)), key=lambda i: order[i][0])
  first = len(order) if epoch < config.short_first else config.short_batches if epoch == 0 else 0
  return [order[i] for i in (*by_length[:first], *sorted(by_length[first:]))]


def batches_per_epoch(examples: Examples, config: BatchConfig, multiple: int = 1) -> int:
  """Number of batches in every epoch."""
  members = _members(examples.lengths, edges_for(examples.lengths, config))
  return sum(-(-len(numbers) // rows_of(bucket, config, multiple)) for bucket, numbers in members)


def padding_share(examples: Examples, config: BatchConfig, multiple: int = 1) -> float:
  """Share of an epoch's positions, over all columns and filler rows, that hold no token: 0 to 1."""
  edges, positions = edges_for(examples.lengths, config), 0
  for bucket, numbers in _members(examples.lengths, edges):
    rows = rows_of(bucket, config, multiple)
    widths = _widths(examples, config, edges, bucket, numbers)
    positions += -(-len(numbers) // rows) * rows * sum(widths.values())
  return 1 - sum(examples.tokens.values()) / positions if positions else 0.0


def _widths(
  examples: Examples,
  config: BatchConfig,
  edges: tuple[int, ...],
  bucket: int,
  numbers: np.ndarray,
) -> dict[str, int]:
  """Column -> padded length in a bucket, whose examples have these numbers.

  Labels and the like belong to targets and are as long.
  """
  if not config.own_lengths:
    return dict.fromkeys(examples.columns, bucket)
  longest = dict.fromkeys((True, False), 1)
  for name, lengths in examples.column_lengths.items():
    side = name == "source"
    longest[side] = max(longest[side], int(lengths[numbers].max()))
  return {
    name: edges[int(np.searchsorted(edges, longest[name == "source"]))] for name in examples.columns
  }


def assemble(
  examples: Examples,
  widths: Mapping[str, int] | int,
  numbers: np.ndarray,
  rows: int,
  first: int = 0,
) -> Batch:
  """Rows `first` to `first + rows` of a batch; those beyond its examples are filler.

  Args:
    examples: all of them.
    widths: padded length, of every column its own or of all the same.
    numbers: of the batch's examples.
    rows: how many are made.
    first: which is the first.
  """
  mine = numbers[first : first + rows]
  index = np.full(rows, -1, np.int32)
  index[: len(mine)] = examples.index[mine]
  batch: Batch = {}
  for name, column in examples.columns.items():
    width = widths if isinstance(widths, int) else widths[name]
    batch[name] = np.full((rows, width), examples.pad, np.int32)
    if len(mine):
      ids = [column[number] for number in mine.tolist()]
      held = np.arange(width) < np.fromiter(map(len, ids), np.int64, len(ids))[:, None]
      batch[name][: len(ids)][held] = np.concatenate(ids)
  return {**batch, "index": index}


def _slice_rows(rows: int, process: int, processes: int) -> tuple[int, int]:
  """(rows of a process, its first row)."""
  return rows // processes, process * (rows // processes)


def check_processes(multiple: int, process: int, processes: int) -> None:
  """Raises a `UserError` for rows that processes cannot share, or a process that is not there."""
  check(
    0 <= process < processes,
    f"process is {process} of {processes} processes; they count from 0.",
  )
  check(
    multiple >= 1 and multiple % processes == 0,
    f"Batches have a multiple of {multiple} rows, which {processes} processes cannot share evenly;"
    " make it a multiple of the number of processes.",
  )


class _Epochs:
  """Batch i of an endless sequence of epochs, at random access: what grain iterates over."""

  def __init__(
    self,
    examples: Examples,
    config: BatchConfig,
    *,
    seed: int,
    multiple: int,
    process: int,
    processes: int,
  ):
    self._examples, self._config, self._seed, self._multiple = examples, config, seed, multiple
    self._process, self._processes = process, processes
    self._per_epoch = batches_per_epoch(examples, config, multiple)
    edges = edges_for(examples.lengths, config)
    self._widths = {
      bucket: _widths(examples, config, edges, bucket, numbers)
      for bucket, numbers in _members(examples.lengths, edges)
    }
    self._lock = threading.Lock()
    self._plans: dict[int, Plan] = {}

  def __len__(self) -> int:
    return ENDLESS

  def __repr__(self) -> str:
    return f"batches of {len(self._examples)} examples"

  def __getitem__(self, index: int) -> Batch:
    epoch, place = divmod(int(index), self._per_epoch)
    bucket, numbers = self._plan(epoch)[place]
    rows = rows_of(bucket, self._config, self._multiple)
    rows, first = _slice_rows(rows, self._process, self._processes)
    return assemble(self._examples, self._widths[bucket], numbers, rows, first)

  def _plan(self, epoch: int) -> Plan:
    with self._lock:
      if epoch not in self._plans:
        # Reading goes forwards, so older plans are not needed again.
        self._plans = {
          epoch: batch_plan(
            self._examples.lengths,
            self._config,
            seed=self._seed,
            epoch=epoch,
            multiple=self._multiple,
          )
        }
      return self._plans[epoch]


def train_batches(
  examples: Examples,
  config: BatchConfig,
  *,
  seed: int,
  multiple: int = 1,
  process: int = 0,
  processes: int = 1,
) -> TrainIterator:
  """Endless shuffled batches; batch i belongs to epoch i // batches_per_epoch.

  Args:
    examples: the training examples, all of them in every process.
    config: token budget and buckets.
    seed: of the run, >= 0.
    multiple: rows of a global batch are a multiple of this; itself a multiple of `processes`.
    process: which process this is, from 0.
    processes: how many read.

  Returns:
    A grain `DatasetIterator`. `next` gives {column: int32 [rows, length], "index": int32 [rows]} of
    this process; the examples' `pad` fills up rows, and rows without an example are all of it, with
    index -1. `get_state` gives a JSON-able position, the same in every process, and `set_state`
    goes back to it exactly. A thread prepares batches ahead; `close` ends it.

  Raises:
    UserError: no examples, or rows that processes cannot share.
  """
  check_processes(multiple, process, processes)
  check(seed >= 0, f"seed is {seed}; it must not be negative.")
  if not len(examples):
    raise UserError(
      f"No training pair is left: {len(examples.dropped)} are over the ceiling of"
      f" {config.longest} tokens and {len(examples.empty)} have an empty side. Raise the ceiling"
      " (or the last bucket), or check the data with `python -m train.check_data`."
    )
  epochs = _Epochs(
    examples,
    config.resolve(examples.lengths),
    seed=seed,
    multiple=multiple,
    process=process,
    processes=processes,
  )
  return iterate(epochs, config.prefetch)


class Batches(Protocol):
  """Batches at random access."""

  def __len__(self) -> int: ...
  def __getitem__(self, index: int) -> Batch: ...


def iterate(batches: Batches, prefetch: int) -> TrainIterator:
  """A grain `DatasetIterator` over batches at random access, whose position is one number.

  Args:
    batches: by number.
    prefetch: batches that a thread prepares ahead; `close` ends it.
  """
  with extras.needed():
    import grain

  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
  return iter(grain.MapDataset.source(batches).to_iter_dataset(options))


def eval_batches(
  examples: Examples,
  config: BatchConfig,
  *,
  multiple: int = 1,
  process: int = 0,
  processes: int = 1,
  fit: bool = False,
  work: np.ndarray | None = None,
) -> Iterator[Batch]:
  """Batches with each example once, longest first, neighbours in length together.

  Examples longer than the last bucket, which only evaluation has, get one further bucket of their
  own. With `fit`, batches of a bucket have fewer rows if so many hold its examples, too. With
  `work` [examples], neighbours in it are together within a bucket, the largest first. Other
  arguments and batches are those of `train_batches`; the iterator ends.

  Raises:
    UserError: rows that processes cannot share.
  """
  check_processes(multiple, process, processes)
  if not len(examples):
    return
  edges = edges_for(examples.lengths, config)
  top = int(examples.lengths.max())
  if top > edges[-1]:
    edges = (*edges, -(-top // 8) * 8)
  work = examples.lengths if work is None else work
  for bucket, numbers in reversed(_members(examples.lengths, edges)):
    # Stable, so that the order of equal lengths is that of the pairs.
    ordered = numbers[np.argsort(-work[numbers], kind="stable")]
    rows = rows_of(bucket, config, multiple)
    rows = _fitting(rows, len(ordered), multiple) if fit else rows
    widths = _widths(examples, config, edges, bucket, numbers)
    for start in range(0, len(ordered), rows):
      mine, first = _slice_rows(rows, process, processes)
      yield assemble(examples, widths, ordered[start : start + rows], mine, first)
