"""How far tricks go: answers from the question alone, from one sentence, from order and number.

A set of questions tests the understanding of passages only as far as these baselines fail. Each is
a table of what was most often right in training under what it sees, from the most specific key down
to the format alone. All answer all formats, and work for any questions.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from compmod_jax.data.qa.question import FORMATS, Format, Question

_WORD = re.compile(r"\w+")
_NAME = re.compile(r"\w+@\d+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_SEEN = 4  # a key counts if training has at least this number of questions with it

Kinds = Mapping[str, str]  # content word -> its kind, such as Anna -> person


class View(NamedTuple):
  """What a baseline sees of a question.

  Attributes:
    keys: of the table, most specific first.
    names: word or whole option -> what it is called in answers and options, such as `person@0`;
      None where options differ by their numbers alone.
  """

  keys: Sequence[Hashable]
  names: Mapping[str, str] | None


@dataclasses.dataclass(frozen=True)
class Score:
  """How a baseline does on the test questions of a format.

  Attributes:
    baseline: its name.
    format: of the questions.
    count: number of them.
    score: share answered exactly right.
    chance: see `chance`.
  """

  baseline: str
  format: Format
  count: int
  score: float
  chance: float

  @property
  def error(self) -> float:
    """Standard error of the score."""
    return math.sqrt(self.score * (1 - self.score) / self.count)


def is_right(question: Question, answer: str) -> bool:
  """Whether an answer, as a model should write it, is one of the right ones, to the letter."""
  return answer in (question.answers or (question.answer,))


def chance(questions: Iterable[Question]) -> dict[Format, float]:
  """What guessing gives: format -> share of right answers, for formats that occur.

  One in the number of options in multiple choice, a half in yes/no, and the share of the most
  frequent answer in the other two, where to have no answer counts as one.
  """
  groups: dict[Format, list[Question]] = {format: [] for format in FORMATS}
  for question in questions:
    groups[question.format].append(question)
  found: dict[Format, float] = {}
  for format, group in groups.items():
    if group and format == "multiple_choice":
      found[format] = sum(1 / len(question.options) for question in group) / len(group)
    elif group and format == "yes_no":
      found[format] = 0.5
    elif group:
      answers = collections.Counter(question.answer for question in group)
      found[format] = answers.most_common(1)[0][1] / len(group)
  return found


def names_in(questions: Iterable[Question]) -> dict[str, str]:
  """Words that are always written with a capital letter, as content words of one kind."""
  capital: set[str] = set()
  small: set[str] = set()
  for question in questions:
    for word in _WORD.findall(f"{question.passage} {question.question}"):
      (capital if word[0].isupper() else small).add(word)
  return {word: "name" for word in capital if word.lower() not in small}


def scores(
  train: Sequence[Question], test: Sequence[Question], kinds: Kinds | None = None
) -> list[Score]:
  """All baselines, trained and tested.

  Args:
    train: questions to fill the tables from.
    test: questions to answer.
    kinds: content words; those of one kind count as the same word in the wording of a question, and
      by their order elsewhere. None: `names_in(train)`.

  Returns:
    A score for each of `BASELINES` and each format of the test questions.
  """
  kinds = names_in(train) if kinds is None else kinds
  found = []
  for name, view in BASELINES.items():
    table = _Table(view, kinds)
    for question in train:
      table.add(question)
    right: collections.Counter[Format] = collections.Counter()
    for question in test:
      right[question.format] += is_right(question, table.answer(question))
    counts = collections.Counter(question.format for question in test)
    found += [
      Score(name, format, counts[format], right[format] / counts[format], expected)
      for format, expected in chance(test).items()
    ]
  return found


class _Table:
  """What was right in training, by what a view shows."""

  def __init__(self, view: Callable[[Question, Kinds], View], kinds: Kinds):
    self._view, self._kinds = view, kinds
    self._seen: collections.Counter[Hashable] = collections.Counter()
    self._right: dict[Hashable, collections.Counter[str]] = {}
    self._offered: dict[Hashable, collections.Counter[str]] = {}
    self._rankings: dict[Hashable, list[tuple[str, list[str]]]] = {}

  def add(self, question: Question) -> None:
    """Counts a training question under all keys."""
    self._rankings.clear()
    view = self._view(question, self._kinds)
    options = _options(question, view)
    answer = options[question.label - 1] if options else _renamed(question.answer, view.names or {})
    for key in view.keys:
      self._seen[key] += 1
      self._right.setdefault(key, collections.Counter())[answer] += 1
      if options:
        self._offered.setdefault(key, collections.Counter()).update(options)

  def answer(self, question: Question) -> str:
    """What was most often right under the first key that training has enough questions with."""
    view = self._view(question, self._kinds)
    key = next((key for key in view.keys if self._seen[key] >= _SEEN), view.keys[-1])
    right = self._right.get(key, collections.Counter())
    options = _options(question, view)
    if options:
      offered = self._offered.get(key, collections.Counter())
      rates = [right[option] / max(offered[option], 1) for option in options]
      return f"({rates.index(max(rates)) + 1})"
    words = {name: word for word, name in (view.names or {}).items()}
    for answer, names in self._ranking(key):
      if all(name in words for name in names):
        return _NAME.sub(lambda name: words[name[0]], answer)
    return ""

  def _ranking(self, key: Hashable) -> list[tuple[str, list[str]]]:
    """Answers under a key, the most frequent first, and the names in each; sorted once."""
    if key not in self._rankings:
      right = self._right.get(key, collections.Counter())
      self._rankings[key] = [(one, _NAME.findall(one)) for one, _ in right.most_common()]
    return self._rankings[key]


def _options(question: Question, view: View) -> list[str]:
  """What tells the options apart: their numbers, their text, or names of what they hold."""
  if view.names is None:
    return [str(i) for i in range(len(question.options))]
  if not view.names:
    return list(question.options)
  return [
    view.names.get(text) or (new if (new := _renamed(text, view.names)) != text else "elsewhere")
    for text in question.options
  ]


def _renamed(text: str, names: Mapping[str, str]) -> str:
  return _WORD.sub(lambda word: names.get(word[0], word[0]), text)


def _keys(question: Question, kinds: Kinds, *specific: str) -> list[Hashable]:
  """Specific keys, the question with content words replaced by their kinds, the format alone."""
  format = (question.format, len(question.options))
  wording = _renamed(question.question, kinds)
  return [*((*format, text) for text in (*specific, wording)), format]


def _numbered(words: Iterable[str], kinds: Kinds) -> dict[str, str]:
  """Content words, numbered within their kind in the order given."""
  counts: collections.Counter[str] = collections.Counter()
  names: dict[str, str] = {}
  for word in words:
    kind = kinds.get(word)
    if kind is not None and word not in names:
      names[word] = f"{kind}@{counts[kind]}"
      counts[kind] += 1
  return names


def majority(question: Question, kinds: Kinds) -> View:
  """Sees the wording and the number of options."""
  return View(_keys(question, kinds), None)


def question_only(question: Question, kinds: Kinds) -> View:
  """Sees the question and its options."""
  return View(_keys(question, kinds, question.question), {})


def last_sentence(question: Question, kinds: Kinds) -> View:
  """Sees the question and the last sentence; which content words they share, not which they are."""
  last = _SENTENCE.split(question.passage.strip())[-1]
  both = f"{question.question} | {last}"
  names = _numbered(_WORD.findall(both), kinds)
  return View(_keys(question, kinds, _renamed(both, names)), names)


def latest(question: Question, kinds: Kinds) -> View:
  """Sees the wording, and which option or content word is mentioned last, second last and so on."""
  return _ranked(question, kinds, lambda places: -places[-1])


def most_frequent(question: Question, kinds: Kinds) -> View:
  """Sees the wording, and which option or content word is mentioned most often, and so on."""
  return _ranked(question, kinds, lambda places: -len(places))


def _ranked(question: Question, kinds: Kinds, rank: Callable[[list[int]], int]) -> View:
  """Options, or words that the question has not, called by their rank in the passage."""
  keys = _keys(question, kinds)
  places: dict[str, list[int]] = {}
  if question.options:
    for text in question.options:
      hits = re.finditer(rf"(?<!\w){re.escape(text)}(?!\w)", question.passage)
      places[text] = [hit.start() for hit in hits] or [-1]
    order = sorted(places, key=lambda text: rank(places[text]))
    return View(keys, {text: f"option@{i}" for i, text in enumerate(order)})
  asked = set(_WORD.findall(question.question))
  for i, word in enumerate(_WORD.findall(question.passage)):
    if word in kinds and word not in asked:
      places.setdefault(word, []).append(i)
  return View(keys, _numbered(sorted(places, key=lambda word: rank(places[word])), kinds))


BASELINES: dict[str, Callable[[Question, Kinds], View]] = {
  "majority": majority,
  "question only": question_only,
  "last sentence": last_sentence,
  "latest": latest,
  "most frequent": most_frequent,
}
"""name -> what the baseline sees"""
