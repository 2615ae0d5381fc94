"""Files of others: whatever they hold, they are read or refused by a message that names the place.

`make fuzz` does the same for ten minutes.
"""

import csv
import json
import zipfile

import pytest

from benchmarks import fuzz
from benchmarks.fuzz_inputs import Hostile
from benchmarks.fuzz_readers import readers
from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.minimal_pairs import read_minimal_pairs
from compmod_jax.data.qa.file_sets import QASet
from compmod_jax.data.sources.documents import TextDocuments
from compmod_jax.data.sources.text import matching_files

READERS = readers()
NUMBER = "9" * 5000  # more digits than Python turns into an integer


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused_with_their_name(name, tmp_path):
  for file, content in READERS[name].files.items():
    (tmp_path / file).write_bytes(content)
  assert READERS[name].read(tmp_path) == 0  # what is right is read whole
  count = fuzz.Count()
  fuzz.file_turn(name, READERS[name], 1, tmp_path / "damaged")(count)
  assert count.lines > 0
  assert not count.failed, count.kept


def test_the_same_seed_gives_the_same_damage():
  content = READERS["gulordava"].files["pairs.txt"]
  once, again, other = (Hostile(seed) for seed in ("1", "1", "2"))
  damaged = [one.damaged_lines(content) for one in (once, again, other)]
  assert damaged[0] == damaged[1] != damaged[2]


def test_what_must_not_be_is_counted_and_fails(tmp_path):
  content = b"a\nb\n"

  def crashing(folder):
    raise RecursionError("too deep")

  def losing(folder):
    return 2

  def silent(folder):
    raise DataError("something is wrong somewhere.")

  for read, field in ((crashing, "tracebacks"), (losing, "lost_lines"), (silent, "unplaced")):
    count = fuzz.Count()
    reader = fuzz.Reader({"a.txt": content}, read)
    fuzz.file_turn("a", reader, 0, tmp_path / field, files=2)(count)
    assert count.failed
    assert getattr(count, field) == (4 if field == "lost_lines" else 2)
    found = fuzz.as_json({"a": count}, {}, 1.0)
    assert found["sums"][field] == getattr(count, field)
    assert found["readers"]["a"]["kept"]
    assert count.kept[0] in fuzz.table({"a": count})


def test_the_program_writes_its_figures_and_fails_where_a_line_is_lost(tmp_path, monkeypatch):
  place = tmp_path / "results" / "fuzz.json"
  options = ["--seconds", "0", "--lines", "30", "--only", "blimp", "SCAN", "--json", str(place)]
  assert fuzz.main(options) == 0
  found = json.loads(place.read_text())
  assert set(found["readers"]) == {"blimp", "SCAN commands"}
  assert found["least_lines"] >= 30
  assert (
    found["sums"]["tracebacks"] == found["sums"]["lost_lines"] == found["sums"]["unplaced"] == 0
  )

  def losing(count):
    count.lines += 30
    count.lost_lines += 1

  monkeypatch.setattr(fuzz, "turns", lambda seed, folder, only: {"blimp": losing})
  assert fuzz.main(options) == 1
  assert json.loads(place.read_text())["sums"]["lost_lines"] == 1


GULORDAVA = "pattern\tconstr_id\tsent_id\tform\tclass\ttype\tprefix\tn_attr\n"
LINZEN = "orig_sentence\tverb_index\tverb_pos\tn_diff_intervening\n"


def written(folder, text):
  (folder / "pairs.txt").write_text(text)
  return str(folder / "pairs.txt")


def test_a_quote_that_is_a_word_swallows_no_lines(tmp_path):
  rows = [
    ["p", str(n), "1", form, kind, "original", '" the dog', "1"]
    for n in range(3)
    for form, kind in (("sleeps", "correct"), ("sleep", "wrong"))
  ]
  plain = GULORDAVA + "".join("\t".join(row) + "\n" for row in rows)
  pairs = read_minimal_pairs("gulordava", written(tmp_path, plain))
  assert [pair.good for pair in pairs] == ['" the dog sleeps'] * 3
  assert [pair.where for pair in pairs] == [f"pairs.txt:{line}" for line in (2, 4, 6)]
  # A program that writes tables puts such columns into quotes.
  with open(tmp_path / "quoted.txt", "w", newline="") as file:
    csv.writer(file, delimiter="\t").writerows([GULORDAVA.strip().split("\t"), *rows])
  quoted = read_minimal_pairs("gulordava", str(tmp_path / "quoted.txt"))
  assert [pair.good for pair in quoted] == ['" the dog sleeps'] * 3


