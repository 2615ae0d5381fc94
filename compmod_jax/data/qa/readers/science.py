"""Multiple choice in JSON lines: ARC, OpenBookQA, CommonsenseQA, and plain lists of options."""

from collections.abc import Iterator
from pathlib import Path

from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.reading import Reading
from compmod_jax.data.qa.records import json_lines


def arc(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of ARC (Clark et al. 2018), OpenBookQA (Mihaylov et al. 2018) or CommonsenseQA.

  JSON lines (`ARC-Easy-Train.jsonl`, `train_complete.jsonl`, `train_rand_split.jsonl`) with
  `question.stem`, `question.choices` and `answerKey`, the label of the right one. Info has `id`,
  and where there are any OpenBookQA's fact as `fact1` and CommonsenseQA's `question_concept`.
  Checked on made-up files.

  Raises:
    DataError: a line has another format.
  """
  for row in json_lines(path):
    question = row.row("question")
    choices = question.rows("choices")
    labels = [choice.text("label") for choice in choices]
    key = row.text("answerKey", "")
    label = labels.index(key) + 1 if key in labels else None
    options = [choice.text("text") for choice in choices]
    info = row.info("id", "fact1") | question.info("question_concept")
    yield from reading.choice(row, question.text("stem"), options, label, info=info)


def options(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions in JSON lines with `question`, `options` and `answer`, an index from 0.

  `passage` is read where there is one. Checked on real files.

  Raises:
    DataError: a line has another format.
  """
  for row in json_lines(path):
    answer = row.number("answer", None)
    label = None if answer is None else answer + 1
    text, passage = row.text("question"), row.text("passage", "")
    yield from reading.choice(row, text, row.texts("options"), label, passage)
