"""Stories by their text alone: a reader of plain sentences finds no contradiction.

Nothing of the generator but its questions is used: sentences are taken apart here, and the answers
follow from what this reader notes.
"""

import dataclasses
import itertools
import re
from collections import Counter

import pytest

from compmod_jax.core.config import from_json, to_json
from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.tokenized import texts_of
from compmod_jax.data.synthetic.worlds import FEW_KINDS, WorldsData
from compmod_jax.data.synthetic.worlds.lexicon import INVENTED_NAMES
from compmod_jax.data.synthetic.worlds.repertoire import ALL
from compmod_jax.data.tokenizers import UNK, train_tokenizer
from configs.nemot_qa import worlds

_WAYS = [
  ("go", r"(\w+) (?:went|walked) to the (\w+)"),
  ("take", r"(\w+) (?:took|picked up|grabbed) the (\w+)"),
  ("give", r"(?P<giver>\w+) (?:sent|sold) the (?P<thing>\w+) to (?P<taker>\w+)"),
  ("give", r"(?P<taker>\w+) (?:got|bought) the (?P<thing>\w+) from (?P<giver>\w+)"),
  ("drop", r"(\w+) (?:dropped|put down) the (\w+)"),
  ("leave", r"Someone (?:left|put) the (\w+) in the (\w+)"),
  ("friend", r"The best friend of (\w+) is (\w+)"),
  ("friend", r"(?P<b>\w+) is the best friend of (?P<a>\w+)"),
  ("made", r"The (\w+) (?:is made|consists) of (\w+)"),
  ("colour", r"The colour of the (\w+) is (\w+)"),
  ("colour", r"The (\w+) is (\w+)"),
]
_LYING = "nobody"


