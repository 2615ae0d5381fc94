"""Whole sentences: statements, questions, clefts, and clauses joined to one another."""

import dataclasses
from collections.abc import Callable

from compmod_jax.data.synthetic.grammar.clauses import (
  COMMA,
  Clause,
  Composer,
  Related,
  as_object,
  english_question,
  english_statement,
  german_final,
  german_main,
)
from compmod_jax.data.synthetic.grammar.inflect import HE, THEY, Token, Tokens
from compmod_jax.data.synthetic.grammar.lexicon import CONJUNCTIONS, COORDINATIONS
from compmod_jax.data.synthetic.grammar.phrases import Phrase
from compmod_jax.data.synthetic.grammar.tables import DOES, FRAMES, NOUN_PREPOSITIONS
from compmod_jax.data.synthetic.grammar.verbs import VERBS

_STOP: Token = (".", "punct")
_QUESTION: Token = ("?", "punct")
_CONJUNCTIONS = [((german, "conj"), (english, "conj")) for german, english in CONJUNCTIONS]
_COORDINATIONS = [((german, "conj"), (english, "conj")) for german, english in COORDINATIONS]
_DASS = ((("dass", "conj"),), (("that", "conj"),))
_UND = (("und", "conj"), ("and", "conj"))
_IT_IS = (("it", "pron"), ("is", "aux"))
_ASKED = [
  (("warum", "adv"), ("why", "adv")),
  (("wann", "adv"), ("when", "adv")),
  (("wo", "adv"), ("where", "adv")),
]
_TAKING_OBJECT = [*FRAMES["transitive"], *FRAMES["dative"]]
_PLAIN_VERBS = [*FRAMES["transitive"], *FRAMES["intransitive"], *FRAMES["motion"]]
_DONE_BY_PERSONS = [i for i in (*_PLAIN_VERBS, *FRAMES["dative"]) if "p" in VERBS[i].subjects]
_DONE_TO_PERSONS = [i for i in _TAKING_OBJECT if "p" in VERBS[i].objects]
_WER = Phrase((("wer", "pron"),), (("who", "pron"),), HE, pronoun=True)
_AGREEING = {"present": "present", "past": "perfect"}  # tenses whose English verb shows the number
_UNTIL = ("bevor", "bis")  # conjunctions that take no negation


@dataclasses.dataclass(slots=True)
class Sentence:
  """Both sides as tokens, the clause that the annotations are about, and the ungrammatical twin."""

  kind: str
  german: Tokens
  english: Tokens
  main: Clause
  attractors: int = 0
  twin: tuple[Tokens, Tokens] | None = None


def render(sentence: Tokens) -> tuple[str, tuple[str, ...]]:
  """The text, capital first, punctuation behind its word; and one tag for every word.

  Where clauses end together, one mark stands for all.
  """
  words: list[str] = []
  tags: list[str] = []
  mark = ""
  for word, tag in sentence:
    if tag == "punct":
      mark = word
      continue
    if mark:
      words[-1] += mark
      mark = ""
    words.append(word)
    tags.append(tag)
  text = " ".join(words) + mark
  return text[0].upper() + text[1:], tuple(tags)


def relations(sentence: Tokens) -> tuple[tuple[str, int, int], ...]:
  """Which word depends on which, of a sentence whose composer marks words.

  Triples (relation, dependent, head), with numbers of words from 0.

  Relations: `subject`, `object` and `adverb` of a verb (or predicate adjective), `adjective` of the
  noun behind it, and `relative clause`, from its verb to the noun that it is about. Of phrases
  joined by `and` the first is the head; a verb that shares another one's subject has none.
  """
  words = [token for token in sentence if token[1] != "punct"]
  found: list[tuple[str, int, int]] = []
  clauses: dict[int, list[tuple[int, Related]]] = {}
  noun = -1
  for number in reversed(range(len(words))):
    token, tag = words[number], words[number][1]
    if isinstance(token, Related):
      clauses.setdefault(id(token.clause), []).append((number, token))
    if tag != "adj" or isinstance(token, Related):  # or a predicate
      noun = number if tag == "noun" else -1
    elif noun >= 0:
      found.append(("adjective", number, noun))
  for members in clauses.values():
    verb = next((number for number, token in members if token.role == "verb"), None)
    if verb is None:
      continue
    found += [(token.role, number, verb) for number, token in members if number != verb]
    first, token = members[-1]
    if token.clause.relative:  # whose pronoun comes first, directly behind the noun
      found.append(("relative clause", verb, first - 1))
  return tuple(sorted(found, key=lambda one: one[1:]))


