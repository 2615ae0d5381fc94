"""The grammar as a data source: which sentence belongs to which split."""

import dataclasses
import functools
import hashlib
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.base import Pairs, Relations
from compmod_jax.data.generated import kept
from compmod_jax.data.synthetic.grammar.clauses import Composer
from compmod_jax.data.synthetic.grammar.lexicon import ADJECTIVES, NOUNS
from compmod_jax.data.synthetic.grammar.properties import properties
from compmod_jax.data.synthetic.grammar.sentences import (
  Sentence,
  attracted,
  long,
  nested,
  ordinary,
  relations,
  render,
)
from compmod_jax.data.synthetic.grammar.verbs import VERBS

SPLITS = ("train", "valid", "test", "length", "depth", "combination", "attractor")
_SHORTEST = 5  # words, so that hardly any sentence comes twice
_HELD_OUT = 64  # one word pair in so many is never seen in training


def _held_out(*words: str) -> bool:
  digest = hashlib.blake2b(" ".join(words).encode(), digest_size=4).digest()
  return int.from_bytes(digest, "big") % _HELD_OUT == 0


@functools.cache
def held_out_pairs() -> tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]:
  """Nouns that an adjective never describes, and that a verb never has as object, in training.

  Returns:
    Numbers of ADJECTIVES, and of VERBS, each with the numbers of NOUNS. No training sentence holds
    both words of a pair, in whatever relation. The same pairs for every seed.
  """
  adjectives = {
    i: frozenset(
      j
      for j, noun in enumerate(NOUNS)
      if noun.kind in adjective.kinds and _held_out(adjective.german, noun.singular)
    )
    for i, adjective in enumerate(ADJECTIVES)
  }
  verbs = {
    i: frozenset(
      j
      for j, noun in enumerate(NOUNS)
      if noun.kind in verb.objects and _held_out(verb.english[0], noun.singular)
    )
    for i, verb in enumerate(VERBS)
  }
  return adjectives, verbs


def _combines(composer: Composer) -> bool:
  """Whether an adjective describes, or a verb takes, a noun that is held out from it."""
  adjectives, verbs = held_out_pairs()
  return any(noun in adjectives[i] for i, noun in composer.attributes) or any(
    noun in verbs[i] for i, noun in composer.objects
  )


def _meets(composer: Composer) -> bool:
  """Whether the sentence holds both words of a pair that is held out."""
  adjectives, verbs = held_out_pairs()
  nouns = composer.nouns
  return any(not nouns.isdisjoint(adjectives[i]) for i in composer.adjectives) or any(
    not nouns.isdisjoint(verbs[i]) for i in composer.verbs
  )


@dataclasses.dataclass(frozen=True)
class GrammarData:
  """Pairs of a synchronous English-German grammar, every sentence with exactly one translation.

  Sentence i of a split depends on `seed`, the split's name, i, `depth` and `words` alone. Words are
  what blanks separate: punctuation stands behind its word, as usual, and counts with it.

  Splits: `train`, `valid` and `test` have one distribution, and a hash of the sentence says which
  of them may hold it, for every seed. Out of distribution: `length`, both sides longer than any
  training sentence, at most twice as long; `depth`, one relative clause more in each other than
  trained; `combination`, with an adjective and its noun, or a verb and its object, that share no
  training sentence; `attractor`, `index % 4` nouns of the other number between subject and verb.

  Annotations (`Pairs.info`): `pos_source`, `pos_target`, one tag a word (noun, name, verb, aux,
  adj, adv, det, num, pron, prep, conj, neg, part); `number`, sg or pl, of the main clause's
  subject; `depth`, the relative clauses in each other; `attractors`; `kind` of sentence. In
  `attractor` also `ungrammatical`, the English sentence with its verb in the wrong number, and
  `ungrammatical_german`. `Pairs.relations`: see `sentences.relations`.
  """

  seed: int = 0
  """another seed, another draw of every split"""
  direction: Literal["de-en", "en-de"] = "de-en"
  """source and target language; the same sentences either way"""
  train: int = 60_000
  """training pairs"""
  valid: int = 500
  """validation pairs"""
  test: int = 1_000
  """test pairs"""
  shifted: int = 500
  """pairs of each out-of-distribution split"""
  depth: int = 2
  """how many relative clauses lie in each other in training, at most"""
  words: int = 20
  """longest training sentence on either side, in words"""

  metric = "bleu"

  def __post_init__(self):
    check_choice("direction", self.direction, ("de-en", "en-de"))
    for field in ("train", "valid", "test", "shifted"):
      size = getattr(self, field)
      check(size > 0, f"{field} is {size}; a split needs at least one pair: give 1 or more.")
    check(
      1 <= self.depth <= 3,
      f"depth is {self.depth}; it must be 1, 2 or 3: choose one of them.",
    )
    least = 5 * self.depth + 10
    check(
      least <= self.words <= 40,
      f"words is {self.words}; with depth {self.depth} it must be from {least}, to leave room for"
      f" the `depth` split's nesting, to 40, to leave room for longer sentences: change either.",
    )

  @property
  def source_language(self) -> str:
    """`de` or `en`."""
    return self.direction[:2]

  @property
  def target_language(self) -> str:
    """`de` or `en`."""
    return self.direction[3:]

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return SPLITS

  def size(self, split: str) -> int:
    """The number of pairs of a split."""
    check_choice("split", split, SPLITS)
    return getattr(self, split if split in ("train", "valid", "test") else "shifted")

  def load(self, split: str) -> Pairs:
    """The pairs of a split, annotated.

    Raises:
      UserError: `split` is none of `splits()`.
    """
    draw, size = _Draw(self, split), self.size(split)
    code = Path(__file__).parent.glob("*.py")
    texts = kept(f"{split} of {self}", code, lambda: [draw(i)[:2] for i in range(size)])
    return Pairs(
      source=[source for source, _ in texts],
      target=[target for _, target in texts],
      where=lambda i: f"grammar:{split}[{i}]",
      info=_Annotations(draw, size),
      metric="bleu",
      relations=draw.relations,
    )

  def pair(self, split: str, index: int) -> tuple[str, str, dict[str, Any]]:
    """Source, target and annotations of one sentence, drawn alone: what `load` has there.

    Raises:
      UserError: `split` is none of `splits()`, or has no such index.
    """
    size = self.size(split)
    check(
      0 <= index < size,
      f"index is {index}; the split {split} has {size:,} pairs: choose 0 to {size - 1}.",
    )
    return _Draw(self, split)(index)

  def with_properties(self, split: str) -> Iterator[tuple[str, dict[str, str]]]:
    """English text and properties of every sentence of a split; see `properties.PROPERTIES`.

    Raises:
      UserError: `split` is none of `splits()`.
    """
    draw = _Draw(self, split)
    return (draw.with_properties(i) for i in range(self.size(split)))


