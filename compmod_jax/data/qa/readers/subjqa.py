"""SubjQA (Bjerva et al. 2020): questions on reviews, many of them subjective, some unanswerable."""

import re
from collections.abc import Iterator
from pathlib import Path

from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.reading import Reading
from compmod_jax.data.qa.records import Row, csv_rows

_NONE = "ANSWERNOTFOUND"
_COLUMNS = (
  "domain",
  "q_review_id",
  "question",
  "review",
  "human_ans_spans",
  "human_ans_indices",
  "is_ques_subjective",
)
# Indices reach from the first to the last word that was marked, which may leave much between.
_STRETCH = 1.5


def subjqa(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of a split of a domain, such as `electronics/dev.csv`.

  A row is what one annotator marked; the rows of a question on a review are one question, and their
  spans are answers that count as equally right. It has no answer if most annotators found none.
  Answers are the words of the review at the given indices; where those hold much more than was
  marked, the words that were marked, as the file has them (split, as tokens). Info has `id`,
  `domain`, `subjective`, the number of `annotators` and of those who `found_none`, and `scattered`
  if an answer's words stand at several places of the review. Checked on real files.

  Raises:
    DataError: the file has another format.
  """
  groups: dict[str, list[Row]] = {}
  for row in csv_rows(path, _COLUMNS):
    groups.setdefault(row.text("q_review_id"), []).append(row)
  for name, rows in groups.items():
    row = rows[0]
    marked = [_answer(row) for row in rows]
    nothing = sum(not answer for answer, _ in marked)
    impossible = 2 * nothing > len(rows)
    info = {
      "id": name,
      "domain": row.text("domain"),
      "subjective": row.text("is_ques_subjective") == "True",
      "annotators": len(rows),
      "found_none": nothing,
    }
    text, passage = row.text("question"), _review(row)
    answers = [] if impossible else [answer for answer, _ in marked]
    if answers and any(scattered for _, scattered in marked):
      info["scattered"] = True
    yield from reading.written(
      row, "extractive", text, answers, passage, info, may_be_none=impossible
    )


def _review(row: Row) -> str:
  # The published reviews end in the word that stands for no answer.
  return row.text("review").rstrip().removesuffix(_NONE)


def _answer(row: Row) -> tuple[str, bool]:
  """What one annotator marked, empty where that is nothing; whether at several places."""
  span = row.text("human_ans_spans").replace(_NONE, "").strip()
  match = re.fullmatch(r"\((\d{1,9}), (\d{1,9})\)", row.text("human_ans_indices").strip())
  if not match:
    raise row.error(
      f"field 'human_ans_indices' is {row.text('human_ans_indices')[:40]!r}; it must be a pair of"
      " whole numbers such as (5, 9)"
    )
  words = _review(row)[int(match[1]) : int(match[2])].strip()
  close = len("".join(words.split())) <= _STRETCH * len("".join(span.split()))
  if span and words and close:
    return words, False
  return span, len(span.split()) > 1
