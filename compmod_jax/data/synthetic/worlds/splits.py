"""The worlds as a data source: which question stands where, and which story in which split."""

import dataclasses
import functools
import hashlib
import random
import re
from collections.abc import Sequence
from typing import overload

from compmod_jax.core.config import absent
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.data.qa.question import FORMATS, Format, Question, Questions
from compmod_jax.data.synthetic.worlds import english, syntax
from compmod_jax.data.synthetic.worlds.drafts import Draft, Plan, draw
from compmod_jax.data.synthetic.worlds.further import draw_further
from compmod_jax.data.synthetic.worlds.lexicon import (
  COLOURS,
  INVENTED_NAMES,
  MATERIALS,
  NAMES,
  NEW_NAMES,
  PLACES,
  THINGS,
)
from compmod_jax.data.synthetic.worlds.passages import passage
from compmod_jax.data.synthetic.worlds.queries import Query
from compmod_jax.data.synthetic.worlds.repertoire import ALL, Repertoire
from compmod_jax.data.synthetic.worlds.stories import Cast, Random, pick, several

VERSION = 2
"""of the generator; each change of what any field's value gives is another version"""
SPLITS = ("train", "valid", "test", "facts", "names", "length")
FACTS = 3  # that a training question needs at most
UNTOLD = 5  # one extractive question in so many has no answer
_FEWEST = 8
_STORIES = 50  # told until one has enough different questions
_PLANS = 12  # of a further question, until one fits the story
_CYCLE = len(FORMATS) * FACTS
_CHOICE: tuple[Format, ...] = ("multiple_choice",)
_NO_CHOICE: tuple[Format, ...] = ("yes_no", "yes_no", "extractive", "abstractive")
"""formats of further questions on a story; yes or no tells a learner least, so it is there twice"""


