"""Tasks on sequences, trained on short ones and tested on long ones.

Copying, reversing, adding, parity and sorting, as in Kazemnejad et al. 2023 ("The Impact of
Positional Encoding on Length Generalization in Transformers", section 4) and others; index hints
after Zhou et al. 2024 ("What Algorithms can Transformers Learn?", section 5), but with numbers that
are drawn as positions are in Ruoss et al. 2023: of successive ones, far ones never meet in
training.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.synthetic.parts import Draw, Example, PartedData, numbered

_DIGITS = "0123456789"


def _over(symbols: str, target: Callable[[list[str]], list[str]]) -> Callable[..., list[list[str]]]:
  """A task on symbols that are drawn independently."""

  def make(chance: random.Random, length: int) -> list[list[str]]:
    source = [chance.choice(symbols) for _ in range(length)]
    return [source, target(source)]

  return make


def _addition(chance: random.Random, length: int) -> list[list[str]]:
  """Two numbers of so many digits, and their sum with one digit more; all highest digit first."""
  numbers = [[chance.choice(_DIGITS) for _ in range(length)] for _ in range(2)]
  total = sum(int("".join(digits)) for digits in numbers)
  return [[*numbers[0], "+", *numbers[1]], [*str(total).zfill(length + 1)]]


_TASKS = {
  "copy": _over("abcdefghijklmnop", list),
  "reverse": _over("abcdefghijklmnop", lambda word: word[::-1]),
  "addition": _addition,
  "parity": _over("01", lambda bits: [str(bits.count("1") % 2)]),
  "sorting": _over(_DIGITS, sorted),
}
LengthTask = Literal["copy", "reverse", "addition", "parity", "sorting"]
_HINTED = ("copy", "reverse", "addition")


def _hinted(
  task: str, source: list[str], target: list[str], numbers: list[int], *, scratchpad: bool = False
) -> list[list[str]]:
  """Sequences with a number before every symbol; those of a sum say which digits are added.

  Symbols have the same numbers in source and target. Summands begin with 0 and their sum with its
  lowest digit, so that both have as many. With a scratchpad the two digits that are added and the
  carry stand before each digit of a sum.
  """
  if task != "addition":
    order = numbers[::-1] if task == "reverse" else numbers
    return [numbered(source, numbers), numbered(target, order)]
  middle = source.index("+")
  one, other = (["0", *digits] for digits in (source[:middle], source[middle + 1 :]))
  source = [*numbered(one, numbers[::-1]), "+", *numbered(other, numbers[::-1])]
  digits = numbered(target[::-1], numbers)
  if not scratchpad:
    return [source, digits]
  carry, steps = 0, []
  for a, b, number, digit in zip(one[::-1], other[::-1], digits[::2], digits[1::2], strict=True):
    steps += [number, a, b, f"carry_{carry}", digit]
    carry = int(int(a) + int(b) + carry > 9)
  return [source, steps]


@dataclasses.dataclass(frozen=True)
class LengthData(PartedData):
  """One task on sequences; a part for every multiple of the training length.

  `train`, `valid` and `test` have 1 to `length` symbols, or digits of a number, all equally often
  as far as there are so many sequences; `longer_2` has from `length` + 1 to twice as many, and so
  on: `longer_n` ends at n times as many.
  """

  task: LengthTask = "copy"
  """what is to be done"""
  length: int = 20
  """most symbols of a training sequence"""
  times: int = 3
  """how many times as long the longest test sequence is"""
  hints: int = 0
  """words that number symbols, before each of which its own stands, in source and target (index
  hints): those of a sequence are drawn from so many, and ascend. Sums begin with their lowest
  digit, and numbers that are added with a 0. More than symbols of the longest sequence; 0 for no
  hints"""
  scratchpad: bool = False
  """before each digit of a sum stand the two digits that are added and what is carried to them
  (Nye et al. 2021); for additions with hints"""

  name: ClassVar[str] = "lengths"
  source_language = "sequences"

  def __post_init__(self) -> None:
    super().__post_init__()
    check_choice("task", self.task, _TASKS)
    check_least(self, length=8, times=2)
    longest = self.length * self.times
    check(
      self.hints == 0 or (self.task in _HINTED and self.hints > longest),
      f"hints is {self.hints} and task {self.task!r}; hints are for {', '.join(_HINTED)}, and more"
      f" than the {longest} symbols of the longest sequence. Use so many, or 0.",
    )
    check(
      not self.scratchpad or (self.task == "addition" and self.hints > 0),
      f"scratchpad is on with task {self.task!r} and {self.hints} hints; it is for additions with"
      " hints. Give some, or leave it off.",
    )

  def parts(self) -> Mapping[str, Sequence[Example]]:
    """See `PartedData`."""
    make = _TASKS[self.task]

    def drawn(least: int, most: int) -> Draw:
      def draw(chance: random.Random) -> Example:
        length = chance.randint(least, most)
        source, target = make(chance, length)
        if self.hints:
          count = length + (self.task == "addition")
          numbers = sorted(chance.sample(range(self.hints), count))
          source, target = _hinted(self.task, source, target, numbers, scratchpad=self.scratchpad)
        return Example(" ".join(source), " ".join(target), {"length": length})

      return draw

    trained = drawn(1, self.length)
    longer = {
      f"longer_{n}": drawn((n - 1) * self.length + 1, n * self.length)
      for n in range(2, self.times + 1)
    }
    return self.draw(train=trained, valid=trained, test=trained, **longer)
