"""Sets of questions: their splits, what is cut, and the real ones."""

import collections
import json
import re
import zipfile

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.file_sets import DEVELOPMENT_SETS, QASet


def lines(path, passages, questions=3):
  """A file of the project's own format with some questions on each passage."""
  path.write_text(
    "".join(
      json.dumps({"format": "extractive", "question": f"q{n}?", "passage": f"passage {passage}"})
      + "\n"
      for n in range(questions)
      for passage in passages
    )
  )


def passages(questions):
  return {question.passage for question in questions.items}


def test_published_splits_are_read_as_they_are(tmp_path):
  for name, numbers in (("train.a", [1, 2]), ("train.b", [3]), ("dev", [1]), ("test", [5])):
    lines(tmp_path / f"{name}.jsonl", numbers)
  data = QASet("toy", "jsonl", str(tmp_path), ("train.*",), ("dev.jsonl",), ("test.jsonl",))
  assert data.splits() == ("train", "valid", "test")
  assert [len(data.load(split)) for split in data.splits()] == [9, 3, 3]
  train = data.load("train")
  assert [train.where(number) for number in (0, 8)] == ["train.a.jsonl:1", "train.b.jsonl:3"]
  assert train.notes == ()
  assert "toy" in data.describe()


def test_splits_that_are_missing_are_cut_by_passage(tmp_path):
  lines(tmp_path / "all.jsonl", range(300))
  data = QASet("toy", "jsonl", str(tmp_path), train=("all.jsonl",), held_out=0.2)
  parts = [data.load(split) for split in data.splits()]
  assert data.splits() == ("train", "valid", "test")
  assert sum(map(len, parts)) == 900
  assert sum(len(passages(part)) for part in parts) == 300
  assert all(len(part) == 3 * len(passages(part)) for part in parts)
  assert all(0.12 < len(part) / 900 < 0.28 for part in parts[1:])


def test_a_cut_does_not_depend_on_order_on_other_passages_or_on_own_test_files(tmp_path):
  lines(tmp_path / "a.jsonl", range(100))
  lines(tmp_path / "b.jsonl", reversed(range(50)))
  lines(tmp_path / "test.jsonl", [0])
  one = QASet("a", "jsonl", str(tmp_path), train=("a.jsonl",))
  two = QASet("b", "jsonl", str(tmp_path), train=("b.jsonl",))
  own = QASet("a", "jsonl", str(tmp_path), train=("a.jsonl",), test=("test.jsonl",))
  few = {f"passage {number}" for number in range(50)}
  assert passages(one.load("valid")) & few == passages(two.load("valid"))
  assert own.splits() == ("train", "valid", "test")
  assert passages(own.load("valid")) == passages(one.load("valid"))
  assert passages(own.load("train")) == passages(one.load("train")) | passages(one.load("test"))
  assert passages(own.load("test")) == {"passage 0"}


def test_questions_of_a_group_stay_together(tmp_path):
  (tmp_path / "q.jsonl").write_text(
    "".join(
      json.dumps({"format": "extractive", "question": f"{n}?", "info": {"group": str(n // 5)}})
      + "\n"
      for n in range(500)
    )
  )
  data = QASet("toy", "jsonl", str(tmp_path), train=("q.jsonl",))
  groups = [
    {question.info["group"] for question in data.load(split).items} for split in data.splits()
  ]
  assert sum(map(len, groups)) == 100


def test_training_without_own_test_files_has_none_and_evaluation_needs_no_training(tmp_path):
  lines(tmp_path / "a.jsonl", range(9))
  folder = str(tmp_path)
  assert QASet("a", "jsonl", folder, ("a.jsonl",), ("a.jsonl",)).splits() == ("train", "valid")
  unseen = QASet("a", "jsonl", folder, test=("a.jsonl",))
  assert unseen.splits() == ("test",)
  assert len(unseen.load("test")) == 27
  with pytest.raises(UserError, match="split is 'train'; it must be one of: test"):
    unseen.load("train")


def test_training_leaves_out_the_files_of_other_splits(tmp_path):
  for number, name in enumerate(("one", "two", "dev")):
    lines(tmp_path / f"{name}.jsonl", [number])
  data = QASet("a", "jsonl", str(tmp_path), train=("*.jsonl", "one.jsonl"), valid=("dev*",))
  assert passages(data.load("train")) == {"passage 0", "passage 1"}
  assert len(data.load("train")) == 6


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_file_that_is_training_and_another_split_is_named_with_the_remedy(tmp_path, split):
  lines(tmp_path / "all.jsonl", [1])
  data = QASet("a", "jsonl", str(tmp_path), train=("*.jsonl",), **{split: ("all.jsonl",)})
  with pytest.raises(UserError, match=r"train of a has no file of its own: all\.jsonl is in valid"):
    data.load("train")
  assert len(data.load(split)) == 3


@pytest.mark.parametrize(("train", "valid"), [("link", "all"), ("all", "link"), ("all", "./all")])
def test_a_file_under_another_name_is_the_same_file(tmp_path, train, valid):
  lines(tmp_path / "all.jsonl", [1])
  (tmp_path / "link.jsonl").symlink_to(tmp_path / "all.jsonl")
  data = QASet("a", "jsonl", str(tmp_path), train=(f"{train}.jsonl",), valid=(f"{valid}.jsonl",))
  with pytest.raises(UserError, match="train of a has no file of its own"):
    data.load("train")


def test_a_cut_that_leaves_a_split_without_questions_says_so(tmp_path):
  lines(tmp_path / "all.jsonl", [1])  # one passage, which has one place among three splits
  data = QASet("a", "jsonl", str(tmp_path), train=("all.jsonl",))
  failed = []
  for split in data.splits():
    try:
      assert len(data.load(split)) == 3
    except DataError as error:
      failed.append(str(error))
  assert len(failed) == 2
  for message in failed:
    assert re.search(r"all 3 questions that can be used fall into other splits", message)
    assert "raise held_out" in message
    assert "Nothing was left out" not in message


def test_files_may_lie_in_an_archive(tmp_path):
  lines(tmp_path / "a.jsonl", [1])
  with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
    archive.write(tmp_path / "a.jsonl", "deep/a.jsonl")
  questions = QASet("a", "jsonl", str(tmp_path), test=("x.zip/*/a.jsonl",)).load("test")
  assert questions.where(0) == "x.zip/deep/a.jsonl:1"


def test_what_is_left_out_is_in_the_notes_and_a_split_without_questions_is_an_error(tmp_path):
  line = {"question": "q", "options": ["a", "b"]}
  (tmp_path / "a.jsonl").write_text(json.dumps(line | {"answer": 0}) + "\n" + json.dumps(line))
  (tmp_path / "b.jsonl").write_text(json.dumps(line))
  data = QASet("a", "options", str(tmp_path), test=("a.jsonl",))
  assert "1 question was left out: no option is marked as right" in data.load("test").notes[0]
  data = QASet("hidden", "options", str(tmp_path), test=("b.jsonl",))
  with pytest.raises(
    DataError, match=r"test of hidden \(b.jsonl\) has no question.*1 question was"
  ):
    data.load("test")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"reader": "sqad"}, "reader is 'sqad'.*Did you mean 'squad'"),
    ({"name": ""}, "name is empty"),
    ({"train": ()}, "train, valid and test of toy are all empty"),
    ({"train": "a.jsonl"}, r"train is 'a\.jsonl'; it must be a tuple"),
    ({"held_out": 0.5}, r"held_out is 0\.5"),
  ],
)
def test_bad_fields_are_named(fields, message):
  with pytest.raises(UserError, match=message):
    QASet(**{"name": "toy", "reader": "jsonl", "folder": ".", "train": ("a",), **fields})


