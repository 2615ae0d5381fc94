"""Forms of words: articles, adjective endings, noun cases and verb groups in both languages.

A token is a pair (word, tag); phrases are sequences of tokens.
"""

import functools
from typing import NamedTuple

from compmod_jax.data.synthetic.grammar.lexicon import ADJECTIVES, NOUNS, Noun
from compmod_jax.data.synthetic.grammar.verbs import Verb

Token = tuple[str, str]
Tokens = tuple[Token, ...]

CASES = ("nom", "acc", "dat")
# Who the subject is, for the verb; the odd ones are plural.
HE, THEY, ME, WE = range(4)


def tokens(text: str, tag: str) -> Tokens:
  """The words of a text, all with one tag."""
  return tuple((word, tag) for word in text.split())


def tagged(text: str) -> Tokens:
  """Tokens written as `word/tag word/tag`."""
  return tuple((word, tag) for word, _, tag in (item.partition("/") for item in text.split()))


# Endings in the order of CASES; p: plural of every gender.
_STRONG = {"m": "er en em", "f": "e e er", "n": "es es em", "p": "e e en"}
_WEAK = {"m": "e en en", "f": "e e en", "n": "e e en", "p": "en en en"}
_MIXED = {"m": "er en en", "f": "e e en", "n": "es es en", "p": "en en en"}
_DEFINITE = {"m": "der den dem", "f": "die die der", "n": "das das dem", "p": "die die den"}
_RELATIVE = {**_DEFINITE, "p": "die die denen"}
# Determiners: English singular and plural.
DETERMINERS = {
  "der": ("the", "the"),
  "dies": ("this", "these"),
  "jed": ("every", ""),
  "ein": ("a", ""),
  "kein": ("no", "no"),
  "mein": ("my", "my"),
  "sein": ("his", "his"),
  "unser": ("our", "our"),
  "viel": ("", "many"),
  "einig": ("", "some"),
  "": ("", ""),
}


def _table(endings: dict[str, str]) -> dict[tuple[str, str], str]:
  return {
    (gender, case): ending
    for gender, row in endings.items()
    for case, ending in zip(CASES, row.split(), strict=True)
  }


_STRONG_FORMS, _WEAK_FORMS, _MIXED_FORMS = map(_table, (_STRONG, _WEAK, _MIXED))
_DEFINITE_FORMS = _table(_DEFINITE)
RELATIVE: dict[tuple[str, str], Token] = {
  place: (word, "pron") for place, word in _table(_RELATIVE).items()
}


def _determiner(stem: str, gender: str, case: str) -> tuple[Tokens, str]:
  """The form of a determiner and the ending of an adjective behind it."""
  place = (gender, case)
  if stem == "der":
    return ((_DEFINITE_FORMS[place], "det"),), _WEAK_FORMS[place]
  if stem in ("", "viel", "einig"):
    return tokens(stem and stem + _STRONG_FORMS[place], "det"), _STRONG_FORMS[place]
  if stem in ("dies", "jed"):
    return ((stem + _STRONG_FORMS[place], "det"),), _WEAK_FORMS[place]
  bare = place in (("m", "nom"), ("n", "nom"), ("n", "acc"))
  word = stem if bare else stem + _STRONG_FORMS[place]
  return ((word, "det"),), _MIXED_FORMS[place]


DETERMINER: dict[tuple[str, str, str], tuple[Tokens, str]] = {
  (stem, gender, case): _determiner(stem, gender, case)
  for stem in DETERMINERS
  for gender in "mfnp"
  for case in CASES
}
ADJECTIVE: dict[tuple[int, str], Token] = {
  (i, ending): (adjective.german.removesuffix("e") + ending, "adj")
  for i, adjective in enumerate(ADJECTIVES)
  for ending in ("e", "er", "en", "es", "em")
}


def _noun_form(noun: Noun, plural: bool, case: str) -> str:
  if plural:
    return noun.dative_plural if case == "dat" else noun.plural
  return noun.singular if case == "nom" else noun.oblique


NOUN: dict[tuple[int, bool, str], Token] = {
  (i, plural, case): (_noun_form(noun, plural, case), "noun")
  for i, noun in enumerate(NOUNS)
  for plural in (False, True)
  for case in CASES
}


