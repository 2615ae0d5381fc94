"""DROP (Dua et al. 2019): questions that take counting, sorting or sums over a passage."""

from collections.abc import Iterator
from pathlib import Path

from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.reading import Reading, squeeze
from compmod_jax.data.qa.records import Row, json_file


def drop(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of DROP (`drop_dataset_dev.json`) or its contrast set (Gardner et al. 2020).

  An answer is a number; a date, as `day month year` as far as given; or spans, joined by commas.
  The answers of validators count as equally right. Info has `id`, the `kind` of the first answer
  (number, date, spans) and in the contrast set the `original` question. Checked on made-up files
  that follow the published contrast set, `drop_contrast_sets_test.json`.

  Raises:
    DataError: the file has another format.
  """
  passages = json_file(path)
  for name in passages.fields:
    item = passages.row(name)
    passage = item.text("passage")
    for row in item.rows("qa_pairs"):
      given = [row.row("answer")] if row.has("answer") else []
      found = [_answer(answer) for answer in given + row.rows("validated_answers", [])]
      found = [(kind, text) for kind, text in found if text]
      info = {"id": row.text("query_id", ""), "kind": found[0][0] if found else ""}
      if row.has("original_question"):
        info["original"] = row.text("original_question")
      answers = [text for _, text in found]
      yield from reading.written(row, "abstractive", row.text("question"), answers, passage, info)


def _answer(row: Row) -> tuple[str, str]:
  """(kind, text); the text is empty where there is none."""
  number = squeeze(row.text("number", ""))
  if number:
    return "number", number
  spans = [span for span in map(squeeze, row.texts("spans", ())) if span]
  if spans:
    return "spans", ", ".join(spans)
  if not row.has("date"):
    return "", ""
  date = row.row("date")
  return "date", squeeze(" ".join(date.text(part, "") for part in ("day", "month", "year")))
