"""The lexicon arranged for drawing: word numbers by class, tokens ready made."""

from collections.abc import Callable
from typing import NamedTuple

from compmod_jax.data.synthetic.grammar import inflect, lexicon
from compmod_jax.data.synthetic.grammar.inflect import HE, ME, THEY, WE, Tokens
from compmod_jax.data.synthetic.grammar.lexicon import ADJECTIVES, NOUNS
from compmod_jax.data.synthetic.grammar.verbs import VERBS

_CLASSES = "patl"


def _index(matches: Callable[[str], list[int]]) -> dict[str, list[int]]:
  """For every class, the numbers of the words that go with it."""
  return {kind: matches(kind) for kind in _CLASSES}


def _noun_classes() -> dict[str, list[int]]:
  sets = {verb.objects for verb in VERBS} | {verb.subjects for verb in VERBS}
  sets |= {"p", "a", "t", "l", "pl", "at", "patl"}
  return {kinds: [i for i, n in enumerate(NOUNS) if n.kind in kinds] for kinds in sets}


NOUNS_OF = _noun_classes()
MASCULINE_OF = {
  kinds: [i for i in numbers if NOUNS[i].gender == "m"] for kinds, numbers in NOUNS_OF.items()
}
ADJECTIVES_OF = _index(lambda k: [i for i, a in enumerate(ADJECTIVES) if k in a.kinds])
FRAMES = {
  frame: [i for i, verb in enumerate(VERBS) if verb.frame == frame]
  for frame in dict.fromkeys(verb.frame for verb in VERBS)
}
RELATIVE_FRAMES = ("transitive", "transitive", "intransitive", "motion", "dative")
DOES = {
  (frame, k): [i for i in numbers if k in VERBS[i].subjects]
  for frame, numbers in FRAMES.items()
  for k in _CLASSES
}
SUFFERS = {
  k: [i for i in (*FRAMES["transitive"], *FRAMES["dative"]) if k in VERBS[i].objects]
  for k in _CLASSES
}
_SINGULAR = "der " * 10 + "ein " * 5 + "dies dies mein mein sein unser jed kein"
_PLURAL = "der " * 7 + "# # # # dies dies mein sein unser viel viel einig einig kein"
_DEFINITE = ["der", "der", "der", "der", "dies", "mein", "sein", "unser"]
# By the choice and the number: `#` is a numeral alone.
DETERMINERS = {
  "any": (_SINGULAR.split(), _PLURAL.split()),
  "positive": tuple(
    [stem for stem in stems.split() if stem != "kein"] for stems in (_SINGULAR, _PLURAL)
  ),
  "definite": (_DEFINITE, _DEFINITE),
}
ENGLISH_DETERMINERS = {
  stem: tuple(inflect.tokens(word, "det") for word in words)
  for stem, words in inflect.DETERMINERS.items()
}
NUMERALS = [((german, "num"), (english, "num")) for german, english in lexicon.NUMERALS]
ENGLISH_NOUN = [tuple((form, "noun") for form in noun.english) for noun in NOUNS]
ENGLISH_ADJECTIVE = [(adjective.english, "adj") for adjective in ADJECTIVES]
ADVERBS = [((german, "adv"), (english, "adv")) for german, english in lexicon.ADVERBS]
SUBJECT_PRONOUNS = [
  ("ich", "I", ME),
  ("er", "he", HE),
  ("wir", "we", WE),
  ("sie", "she", HE),
  ("sie", "they", THEY),
]
OBJECT_PRONOUNS = {
  "acc": [("mich", "me"), ("ihn", "him"), ("uns", "us")],
  "dat": [("mir", "me"), ("ihm", "him"), ("uns", "us")],
}
TIMES = {
  when: [
    (inflect.tagged(german), inflect.tagged(english))
    for german, english, label in lexicon.TIMES
    if label in ("any", when)
  ]
  for when in ("present", "past", "future")
}
# One row a sentence: the tenses of all its clauses.
TENSES = {
  "past": ["past", "past", "past", "perfect", "perfect", "perfect", "pluperfect"],
  "present": [*["present"] * 3, "future", "can", "must", "want", "may", "ought"],
}


class Preposition(NamedTuple):
  """A preposition with its tokens, its case and the classes of nouns behind it."""

  german: str
  case: str
  english: Tokens
  kinds: str


def _preposition(entry: tuple[str, str, str, str]) -> Preposition:
  german, case, english, kinds = entry
  return Preposition(german, case, inflect.tokens(english, "prep"), kinds)


NOUN_PREPOSITIONS = [_preposition(entry) for entry in lexicon.NOUN_PREPOSITIONS]
PLACE_PREPOSITIONS = [_preposition(entry) for entry in lexicon.PLACE_PREPOSITIONS]
MOTION_PREPOSITIONS = [_preposition(entry) for entry in lexicon.MOTION_PREPOSITIONS]
BENEFIT_PREPOSITION = _preposition(lexicon.BENEFIT_PREPOSITION)
