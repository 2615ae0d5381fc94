r"""Nested expressions with one symbol for an answer, tested deeper than they are trained.

- `TableLookupData`: `c b a 010`, tables that map three bits to three bits, one after the other
  (Liska et al. 2018).
- `ArithmeticData`: `( ( 4 * 7 ) + 2 )`, modulo 10.
- `ListOpsData`: `[ MAX 4 [ MIN 2 3 ] 1 ]` (Nangia and Bowman 2018).

With a scratchpad (Nye et al. 2021) targets say every step of the way to the answer, and symbols are
numbered in source and target, by ascending numbers that are drawn; see `LengthData.hints`.

Depths are those of Csordas et al. 2022, "The Neural Data Router", section 4. The part `deeper` has
expressions deeper than any of training, `deeper_valid` some that are less deep than these, to
choose by.
"""

import dataclasses
import functools
import itertools
import random
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check
from compmod_jax.data.synthetic.parts import Draw, Example, PartedData, numbered

_LETTERS = "abcdefghijklmnop"
_BITS = tuple("".join(bits) for bits in itertools.product("01", repeat=3))
_HELD_OUT = 4  # one in so many
_MODULUS = 10
_DEEPER = 5  # tables more than training has, at most
_OUTSIDE = "outside"
_BLANK = "_"
Tree = tuple[list[str], int]
"""The symbols of an expression, and its value."""


# Scratchpads.


def steps_of_brackets(
  words: Sequence[str], numbers: Sequence[int], value: Callable[[Sequence[str]], int]
) -> list[str]:
  """The symbols of an expression, each with its number and with what its bracket holds by then.

  Brackets go by the number of the opening one. The steps of an opening one keep the bracket around
  it and what this holds behind a word of their own, `@` and the number, which those of its closing
  one repeat behind its value, so that what followed there is to be copied, and the value added.
  `#2 ( #3 4 #4 * #5 ( #6 3 #7 + #8 6 #9 ) #10 )` becomes `#2 ( @2 outside #2 #3 4 #2 4 #4 * #2 4 *
  #5 ( @5 #2 4 * #5 #6 3 #5 3 #7 + #5 3 + #8 6 #5 3 + 6 #9 ) 9 @5 #2 4 * 9 #10 ) 6 @2 outside 6`.
  No step depends on how deep brackets are nested.

  Args:
    words: an expression with brackets around it.
    numbers: of the words; all different.
    value: of what stands between two brackets, as digits and operators.

  Returns:
    The steps, which end with the expression's value.
  """
  found: list[str] = []
  stack: list[list[str]] = [[_OUTSIDE]]
  for number, word in zip(numbers, words, strict=True):
    name = f"#{number}"
    found += [name, word]
    if word in "([":
      found += [_kept(name), *stack[-1]]
      stack.append([name])
    elif word in ")]":
      opened, *parts = stack.pop()
      result = str(value(parts))
      found += [result, _kept(opened)]
      stack[-1].append(result)
    else:
      stack[-1].append(word)
    found += stack[-1]
  return found


def _kept(name: str) -> str:
  """The word behind which is kept what is around a bracket."""
  return name.replace("#", "@")


def _drawn_numbers(chance: random.Random, count: int, most: int) -> list[int]:
  """So many numbers in ascending order, from 100, or twice as many as a source has symbols at most.

  Of few numbers, those of deeper expressions would stand closer to each other than any of training.
  """
  return sorted(chance.sample(range(max(100, 2 * most)), count))


# Compositional table lookup.


