"""Data sets of pairs that are drawn by chance, in parts that share no source."""

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import UserError, check_choice
from compmod_jax.data.base import Metric, Pairs

_TRIES = 300  # draws in a row that give nothing new


class Example(NamedTuple):
  """A source, its target and what scores may be told apart by."""

  source: str
  target: str
  info: Mapping[str, int | str]


Draw = Callable[[random.Random], Example]


def numbered(symbols: Sequence[str], numbers: Sequence[int]) -> list[str]:
  """Symbols, and before each its number as a word: `#3 a #7 b`; as many of both."""
  return [word for n, one in zip(numbers, symbols, strict=True) for word in (f"#{n}", one)]


@dataclasses.dataclass(frozen=True)
class PartedData:
  """Parts of examples, a function of the fields alone, on every machine and version of Python.

  Raises:
    UserError: a size is below 1.
  """

  seed: int = 0
  """draws the examples"""
  train: int = 20_000
  """training examples"""
  scored: int = 1_000
  """examples of every other part"""

  name: ClassVar[str]
  source_language = "questions"
  target_language = "answers"
  metric: ClassVar[Metric] = "exact_match"

  def __post_init__(self) -> None:
    check_least(self, train=1, scored=1)

  def parts(self) -> Mapping[str, Sequence[Example]]:
    """All of them: `train`, `valid`, `test`, then those of other distributions."""
    raise NotImplementedError

  def draw(self, **draws: Draw) -> dict[str, list[Example]]:
    """Parts of different sources, as many as the fields say; training takes what is left.

    Raises:
      UserError: there are not so many.
    """
    found, taken = {}, set[str]()
    for part in sorted(draws, key=lambda part: part == "train"):
      chance = random.Random(f"{self.seed} {self.name} {part}")
      field = "train" if part == "train" else "scored"
      found[part] = _distinct(draws[part], chance, getattr(self, field), taken, (part, field))
    return {part: found[part] for part in draws}

  def rewritten(
    self,
    parts: Mapping[str, Sequence[Example]],
    write: Callable[[random.Random, Example], Example],
  ) -> dict[str, list[Example]]:
    """Parts of the same examples in another form, which may depend on chance."""
    found = {}
    for part, examples in parts.items():
      chance = random.Random(f"{self.seed} {self.name} {part} rewritten")
      found[part] = [write(chance, one) for one in examples]
    return found

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return tuple(_parts_of(self))

  def load(self, split: str) -> Pairs:
    """The pairs of a part.

    Raises:
      UserError: `split` is none of `splits()`, or there are fewer examples than asked for.
    """
    check_choice("split", split, self.splits())
    examples = _parts_of(self)[split]
    return Pairs(
      source=[one.source for one in examples],
      target=[one.target for one in examples],
      where=lambda i: f"{self.name}:{split}[{i}]",
      info=[one.info for one in examples],
      metric=self.metric,
    )


@functools.lru_cache(maxsize=16)
def _parts_of(data: PartedData) -> Mapping[str, Sequence[Example]]:
  return data.parts()


def _distinct(
  draw: Draw, chance: random.Random, count: int, taken: set[str], names: tuple[str, str]
) -> list[Example]:
  """So many examples whose sources are not taken; takes them."""
  found: list[Example] = []
  tries = 0
  while len(found) < count:
    one = draw(chance)
    tries = tries + 1 if one.source in taken else 0
    if tries > _TRIES:
      part, field = names
      raise UserError(
        f"{field} is {count:,}, and only {len(found):,} different examples of the part {part!r}"
        " were found; choose at most as many."
      )
    if tries == 0:
      taken.add(one.source)
      found.append(one)
  return found