@dataclasses.dataclass(frozen=True)
class WorldsData:
  """Questions about small simulated worlds that are told in English, with gold answers.

  Persons go to places, take, pass on and drop things, which have colours and materials, and have
  best friends. Answers follow from what is told, in one to three facts: sentences without any one
  of which another answer would follow, or none. What is not told did not happen.

  Question i of a split depends on the split's name, i, and all fields but the sizes of splits.
  `valid`, `test` and `train` have one distribution: any twelve in a row, from a multiple of twelve
  on, have each of the four formats with each of one, two and three facts. Yes/no questions are
  answered yes in one such turn and no in the next, options are 2, 3 and 4 by turns, and in each
  fifth turn extractive questions have no answer: one sentence that they need is left out. With
  several questions on a training story (`asked`) shares differ: more are answered by yes or no, and
  fewer need three facts. A hash of the passage says which split may hold it, for every seed, so
  that no passage is in two of them.

  Answers cannot be told without reading: wrong options and denied answers are of the same story,
  which has at least four words that the answer could be, and where facts stand is drawn at random.
  Only the last sentence is needed less often than others. `data/qa/baselines.py` measures this.

  No story contradicts itself or tells a thing twice, and no question is asked twice on a story.

  Out of distribution: `facts`, one fact more than training ever needs; `names`, persons whose names
  training does not have, made of syllables that its invented names have; `length`, stories with 3
  sentences more than the longest in training, up to twice as many.

  Annotations (`Question.info`): `facts`, their number, where there is no answer the number that it
  would need; `supporting`, the numbers of their sentences in the passage, from 0 (empty without an
  answer); `question_kind`, what is asked for, one of `repertoire.KINDS`.
  """

  train: int = 100_000
  """training questions"""
  valid: int = 1_200
  """validation questions"""
  test: int = 2_400
  """test questions"""
  shifted: int = 1_200
  """questions of each out-of-distribution split"""
  seed: int = 0
  """another seed, another draw of every split"""
  shortest: int = 5
  """sentences of the shortest story in training; what a question needs can make stories longer"""
  longest: int = 8
  """sentences of the longest story in training"""
  words: int = 12
  """words of every class (persons, places, things, colours, materials), at most: few are learned
  sooner"""
  ways: int = 1
  """ways to tell an event and to put a question, at most"""
  kinds: tuple[str, ...] = ()
  """kinds of questions, of `repertoire.ALL`; none: all. Stories tell what they are about alone, and
  who took what; questions describe persons and things by nothing else"""
  asked: int = 1
  """training: questions on each story, one after another; those after the first are answered by any
  sentences of it"""
  easy_options: float = 0.0
  """training: share of multiple-choice questions whose wrong options the story does not have; to
  find out which option it has is a first step towards finding out why"""
  invented: float = 0.25
  """training: share of stories whose persons have invented names, each one of some thousand, so
  that a model learns to read names that it has not seen"""
  version: int = dataclasses.field(default=VERSION, metadata=absent(1))
  """of the generator: other versions made other questions of the same settings. Configurations that
  were saved without it are of version 1, which had stories that contradict themselves, repeated
  questions, and new names without tokens; it cannot be drawn from any more"""

  def __post_init__(self) -> None:
    for field in ("train", "valid", "test", "shifted"):
      size = getattr(self, field)
      check(size > 0, f"{field} is {size}; a split needs at least one question: give 1 or more.")
    check(
      8 <= self.longest <= 16,
      f"longest is {self.longest}; it must be from 8, which the questions of most facts need, to"
      " 16, which the words suffice for: choose a number in that range.",
    )
    check(
      self.words >= _FEWEST,
      f"words is {self.words}; long stories have {_FEWEST} of a class: give {_FEWEST} or more.",
    )
    for kind in self.kinds:
      check_choice("kinds", kind, ALL)
    lacking = self._repertoire.lacking(FACTS + 1)
    check(
      not lacking,
      f"kinds is {self.kinds}, which leaves nothing to ask for in {lacking[:1]} (format, facts);"
      " add one that worlds.repertoire.KINDS has there.",
    )
    for field in ("easy_options", "invented"):
      share = getattr(self, field)
      check(0 <= share <= 1, f"{field} is {share}; it is a share: give a number from 0 to 1.")
    check(
      1 <= self.version <= VERSION,
      f"version is {self.version}; the generator's is {VERSION}: leave it out.",
    )
    for field in ("ways", "asked"):
      value = getattr(self, field)
      check(value >= 1, f"{field} is {value}; give 1 or more.")
    check(
      3 <= self.shortest <= self.longest,
      f"shortest is {self.shortest}; it must be from 3 to longest, which is {self.longest}: change"
      " either.",
    )

  @property
  def _repertoire(self) -> Repertoire:
    return _repertoire(self.kinds)

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return SPLITS

  def size(self, split: str) -> int:
    """The number of questions of a split.

    Raises:
      UserError: `split` is none of `splits()`.
    """
    check_choice("split", split, SPLITS)
    return getattr(self, split if split in ("train", "valid", "test") else "shifted")

  def describe(self) -> str:
    """What the data are, in a sentence."""
    kinds = f", {len(self.kinds)} of {len(ALL)} kinds" if self.kinds else ""
    return (
      f"Questions about simulated worlds in four formats, of 1 to {FACTS} facts, stories of"
      f" {self.shortest} to {self.longest} sentences{kinds}: {self.train:,} for training,"
      f" {self.valid:,} for validation, {self.test:,} for tests and {self.shifted:,} in each of"
      f" {', '.join(SPLITS[3:])} (seed {self.seed}, generator {self.version})."
    )

  def load(self, split: str) -> Questions:
    """The questions of a split, made whenever one is asked for: keep what is used often.

    Raises:
      UserError: `split` is none of `splits()`.
    """
    self._check_version()
    made = _Made(self, split)
    return Questions(
      made,
      lambda i: f"worlds:{split}[{i}]",
      relations=lambda i: syntax.relations(made[i].passage),
    )

  def question(self, split: str, index: int) -> Question:
    """One question: what `load` has there.

    Raises:
      UserError: `split` is none of `splits()`, or has no such index.
    """
    return self.drawn(split, index)[0]

  def drawn(self, split: str, index: int) -> tuple[Question, Draft]:
    """A question and what it was before it was put in English, the events of its story included.

    Raises:
      UserError: `split` is none of `splits()`, or has no such index.
    """
    size = self.size(split)
    check(
      0 <= index < size,
      f"index is {index}; the split {split} has {size:,} questions: choose 0 to {size - 1}.",
    )
    self._check_version()
    if split != "train":
      return self._first(self._draws(split, str(index)), split, index)
    story, number = divmod(index, self.asked)
    return _story(self, story)[number]

  def _check_version(self) -> None:
    check(
      self.version == VERSION,
      f"version is {self.version}: these worlds were made by a generator that is not kept, as its"
      f" stories contradicted themselves. Set version to {VERSION} for the present one, whose"
      " questions are others, or use a revision of this project from before it.",
    )

  def _further(
    self, draws: Random, story: int, asked: Sequence[tuple[Question, Draft]]
  ) -> tuple[Question, Draft] | None:
    """A question on a training story that is none of those asked; None if none is found soon."""
    (question, first), number = asked[0], len(asked)
    before = {_same_question(other.query) for _, other in asked}
    texts = {other.question for other, _ in asked}
    choices = question.format in _CHOICE
    sentences = re.findall(r"[^. ][^.]*\.", question.passage)
    for turn in range(_PLANS):
      format = pick(draws, _CHOICE if choices else _NO_CHOICE)  # one task for all on a story
      plan = Plan(
        format=format,
        facts=1 + int(FACTS * draws()),
        sentences=(self.shortest, self.longest),
        options=2 + number % 3 if choices else 0,
        right=draws() < 0.5,
        told=format != "extractive" or draws() >= 1 / UNTOLD,
        choices=2,  # stories about persons name few places
      )
      plan = self._eased(draws, plan, self._people("train", story))
      # What needs one fact alone is soon asked; it is left for when there is nothing else.
      for facts in dict.fromkeys((plan.facts, 2, *(1,) * (turn >= 2))):
        plan = dataclasses.replace(plan, facts=facts)
        draft = draw_further(draws, plan, first.events, self._repertoire)
        if draft is None or _same_question(draft.query) in before:
          continue
        made = english.question(draws, plan, draft, sentences, self.ways)
        if made.question not in texts:
          return made, draft
    return None

  def _draws(self, split: str, name: str) -> Random:
    """Draws from [0, 1) of a question's own."""
    digest = hashlib.blake2b(f"{self.seed} {split} {name}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big")).random

  def _first(self, draws: Random, split: str, index: int) -> tuple[Question, Draft]:
    """The first question on a story."""
    people = self._people(split, index)
    words = self._words(people)
    plan = self._plan(split, index)
    if split == "train":
      # Stories about one fact would leave further questions nothing that needs two.
      facts = max(plan.facts, min(2, self.asked))
      plan = self._eased(draws, dataclasses.replace(plan, facts=facts), people)
    while True:
      draft = draw(draws, words, plan, self._repertoire)
      sentences = passage(draws, split, draft.events, self.ways)
      if sentences is not None:
        return english.question(draws, plan, draft, sentences, self.ways), draft

  def _people(self, split: str, story: int) -> Sequence[str]:
    """The names that the persons of a story can have."""
    draws = self._draws(split, f"{story} people")
    if split == "names":
      return several(draws, NEW_NAMES, self._persons)
    if split == "train" and draws() < self.invented:
      return several(draws, INVENTED_NAMES, self._persons)
    return NAMES[: self.words]

  @property
  def _persons(self) -> int:
    """How many names a story of invented ones chooses from."""
    return min(self.words, len(NAMES))

  def _words(self, people: Sequence[str]) -> Cast:
    """The words of every class that there are, with these names."""
    lists = (PLACES, THINGS, COLOURS, MATERIALS)
    return Cast(people, *(of_class[: self.words] for of_class in lists))

  def _eased(self, draws: Random, plan: Plan, people: Sequence[str]) -> Plan:
    """The plan of a training question, with wrong options of other stories now and then."""
    if not plan.options or draws() >= self.easy_options:
      return plan
    return dataclasses.replace(plan, outside=self._words(people))

  def _plan(self, split: str, index: int) -> Plan:
    """What the question at a place is like."""
    turn, place = divmod(index, _CYCLE)
    format = FORMATS[place % len(FORMATS)]
    short = (self.shortest, self.longest)
    return Plan(
      format=format,
      facts=FACTS + 1 if split == "facts" else 1 + place // len(FORMATS),
      sentences=(self.longest + 3, 2 * self.longest) if split == "length" else short,
      options=2 + turn % 3 if format == "multiple_choice" else 0,
      right=turn % 2 == 0,
      told=format != "extractive" or turn % UNTOLD > 0,
    )