def _statement(composer: Composer) -> tuple[Tokens, Tokens, Clause]:
  """A main clause; some put a time or a place first, in both languages."""
  clause = composer.clause()
  chance = composer.random()
  if chance < 0.25 and "perfect" not in clause.tense and not clause.time[0]:
    time = composer.time(clause.tense)
    return german_main(clause, time[0]), (*time[1], *english_statement(clause)), clause
  moving = clause.verb is not None and VERBS[clause.verb].frame == "motion"
  if chance > 0.6 and clause.place[0] and not clause.negated and not moving:
    place, clause.place = clause.place, ((), ())
    return german_main(clause, place[0]), (*place[1], *english_statement(clause)), clause
  return german_main(clause), english_statement(clause), clause


def _simple(composer: Composer) -> Sentence:
  german, english, clause = _statement(composer)
  return Sentence("statement", (*german, _STOP), (*english, _STOP), clause, clause.subject.between)


def _cleft(composer: Composer) -> Sentence:
  """German puts an object first that only its case tells; English says `It is ... that`."""
  clause = composer.clause(_TAKING_OBJECT, gap=True)
  assert clause.verb is not None
  dative = VERBS[clause.verb].frame == "dative"
  phrase = composer.noun_phrase(
    "dat" if dative else "acc",
    VERBS[clause.verb].objects,
    after="preposition",
    determiners="definite",
    number=None if dative else False,
    masculine=not dative,
    verb=clause.verb,
  )
  front, it = as_object((phrase.german, phrase.english), clause)
  german = (*german_main(clause, front), _STOP)
  english = (*_IT_IS, *it, *_DASS[1], *english_statement(clause), _STOP)
  return Sentence("cleft", german, english, clause, clause.subject.between)


def _shared(composer: Composer) -> Sentence:
  """One subject, two verbs joined by `und`: `Der Mann lacht und schläft .`"""
  first = composer.clause(_PLAIN_VERBS, time=False)
  fitting = [DOES[frame, first.subject.kind] for frame in ("transitive", "intransitive")]
  verb = composer.pick(composer.pick(fitting))
  if first.closed or verb == first.verb:
    return _closing("statement", german_main(first), english_statement(first), first)
  first.tense = composer.era
  first.negated = False
  composer.verbs.add(verb)
  second = Clause(first.subject._replace(german=(), english=()), first.tense, verb)
  second.marked = first.marked
  composer.complete(second, 0)
  second.negated = False
  german = (*german_main(first), _UND[0], *german_main(second, ()))
  english = (*english_statement(first), _UND[1], *english_statement(second))
  return _closing("shared", german, english, first)


def _yes_no(composer: Composer) -> Sentence:
  clause = composer.clause()
  german, english = german_main(clause, ()), english_question(clause)
  return Sentence("question", (*german, _QUESTION), (*english, _QUESTION), clause)


def _wh(composer: Composer) -> Sentence:
  """Asks for the subject, the object, the place, the time or the reason."""
  chance = composer.random()
  if chance < 0.25:
    clause = composer.clause(_DONE_BY_PERSONS, subject=_WER)
    german, english = german_main(clause), english_statement(clause)
  elif chance < 0.5:
    clause = composer.clause(_DONE_TO_PERSONS, gap=True)
    assert clause.verb is not None
    word = "wem" if VERBS[clause.verb].frame == "dative" else "wen"
    front, whom = as_object((((word, "pron"),), (("whom", "pron"),)), clause)
    german = german_main(clause, front)
    english = (*whom, *english_question(clause))
  else:
    clause = composer.clause(time=False)
    word, translation = composer.pick(_ASKED[:2] if clause.place[0] else _ASKED)
    german, english = german_main(clause, (word,)), (translation, *english_question(clause))
  return Sentence("question", (*german, _QUESTION), (*english, _QUESTION), clause)


def _subordinate(composer: Composer) -> tuple[tuple[Token, Token], Clause]:
  """A conjunction and its clause."""
  conjunction = composer.pick(_CONJUNCTIONS)
  clause = composer.clause()
  clause.negated = clause.negated and conjunction[0][0] not in _UNTIL
  return conjunction, clause


def _sub_last(composer: Composer) -> Sentence:
  german, english, clause = _statement(composer)
  conjunction, other = _subordinate(composer)
  german = (*german, COMMA, conjunction[0], *german_final(other))
  english = (*english, conjunction[1], *english_statement(other))
  return _closing("subordinate", german, english, clause)


def _sub_first(composer: Composer) -> Sentence:
  conjunction, other = _subordinate(composer)
  clause = composer.clause()
  german = german_main(clause, (conjunction[0], *german_final(other), COMMA))
  english = (conjunction[1], *english_statement(other), COMMA, *english_statement(clause))
  return _closing("subordinate", german, english, clause)


