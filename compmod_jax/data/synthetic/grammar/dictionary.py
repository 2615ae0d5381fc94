"""A word-by-word dictionary of the grammar's forms, and what it makes of a sentence."""

import functools
import re
from collections.abc import Iterator
from typing import Literal

from compmod_jax.data.synthetic.grammar import inflect, lexicon
from compmod_jax.data.synthetic.grammar.inflect import HE, ME, THEY
from compmod_jax.data.synthetic.grammar.lexicon import ADJECTIVES, NOUNS
from compmod_jax.data.synthetic.grammar.tables import TIMES
from compmod_jax.data.synthetic.grammar.verbs import VERBS

_WORD = re.compile(r"\w+")
Direction = Literal["de-en", "en-de"]

# Forms without a paradigm here, and words that the other language says with several.
_SMALL = """ich I, er he, wir we, sie she, sie they, mich me, mir me, ihn him, ihm him, uns us,
  wer who, wen whom, wem whom, denen whom, die which, der who, warum why, wann when, wo where,
  nicht not, dass that, es it, und and, aber but, oder or, mit with, ohne without, neben next,
  hinter behind, aus from, vor front, für for, in in, zu to, durch through, in into, im in, ins
  into, zum to, zur to, am in, von of, hat has, haben have, habe have, hatte had, hatten had, ist
  is, sind are, bin am, war was, waren were, wird will, werden will, werde will, kann can, kann
  cannot, können can, muss must, müssen must, will wants, wollen want, darf may, dürfen may, soll
  should, sollen should, tut does, tun do, tat did, auf up, an on, ab off, ein in, weg away, fest
  tight, zurück back, bei by, ein an, in at, letzte last, nächste next"""


def _pairs() -> Iterator[tuple[str, str]]:
  """German and English forms; the first translation of a form counts."""
  for stem, (singular, plural) in inflect.DETERMINERS.items():
    if stem:
      for gender in "mnfp":
        for case in inflect.CASES:
          form = inflect.DETERMINER[stem, gender, case][0][0][0]
          yield form, (plural if gender == "p" else singular) or plural or singular
  for german, english in (item.split() for item in _SMALL.split(",")):
    yield german, english
  yield from (*lexicon.ADVERBS, *lexicon.NUMERALS, *lexicon.CONJUNCTIONS)
  for i, noun in enumerate(NOUNS):
    for plural in (False, True):
      for case in inflect.CASES:
        yield inflect.NOUN[i, plural, case][0], noun.english[plural]
  for i, adjective in enumerate(ADJECTIVES):
    for ending in ("e", "en", "er", "es", "em"):
      yield inflect.ADJECTIVE[i, ending][0], adjective.english
    yield adjective.german, adjective.english
  yield from _verb_pairs(separable=False)
  yield from _verb_pairs(separable=True)
  for times in TIMES.values():
    for german, english in times:
      yield german[-1][0], english[-1][0]


def _verb_pairs(separable: bool) -> Iterator[tuple[str, str]]:
  """Separable verbs come later: `sucht` alone is more often `seeks` than half of `picks`."""
  for verb in VERBS:
    if bool(verb.particle) is separable:
      base, past, participle = verb.english
      yield verb.particle + verb.infinitive, base
      yield verb.participle, participle
      for person in (HE, THEY, ME):
        for tense, english in (
          ("present", inflect.third_person(base) if person == HE else base),
          ("past", past),
        ):
          group = inflect.verb_group(verb, tense, person)
          yield group.final_end[0][0], english
          yield group.finite[0], english


def dictionary(direction: Direction = "de-en") -> dict[str, str]:
  """Every word form of the source language with its most usual translation, one word.

  Forms are as within a sentence, and once more with a capital, as at its start. Names and
  punctuation are not in it: they stay as they are.
  """
  table: dict[str, str] = {}
  for german, english in _pairs():
    source, target = (german, english) if direction == "de-en" else (english, german)
    table.setdefault(source, target)
  for source, target in list(table.items()):
    capital = source[0].upper() + source[1:]
    table.setdefault(capital, target[0].upper() + target[1:])
  return table


def translate_words(text: str, direction: Direction = "de-en") -> str:
  """Every word replaced by its entry in `dictionary`, in place; punctuation and names stay."""
  return _WORD.sub(lambda word: _cached(direction).get(word[0], word[0]), text)


@functools.cache
def _cached(direction: Direction) -> dict[str, str]:
  return dictionary(direction)
