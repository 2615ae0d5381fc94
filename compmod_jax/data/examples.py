"""Sentence pairs as token ids."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import overload

import numpy as np

from compmod_jax.data import token_cache
from compmod_jax.data.base import Pairs
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.fingerprint import Fingerprint, fingerprint
from compmod_jax.data.tokenizers.vocabulary import EOS, PAD, Tokenizer

_CHUNK = 32_768


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
    self._hold(*token_cache.flatten(sequences))

  def _hold(self, lengths: np.ndarray, flat: np.ndarray) -> "Ragged":
    self.lengths, self._ends, self._flat = lengths, np.cumsum(lengths), flat
    return self

  @classmethod
  def encoded(cls, texts: Sequence[str], tokenizer: Tokenizer) -> "Ragged":
    """The ids of texts, without ends; see `token_cache.encode`."""
    return cls()._hold(*token_cache.encode(texts, tokenizer))

  @classmethod
  def join(cls, parts: Sequence["Ragged"]) -> "Ragged":
    """The sequences of all parts, in order."""
    if not parts:
      return cls()
    lengths, flat = zip(*(part.numbers() for part in parts), strict=True)
    return cls()._hold(np.concatenate(lengths), np.concatenate(flat))

  def take(self, numbers: np.ndarray) -> "Ragged":
    """The sequences with these numbers, in this order."""
    parts = [self[int(number)] for number in numbers]
    return Ragged()._hold(self.lengths[numbers], np.concatenate([self._flat[:0], *parts]))

  def ended(self, which: np.ndarray, longest: int) -> "Ragged":
    """Some of the sequences, EOS behind each.

    Args:
      which: bool [n], those that are taken.
      longest: ids of a sequence, EOS included; what is over is cut off.
    """
    place = np.arange(len(self._flat)) - np.repeat(self._ends - self.lengths, self.lengths)
    ids = self._flat[np.repeat(which, self.lengths) & (place < longest - 1)]
    lengths = np.minimum(self.lengths[which], longest - 1) + 1
    ends = np.zeros(len(ids) + len(lengths), bool)
    ends[np.cumsum(lengths) - 1] = True
    flat = np.full(len(ends), EOS, np.int32)
    flat[~ends] = ids
    return Ragged()._hold(lengths, flat)

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
  index, dropped, empty, truncated = [np.empty(0, np.int32)], [], [], []
  for start in range(0, len(pairs), _CHUNK):
    stop = min(start + _CHUNK, len(pairs))
    source = Ragged.encoded(pairs.source[start:stop], source_tokenizer)
    target = Ragged.encoded(pairs.target[start:stop], target_tokenizer)
    numbers = np.arange(start, stop, dtype=np.int32)
    blank = (source.lengths == 0) | (target.lengths == 0)
    long = np.maximum(source.lengths, target.lengths) >= longest
    kept = np.ones(len(numbers), bool) if keep_long else ~(blank | long)
    empty += numbers[blank & ~kept].tolist()
    dropped += numbers[long & ~blank & ~kept].tolist()
    truncated += numbers[long & kept].tolist()
    index.append(numbers[kept])
    for name, side in zip(parts, (source, target), strict=True):
      parts[name].append(side.ended(kept, longest))
  return Examples(
    columns={name: Ragged.join(part) for name, part in parts.items()},
    index=np.concatenate(index),
    dropped=dropped,
    empty=empty,
    truncated=truncated,
  )
