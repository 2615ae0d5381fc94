"""Text sets of TensorFlow Datasets, read at random access and without TensorFlow."""

import contextlib
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, overload

from compmod_jax.core import extras
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.data.base import DataError, Metric, Pairs


@dataclasses.dataclass(frozen=True)
class TfdsData:
  """A translation set such as `wmt14_translate/de-en` or `ted_hrlr_translate/de_to_en`.

  Records are ArrayRecord files, which random access needs; sentences are decoded when asked for.
  """

  name: str = "wmt14_translate/de-en"
  """Builder, configuration and, if wanted, version, as TFDS writes them."""
  source_language: str = "de"
  """Feature that holds the sentences to translate."""
  target_language: str = "en"
  """Feature that holds their translations."""
  data_dir: str | None = None
  """Where TFDS keeps its sets; None: `TFDS_DATA_DIR`, or `~/tensorflow_datasets`."""
  download: bool = True
  """Fetches and prepares the set if it is not there yet; needs the network."""
  train: str = "train"
  """What TFDS calls the training split; slices such as `train[:10%]` are allowed."""
  valid: str = "validation"
  """What TFDS calls the validation split."""
  tests: tuple[str, ...] = ("test",)
  """What TFDS calls the test splits; they keep these names."""
  metric: Metric = "bleu"
  """What translations are scored with."""

  def __post_init__(self) -> None:
    for field in ("name", "source_language", "target_language", "train", "valid"):
      check(getattr(self, field), f"{field} is empty; it must be a name that TFDS knows.")
    check(
      self.source_language != self.target_language,
      f"source_language and target_language are both {self.source_language!r}; they name two"
      " features of the set: change one.",
    )
    names = self.splits()
    check(
      len(set(names)) == len(names),
      f"tests is {self.tests}; give different names, none of them 'train' or 'valid'.",
    )

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: train, valid and the tests."""
    return ("train", "valid", *self.tests)

  def load(self, split: str) -> Pairs:
    """Opens a split; its sentences are read and decoded when they are indexed.

    Raises:
      UserError: unknown split or set, a language that the set lacks, a set that is neither on disk
        nor to be had.
      DataError: the split has no pairs, or (on access) a sentence is not UTF-8.
    """
    check_choice("split", split, self.splits())
    name = {"train": self.train, "valid": self.valid}.get(split, split)
    records = open_split(self.name, name, data_dir=self.data_dir, download=self.download)
    for language in (self.source_language, self.target_language):
      check_choice(f"language of {self.name}", language, records.dataset_info.features)

    def where(i: int) -> str:
      return f"{self.name}:{name}[{i}]"

    rows = _Rows(records, (self.source_language, self.target_language), where)
    return Pairs(source=_Side(rows, 0), target=_Side(rows, 1), where=where, metric=self.metric)


def open_split(name: str, split: str, *, data_dir: str | None, download: bool) -> Any:
  """The records of a split at random access, as TFDS gives them.

  Raises:
    UserError: no such set or split, or one that is neither on disk nor to be had; or the split has
      no records.
  """
  with extras.needed():
    import tensorflow_datasets as tfds

  options = {
    "split": split,
    "data_dir": data_dir,
    "download": download,
    # The default file format can only be read in sequence, and by TensorFlow.
    "builder_kwargs": {"file_format": "array_record"},
  }
  try:
    try:
      records = tfds.data_source(name, **options)
    except tfds.core.DatasetNotFoundError:
      _register_text_sets()
      records = tfds.data_source(name, **options)
  except tfds.core.DatasetNotFoundError as error:
    raise UserError(
      f"name is {name!r}, but neither TFDS nor an imported module defines such a set, and"
      f" there is none in data_dir ({data_dir or 'the default folder'}); check its spelling,"
      " or import the module that defines it first."
    ) from error
  # What TFDS raises for a missing split, a set not prepared or no network varies by version.
  except Exception as error:
    raise UserError(
      f"Split {split!r} of {name!r} cannot be opened ({type(error).__name__}:"
      f" {' '.join(str(error).split())[:300]}). Check the name of the split; if the set is not in"
      f" data_dir ({data_dir or 'the default folder'}) yet, prepare it there, or set"
      " download=True on a machine with network."
    ) from error
  if not len(records):
    raise DataError(f"Split {split!r} of {name} has no records; choose another split.")
  return records


def _register_text_sets() -> None:
  """Imports the modules that define sets of text: TFDS does so only next to TensorFlow."""
  with extras.needed():
    import tensorflow_datasets.text as text
    import tensorflow_datasets.translate as translate

  for package in (translate, text):
    for module in pkgutil.iter_modules(package.__path__):
      if not module.name.endswith(("_test", "_utils")):
        with contextlib.suppress(ImportError):  # one set's own needs are not the others'
          importlib.import_module(f"{package.__name__}.{module.name}")


class Records(Protocol):
  """Examples of a prepared set at random access."""

  def __len__(self) -> int: ...
  def __getitems__(self, numbers: Sequence[int], /) -> Sequence[Mapping[str, Any]]: ...


class _Rows:
  """Decoded sentences of a record source; keeps the last block, which both sides ask for."""

  def __init__(self, records: Records, languages: tuple[str, str], where: Callable[[int], str]):
    self._records, self._languages, self._where = records, languages, where
    self._last: tuple[range, tuple[list[str], list[str]]] = (range(0), ([], []))

  def __len__(self) -> int:
    return len(self._records)

  def read(self, numbers: range) -> tuple[list[str], list[str]]:
    known, texts = self._last
    if known != numbers:
      records = self._records.__getitems__(list(numbers)) if numbers else []
      source, target = (
        [self._text(record, language, i) for i, record in zip(numbers, records, strict=True)]
        for language in self._languages
      )
      texts = (source, target)
      self._last = (numbers, texts)
    return texts

  def _text(self, record: Mapping[str, Any], language: str, number: int) -> str:
    value = record[language]
    try:
      return (value if isinstance(value, str) else bytes(value).decode("utf-8")).strip()
    except UnicodeDecodeError as error:
      raise DataError(f"{self._where(number)} is not UTF-8 ({error.reason}).") from error


class _Side(Sequence[str]):
  """One side of every pair, read when indexed."""

  def __init__(self, rows: _Rows, side: int):
    self._rows, self._side = rows, side

  def __len__(self) -> int:
    return len(self._rows)

  @overload
  def __getitem__(self, number: int) -> str: ...

  @overload
  def __getitem__(self, number: slice) -> list[str]: ...

  def __getitem__(self, number: int | slice) -> str | list[str]:
    numbers = range(len(self))[number]  # raises IndexError, counts negative numbers from the end
    if isinstance(numbers, range):
      return self._rows.read(numbers)[self._side]
    return self._rows.read(range(numbers, numbers + 1))[self._side][0]

  def __iter__(self):
    for start in range(0, len(self), 1024):
      yield from self[start : start + 1024]
