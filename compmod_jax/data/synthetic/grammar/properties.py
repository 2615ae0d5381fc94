"""Hidden properties of the grammar's sentences: what few-shot classification tells apart.

A property gives a sentence one value or none: the number of the main clause's subject, its tense,
which noun is its object, in which of two sets its verb is. All are read off the structure that a
sentence was made from, but for words that the structure does not keep, which are found in its
English tokens.
"""

import random
import zlib
from collections.abc import Callable, Iterator

from compmod_jax.data.synthetic.grammar.clauses import COMMA, Composer
from compmod_jax.data.synthetic.grammar.inflect import Tokens
from compmod_jax.data.synthetic.grammar.lexicon import (
  ADJECTIVES,
  ADVERBS,
  CONJUNCTIONS,
  NOUNS,
)
from compmod_jax.data.synthetic.grammar.sentences import Sentence
from compmod_jax.data.synthetic.grammar.tables import TIMES
from compmod_jax.data.synthetic.grammar.verbs import VERBS

_KINDS = {"p": "person", "a": "animal", "t": "thing", "l": "place"}
_NOUN_OF = {form: noun for noun in NOUNS for form in noun.english}
_ADJECTIVES = {adjective.english for adjective in ADJECTIVES}
_OFTEN = {english for _, english in ADVERBS[:6]}
_CONJUNCTIONS = {english for _, english in CONJUNCTIONS}
_TIMES = sorted(
  {" ".join(word for word, _ in english) for times in TIMES.values() for _, english in times}
)
_MODALS = ("can", "must", "want", "may", "ought")
_DETERMINERS = {
  **dict.fromkeys(("the",), "definite"),
  **dict.fromkeys(("a", "an"), "indefinite"),
  **dict.fromkeys(("this", "these"), "demonstrative"),
  **dict.fromkeys(("my", "his", "our"), "possessive"),
  **dict.fromkeys(("many", "some", "every"), "quantifier"),
}
_QUESTIONS = {"why", "when", "where", "who", "whom"}


def _tagged(tokens: Tokens, tag: str) -> Iterator[str]:
  """The words with a tag, in order."""
  return (word for word, other in tokens if other == tag)


# Grammatical properties.


def _number(sentence: Sentence, composer: Composer) -> str:
  return ("singular", "plural")[sentence.main.subject.person % 2]


def _tense(sentence: Sentence, composer: Composer) -> str:
  return "modal" if sentence.main.tense in _MODALS else sentence.main.tense


def _relative(sentence: Sentence, composer: Composer) -> str:
  return ("none", "one", "nested")[min(composer.depth, 2)]


def _animacy(sentence: Sentence, composer: Composer) -> str:
  return _KINDS[sentence.main.subject.kind]


def _verb_class(sentence: Sentence, composer: Composer) -> str:
  verb = sentence.main.verb
  return "copula" if verb is None else VERBS[verb].frame


def _question(sentence: Sentence, composer: Composer) -> str:
  if sentence.english[-1][0] != "?":
    return "statement"
  return "open question" if sentence.english[0][0] in _QUESTIONS else "yes/no question"


def _negation(sentence: Sentence, composer: Composer) -> str:
  if sentence.main.negated:
    return "negated"
  words = {word for word, _ in sentence.english}
  return "" if words & {"no", "not", "cannot", "never"} else "affirmative"


def _determiner(sentence: Sentence, composer: Composer) -> str:
  first = sentence.main.subject.english[:1]
  return _DETERMINERS.get(first[0][0], "") if first else ""


def _adverb_class(sentence: Sentence, composer: Composer) -> str:
  word = _adverb(sentence, composer)
  return ("frequency" if word in _OFTEN else "manner") if word else "none"


def _object_animacy(sentence: Sentence, composer: Composer) -> str:
  found = _main_object(sentence, composer)
  return "" if found is None else _KINDS[NOUNS[found].kind]


# What a sentence is about.


def _main_object(sentence: Sentence, composer: Composer) -> int | None:
  """The noun that the main verb is done to."""
  mine = (noun for verb, noun in composer.objects if verb == sentence.main.verb)
  return None if sentence.main.verb is None else next(mine, None)


def _object(sentence: Sentence, composer: Composer) -> str:
  found = _main_object(sentence, composer)
  return "" if found is None else NOUNS[found].english[0]


def _subject(sentence: Sentence, composer: Composer) -> str:
  word = next(_tagged(sentence.main.subject.english, "noun"), "")
  return _NOUN_OF[word].english[0] if word in _NOUN_OF else ""


def _verb(sentence: Sentence, composer: Composer) -> str:
  verb = sentence.main.verb
  return "" if verb is None else VERBS[verb].english[0]


def _adjective(sentence: Sentence, composer: Composer) -> str:
  return next((word for word in _tagged(sentence.english, "adj") if word in _ADJECTIVES), "")


def _adverb(sentence: Sentence, composer: Composer) -> str:
  return "" if sentence.main.adverb is None else sentence.main.adverb[1][0]


def _conjunction(sentence: Sentence, composer: Composer) -> str:
  return next((word for word in _tagged(sentence.english, "conj") if word in _CONJUNCTIONS), "")


