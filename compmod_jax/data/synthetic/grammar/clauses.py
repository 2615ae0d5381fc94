"""Clauses: what goes into one, and the order of its words in German and English."""

import dataclasses
from collections.abc import Sequence

from compmod_jax.data.synthetic.grammar import inflect
from compmod_jax.data.synthetic.grammar.inflect import HE, THEY, Token, Tokens
from compmod_jax.data.synthetic.grammar.lexicon import NOUNS
from compmod_jax.data.synthetic.grammar.phrases import Phrase, PhraseComposer
from compmod_jax.data.synthetic.grammar.tables import (
  ADJECTIVES_OF,
  ADVERBS,
  BENEFIT_PREPOSITION,
  DOES,
  FRAMES,
  MOTION_PREPOSITIONS,
  PLACE_PREPOSITIONS,
  RELATIVE_FRAMES,
  SUBJECT_PRONOUNS,
  SUFFERS,
  TENSES,
  TIMES,
)
from compmod_jax.data.synthetic.grammar.verbs import VERBS

COMMA: Token = (",", "punct")
_NOT = (("nicht", "neg"), ("not", "neg"))
_CANNOT = (("cannot", "aux"),)
_FRAMES = [*["transitive"] * 3, "intransitive", "motion", "dative", "ditransitive", "copula"]
_Sides = tuple[Tokens, Tokens]
_NOTHING: _Sides = ((), ())
_NOMINAL, _VERBAL = ("noun", "name", "pron"), ("verb", "adj")


class Related(tuple[str, str]):
  """A token that also knows its clause and what it is there: verb, subject, object or adverb.

  Where the clause has a full verb, that is its `verb`; else the predicate adjective is.
  """

  clause: "Clause"
  role: str


def _related(tokens: Tokens, clause: "Clause", role: str, tags: tuple[str, ...]) -> Tokens:
  """The tokens; where words are marked, the first that has one of these tags has this role."""
  if not clause.marked:
    return tokens
  for at, token in enumerate(tokens):
    if token[1] in tags:
      word = Related(token)
      word.clause, word.role = clause, role
      return (*tokens[:at], word, *tokens[at + 1 :])
  return tokens


def as_object(sides: _Sides, clause: "Clause") -> _Sides:
  """A noun phrase in both languages as an object of the clause."""
  german, english = sides
  return (
    _related(german, clause, "object", _NOMINAL),
    _related(english, clause, "object", _NOMINAL),
  )


@dataclasses.dataclass(slots=True)
class Clause:
  """The parts of a clause before they are put in order; `verb` or the predicate `adjective`.

  `relative`: it is a relative clause. `marked`: its words are `Related`.
  """

  subject: Phrase
  tense: str
  verb: int | None
  adjective: int = 0
  negated: bool = False
  adverb: tuple[Token, Token] | None = None
  pronoun: Tokens = ()
  objects: _Sides = _NOTHING
  place: _Sides = _NOTHING
  time: _Sides = _NOTHING
  closed: bool = False
  relative: bool = False
  marked: bool = False

  def group(self, person: int | None = None) -> inflect.Group:
    """The verb forms, for the subject's person or another one."""
    person = self.subject.person if person is None else person
    if self.verb is None:
      return inflect.copula_group(self.adjective, self.tense, person)
    return inflect.verb_group(VERBS[self.verb], self.tense, person)


def _adverb(clause: Clause, side: int) -> Tokens:
  """The adverb, German or English."""
  if clause.adverb is None:
    return ()
  return _related((clause.adverb[side],), clause, "adverb", ("adv",))


def _middle(clause: Clause) -> Tokens:
  """The German words between the subject and the verb at the end."""
  return (
    *clause.pronoun,
    *clause.time[0],
    *_adverb(clause, 0),
    *clause.objects[0],
    *(_NOT[:1] if clause.negated else ()),
    *clause.place[0],
  )


def german_main(clause: Clause, front: Tokens | None = None, person: int | None = None) -> Tokens:
  """Verb second; behind a `front` the verb precedes the subject, an empty one makes a question."""
  group = clause.group(person)
  subject = _related(clause.subject.german, clause, "subject", _NOMINAL)
  verbs = (group.finite, *group.main_end)
  finite, *end = _related(verbs, clause, "verb", _VERBAL)
  start = (*subject, finite) if front is None else (*front, finite, *subject)
  return (*start, *_middle(clause), *end)


