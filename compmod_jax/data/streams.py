"""A long text as parallel streams, cut into stretches of one length, for recurrent models.

The stream of targets t_0 ... t_{n-1} is laid out in `rows` rows of equal length, one after the
other; stretch i of an epoch holds positions i * length to (i + 1) * length of every row, so that a
model that keeps its state from one stretch to the next reads each row as one text.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from compmod_jax.core import extras
from compmod_jax.core.errors import check

Batch = dict[str, np.ndarray]
_ENDLESS = 1 << 62


class Stretches:
  """All stretches of a stream.

  A stretch is `tokens` [rows, length], what is read: the token before each target, `start` before
  the first; `targets`; `counted`, 0 where a row has ended; `fresh` [rows], 1 in an epoch's first
  stretch, where states start anew; `index` [rows], the rows' numbers; and further columns.

  Args:
    targets: ids, [n].
    start: what is read before the first target.
    rows: streams side by side.
    length: positions of a stretch.
    columns: further values for each target, [n] each.

  Raises:
    UserError: a size below 1, or fewer targets than rows.
  """

  def __init__(
    self,
    targets: np.ndarray,
    *,
    start: int,
    rows: int,
    length: int,
    columns: Mapping[str, np.ndarray] | None = None,
  ):
    for name, value in (("rows", rows), ("length", length)):
      check(value >= 1, f"{name} is {value}; it must be at least 1.")
    check(
      len(targets) >= rows,
      f"The text has {len(targets)} tokens, too few for {rows} rows; give more text or fewer rows.",
    )
    self.rows, self.length, self.start = rows, length, start
    self.targets, self.columns = targets, dict(columns or {})
    self.per_row = -(-len(targets) // rows)

  def __len__(self) -> int:
    """Stretches of an epoch."""
    return -(-self.per_row // self.length)

  def __getitem__(self, number: int) -> Batch:
    """One stretch, all rows."""
    check(0 <= number < len(self), f"stretch {number} of {len(self)} was asked for.")
    first = np.arange(self.rows)[:, None] * self.per_row
    within = number * self.length + np.arange(self.length)[None]
    places = first + within
    counted = (within < self.per_row) & (places < len(self.targets))
    places = np.where(counted, places, 0)
    before = np.where(places > 0, self.targets[places - 1], self.start)
    batch = {
      "tokens": np.where(counted, before, self.start).astype(np.int32),
      "targets": np.where(counted, self.targets[places], 0).astype(np.int32),
      "counted": counted.astype(np.int32),
      "fresh": np.full(self.rows, number == 0, np.int32),
      "index": np.arange(self.rows, dtype=np.int32),
    }
    for name, column in self.columns.items():
      batch[name] = np.where(counted, column[places], 0).astype(column.dtype)
    return batch


class _Epochs:
  """Stretch i of an endless sequence of epochs, this process's rows: what grain iterates over."""

  def __init__(self, stretches: Stretches, process: int, processes: int):
    self._stretches = stretches
    share = stretches.rows // processes
    self._mine = slice(process * share, (process + 1) * share)

  def __len__(self) -> int:
    return _ENDLESS

  def __repr__(self) -> str:
    return f"stretches of {len(self._stretches.targets)} tokens"

  def __getitem__(self, number: int) -> Batch:
    whole = self._stretches[int(number) % len(self._stretches)]
    return {name: value[self._mine] for name, value in whole.items()}


def train_stretches(stretches: Stretches, *, process: int = 0, processes: int = 1) -> Any:
  """An endless iterator over the stretches of every epoch in order.

  Returns:
    A grain `DatasetIterator`; `get_state` gives a JSON-able position, and `set_state` goes back.

  Raises:
    UserError: processes cannot share the rows evenly.
  """
  with extras.needed():
    import grain

  check(
    stretches.rows % processes == 0,
    f"{stretches.rows} rows cannot be shared evenly by {processes} processes; give a multiple.",
  )
  epochs = _Epochs(stretches, process, processes)
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
  return iter(grain.MapDataset.source(cast(Any, epochs)).to_iter_dataset(options))


def eval_stretches(stretches: Stretches) -> Iterator[Batch]:
  """The stretches of one epoch in order."""
  return (stretches[number] for number in range(len(stretches)))