class _Annotations(Sequence[Mapping[str, Any]]):
  """Annotations of a split, each drawn with its sentence when it is read."""

  def __init__(self, draw: "_Draw", size: int):
    self._draw, self._numbers = draw, range(size)

  def __len__(self) -> int:
    return len(self._numbers)

  @overload
  def __getitem__(self, index: int) -> Mapping[str, Any]: ...

  @overload
  def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...

  def __getitem__(self, index: int | slice) -> Any:
    if isinstance(index, slice):
      return [self._draw(number)[2] for number in self._numbers[index]]
    return self._draw(self._numbers[index])[2]


class _Draw:
  """Draws the sentences of one split, each from a generator of its own."""

  def __init__(self, config: GrammarData, split: str):
    self.config = config
    self.split = split
    self.random = random.Random()
    self.composer = Composer(self.random.random, config.depth + (split == "depth"))

  def _draw(self, index: int) -> tuple[Sentence, tuple[Any, ...]]:
    """A sentence, and what `render` makes of its German and its English."""
    name = f"{self.config.seed} {self.split} {index}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    self.random.seed(int.from_bytes(digest, "big"))
    while True:
      sentence = self._propose(index)
      if not self._fits(sentence, index):
        continue
      german, german_tags = render(sentence.german)
      english, english_tags = render(sentence.english)
      sizes = len(german_tags), len(english_tags)
      if self._long_enough(*sizes) and self._belongs(german):
        return sentence, (german, german_tags, english, english_tags)

  def __call__(self, index: int) -> tuple[str, str, dict[str, Any]]:
    sentence, (german, german_tags, english, english_tags) = self._draw(index)
    info = self._info(sentence)
    if self.config.direction == "de-en":
      return german, english, {"pos_source": german_tags, "pos_target": english_tags, **info}
    return english, german, {"pos_source": english_tags, "pos_target": german_tags, **info}

  def with_properties(self, index: int) -> tuple[str, dict[str, str]]:
    """English text and properties of one sentence."""
    sentence, (_, _, english, _) = self._draw(index)
    return english, properties(sentence, self.composer)

  def relations(self, index: int) -> dict[str, Relations]:
    """The relations of one sentence, which is drawn again with its words marked."""
    self.composer.marks = True
    sentence = self._draw(index)[0]
    self.composer.marks = False
    sides = relations(sentence.german), relations(sentence.english)
    source, target = sides if self.config.direction == "de-en" else sides[::-1]
    return {"source": source, "target": target}

  def _propose(self, index: int) -> Sentence:
    self.composer.clear()
    if self.split == "attractor":
      return attracted(self.composer, index % 4)
    return {"length": long, "depth": nested}.get(self.split, ordinary)(self.composer)

  def _fits(self, sentence: Sentence, index: int) -> bool:
    """Whether the words are right for the split: only `combination` may hold held-out pairs."""
    composer = self.composer
    if self.split == "combination":
      return _combines(composer)
    if self.split == "depth" and composer.depth <= self.config.depth:
      return False
    if self.split == "attractor" and sentence.attractors != index % 4:
      return False
    return not _meets(composer)

  def _long_enough(self, german: int, english: int) -> bool:
    longest = self.config.words
    if self.split == "length":
      return longest < min(german, english) and max(german, english) <= 2 * longest
    return min(german, english) >= _SHORTEST and max(german, english) <= longest

  def _belongs(self, german: str) -> bool:
    """Eight tenths of all sentences are for training, a tenth each for validation and tests."""
    part = zlib.crc32(german.encode()) % 10
    if self.split == "train":
      return part >= 2
    if self.split == "valid":
      return part == 1
    return self.split not in ("test", "attractor") or part == 0

  def _info(self, sentence: Sentence) -> dict[str, Any]:
    info: dict[str, Any] = {
      "number": ("sg", "pl")[sentence.main.subject.person % 2],
      "depth": self.composer.depth,
      "attractors": sentence.attractors,
      "kind": sentence.kind,
    }
    if sentence.twin is not None:
      info["ungrammatical"] = render(sentence.twin[1])[0]
      info["ungrammatical_german"] = render(sentence.twin[0])[0]
    return info
