"""SQuAD (Rajpurkar et al. 2016, 2018), and the sets that use its format: Quoref and ROPES."""

from collections.abc import Iterator
from pathlib import Path

from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.reading import Reading, squeeze
from compmod_jax.data.qa.records import Row, json_file

_INFO = ("id", "original_id")


def squad(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of SQuAD 1.1 or 2.0, such as `dev-v2.0.json`; info has `id` and `title`.

  Several answers count as equally right. Where `is_impossible` is set there are none, and plausible
  answers are not used. Checked on made-up files.

  Raises:
    DataError: the file has another format.
  """
  for title, paragraph in _paragraphs(path):
    passage = paragraph.text("context")
    for row in paragraph.rows("qas"):
      impossible = row.flag("is_impossible", False)
      answers = [] if impossible else _answers(row)
      info = row.info(*_INFO) | title
      text = row.text("question")
      yield from reading.written(
        row, "extractive", text, answers, passage, info, may_be_none=impossible
      )


def quoref(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of Quoref (Dasigi et al. 2019) or its contrast set (Gardner et al. 2020).

  The format is SQuAD's, but several answers belong together: they are one answer, joined by commas,
  and info has their number as `spans`. Checked on made-up files that follow the published contrast
  set, `quoref_test_perturbations_20191206_merged.json`.

  Raises:
    DataError: the file has another format.
  """
  for title, paragraph in _paragraphs(path):
    passage = paragraph.text("context")
    for row in paragraph.rows("qas"):
      spans = [span for span in map(squeeze, _answers(row)) if span]
      info = row.info(*_INFO) | title | {"spans": len(spans)}
      text = row.text("question")
      yield from reading.written(row, "extractive", text, [", ".join(spans)], passage, info)


def ropes(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of ROPES (Lin et al. 2019) or its contrast set (Gardner et al. 2020).

  The passage is the background and then the situation. Answers may be words of the question.
  Checked on made-up files that follow the published contrast set,
  `ropes_contrast_set_032820.json`.

  Raises:
    DataError: the file has another format.
  """
  for _, paragraph in _paragraphs(path):
    passage = f"{paragraph.text('background')} {paragraph.text('situation')}"
    for row in paragraph.rows("qas"):
      text, info = row.text("question"), row.info(*_INFO)
      yield from reading.written(row, "extractive", text, _answers(row), passage, info)


def _paragraphs(path: Path) -> Iterator[tuple[dict[str, str], Row]]:
  """(title of the article, if it has one; paragraph) of a file."""
  for article in json_file(path).rows("data"):
    title = article.info("title")
    yield from ((title, paragraph) for paragraph in article.rows("paragraphs"))


def _answers(row: Row) -> list[str]:
  return [answer.text("text") for answer in row.rows("answers", [])]