@dataclasses.dataclass(frozen=True)
class TableLookupData(PartedData):
  """Tables that map three bits to three bits, composed.

  The last `new` tables stand in training alone, not in compositions; training has each line of one
  table `repeated` times beside `train` compositions. Parts: `test` from the distribution of
  training; `deeper_valid` with one to three functions more, `deeper` with four and five more;
  `composition`, sequences of functions that training lacks; `primitive`, compositions in which one
  of the last tables stands.
  """

  name: ClassVar[str] = "table lookup"

  tables: int = 8
  """how many there are"""
  new: int = 2
  """tables that training knows alone; 0 for no part `primitive`"""
  depth: int = 5
  """most functions of a training example"""
  backward: bool = True
  """the function that is applied last stands first, and the input last; else the input first"""
  repeated: int = 30
  """how often training has each line of one table"""
  scratchpad: bool = False
  """targets have every symbol in the order in which functions are applied, each function with the
  value that it gives: `#2 b #5 a #9 010` becomes `#9 010 #5 a 111 #2 b 001` where `a` maps 010 to
  111 and `b` that to 001"""
  blanks: int = 0
  """most blank words of a training example, among its functions, which change nothing: they make it
  as long as deeper ones are, in all of whose words functions change the value"""

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, depth=2, repeated=1, blanks=0)
    most = len(_LETTERS)
    check(2 <= self.tables <= most, f"tables is {self.tables}; it must be 2 to {most}.")
    check(
      0 <= self.new <= self.tables - 2,
      f"new is {self.new} of {self.tables} tables; it must be at least 0 and leave two to compose.",
    )

  def table(self, letter: str) -> dict[str, str]:
    """The bijection of the eight inputs that a letter stands for, drawn by the seed.

    A blank word leaves them as they are.
    """
    return dict(zip(_BITS, _BITS, strict=True)) if letter == _BLANK else _table(self.seed, letter)

  def example(self, functions: Sequence[str], bits: str) -> Example:
    """An input to which functions are applied, the first of them first."""
    target = functools.reduce(lambda value, name: self.table(name)[value], functions, bits)
    words = (*reversed(functions), bits) if self.backward else (bits, *functions)
    return Example(" ".join(words), target, {"depth": len(functions)})

  def held_out(self, functions: Sequence[str]) -> bool:
    """Whether training lacks a sequence of functions: a quarter of them, drawn by the seed."""
    name = f"{self.seed} held out {' '.join(functions)}"
    return len(functions) > 1 and zlib.crc32(name.encode()) % _HELD_OUT == 0

  def parts(self) -> Mapping[str, Sequence[Example]]:
    """See `PartedData`."""
    old, new = _LETTERS[: self.tables - self.new], _LETTERS[self.tables - self.new : self.tables]

    def sequence(chance: random.Random, least: int, most: int) -> list[str]:
      return [chance.choice(old) for _ in range(chance.randint(least, most))]

    def trained(chance: random.Random, *, held_out: bool = False) -> Example:
      while self.held_out(functions := sequence(chance, 2, self.depth)) != held_out:
        pass
      return self.example(functions, chance.choice(_BITS))

    def deeper(chance: random.Random, least: int, most: int) -> Example:
      functions = sequence(chance, self.depth + least, self.depth + most)
      return self.example(functions, chance.choice(_BITS))

    def primitive(chance: random.Random) -> Example:
      functions = sequence(chance, 2, self.depth)
      functions[chance.randrange(len(functions))] = chance.choice(new)
      return self.example(functions, chance.choice(_BITS))

    draws: dict[str, Draw] = {
      "train": trained,
      "valid": trained,
      "test": trained,
      "deeper_valid": functools.partial(deeper, least=1, most=3),
      "deeper": functools.partial(deeper, least=4, most=_DEEPER),
      "composition": functools.partial(trained, held_out=True),
    }
    if self.new:
      draws["primitive"] = primitive
    parts = self.draw(**draws)
    alone = [self.example([letter], bits) for letter in old + new for bits in _BITS]
    parts["train"] += alone * self.repeated
    if self.blanks:
      parts |= self.rewritten({"train": parts["train"]}, self.with_blanks)
    return self.rewritten(parts, self.with_steps) if self.scratchpad else parts

  def with_blanks(self, chance: random.Random, example: Example) -> Example:
    """An example with blank words."""
    words = example.source.split()
    for _ in range(chance.randint(0, self.blanks)):
      # The input keeps its end.
      words.insert(chance.randint(0, len(words) - 1) + (not self.backward), _BLANK)
    return example._replace(source=" ".join(words))

  def with_steps(self, chance: random.Random, example: Example) -> Example:
    """An example with numbers and the steps to its answer."""
    words = example.source.split()
    most = self.depth + max(self.blanks, _DEEPER) + 1
    numbers = _drawn_numbers(chance, len(words), most)
    source = numbered(words, numbers)
    if self.backward:
      words, numbers = words[::-1], numbers[::-1]
    value, *functions = words
    target = [f"#{numbers[0]}", value]
    for number, name in zip(numbers[1:], functions, strict=True):
      value = self.table(name)[value]
      target += [f"#{number}", name, value]
    return example._replace(source=" ".join(source), target=" ".join(target))


@functools.cache
def _table(seed: int, letter: str) -> dict[str, str]:
  chance = random.Random(f"{seed} table {letter}")
  order = sorted(_BITS, key=lambda bits: (chance.random(), bits))
  return dict(zip(_BITS, order, strict=True))


# Trees.