def german_final(clause: Clause, person: int | None = None) -> Tokens:
  """Subject first, all verbs last."""
  end = _related(clause.group(person).final_end, clause, "verb", _VERBAL)
  return (*_related(clause.subject.german, clause, "subject", _NOMINAL), *_middle(clause), *end)


def _english_rest(clause: Clause, verbs: Tokens) -> Tokens:
  return (
    *(_NOT[1:] if clause.negated else ()),
    *_adverb(clause, 1),
    *_related(verbs, clause, "verb", _VERBAL),
    *clause.objects[1],
    *clause.place[1],
    *clause.time[1],
  )


def english_statement(clause: Clause, person: int | None = None) -> Tokens:
  """Subject, auxiliary, negation, adverb, verb, objects, place, time."""
  group = clause.group(person)
  auxiliary, verbs = group.split if clause.negated else group.plain
  rest = _english_rest(clause, verbs)
  subject = _related(clause.subject.english, clause, "subject", _NOMINAL)
  if auxiliary is None:
    return (*subject, *rest)
  if clause.negated and auxiliary[0] == "can":
    return (*subject, *_CANNOT, *rest[1:])
  return (*subject, auxiliary, *rest)


def english_question(clause: Clause) -> Tokens:
  """The auxiliary before the subject."""
  auxiliary, verbs = clause.group().split
  subject = _related(clause.subject.english, clause, "subject", _NOMINAL)
  return (auxiliary, *subject, *_english_rest(clause, verbs))


