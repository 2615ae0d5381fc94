"""PIQA, SIQA and WinoGrande: common sense, two or three options."""

from collections.abc import Iterator
from pathlib import Path

from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.reading import Reading
from compmod_jax.data.qa.records import Row, json_lines, labels_of

_DIGITS = 9


def piqa(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of PIQA (Bisk et al. 2020): `train.jsonl`, with 0 or 1 in `train-labels.lst` beside.

  The question is the goal. Checked on made-up files.

  Raises:
    UserError: there is no file of labels.
    DataError: a line has another format, or the files differ in length.
  """
  rows = list(json_lines(path))
  for row, label in zip(rows, labels_of(path, len(rows)), strict=True):
    yield from piqa_row(row, _number(label, 0), reading)


def piqa_row(row: Row, label: int | None, reading: Reading) -> Iterator[tuple[str, Question]]:
  """The question of an object of PIQA; `label` counts from 1."""
  choices = [row.text("sol1"), row.text("sol2")]
  yield from reading.choice(row, row.text("goal"), choices, label, info=row.info("id"))


def siqa(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of Social IQa (Sap et al. 2019): `dev.jsonl`, with 1, 2 or 3 in `dev-labels.lst`.

  The passage is the context. Checked on real files, inside the published zip.

  Raises:
    UserError: there is no file of labels.
    DataError: a line has another format, or the files differ in length.
  """
  rows = list(json_lines(path))
  for row, label in zip(rows, labels_of(path, len(rows)), strict=True):
    choices = [row.text(f"answer{letter}") for letter in "ABC"]
    text, passage = row.text("question"), row.text("context")
    yield from reading.choice(row, text, choices, _number(label, 1), passage)


def winogrande(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of WinoGrande (Sakaguchi et al. 2020), such as `dev.jsonl`.

  The question is the sentence, with `_` where an option belongs. Info has `id`, and as `group` what
  a sentence and its twin share. Checked on real files.

  Raises:
    DataError: a line has another format.
  """
  for row in json_lines(path):
    yield from winogrande_row(row, _number(row.text("answer", ""), 1), reading)


def winogrande_row(row: Row, label: int | None, reading: Reading) -> Iterator[tuple[str, Question]]:
  """The question of an object of WinoGrande; `label` counts from 1."""
  choices = [row.text("option1"), row.text("option2")]
  name = row.text("qID", "")
  info = {"id": name, "group": name.rpartition("-")[0]} if "-" in name else {}
  yield from reading.choice(row, row.text("sentence"), choices, label, info=info)


def _number(label: str, first: int) -> int | None:
  """The number, from 1, that a label stands for where the first option's label is `first`."""
  # No set has as many options as would take more digits, and Python reads only some thousands.
  return int(label) - first + 1 if label.isdecimal() and len(label) <= _DIGITS else None