def test_files_that_are_not_there_are_named(tmp_path, monkeypatch):
  lines(tmp_path / "a.jsonl", [1])
  data = QASet("toy", "jsonl", str(tmp_path), train=("a.jsonl", "b.jsonl"), valid=("a.jsonl",))
  with pytest.raises(UserError, match=r"is named b\.jsonl; there are: a\.jsonl"):
    data.load("train")
  monkeypatch.delenv("COMPMOD_DATA", raising=False)
  with pytest.raises(UserError, match="the environment variable COMPMOD_DATA is not set"):
    DEVELOPMENT_SETS["boolq"].load("train")


# (questions, of them without answer) of every split.
REAL = {
  "boolq": {"train": (1827, 0), "valid": (233, 0), "test": (210, 0)},
  "race_middle": {"train": (1118, 0), "valid": (168, 0), "test": (150, 0)},
  "mctest": {"train": (1480, 0), "valid": (320, 0), "test": (240, 0)},
  "arc_easy": {"train": (2015, 0), "valid": (236, 0), "test": (2376, 0)},
  "arc_challenge": {"train": (988, 0), "valid": (131, 0), "test": (1172, 0)},
  "openbookqa": {"train": (4467, 0), "valid": (490, 0), "test": (500, 0)},
  "piqa": {"test": (1838, 0)},
  "siqa": {"valid": (1954, 0)},
  "winogrande": {"valid": (1267, 0)},
  "fairytaleqa": {"train": (8548, 0), "valid": (1025, 0)},
  "subjqa_electronics": {"train": (1295, 598), "valid": (255, 156), "test": (358, 120)},
  "subjqa": {"valid": (970, 498), "test": (1727, 579)},
}


@pytest.mark.real_data
@pytest.mark.parametrize("name", REAL)
def test_real_sets_have_their_published_sizes_and_nothing_is_left_out(name):
  for split, (count, unanswerable) in REAL[name].items():
    questions = DEVELOPMENT_SETS[name].load(split)
    assert len(questions) == count
    assert questions.notes == ()
    assert sum(question.answer == "" for question in questions.items) == unanswerable


@pytest.mark.real_data
def test_real_questions_are_what_their_files_say():
  first = {
    name: DEVELOPMENT_SETS[name].load(split).items[0]
    for name, split in (("mctest", "valid"), ("winogrande", "valid"), ("siqa", "valid"))
  }
  assert first["mctest"].question == "Who was having a birthday?"
  assert first["mctest"].options == ("Jessie Bear", "no one", "Lion", "Tiger")
  assert (first["mctest"].answer, first["mctest"].info["sentences"]) == ("(1)", "one")
  assert first["winogrande"].question.startswith("Sarah was a much better surgeon than Maria so _")
  assert first["winogrande"].options[first["winogrande"].label - 1] == "Maria"
  assert first["siqa"].answer == "(3)"


@pytest.mark.real_data
def test_answers_to_real_extractive_questions_stand_in_their_passages():
  questions = DEVELOPMENT_SETS["subjqa"].load("valid").items
  inside = [answer in question.passage for question in questions for answer in question.answers]
  assert sum(inside) / len(inside) > 0.97
  assert not any("ANSWERNOTFOUND" in question.passage for question in questions)


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["boolq", "race_middle"])
def test_no_real_passage_is_on_both_sides_of_a_cut(name):
  data = DEVELOPMENT_SETS[name]
  seen = collections.Counter(
    passage for split in data.splits() for passage in passages(data.load(split))
  )
  assert set(seen.values()) == {1}
