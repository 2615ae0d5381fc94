"""Questions on stories, answered in one's own words: NarrativeQA and FairytaleQA."""

import re
from collections.abc import Iterator
from pathlib import Path

from compmod_jax.data.qa.files import beside, is_file
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.reading import Reading
from compmod_jax.data.qa.records import csv_rows

_DIGITS = 9  # of the number of a section


def narrativeqa(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of NarrativeQA (Kočiský et al. 2018) on summaries: a split of `qaps.csv`.

  The passage is the document's summary, from `third_party/wikipedia/summaries.csv` beside. Info has
  the document's `id` and, if `documents.csv` is there too, its `kind`, movie or gutenberg. Checked
  on made-up files.

  Raises:
    UserError: there are no summaries.
    DataError: a file has another format.
  """
  columns = ("document_id", "set", "summary")
  summaries = beside(path, "third_party/wikipedia/summaries.csv", "summaries.csv")
  passages = {row.text("document_id"): row.text("summary") for row in csv_rows(summaries, columns)}
  kinds = {}
  if is_file(path.parent / "documents.csv"):
    rows = csv_rows(path.parent / "documents.csv", ("document_id", "kind"))
    kinds = {row.text("document_id"): row.info("kind") for row in rows}
  for row in csv_rows(path, ("document_id", "set", "question", "answer1", "answer2")):
    if row.text("set") != reading.split:
      continue
    document = row.text("document_id")
    if document not in passages:
      reading.leave_out(row.place, "its document has no summary")
      continue
    answers, info = (row.text("answer1"), row.text("answer2")), {"id": document}
    yield from reading.written(
      row,
      "abstractive",
      row.text("question"),
      answers,
      passages[document],
      info | kinds.get(document, {}),
    )


def fairytaleqa(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  """Questions of FairytaleQA (Xu et al. 2022): a file `NAME-questions.csv`.

  The passage is the sections of the story that a question is about, from `NAME-story.csv`, in the
  same folder or where `questions` in the path is `section-stories`. Info has the story as `id` and
  `group`, the `sections`, whether the answer stands in the text (`explicit`) and what it is
  `about`. Checked on real files, inside the published archive.

  Raises:
    UserError: there is no file of the story.
    DataError: a file has another format.
  """
  name = path.name.removesuffix(".gz").removesuffix("-questions.csv")
  story = _story(path, f"{name}-story.csv")
  sections = {
    row.text("section").strip(): row.text("text") for row in csv_rows(story, ("section", "text"))
  }
  columns = ("question", "cor_section", "ex-or-im1", "attribute1", "answer1")
  for row in csv_rows(path, columns):
    wanted = re.findall(r"\d+", row.text("cor_section"))
    missing = [n for n in wanted if n not in sections or len(n) > _DIGITS]
    if missing or not wanted:
      reading.leave_out(row.place, "the story has no section that it is about")
      continue
    info = {
      "id": name,
      "group": name,
      "sections": [int(number) for number in wanted],
      "explicit": row.text("ex-or-im1").strip().lower() == "explicit",
      "about": row.text("attribute1").strip(),
    }
    answers = [row.text(f"answer{n}", "") for n in range(1, 7)]
    passage = " ".join(sections[number] for number in wanted)
    yield from reading.written(row, "abstractive", row.text("question"), answers, passage, info)


def _story(path: Path, name: str) -> Path:
  parts = ["section-stories" if part == "questions" else part for part in path.parent.parts]
  elsewhere = Path(*parts) / name
  return elsewhere if is_file(elsewhere) else beside(path, name)
