"""The project's own format of questions: UTF-8, a JSON object a line, plain or gzipped (`.gz`).

    {"format": "extractive", "question": "Who barked?", "passage": "The dog barked.",
     "answers": ["The dog", "dog"]}
    {"format": "multiple_choice", "question": "What barks?", "options": ["a cat", "a dog"],
     "label": 2, "info": {"source": "made up"}}

(each of the two on a line of its own). Fields:

- `format`, needed: `multiple_choice`, `yes_no`, `extractive` or `abstractive`.
- `question`, needed: its text.
- `passage`: the text that it is about.
- `options`: in multiple choice, two to eight texts.
- `label`: in multiple choice, the number of the right option, counted from 1.
- `answers`: in the other formats, right answers; the first one is for training, and all count as
  equally right in scoring. One, `"yes"` or `"no"`, in `yes_no`; one or more in `abstractive`; none
  in `extractive` if the question has no answer.
- `info`: an object with annotations; training does not look at them. Of these `facts` and `spans`
  are whole numbers: how many facts the answer needs, and of how many spans it is.

What is not needed may be left out, or empty. Text is taken as it is; blank lines are skipped.
"""

import dataclasses
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from compmod_jax.core.errors import UserError, check, check_choice, short
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.question import MAX_OPTIONS, Question, Questions
from compmod_jax.data.qa.reading import Reading, collect
from compmod_jax.data.qa.records import Row, json_lines

FIELDS = tuple(field.name for field in dataclasses.fields(Question))


def jsonl(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """(where it stands, question) of every line; nothing is left out.

  Raises:
    UserError: the file cannot be read.
    DataError: a line is no JSON object, or its fields do not make a question.
  """
  del reading
  for row in json_lines(path):
    yield row.place, _question(row)


def read_jsonl(path: Path) -> Questions:
  """The questions of a file.

  Raises:
    UserError: the file cannot be read.
    DataError: it holds no question, or as in `jsonl`.
  """
  reading = Reading()
  return collect(str(path), jsonl(path, reading), reading)


def _question(row: Row) -> Question:
  try:
    for name in row.fields:
      check_choice("a field's name", name, FIELDS)
    options = row.texts("options", ())
    check(
      len(options) <= MAX_OPTIONS,
      f"options has {len(options)} entries; there are labels for {MAX_OPTIONS}.",
    )
    if row.has("info"):
      for name in ("facts", "spans"):
        number = row.row("info").number(name, 0)
        check(number >= 0, f"info.{name} is {short(number)}; it is a number of them, from 0.")
    return Question(
      format=row.get("format", "text", str),
      question=row.text("question"),
      passage=row.text("passage", ""),
      options=options,
      answers=row.texts("answers", ()),
      label=row.number("label", 0),
      info=row.get("info", "an object with fields", dict, {}),
    )
  except DataError:
    raise
  except UserError as error:
    raise DataError(f"{row.place}: {error} Mend the line.") from error


def write_jsonl(path: Path, questions: Iterable[Question]) -> int:
  """Writes questions so that `jsonl` reads the same ones; a file that is there is replaced.

  Args:
    path: of the file, gzipped if its name ends in `.gz`. It changes only once all is written.
    questions: what to write.

  Returns:
    How many questions were written.

  Raises:
    UserError: `info` of a question holds what JSON cannot, or the file cannot be written.
  """
  lines = [_line(number, question) for number, question in enumerate(questions)]
  content = "".join(lines).encode()
  if path.suffix == ".gz":
    content = gzip.compress(content, mtime=0)
  part = path.with_name(path.name + ".part")
  try:
    part.write_bytes(content)
    os.replace(part, path)
  except OSError as error:
    raise UserError(
      f"{path} cannot be written ({error.strerror}); name another file, or make room for it."
    ) from error
  return len(lines)


def _line(number: int, question: Question) -> str:
  fields: dict[str, Any] = {"format": question.format, "question": question.question}
  for name in FIELDS:
    value = getattr(question, name)
    if value and name not in fields:
      fields[name] = dict(value) if name == "info" else value
  try:
    line = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    same = json.loads(line).get("info", {}) == question.info
  except (TypeError, ValueError) as error:
    raise UserError(
      f"info of question {number} is {question.info!r}, which JSON cannot hold ({error}); use text,"
      " finite numbers, true, false, lists and objects only."
    ) from error
  check(
    same,
    f"info of question {number} is {question.info!r}, which JSON would change; use lists for tuples"
    " and text for the names of fields.",
  )
  try:
    line.encode()
  except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 has no bytes for
    line = json.dumps(fields, allow_nan=False)
  return line + "\n"
