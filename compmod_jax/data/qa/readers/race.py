"""RACE (Lai et al. 2017): English examinations of Chinese middle and high schools."""

from collections.abc import Iterator
from pathlib import Path

from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.reading import Reading, letter_number
from compmod_jax.data.qa.records import Row, json_file, json_lines


def race(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of a file of RACE; info has `id` and `level`, middle or high.

  As published: an object for each passage, one a file (`RACE/train/high/1.txt`, in `RACE.tar.gz`),
  with `article`, `questions`, `options` and `answers` as letters. Files of JSON lines (`.jsonl`)
  may hold the same, or an object for each question with `article`, `question`, `options` and
  `answer`. Checked on real files of the last kind; on made-up ones of the others.

  Raises:
    DataError: the file has another format.
  """
  lines = path.name.removesuffix(".gz").endswith(".jsonl")
  for row in json_lines(path) if lines else [json_file(path)]:
    yield from race_row(row, reading)


def race_row(row: Row, reading: Reading) -> Iterator[tuple[str, Question]]:
  """The questions of a passage, or the one question, that an object of RACE holds."""
  article = row.text("article")
  info = _info(row)
  if not row.has("questions"):
    label = letter_number(row.text("answer", ""))
    options = row.texts("options")
    yield from reading.choice(row, row.text("question"), options, label, article, info)
    return
  questions, answers = row.texts("questions"), row.texts("answers", ())
  lists = row.get("options", "a list of lists of texts", list)
  # Without answers there is no label; then every question is left out and counted.
  answers = answers or ("",) * len(questions)
  if not len(questions) == len(lists) == len(answers):
    raise row.error(
      f"there are {len(questions)} questions, {len(lists)} lists of options and {len(answers)}"
      " answers; every question needs one of each"
    )
  for number, (question, options, answer) in enumerate(zip(questions, lists, answers, strict=True)):
    texts = Row(row.source, row.at, {"options": options}).texts("options")
    label, at = letter_number(answer), f"[{number}]"
    yield from reading.choice(row, question, texts, label, article, info, at)


def _info(row: Row) -> dict[str, str]:
  name = row.text("id", "") or row.text("example_id", "")
  folder = Path(row.source).parent.name
  level = next((level for level in ("middle", "high") if name.startswith(level)), folder)
  return {"id": name} | ({"level": level} if level in ("middle", "high") else {})