def _complement(composer: Composer) -> Sentence:
  """`Der Mann sagt , dass ...`; one in ten is a question."""
  clause = composer.clause(FRAMES["complement"], time=False)
  other = composer.clause()
  question = composer.random() < 0.15
  german = german_main(clause, () if question else None)
  english = english_question(clause) if question else english_statement(clause)
  german = (*german, COMMA, _DASS[0][0], *german_final(other))
  english = (*english, *_DASS[1], *english_statement(other))
  if question:
    return Sentence("complement", (*german, _QUESTION), (*english, _QUESTION), clause)
  return _closing("complement", german, english, clause)


def _coordinated(composer: Composer) -> Sentence:
  first, second = _statement(composer), _statement(composer)
  conjunction = composer.pick(_COORDINATIONS)
  german = (*first[0], COMMA, conjunction[0], *second[0])
  english = (*first[1], COMMA, conjunction[1], *second[1])
  return _closing("coordinated", german, english, first[2])


def _closing(kind: str, german: Tokens, english: Tokens, clause: Clause) -> Sentence:
  """A sentence that ends in a full stop."""
  return Sentence(kind, (*german, _STOP), (*english, _STOP), clause, clause.subject.between)


# How often each kind is drawn, in hundredths.
_KINDS: list[Callable[[Composer], Sentence]] = [
  *[_simple] * 24,
  *[_cleft] * 10,
  *[_shared] * 6,
  *[_yes_no] * 10,
  *[_wh] * 6,
  *[_sub_last] * 13,
  *[_sub_first] * 11,
  *[_complement] * 12,
  *[_coordinated] * 8,
]


def ordinary(composer: Composer) -> Sentence:
  """Any kind of sentence; one in eight nests relative clauses if it can."""
  if composer.random() < 0.12:
    return nested(composer)
  return composer.pick(_KINDS)(composer)


def nested(composer: Composer) -> Sentence:
  """A sentence of one clause and the relative clauses in it."""
  composer.nest = True
  return composer.pick((_simple, _simple, _yes_no, _cleft))(composer)


def long(composer: Composer) -> Sentence:
  """Two sentences that each have a subordinate clause, joined."""
  first, second = (composer.pick((_sub_last, _sub_first, _complement))(composer) for _ in range(2))
  conjunction = composer.pick(_COORDINATIONS)
  german = (*first.german[:-1], COMMA, conjunction[0], *second.german)
  english = (*first.english[:-1], COMMA, conjunction[1], *second.english)
  return dataclasses.replace(first, kind="long", german=german, english=english)


def attracted(composer: Composer, attractors: int) -> Sentence:
  """A statement whose English verb shows the number of a subject that other nouns follow.

  A subordinate clause comes after it.

  Args:
    composer: draws the words; what it draws may hold more attractors, as the sentence tells.
    attractors: nouns of the other number behind the subject; with 0, one noun of the same number.
  """

  def nouns(count: int, number: bool) -> tuple[Tokens, Tokens]:
    tail = (lambda _noun, _plural: nouns(count - 1, number)) if count > 1 else None
    return composer.prepositional(
      composer.pick(NOUN_PREPOSITIONS), 0, after="nothing", number=number, tail=tail
    )

  def behind(noun: int, plural: bool) -> tuple[Tokens, Tokens]:
    other = plural != bool(attractors)
    if not attractors or composer.random() < 0.6:
      return nouns(max(attractors, 1), other)
    tail = (lambda _noun, _plural: nouns(attractors - 1, other)) if attractors > 1 else None
    subject = composer.noun_phrase("nom", "p", 1, after="nothing", number=other, tail=tail)
    return composer.object_relative(noun, plural, 1, subject)

  frame = composer.pick(("transitive", "dative", "intransitive", "motion", "copula"))
  if frame == "copula":
    subject = composer.noun_phrase("nom", "patl", tail=behind)
    clause = composer.predicate(subject, subject.kind)
  else:
    verb = composer.pick(FRAMES[frame])
    composer.verbs.add(verb)
    subject = composer.noun_phrase("nom", VERBS[verb].subjects, tail=behind)
    clause = Clause(subject, _AGREEING[composer.era], verb, marked=composer.marks)
  composer.complete(clause, 0)
  # A verb-final clause behind it keeps the two languages' words from standing in one order.
  conjunction, other = _subordinate(composer)
  behind_german = (COMMA, conjunction[0], *german_final(other))
  behind_english = (conjunction[1], *english_statement(other))
  german = (*german_main(clause), *behind_german)
  english = (*english_statement(clause), *behind_english)
  sentence = _closing("attractor", german, english, clause)
  wrong = HE if subject.person == THEY else THEY
  sentence.twin = (
    (*german_main(clause, person=wrong), *behind_german, _STOP),
    (*english_statement(clause, wrong), *behind_english, _STOP),
  )
  return sentence
