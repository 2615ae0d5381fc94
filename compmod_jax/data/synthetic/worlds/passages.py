"""Stories in words by which it is told which split may have them."""

import zlib
from collections.abc import Sequence

from compmod_jax.data.synthetic.worlds import english
from compmod_jax.data.synthetic.worlds.stories import Random
from compmod_jax.data.synthetic.worlds.world import Event

_OWN = ("test", "valid", "facts")  # splits whose stories training must not have by chance
_PARTS = 10


def passage(draws: Random, split: str, events: Sequence[Event], ways: int) -> list[str] | None:
  """The sentences of a story, in words that belong to a split; None if hardly any do.

  Args:
    draws: from [0, 1).
    split: that is to have it.
    events: the story.
    ways: to tell an event, at most.
  """
  sentences = [english.sentence(draws, event, ways) for event in events]
  hashes = [zlib.crc32(sentence.encode()) for sentence in sentences]
  for _ in range(20 * _PARTS if ways > 1 else 1):
    if _belongs(split, sum(hashes) % _PARTS):
      return sentences
    i = int(draws() * len(events))
    sentences[i] = english.sentence(draws, events[i], ways)
    hashes[i] = zlib.crc32(sentences[i].encode())
  return None


def _belongs(split: str, part: int) -> bool:
  """Whether a split may have the stories of a part; new names and length tell the others apart."""
  if split == "train":
    return part >= len(_OWN)
  return split not in _OWN or part == _OWN.index(split)
