"""Which word depends on which in the stories of the worlds, whose sentences are of few forms."""

import functools
import itertools

from compmod_jax.data.base import Relations
from compmod_jax.data.synthetic.worlds.english import SENTENCES

_SUBJECT, _ADVERB, _ADJECTIVE = ("subject", 0, 1), ("adverb", 2, 1), ("adjective", 1, 2)
_TRANSITIVE = (_SUBJECT, ("object", 3, 1))
_WITH_ADVERB = (_SUBJECT, _ADVERB, ("object", 4, 1))

SYNTAX: dict[str, Relations] = {
  "{1} went to the {2}.": (_SUBJECT,),
  "{1} walked to the {2}.": (_SUBJECT,),
  "{1} took the {2}.": _TRANSITIVE,
  "{1} picked up the {2}.": _WITH_ADVERB,
  "{1} grabbed the {2}.": _TRANSITIVE,
  "{1} sent the {3} to {2}.": _TRANSITIVE,
  "{1} sold the {3} to {2}.": _TRANSITIVE,
  "{2} got the {3} from {1}.": _TRANSITIVE,
  "{2} bought the {3} from {1}.": _TRANSITIVE,
  "{1} dropped the {2}.": _TRANSITIVE,
  "{1} put down the {2}.": _WITH_ADVERB,
  "Someone left the {1} in the {2}.": _TRANSITIVE,
  "Someone put the {1} in the {2}.": _TRANSITIVE,
  "The {1} is {2}.": (("subject", 1, 3),),
  "The colour of the {1} is {2}.": (("subject", 1, 6),),
  "The {1} is made of {2}.": (("subject", 1, 3),),
  "The {1} consists of {2}.": (("subject", 1, 2),),
  "The best friend of {1} is {2}.": (_ADJECTIVE, ("subject", 2, 5)),
  "{2} is the best friend of {1}.": (_SUBJECT, ("adjective", 3, 4)),
}
"""Form of a sentence -> (relation, dependent, head), by the numbers of its words.

`subject`, `object` and `adverb` of a verb (or of the colour that something is), and `adjective` of
a noun, as in the grammar.
"""


def relations(passage: str) -> Relations:
  """The relations of a story, by the numbers of its words between blanks.

  A sentence of none of the forms has none.
  """
  found, start = list[tuple[str, int, int]](), 0
  words = passage.split()
  ends = [number + 1 for number, word in enumerate(words) if word.endswith(".")]
  for end in ends:
    of = _relations(tuple(words[start:end]))
    found += [(name, start + dependent, start + head) for name, dependent, head in of]
    start = end
  return found


@functools.lru_cache(maxsize=4096)
def _relations(sentence: tuple[str, ...]) -> Relations:
  """The relations of one sentence."""
  for form in itertools.chain.from_iterable(SENTENCES.values()):
    parts = form.split()
    fits = len(parts) == len(sentence) and all(
      "{" in part or part == word for part, word in zip(parts, sentence, strict=True)
    )
    if fits:
      return SYNTAX[form]
  return ()
