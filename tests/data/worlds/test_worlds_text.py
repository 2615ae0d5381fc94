"""Stories by their text alone: a reader of plain sentences finds no contradiction.

Nothing of the generator but its questions is used: sentences are taken apart here, and the answers
follow from what this reader notes.
"""

import dataclasses
import re
from collections import Counter

import pytest

from compmod_jax.data.qa.coded import texts_of
from compmod_jax.data.tokenizer import UNK, train_tokenizer
from compmod_jax.data.worlds import FEW_KINDS, WorldsData
from compmod_jax.data.worlds.lexicon import INVENTED_NAMES
from compmod_jax.errors import UserError
from compmod_jax.serialise import from_json, to_json
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
    self.wrong = []
    for sentence in passage.rstrip(".").split(". "):
      found = [(kind, m) for kind, way in _WAYS if (m := re.fullmatch(way, sentence))]
      assert found, sentence
      kind, match = found[0]
      getattr(self, f"_{kind}", lambda m, k=kind: self._state(k, m))(match)

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
    self.has[thing] = taker

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

  def named(self, text):
    """The person or thing that a phrase is about, and nobody if it does not follow."""
    if match := re.fullmatch(r"the best friend of (.+)", text):
      return self.fixed["friend"].get(self.named(match[1]))
    if match := re.fullmatch(r"the person who has (.+)", text):
      return self.has.get(self.named(match[1]))
    if re.search(" ", text.removeprefix("the ")):
      raise LookupError(text)
    return text.removeprefix("the ")

  def answer(self, question):
    """The answer, with "" where it does not follow; LookupError for other kinds of questions."""
    if match := re.fullmatch(r"(?:Where|In which place) is (.+)\?", question):
      return self.place(self.named(match[1])) or ""
    if match := re.fullmatch(r"(?:Who|Which person) is the best friend of (.+)\?", question):
      return self.fixed["friend"].get(self.named(match[1])) or ""
    if match := re.fullmatch(r"(?:Who|Which person) has (.+)\?", question):
      return self.has.get(self.named(match[1])) or ""
    if match := re.fullmatch(r"Is (.+) in (the \w+)\?", question):
      return "yes" if self.place(self.named(match[1])) == match[2][4:] else "no"
    raise LookupError(question)


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


def test_a_reader_of_the_sentences_finds_the_answers(loaded):
  read = Counter()
  for split, questions in loaded.items():
    for question in questions:
      try:
        found = Reader(question.passage).answer(question.question)
      except LookupError:
        continue
      right = question.options[question.label - 1] if question.options else question.answer
      assert found == right.removeprefix("the "), (split, question)
      read[question.format] += 1
  assert all(read[format] > 60 for format in ("extractive", "multiple_choice", "yes_no")), read


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
