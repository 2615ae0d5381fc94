"""Sets of TensorFlow Datasets, with records made up as its random-access reader gives them."""

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.tfds_sets import TfdsQA

ARC = {
  "id": b"q1",
  "question": b"What barks?",
  "choices": {"text": [b"cats", b"dogs"], "label": [np.int64(0), np.int64(1)]},
  "answerKey": 1,
}
RACE = {
  "article": b"All dogs bark.",
  "questions": [b"What?", b"Who?"],
  "answers": [b"B", b"A"],
  "options": [np.array([b"cats", b"dogs"], object), np.array([b"dogs", b"cats"], object)],
  "example_id": b"high3.txt",
}
SQUAD = {
  "id": b"q1",
  "title": b"Dog",
  "context": b"All dogs\nbark \xc3\xa9.",
  "question": b"Who?",
  "answers": {"text": np.array([b"dogs", b"All dogs"], object), "answer_start": np.array([4, 0])},
}
BOOLQ = {"question": b"do dogs bark", "passage": b"All.", "title": b"Dog", "answer": np.bool_(True)}
PIQA = {"id": b"", "goal": b"Bark", "sol1": b"be a cat", "sol2": b"be a dog", "label": np.int64(1)}
OBQA = {
  "question": {"stem": b"What?", **{f"choice_{c}": c.encode() for c in "ABCD"}},
  "fact1": b"dogs bark",
  "humanScore": np.float32(1),
  "answerKey": np.int64(2),
}
WINO = {"sentence": b"A beat B so _ won.", "option1": b"A", "option2": b"B", "label": 0}


class Records:
  def __init__(self, records):
    self.records = records

  def __len__(self):
    return len(self.records)

  def __getitems__(self, numbers):
    assert len(numbers) <= 1024
    return [self.records[number] for number in numbers]


@pytest.fixture
def load(monkeypatch):
  def load(name, records, split="valid", **options):
    opened = []

    def open_split(*arguments, **_):
      opened.append(arguments)
      return Records(records)

    monkeypatch.setattr("compmod_jax.data.qa.tfds_sets.open_split", open_split)
    questions = TfdsQA(name, **options).load(split)
    assert opened == [(name, options.get(split, "validation"))]
    return questions

  return load


@pytest.mark.parametrize(
  ("name", "record", "answer", "options"),
  [
    ("ai2_arc/ARC-Easy", ARC, "(2)", ("cats", "dogs")),
    ("bool_q", BOOLQ, "yes", ()),
    ("openbookqa:0.1.0", OBQA, "(3)", ("A", "B", "C", "D")),
    ("piqa", PIQA, "(2)", ("be a cat", "be a dog")),
    ("race/high", RACE, "(2)", ("cats", "dogs")),
    ("squad/v2.0", SQUAD, "dogs", ()),
    ("winogrande", WINO, "(1)", ("A", "B")),
  ],
)
def test_records_become_questions(load, name, record, answer, options):
  questions = load(name, [record])
  assert (questions.items[0].answer, questions.items[0].options) == (answer, options)
  assert questions.where(0).startswith(f"{name}:validation[0]")
  assert questions.notes == ()


def test_text_is_decoded_and_annotations_are_kept(load):
  question = load("squad/v1.1", [SQUAD]).items[0]
  assert question.passage == "All dogs bark é."
  assert question.answers == ("dogs", "All dogs")
  assert question.info == {"id": "q1", "title": "Dog"}


def test_a_record_may_hold_several_questions_and_a_set_many_records(load):
  questions = load("race/middle", [RACE] * 1500, valid="dev")
  assert len(questions) == 3000
  assert questions.where(2999) == "race/middle:dev[1499][1]"


def test_impossible_questions_have_no_answer_and_hidden_labels_are_left_out(load):
  nothing = {"text": np.array([], object), "answer_start": np.array([])}
  impossible = {**SQUAD, "is_impossible": True}
  questions = load("squad/v2.0", [impossible, {**SQUAD, "answers": nothing}, SQUAD])
  assert [question.answers for question in questions.items] == [(), ("dogs", "All dogs")]
  assert questions.notes[0].startswith("1 question was left out: no answer is given")
  with pytest.raises(DataError, match=r"valid of winogrande has no question.*1 question was left"):
    load("winogrande", [{**WINO, "label": -1}])


def test_records_of_another_form_are_named(load):
  with pytest.raises(DataError, match=r"squad/v2\.0:validation\[0\]: field 'answers' is missing"):
    load("squad/v2.0", [BOOLQ])
  with pytest.raises(DataError, match=r"bool_q:validation\[0\] is not UTF-8"):
    load("bool_q", [{**BOOLQ, "question": b"\xff"}])


def test_splits_have_the_names_that_are_given(load):
  data = TfdsQA("race/high", valid="dev", tests=("test",))
  assert data.splits() == ("train", "valid", "test")
  assert "race/high" in data.describe()
  assert len(load("race/high", [RACE], "train", train="train")) == 2


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"name": "drop"}, "the builder in name is 'drop'"),
    ({"name": ""}, "the builder in name is ''"),
    ({"valid": ""}, "valid is empty"),
    ({"tests": ("train",)}, "give different names"),
  ],
)
def test_bad_fields_are_named(fields, message):
  with pytest.raises(UserError, match=message):
    TfdsQA(**fields)
  with pytest.raises(UserError, match="split is 'dev'"):
    TfdsQA().load("dev")
