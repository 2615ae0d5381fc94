"""Pairs of sentences that differ in one word, found among the sentences of a split."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from compmod_jax.analysis.reading import NOTHING, Reader
from compmod_jax.analysis.subject import Subject

Sentences = Mapping[int, tuple[int, ...]]
"""Number of a sentence in its split -> its tokens, end of sentence included."""


class Pair(NamedTuple):
  """Two sentences of as many tokens that differ at one position.

  Attributes:
    base: number of the one in which something is replaced.
    source: number of the one from which it comes.
    position: where they differ.
    words: the tokens there, of base and source.
  """

  base: int
  source: int
  position: int
  words: tuple[int, int]

  def turned(self) -> "Pair":
    """The same with base and source exchanged."""
    one, other = self.words
    return Pair(self.source, self.base, self.position, (other, one))


def read_tokens(subject: Subject, reads: Reader) -> Sentences:
  """The source sides of the subject's sentences."""
  found = dict[int, tuple[int, ...]]()
  for batch in subject.batches:
    ids = reads.tokens(reads.streams[0], batch)
    for row, number in enumerate(np.asarray(batch["index"]).tolist()):
      if number >= 0:
        found[number] = tuple(ids[row][ids[row] != NOTHING].tolist())
  return found


def pairs_of(sentences: Sentences, chance: np.random.Generator) -> list[Pair]:
  """Pairs that differ in one token, in a random order; base has the token of the lower number.

  Of sentences with equal tokens the first counts. k sentences that are equal but for one position
  make k - 1 pairs, neighbours in a random order: as many as sentences, not as their square.
  """
  frames = defaultdict[tuple, list[int]](list)
  seen = set[tuple[int, ...]]()
  for number, tokens in sorted(sentences.items()):
    if tokens not in seen:
      for position in range(len(tokens)):
        frames[position, tokens[:position], tokens[position + 1 :]].append(number)
    seen.add(tokens)
  found = list[Pair]()
  for (position, *_), members in frames.items():
    mixed = chance.permutation(members).tolist() if len(members) > 1 else members
    for one, other in itertools.pairwise(mixed):
      pair = Pair(one, other, position, (sentences[one][position], sentences[other][position]))
      found.append(pair if pair.words[0] < pair.words[1] else pair.turned())
  return [found[place] for place in chance.permutation(len(found))]


def disjoint(pairs: Iterable[Pair]) -> list[Pair]:
  """The pairs from the first on, without those that have a sentence of an earlier one."""
  used, kept = set[int](), list[Pair]()
  for pair in pairs:
    if pair.base not in used and pair.source not in used:
      kept.append(pair)
      used |= {pair.base, pair.source}
  return kept