class Reader:
  """What sentences say, one after another, and what in them cannot be."""

  def __init__(self, passage):
    self.where, self.has, self.lies = {}, {}, {}
    self.fixed = {"friend": {}, "made": {}, "colour": {}}
    self.trails, self.givers, self.wrong = {}, {}, []
    self.sentences = [f"{sentence}." for sentence in passage.removesuffix(".").split(". ")]
    for sentence in self.sentences:
      found = [(kind, m) for kind, way in _WAYS if (m := re.fullmatch(way, sentence[:-1]))]
      assert found, sentence
      kind, match = found[0]
      getattr(self, f"_{kind}", lambda m, k=kind: self._state(k, m))(match)
      self._look_round()

  def _look_round(self):
    """Notes where everyone and everything is now."""
    for one in {**self.where, **self.has}:
      trail = self.trails.setdefault(one, [])
      if not trail or trail[-1] != self.place(one):
        trail.append(self.place(one))

  def _note(self, fault, match):
    if fault:
      self.wrong.append(match.group())

  def _go(self, match):
    person, place = match.groups()
    self._note(self.where.get(person) == place, match)
    self.where[person] = place

  def _take(self, match):
    person, thing = match.groups()
    self._note(thing in self.has, match)
    self.has[thing] = person

  def _give(self, match):
    giver, thing, taker = match["giver"], match["thing"], match["taker"]
    self._note(giver == taker or self.has.get(thing, giver) != giver, match)
    self._hand(thing, giver)
    self._look_round()
    self._hand(thing, taker)
    self.givers.setdefault((taker, thing), set()).add(giver)

  def _hand(self, thing, person):
    if self.has.get(thing) != person:
      self.has.pop(thing, None)  # what someone got last stands last
      self.has[thing] = person

  def _drop(self, match):
    person, thing = match.groups()
    self._note(self.has.get(thing, person) != person, match)
    self.has[thing], self.lies[thing] = _LYING, self.where.get(person)

  def _leave(self, match):
    thing, place = match.groups()
    self._note(thing in self.has, match)
    self.has[thing], self.lies[thing] = _LYING, place

  def _state(self, kind, match):
    groups = match.groupdict()
    one, other = (groups["a"], groups["b"]) if groups else match.groups()
    self._note(one == other or one in self.fixed[kind], match)
    self.fixed[kind][one] = other

  def place(self, one):
    holder = self.has.get(one, one)
    return self.lies.get(one) if holder == _LYING else self.where.get(holder)

  def holder(self, thing):
    return None if self.has.get(thing) == _LYING else self.has.get(thing)

  def things_of(self, person):
    return [thing for thing, holder in self.has.items() if holder == person]

  def things_in(self, place):
    return [thing for thing in self.has if place is not None and self.place(thing) == place]

  def persons_in(self, place):
    return [person for person, where in self.where.items() if where == place]

  def named(self, text):
    """The person, thing or place that a phrase is about, None if it does not follow."""
    for way, find in (
      (r"the best friend of (.+)", lambda x: self.fixed["friend"].get(x)),
      (r"the person who has (.+)", self.holder),
      (r"the person in (.+)", lambda x: _only(self.persons_in(x))),
      (r"the thing carried by (.+)", lambda x: _only(self.things_of(x))),
      (r"the thing in (.+)", lambda x: _only(self.things_in(x))),
    ):
      if match := re.fullmatch(way, text):
        return find(self.named(match[1]))
    for way, kind in ((r"the thing made of (\w+)", "made"), (r"the (\w+) thing", "colour")):
      if match := re.fullmatch(way, text):
        return _only([thing for thing, has in self.fixed[kind].items() if has == match[1]])
    assert re.fullmatch(r"(the )?\w+", text), text
    return text.removeprefix("the ")

  def before(self, one, place):
    trail = self.trails.get(one, [])
    if trail.count(place) != 1 or trail[0] == place:
      return None
    return trail[trail.index(place) - 1]

  def description(self, thing):
    colour, made = self.fixed["colour"].get(thing), self.fixed["made"].get(thing)
    of = f" made of {made}" if made else ""
    return f"a {colour + ' ' if colour else ''}{thing}{of}" if colour or made else None

  def told(self, one):
    return " ".join(s for s in self.sentences if re.search(rf"\b{one}\b", s))

  def equal(self, one, other):
    return None if one is None or other is None else "yes" if one == other else "no"

  def same(self, one, other):
    holders = [self.has.get(x, x) for x in (one, other)]
    if holders[0] == holders[1] != _LYING:
      return "yes"
    return self.equal(self.place(one), self.place(other))

  def said(self, one, verb, other):
    """A sentence as an answer."""
    with_article = [x if x[0].isupper() else f"the {x}" for x in (one, other)]
    text = f"{with_article[0]} {verb} {with_article[1]}"
    return text[0].upper() + text[1:]

  def answer(self, question, several=False):
    """The answer, a list where it is several words, None where it does not follow.

    Args:
      question: its text.
      several: whether `What does Ida have?` asks for all that she has.
    """
    one_of = (lambda found: found) if several else _only
    asked = [
      # With "in a sentence" first, as those begin like others.
      (
        r"(?:Say in a sentence where (.+) is\.|Where is (.+)\? Answer in a sentence\.)",
        lambda x: self.said(x, "is in", self.place(x)),
      ),
      (
        r"(?:Say in a sentence who has (.+)\.|Who has (.+)\? Answer in a sentence\.)",
        lambda x: self.said(self.holder(x), "has", x),
      ),
      (
        r"(?:Say in a sentence what (.+) has\.|What does (.+) have\? Answer in a sentence\.)",
        lambda x: self.said(x, "has", _only(self.things_of(x))),
      ),
      (r"(?:Where|In which place) was (.+) before (.+)\?", self.before),
      (r"(?:Where|In which place) is (.+)\?", self.place),
      (r"(?:Who|Which person) is the best friend of (.+)\?", self.fixed["friend"].get),
      (r"(?:Who|Which person) has (.+)\?", self.holder),
      (r"(?:What colour is|What is the colour of) (.+)\?", self.fixed["colour"].get),
      (r"(?:What|Which material) is (.+) made of\?", self.fixed["made"].get),
      (
        r"From (?:whom|which person) did (.+) get (.+)\?",
        lambda x, y: _only(list(self.givers.get((x, y), ()))),
      ),
      (r"(?:What|Which things?) does (.+) have\?", lambda x: one_of(self.things_of(x))),
      (r"(?:Who|Which person) is in (.+)\?", lambda x: one_of(self.persons_in(x))),
      (r"Which people are in (.+)\?", self.persons_in),
      (r"Which thing is in (.+)\?", lambda x: _only(self.things_in(x))),
      (r"(?:Where did (.+) go|Which places did (.+) go to)\?", lambda x: self.visited(x)),
      (r"How many things does (.+) have\?", lambda x: _NUMBERS[len(self.things_of(x))]),
      (r"How many people are in (.+)\?", lambda x: _NUMBERS[len(self.persons_in(x))]),
      (r"How many places did (.+) go to\?", lambda x: _NUMBERS[len(self.visited(x))]),
      (r"(?:Describe (.+)\.|What is (.+) like\?)", self.description),
      (r"What is told of (.+)\?", self.told),
      (r"Are (.+) and (.+) in the same place\?", self.same),
      (r"Is (.+) in the same place as (.+)\?", self.same),
      (r"Is (.+) the best friend of (.+)\?", lambda x, y: self.equal(self.named_friend(y), x)),
      (r"Is (.+) in (the \w+)\?", lambda x, y: self.equal(self.place(x), y)),
      (r"Does (.+) have (.+)\?", lambda x, y: self.equal(self.holder(y), x)),
      (r"Did (.+) get (.+) from (.+)\?", self.got_from),
      (r"Is (.+) made of (\w+)\?", lambda x, y: self.equal(self.fixed["made"].get(x), y)),
      (
        r"Is (?:the colour of )?(.+) (\w+)\?",
        lambda x, y: self.equal(self.fixed["colour"].get(x), y),
      ),
    ]
    for way, find in asked:
      if match := re.fullmatch(way.replace("(.+)", _PHRASE), question):
        parts = [self.named(text) for text in match.groups() if text]
        return find(*parts) if None not in parts else None
    raise AssertionError(question)

  def visited(self, one):
    return list(dict.fromkeys(place for place in self.trails.get(one, [])))

  def named_friend(self, one):
    return self.fixed["friend"].get(one)

  def got_from(self, taker, thing, giver):
    return self.equal(_only(list(self.givers.get((taker, thing), ()))), giver)


