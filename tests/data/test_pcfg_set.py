"""PCFG SET: against an interpreter of its sentences, and what each split keeps from training."""

import dataclasses
import functools
import itertools
import re

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.synthetic import pcfg_set_steps
from compmod_jax.data.synthetic.pcfg_set import (
  BINARY,
  PAIRS,
  SYMBOLS,
  UNARY,
  PcfgSetData,
  count_functions,
  held_out_pair,
)
from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer

DATA = {
  split: PcfgSetData(split=split, train=2_000, scored=200)
  for split in ("iid", "systematicity", "productivity")
}


def interpret(words: list[str]) -> list[str]:
  """The string that a sentence gives; takes its words, and a function's arguments, from the front.

  Strings are edited in place, symbol by symbol, as the paper tells it in words.
  """
  word = words.pop(0)
  if word[0].isupper():
    string = [word]
    while words and words[0] != "," and words[0][0].isupper():
      string.append(words.pop(0))
    return string
  first = interpret(words)
  if word in ("append", "prepend", "remove_first", "remove_second"):
    assert words.pop(0) == ","
    second = interpret(words)
    return {
      "append": [*first, *second],
      "prepend": [*second, *first],
      "remove_first": second,
      "remove_second": first,
    }[word]
  if word == "reverse":
    first.reverse()
  elif word == "shift":
    first.append(first.pop(0))
  elif word == "echo":
    first.append(first[-1])
  elif word == "swap_first_last":
    first[0], first[-1] = first[-1], first[0]
  elif word == "repeat":
    first.extend(list(first))
  else:
    assert word == "copy"
  return first


@pytest.mark.parametrize(
  ("source", "target"),
  [
    ("repeat A1 B1 C1", "A1 B1 C1 A1 B1 C1"),
    ("echo remove_first D1 K1 , E1 F1", "E1 F1 F1"),
    ("append swap_first_last F1 G1 H1 , repeat I1 J1", "H1 G1 F1 I1 J1 I1 J1"),
    ("reverse copy O14 O4 C12 J14 W3", "W3 J14 C12 O4 O14"),
    ("remove_second shift A1 B1 , prepend C1 D1 , E1 F1", "B1 A1"),
  ],
)
def test_the_interpreter_gives_what_the_paper_gives(source, target):
  assert interpret(source.split()) == target.split()


@pytest.mark.parametrize("split", DATA)
def test_strings_are_those_that_the_interpreter_gives(split):
  data = DATA[split]
  seen: set[str] = set()
  for part in data.splits():
    pairs = data.load(part)
    for source, target in zip(pairs.source, pairs.target, strict=True):
      words = source.split()
      assert interpret(words) == target.split()
      assert words == []
      assert max(len(source.split()), len(target.split())) <= data.longest
    assert len(set(pairs.source)) == len(pairs)
    assert not seen & set(pairs.source)
    seen |= set(pairs.source)
  assert data.load("test").where(3) == "pcfg_set:test[3]"


def test_every_function_and_every_length_of_string_occurs():
  sources = DATA["iid"].load("train").source
  words = {word for source in sources for word in source.split()}
  assert len(words - set(SYMBOLS) - {","}) == 10
  assert words & set(SYMBOLS) == set(SYMBOLS)
  assert len(SYMBOLS) == 520
  strings = [
    len([word for word in part.split() if word[0].isupper()])
    for source in sources
    for part in source.split(",")
  ]
  assert set(strings) == {2, 3, 4, 5}
  counts = [count_functions(source) for source in sources]
  assert min(counts) == 1
  assert 0.08 < sum(count > 8 for count in counts) / len(counts) < 0.18


