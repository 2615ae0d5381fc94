"""The worlds as a data source: splits, shares, words, and mistakes."""

import itertools
import re
import time
from collections import Counter

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.question import FORMATS, Question
from compmod_jax.data.synthetic.worlds import WorldsData, tags
from compmod_jax.data.synthetic.worlds.lexicon import (
  CLASSES,
  INVENTED_NAMES,
  NAMES,
  NEW_NAMES,
  VOCABULARY,
)
from compmod_jax.data.synthetic.worlds.queries import evaluate, words_in
from compmod_jax.data.synthetic.worlds.world import World

EVERY = {"words": 99, "ways": 9}  # word, and every way to put it
DATA = WorldsData(train=4_800, valid=600, test=1_200, shifted=600, **EVERY)


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[Question]]:
  return {split: DATA.load(split).items[:] for split in DATA.splits()}  # type: ignore[misc]


def texts(question: Question) -> list[str]:
  return [question.passage, question.question, *question.options, *question.answers]


def words(text: str) -> list[str]:
  return re.findall(r"\w+", text)


def sentences(passage: str) -> list[str]:
  return re.findall(r"[^.]+\.", passage)


def test_every_number_of_facts_has_every_format_equally_often(loaded):
  for split in ("train", "valid", "test", "names", "length"):
    shares = Counter((q.format, q.info["facts"]) for q in loaded[split])
    assert shares == dict.fromkeys(
      itertools.product(FORMATS, (1, 2, 3)), len(loaded[split]) // 12
    ), split
  shares = Counter((q.format, q.info["facts"]) for q in loaded["facts"])
  assert shares == dict.fromkeys(itertools.product(FORMATS, (4,)), 150)


def test_yes_is_as_frequent_as_no_for_every_number_of_facts(loaded):
  for split, questions in loaded.items():
    answers = Counter((q.info["facts"], q.answer) for q in questions if q.format == "yes_no")
    assert len(set(answers.values())) == 1, split
    assert len(answers) in (2, 6)


def test_options_are_two_to_four_and_any_of_them_is_right_as_often(loaded):
  for count in (2, 3, 4):
    labels = Counter(q.label for q in loaded["train"] if len(q.options) == count)
    total = sum(labels.values())
    assert abs(total - 400) < 3
    deviation = sum((labels[i + 1] - total / count) ** 2 / (total / count) for i in range(count))
    assert deviation < 14, labels  # chi squared: beyond one in a thousand for 3 degrees of freedom


def test_one_extractive_question_in_five_has_no_answer(loaded):
  extractive = [q for q in loaded["train"] if q.format == "extractive"]
  empty = Counter(q.info["facts"] for q in extractive if not q.answers)
  assert empty == {1: 80, 2: 80, 3: 80}
  assert len(extractive) == 1_200


def test_no_passage_is_in_two_splits(loaded):
  passages = {split: {q.passage for q in questions} for split, questions in loaded.items()}
  for one, other in itertools.combinations(passages, 2):
    assert not passages[one] & passages[other], (one, other)


def test_other_seeds_share_no_passage_with_other_splits(loaded):
  other = {q.passage for q in WorldsData(seed=1, train=1_200, **EVERY).load("train").items}
  for split in ("valid", "test", "facts"):
    assert not other & {q.passage for q in loaded[split]}
  assert len(other & {q.passage for q in loaded["train"]}) < 5


def test_a_passage_hardly_comes_twice_in_a_split(loaded):
  for split, questions in loaded.items():
    assert len({q.passage for q in questions}) >= 0.995 * len(questions), split


def test_question_i_is_the_same_drawn_alone_or_with_others(loaded):
  for split, questions in loaded.items():
    for i in (0, 7, len(questions) - 1):
      assert DATA.question(split, i) == questions[i]
  larger = WorldsData(train=20, valid=9, test=5_000, shifted=1, **EVERY)
  assert larger.load("test").items[1_100] == loaded["test"][1_100]
  assert WorldsData(seed=1, **EVERY).question("test", 5) != loaded["test"][5]


def test_questions_are_made_when_they_are_looked_at():
  start = time.process_time()
  questions = WorldsData(train=10**9).load("train")
  assert len(questions) == len(questions.items) == 10**9
  assert questions.items[-1] == questions.items[10**9 - 1]
  assert questions.items[5:1:-2] == [questions.items[5], questions.items[3]]
  assert time.process_time() - start < 1
  with pytest.raises(IndexError):
    questions.items[10**9]


def test_questions_say_where_they_stand():
  assert DATA.load("train").where(17) == "worlds:train[17]"