_PHRASE = (
  r"((?:the best friend of |the person who has |the person in |the thing carried by "
  r"|the thing in )*"
  r"(?:the \w+ thing|the thing made of \w+|the \w+|(?!the\b)\w+))"
)
_NUMBERS = ("none", "one", "two", "three", "four", "five", "six")
_LISTS = ("things", "persons", "visited")


def _only(found):
  return found[0] if len(found) == 1 else None


def right_answers(question):
  """What the text gives as the answers of a question, as the generator writes them."""
  kind = question.info["question_kind"]
  found = Reader(question.passage).answer(question.question, several=kind in _LISTS)
  if isinstance(found, list):
    words = [word if word[0].isupper() else f"the {word}" for word in found]
    orders = itertools.permutations(words)
    return {" and ".join([*([", ".join(o[:-1])] if o[1:] else []), o[-1]]) for o in orders}
  return set() if found is None else {found}


DATA = {
  "all": WorldsData(train=3_000, words=99, ways=9, asked=6),
  "few": WorldsData(train=3_000, words=8, kinds=FEW_KINDS, asked=6, easy_options=0.5),
}


@pytest.fixture(scope="module", params=DATA)
def data(request):
  return DATA[request.param]


@pytest.fixture(scope="module")
def loaded(data):
  return {
    split: [data.question(split, i) for i in range(min(600, data.size(split)))]
    for split in data.splits()
  }


def test_no_story_contradicts_itself_nor_tells_a_thing_twice(loaded):
  for split, questions in loaded.items():
    for question in questions:
      assert not Reader(question.passage).wrong, (split, question)