@pytest.mark.parametrize(
  ("kind", "text", "message"),
  [
    ("gulordava", GULORDAVA + "p\t1\t1\n", r"pairs\.txt:2 has 3 tab-separated columns for 8"),
    ("gulordava", GULORDAVA + "\n" + "p\t" * 9 + "\n", r"pairs\.txt:3 has 10 tab-separated"),
    ("linzen", LINZEN + "a b\t0\tVBZ\t1\n", r"pairs\.txt:2: verb_index is '0'"),
    ("linzen", LINZEN + "a b\t-1\tVBZ\t1\n", r"pairs\.txt:2: verb_index is '-1'"),
    ("linzen", LINZEN + f"a b\t{NUMBER}\tVBZ\t1\n", r"pairs\.txt:2: verb_index is '9{40}'"),
    ("linzen", LINZEN + "a b\t²\tVBZ\t1\n", r"pairs\.txt:2: verb_index is '²'"),
    ("linzen", LINZEN + "\n\na b\t\n", r"pairs\.txt:4 has 2 tab-separated columns"),
    ("blimp", "\n" + "[" * 100_000, r"pairs\.txt:2 is no JSON"),
    ("blimp", '{"sentence_good": 1, "sentence_bad": "a", "UID": "b"}', "each of them text"),
    ("blimp", '{"sentence_good": null, "sentence_bad": ["a"], "UID": {}}', "each of them text"),
    ("blimp", "5\n", r"pairs\.txt:1 is no item of BLiMP"),
    ("blimp", rf'{{"a": {NUMBER}}}', r"pairs\.txt:1 is no JSON .*4,300 digits"),
    ("blimp", r'{"UID": "\ud800"}', r"pairs\.txt:1 is no JSON .*\\ud800, half of a character"),
  ],
)
def test_minimal_pairs_that_are_none_are_named_with_file_and_line(tmp_path, kind, text, message):
  with pytest.raises(DataError, match=message):
    read_minimal_pairs(kind, written(tmp_path, text))


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (r'{"text": "\udc00"}', r"a\.jsonl:2 is no JSON object .*half of a character"),
    (
      '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}",
      r"a\.jsonl:2 is no JSON object .*deeper than 100",
    ),
    (f'{{"text": {NUMBER}}}', r"a\.jsonl:2 is no JSON object .*4,300 digits"),
    ("null", r"a\.jsonl:2 is no JSON object with a field 'text'"),
    ('["text"]', r"a\.jsonl:2 is no JSON object with a field 'text'"),
    ('{"text": [["a"]]}', r"a\.jsonl:2: field 'text' holds \"\[\['a'\]\]\""),
  ],
)
def test_documents_in_json_that_are_none_are_named_with_file_and_line(tmp_path, line, message):
  (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line + "\n")
  with pytest.raises(DataError, match=message):
    list(TextDocuments(str(tmp_path), valid=("none",)).load("train"))


