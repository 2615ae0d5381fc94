"""The project's own format of questions."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.jsonl import jsonl, read_jsonl, write_jsonl
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.reading import Reading

QUESTIONS = [
  Question("extractive", "Who  barked?", "The dog\nbarked.", answers=("The dog", "dog")),
  Question("extractive", "Who meowed?", "The dog barked."),
  Question("multiple_choice", "What barks?", options=("a cat", "", "a dog"), label=3),
  Question("yes_no", "does a dog bark", "Grüße \u2028 \x85", answers=("yes",)),
  Question("abstractive", "Why?", answers=("because",), info={"id": "a", "list": [1, 2.5, None]}),
]


def read(path):
  return [question for _, question in jsonl(path, Reading())]


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz"])
def test_written_questions_are_read_again_and_placed(tmp_path, name):
  assert write_jsonl(tmp_path / name, QUESTIONS) == len(QUESTIONS)
  found = list(jsonl(tmp_path / name, Reading()))
  assert [question for _, question in found] == QUESTIONS
  assert [place for place, _ in found] == [f"{tmp_path / name}:{n}" for n in range(1, 6)]
  assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_whole_file_is_read_at_once(tmp_path):
  write_jsonl(tmp_path / "q.jsonl", QUESTIONS)
  questions = read_jsonl(tmp_path / "q.jsonl")
  assert (list(questions.items), questions.notes) == (QUESTIONS, ())
  assert questions.where(4).endswith("q.jsonl:5")
  write_jsonl(tmp_path / "q.jsonl", [])
  with pytest.raises(DataError, match=r"q\.jsonl is empty"):
    read_jsonl(tmp_path / "q.jsonl")


def test_equal_questions_give_equal_bytes(tmp_path):
  for name in ("a.jsonl.gz", "b.jsonl.gz"):
    write_jsonl(tmp_path / name, QUESTIONS)
  assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


text = st.text(max_size=8)
some_text = text.filter(lambda t: bool(t.strip()))


@settings(deadline=None, max_examples=60)
@given(
  question=some_text,
  passage=text,
  answers=st.lists(text, max_size=3),
  info=st.dictionaries(text, st.none() | st.booleans() | st.integers() | text | st.lists(text)),
)
def test_any_text_survives_a_round_trip(tmp_path_factory, question, passage, answers, info):
  path = tmp_path_factory.getbasetemp() / "any.jsonl"
  asked = Question("extractive", question, passage, answers=tuple(answers), info=info)
  write_jsonl(path, [asked, asked])
  assert read(path) == [asked, asked]


def test_half_a_surrogate_pair_survives_a_round_trip(tmp_path):
  asked = Question("extractive", "what is \ud83d")
  write_jsonl(tmp_path / "q.jsonl", [asked])
  assert read(tmp_path / "q.jsonl") == [asked]


def test_a_line_needs_no_more_than_its_format_does(tmp_path):
  lines = [
    {"format": "extractive", "question": "Who?"},
    {"format": "yes_no", "question": "Is it?", "answers": ["no"], "options": [], "label": 0},
    {"format": "multiple_choice", "question": "?", "options": ["a", "b"], "label": 1, "info": None},
  ]
  (tmp_path / "q.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n\n")
  found = list(jsonl(tmp_path / "q.jsonl", Reading()))
  assert [question.answer for _, question in found] == ["", "no", "(1)"]
  assert [place.rpartition(":")[2] for place, _ in found] == ["1", "3", "5"]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ('{"format": "extractive"', r"q\.jsonl:2 is no JSON"),
    ("[1]", r"q\.jsonl:2: there is \[1\]; it must be an object"),
    ('{"question": "a"}', "field 'format' is missing; the fields are: 'question'; it must be text"),
    ('{"format": "yesno", "question": "a"}', "format is 'yesno'.*Did you mean 'yes_no'"),
    ('{"format": "extractive", "question": 7}', "field 'question' is 7; it must be text; mend"),
    ('{"format": "extractive", "question": " "}', "question is empty"),
    ('{"format": "extractive", "question": "a", "answer": ["b"]}', "Did you mean 'answers'"),
    ('{"format": "extractive", "question": "a", "answers": "b"}', "must be a list of texts"),
    ('{"format": "extractive", "question": "a", "answers": [1]}', "must be a list of texts"),
    ('{"format": "yes_no", "question": "a", "answers": ["maybe"]}', "a yes/no question has one"),
    ('{"format": "abstractive", "question": "a"}', "answers is empty"),
    (
      '{"format": "multiple_choice", "question": "a", "options": ["b", "c"], "label": 0}',
      "label is 0; it is the number of one of the 2 options",
    ),
    (
      '{"format": "multiple_choice", "question": "a", "options": ["b", "c"], "label": true}',
      "field 'label' is True; it must be a whole number",
    ),
    ('{"format": "extractive", "question": "a", "info": []}', r"'info' is \[\]; it must be an obj"),
  ],
)
def test_what_is_wrong_in_a_line_is_named_with_its_place(tmp_path, line, message):
  (tmp_path / "q.jsonl").write_text('{"format": "extractive", "question": "a"}\n' + line + "\n")
  with pytest.raises(DataError, match=message) as error:
    read(tmp_path / "q.jsonl")
  assert "q.jsonl:2" in str(error.value)
  assert "mend" in str(error.value).lower()
  assert "\n" not in str(error.value)


def test_a_damaged_archive_is_named(tmp_path):
  whole = gzip.compress(b'{"format": "extractive", "question": "a"}\n' * 99)
  (tmp_path / "q.jsonl.gz").write_bytes(whole[:-20])
  with pytest.raises(DataError, match=r"q\.jsonl\.gz is not a complete gzip file"):
    read(tmp_path / "q.jsonl.gz")


@pytest.mark.parametrize("info", [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": {1}}])
def test_what_json_cannot_hold_is_refused_and_the_file_stays_as_it_was(tmp_path, info):
  path = tmp_path / "q.jsonl"
  write_jsonl(path, QUESTIONS)
  with pytest.raises(UserError, match="info of question 1 is"):
    write_jsonl(path, [QUESTIONS[0], Question("extractive", "a", info=info)])
  assert read(path) == QUESTIONS


def test_a_file_that_cannot_be_written_is_named(tmp_path):
  with pytest.raises(UserError, match=r"q\.jsonl cannot be written"):
    write_jsonl(tmp_path / "none" / "q.jsonl", QUESTIONS)