@functools.cache
def _repertoire(kinds: tuple[str, ...]) -> Repertoire:
  return Repertoire(kinds or ALL)


def _same_question(query: Query) -> Query:
  """The query, in one order of its parts if either order asks the same."""
  return ("same", *sorted(query[1:], key=str)) if query[0] == "same" else query


@functools.lru_cache(maxsize=8)
def _story(data: WorldsData, number: int) -> list[tuple[Question, Draft]]:
  """All questions on a training story, kept as they are looked at one after another.

  Raises:
    UserError: no story has so many different questions.
  """
  for attempt in range(_STORIES):
    draws = data._draws("train", f"{number}.{attempt}" if attempt else str(number))
    found = [data._first(draws, "train", number)]
    while len(found) < data.asked:
      further = data._further(draws, number, found)
      if further is None:
        break
      found.append(further)
    else:
      return found
  raise UserError(
    f"asked is {data.asked}, and in {_STORIES} stories there were not so many different questions"
    " on one: lower asked, or raise longest."
  )


class _Made(Sequence[Question]):
  """The questions of a split, each made when it is looked at."""

  def __init__(self, config: WorldsData, split: str):
    self._config = config
    self._split = split
    self._size = config.size(split)

  def __len__(self) -> int:
    return self._size

  @overload
  def __getitem__(self, number: int) -> Question: ...

  @overload
  def __getitem__(self, number: slice) -> list[Question]: ...

  def __getitem__(self, number: int | slice) -> Question | list[Question]:
    numbers = range(self._size)[number]
    if isinstance(numbers, range):
      return [self._config.question(self._split, i) for i in numbers]
    return self._config.question(self._split, numbers)