def test_training_lacks_four_pairs_and_every_test_sentence_has_one():
  data = DATA["systematicity"]
  assert data.splits() == ("train", "valid", "test", "iid")
  joined = [f" {first} {second} " for first, second in PAIRS]
  for part in data.splits():
    pairs = data.load(part)
    for source, info in zip(pairs.source, pairs.info or (), strict=True):
      found = [pair.strip() for pair in joined if pair in f" {source} "]
      assert bool(found) == (part == "test")
      name = "several" if len(found) > 1 else found[0] if found else "none"
      assert info == {"functions": count_functions(source), "pair": name}
  kinds = {info["pair"] for info in data.load("test").info or ()}
  assert kinds == {*(pair.strip() for pair in joined), "several"}
  # Both functions of a pair are trained, apart.
  assert held_out_pair("repeat reverse remove_second A1 B1 , C1 D1") == "none"
  assert held_out_pair("reverse repeat remove_second A1 B1 , C1 D1") == "repeat remove_second"


def test_test_sentences_have_more_functions_than_any_of_training():
  data = PcfgSetData(split="productivity", train=2_000, scored=200, functions=5)
  for part in data.splits():
    counts = {int(info["functions"]) for info in data.load(part).info or ()}
    assert min(counts) > 5 if part == "test" else max(counts) == 5
  assert DATA["iid"].splits() == ("train", "valid", "test")


@pytest.fixture
def folder(tmp_path):
  sentences = {
    ("pcfgset", "dev"): [("copy A1 B2", "A1 B2")],
    ("pcfgset", "train"): [("shift A1 B2", "B2 A1"), ("echo A1 B2", "A1 B2 B2")],
    ("pcfgset", "test"): [("repeat A1 B2", "A1 B2 A1 B2")],
    ("systematicity", "train"): [("echo A1 B2", "A1 B2 B2")],
    ("systematicity", "test"): [("swap_first_last repeat A1 B2", "B2 B2 A1 A1")],
  }
  for (name, part), lines in sentences.items():
    (tmp_path / name).mkdir(exist_ok=True)
    for side, end in enumerate(("src", "tgt")):
      text = "".join(f"{pair[side]}\n" for pair in lines)
      (tmp_path / name / f"{part}.{end}").write_text(text)
  return tmp_path


def test_published_files_are_read(folder):
  iid = PcfgSetData(folder=str(folder))
  assert iid.load("train").source == ["shift A1 B2", "echo A1 B2"]
  assert iid.load("test").target == ["A1 B2 A1 B2"]
  assert iid.load("test").where(0) == "test.src:1"
  data = PcfgSetData(folder=str(folder), split="systematicity")
  assert data.splits() == ("train", "valid", "test")
  assert data.load("valid").source == ["copy A1 B2"]  # of pcfgset: there is no other
  assert data.load("test").info == [{"functions": 2, "pair": "swap_first_last repeat"}]
  assert data.load("test").metric == "exact_match"
  with pytest.raises(UserError, match="productivity"):
    PcfgSetData(folder=str(folder), split="productivity").load("test")
  (folder / "pcfgset" / "dev.tgt").write_text("A1\nB1\n")
  with pytest.raises(DataError, match=r"dev\.src has 1 lines but .*dev\.tgt has 2"):
    iid.load("valid")


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: PcfgSetData(split="random"), "'random'"),  # type: ignore[arg-type]
    (lambda: PcfgSetData(functions=9), "functions is 9; it must be 1 to 8"),
    (lambda: PcfgSetData(longest=16), "longest is 16; it must be 32"),
    (lambda: PcfgSetData(train=0), "train is 0"),
    (lambda: PcfgSetData(scratchpad=True, joined=-1), "joined is -1; it must be at least 0"),
    (lambda: PcfgSetData(joined=4), "joined is 4, but scratchpad is off"),
    (functools.partial(DATA["iid"].load, "iid"), "'iid'"),
  ],
)
def test_mistakes_are_told(make, match):
  with pytest.raises(UserError, match=match):
    make()


STEPS = {
  split: dataclasses.replace(DATA[split], scratchpad=True) for split in ("iid", "productivity")
}


def sentence_of(source: str) -> list[str]:
  """The words between those that begin and end a source with numbers."""
  words = numbered(source)[1::2]
  assert words[:5] == [pcfg_set_steps.FIRST] * 5
  assert words[-1] == pcfg_set_steps.LAST
  return words[5:-1]


