"""Readers of published multiple-choice sets, on small files in their formats."""

import gzip
import io
import json
import tarfile
import zipfile

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.readers import READERS
from compmod_jax.data.qa.reading import Reading


def write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  if not isinstance(content, str):
    content = "".join(json.dumps(item) + "\n" for item in content)
  data = content.encode()
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  return path


def read(name, path):
  """(questions, places without their folder, notes)."""
  reading = Reading()
  found = list(READERS[name](path, reading))
  places = [place.removeprefix(f"{path.parent}/") for place, _ in found]
  return [question for _, question in found], places, reading.notes()


PASSAGE = {
  "id": "high7.txt",
  "article": "Dogs  bark.\nCats do not.",
  "questions": ["What barks?", "A _ barks."],
  "options": [["cats", "dogs", "rain", "sun"], ["cat", "mouse", "fly", "dog"]],
  "answers": ["B", "D"],
}


def test_race_has_an_object_for_each_passage(tmp_path):
  path = write(tmp_path / "test" / "high" / "7.txt", json.dumps(PASSAGE))
  questions, places, notes = read("race", path)
  assert places == ["7.txt[0]", "7.txt[1]"]
  assert [question.label for question in questions] == [2, 4]
  assert questions[0].options == ("cats", "dogs", "rain", "sun")
  assert {question.passage for question in questions} == {"Dogs bark. Cats do not."}
  assert questions[1].info == {"id": "high7.txt", "level": "high"}
  assert not notes


def test_race_s_level_may_be_that_of_the_folder(tmp_path):
  passage = {**PASSAGE, "id": "7"}
  path = write(tmp_path / "middle" / "7.txt", json.dumps(passage))
  assert read("race", path)[0][0].info["level"] == "middle"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_race_may_be_json_lines_of_passages_or_questions(tmp_path, name):
  single = {
    "example_id": "middle3.txt",
    "article": "Dogs bark.",
    "question": "What barks?",
    "options": ["cats", "dogs"],
    "answer": "B",
  }
  questions, places, _ = read("race", write(tmp_path / name, [PASSAGE, single]))
  assert places == [f"{name}:1[0]", f"{name}:1[1]", f"{name}:2"]
  assert (questions[2].label, questions[2].info["level"]) == (2, "middle")


def test_questions_without_a_right_option_are_left_out_and_counted(tmp_path):
  passage = {**PASSAGE, "answers": ["", "E"]}
  lines = [passage, {**PASSAGE, "answers": []}, PASSAGE]
  questions, _, notes = read("race", write(tmp_path / "a.jsonl", lines))
  assert len(questions) == 2
  assert notes == (
    f"4 questions were left out: no option is marked as right (first: {tmp_path}/a.jsonl:1[0]).",
  )


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"answers": ["A"]}, "there are 2 questions, 2 lists of options and 1 answers"),
    ({"options": [["a", "b"], "cd"]}, "field 'options' is 'cd'; it must be a list of texts"),
    ({"article": None}, "field 'article' is missing; the fields are: 'id', 'article'"),
    ({"questions": "What?"}, "field 'questions' is 'What\\?'; it must be a list of texts"),
    ({"options": [["a"], ["a", "b", "c", "d"]], "answers": ["A", "D"]}, "options has 1 entries"),
  ],
)
def test_what_is_no_race_is_named_with_its_place_and_a_remedy(tmp_path, change, message):
  path = write(tmp_path / "a.jsonl", [PASSAGE, {**PASSAGE, **change}])
  with pytest.raises(DataError, match=message) as error:
    read("race", path)
  assert "a.jsonl:2" in str(error.value)
  assert "mend" in str(error.value).lower()


STORY = ["mc1.train.0", "Author: 1", r"A dog\newlinebarked.\tabEnd."]
ASKED = ["one: Who barked?", "cat", "dog", "fly", "sun", "multiple: Why?", "a", "b", "c", "d"]


def test_mctest_reads_both_files_and_keeps_what_a_question_needs(tmp_path):
  write(tmp_path / "mc1.train.ans", "B\tD\r\nA\tA\r\n")
  path = write(
    tmp_path / "mc1.train.tsv", "\t".join(STORY + ASKED) + "\n" + "\t".join(STORY + ASKED)
  )
  questions, places, notes = read("mctest", path)
  assert places == [f"mc1.train.tsv:{line}[{n}]" for line in (1, 2) for n in (0, 1)]
  assert [question.label for question in questions] == [2, 4, 1, 1]
  assert [question.question for question in questions[:2]] == ["Who barked?", "Why?"]
  assert questions[0].passage == "A dog barked. End."
  assert questions[0].options == ("cat", "dog", "fly", "sun")
  assert [question.info["sentences"] for question in questions[:2]] == ["one", "multiple"]
  assert not notes


@pytest.mark.parametrize(
  ("lines", "letters", "message"),
  [
    (STORY + ASKED[:-1], "B\tD\n", r"m\.tsv:1 has 12 tab-separated columns"),
    (STORY + ASKED, "B\n", r"m\.ans:1 has 1 letters for 2 questions"),
    (STORY + ASKED, "B\tD\nA\tA\n", r"m\.ans has 2 lines for the 1 stories"),
  ],
)
def test_mctest_files_that_do_not_fit_are_named(tmp_path, lines, letters, message):
  write(tmp_path / "m.ans", letters)
  with pytest.raises(DataError, match=message):
    read("mctest", write(tmp_path / "m.tsv", "\t".join(lines) + "\n"))