def test_labels_and_places_of_thousands_of_digits_are_no_option_and_no_place(tmp_path):
  row = {"sentence": "_ ran", "option1": "A", "option2": "B"}
  lines = [row | {"answer": label} for label in (NUMBER, "2")]
  (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  found = QASet("w", "winogrande", str(tmp_path), valid=("q.jsonl",)).load("valid")
  assert len(found) == 1
  assert "1 question was left out: no option is marked as right" in found.notes[0]
  ((name, content),) = READERS["questions: subjqa"].files.items()
  (tmp_path / name).write_bytes(content.replace(b"(0, 7)", f"(0, {NUMBER})".encode()))
  with pytest.raises(DataError, match=r"q\.csv:2.*human_ans_indices.*pair of whole numbers"):
    QASet("s", "subjqa", str(tmp_path), valid=(name,)).load("valid")


def test_a_set_without_any_question_names_its_files(tmp_path):
  (tmp_path / "q.json").write_text('{"data": []}')
  with pytest.raises(DataError, match=r"valid of s \(q\.json\) has no question"):
    QASet("s", "squad", str(tmp_path), valid=("q.json",)).load("valid")


def test_a_question_of_more_options_than_labels_is_left_out_or_named(tmp_path):
  row = {"question": "Which?", "options": list("abcdefghi"), "answer": 1}
  lines = [row, row | {"options": list("abcdefgh")}]
  (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  found = QASet("o", "options", str(tmp_path), valid=("q.jsonl",)).load("valid")
  assert [len(question.options) for question in found.items] == [8]
  assert "1 question was left out: it has over 8 options" in found.notes[0]
  own = {"format": "multiple_choice", "question": "Which?", "options": row["options"], "label": 1}
  (tmp_path / "own.jsonl").write_text("\n" + json.dumps(own) + "\n")
  with pytest.raises(
    DataError, match=r"own\.jsonl:2: options has 9 entries; there are labels for 8"
  ):
    QASet("j", "jsonl", str(tmp_path), valid=("own.jsonl",)).load("valid")


@pytest.mark.parametrize(
  ("reader", "name", "text"),
  [
    ("jsonl", "q.jsonl", json.dumps({"format": "x" * 10_000, "question": "?"})),
    ("jsonl", "q.jsonl", json.dumps({"y" * 10_000: 1})),
    (
      "jsonl",
      "q.jsonl",
      json.dumps({"format": "yes_no", "question": "?", "answers": ["9" * 10_000]}),
    ),
    ("boolq", "q.jsonl", json.dumps({str(n): "x" for n in range(10_000)})),
    ("boolq", "q.jsonl", json.dumps({"question": ["x"] * 10_000})),
    ("subjqa", "q.csv", "a," * 10_000),
  ],
)
def test_messages_show_no_more_of_a_value_than_a_person_reads(tmp_path, reader, name, text):
  (tmp_path / name).write_text(text)
  with pytest.raises(DataError, match=rf"{name}:1") as caught:
    QASet("s", reader, str(tmp_path), valid=(name,)).load("valid")
  assert len(str(caught.value)) < 1000


def test_an_archive_whose_file_has_no_name_is_refused_with_its_own(tmp_path):
  with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
    file.writestr("q.jsonl", "{}")
  content = bytearray((tmp_path / "a.zip").read_bytes())
  entry = content.index(b"PK\x01\x02")
  name, comment = entry + 28, entry + 32  # their lengths
  content[name], content[comment] = 0, content[name]
  (tmp_path / "a.zip").write_bytes(content)
  with pytest.raises(DataError, match=r"a\.zip is not a complete archive"):
    QASet("j", "jsonl", str(tmp_path), valid=("a.zip/*",)).load("valid")


def test_a_member_whose_name_begins_with_a_slash_stays_in_its_archive(tmp_path):
  with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
    archive.writestr("/etc/q.jsonl", json.dumps({"format": "extractive", "question": "Who?"}))
  questions = QASet("a", "jsonl", str(tmp_path), test=("a.zip/etc/q.jsonl",)).load("test")
  assert questions.where(0) == "a.zip/etc/q.jsonl:1"


@pytest.mark.parametrize("pattern", ["**x/a", "x" * 5000, "/etc/passwd", ""])
def test_patterns_that_cannot_name_files_are_an_error(tmp_path, pattern):
  (tmp_path / "a.txt").write_text("one\n")
  with pytest.raises(UserError, match="pattern"):
    matching_files(tmp_path, pattern)
  with pytest.raises(UserError):
    TextDocuments(folder=str(tmp_path), train=("a.txt",), valid=(pattern,)).load("valid")
  with pytest.raises(UserError):
    QASet("a", "jsonl", str(tmp_path), test=(pattern,)).load("test")


@pytest.mark.parametrize("name", ["facts", "spans"])
@pytest.mark.parametrize("value", ["many", 1.5, [2], True, -1])
def test_annotations_that_are_numbers_and_hold_none_are_named_with_their_line(
  tmp_path, name, value
):
  line = {"format": "extractive", "question": "Who?", "passage": "A b.", "answers": ["b"]}
  (tmp_path / "q.jsonl").write_text(json.dumps(line | {"info": {name: value}}))
  with pytest.raises(DataError, match=rf"q\.jsonl:1.*{name}.* is .*number"):
    QASet("a", "jsonl", str(tmp_path), test=("q.jsonl",)).load("test")
