"""Noun phrases, drawn at random, in German and English side by side.

What makes every sentence have one translation: a noun is followed by a prepositional phrase or a
relative clause, never both; prepositions after nouns are not those after verbs; a clause whose
object ends in a relative clause has nothing behind it in English; relative clauses hold no times
and no coordination; a relative clause on the object is drawn only where case or number of the verb
shows it, so that `die Frau, die die Katze sieht` always has the woman see.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from compmod_jax.data.synthetic.grammar import inflect
from compmod_jax.data.synthetic.grammar.inflect import HE, THEY, Token, Tokens
from compmod_jax.data.synthetic.grammar.lexicon import CONTRACTIONS, NAMES, NOUNS
from compmod_jax.data.synthetic.grammar.tables import (
  ADJECTIVES_OF,
  DETERMINERS,
  ENGLISH_ADJECTIVE,
  ENGLISH_DETERMINERS,
  ENGLISH_NOUN,
  MASCULINE_OF,
  NOUN_PREPOSITIONS,
  NOUNS_OF,
  NUMERALS,
  OBJECT_PRONOUNS,
  SUBJECT_PRONOUNS,
  Preposition,
)

Tail = Callable[[int, bool], tuple[Tokens, Tokens]]


class Phrase(NamedTuple):
  """A noun phrase in one case; `closed`: ends in a relative clause; `between`: the attractors."""

  german: Tokens
  english: Tokens
  person: int = HE
  kind: str = "p"
  negative: bool = False
  closed: bool = False
  pronoun: bool = False
  between: int = 0


class PhraseComposer:
  """Draws phrases; remembers which words it used, which go together, and how deep it nested.

  Args:
    random: draws from [0, 1).
    depth: how many relative clauses may lie in each other.
  """

  def __init__(self, random: Callable[[], float], depth: int):
    self.random = random
    self.limit = depth
    self.clear()

  def clear(self) -> None:
    """Forgets the sentence drawn before."""
    self.depth = 0
    self.nest = False  # whether to nest relative clauses as deep as they may
    self.era = "present" if self.random() < 0.55 else "past"
    self.numbers: list[bool] = []  # of every noun, in English order: plural or not
    self.nouns: set[int] = set()
    self.adjectives: set[int] = set()
    self.verbs: set[int] = set()
    self.attributes: list[tuple[int, int]] = []  # adjective, noun
    self.objects: list[tuple[int, int]] = []  # verb, noun

  def pick(self, items: Sequence[Any]) -> Any:
    """One of the items, all as likely."""
    return items[int(self.random() * len(items))]

  def noun_phrase(
    self,
    case: str,
    kinds: str,
    depth: int = 0,
    *,
    after: str = "both",
    determiners: str = "any",
    number: bool | None = None,
    masculine: bool = False,
    verb: int | None = None,
    tail: Tail | None = None,
  ) -> Phrase:
    """A noun with determiner, adjectives and what follows it.

    Args:
      case: nom, acc or dat.
      kinds: classes to draw the noun from.
      depth: relative clauses around it.
      after: what may follow: both, preposition or nothing.
      determiners: any, positive (without `kein`) or definite (what may stand under a negation).
      number: plural or not; None draws it.
      masculine: draws a masculine noun.
      verb: the verb that has it as its object, if any.
      tail: draws what follows the noun, for a noun and its number, instead of `after`.
    """
    random = self.random
    noun = self.pick((MASCULINE_OF if masculine else NOUNS_OF)[kinds])
    plural = random() < 0.4 if number is None else number
    self.numbers.append(plural)
    position = len(self.numbers)
    self.nouns.add(noun)
    if verb is not None:
      self.objects.append((verb, noun))
    stem = self.pick(DETERMINERS[determiners][plural])
    german, english = self._core(noun, plural, case, stem)
    closed = False
    if tail is not None:
      behind = tail(noun, plural)
    elif after == "nothing":
      behind = ((), ())
    else:
      behind, closed = self._behind(noun, plural, depth, after == "both")
    return Phrase(
      (*german, *behind[0]),
      (*english, *behind[1]),
      THEY if plural else HE,
      NOUNS[noun].kind,
      stem == "kein",
      closed,
      between=sum(other is not plural for other in self.numbers[position:]),
    )

  def _core(self, noun: int, plural: bool, case: str, stem: str) -> tuple[list, list]:
    """Determiner, numeral, adjectives and noun."""
    random = self.random
    counted = stem == "#" or (plural and stem == "der" and random() < 0.15)
    stem = "" if stem == "#" else stem
    gender = "p" if plural else NOUNS[noun].gender
    determiner, ending = inflect.DETERMINER[stem, gender, case]
    german = list(determiner)
    english: list[Token] = []
    if counted:
      numeral = self.pick(NUMERALS)
      german.append(numeral[0])
      english.append(numeral[1])
    chance = random()
    fitting = ADJECTIVES_OF[NOUNS[noun].kind]
    for _ in range((chance < 0.3) + (chance < 0.04)):
      adjective = self.pick(fitting)
      if adjective not in self.adjectives:  # `der große große Hund` never happens
        german.append(inflect.ADJECTIVE[adjective, ending])
        english.append(ENGLISH_ADJECTIVE[adjective])
        self.adjectives.add(adjective)
        self.attributes.append((adjective, noun))
    german.append(inflect.NOUN[noun, plural, case])
    english.append(ENGLISH_NOUN[noun][plural])
    if stem == "ein":
      return german, [(inflect.article(english[0][0]), "det"), *english]
    return german, [*ENGLISH_DETERMINERS[stem][plural], *english]

  def _behind(self, noun: int, plural: bool, depth: int, relative: bool) -> tuple[Any, bool]:
    """What follows a noun, and whether it is a relative clause."""
    chance = self.random()
    nesting = 0.0
    if relative and depth < self.limit:
      nesting = 0.12
      if self.nest:
        nesting = 0.9 if depth == self.depth else 0.0
    if chance < nesting:
      return self.relative(noun, plural, depth + 1), True
    if chance < nesting + 0.1:
      behind = self.prepositional(self.pick(NOUN_PREPOSITIONS), depth, after="preposition")
      return behind, False
    return ((), ()), False

  def relative(self, noun: int, plural: bool, depth: int) -> tuple[Tokens, Tokens]:
    """A relative clause on a noun, at a depth from 1 on."""
    raise NotImplementedError

  def prepositional(
    self,
    preposition: Preposition,
    depth: int,
    *,
    after: str = "nothing",
    number: bool | None = None,
    tail: Tail | None = None,
  ) -> tuple[Tokens, Tokens]:
    """A preposition with its noun phrase; `in dem` becomes `im`."""
    kinds = preposition.kinds
    phrase = self.noun_phrase(
      preposition.case,
      kinds,
      depth,
      after=after,
      determiners="positive",
      number=number,
      tail=tail,
    )
    german = phrase.german
    merged = CONTRACTIONS.get((preposition.german, german[0][0]))
    head = (merged or preposition.german, "prep")
    return (head, *german[merged is not None :]), (*preposition.english, *phrase.english)

  def pair(self, case: str, kinds: str, verb: int | None = None) -> Phrase:
    """Two noun phrases joined by `und`."""
    first, second = (
      self.noun_phrase(case, kinds, after="nothing", determiners="definite", verb=verb)
      for _ in range(2)
    )
    return Phrase(
      (*first.german, ("und", "conj"), *second.german),
      (*first.english, ("and", "conj"), *second.english),
      THEY,
      first.kind,
    )

  def subject(self, kinds: str) -> Phrase:
    """The subject of a clause that is no relative one."""
    chance = self.random()
    if "p" in kinds and chance < 0.18:
      if chance < 0.06:
        name = self.pick(NAMES)
        return Phrase(((name, "name"),), ((name, "name"),))
      german, english, person = self.pick(SUBJECT_PRONOUNS)
      return Phrase(((german, "pron"),), ((english, "pron"),), person, pronoun=True)
    if chance > 0.94:
      return self.pair("nom", kinds)
    return self.noun_phrase("nom", kinds)

  def object(
    self, case: str, kinds: str, verb: int, depth: int, *, determiners: str, pronoun: bool
  ) -> Phrase:
    """What a verb is done to."""
    chance = self.random()
    if "p" in kinds and chance < 0.12:
      if chance >= 0.05 and pronoun:
        german, english = self.pick(OBJECT_PRONOUNS[case])
        return Phrase(((german, "pron"),), ((english, "pron"),), pronoun=True)
      name = self.pick(NAMES)
      return Phrase(((name, "name"),), ((name, "name"),))
    if chance > 0.95 and depth == 0:
      return self.pair(case, kinds, verb)
    return self.noun_phrase(case, kinds, depth, determiners=determiners, verb=verb)
