"""The closed vocabulary of the worlds: every word of stories, questions and answers, with its tag.

No word has two tags, and a content word has one class, so that both can be looked up.
"""

import itertools
import re
import zlib
from typing import Literal

from compmod_jax.core.errors import UserError

Tag = Literal["noun", "verb", "adjective", "adverb", "numeral", "other"]

# The first of each class are used most.
_NAMES = """
  Anna Ben Daniel Emma Hugo Julia Karin Leo Maria Otto Peter Rosa Carla Clara David Eva Felix Frank
  Greta Helen Ida Ivan Jonas Linda Martin Nina Nora Oscar Paula Robert Sara Simon Thomas Tom Vera
  Walter"""
# Of invented names: two open syllables and perhaps a last consonant. There are so many that a
# tokenizer has to split them, and training has every syllable at every place.
_CONSONANTS = "bdfghklmnprstv"
_VOWELS = "aeiou"
_LAST = ("", "l", "n", "s")
_INVENTED = 2_000  # for training
_NEW = 200  # for the split `names`
_PLACES = """
  castle cellar church forest garage garden hall kitchen library museum office park school shop
  station tower"""
_THINGS = """
  ball basket bell bottle bowl box cube cup doll drum flute horn key lamp mask plate ring spoon tray
  vase"""
_COLOURS = "black blue brown green grey pink purple red white yellow"
_MATERIALS = "clay copper glass iron paper plastic silver stone tin wood"
_NUMERALS = "one two three"
_OTHERS: dict[Tag, str] = {
  "noun": "colour friend material people person place places sentence thing things",
  "verb": """answer are bought carried consists describe did does dropped get go got grabbed has
    have is left made picked put say sent sold told took walked was went""",
  "adjective": "best like many same",
  "adverb": "down how up where",
  "other": "a and as before by from in no of someone the to what which who whom yes",
}

NAMES: tuple[str, ...] = tuple(_NAMES.split())
PLACES: tuple[str, ...] = tuple(_PLACES.split())
THINGS: tuple[str, ...] = tuple(_THINGS.split())
COLOURS: tuple[str, ...] = tuple(_COLOURS.split())
MATERIALS: tuple[str, ...] = tuple(_MATERIALS.split())
NUMERALS: tuple[str, ...] = tuple(_NUMERALS.split())


def _invent() -> tuple[str, ...]:
  """Invented names in an order that does not depend on the interpreter, no word of the worlds."""
  syllables = [one + other for one in _CONSONANTS for other in _VOWELS]
  parts = itertools.product(syllables, syllables, _LAST)
  lists = (_NAMES, _PLACES, _THINGS, _COLOURS, _MATERIALS, _NUMERALS, *_OTHERS.values())
  taken = {word.lower() for words in lists for word in words.split()}
  names = ("".join(name) for name in parts)
  ranked = sorted((zlib.crc32(name.encode()), name) for name in names if name not in taken)
  return tuple(name.capitalize() for _, name in ranked[: _INVENTED + _NEW])


_ALL_INVENTED = _invent()
INVENTED_NAMES = _ALL_INVENTED[:_INVENTED]
"""for training, beside `NAMES`"""
NEW_NAMES = _ALL_INVENTED[_INVENTED:]
"""the split `names` alone has them"""

CLASSES: dict[str, str] = {
  **dict.fromkeys(NAMES + INVENTED_NAMES + NEW_NAMES, "person"),
  **dict.fromkeys(PLACES, "place"),
  **dict.fromkeys(THINGS, "thing"),
  **dict.fromkeys(COLOURS, "colour"),
  **dict.fromkeys(MATERIALS, "material"),
}
"""content word -> its class"""

VOCABULARY: dict[str, Tag] = {
  **{word: tag for tag, words in _OTHERS.items() for word in words.split()},
  **{word: "adjective" if kind == "colour" else "noun" for word, kind in CLASSES.items()},
  **dict.fromkeys(NUMERALS, "numeral"),
}
"""every word -> its part of speech; all but names in lower case"""

_TOKEN = re.compile(r"\w+|[^\w\s]")


def tags(text: str) -> list[tuple[str, Tag]]:
  """The words and punctuation marks of a text with their parts of speech, in order.

  Names are nouns; forms of `be`, `do` and `have` are verbs; punctuation marks are `other`, as are
  articles, pronouns, prepositions and conjunctions.

  Args:
    text: a passage, question, option or answer of the worlds.

  Raises:
    UserError: a word is none of the vocabulary's.
  """
  return [(word, _tag(word)) for word in _TOKEN.findall(text)]


def _tag(word: str) -> Tag:
  tag = VOCABULARY.get(word) or VOCABULARY.get(word.lower())
  if tag is not None:
    return tag
  if word[0].isalnum():
    raise UserError(
      f"text has the word {word!r}, which is none of the {len(VOCABULARY)} words of the worlds; tag"
      " other texts with a tagger."
    )
  return "other"
