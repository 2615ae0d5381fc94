"""Expressions: their answers by other means, what each part holds, and that parts share nothing."""

import dataclasses
import functools
import itertools
import re
import statistics

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic.expressions import (
  ArithmeticData,
  ListOpsData,
  TableLookupData,
  steps_of_brackets,
)

DATA = {
  "tables": TableLookupData(train=3_000, scored=200),
  "tables, forward": TableLookupData(train=3_000, scored=200, backward=False),
  "arithmetic": ArithmeticData(train=3_000, scored=200),
  "lists": ListOpsData(train=3_000, scored=200),
}
TREES = ("arithmetic", "lists")


def depths(data, part: str) -> set[int]:
  return {int(one["depth"]) for one in data.load(part).info or ()}


@pytest.mark.parametrize("name", DATA)
def test_no_source_is_in_two_parts(name):
  data = DATA[name]
  seen: set[str] = set()
  for part in data.splits():
    sources = data.load(part).source
    assert len(sources) >= 200
    assert not seen & set(sources), part
    seen |= set(sources)
  assert data.splits()[:3] == ("train", "valid", "test")


@pytest.mark.parametrize("name", DATA)
def test_parts_are_functions_of_the_fields_alone(name):
  data = DATA[name]
  other = type(data)(**{**vars(data), "seed": 1})
  assert data.load("test").source != other.load("test").source
  # The others choose before training does, and each has its own draws.
  larger = type(data)(**{**vars(data), "train": 3_100})
  assert larger.load("test").source == data.load("test").source
  assert larger.load("test").where(3) == f"{data.name}:test[3]"


@pytest.mark.parametrize("backward", [True, False])
def test_tables_are_applied_one_after_the_other(backward):
  data = TableLookupData(train=2_000, scored=200, backward=backward)
  for part in data.splits():
    pairs = data.load(part)
    for source, target in zip(pairs.source[:60], pairs.target[:60], strict=True):
      words = source.split()[::-1] if backward else source.split()
      value, *functions = words
      for letter in functions:
        value = data.table(letter)[value]
      assert value == target


def test_tables_are_bijections_of_three_bits():
  tables = [DATA["tables"].table(letter) for letter in "abcdefgh"]
  for table in tables:
    assert len(table) == len(set(table.values())) == 8
    assert set(table) == set(table.values())
  assert len({tuple(sorted(table.items())) for table in tables}) == 8


def test_parts_of_tables_hold_what_they_say():
  data = DATA["tables"]
  functions = {
    part: [tuple(source.split()[:-1]) for source in data.load(part).source]
    for part in data.splits()
  }
  composed = {words for words in functions["train"] if len(words) > 1}
  assert depths(data, "train") == {1, 2, 3, 4, 5}
  assert depths(data, "test") == {2, 3, 4, 5}
  assert depths(data, "deeper_valid") == {6, 7, 8}
  assert depths(data, "deeper") == {9, 10}
  assert not composed & set(functions["composition"])
  assert set("".join(letter for words in composed for letter in words)) == set("abcdef")
  for words in functions["primitive"]:
    assert set(words) & set("gh")
  alone = [words for words in functions["train"] if len(words) == 1]
  assert len(alone) == 8 * 8 * data.repeated
  assert set(alone) == {(letter,) for letter in "abcdefgh"}


def test_arithmetic_is_that_of_python():
  data = DATA["arithmetic"]
  for part in data.splits():
    pairs = data.load(part)
    for source, target in zip(pairs.source, pairs.target, strict=True):
      assert re.fullmatch(r"[0-9()+* ]+", source)
      assert str(eval(source) % 10) == target  # digits, signs and brackets alone


def answer(words: list[str]) -> int:
  """The value of a list expression, whose words are taken from the front."""
  word = words.pop(0)
  if word != "[":
    return int(word)
  operator, members = words.pop(0), []
  while words[0] != "]":
    members.append(answer(words))
  words.pop(0)
  found = {
    "MIN": min(members),
    "MAX": max(members),
    "MED": int(statistics.median(members)),
    "SM": sum(members) % 10,
  }
  return found[operator]


def test_list_operations_are_those_of_python():
  data = DATA["lists"]
  assert answer(["[", "MAX", "4", "3", "[", "MIN", "2", "3", "]", "1", "0", "]"]) == 4
  assert answer(["[", "MED", "4", "[", "SM", "9", "9", "]", "1", "2", "]"]) == 3
  for part in data.splits():
    pairs = data.load(part)
    for source, target in zip(pairs.source, pairs.target, strict=True):
      words = source.split()
      assert str(answer(words)) == target
      assert words == []


def nesting(source: str) -> int:
  level = most = 0
  for symbol in source.split():
    level += (symbol in "([") - (symbol in ")]")
    most = max(most, level)
  return most


@pytest.mark.parametrize("name", TREES)
def test_trees_are_as_deep_and_as_short_as_they_say(name):
  data = DATA[name]
  for part, known in {
    "train": {1, 2, 3, 4, 5},
    "test": {1, 2, 3, 4, 5},
    "deeper_valid": {6},
    "deeper": {7, 8},
  }.items():
    pairs = data.load(part)
    assert depths(data, part) == known
    for source, info in zip(pairs.source, pairs.info or (), strict=True):
      assert nesting(source) == info["depth"]
      assert len(source.split()) <= data.symbols