def test_a_question_takes_no_longer_than_thousands_of_additions():
  """About 3,000 of them, so that the bound, twice that, is as tight on every machine."""

  def seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start

  def draw(first: int) -> float:
    return seconds(lambda: DATA.load("train").items[first : first + 500])

  added = min(seconds(lambda: sum(i * i for i in range(1_000_000))) for _ in range(4))
  assert min(draw(500 * i) for i in range(4)) < 3 * added


def test_longer_stories_are_longer_than_any_in_training(loaded):
  lengths = {
    split: Counter(len(sentences(q.passage)) for q in questions)
    for split, questions in loaded.items()
  }
  for split in ("train", "valid", "test", "facts", "names"):
    assert max(lengths[split]) == 8, split
  assert set(lengths["train"]) == {5, 6, 7, 8}
  assert set(lengths["length"]) == set(range(11, 17))


def test_training_knows_none_of_the_new_names(loaded):
  assert len({*NAMES, *INVENTED_NAMES, *NEW_NAMES}) == len(NAMES) + 2_200
  for split, questions in loaded.items():
    found = {word for q in questions for text in texts(q) for word in words(text)}
    names = {word for word in found if CLASSES.get(word) == "person"}
    if split == "train":
      assert names & set(NAMES) == set(NAMES)
      assert len(names & set(INVENTED_NAMES)) > 1_000
      assert not names & set(NEW_NAMES)
    else:
      assert names == set(NEW_NAMES if split == "names" else NAMES), split


def test_letters_and_pairs_of_letters_of_new_names_are_trained(loaded):
  trained = {word for q in loaded["train"] for text in texts(q) for word in words(text)}

  def pairs(word: str) -> set[str]:
    return {f" {word} "[i : i + 2] for i in range(len(word) + 1)}

  known = set().union(*map(pairs, trained))
  for name in NEW_NAMES:
    assert pairs(name) <= known, name


def test_the_vocabulary_is_closed_and_all_of_it_is_used(loaded):
  found = {
    word if word in VOCABULARY else word.lower()
    for questions in loaded.values()
    for q in questions
    for text in texts(q)
    for word in words(text)
  }
  assert found <= set(VOCABULARY)
  assert set(VOCABULARY) - found <= set(INVENTED_NAMES)


def test_training_uses_every_word_but_the_new_names(loaded):
  counts = Counter(word.lower() for q in loaded["train"] for t in texts(q) for word in words(t))
  for word in set(VOCABULARY) - {*NEW_NAMES, *INVENTED_NAMES}:
    assert counts[word.lower()] > 10, word


def test_words_have_their_tags():
  found = tags("Who has the red ball, Anna? two went down.")
  assert found == [
    ("Who", "other"),
    ("has", "verb"),
    ("the", "other"),
    ("red", "adjective"),
    ("ball", "noun"),
    (",", "other"),
    ("Anna", "noun"),
    ("?", "other"),
    ("two", "numeral"),
    ("went", "verb"),
    ("down", "adverb"),
    (".", "other"),
  ]


def test_every_word_of_every_text_has_a_tag(loaded):
  for questions in loaded.values():
    for question in questions[:200]:
      for text in texts(question):
        tagged = [word for word, _ in tags(text)]
        assert tagged == re.findall(r"\w+|[^\w\s]", text)


def test_the_description_names_sizes_and_seed():
  text = DATA.describe()
  assert "4,800" in text
  assert "seed 0" in text


@pytest.mark.parametrize(
  ("make", "says"),
  [
    (lambda: WorldsData(train=0), "train is 0"),
    (lambda: WorldsData(shifted=-1), "shifted is -1"),
    (lambda: WorldsData(shortest=2), "shortest is 2"),
    (lambda: WorldsData(shortest=9), "longest, which is 8"),
    (lambda: WorldsData(longest=7), "longest is 7"),
    (lambda: WorldsData(words=7), "words is 7"),
    (lambda: WorldsData(ways=0), "ways is 0"),
    (lambda: WorldsData(asked=0), "asked is 0"),
    (lambda: WorldsData(easy_options=1.5), "easy_options is 1.5"),
    (lambda: WorldsData(kinds=("where",)), "kinds is 'where'"),
    (
      lambda: WorldsData(kinds=("place", "friend")),
      "to ask for in .*'abstractive', 1",
    ),
    (lambda: WorldsData(longest=17), "longest is 17"),
    (lambda: WorldsData().load("dev"), "split is 'dev'"),
    (lambda: WorldsData().question("dev", 0), "split is 'dev'"),
    (lambda: WorldsData().question("test", 2_400), "index is 2400"),
    (lambda: tags("Anna flew to the park."), "'flew'"),
  ],
)
def test_mistakes_are_told(make, says):
  with pytest.raises(UserError, match=says):
    make()