def test_a_missing_file_of_answers_is_named(tmp_path):
  path = write(tmp_path / "m.tsv", "\t".join(STORY + ASKED))
  with pytest.raises(UserError, match=r"m\.tsv needs m\.ans beside it, and there is none; put it"):
    read("mctest", path)


def stem(key, labels="ABCD", **more):
  choices = [{"text": f"option {label}", "label": label} for label in labels]
  question = {"stem": "What barks?", "choices": choices}
  return {"id": "q1", "question": question, "answerKey": key, **more}


def test_arc_marks_the_right_option_by_its_label(tmp_path):
  lines = [stem("C"), stem("4", "1234"), stem("E", "ABCDE"), stem("A", fact1="dogs bark")]
  lines[2]["question"]["question_concept"] = "dog"
  questions, places, _ = read("arc", write(tmp_path / "a.jsonl", lines))
  assert [question.label for question in questions] == [3, 4, 5, 1]
  assert questions[1].options == ("option 1", "option 2", "option 3", "option 4")
  assert questions[2].info == {"id": "q1", "question_concept": "dog"}
  assert questions[3].info == {"id": "q1", "fact1": "dogs bark"}
  assert places == [f"a.jsonl:{n}" for n in range(1, 5)]


def test_arc_without_a_key_or_with_a_foreign_one_is_left_out(tmp_path):
  hidden = stem("A")
  del hidden["answerKey"]
  questions, _, notes = read("arc", write(tmp_path / "a.jsonl", [hidden, stem("F"), stem("B")]))
  assert len(questions) == 1
  assert notes[0].startswith("2 questions were left out: no option is marked as right")


def test_plain_options_count_answers_from_0(tmp_path):
  lines = [{"question": "q", "options": ["a", "b"], "answer": n} for n in (0, 1, 2, None)]
  questions, _, notes = read("options", write(tmp_path / "a.jsonl.gz", lines))
  assert [question.label for question in questions] == [1, 2]
  assert notes[0].startswith("2 questions were left out")
  with pytest.raises(DataError, match="field 'answer' is '0'; it must be a whole number"):
    read("options", write(tmp_path / "b.jsonl", [{**lines[0], "answer": "0"}]))


def test_piqa_labels_count_from_0_and_siqa_s_from_1(tmp_path):
  goal = {"goal": "To bark", "sol1": "be a dog", "sol2": "be a cat"}
  write(tmp_path / "p-labels.lst", "1\n0\n\n".removesuffix("\n"))
  questions, places, _ = read("piqa", write(tmp_path / "p.jsonl", [goal, goal]))
  assert [question.label for question in questions] == [2, 1]
  assert questions[0].options == ("be a dog", "be a cat")
  assert places == ["p.jsonl:1", "p.jsonl:2"]
  social = {"context": "A dog.", "question": "Why?", "answerA": "a", "answerB": "b", "answerC": "c"}
  write(tmp_path / "s-labels.lst.gz", "3\n1\n4\n")
  questions, _, notes = read("siqa", write(tmp_path / "s.jsonl.gz", [social] * 3))
  assert [question.label for question in questions] == [3, 1]
  assert (questions[0].passage, questions[0].options) == ("A dog.", ("a", "b", "c"))
  assert notes[0].startswith("1 question was left out")


def test_labels_that_do_not_fit_the_questions_are_named(tmp_path):
  path = write(tmp_path / "p.jsonl", [{"goal": "g", "sol1": "a", "sol2": "b"}] * 2)
  with pytest.raises(UserError, match=r"needs p-labels\.lst beside it"):
    read("piqa", path)
  write(tmp_path / "p-labels.lst", "1\n")
  with pytest.raises(DataError, match=r"p-labels\.lst has 1 lines for the 2 questions of p\.jsonl"):
    read("piqa", path)


def test_winogrande_keeps_twins_in_one_group_and_leaves_out_hidden_answers(tmp_path):
  line = {"qID": "3FC-1", "sentence": "A beat B so _ won.", "option1": "A", "option2": "B"}
  lines = [{**line, "answer": "1"}, {**line, "qID": "3FC-2", "answer": "2"}, {**line, "answer": ""}]
  questions, _, notes = read("winogrande", write(tmp_path / "w.jsonl", [*lines, line]))
  assert [question.label for question in questions] == [1, 2]
  assert questions[0].question == "A beat B so _ won."
  assert {question.info["group"] for question in questions} == {"3FC"}
  assert notes[0].startswith("2 questions were left out")


def test_a_reader_reads_inside_archives_as_it_does_in_folders(tmp_path):
  goal = json.dumps({"goal": "To bark", "sol1": "be a dog", "sol2": "be a cat"})
  with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
    archive.writestr("in/train.jsonl", goal)
    archive.writestr("in/train-labels.lst", "1\n")
  questions, places, _ = read("piqa", tmp_path / "p.zip" / "in" / "train.jsonl")
  assert [question.label for question in questions] == [2]
  assert places == ["train.jsonl:1"]
  data = gzip.compress(json.dumps(PASSAGE).encode() + b"\n")
  with tarfile.open(tmp_path / "r.tar.gz", "w:gz") as tar:
    member = tarfile.TarInfo("./RACE/dev.jsonl.gz")
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
  assert len(read("race", tmp_path / "r.tar.gz" / "RACE" / "dev.jsonl.gz")[0]) == 2
