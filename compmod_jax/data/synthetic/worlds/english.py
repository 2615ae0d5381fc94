"""The worlds in English: sentences of stories, questions, options and answers."""

import itertools
from collections.abc import Sequence

from compmod_jax.data.qa.question import Question
from compmod_jax.data.synthetic.worlds.drafts import Draft, Plan
from compmod_jax.data.synthetic.worlds.lexicon import CLASSES, NUMERALS
from compmod_jax.data.synthetic.worlds.queries import Query, Value
from compmod_jax.data.synthetic.worlds.stories import Random, pick
from compmod_jax.data.synthetic.worlds.world import Event

SENTENCES: dict[str, tuple[str, ...]] = {
  "go": ("{1} went to the {2}.", "{1} walked to the {2}."),
  "take": ("{1} took the {2}.", "{1} picked up the {2}.", "{1} grabbed the {2}."),
  "pass": (
    "{1} sent the {3} to {2}.",
    "{1} sold the {3} to {2}.",
    "{2} got the {3} from {1}.",
    "{2} bought the {3} from {1}.",
  ),
  "drop": ("{1} dropped the {2}.", "{1} put down the {2}."),
  "leave": ("Someone left the {1} in the {2}.", "Someone put the {1} in the {2}."),
  "colour": ("The {1} is {2}.", "The colour of the {1} is {2}."),
  "material": ("The {1} is made of {2}.", "The {1} consists of {2}."),
  "friend": ("The best friend of {1} is {2}.", "{2} is the best friend of {1}."),
}
"""kind of event -> its sentences; no two events share a sentence"""

_PHRASES = {
  "friend": "the best friend of {}",
  "holder": "the person who has {}",
  "occupant": "the person in {}",
  "possession": "the thing carried by {}",
  "coloured": "the {} thing",
  "made": "the thing made of {}",
  "inside": "the thing in {}",
}
_QUESTIONS = {
  "place": ("Where is {}?", "In which place is {}?"),
  "holder": ("Who has {}?", "Which person has {}?"),
  "friend": ("Who is the best friend of {}?", "Which person is the best friend of {}?"),
  "colour": ("What colour is {}?", "What is the colour of {}?"),
  "material": ("What is {} made of?", "Which material is {} made of?"),
  "giver": ("From whom did {} get {}?", "From which person did {} get {}?"),
  "before": ("Where was {} before {}?", "In which place was {} before {}?"),
  "possession": ("What does {} have?", "Which thing does {} have?"),
  "occupant": ("Who is in {}?", "Which person is in {}?"),
  "inside": ("Which thing is in {}?",),
  "things": ("What does {} have?", "Which things does {} have?"),
  "persons": ("Who is in {}?", "Which people are in {}?"),
  "visited": ("Where did {} go?", "Which places did {} go to?"),
  "count things": ("How many things does {} have?",),
  "count persons": ("How many people are in {}?",),
  "count visited": ("How many places did {} go to?",),
  "describe": ("Describe {}.", "What is {} like?"),
  "told": ("What is told of {}?",),
  "sentence place": ("Say in a sentence where {} is.", "Where is {}? Answer in a sentence."),
  "sentence holder": ("Say in a sentence who has {}.", "Who has {}? Answer in a sentence."),
  "sentence possession": (
    "Say in a sentence what {} has.",
    "What does {} have? Answer in a sentence.",
  ),
  "equal place": ("Is {} in {}?",),
  "equal holder": ("Does {1} have {0}?",),
  "equal friend": ("Is {1} the best friend of {0}?",),
  "equal colour": ("Is {} {}?", "Is the colour of {} {}?"),
  "equal material": ("Is {} made of {}?",),
  "equal giver": ("Did {} get {} from {}?",),
  "same": ("Are {} and {} in the same place?", "Is {} in the same place as {}?"),
}
_SENTENCE_ANSWERS = {
  "place": "{0} is in {1}",
  "holder": "{1} has {0}",
  "possession": "{0} has {1}",
}


def question(
  random: Random, plan: Plan, draft: Draft, sentences: Sequence[str], ways: int
) -> Question:
  """A question with its story, options and answers.

  Args:
    random: draws from [0, 1).
    plan: its format and number of facts.
    draft: what is asked.
    sentences: of the story, one for each event.
    ways: to put a question, at most.
  """
  right: tuple[str, ...] = ()
  if draft.kind == "told":
    pairs = zip(sentences, draft.events, strict=True)
    right = (" ".join(told for told, event in pairs if event in draft.value),)
  elif draft.value is not None and not draft.options:
    right = answers(draft.query, draft.value)
  return Question(
    format=plan.format,
    question=asked(random, draft.query, ways),
    passage=" ".join(sentences),
    options=tuple(map(with_article, draft.options)),
    answers=right,
    label=1 + draft.options.index(draft.value) if draft.options else 0,
    info={"facts": plan.facts, "supporting": draft.supporting, "question_kind": draft.kind},
  )


def with_article(word: str) -> str:
  """The word as a noun phrase: places and things take `the`."""
  return f"the {word}" if CLASSES.get(word) in ("place", "thing") else word


def sentence(random: Random, event: Event, ways: int) -> str:
  """The event in one of the first so many ways to tell it."""
  return pick(random, SENTENCES[event[0]][:ways]).format(*event)


def phrase(query: Query) -> str:
  """What a query describes, such as `the thing carried by the best friend of Anna`."""
  if query[0] == "is":
    return with_article(query[1])
  part = query[1]
  bare = query[0] in ("coloured", "made")
  return _PHRASES[query[0]].format(part[1] if bare else phrase(part))


def asked(random: Random, query: Query, ways: int) -> str:
  """The question after a query's value, in one of the first so many ways to put it."""
  kind, parts = query[0], query[1:]
  if kind in ("count", "sentence", "equal"):
    inner = parts[0]
    kind, parts = f"{kind} {inner[0]}", (*inner[1:], *parts[1:])
  return _capital(pick(random, _QUESTIONS[kind][:ways]).format(*map(phrase, parts)))


def answers(query: Query, value: Value) -> tuple[str, ...]:
  """The value in words; lists in every order, that of the story first."""
  kind = query[0]
  if kind == "count":
    return (NUMERALS[value - 1],)
  if kind == "describe":
    colour, thing, material = value
    made = f" made of {material}" if material else ""
    return (f"a {colour + ' ' if colour else ''}{thing}{made}",)
  if kind == "sentence":
    text = _SENTENCE_ANSWERS[query[1][0]].format(*map(with_article, value))
    return (_capital(text),)
  if isinstance(value, tuple):
    return tuple(map(_enumeration, itertools.permutations(map(with_article, value))))
  return (with_article(value),)


def _enumeration(phrases: tuple[str, ...]) -> str:
  *others, last = phrases
  return f"{', '.join(others)} and {last}" if others else last


def _capital(text: str) -> str:
  return text[0].upper() + text[1:]
