"""Sets of questions in TensorFlow Datasets, read at random access and without TensorFlow.

Of DROP, TFDS keeps only the first of several spans and no date without a day, which would count
right answers as wrong: read its published files instead (`QASet`, reader `drop`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.question import Question, Questions
from compmod_jax.data.qa.readers.boolq import boolq_row
from compmod_jax.data.qa.readers.commonsense import piqa_row, winogrande_row
from compmod_jax.data.qa.readers.race import race_row
from compmod_jax.data.qa.reading import Reading, collect
from compmod_jax.data.qa.records import Row
from compmod_jax.data.sources.tfds import open_split

_BLOCK = 1024
Found = Iterator[tuple[str, Question]]


def _squad(row: Row, reading: Reading) -> Found:
  impossible = row.flag("is_impossible", False)
  answers = () if impossible else row.row("answers").texts("text")
  text, passage, info = row.text("question"), row.text("context"), row.info("id", "title")
  return reading.written(row, "extractive", text, answers, passage, info, may_be_none=impossible)


def _arc(row: Row, reading: Reading) -> Found:
  choices, key = row.row("choices"), row.number("answerKey")
  labels = choices.get("label", "a list of numbers", list)
  label = labels.index(key) + 1 if key in labels else None
  return reading.choice(
    row, row.text("question"), choices.texts("text"), label, info=row.info("id")
  )


def _openbookqa(row: Row, reading: Reading) -> Found:
  question = row.row("question")
  choices = [question.text(f"choice_{letter}") for letter in "ABCD"]
  label = row.number("answerKey") + 1
  return reading.choice(row, question.text("stem"), choices, label, info=row.info("fact1"))


def _piqa(row: Row, reading: Reading) -> Found:
  return piqa_row(row, row.number("label") + 1, reading)


def _winogrande(row: Row, reading: Reading) -> Found:
  return winogrande_row(row, row.number("label") + 1, reading)


READERS: Mapping[str, Callable[[Row, Reading], Found]] = {
  "ai2_arc": _arc,
  "bool_q": boolq_row,
  "openbookqa": _openbookqa,
  "piqa": _piqa,
  "race": race_row,
  "squad": _squad,
  "winogrande": _winogrande,
}


@dataclasses.dataclass(frozen=True)
class TfdsQA:
  """Questions of a set such as `squad/v2.0`, `bool_q`, `race/high` or `ai2_arc/ARC-Easy`.

  RACE has lists of lists, which TFDS writes only next to TensorFlow; once prepared, it is read
  without. Checked on made-up records, and on no set that TFDS prepared.
  """

  name: str = "squad/v2.0"
  """Builder, configuration and, if wanted, version, as TFDS writes them."""
  data_dir: str | None = None
  """Where TFDS keeps its sets; None: `TFDS_DATA_DIR`, or `~/tensorflow_datasets`."""
  download: bool = True
  """Fetches and prepares the set if it is not there yet; needs the network."""
  train: str = "train"
  """What TFDS calls the training split: `train_xl` in WinoGrande. Slices are allowed."""
  valid: str = "validation"
  """What TFDS calls the validation split: `dev` in RACE."""
  tests: tuple[str, ...] = ()
  """What TFDS calls the test splits, such as `test` in RACE and ARC; they keep these names."""

  def __post_init__(self) -> None:
    for field in ("train", "valid"):
      check(getattr(self, field), f"{field} is empty; it must be a name that TFDS knows.")
    check_choice("the builder in name", self._builder(), READERS)
    names = self.splits()
    check(
      len(set(names)) == len(names),
      f"tests is {self.tests}; give different names, none of them 'train' or 'valid'.",
    )

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: train, valid and the tests."""
    return ("train", "valid", *self.tests)

  def describe(self) -> str:
    """What the questions are, in a few words."""
    return f"questions of {self.name}"

  def load(self, split: str) -> Questions:
    """Reads a split; its notes say how many questions cannot be used, and why.

    Raises:
      UserError: unknown split or set, or a set that is neither on disk nor to be had.
      DataError: the split has no question, or a record is not as the set is known to be.
    """
    check_choice("split", split, self.splits())
    name = {"train": self.train, "valid": self.valid}.get(split, split)
    records = open_split(self.name, name, data_dir=self.data_dir, download=self.download)
    reading = Reading(split)

    def read() -> Found:
      for start in range(0, len(records), _BLOCK):
        numbers = range(start, min(start + _BLOCK, len(records)))
        for number, record in zip(numbers, records.__getitems__(list(numbers)), strict=True):
          place = f"{self.name}:{name}[{number}]"
          yield from READERS[self._builder()](Row(place, "", _plain(record, place)), reading)

    return collect(f"{split} of {self.name}", read(), reading)

  def _builder(self) -> str:
    return self.name.partition("/")[0].partition(":")[0]


def _plain(value: object, place: str) -> Any:
  """A record as JSON would hold it: text, numbers, lists and objects."""
  if isinstance(value, bytes):
    try:
      return value.decode("utf-8")
    except UnicodeDecodeError as error:
      raise DataError(f"{place} is not UTF-8 ({error.reason}); prepare the set again.") from error
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist(), place)
  if isinstance(value, Mapping):
    return {name: _plain(item, place) for name, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item, place) for item in value]
  return value