def _coordination(sentence: Sentence, composer: Composer) -> str:
  if sentence.kind != "coordinated":
    return ""
  pairs = zip(sentence.english, sentence.english[1:], strict=False)
  return next((word for before, (word, tag) in pairs if before == COMMA and tag == "conj"), "")


def _preposition(sentence: Sentence, composer: Composer) -> str:
  return next(_tagged(sentence.english, "prep"), "")


def _time(sentence: Sentence, composer: Composer) -> str:
  text = f" {' '.join(word for word, _ in sentence.english)} "
  return next((time for time in _TIMES if f" {time} " in text), "")


def _numeral(sentence: Sentence, composer: Composer) -> str:
  return next(_tagged(sentence.english, "num"), "")


def _name(sentence: Sentence, composer: Composer) -> str:
  names = [word for word in _tagged(sentence.english, "name") if word != "Sunday"]
  return names[0] if names else ""


# How it is built.


def _construction(sentence: Sentence, composer: Composer) -> str:
  return "" if sentence.kind == "question" else sentence.kind


def _length(sentence: Sentence, composer: Composer) -> str:
  words = sum(tag != "punct" for _, tag in sentence.english)
  return "short" if words <= 7 else "long" if words >= 10 else ""


def _nouns(sentence: Sentence, composer: Composer) -> str:
  return ("none", "one", "two", "three or more")[min(len(composer.numbers), 3)]


def _adjectives(sentence: Sentence, composer: Composer) -> str:
  return "some" if any(_tagged(sentence.english, "adj")) else "none"


def _form(tokens: Tokens) -> str:
  """What a nominal phrase is, by its first word."""
  if not tokens:
    return ""
  kinds = {"name": "name", "pron": "pronoun"}
  return kinds.get(tokens[0][1], "noun phrase")


def _subject_form(sentence: Sentence, composer: Composer) -> str:
  return _form(sentence.main.subject.english)


def _object_form(sentence: Sentence, composer: Composer) -> str:
  return _form(sentence.main.objects[1])


def _first_word(sentence: Sentence, composer: Composer) -> str:
  return sentence.english[0][1]


def _last_word(sentence: Sentence, composer: Composer) -> str:
  return next((tag for _, tag in reversed(sentence.english) if tag != "punct"), "")


def _has(tag: str) -> "Of":
  return lambda sentence, composer: "some" if any(_tagged(sentence.english, tag)) else "none"


# In which of two small sets a word is: a few words of a kind, as a class of words has them.

_SIZE = 6  # words of a set


def _in_set(of: "Of", words: list[str], number: int) -> "Of":
  drawn = random.Random(number).sample(words, 2 * _SIZE)
  sets = dict(zip(drawn, ["first"] * _SIZE + ["second"] * _SIZE, strict=True))
  return lambda sentence, composer: sets.get(of(sentence, composer), "")


# Which word it has, one that is drawn by chance: the text itself gives the classes.


def _one_word(number: int) -> "Of":
  def value(sentence: Sentence, composer: Composer) -> str:
    words = [word for word, tag in sentence.english if tag != "punct"]
    return words[zlib.crc32(f"{number} {' '.join(words)}".encode()) % len(words)].lower()

  return value


Of = Callable[[Sentence, Composer], str]
_WORDS: dict[str, tuple[Of, list[str]]] = {
  "object": (_object, sorted({noun.english[0] for noun in NOUNS})),
  "subject": (_subject, sorted({noun.english[0] for noun in NOUNS})),
  "verb": (_verb, sorted({verb.english[0] for verb in VERBS})),
  "adjective": (_adjective, sorted(_ADJECTIVES)),
}
PROPERTIES: dict[str, Of] = {
  "number": _number,
  "tense": _tense,
  "relative clauses": _relative,
  "animacy": _animacy,
  "verb class": _verb_class,
  "question": _question,
  "negation": _negation,
  "determiner": _determiner,
  "adverb class": _adverb_class,
  "object animacy": _object_animacy,
  **{name: of for name, (of, _) in _WORDS.items()},
  "adverb": _adverb,
  "conjunction": _conjunction,
  "coordination": _coordination,
  "preposition": _preposition,
  "time": _time,
  "numeral": _numeral,
  "name": _name,
  "construction": _construction,
  "length": _length,
  "nouns": _nouns,
  "adjectives": _adjectives,
  "subject form": _subject_form,
  "object form": _object_form,
  "first word": _first_word,
  "last word": _last_word,
  "prepositions": _has("prep"),
  "names": _has("name"),
  "pronouns": _has("pron"),
  **{
    f"{name} set {number}": _in_set(of, words, number)
    for name, (of, words) in _WORDS.items()
    for number in range(1, 7)
  },
  **{f"word {number}": _one_word(number) for number in range(1, 17)},
}
"""Name -> the value that a sentence has; empty where it has none."""


def properties(sentence: Sentence, composer: Composer) -> dict[str, str]:
  """The values of all properties that a sentence has one of.

  Args:
    sentence: as it was drawn.
    composer: what drew it, which still remembers the words.
  """
  found = ((name, of(sentence, composer)) for name, of in PROPERTIES.items())
  return {name: value for name, value in found if value}
