"""Readers of published sets in JSON that are answered with words, on small files."""

import json

import pytest

from compmod_jax.data.base import DataError
from compmod_jax.data.qa.readers import READERS
from compmod_jax.data.qa.reading import Reading


def read(name, path):
  """(questions, places without their folder, notes)."""
  reading = Reading()
  found = list(READERS[name](path, reading))
  places = [place.removeprefix(f"{path.parent}/") for place, _ in found]
  return [question for _, question in found], places, reading.notes()


def write_json(path, content):
  path.write_text(json.dumps(content))
  return path


def article(*qas, **paragraph):
  paragraph = paragraph or {"context": "All  dogs\nbark."}
  return {
    "version": "x",
    "data": [{"title": "Dogs", "paragraphs": [{**paragraph, "qas": list(qas)}]}],
  }


def asked(*answers, **more):
  found = [{"text": text, "answer_start": 0} for text in answers]
  return {"id": "7", "question": "Who barks?", "answers": found, **more}


def test_squad_has_several_right_answers_or_none_where_it_is_impossible(tmp_path):
  content = article(
    asked("dogs", "All  dogs", "dogs"),
    asked(is_impossible=True, plausible_answers=[{"text": "cats", "answer_start": 0}]),
    asked("dogs", is_impossible=False),
  )
  questions, places, notes = read("squad", write_json(tmp_path / "dev.json", content))
  assert [question.answers for question in questions] == [("dogs", "All dogs"), (), ("dogs",)]
  assert {question.passage for question in questions} == {"All dogs bark."}
  assert questions[0].info == {"id": "7", "title": "Dogs"}
  assert places == [f"dev.json:data[0].paragraphs[0].qas[{n}]" for n in range(3)]
  assert not notes


def test_squad_questions_that_only_lack_answers_are_left_out(tmp_path):
  content = article(asked(), asked("dogs"), asked(" "), asked("dogs", question="  "))
  questions, _, notes = read("squad", write_json(tmp_path / "test.json", content))
  assert len(questions) == 1
  assert [note.partition(" (")[0] for note in notes] == [
    "2 questions were left out: no answer is given",
    "1 question was left out: the question is empty",
  ]
  assert "data[0].paragraphs[0].qas[0]" in notes[0]


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("{", r"d\.json:1 is no JSON"),
    ("[]", r"d\.json: there is \[\]; it must be an object"),
    ('{"data": {}}', "field 'data' is {}; it must be a list of objects"),
    ('{"data": [{"paragraphs": [{"qas": []}]}]}', r"data\[0\]\.paragraphs\[0\]: field 'context'"),
    (json.dumps(article(asked(1))), r"qas\[0\]\.answers\[0\]: field 'text' is 1; it must be text"),
    (json.dumps(article(asked(is_impossible=0))), "field 'is_impossible' is 0; it must be true or"),
  ],
)
def test_what_is_no_squad_is_named_with_its_place_and_a_remedy(tmp_path, content, message):
  (tmp_path / "d.json").write_text(content)
  with pytest.raises(DataError, match=message) as error:
    read("squad", tmp_path / "d.json")
  assert "mend the file" in str(error.value) or "fetch it again" in str(error.value)


def test_quoref_answers_of_several_spans_are_one_answer(tmp_path):
  content = article(asked("Traci", "Gibson", original_id="9"), asked("Traci"), asked())
  questions, _, notes = read("quoref", write_json(tmp_path / "q.json", content))
  assert [question.answers for question in questions] == [("Traci, Gibson",), ("Traci",)]
  assert questions[0].info == {"id": "7", "original_id": "9", "title": "Dogs", "spans": 2}
  assert len(notes) == 1


def test_ropes_joins_background_and_situation(tmp_path):
  content = article(asked("Bob"), background="Boys grow.", situation="Bob  is a boy.")
  questions, _, _ = read("ropes", write_json(tmp_path / "r.json", content))
  assert questions[0].passage == "Boys grow. Bob is a boy."
  assert (questions[0].format, questions[0].answers) == ("extractive", ("Bob",))


def test_boolq_reads_the_published_fields_and_superglue_s(tmp_path):
  common = {"question": "do dogs bark", "passage": "All dogs bark."}
  lines = [
    {**common, "title": "Dog", "answer": True},
    {**common, "idx": 3, "label": False},
    {**common, "idx": 4},
  ]
  path = tmp_path / "b.jsonl"
  path.write_text("\n".join(map(json.dumps, lines)))
  questions, places, notes = read("boolq", path)
  assert [question.answer for question in questions] == ["yes", "no"]
  assert [question.info for question in questions] == [{"title": "Dog"}, {"idx": 3}]
  assert places == ["b.jsonl:1", "b.jsonl:2"]
  assert notes[0].startswith("1 question was left out: no answer is given")
  path.write_text(json.dumps({**common, "label": 1}))
  with pytest.raises(DataError, match=r"b\.jsonl:1: field 'label' is 1; it must be true or false"):
    read("boolq", path)


def test_boolq_s_contrast_set_leaves_out_its_heading_and_blank_questions(tmp_path):
  heading = {
    "title": "Title",
    "paragraph": "Paragraph",
    "question": "Question",
    "answer": "Gold Answer",
    "perturbed_questions": [{"perturbed_q": "Perturbed Q", "answer": "New Answer"}],
  }
  changed = [("do cats bark", "FALSE"), ("do dogs bark", "TRUE "), ("", "")]
  item = {
    **heading,
    "title": "Dog",
    "question": "is it so",
    "perturbed_questions": [{"perturbed_q": q, "answer": a} for q, a in changed],
  }
  path = write_json(tmp_path / "boolq_perturbed.json", {"data": [heading, item]})
  questions, places, notes = read("boolq_contrast", path)
  assert [(question.question, question.answer) for question in questions] == [
    ("do cats bark", "no"),
    ("do dogs bark", "yes"),
  ]
  assert questions[0].info == {"title": "Dog", "original": "is it so"}
  assert places[0].endswith("data[1].perturbed_questions[0]")
  assert notes[0].startswith("2 questions were left out: no answer is given")


def number(value="", spans=(), **date):
  date = {"day": "", "month": "", "year": ""} | date
  return {"number": value, "date": date, "spans": list(spans)}


def test_drop_answers_are_numbers_dates_or_spans(tmp_path):
  pairs = [
    {"answer": number("2"), "validated_answers": [number("2"), number(spans=["two"]), number()]},
    {"answer": number(month="March", year="1565")},
    {"answer": number(spans=["dogs", "cats"]), "original_question": "Who?"},
    {"answer": number()},
    {},
  ]
  pairs = [{"question": "How many?", "query_id": f"q{n}", **pair} for n, pair in enumerate(pairs)]
  content = {"history_1": {"passage": "Two dogs.", "qa_pairs": pairs}}
  questions, places, notes = read("drop", write_json(tmp_path / "d.json", content))
  assert [question.answers for question in questions] == [
    ("2", "two"),
    ("March 1565",),
    ("dogs, cats",),
  ]
  assert {question.format for question in questions} == {"abstractive"}
  assert [question.info["kind"] for question in questions] == ["number", "date", "spans"]
  assert questions[2].info["original"] == "Who?"
  assert places[1] == "d.json:history_1.qa_pairs[1]"
  assert notes[0].startswith("2 questions were left out: no answer is given")