class Composer(PhraseComposer):
  """Draws clauses: a verb, a tense, a subject that fits, and what else the verb takes.

  With `marks` their words know what they are there; nothing is drawn otherwise for it.
  """

  marks = False

  def time(self, tense: str) -> _Sides:
    """A time that goes with a tense; none goes with the perfect."""
    return self.pick(TIMES.get(tense, TIMES["present"]))

  def clause(
    self,
    verbs: Sequence[int] | None = None,
    *,
    subject: Phrase | None = None,
    time: bool = True,
    gap: bool = False,
  ) -> Clause:
    """A clause that is no relative one.

    Args:
      verbs: verbs to draw from; None draws a frame first, `ist müde` among them.
      subject: who does it, a person; drawn if None.
      time: may end in a time.
      gap: its object is elsewhere.
    """
    frame = self.pick(_FRAMES) if verbs is None else ""
    if frame == "copula":
      subject = subject or self.subject(self.pick(("p", "p", "a", "t", "l")))
      clause = self.predicate(subject, subject.kind)
    else:
      verb = self.pick(verbs or FRAMES[frame])
      self.verbs.add(verb)
      clause = Clause(
        subject or self.subject(VERBS[verb].subjects),
        self.pick(TENSES[self.era]),
        verb,
        marked=self.marks,
      )
    self.complete(clause, 0, gap=gap)
    if time and not clause.closed and "perfect" not in clause.tense and self.random() < 0.15:
      clause.time = self.time(clause.tense)
    return clause

  def predicate(self, subject: Phrase, kind: str) -> Clause:
    """A clause that says what the subject is like, still without negation or adverb."""
    adjective = self.pick(ADJECTIVES_OF[kind])
    self.adjectives.add(adjective)
    return Clause(subject, self.era, None, adjective, marked=self.marks)

  def complete(self, clause: Clause, depth: int, *, gap: bool = False) -> None:
    """Draws negation or adverb, objects and place; with a `gap` the object is elsewhere."""
    random = self.random
    chance = random()
    negative = clause.subject.negative
    if chance < 0.16 and not negative:
      clause.negated = True
    elif chance < 0.4 and not negative:
      clause.adverb = self.pick(ADVERBS[:6] if clause.verb is None else ADVERBS)
    if clause.verb is None:
      return
    frame = VERBS[clause.verb].frame
    if frame in ("transitive", "dative", "ditransitive") and not gap:
      self._objects(clause, frame, depth, not (chance < 0.4 or negative))
    if clause.closed or frame == "complement":
      return
    if frame == "motion":
      if random() < 0.8:
        clause.place = self.prepositional(self.pick(MOTION_PREPOSITIONS), depth)
    elif random() < 0.15:
      verb = VERBS[clause.verb]
      benefit = verb.subjects == "p" and "t" in verb.objects and random() < 0.6
      place = BENEFIT_PREPOSITION if benefit else self.pick(PLACE_PREPOSITIONS)
      clause.place = self.prepositional(place, depth)

  def _objects(self, clause: Clause, frame: str, depth: int, negatable: bool) -> None:
    """One object or two; German puts pronouns first, English the recipient last."""
    assert clause.verb is not None
    number, kinds = clause.verb, VERBS[clause.verb].objects
    determiners = "any" if negatable else "definite"
    pronoun = not clause.subject.pronoun
    if frame != "ditransitive":
      case = "dat" if frame == "dative" else "acc"
      phrase = self.object(case, kinds, number, depth, determiners=determiners, pronoun=pronoun)
      clause.closed = phrase.closed
      clause.objects = german, english = as_object((phrase.german, phrase.english), clause)
      if phrase.pronoun:
        clause.pronoun, clause.objects = german, ((), english)
      return
    thing = self.noun_phrase(
      "acc", kinds, depth, after="preposition", determiners=determiners, verb=number
    )
    person = self.object("dat", "p", number, depth, determiners="definite", pronoun=pronoun)
    clause.closed = person.closed
    given = as_object((thing.german, thing.english), clause)
    german, to = as_object((person.german, person.english), clause)
    english = (*given[1], ("to", "prep"), *to)
    if person.pronoun:
      clause.pronoun, clause.objects = german, (given[0], english)
    else:
      clause.objects = (*german, *given[0]), english

  def relative(self, noun: int, plural: bool, depth: int) -> _Sides:
    """A relative clause: mostly on the subject, else on the object."""
    kind = NOUNS[noun].kind
    chance = self.random()
    if chance < 0.4 or (kind in "tl" and chance < 0.8):
      return self.object_relative(noun, plural, depth)
    self.depth = max(self.depth, depth)
    person = THEY if plural else HE
    gender = "p" if plural else NOUNS[noun].gender
    english = (("who" if kind == "p" else "which", "pron"),)
    subject = Phrase((inflect.RELATIVE[gender, "nom"],), english, person, kind)
    if chance > 0.92 or kind in "tl":
      clause = self.predicate(subject, kind)
    else:
      verb = self.pick(DOES[self.pick(RELATIVE_FRAMES), kind])
      self.verbs.add(verb)
      clause = Clause(subject, self.pick(TENSES[self.era]), verb, marked=self.marks)
    clause.relative = True
    self.complete(clause, depth)
    return (COMMA, *german_final(clause), COMMA), english_statement(clause)

  def object_relative(
    self, noun: int, plural: bool, depth: int, subject: Phrase | None = None
  ) -> _Sides:
    """A relative clause on the object; where `die` or `das` could be its subject, the verb tells.

    Args:
      noun: what it is about.
      plural: its number.
      depth: relative clauses up to this one.
      subject: who does it, of the other number than the noun; drawn if None.
    """
    self.depth = max(self.depth, depth)
    kind = NOUNS[noun].kind
    verb = self.pick(SUFFERS[kind])
    self.verbs.add(verb)
    self.objects.append((verb, noun))
    case = "dat" if VERBS[verb].frame == "dative" else "acc"
    gender = "p" if plural else NOUNS[noun].gender
    shown = case == "dat" or gender == "m"
    if subject is None and self.random() < 0.3:
      german, english, person = self.pick(SUBJECT_PRONOUNS[:3])
      subject = Phrase(((german, "pron"),), ((english, "pron"),), person, pronoun=True)
    elif subject is None:
      number = None if shown else not plural
      subject = self.noun_phrase("nom", VERBS[verb].subjects, depth, number=number)
    tense = self.pick(TENSES[self.era])
    clause = Clause(subject, tense, verb, relative=True, marked=self.marks)
    self.complete(clause, depth, gap=True)
    word = ("whom" if kind == "p" else "which", "pron")
    front, whom = as_object(((inflect.RELATIVE[gender, case],), (word,)), clause)
    return (COMMA, *front, *german_final(clause), COMMA), (*whom, *english_statement(clause))
