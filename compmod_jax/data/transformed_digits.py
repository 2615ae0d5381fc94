"""Digits under ten transformations: eight translations, inverted contrast, noise.

Every split is parted into two halves of different images: those of one are transformed, those of
the other are shown as they are, so that no image is seen before and after a transformation.

Source: Parascandolo et al. 2018, section 5.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from compmod_jax.core.bounds import check_numbers
from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.base import DataError
from compmod_jax.data.sequences import DigitsData

SPLITS = ("train", "valid", "test")
_HALVES = 0x4A1F  # keeps the split into halves apart from other draws of the same seed
# Name -> direction of a translation, down and right.
_TRANSLATIONS = {
  "up": (-1, 0),
  "down": (1, 0),
  "left": (0, -1),
  "right": (0, 1),
  "up left": (-1, -1),
  "up right": (-1, 1),
  "down left": (1, -1),
  "down right": (1, 1),
}
TRANSFORMATIONS = (*_TRANSLATIONS, "inverted", "noise")
"""Names of the transformations, in the order of their numbers."""


class Halves(NamedTuple):
  """The images of a split, [images, height, width] between 0 and 1.

  Attributes:
    originals: those that are shown as they are.
    hidden: those that are shown transformed only.
  """

  originals: np.ndarray
  hidden: np.ndarray


@dataclasses.dataclass(frozen=True)
class TransformedDigits:
  """Handwritten digits and their transformations; files as `data.sequences.DigitsData` has them."""

  folder: str = "$COMPMOD_DATA/digits"
  """Where train.npz and test.npz are."""
  side: int = 8
  """Pixels of a side of a digit's image, which is made smaller to that size."""
  border: int = 2
  """Black pixels that are then added on every side, so that translations lose nothing."""
  shift: int = 2
  """Pixels of a translation, along each axis in which it goes."""
  noise: float = 0.4
  """Standard deviation of normal noise; the sum is cut off at 0 and 1."""
  valid: int = 500
  """Validation images, both halves together: the last of the training file's."""
  seed: int = 0
  """Of halves and noise."""

  def __post_init__(self):
    check_numbers(self, "task.data.")
    check(2 <= self.side <= 256, f"task.data.side is {self.side}; it must be from 2 to 256.")
    check(
      1 <= self.shift <= self.border <= 256,
      f"task.data.shift is {self.shift} and task.data.border {self.border}; the shift must be at"
      " least 1, and the border as wide as it at least, or digits would lose pixels.",
    )
    check(self.noise > 0, f"task.data.noise is {self.noise}; it must be positive.")
    check(
      self.valid >= 2, f"task.data.valid is {self.valid}; it must be 2 at least, for two halves."
    )
    check(self.seed >= 0, f"task.data.seed is {self.seed}; it must not be negative.")

  @property
  def size(self) -> int:
    """Pixels of a side, borders included."""
    return self.side + 2 * self.border

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return SPLITS

  def describe(self) -> str:
    """What they are, in a few words."""
    return (
      f"digits of {self.size} x {self.size} pixels under {len(TRANSFORMATIONS)} transformations"
    )

  def load(self, split: str) -> Halves:
    """The images of a split, without any transformation.

    Raises:
      DataError: there is no such file, it holds no images with labels, or too few.
    """
    check_choice("split", split, SPLITS)
    digits = DigitsData(self.folder, self.side, (self.side,), self.valid)
    flat = digits.load(f"pixels_{self.side}" if split == "test" else split).inputs
    if len(flat) < 2:
      raise DataError(f"The split {split!r} has {len(flat)} images; two halves need 2 at least.")
    border = (self.border, self.border)
    images = np.pad(flat.reshape(-1, self.side, self.side), ((0, 0), border, border))
    order = np.random.default_rng([self.seed, _HALVES, *split.encode()]).permutation(len(images))
    half = len(images) // 2
    return Halves(images[order[:half]], images[order[half:]])

  def transformed(
    self, images: np.ndarray, numbers: np.ndarray, draw: np.random.Generator
  ) -> np.ndarray:
    """Images, each under one transformation.

    Args:
      images: [images, height, width], with the border.
      numbers: of the transformations, as in `TRANSFORMATIONS`, [images].
      draw: where noise comes from.
    """
    made = images.copy()
    for number, name in enumerate(TRANSFORMATIONS):
      rows = np.flatnonzero(numbers == number)
      chosen = images[rows]
      if name in _TRANSLATIONS:
        down, right = _TRANSLATIONS[name]
        made[rows] = np.roll(chosen, (down * self.shift, right * self.shift), axis=(1, 2))
      elif name == "inverted":
        made[rows] = 1 - chosen
      else:
        made[rows] = np.clip(chosen + self.noise * draw.normal(size=chosen.shape), 0, 1)
    return made