def check_answers(questions):
  """Compares answers with those of the text; returns how many there were of each kind."""
  read = Counter()
  for question in questions:
    found = right_answers(question)
    if question.options:
      given = {question.options[question.label - 1]}
      assert len(set(question.options)) == len(question.options), question
    else:
      given = set(question.answers)
    if question.info["question_kind"] not in (*_LISTS, "told"):
      found = {text.removeprefix("the ") for text in found}
      given = {text.removeprefix("the ") for text in given}
    assert found == given, (question, found)
    read[question.format, question.info["facts"]] += 1
    read[question.info["question_kind"]] += 1
  return read


def test_a_reader_of_the_sentences_finds_the_answers_of_every_kind(data, loaded):
  read = Counter()
  for questions in loaded.values():
    read += check_answers(questions)
  formats = ("extractive", "multiple_choice", "yes_no", "abstractive")
  assert all(read[format, facts] > 20 for format in formats for facts in (1, 2, 3, 4)), read
  assert all(read[kind] for kind in data.kinds or ALL), read


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", DATA)
def test_thousands_of_stories_of_other_seeds_agree_with_their_text(name, seed):
  data = dataclasses.replace(DATA[name], seed=seed, train=6_000)
  for split in data.splits():
    questions = [data.question(split, i) for i in range(data.size(split))]
    check_answers(questions)
    for question in questions:
      assert not Reader(question.passage).wrong, (split, question)
    if split == "train":
      asked = Counter((question.passage, question.question) for question in questions)
      assert max(asked.values()) == 1


def test_the_reader_notices_contradictions():
  for passage in (
    "The best friend of Ida is Tom. Ben is the best friend of Ida.",
    "Ida took the cup. Tom took the cup.",
    "Ida took the cup. Tom sent the cup to Ben.",
    "Ida went to the hall. Ida walked to the hall.",
    "The cup is red. The colour of the cup is blue.",
  ):
    assert len(Reader(passage).wrong) == 1, passage
  assert not Reader("Ida took the cup. Tom bought the cup from Ida. Tom dropped the cup.").wrong


def test_no_question_is_asked_twice_on_a_story(data):
  for story in range(0, data.train, data.asked):
    asked = [data.question("train", story + i) for i in range(data.asked)]
    assert len({question.passage for question in asked}) == 1
    assert len({question.question for question in asked}) == data.asked, asked


def test_a_story_without_so_many_questions_is_an_error():
  with pytest.raises(UserError, match="asked is 500"):
    WorldsData(asked=500, train=500, kinds=FEW_KINDS).question("train", 0)


def test_new_names_are_made_of_tokens_that_training_uses():
  task = worlds().task
  data = task.data.seeds[0]
  # The stories that the run's tokenizer is trained on, with one of six questions on each.
  alone = dataclasses.replace(data, asked=1)
  train = [alone.question("train", i) for i in range(task.tokenizer_questions // data.asked)]
  tokenizer = train_tokenizer(texts_of(train), task.tokenizer)
  texts = [*texts_of(train), *(f"The friend of {name} is {name}." for name in INVENTED_NAMES)]
  used = {token for text in texts for token in tokenizer.encode(text)}
  new = [data.question("names", i) for i in range(400)]
  found = {token for text in texts_of(new) for token in tokenizer.encode(text)}
  assert UNK not in used | found
  assert found <= used


def test_the_generator_has_a_version_in_its_configuration():
  data = WorldsData()
  saved = to_json(data)
  assert saved["version"] == data.version == 2
  assert "generator 2" in data.describe()
  del saved["version"]
  old = from_json(WorldsData, saved)
  assert old.version == 1
  assert old != data
  with pytest.raises(UserError, match=r"version is 1.*Set version to 2"):
    old.question("test", 0)
  with pytest.raises(UserError, match="version is 1"):
    old.load("test")
  with pytest.raises(UserError, match="version is 3"):
    WorldsData(version=3)
