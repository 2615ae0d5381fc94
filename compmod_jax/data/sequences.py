r"""Sequences with answers at some of their steps: copying, associations, digits pixel by pixel.

Copying (Hochreiter and Schmidhuber 1997; Arjovsky et al. 2016, section 4.1): some symbols, many
blanks, a cue, and as many blanks again, at which the symbols are to be named in their order.

Associations (in the manner of Miconi et al. 2018 and 2020): pairs of a cue and an answer, anew in
every sequence; then each of the cues in another order, and after it a step at which its answer is
to be named.

Digits (Le et al. 2015, section 4.3): an image row by row, pixel by pixel, and its class at the last
one. Other sizes of the same images are longer sequences of the same shapes.

All are tested on longer sequences than they are trained on, copying and digits as by Goyal et al.
2019, section 4.1.
"""

import dataclasses
import os
import string
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.base import DataError

_SPLITS = {"train": 0, "valid": 1}  # their seeds; those of tests follow
_TEST = 2


class Sequences(NamedTuple):
  """Sequences of one length.

  Attributes:
    inputs: what is read, whole numbers or real ones, [sequences, time].
    targets: what is to be named, [sequences, time].
    counted: true at the steps whose targets count, bool [sequences, time].
  """

  inputs: np.ndarray
  targets: np.ndarray
  counted: np.ndarray


@dataclasses.dataclass(frozen=True)
class CopyingData:
  """Symbols to be copied after a pause, drawn from a seed; tested with other pauses, too."""

  symbols: int = 8
  """Different symbols; blank and cue are two more."""
  length: int = 10
  """Symbols of a sequence."""
  blanks: int = 50
  """Blanks before the cue in training."""
  test_blanks: tuple[int, ...] = (50, 200)
  """Blanks of each test split, which is called blanks_N."""
  train: int = 100_000
  """Sequences of the training split."""
  valid: int = 500
  """Those of the validation split, with blanks as in training."""
  test: int = 1000
  """Those of each test split."""
  seed: int = 0
  """Of what is drawn."""

  def __post_init__(self):
    check_least(self, "task.data.", symbols=1, length=1, train=1, valid=1, test=1)
    check(self.symbols <= 100, f"task.data.symbols is {self.symbols}; it must be at most 100.")
    for value in (self.blanks, *self.test_blanks):
      check(value >= 0, f"task.data.blanks has {value}; it must not be negative.")
    check(self.seed >= 0, f"task.data.seed is {self.seed}; it must not be negative.")

  @property
  def steps(self) -> int:
    """Steps of a training sequence."""
    return 2 * self.length + self.blanks + 1

  @property
  def vectors(self) -> bool:
    """Whether inputs are real numbers and not whole ones."""
    return False

  @property
  def vocab(self) -> int:
    """Different inputs and targets: the blank is 0, the cue the last."""
    return self.symbols + 2

  def splits(self) -> tuple[str, ...]:
    """Training, validation, and a test split for each number of blanks."""
    return ("train", "valid", *(f"blanks_{blanks}" for blanks in self.test_blanks))

  def load(self, split: str) -> Sequences:
    """The sequences of a split."""
    check_choice("split", split, self.splits())
    blanks, count = self.blanks, {"train": self.train, "valid": self.valid}.get(split, self.test)
    if split not in _SPLITS:
      blanks = int(split.removeprefix("blanks_"))
    # All test splits have the same symbols.
    draw = np.random.default_rng([self.seed, _SPLITS.get(split, _TEST)])
    symbols = draw.integers(1, self.symbols + 1, size=(count, self.length), dtype=np.uint8)
    inputs = np.zeros((count, 2 * self.length + blanks + 1), np.uint8)
    targets, counted = np.zeros_like(inputs), np.zeros(inputs.shape, bool)
    inputs[:, : self.length] = symbols
    inputs[:, self.length + blanks] = self.symbols + 1
    targets[:, -self.length :] = symbols
    counted[:, -self.length :] = True
    return Sequences(inputs, targets, counted)

  def describe(self) -> str:
    """The data in a few words."""
    tests = ", ".join(map(str, self.test_blanks))
    return (
      f"{self.length} of {self.symbols} symbols, copied after {self.blanks} blanks (tests: {tests})"
    )