def article(following: str) -> str:
  """`an` before a vowel, as spelled; no word of the lexicon sounds otherwise but `honest`."""
  return "an" if following[0] in "aeiou" or following == "honest" else "a"


def third_person(base: str) -> str:
  """The English third person singular of a regular verb."""
  if base.endswith(("s", "sh", "ch", "x", "z", "o")):
    return base + "es"
  if base.endswith("y") and base[-2] not in "aeiou":
    return base[:-1] + "ies"
  return base + "s"


class Group(NamedTuple):
  """The verb forms of a clause: `finite` moves, the other words close the German clause.

  English: `plain` = (auxiliary or None, rest) for statements; `split` always has an auxiliary.
  """

  finite: Token
  main_end: Tokens
  final_end: Tokens
  plain: tuple[Token | None, Tokens]
  split: tuple[Token, Tokens]


_HABEN = {"perfect": "hat haben habe haben", "pluperfect": "hatte hatten hatte hatten"}
_SEIN = {"perfect": "ist sind bin sind", "pluperfect": "war waren war waren"}
_MODAL = {
  "future": "wird werden werde werden",
  "can": "kann können kann können",
  "must": "muss müssen muss müssen",
  "want": "will wollen will wollen",
  "may": "darf dürfen darf dürfen",
  "ought": "soll sollen soll sollen",
}
_ENGLISH_MODAL = {"future": "will", "can": "can", "may": "may", "ought": "should"}
_BE = {"present": "is are am are", "past": "was were was were"}


def _german(verb: Verb, tense: str, person: int) -> tuple[Token, Tokens, Tokens]:
  """The finite verb, what ends a main clause, what ends a subordinate clause."""
  if tense in ("present", "past"):
    if tense == "present":
      form = (verb.present, verb.infinitive, verb.stem + "e", verb.infinitive)[person]
    else:
      many = verb.past + ("n" if verb.past.endswith("e") else "en")
      form = (verb.past, many)[person % 2]
    return (form, "verb"), tokens(verb.particle, "part"), ((verb.particle + form, "verb"),)
  if tense in _MODAL:
    finite = (_MODAL[tense].split()[person], "aux")
    other = (verb.particle + verb.infinitive, "verb")
  else:
    finite = ((_SEIN if verb.moves else _HABEN)[tense].split()[person], "aux")
    other = (verb.participle, "verb")
  return finite, (other,), (other, finite)


def _english(verb: Verb, tense: str, person: int) -> tuple[tuple[Token | None, Tokens], ...]:
  """The plain and the split group."""
  base, past, participle = verb.english
  singular = person == HE
  do: Token = ("did" if tense == "past" else "does" if singular else "do", "aux")
  if tense in ("present", "past"):
    form = past if tense == "past" else third_person(base) if singular else base
    return (None, ((form, "verb"),)), (do, ((base, "verb"),))
  if tense in ("must", "want"):
    first, third = ("have", "has") if tense == "must" else ("want", "wants")
    rest: Tokens = (("to", "part"), (base, "verb"))
    finite: Token = (third if singular else first, "aux")
    return (None, (finite, *rest)), (do, ((first, "aux"), *rest))
  if tense in _ENGLISH_MODAL:
    both = ((_ENGLISH_MODAL[tense], "aux"), ((base, "verb"),))
  else:
    have = "had" if tense == "pluperfect" else "has" if singular else "have"
    both = ((have, "aux"), ((participle, "verb"),))
  return both, both


@functools.cache
def verb_group(verb: Verb, tense: str, person: int) -> Group:
  """The verb forms for a tense of `tables.TENSES` and a subject HE, THEY, ME or WE."""
  plain, (auxiliary, rest) = _english(verb, tense, person)
  assert auxiliary is not None
  return Group(*_german(verb, tense, person), plain, (auxiliary, rest))


@functools.cache
def copula_group(adjective: int, tense: str, person: int) -> Group:
  """The forms of `ist müde`, `is tired`: present or past."""
  forms = {"present": _SEIN["perfect"], "past": _SEIN["pluperfect"]}[tense]
  finite = (forms.split()[person], "aux")
  german = (ADJECTIVES[adjective].german, "adj")
  english = ((_BE[tense].split()[person], "aux"), ((ADJECTIVES[adjective].english, "adj"),))
  return Group(finite, (german,), (german, finite), english, english)