def numbered(source: str) -> list[str]:
  """Numbers and words of a source; before the last ones its name stands, with its first number."""
  words = source.split()
  assert words[-4:-2] == ["finish", f"${int(words[0][1:]) % pcfg_set_steps.NAMES}"]
  return [*words[:-4], *words[-2:]]


@pytest.mark.parametrize("split", STEPS)
def test_steps_end_with_the_string_of_the_same_sentence(split):
  data, plain = STEPS[split], DATA[split]
  for part in data.splits():
    pairs, others = data.load(part), plain.load(part)
    assert pairs.info == others.info
    for source, target, sentence, string in zip(
      pairs.source, pairs.target, others.source, others.target, strict=True
    ):
      assert sentence_of(source) == sentence.split()
      assert pcfg_set_steps.answer(target.split()) == string.split()


def strings_of(words: list[str]) -> list[tuple[str, list[str]]]:
  """The strings that steps write: the number of the word that is read next, and symbols."""
  found = []
  for at, word in enumerate(words):
    if word in ("first", "next"):
      found.append((words[at + 2], []))
    elif word[0] == "#" and words[at - 1][0] not in "#$" and words[at - 2][0] == "#":
      found[-1][1].append(words[at + 1])
  return found


def test_each_string_of_the_steps_is_that_of_a_part_of_the_sentence():
  pairs = STEPS["productivity"].load("test")
  for source, target in zip(pairs.source, pairs.target, strict=True):
    sentence, numbers = numbered(source)[1::2], numbered(source)[::2]
    found = strings_of(target.split())
    # One for each function, and one for each string of the sentence, given by its last symbol.
    assert len(found) == count_functions(source) + source.count(",") + 1
    for number, symbols in found:
      at = numbers.index(number)
      if sentence[at] in SYMBOLS and sentence[at + 1] not in SYMBOLS:
        while sentence[at - 1] in SYMBOLS:
          at -= 1
      else:
        at += 1
      assert interpret(sentence[at:-1]) == symbols[::-1]


def test_behind_a_name_that_starts_or_is_finished_always_the_same_number_stands():
  """So that it is found by the two words before it."""
  pairs = STEPS["productivity"].load("test")
  for source, target in zip(pairs.source, pairs.target, strict=True):
    known: dict[tuple[str, str], str] = {}
    words = [*source.split(), *target.split()]
    for edge, name, number in zip(words, words[1:], words[2:], strict=False):
      if edge in ("start", "finish") and name[0] == "$":
        assert number[0] == "#"
        assert known.setdefault((edge, name), number) == number
    assert len(known) > 2 * count_functions(source)


def test_a_word_stands_behind_its_number_wherever_it_is_taken():
  pairs = STEPS["productivity"].load("test")
  firsts, checked = set(), 0
  for source, target in zip(pairs.source, pairs.target, strict=True):
    told, words = numbered(source), target.split()
    known, last = dict(zip(told[::2], told[1::2], strict=True)), told[-2]
    firsts.add(told[0])
    for number, word in itertools.pairwise(words):
      if number[0] != "#":
        continue
      if int(number[1:]) == (int(last[1:]) + 1) % pcfg_set_steps.NUMBERS:
        if len(known) == pcfg_set_steps.NUMBERS:  # from here on some stand before two words
          break
        known[number], last = word, number
      assert known[number] == word
      checked += 1
  assert len(firsts) > 100
  assert checked > 10_000


def test_strings_have_names_in_turn_and_are_popped_from_a_stack():
  pairs = STEPS["productivity"].load("test")
  for source, target in zip(pairs.source, pairs.target, strict=True):
    words, stack = target.split(), ["none"]
    name = int(source.split()[0][1:]) % pcfg_set_steps.NAMES
    for at, done in enumerate(words):
      told = words[at + 1 : at + 2 + len(stack)]
      if done == "pop":
        assert told[:-1] == stack[::-1]
        stack.pop()
      elif done == "open":
        name = (name + 1) % pcfg_set_steps.NAMES
        assert told == [f"${name}", *stack[::-1]]
        stack.append(f"${name}")
    assert len(stack) == 2


