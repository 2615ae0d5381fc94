"""Which questions make up which batch, where several sets are drawn from with equal probability.

Every set has the same share of all draws, however many questions it has. Draws go through a set in
passes, each a new order of all its questions, so that none is drawn again before all were. A batch
is laid out in blocks of one task each, whose sizes follow the shares: where these are no whole
numbers of rows, sizes vary by one unit from batch to batch. All of it is a function of (seed,
epoch) and the sets.

Source: Knowles 2022, section 3.4.2 (equal probability); blocks are ours.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compmod_jax.core.errors import check

POOL = 64  # batches among which questions of similar length are put together


class Planned(NamedTuple):
  """A batch: numbers of its questions, by task.

  Attributes:
    length: tokens of the longest.
    blocks: (task, numbers) in the batch's order.
  """

  length: int
  blocks: tuple[tuple[str, np.ndarray], ...]


def passes(size: int, start: int, count: int, key: Sequence[int]) -> np.ndarray:
  """Draws `start` to `start + count` of the endless passes through a set, each in its own order.

  Args:
    size: questions of the set, at least 1.
    start: number of the first draw.
    count: how many draws.
    key: seeds the orders.
  """
  if not count:
    return np.zeros(0, np.int64)
  first, last = start // size, (start + count - 1) // size
  orders = [np.random.default_rng([*key, n]).permutation(size) for n in range(first, last + 1)]
  return np.concatenate(orders)[start - first * size :][:count]


def apportion(shares: np.ndarray, whole: int, batches: int) -> np.ndarray:
  """Whole numbers [batches, parts] that add up to `whole` in every row and to the shares over all.

  Args:
    shares: of every part, float [parts], adding up to 1.
    whole: the sum of every row.
    batches: rows.
  """
  found = np.zeros((batches, len(shares)), np.int64)
  owed = np.zeros(len(shares))
  for row in found:
    owed += whole * shares
    row[:] = np.maximum(0, np.floor(owed + 1e-9))
    while row.sum() < whole:
      row[np.argmax(owed - row)] += 1
    while row.sum() > whole:
      row[np.argmin(np.where(row > 0, owed - row, np.inf))] -= 1
    owed -= row
  return found


@dataclasses.dataclass(frozen=True)
class _Group:
  """The questions of one task in one set.

  Attributes:
    task: the task.
    members: their numbers, int [n].
    draws: how many an epoch takes.
    key: seeds the order.
  """

  task: str
  members: np.ndarray
  draws: int
  key: tuple[int, ...]


class Mixture:
  """Plans the batches of epochs; see the module.

  Attributes:
    per_epoch: batches of an epoch: as many as all questions would fill.
    layouts: rows of every task in every batch of an epoch, int [batches, tasks].
    tasks: names of the tasks, in the order of blocks.

  Args:
    task: of every question, str [n].
    source: number of every question's set, int [n].
    lengths: tokens of every question, int [n].
    rows: questions of a batch.
    multiple: rows of every block are a multiple of this, and so is `rows`.
    seed: of the run, >= 0.

  Raises:
    UserError: no questions, or rows that are no multiple.
  """

  def __init__(
    self,
    task: np.ndarray,
    source: np.ndarray,
    lengths: np.ndarray,
    *,
    rows: int,
    multiple: int,
    seed: int,
  ):
    check(len(task) > 0, "There are no training questions; check task.data.")
    check(
      rows >= multiple and rows % multiple == 0,
      f"task.batch_questions is {rows}, which {multiple} devices or micro-batches cannot share"
      f" evenly; make it a multiple of {multiple}.",
    )
    self._lengths, self._seed = lengths, seed
    self.tasks = tuple(sorted(set(task.tolist()), reverse=True))
    self.per_epoch = max(1, round(len(task) / rows))
    sets = sorted(set(source.tolist()))
    weights = {
      (name, one): np.mean(task[source == one] == name) / len(sets)
      for name in self.tasks
      for one in sets
    }
    shares = np.array([sum(weights[name, one] for one in sets) for name in self.tasks])
    self.layouts = multiple * apportion(shares, rows // multiple, self.per_epoch)
    self._groups = list[_Group]()
    for name, total in zip(self.tasks, self.layouts.sum(axis=0).tolist(), strict=True):
      its = np.array([weights[name, one] for one in sets])
      (draws,) = apportion(its / its.sum(), total, 1)
      for one, count in zip(sets, draws.tolist(), strict=True):
        members = np.flatnonzero((task == name) & (source == one))
        if len(members):
          key = (seed, self.tasks.index(name), one)
          self._groups.append(_Group(name, members, count, key))

  def plan(self, epoch: int) -> list[Planned]:
    """The batches of an epoch, in order."""
    random = np.random.default_rng([self._seed, epoch])
    drawn = {name: random.permutation(self._drawn(name, epoch)) for name in self.tasks}
    batches = list[Planned]()
    for first in range(0, self.per_epoch, POOL):
      layouts = self.layouts[first : first + POOL]
      blocks = []
      for place, name in enumerate(self.tasks):
        sizes = layouts[:, place]
        mine, drawn[name] = np.split(drawn[name], [sizes.sum()])
        mine = mine[np.argsort(self._lengths[mine], kind="stable")]
        blocks.append(np.split(mine, np.cumsum(sizes)[:-1]))
      batches += [self._planned(parts) for parts in zip(*blocks, strict=True)]
    return [batches[i] for i in random.permutation(len(batches))]

  def _drawn(self, task: str, epoch: int) -> np.ndarray:
    """Numbers of the questions of a task that an epoch draws."""
    return np.concatenate(
      [
        group.members[passes(len(group.members), epoch * group.draws, group.draws, group.key)]
        for group in self._groups
        if group.task == task
      ]
    )

  def _planned(self, parts: Sequence[np.ndarray]) -> Planned:
    blocks = tuple((name, part) for name, part in zip(self.tasks, parts, strict=True) if len(part))
    return Planned(int(max(self._lengths[part].max() for _, part in blocks)), blocks)
