"""BoolQ (Clark et al. 2019): yes/no questions that people asked, and its contrast set."""

from collections.abc import Iterator
from pathlib import Path

from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.reading import NO_ANSWER, Reading
from compmod_jax.data.qa.records import Row, json_file, json_lines

_WORDS = {True: "yes", False: "no"}


def boolq(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of a file of JSON lines such as `dev.jsonl`.

  The answer is `answer`, as published, or `label`, as in SuperGLUE: true or false. Info has `title`
  and `idx` where there are any. Checked on real files of the second kind; on made-up ones of the
  first.

  Raises:
    DataError: a line has another format.
  """
  for row in json_lines(path):
    yield from boolq_row(row, reading)


def boolq_row(row: Row, reading: Reading) -> Iterator[tuple[str, Question]]:
  """The question of an object of BoolQ."""
  answer = row.flag("answer" if row.has("answer") else "label", None)
  answers = [] if answer is None else [_WORDS[answer]]
  text, passage = row.text("question"), row.text("passage")
  info = row.info("title", "idx")
  yield from reading.written(row, "yes_no", text, answers, passage, info)


def boolq_contrast(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """The changed questions of BoolQ's contrast set (Gardner et al. 2020), `boolq_perturbed.json`.

  Answers are TRUE or FALSE; what has neither, such as the file's own heading and passages without
  changed questions, is left out. Info has `title` and the `original` question. Checked on made-up
  files that follow the published one.

  Raises:
    DataError: the file has another format.
  """
  words = {"TRUE": "yes", "FALSE": "no"}
  for item in json_file(path).rows("data"):
    passage = item.text("paragraph")
    info = item.info("title") | {"original": item.text("question", "")}
    for row in item.rows("perturbed_questions"):
      answer = str(row.get("answer", "TRUE or FALSE", (str, bool), "")).strip().upper()
      if answer not in words:
        reading.leave_out(row.place, NO_ANSWER)
        continue
      text = row.text("perturbed_q")
      yield from reading.written(row, "yes_no", text, [words[answer]], passage, info)