@pytest.mark.parametrize("symbols", [["A1"], ["A1", "B2"], ["A1", "B2", "C3"]])
def test_steps_of_short_strings_end_with_what_each_function_gives(symbols):
  for name, function in UNARY.items():
    written = pcfg_set_steps.steps([name, *symbols], 7)
    assert pcfg_set_steps.answer(written) == function(symbols)
  for name, function in BINARY.items():
    written = pcfg_set_steps.steps([name, *symbols, ",", "D4"], 7)
    assert pcfg_set_steps.answer(written) == function(symbols, ["D4"])


def test_tokenizers_of_words_keep_every_word():
  pairs = STEPS["productivity"].load("valid")
  tokenizer = train_tokenizer([*pairs.source, *pairs.target], TokenizerConfig(kind="words"))
  for text in (*pairs.source, *pairs.target):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_published_files_get_steps_and_are_read_in_full(folder):
  data = PcfgSetData(folder=str(folder), split="systematicity", scratchpad=True)
  pairs, plain = data.load("test"), PcfgSetData(folder=str(folder), split="systematicity")
  assert pairs.info == plain.load("test").info
  assert sentence_of(pairs.source[0]) == ["swap_first_last", "repeat", "A1", "B2"]
  assert pcfg_set_steps.answer(pairs.target[0].split()) == ["B2", "B2", "A1", "A1"]
  file = folder / "systematicity" / "test.src"
  for sentence, mistake in (
    ("append A1 B2", "'append' lacks an argument"),
    ("copy A1 B2 , B2 A1", "2 strings have no function that joins them"),
    ("repeat", "no symbols stand behind 'repeat'"),
    ("repeat A1 B2", "is 'A1 B2 A1 B2', not 'B2 B2 A1 A1'"),
  ):
    file.write_text(f"{sentence}\n")
    with pytest.raises(DataError, match=rf"test\.src:1: .*{re.escape(mistake)}"):
      data.load("test")


@pytest.mark.parametrize("split", STEPS)
def test_joined_sentences_are_those_of_training_in_order_and_the_first_one_is_answered(split):
  joined, plain = dataclasses.replace(STEPS[split], joined=8), DATA[split].load("train")
  answers, sentences, functions = dict(zip(plain.source, plain.target, strict=True)), [], set()
  for source, target in zip(joined.load("train").source, joined.load("train").target, strict=True):
    group = " ".join(sentence_of(source)).split(" ; ")
    assert pcfg_set_steps.answer(target.split()) == answers[group[0]].split()
    assert target.split().count("end") > count_functions(source)  # all of them have steps
    functions.add(count_functions(source))
    assert len(group) == 1 or count_functions(source) <= joined.joined
    sentences += group
  assert sentences == plain.source
  assert functions >= set(range(1, 9))
  for part in set(joined.splits()) - {"train"}:
    assert joined.load(part).source == STEPS[split].load(part).source


def test_sentences_of_files_are_joined_too(folder):
  data = PcfgSetData(folder=str(folder), scratchpad=True, joined=30, seed=1)
  pairs = data.load("train")
  assert [sentence_of(source) for source in pairs.source] == [
    ["shift", "A1", "B2", ";", "echo", "A1", "B2"]
  ]
  assert pcfg_set_steps.answer(pairs.target[0].split()) == ["B2", "A1"]
  assert pairs.where(0) == "train.src:1"
  assert pairs.info == [{"functions": 1}]
  assert len(data.load("test")) == 1
  (folder / "pcfgset" / "train.src").write_text("shift A1 B2\ncopy A1 , B2\n")
  with pytest.raises(DataError, match=r"train\.src:1: .*2 strings have no function"):
    data.load("train")


