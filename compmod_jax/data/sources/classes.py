"""Examples by class that others made: digits, Omniglot and MNIST, folders of pictures, lines."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.data.base import ClassExamples, DataError
from compmod_jax.data.sources.tfds import open_split

SPLITS = ("train", "valid", "test")


def _by_class(names: Sequence[str], inputs: Sequence[np.ndarray] | np.ndarray) -> ClassExamples:
  """Examples whose class has this name, one by one; classes are numbered by name."""
  known = sorted(set(names))
  number = {name: i for i, name in enumerate(known)}
  classes = np.array([number[name] for name in names], np.int64)
  return ClassExamples(np.asarray(inputs), classes, tuple(known))


def _check_digits(splits: Sequence[tuple[int, ...]]) -> None:
  for name, digits in zip(SPLITS, splits, strict=True):
    check(
      len(digits) >= 2 and all(0 <= digit <= 9 for digit in digits),
      f"task.data.{name} is {digits}; give two digits at least, each 0 to 9.",
    )
  together = [digit for digits in splits for digit in digits]
  twice = sorted({digit for digit in together if together.count(digit) > 1})
  check(
    not twice,
    f"task.data has the digit {twice[0] if twice else ''} in two splits; what is learned about"
    " learning is tested on classes that were never seen. Leave it out of one.",
  )


@dataclasses.dataclass(frozen=True)
class DigitsData:
  """Handwritten digits from `train.npz` (`images` uint8 [n, 28, 28], `labels`), by digit."""

  folder: str = "$COMPMOD_DATA/digits"
  """Where `train.npz` is."""
  train: tuple[int, ...] = (0, 1, 2, 3)
  """Digits of meta-training."""
  valid: tuple[int, ...] = (4, 5, 6)
  """Digits of validation."""
  test: tuple[int, ...] = (7, 8, 9)
  """Digits of the test."""

  def __post_init__(self):
    _check_digits((self.train, self.valid, self.test))

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return SPLITS

  def describe(self) -> str:
    """What the classes are, in a few words."""
    return "handwritten digits"

  def load(self, split: str) -> ClassExamples:
    """The digits of a split.

    Raises:
      UserError: unknown split, or no such file.
      DataError: the file is damaged or holds something else.
    """
    check_choice("split", split, SPLITS)
    file = Path(os.path.expandvars(self.folder)).expanduser() / "train.npz"
    check(
      file.is_file(),
      f"task.data.folder is {self.folder!r}, but there is no file {file}. Set COMPMOD_DATA, or give"
      " the folder of a train.npz with images and labels.",
    )
    try:
      with np.load(file, allow_pickle=False) as held:
        images, labels = held["images"], held["labels"]
    except Exception as error:  # what NumPy raises depends on what is wrong
      raise DataError(
        f"{file} cannot be read as an .npz file with images and labels"
        f" ({type(error).__name__}: {error}). Restore it."
      ) from error
    chosen = np.isin(labels, getattr(self, split))
    names = [f"digit {digit}" for digit in labels[chosen]]
    return _by_class(names, np.ascontiguousarray(images[chosen][..., None]))


@dataclasses.dataclass(frozen=True)
class TfdsClasses:
  """A set of TensorFlow Datasets with pictures and labels: Omniglot, MNIST.

  Omniglot's classes are the labels of its own two parts, of which the first is parted into
  meta-training and validation by alphabet; MNIST's are parted by digit.
  """

  name: str = "omniglot"
  """Builder, configuration and, if wanted, version, as TFDS writes them."""
  side: int = 28
  """Pictures become so high and wide, by means over squares."""
  valid_alphabets: int = 5
  """Of Omniglot: alphabets of its first part that are for validation, the last ones."""
  train: tuple[int, ...] = (0, 1, 2, 3)
  """Of MNIST: digits of meta-training."""
  valid: tuple[int, ...] = (4, 5, 6)
  """Of MNIST: digits of validation."""
  test: tuple[int, ...] = (7, 8, 9)
  """Of MNIST: digits of the test."""
  data_dir: str | None = None
  """Where TFDS keeps its sets; None: `TFDS_DATA_DIR`, or `~/tensorflow_datasets`."""
  download: bool = True
  """Fetches and prepares the set if it is not there yet; needs the network."""

  def __post_init__(self):
    check_choice("task.data.name", self.name.partition("/")[0].partition(":")[0], _PARTS)
    check_least(self, "task.data.", side=4, valid_alphabets=1)
    _check_digits((self.train, self.valid, self.test))

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return SPLITS

  def describe(self) -> str:
    """What the classes are, in a few words."""
    return f"classes of {self.name}"

  def load(self, split: str) -> ClassExamples:
    """The classes of a split; all of its pictures are decoded and kept in memory.

    Raises:
      UserError: unknown split, or a set that is neither on disk nor to be had.
    """
    check_choice("split", split, SPLITS)
    omniglot = self.name.startswith("omniglot")
    part = _PARTS["omniglot"][split] if omniglot else "train"
    records = open_split(self.name, part, data_dir=self.data_dir, download=self.download)
    found = [records[i] for i in range(len(records))]
    alphabets = sorted({int(one["alphabet"]) for one in found}) if omniglot else []
    held_out = {*alphabets[-self.valid_alphabets :]}
    names, pictures = list[str](), list[np.ndarray]()
    for one in found:
      label = int(one["label"])
      if omniglot:
        if part == "train" and (int(one["alphabet"]) in held_out) != (split == "valid"):
          continue
        # Ink is white, as in other sets; the set draws it black.
        names.append(f"{part}_{label:04d}")
        pictures.append(255 - shrunk(np.asarray(one["image"])[..., :1], self.side))
      elif label in getattr(self, split):
        names.append(f"digit {label}")
        pictures.append(shrunk(np.asarray(one["image"]), self.side))
    return _by_class(names, np.stack(pictures))


_PARTS: dict[str, dict[str, str]] = {
  "omniglot": {"train": "train", "valid": "train", "test": "test"},
  "mnist": {},
}


def shrunk(picture: np.ndarray, side: int) -> np.ndarray:
  """A picture [height, width, channels] as one of side x side, by means over areas; uint8."""

  def areas(size: int) -> np.ndarray:
    edges = np.linspace(0, size, side + 1)
    pixels = np.arange(size)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    covered = np.clip(covered, 0, None)
    return covered / covered.sum(axis=1, keepdims=True)

  if picture.shape[:2] == (side, side):
    return picture.astype(np.uint8)
  high, wide = areas(picture.shape[0]), areas(picture.shape[1])
  found = np.einsum("ih,jw,hwc->ijc", high, wide, picture.astype(np.float64), optimize=True)
  return np.rint(found).clip(0, 255).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class ClassFolder:
  """A folder of one's own: FOLDER/SPLIT/CLASS/files, with the splits train, valid and test.

  Files are pictures (.png, .jpg, .jpeg) or arrays of NumPy (.npy), all of one kind.
  """

  folder: str
  """Where the folders of the splits are."""
  side: int = 28
  """Pictures become so high and wide."""
  grey: bool = True
  """Pictures become grey; else they have three channels."""

  def __post_init__(self):
    check_least(self, "task.data.", side=4)

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return SPLITS

  def describe(self) -> str:
    """What the classes are, in a few words."""
    return f"classes in {self.folder}"

  def load(self, split: str) -> ClassExamples:
    """The classes of a split, by name.

    Raises:
      UserError: unknown split, or no such folder.
      DataError: a file cannot be read, or has another shape than those before it.
    """
    check_choice("split", split, SPLITS)
    place = Path(os.path.expandvars(self.folder)).expanduser() / split
    check(
      place.is_dir(),
      f"task.data.folder is {self.folder!r}, but {place} is no folder; it needs a folder for each"
      f" of {', '.join(SPLITS)}, and in it one for each class.",
    )
    names, found = list[str](), list[np.ndarray]()
    for file in sorted(place.glob("*/*")):
      kind = file.suffix.lower()
      if kind not in (".png", ".jpg", ".jpeg", ".npy") or file.name.startswith("."):
        continue
      one = _array(file) if kind == ".npy" else self._picture(file)
      if found and (one.shape, one.dtype) != (found[0].shape, found[0].dtype):
        raise DataError(
          f"{file} has the shape {one.shape} and type {one.dtype}, but files before it"
          f" {found[0].shape} and {found[0].dtype}; all examples have to be alike."
        )
      names.append(file.parent.name)
      found.append(one)
    if not found:
      raise DataError(
        f"{place} has no pictures (.png, .jpg) and no arrays (.npy) in class folders."
      )
    return _by_class(names, np.stack(found))

  def _picture(self, file: Path) -> np.ndarray:
    try:
      import PIL.Image
    except ModuleNotFoundError as error:
      raise UserError(
        f"{file} is a picture, which Pillow reads, but it is not installed. It comes with"
        ' matplotlib: pip install "compmod_jax[report]"; or save arrays as .npy.'
      ) from error

    try:
      with PIL.Image.open(file) as opened:
        picture = np.asarray(opened.convert("L" if self.grey else "RGB"))
    except (OSError, ValueError, PIL.Image.DecompressionBombError) as error:
      raise DataError(f"{file} cannot be read as a picture ({error}). Replace it.") from error
    return shrunk(picture.reshape(*picture.shape[:2], -1), self.side)


def _array(file: Path) -> np.ndarray:
  try:
    found = np.load(file, allow_pickle=False)
  except (OSError, ValueError) as error:
    raise DataError(f"{file} cannot be read as an array ({error}). Replace it.") from error
  check_numbers_of(found, str(file))
  return found if found.dtype == np.uint8 else found.astype(np.float32)


def check_numbers_of(found: np.ndarray, where: str) -> None:
  """Raises a `DataError` unless an array has finite real numbers."""
  if found.dtype.kind not in "uif" or not np.isfinite(found).all():
    raise DataError(f"{where} has values of type {found.dtype} that are no finite numbers.")


@dataclasses.dataclass(frozen=True)
class ClassLines:
  """JSON lines of one's own: FOLDER/train.jsonl, valid.jsonl and test.jsonl.

  A line is an example, {"class": "a name", "input": numbers in lists, all of one shape}.
  """

  folder: str
  """Where the files are."""

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return SPLITS

  def describe(self) -> str:
    """What the classes are, in a few words."""
    return f"classes in {self.folder}"

  def load(self, split: str) -> ClassExamples:
    """The classes of a split, by name.

    Raises:
      UserError: unknown split, or no such file.
      DataError: a line is no such object, or has another shape than those before it.
    """
    check_choice("split", split, SPLITS)
    file = Path(os.path.expandvars(self.folder)).expanduser() / f"{split}.jsonl"
    check(
      file.is_file(),
      f"task.data.folder is {self.folder!r}, but there is no file {file}; give a folder with"
      f" {', '.join(f'{name}.jsonl' for name in SPLITS)}.",
    )
    names, found = list[str](), list[np.ndarray]()
    for where, one in _objects(file):
      values = _numbers(where, one)
      if found and values.shape != found[0].shape:
        raise DataError(
          f"{where} has an input of the shape {values.shape}, but lines before it"
          f" {found[0].shape}; all examples have to be alike."
        )
      names.append(one["class"])
      found.append(values)
    if not found:
      raise DataError(f"{file} has no examples.")
    return _by_class(names, np.stack(found))


def _objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """(file:line, object) of every line that is not blank."""
  try:
    lines = file.read_text(encoding="utf-8").split("\n")
  except UnicodeDecodeError as error:
    raise DataError(f"{file} is not UTF-8 ({error.reason}).") from error
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    where = f"{file}:{number}"
    try:
      one = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise DataError(f"{where} is not JSON ({error}).") from error
    if not (isinstance(one, dict) and isinstance(one.get("class"), str) and "input" in one):
      raise DataError(f'{where} is not like {{"class": "a name", "input": [[0, 1], [1, 0]]}}.')
    yield where, one


def _numbers(where: str, one: dict[str, Any]) -> np.ndarray:
  try:
    found = np.array(one["input"])
  except ValueError as error:
    raise DataError(f"{where} has an input whose lists differ in length.") from error
  check_numbers_of(found, where)
  return found.astype(np.float32)