@dataclasses.dataclass(frozen=True)
class AssociationData:
  """Pairs of cues and answers, drawn from a seed; each cue is then asked for."""

  cues: int = 10
  """Different cues."""
  answers: int = 8
  """Different answers; two cues of a sequence may have the same."""
  pairs: int = 4
  """Pairs of a sequence in training."""
  test_pairs: tuple[int, ...] = (4, 6)
  """Pairs of each test split, which is called pairs_N."""
  train: int = 100_000
  """Sequences of the training split."""
  valid: int = 500
  """Those of the validation split, with pairs as in training."""
  test: int = 1000
  """Those of each test split."""
  seed: int = 0
  """Of what is drawn."""

  def __post_init__(self):
    check_least(self, "task.data.", cues=1, answers=1, train=1, valid=1, test=1)
    check(
      self.cues + self.answers < 256,
      f"task.data.cues and task.data.answers are {self.cues} and {self.answers}; together they must"
      " be at most 255.",
    )
    for value in (self.pairs, *self.test_pairs):
      check(
        1 <= value <= self.cues,
        f"task.data.pairs has {value}; a sequence has at least one pair, and at most one for each"
        f" of the {self.cues} cues.",
      )
    check(self.seed >= 0, f"task.data.seed is {self.seed}; it must not be negative.")

  @property
  def vectors(self) -> bool:
    """Whether inputs are real numbers and not whole ones."""
    return False

  @property
  def vocab(self) -> int:
    """Different inputs and targets: 0 where an answer is asked for, cues, answers."""
    return 1 + self.cues + self.answers

  @property
  def steps(self) -> int:
    """Of a training sequence."""
    return 4 * self.pairs

  def splits(self) -> tuple[str, ...]:
    """Training, validation, and a test split for each number of pairs."""
    return ("train", "valid", *(f"pairs_{pairs}" for pairs in self.test_pairs))

  def load(self, split: str) -> Sequences:
    """The sequences of a split."""
    check_choice("split", split, self.splits())
    pairs, count = self.pairs, {"train": self.train, "valid": self.valid}.get(split, self.test)
    if split not in _SPLITS:
      pairs = int(split.removeprefix("pairs_"))
    draw = np.random.default_rng([self.seed, _SPLITS.get(split, _TEST + pairs)])
    everyone = np.broadcast_to(np.arange(1, self.cues + 1), (count, self.cues))
    cues = draw.permuted(everyone, axis=1)[:, :pairs]
    answers = draw.integers(self.cues + 1, self.vocab, size=(count, pairs))
    order = draw.permuted(np.broadcast_to(np.arange(pairs), (count, pairs)), axis=1)
    inputs = np.zeros((count, 4 * pairs), np.uint8)
    targets, counted = np.zeros_like(inputs), np.zeros(inputs.shape, bool)
    inputs[:, : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2] = cues, answers
    inputs[:, 2 * pairs :: 2] = np.take_along_axis(cues, order, axis=1)
    targets[:, 2 * pairs + 1 :: 2] = np.take_along_axis(answers, order, axis=1)
    counted[:, 2 * pairs + 1 :: 2] = True
    return Sequences(inputs, targets, counted)

  def describe(self) -> str:
    """The data in a few words."""
    tests = ", ".join(map(str, self.test_pairs))
    return (
      f"{self.pairs} pairs of {self.cues} cues and {self.answers} answers, then asked (tests:"
      f" {tests})"
    )


