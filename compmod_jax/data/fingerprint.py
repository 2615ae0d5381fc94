"""What identifies the examples that a run is trained on: how many there are, and a hash of them."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

_PIECE = 1 << 20  # numbers that are hashed at once


class Fingerprint(NamedTuple):
  """Identifies a column of training examples in their order.

  Attributes:
    count: how many there are.
    unit: of what: "examples", "tokens".
    sha256: of their token ids and lengths, or of other numbers, in hexadecimal.
  """

  count: int
  unit: str
  sha256: str

  def __str__(self) -> str:
    return f"{self.count:,} {self.unit} (sha256 {self.sha256[:12]})"


Fingerprints = Mapping[str, Fingerprint]
"""Part of the training data, such as "source" -> its fingerprint."""


def fingerprint(count: int, unit: str, arrays: Iterable[np.ndarray]) -> Fingerprint:
  """The fingerprint of arrays of numbers, whatever their width: their lengths and all they hold.

  Reads each once, piece by piece, so that an array in a file needs no memory.
  """
  digest = hashlib.sha256()
  for array in arrays:
    whole = np.issubdtype(array.dtype, np.integer)
    digest.update(len(array).to_bytes(8, "little"))
    for start in range(0, len(array), _PIECE):
      piece = np.ascontiguousarray(array[start : start + _PIECE], "<i8" if whole else "<f8")
      digest.update(piece.data)
  return Fingerprint(count, unit, digest.hexdigest())


def combined(parts: Fingerprints) -> str:
  """One short name for the fingerprints of all parts: 16 hexadecimal digits."""
  text = "\n".join(f"{name} {part.count} {part.sha256}" for name, part in sorted(parts.items()))
  return hashlib.sha256(text.encode()).hexdigest()[:16]
