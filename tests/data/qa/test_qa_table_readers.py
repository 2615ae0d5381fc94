"""Readers of published sets in tables that are answered with words, on small files."""

import csv
import io

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.readers import READERS
from compmod_jax.data.qa.reading import Reading


def read(name, path, split="train"):
  """(questions, places without their folder, notes)."""
  reading = Reading(split)
  found = list(READERS[name](path, reading))
  places = [place.removeprefix(f"{path.parent}/") for place, _ in found]
  return [question for _, question in found], places, reading.notes()


def write_csv(path, heads, *rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  text = io.StringIO()
  csv.writer(text, lineterminator="\n").writerows([heads, *rows])
  path.write_text(text.getvalue())
  return path


QAPS = ["document_id", "set", "question", "answer1", "answer2", "question_tokenized"]


@pytest.fixture
def narrative(tmp_path):
  write_csv(
    tmp_path / "third_party" / "wikipedia" / "summaries.csv",
    ["document_id", "set", "summary", "summary_tokenized"],
    ["d1", "train", 'A dog\nsaid "bark".', "x"],
    ["d2", "valid", "A cat.", "x"],
  )
  write_csv(tmp_path / "documents.csv", ["document_id", "set", "kind"], ["d1", "train", "movie"])
  return write_csv(
    tmp_path / "qaps.csv",
    QAPS,
    ["d1", "train", "Who?", "The dog.", "A\ndog", "x"],
    ["d2", "valid", "Who?", "The cat", "The cat", "x"],
    ["d1", "train", "What?", " ", "", "x"],
    ["d3", "train", "What?", "a", "b", "x"],
  )


def test_narrativeqa_reads_the_split_that_is_asked_for(narrative):
  questions, places, notes = read("narrativeqa", narrative)
  assert [question.answers for question in questions] == [("The dog.", "A dog")]
  assert questions[0].passage == 'A dog said "bark".'
  assert questions[0].info == {"id": "d1", "kind": "movie"}
  assert places == ["qaps.csv:2"]
  assert [note.partition(": ")[2].partition(" (")[0] for note in notes] == [
    "no answer is given",
    "its document has no summary",
  ]
  questions, places, notes = read("narrativeqa", narrative, "valid")
  assert [question.answers for question in questions] == [("The cat",)]
  assert places == ["qaps.csv:4"]
  assert not notes


def test_narrativeqa_needs_summaries(narrative):
  (narrative.parent / "third_party" / "wikipedia" / "summaries.csv").unlink()
  with pytest.raises(UserError, match=r"qaps\.csv needs third_party/wikipedia/summaries\.csv or"):
    read("narrativeqa", narrative)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (
      "document_id,set,question,answer1\n",
      r"qaps\.csv:1 has no column answer2, only 'document_id'",
    ),
    (",".join(QAPS) + "\nd1,train\n", r"qaps\.csv:2 has 2 fields for 6 columns; mend the row"),
    (",".join(QAPS) + '\nd1,train,"a\nb', r"qaps\.csv:2 is no CSV"),
  ],
)
def test_a_damaged_table_is_named_with_its_line(narrative, text, message):
  narrative.write_text(text)
  with pytest.raises(DataError, match=message):
    read("narrativeqa", narrative)


FAIRY = [
  "question_id",
  "local-or-sum",
  "cor_section",
  "attribute1",
  "attribute2",
  "question",
  "ex-or-im1",
]
FAIRY += ["answer1", "answer2", "answer3", "ex-or-im2", "answer4", "answer5", "answer6"]


def fairy(sections, *answers):
  answers = ([*answers] + [""] * 6)[:6]
  first = ["1", "local", sections, "action", "", "Who?", "explicit"]
  return [*first, *answers[:3], "", *answers[3:]]


@pytest.mark.parametrize(
  "story", ["section-stories/val/moti-story.csv", "questions/val/moti-story.csv"]
)
def test_fairytaleqa_takes_the_sections_that_a_question_is_about(tmp_path, story):
  write_csv(tmp_path / story, ["section", "text"], ["1", "Once\nupon"], ["2", "a time"], ["3", "."])
  path = write_csv(
    tmp_path / "questions/val/moti-questions.csv",
    FAIRY,
    fairy("1", "Moti", "", "", "he"),
    fairy("1, 2", "Moti"),
    fairy("", "Moti"),
    fairy("9", "Moti"),
  )
  questions, places, notes = read("fairytaleqa", path)
  assert [question.passage for question in questions] == ["Once upon", "Once upon a time"]
  assert [question.answers for question in questions] == [("Moti", "he"), ("Moti",)]
  assert questions[1].info == {
    "id": "moti",
    "group": "moti",
    "sections": [1, 2],
    "explicit": True,
    "about": "action",
  }
  assert places == ["moti-questions.csv:2", "moti-questions.csv:3"]
  assert notes[0].startswith("2 questions were left out: the story has no section")


SUBJ = ["domain", "q_review_id", "question", "review", "human_ans_spans", "human_ans_indices"]
REVIEW = "It's tiny, and all I want is to read. The screen is small. ANSWERNOTFOUND"


def subj(name, span, start, stop):
  return ["books", name, "How is it?", REVIEW, span, f"({start}, {stop})", "True"]


def test_subjqa_annotators_of_one_question_give_one_question(tmp_path):
  path = write_csv(
    tmp_path / "dev.csv",
    [*SUBJ, "is_ques_subjective"],
    subj("a", "It 's tiny", 0, 9),
    subj("b", "ANSWERNOTFOUND", 59, 73),
    subj("a", "The screen is small .", 38, 58),
    subj("b", "ANSWERNOTFOUND", 59, 73),
    subj("c", "It tiny", 0, 58),
    subj("d", "ANSWERNOTFOUND", 59, 73),
    subj("d", "tiny ANSWERNOTFOUND", 5, 73),
    subj("e", "ANSWERNOTFOUND", 59, 73),
    subj("e", "tiny", 5, 9),
    subj("e", "ANSWERNOTFOUND", 59, 73),
  )
  questions, places, notes = read("subjqa", path)
  assert [question.answers for question in questions] == [
    ("It's tiny", "The screen is small."),  # as the review has it, though marked as tokens
    (),
    ("It tiny",),  # the indices reach far over what was marked
    ("tiny",),  # half of the annotators found something
    (),
  ]
  assert questions[0].passage == REVIEW.removesuffix(" ANSWERNOTFOUND")
  assert questions[3].info == {
    "id": "d",
    "domain": "books",
    "subjective": True,
    "annotators": 2,
    "found_none": 1,
  }
  assert [question.info.get("scattered", False) for question in questions] == [
    *(False, False, True, False, False)
  ]
  assert places == [f"dev.csv:{line}" for line in (2, 3, 6, 7, 9)]
  assert not notes


def test_subjqa_indices_that_are_none_are_named(tmp_path):
  row = subj("a", "tiny", 5, 9)
  row[5] = "5-9"
  path = write_csv(tmp_path / "dev.csv", [*SUBJ, "is_ques_subjective"], row)
  with pytest.raises(
    DataError, match=r"dev\.csv:2: field 'human_ans_indices' is '5-9'; it must be"
  ):
    read("subjqa", path)