def test_few_words_of_a_class_and_one_way_to_put_things_are_the_default():
  data = WorldsData(train=1_200, valid=12, test=12, shifted=240)
  found = {split: data.load(split).items[:] for split in ("train", "names")}
  for split, questions in found.items():
    told = {word for q in questions for text in texts(q) for word in words(text)}
    classes = Counter(CLASSES[word] for word in told & set(CLASSES) - {*INVENTED_NAMES})
    if split == "names":
      assert classes.pop("person") > 100
    else:
      assert classes.pop("person") == 12
    expected = {"place": 12, "thing": 12, "colour": 10, "material": 10}
    assert classes == expected, split
  verbs = {word for q in found["train"] for word in words(q.passage)}
  assert {"walked", "grabbed", "bought", "consists"} & verbs == set()
  assert {"went", "took", "sent", "made"} <= verbs


@pytest.mark.parametrize("number", [8, 9, 12, 20])
def test_new_names_have_the_letters_of_training(number):
  data = WorldsData(train=600, valid=1, test=1, shifted=12, words=number)
  known = set("".join(t for q in data.load("train").items for t in texts(q)))
  assert set("".join(NEW_NAMES)) <= known


def test_the_shortest_and_longest_stories_can_be_set():
  for shortest, longest in ((3, 8), (8, 8), (16, 16)):
    data = WorldsData(train=24, valid=1, test=1, shifted=24, shortest=shortest, longest=longest)
    lengths = {len(sentences(q.passage)) for q in data.load("train").items}
    assert min(lengths) >= shortest
    assert max(lengths) <= longest
    for split in data.splits()[3:]:
      assert len(data.load(split).items[:]) == 24


def test_further_questions_are_about_the_story_of_the_first():
  data = WorldsData(train=1_200, valid=1, test=1, shifted=1, asked=6)
  alone = WorldsData(train=200, valid=1, test=1, shifted=1)
  found = data.load("train").items[:]
  alone = alone.load("train").items[:]
  same = [mine == other for mine, other in zip(found[::6], alone, strict=True)]
  # Others need two facts at least now, or their story has not enough to ask.
  assert sum(same) > 80
  assert {question.info["facts"] for question in found[::6]} == {2, 3}
  for first in range(0, len(found), 6):
    story = found[first : first + 6]
    assert len({question.passage for question in story}) == 1
    assert len({question.format == "multiple_choice" for question in story}) == 1
  assert [data.question("train", i) for i in (1, 604, 1_199)] == [found[i] for i in (1, 604, 1_199)]
  facts = Counter(question.info["facts"] for question in found)
  assert min(facts[number] for number in (1, 2, 3)) > 150
  different = sum(len({q.question for q in found[i : i + 6]}) for i in range(0, len(found), 6))
  assert different == len(found)


def test_easy_options_are_of_other_stories_and_in_training_alone():
  data = WorldsData(train=2_400, valid=240, test=1, shifted=1, asked=4, easy_options=0.5)
  for split, least, most in (("train", 0.4, 0.6), ("valid", 0.0, 0.0)):
    asked = [q for q in data.load(split).items[:] if q.options]
    told = [[option.split()[-1] in words(q.passage) for option in q.options] for q in asked]
    assert all(has.pop(q.label - 1) for q, has in zip(asked, told, strict=True))
    # Of one question, all wrong options are in the story, or none is.
    assert all(len(set(has)) == 1 for has in told)
    assert least <= sum(not has[0] for has in told) / len(asked) <= most
  plain = WorldsData(train=2_400, valid=240, test=1, shifted=1, asked=4)
  assert plain.load("valid").items[:] == data.load("valid").items[:]


def test_further_questions_follow_from_the_sentences_that_they_name():
  data = WorldsData(train=1_200, valid=1, test=1, shifted=1, asked=6)
  for i in range(1_200):
    question, draft = data.drawn("train", i)
    if i % 6 and draft.value is None:
      assert question.format == "extractive"
      assert question.answer == ""
      assert {word for event in draft.events for word in event}.issuperset(words_in(draft.query))
      assert evaluate(draft.query, World(draft.events)) is None
    elif i % 6:
      needed = set(draft.supporting)
      assert len(needed) == question.info["facts"]
      assert evaluate(draft.query, World([draft.events[n] for n in needed])) == draft.value
      for n in needed:
        rest = [event for m, event in enumerate(draft.events) if m != n]
        assert evaluate(draft.query, World(rest)) != draft.value


def test_what_is_told_of_someone_is_all_sentences_about_them(loaded):
  asked = [q for q in loaded["train"] if q.info["question_kind"] == "told"]
  assert len(asked) > 100
  for question in asked:
    (name,) = set(words(question.question)) & {*NAMES, *INVENTED_NAMES}
    about = [s.strip() for s in sentences(question.passage) if name in words(s)]
    assert question.answers == (" ".join(about),)