def test_steps_say_what_brackets_hold_by_then_and_what_they_are_worth():
  words = ["(", "4", "*", "(", "3", "+", "6", ")", ")"]
  steps = steps_of_brackets(words, range(2, 11), ArithmeticData().value)
  assert " ".join(steps) == (
    "#2 ( @2 outside #2 #3 4 #2 4 #4 * #2 4 * #5 ( @5 #2 4 * #5 #6 3 #5 3 #7 + #5 3 +"
    " #8 6 #5 3 + 6 #9 ) 9 @5 #2 4 * 9 #10 ) 6 @2 outside 6"
  )
  words = ["[", "MAX", "4", "[", "SM", "9", "3", "]", "1", "]"]
  assert " ".join(steps_of_brackets(words, range(10), ListOpsData().value)) == (
    "#0 [ @0 outside #0 #1 MAX #0 MAX #2 4 #0 MAX 4 #3 [ @3 #0 MAX 4 #3 #4 SM #3 SM #5 9 #3 SM 9"
    " #6 3 #3 SM 9 3 #7 ] 2 @3 #0 MAX 4 2 #8 1 #0 MAX 4 2 1 #9 ] 4 @0 outside 4"
  )


@pytest.mark.parametrize("name", DATA)
def test_a_scratchpad_is_about_the_same_expressions_and_ends_with_their_values(name):
  plain, written = DATA[name], dataclasses.replace(DATA[name], scratchpad=True)
  seen: set[str] = set()
  for part in plain.splits():
    pairs, longer = plain.load(part), written.load(part)
    for source, target, numbered, steps in zip(
      pairs.source, pairs.target, longer.source, longer.target, strict=True
    ):
      words = numbered.split()
      assert words[1::2] == source.split()
      numbers = [int(word.removeprefix("#")) for word in words[::2]]
      assert numbers == sorted(set(numbers))
      seen |= set(words[::2])
      values = [word for word in steps.split() if word[0] not in "#@o"]
      assert values[-1] == target
      spoken = re.findall(r"(#\d+) ([^#@o]\S*)", steps)
      ours = list(zip(words[::2], words[1::2], strict=True))
      assert [pair for pair in spoken if pair in ours] == (ours[::-1] if name == "tables" else ours)
    assert [one["depth"] for one in longer.info or ()] == [one["depth"] for one in pairs.info or ()]
  assert len(seen) == 100


@pytest.mark.parametrize("name", ["tables", "tables, forward"])
@pytest.mark.parametrize("scratchpad", [False, True])
def test_blanks_make_training_examples_longer_and_change_nothing_else(name, scratchpad):
  plain = dataclasses.replace(DATA[name], scratchpad=scratchpad)
  data = dataclasses.replace(plain, blanks=6)
  pairs, without = data.load("train"), DATA[name].load("train")
  lengths = set()
  for source, target, sentence, value in zip(
    pairs.source, pairs.target, without.source, without.target, strict=True
  ):
    words = source.split()[1::2] if scratchpad else source.split()
    assert words[-1 if data.backward else 0] in data.table("a")  # the input
    assert [word for word in words if word != "_"] == sentence.split()
    assert target.split()[-1] == value
    lengths.add(len(words))
    if scratchpad:
      told = [word for word in target.split() if word[0] != "#"]
      values = [told[0], *told[2::2]]
      steps = zip(told[1::2], itertools.pairwise(values), strict=True)
      for letter, (before, after) in steps:
        assert after == (before if letter == "_" else data.table(letter)[before])
  assert lengths == set(range(2, data.depth + 6 + 2))
  for part in data.splits()[1:]:
    assert data.load(part).target == plain.load(part).target


@pytest.mark.parametrize("name", TREES)
def test_a_closing_bracket_gives_its_value_to_the_bracket_around_it(name):
  data = dataclasses.replace(DATA[name], scratchpad=True)
  for steps in data.load("deeper").target[:50]:
    around = dict(re.findall(r"#(\d+) [(\[] @\1 (.+?) #\1", steps))
    closed = re.findall(r"#(\d+) ([^#]+) #\d+ [)\]] (\d) @\1(?= ([^ ]+[^#]*))", steps)
    assert len(closed) == len(around) == len(re.findall(r"[)\]]", steps)) >= 7
    for bracket, held, value, after in closed:
      words = held.split()
      right = answer(["[", *words, "]"]) if name == "lists" else eval(held) % 10  # digits, a sign
      assert int(value) == right
      assert after.strip() == f"{around[bracket]} {value}"


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: ArithmeticData(train=0), "train is 0; it must be at least 1"),
    (lambda: ArithmeticData(symbols=20), "symbols is 20 with depth 5; .* at least 33"),
    (lambda: ListOpsData(arguments=1), "arguments is 1"),
    (lambda: TableLookupData(tables=40), "tables is 40; it must be 2 to 16"),
    (lambda: TableLookupData(new=7), "new is 7 of 8 tables"),
    (lambda: TableLookupData(depth=1), "depth is 1"),
    (lambda: TableLookupData(blanks=-1), "blanks is -1; it must be at least 0"),
    (functools.partial(ArithmeticData().load, "deep"), "'deep'"),
    (lambda: ArithmeticData(depth=1, scored=150).splits(), "scored is 150, and only 50 different"),
  ],
)
def test_what_cannot_be_made_is_refused_by_name(make, match):
  with pytest.raises(UserError, match=match):
    make()
