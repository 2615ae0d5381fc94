"""The data check of questions: what it finds, and where."""

import dataclasses
import json

from compmod_jax.data.qa.check import check_questions, check_sets
from compmod_jax.data.qa.file_sets import QASet
from compmod_jax.data.qa.jsonl import write_jsonl
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.question import Question, Questions
from compmod_jax.data.qa.tokenized import TRAINED_TOKENS, QuestionTokenizer, texts_of
from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer
from compmod_jax.tasks.question_answering import AnsweringConfig

SPAN = Question("extractive", "Who barked?", "The dog barked.", answers=("the DOG",))
LOST = Question("extractive", "Who sang?", "A bird sang.", answers=("the cat",))
NONE = Question("extractive", "Who sang?", "Nobody sang.")
CHOICE = Question("multiple_choice", "What barks?", options=("a cat", "a dog"), label=2)
WORDS = TokenizerConfig(kind="words", special_tokens=TRAINED_TOKENS)


def questions(*items):
  return Questions(items, lambda number: f"file:{number + 1}")


def look(*items, length=40, seen=None):
  question_tokenizer = QuestionTokenizer(train_tokenizer(texts_of(items), WORDS), length, "start")
  return check_questions("x", questions(*items), question_tokenizer, seen=seen)


def found(report):
  return {kind: finding.places for kind, finding in report.findings.items() if finding.count}


def test_clean_questions_have_no_findings():
  report, _ = look(SPAN, CHOICE, NONE)
  assert found(report) == {}
  assert report.pairs == 3


def test_repeated_and_impossible_questions_are_named():
  report, _ = look(SPAN, CHOICE, dataclasses.replace(CHOICE, label=1), LOST)
  assert found(report) == {
    "duplicate": ["file:3: the same question as file:2"],
    "answer not in passage": ["file:4: 'the cat'"],
  }


def test_an_answer_of_several_spans_is_in_the_passage_if_each_of_them_is():
  passage = "Ida, 9, sang. A dog barked and Tom laughed."
  both = Question("extractive", "Who?", passage, answers=("Tom, ida, 9",), info={"spans": 2})
  report, _ = look(both)
  assert found(report) == {}
  lost = dataclasses.replace(both, answers=("Tom, Ben",))
  alone = dataclasses.replace(both, question="Who then?", answers=("Tom, Ida",), info={"spans": 1})
  report, _ = look(lost, alone)
  assert found(report) == {"answer not in passage": ["file:1: 'Tom, Ben'", "file:2: 'Tom, Ida'"]}


def test_words_marked_at_several_places_of_a_review_are_looked_for_one_by_one():
  passage = "It is, I must say, great. Do not buy another."
  scattered = Question(
    "extractive", "How?", passage, answers=("It great",), info={"scattered": True}
  )
  report, _ = look(scattered)
  assert found(report) == {}
  lost = dataclasses.replace(scattered, answers=("It awful",))
  alone = dataclasses.replace(scattered, question="How then?", info={})
  report, _ = look(lost, alone)
  assert found(report) == {"answer not in passage": ["file:1: 'It awful'", "file:2: 'It great'"]}


def test_no_spans_of_files_as_published_are_reported_as_missing(tmp_path):
  """A file like Quoref's contrast set, with two spans, and one like DROP's, which is no extract."""
  passage = "Ida, 9, sang. A dog barked and Tom laughed."
  asked = {"id": "1", "question": "Who?", "answers": [{"text": t} for t in ("Tom", "Ida, 9")]}
  quoref = {"data": [{"title": "t", "paragraphs": [{"context": passage, "qas": [asked]}]}]}
  (tmp_path / "quoref.json").write_text(json.dumps(quoref))
  spans = {"number": "", "date": {}, "spans": ["Tom", "Ida"]}
  pair = {"query_id": "1", "question": "Who?", "answer": spans}
  (tmp_path / "drop.json").write_text(json.dumps({"p": {"passage": passage, "qa_pairs": [pair]}}))
  for reader in ("quoref", "drop"):
    questions = QASet(reader, reader, str(tmp_path), test=(f"{reader}.json",)).load("test")
    assert len(questions) == 1
    report, _ = look(*questions.items)
    assert "answer not in passage" not in found(report), reader


def test_cut_and_left_out_questions_are_named():
  long = Question("abstractive", "one two three four five six seven", "a b c", answers=("x",))
  report, _ = look(dataclasses.replace(SPAN, passage="The dog barked. " * 9), long, length=10)
  assert set(found(report)) == {"passage cut", "too long"}
  assert report.longest == (10,)


def test_passages_of_training_are_found_in_other_splits():
  _, seen = look(SPAN, CHOICE)
  again = dataclasses.replace(SPAN, question="What did the dog do?", answers=("barked",))
  report, _ = look(again, CHOICE, seen=seen)
  assert found(report) == {"passage in train": ["file:1: also file:1", "file:2: also file:2"]}


def test_sets_are_checked_split_by_split(tmp_path):
  write_jsonl(tmp_path / "train.jsonl", [SPAN, CHOICE])
  write_jsonl(tmp_path / "test.jsonl", [CHOICE])
  (tmp_path / "valid.jsonl").write_text("{}\n")
  data = QASet(
    "mine",
    "jsonl",
    str(tmp_path),
    train=("train.jsonl",),
    valid=("valid.jsonl",),
    test=("test.jsonl",),
  )
  task = AnsweringConfig(data=Mixed((data,)), tokenizer=WORDS)
  reports = check_sets(task.data, QuestionTokenizer(task.make_tokenizer(), 40, "start"))
  assert [report.split for report in reports] == ["mine train", "mine valid", "mine test"]
  assert [report.failed for report in reports] == [False, True, False]
  assert "valid.jsonl:1" in reports[1].findings["unreadable"].places[0]
  (place,) = reports[2].findings["passage in train"].places
  assert place.startswith("test.jsonl:1: also train.jsonl:2")