@dataclasses.dataclass(frozen=True)
class _TreeData(PartedData):
  """Expressions by depth.

  `train`, `valid` and `test` have up to `depth` levels, all equally often as far as there are so
  many expressions; `deeper_valid` has one level more, `deeper` two and three more.
  """

  depth: int = 5
  """levels of a training expression at most"""
  symbols: int = 50
  """symbols of an expression at most"""
  scratchpad: bool = False
  """targets have every symbol with what its bracket holds by then, and values of brackets as they
  close; see `steps_of_brackets`"""

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, depth=1)
    least = 4 * (self.depth + 3) + 1
    check(
      self.symbols >= least,
      f"symbols is {self.symbols} with depth {self.depth}; expressions three levels deeper need at"
      f" least {least}.",
    )

  def node(self, chance: random.Random, most: int) -> tuple[int, Callable[[list[Tree]], Tree]]:
    """How many parts, at least 2 and at most `most`, and how an expression is made of them."""
    raise NotImplementedError

  def value(self, words: Sequence[str]) -> int:
    """The value of what stands between two brackets, with digits for all inner ones."""
    raise NotImplementedError

  def tree(self, chance: random.Random, depth: int, room: int) -> Tree:
    """An expression of exactly this depth, and its value.

    Args:
      chance: draws it.
      depth: its levels.
      room: its symbols at most, no fewer than 4 for a level and one.
    """
    if depth == 0:
      digit = chance.randrange(_MODULUS)
      return [str(digit)], digit
    # One part is as deep as it can be, and the others as deep as the room allows.
    spare = room - (4 * depth + 1)
    count, make = self.node(chance, 2 + spare)
    spare -= count - 2
    depths = [depth - 1]
    for _ in range(count - 1):
      depths.append(chance.randrange(min(depth, spare // 4 + 1)))
      spare -= 4 * depths[-1]
    chance.shuffle(depths)
    parts: list[Tree] = []
    for below in depths:
      parts.append(self.tree(chance, below, 4 * below + 1 + spare))
      spare -= len(parts[-1][0]) - (4 * below + 1)
    return make(parts)

  def parts(self) -> Mapping[str, Sequence[Example]]:
    """See `PartedData`."""

    def drawn(least: int, most: int) -> Draw:
      def draw(chance: random.Random) -> Example:
        depth = chance.randint(least, most)
        words, value = self.tree(chance, depth, self.symbols)
        return Example(" ".join(words), str(value), {"depth": depth})

      return draw

    trained = drawn(1, self.depth)
    parts = self.draw(
      train=trained,
      valid=trained,
      test=trained,
      deeper_valid=drawn(self.depth + 1, self.depth + 1),
      deeper=drawn(self.depth + 2, self.depth + 3),
    )
    return self.rewritten(parts, self.with_steps) if self.scratchpad else parts

  def with_steps(self, chance: random.Random, example: Example) -> Example:
    """An example with numbers and the steps to its answer."""
    words = example.source.split()
    numbers = _drawn_numbers(chance, len(words), self.symbols)
    target = steps_of_brackets(words, numbers, self.value)
    return example._replace(source=" ".join(numbered(words, numbers)), target=" ".join(target))


@dataclasses.dataclass(frozen=True)
class ArithmeticData(_TreeData):
  """Sums and products of digits modulo 10."""

  name: ClassVar[str] = "arithmetic"

  def node(self, chance: random.Random, most: int) -> tuple[int, Callable[[list[Tree]], Tree]]:
    """See `_TreeData`."""
    sign = chance.choice("+*")

    def make(parts: list[Tree]) -> Tree:
      (first, left), (second, right) = parts
      return ["(", *first, sign, *second, ")"], self.value([str(left), sign, str(right)])

    return 2, make

  def value(self, words: Sequence[str]) -> int:
    """See `_TreeData`."""
    left, sign, right = words
    one, other = int(left), int(right)
    return (one + other if sign == "+" else one * other) % _MODULUS


_OPERATORS: Mapping[str, Callable[[Sequence[int]], int]] = {
  "MIN": min,
  "MAX": max,
  # The middle one, or half way between two, rounded down.
  "MED": lambda values: int(statistics.median(values)),
  "SM": lambda values: sum(values) % _MODULUS,
}


@dataclasses.dataclass(frozen=True)
class ListOpsData(_TreeData):
  """Least, largest and middle one, and sum modulo 10, of lists of digits and lists."""

  name: ClassVar[str] = "list operations"

  arguments: int = 5
  """most members of a list"""

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, arguments=2)

  def node(self, chance: random.Random, most: int) -> tuple[int, Callable[[list[Tree]], Tree]]:
    """See `_TreeData`."""
    count, operator = (
      chance.randint(2, min(most, self.arguments)),
      chance.choice(sorted(_OPERATORS)),
    )

    def make(parts: list[Tree]) -> Tree:
      words = [word for part, _ in parts for word in part]
      values = [str(value) for _, value in parts]
      return ["[", operator, *words, "]"], self.value([operator, *values])

    return count, make

  def value(self, words: Sequence[str]) -> int:
    """See `_TreeData`."""
    operator, *members = words
    return _OPERATORS[operator]([int(one) for one in members])
