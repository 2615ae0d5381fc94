"""Sentence pairs as token ids."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import overload

import numpy as np

from compmod_jax.data.base import Pairs
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.fingerprint import Fingerprint, fingerprint
from compmod_jax.data.tokenizers.vocabulary import EOS, PAD, Tokenizer

_CHUNK = 8192


class Column(Sequence[np.ndarray]):
  """Sequences of ids at random access, with all their lengths known.

  Attributes:
    lengths: ids of every sequence, int64 [n].
  """

  lengths: np.ndarray

  @abc.abstractmethod
  def take(self, numbers: np.ndarray) -> "Column":
    """The sequences with these numbers, in this order."""

  @abc.abstractmethod
  def numbers(self) -> tuple[np.ndarray, ...]:
    """All that the column holds, as a few long arrays: what its fingerprint is taken of."""

  @abc.abstractmethod
  def _one(self, number: int) -> np.ndarray:
    """A sequence; raises IndexError beyond the last."""

  def __len__(self) -> int:
    return len(self.lengths)

  @overload
  def __getitem__(self, number: int) -> np.ndarray: ...

  @overload
  def __getitem__(self, number: slice) -> list[np.ndarray]: ...

  def __getitem__(self, number: int | slice) -> np.ndarray | list[np.ndarray]:
    if isinstance(number, slice):
      return [self._one(i) for i in range(len(self))[number]]
    return self._one(number)


class Ragged(Column):
  """Sequences of ids in one flat int32 array: what millions of small arrays would hold."""

  def __init__(self, sequences: Sequence[Sequence[int]] = ()):
    self.lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    self._ends = np.cumsum(self.lengths)
    total = int(self._ends[-1]) if len(sequences) else 0
    flat = (number for sequence in sequences for number in sequence)
    self._flat = np.fromiter(flat, np.int32, total)

  @classmethod
  def join(cls, parts: Sequence["Ragged"]) -> "Ragged":
    """The sequences of all parts, in order."""
    whole = cls()
    if parts:
      whole.lengths = np.concatenate([part.lengths for part in parts])
      whole._ends = np.cumsum(whole.lengths)
      whole._flat = np.concatenate([part._flat for part in parts])
    return whole

  def take(self, numbers: np.ndarray) -> "Ragged":
    """The sequences with these numbers, in this order."""
    some = Ragged()
    some.lengths = self.lengths[numbers]
    some._ends = np.cumsum(some.lengths)
    parts = [self[int(number)] for number in numbers]
    some._flat = np.concatenate(parts) if parts else some._flat
    return some

  def numbers(self) -> tuple[np.ndarray, ...]:
    """The lengths, and the ids of all sequences."""
    return self.lengths, self._flat

  def _one(self, number: int) -> np.ndarray:
    end = self._ends[number]  # raises IndexError
    return self._flat[end - self.lengths[number] : end]


@dataclasses.dataclass
class Examples:
  """Token ids of sentence pairs.

  Args:
    columns: name -> int32 ids of every example, each sequence with EOS at its end. Names such as
      `source` and `target` become those of the batch.
    index: position of every example in the `Pairs`, int [n].
    dropped: positions left out because a side is over the ceiling.
    empty: positions left out because a side has no text.
    truncated: positions kept, but cut to the ceiling.
    pad: id that fills up batches of these examples.
  """

  columns: Mapping[str, Sequence[np.ndarray]]
  index: np.ndarray
  dropped: list[int] = dataclasses.field(default_factory=list)
  empty: list[int] = dataclasses.field(default_factory=list)
  truncated: list[int] = dataclasses.field(default_factory=list)
  pad: int = PAD

  def __len__(self) -> int:
    return len(self.index)

  def select(self, numbers: np.ndarray) -> "Examples":
    """The examples with these numbers, in this order; what was left out is not reported again."""
    columns: dict[str, Sequence[np.ndarray]] = {
      name: column.take(numbers)
      if isinstance(column, Column)
      else [column[int(number)] for number in numbers]
      for name, column in self.columns.items()
    }
    return Examples(columns=columns, index=np.asarray(self.index)[numbers], pad=self.pad)

  @functools.cached_property
  def column_lengths(self) -> dict[str, np.ndarray]:
    """Column -> tokens of every example, int [n]."""
    return {name: _lengths(column) for name, column in self.columns.items()}

  @functools.cached_property
  def lengths(self) -> np.ndarray:
    """Tokens of the longest column of every example, int [n]: decides its bucket."""
    return np.max(list(self.column_lengths.values()), axis=0)

  @property
  def tokens(self) -> dict[str, int]:
    """Tokens of every column, ends included."""
    return {name: int(_lengths(column).sum()) for name, column in self.columns.items()}

  def fingerprints(self) -> dict[str, Fingerprint]:
    """The fingerprint of every column."""
    found = {}
    for name, column in self.columns.items():
      arrays = column.numbers() if isinstance(column, Column) else column
      found[name] = fingerprint(len(self), "examples", arrays)
    return found

  def notes(self, pairs: Pairs, first: int = 3) -> list[str]:
    """A sentence for each kind of pair that was left out or cut: how many, and where the first are.

    Empty if every pair is whole.
    """
    kinds = {
      "over the ceiling of the length buckets, left out": self.dropped,
      "with an empty side, left out": self.empty,
      "over the ceiling of the length buckets, cut to it": self.truncated,
    }
    return [
      f"{len(found)} of {len(pairs)} pairs {kind}: {', '.join(map(pairs.where, found[:first]))}"
      + (", ..." if len(found) > first else "")
      for kind, found in kinds.items()
      if found
    ]


def _lengths(column: Sequence[np.ndarray]) -> np.ndarray:
  if isinstance(column, Column):
    return column.lengths
  return np.fromiter(map(len, column), np.int64, len(column))


def tokenise(
  pairs: Pairs,
  source_tokenizer: Tokenizer,
  target_tokenizer: Tokenizer,
  config: BatchConfig,
  *,
  keep_long: bool = False,
) -> Examples:
  """Encodes pairs and appends EOS.

  Args:
    pairs: read in blocks, so that lazily decoded ones need little memory.
    source_tokenizer: of the source side.
    target_tokenizer: of the target side.
    config: its `longest` is the ceiling, EOS included.
    keep_long: False (training) leaves out pairs with a side over the ceiling or without text; True
      (evaluation, translation) keeps every pair and cuts long sides, their EOS kept.
  """
  longest = config.longest
  parts: dict[str, list[Ragged]] = {"source": [], "target": []}
  index, dropped, empty, truncated = [], [], [], []
  for start in range(0, len(pairs), _CHUNK):
    stop = min(start + _CHUNK, len(pairs))
    sources = source_tokenizer.encode_batch(pairs.source[start:stop])
    targets = target_tokenizer.encode_batch(pairs.target[start:stop])
    kept: tuple[list[list[int]], list[list[int]]] = ([], [])
    for i, source, target in zip(range(start, stop), sources, targets, strict=True):
      long = max(len(source), len(target)) >= longest
      if not keep_long and (long or not source or not target):
        (empty if not source or not target else dropped).append(i)
        continue
      if long:
        truncated.append(i)
      index.append(i)
      kept[0].append([*source[: longest - 1], EOS])
      kept[1].append([*target[: longest - 1], EOS])
    for name, side in zip(parts, kept, strict=True):
      parts[name].append(Ragged(side))
  return Examples(
    columns={name: Ragged.join(part) for name, part in parts.items()},
    index=np.asarray(index, np.int32),
    dropped=dropped,
    empty=empty,
    truncated=truncated,
  )
