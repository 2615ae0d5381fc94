"""Batches of questions: `tokens` [rows, time], columns of each question, `index`, and blocks.

The rows of a batch lie in blocks of one task each. A column `rows/TASK` with one entry for each row
of a block says how many there are, so that shapes alone tell the layout.
"""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from compmod_jax.core.errors import check
from compmod_jax.data.base import TrainIterator
from compmod_jax.data.buckets import auto_buckets
from compmod_jax.data.examples import Ragged
from compmod_jax.data.pipeline import iterate
from compmod_jax.data.qa.sampling import Mixture, Planned
from compmod_jax.data.qa.tokenized import TokenizedQuestions

BLOCK = "rows/"
_ENDLESS = 1 << 62


def blocks_of(batch: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
  """(task, rows) of a batch in its order."""
  names = [name for name in batch if name.startswith(BLOCK)]
  # In the order of `Mixture`; dictionaries lose theirs where they are traced.
  ordered = sorted(names, reverse=True)
  return tuple((name.removeprefix(BLOCK), len(batch[name])) for name in ordered)


def edges_of(tokenized: TokenizedQuestions, count: int, longest: int) -> tuple[int, ...]:
  """At most `count` padded lengths for these questions, the last one `longest`."""
  edges = auto_buckets(tokenized.tokens.lengths, count, longest, multiple=8)
  return (*(edge for edge in edges[:-1] if edge < longest), min(edges[-1], longest))


class _Epochs:
  """Batch i of an endless sequence of epochs, at random access."""

  def __init__(
    self,
    tokenized: TokenizedQuestions,
    mixture: Mixture,
    edges: tuple[int, ...],
    pad: int,
    mine: tuple[int, int],
  ):
    self._tokenized, self._mixture, self._edges = tokenized, mixture, edges
    self._pad, self._mine = pad, mine
    self._lock = threading.Lock()
    self._plans: dict[int, list[Planned]] = {}

  def __len__(self) -> int:
    return _ENDLESS

  def __repr__(self) -> str:
    return f"batches of {len(self._tokenized)} questions"

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    epoch, place = divmod(int(index), self._mixture.per_epoch)
    with self._lock:
      if epoch not in self._plans:
        self._plans = {epoch: self._mixture.plan(epoch)}
      planned = self._plans[epoch][place]
    bucket = self._edges[int(np.searchsorted(self._edges, planned.length))]
    whole = _assemble(self._tokenized, planned.blocks, bucket, self._pad)
    process, processes = self._mine
    parts = {name: len(value) // processes for name, value in whole.items()}
    return {n: value[process * parts[n] :][: parts[n]] for n, value in whole.items()}


def train_batches(
  tokenized: TokenizedQuestions,
  mixture: Mixture,
  *,
  edges: tuple[int, ...],
  pad: int,
  process: int = 0,
  processes: int = 1,
  prefetch: int = 16,
) -> TrainIterator:
  """Endless batches; batch i belongs to epoch i // mixture.per_epoch.

  Args:
    tokenized: the training questions, all of them in every process.
    mixture: plans epochs.
    edges: padded lengths, ascending; the last holds the longest question.
    pad: fills up rows.
    process: which process this is, from 0; it gets its rows of every batch.
    processes: how many read.
    prefetch: batches that a thread prepares ahead.

  Returns:
    An iterator whose position can be saved and restored exactly; see `pipeline.iterate`.
  """
  return iterate(_Epochs(tokenized, mixture, edges, pad, (process, processes)), prefetch)


def eval_batches(
  tokenized: TokenizedQuestions, *, rows: int, edges: tuple[int, ...], pad: int, multiple: int = 1
) -> Iterator[dict[str, np.ndarray]]:
  """Batches of one task each with every question once, longest first; filler has index -1."""
  rows = -(-rows // multiple) * multiple
  top = int(tokenized.tokens.lengths.max(initial=0))
  if top > edges[-1]:
    edges = (*edges, -(-top // 8) * 8)
  place = np.searchsorted(edges, tokenized.tokens.lengths)
  for task in sorted(set(tokenized.task.tolist())):
    for number in reversed(range(len(edges))):
      mine = np.flatnonzero((tokenized.task == task) & (place == number))
      mine = mine[np.argsort(-tokenized.tokens.lengths[mine], kind="stable")]
      for start in range(0, len(mine), rows):
        part = mine[start : start + rows]
        part = np.concatenate([part, np.full(rows - len(part), -1)])
        yield _assemble(tokenized, ((task, part),), edges[number], pad)


def whole_batch(tokenized: TokenizedQuestions, pad: int) -> dict[str, np.ndarray]:
  """All questions, which are of one task, as one batch in their order.

  Raises:
    UserError: they are of several tasks.
  """
  tasks = sorted(set(tokenized.task.tolist()))
  check(
    len(tasks) == 1,
    f"The questions are of {len(tasks)} tasks ({', '.join(tasks)}); a batch in their order needs"
    " questions of one: give multiple choice and others apart.",
  )
  longest = int(tokenized.tokens.lengths.max())
  return _assemble(tokenized, ((tasks[0], np.arange(len(tokenized))),), longest, pad)


def _assemble(
  tokenized: TokenizedQuestions, blocks: tuple[tuple[str, np.ndarray], ...], bucket: int, pad: int
) -> dict[str, np.ndarray]:
  """A batch of these questions; number -1 is filler."""
  numbers = np.concatenate([numbers for _, numbers in blocks])
  real = numbers >= 0
  batch = {
    "tokens": _filled(tokenized.tokens, numbers, bucket, pad),
    "index": np.where(real, tokenized.index[numbers], -1).astype(np.int32),
  }
  if tokenized.tags is not None:
    batch["tags"] = _filled(tokenized.tags, numbers, bucket, -1)
  for name, column in tokenized.columns().items():
    kept = real.reshape(-1, *(1,) * (column.ndim - 1))
    batch[name] = np.where(kept, column[numbers], 0).astype(np.int32)
  for task, held in blocks:
    batch[BLOCK + task] = np.zeros(len(held), np.int32)
  return batch


def _filled(sequences: Ragged, numbers: np.ndarray, bucket: int, fill: int) -> np.ndarray:
  """Sequences as rows of one length."""
  rows = np.full((len(numbers), bucket), fill, np.int32)
  for row, number in zip(rows, numbers.tolist(), strict=True):
    if number >= 0:
      values = sequences[number]
      row[: len(values)] = values
  return rows