@dataclasses.dataclass(frozen=True)
class DigitsData:
  """Images of digits as sequences of pixels between 0 and 1; tested in other sizes, too.

  The folder has `train.npz` and `test.npz`, each with `images` [n, height, width] of bytes and
  `labels` [n]. Pixels of a smaller image are means over the areas that they cover.
  """

  folder: str = "$COMPMOD_DATA/digits"
  """Where the files are."""
  size: int = 14
  """Pixels of a side in training."""
  test_sizes: tuple[int, ...] = (14, 16, 19, 24)
  """Of each test split, which is called pixels_N."""
  valid: int = 500
  """Validation images, the last of the training file's."""

  def __post_init__(self):
    for value in (self.size, *self.test_sizes):
      check(value >= 1, f"task.data.size has {value}; it must be at least 1.")
    check_least(self, "task.data.", valid=1)

  @property
  def steps(self) -> int:
    """Steps of a training sequence."""
    return self.size**2

  @property
  def vectors(self) -> bool:
    """Whether inputs are real numbers and not whole ones."""
    return True

  @property
  def vocab(self) -> int:
    """Classes."""
    return 10

  def splits(self) -> tuple[str, ...]:
    """Training, validation, and a test split for each size."""
    return ("train", "valid", *(f"pixels_{size}" for size in self.test_sizes))

  def load(self, split: str) -> Sequences:
    """The sequences of a split.

    Raises:
      DataError: there is no such file, or it holds no images with labels.
    """
    check_choice("split", split, self.splits())
    images, labels = self._file("train" if split in _SPLITS else "test")
    size = self.size if split in _SPLITS else int(split.removeprefix("pixels_"))
    if split in _SPLITS:
      cut = len(images) - self.valid
      if cut < 1:
        raise DataError(
          f"task.data.valid is {self.valid}, but the training file has {len(images)} images; leave"
          " some for training."
        )
      part = slice(cut) if split == "train" else slice(cut, None)
      images, labels = images[part], labels[part]
    inputs = shrunk(images, size).reshape(len(images), -1)
    targets, counted = np.zeros(inputs.shape, np.uint8), np.zeros(inputs.shape, bool)
    targets[:, -1], counted[:, -1] = labels, True
    return Sequences(inputs, targets, counted)

  def _file(self, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images between 0 and 1, and their labels."""
    path = Path(string.Template(self.folder).safe_substitute(os.environ)) / f"{name}.npz"
    remedy = "give a folder with train.npz and test.npz as task.data.folder, or set $COMPMOD_DATA."
    try:
      with np.load(path, allow_pickle=False) as found:
        images, labels = found["images"], found["labels"]
    except (OSError, ValueError, KeyError) as error:
      raise DataError(f"{path} cannot be read as images with labels ({error}); {remedy}") from error
    good = images.ndim == 3 and labels.shape == images.shape[:1] and images.dtype == np.uint8
    if not good or not 0 <= labels.min(initial=0) <= labels.max(initial=0) < self.vocab:
      raise DataError(
        f"{path} has images {images.shape} of {images.dtype} and labels {labels.shape}, which are"
        f" no byte images [n, height, width] with a class from 0 to 9 each; {remedy}"
      )
    return images.astype(np.float32) / 255, labels

  def describe(self) -> str:
    """The data in a few words."""
    tests = ", ".join(map(str, self.test_sizes))
    return f"digits of {self.size} x {self.size} pixels, one by one (tests: {tests})"


def shrunk(images: np.ndarray, size: int) -> np.ndarray:
  """Images [n, height, width] as [n, size, size]: means over the areas that pixels cover."""
  down, across = (_areas(side, size) for side in images.shape[1:])
  return np.einsum("ih,nhw,jw->nij", down, images, across, optimize=True)


def _areas(given: int, wanted: int) -> np.ndarray:
  """Which share of every wanted pixel each given one covers, along a side: [wanted, given]."""
  edges = np.arange(given + 1) * wanted / given
  first = np.arange(wanted)[:, None]
  covered = np.minimum(edges[None, 1:], first + 1) - np.maximum(edges[None, :-1], first)
  return np.maximum(covered, 0).astype(np.float32)