@pytest.mark.parametrize(
  ("sentence", "steps"),
  [
    (
      "reverse B7 C2",
      "start $8 #16 $8 read $7 #15 > first $8 #14 C2 open $8 none leaf $8 #14 C2 #17 C2 leaf"
      " $8 #13 B7 #18 B7 leaf $8 #12 reverse finish $8 #19 end start $9 #20 $9 read $8 #12"
      " reverse next $9 #11 < pop $8 none open $9 none reverse1 $9 finish $8 #19 end reverse1"
      " $9 #18 B7 #21 B7 reverse1 $9 #17 C2 #22 C2 reverse1 $9 #16 $8 finish $9 #23 end start"
      " $10 #24 $10 read $9 #11 < answer finish $9 #23 end answer #22 C2 answer #21 B7 answer"
      " #20 $9",
    ),
    (
      "copy B7 ; shift C2 D3",
      "start $8 #19 $8 read $7 #18 > first $8 #17 D3 open $8 none leaf $8 #17 D3 #20 D3 leaf"
      " $8 #16 C2 #21 C2 leaf $8 #15 shift finish $8 #22 end start $9 #23 $9 read $8 #15 shift"
      " next $9 #14 ; pop $8 none open $9 none shift1 $9 finish $8 #22 end shift1 $9 #21 C2"
      " #24 C2 shift2 $9 start $8 #19 $8 shift2 $9 #20 D3 shift2 $9 #21 C2 #25 D3 shift2 $9"
      " #22 end finish $9 #26 end start $10 #27 $10 read $9 #14 ; first $10 #13 B7 open $10 $9"
      " none leaf $10 #13 B7 #28 B7 leaf $10 #12 copy finish $10 #29 end start $11 #30 $11"
      " read $10 #12 copy next $11 #11 < pop $10 $9 none open $11 $9 none copy1 $11 start $10"
      " #27 $10 copy1 $11 #28 B7 #31 B7 copy1 $11 #29 end finish $11 #32 end start $12 #33 $12"
      " read $11 #11 < answer finish $11 #32 end answer #31 B7 answer #30 $11",
    ),
    (
      "remove_first A2 , swap_first_last A1 B2 C3",
      "start $8 #20 $8 read $7 #19 > first $8 #18 C3 open $8 none leaf $8 #18 C3 #21 C3 leaf"
      " $8 #17 B2 #22 B2 leaf $8 #16 A1 #23 A1 leaf $8 #15 swap_first_last finish $8 #24 end"
      " start $9 #25 $9 read $8 #15 swap_first_last next $9 #14 , pop $8 none open $9 none"
      " swap_first_last1 $9 finish $8 #24 end swap_first_last1 $9 #23 A1 #26 A1"
      " swap_first_last2 $9 start $8 #20 $8 swap_first_last2 $9 #21 C3 swap_first_last2 $9 #22"
      " B2 swap_first_last2 $9 #23 A1 #27 B2 swap_first_last2 $9 #24 end swap_first_last3 $9"
      " start $8 #20 $8 swap_first_last3 $9 #21 C3 #28 C3 finish $9 #29 end start $10 #30 $10"
      " read $9 #14 , first $10 #13 A2 open $10 $9 none leaf $10 #13 A2 #31 A2 leaf $10 #12"
      " remove_first finish $10 #32 end start $11 #33 $11 read $10 #12 remove_first next $11"
      " #11 < pop $10 $9 none pop $9 none open $11 none remove_first1 $11 start $9 #25 $9"
      " remove_first1 $11 #26 A1 #34 A1 remove_first1 $11 #27 B2 #35 B2 remove_first1 $11 #28"
      " C3 #36 C3 remove_first1 $11 #29 end finish $11 #37 end start $12 #38 $12 read $11 #11"
      " < answer finish $11 #37 end answer #36 C3 answer #35 B2 answer #34 A1 answer #33 $11",
    ),
  ],
)
def test_steps_are_these(sentence, steps):
  assert " ".join(pcfg_set_steps.steps(sentence.split(), 7)) == steps
