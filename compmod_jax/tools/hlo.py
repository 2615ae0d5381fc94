"""Programs as XLA prints them after optimisation: what they move through memory and between chips.

XLA's own cost analysis counts the body of a loop once and tells nothing of collectives; here a body
counts as often as it runs, where the program says how often that is.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from compmod_jax.core import scopes

# These only name what others made; what loops and calls move is moved by what they run.
_MOVES_NOTHING = {
  *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
  *("call", "after-all", "partition-id", "replica-id", "opt-barrier"),
}
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_OPENS = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")


class Array(NamedTuple):
  """An array that an instruction makes.

  Attributes:
    bytes: its size.
    main: whether it lies in a device's main memory rather than in a faster one on the chip.
  """

  bytes: int
  main: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
  """A line of a computation.

  Attributes:
    name: its name, without the sign.
    opcode: what it does.
    arrays: what it makes; several of a tuple.
    operands: names of what it is given.
    inside: what stands between its parentheses.
    rest: what stands behind them.
    root: whether it is the computation's result.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  inside: str
  rest: str
  root: bool

  def attribute(self, name: str) -> str:
    """The computation that an attribute names; empty if there is none."""
    found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
    return found[1] if found else ""


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
  """A program.

  Attributes:
    computations: by name; each has its instructions by name.
    entry: name of the one that is run.
  """

  computations: Mapping[str, Computation]
  entry: str

  @classmethod
  def parse(cls, text: str) -> "Module":
    """The program of a text such as `compiled.as_text()`."""
    computations, entry, held = dict[str, Computation](), "", None
    for line in text.splitlines():
      opens = _OPENS.match(line)
      if opens:
        held = computations[opens[2]] = {}
        entry = opens[2] if opens[1] else entry
      elif held is not None and " = " in line:
        one = _instruction(line)
        held[one.name] = one
    return cls(computations, entry)

  def runs(self, name: str = "", times: int = 1) -> Iterator[tuple[str, int]]:
    """Every computation that runs and is no part of an instruction, and how often.

    Loops of `scopes.IF_NEEDED` do not run.
    """
    name = name or self.entry
    yield name, times
    for one in self.computations[name].values():
      if one.opcode == "while" and not self.needed(one):
        continue
      if one.opcode == "while":
        turns = self.turns(one) or 1
        yield from self.runs(one.attribute("body"), times * turns)
      elif one.opcode == "call":
        yield from self.runs(one.attribute("to_apply"), times)
      elif one.opcode == "conditional":
        for branch in _branches(one):
          yield from self.runs(branch, times)

  def turns(self, loop: Instruction) -> int | None:
    """How often the body of a `while` runs, None where the program does not tell.

    JAX's loops count from 0 up to a number, the only one that stands in their condition.
    """
    known = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.rest)
    if known:
      return int(known[1])
    condition = self.computations[loop.attribute("condition")].values()
    limits = [
      int(one.inside)
      for one in condition
      if one.opcode == "constant" and re.fullmatch(r"\d+", one.inside)
    ]
    return limits[0] if len(limits) == 1 else None

  def needed(self, loop: Instruction) -> bool:
    """Whether a `while` runs in any case, so that it is none of `scopes.IF_NEEDED`."""
    return scopes.IF_NEEDED not in loop.rest

  def _loops(self) -> list[Instruction]:
    return [
      one
      for name, _ in self.runs()
      for one in self.computations[name].values()
      if one.opcode == "while"
    ]

  def endless(self) -> int:
    """How many loops there are that do not tell how often they run."""
    return sum(self.needed(one) and self.turns(one) is None for one in self._loops())

  def spare(self) -> int:
    """How many loops of `scopes.IF_NEEDED` there are."""
    return sum(not self.needed(one) for one in self._loops())


def _branches(one: Instruction) -> list[str]:
  several = re.search(r"branch_computations=\{([^}]*)\}", one.rest)
  if several:
    return _NAME.findall(several[1])
  return [one.attribute("true_computation"), one.attribute("false_computation")]


def _closing(text: str, start: int) -> int:
  """Place of the parenthesis that closes the one at `start`."""
  depth = 0
  for place in range(start, len(text)):
    depth += (text[place] == "(") - (text[place] == ")")
    if not depth:
      return place
  return len(text) - 1


def _instruction(line: str) -> Instruction:
  left, right = line.split(" = ", 1)
  end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
  start = right.index("(", end)
  stop = _closing(right, start)
  inside = right[start + 1 : stop]
  return Instruction(
    name=left.split()[-1].lstrip("%"),
    opcode=right[end:start].strip(),
    arrays=tuple(_arrays(right[:end])),
    operands=tuple(_NAME.findall(inside)),
    inside=inside,
    rest=right[stop + 1 :],
    root=left.lstrip().startswith("ROOT "),
  )


def _arrays(text: str) -> Iterator[Array]:
  for dtype, sizes, layout in _ARRAY.findall(text):
    digits = re.search(r"\d+", dtype)
    # Predicates have no number in their name; those smaller than a byte take one in a layout.
    bits = max(8, int(digits[0])) if digits else 8
    size = math.prod(int(n) for n in sizes.split(",") if n) * bits // 8
    yield Array(size, not re.search(r"S\([1-9]", layout))


# Traffic with main memory.


def traffic(module: Module) -> int:
  """Bytes that instructions read from and write to main memory: operands plus results.

  Of what a fusion slices out of an array or writes into one, the slice counts. What lies in memory
  on the chip counts nothing until it is copied.
  """
  return sum(
    times * _moved(one, module.computations[name], module)
    for name, times in module.runs()
    for one in module.computations[name].values()
    if moves(one)
  )


def _main(arrays: Iterable[Array]) -> int:
  return sum(array.bytes for array in arrays if array.main)


def _given(one: Instruction, around: Computation) -> list[tuple[Array, ...]]:
  return [around[name].arrays for name in one.operands if name in around]


def _moved(one: Instruction, around: Computation, module: Module) -> int:
  given = _given(one, around)
  if one.opcode == "fusion":
    return _fused(one, given, module.computations[one.attribute("calls")])
  if one.opcode == "dynamic-slice":
    return 2 * _main(one.arrays)
  if one.opcode == "dynamic-update-slice":
    return 2 * _main(given[1])
  return whole(one, around)


def moves(one: Instruction) -> bool:
  """Whether an instruction reads or writes memory itself."""
  return one.opcode not in _MOVES_NOTHING and not one.opcode.endswith("-done")


def whole(one: Instruction, around: Computation) -> int:
  """Bytes of an instruction that reads all of its operands and writes all of its results.

  What is an operand several times, as of a kernel that reads several parts of it, counts once.

  Args:
    one: it `moves` something.
    around: the computation that it stands in.
  """
  given = _given(one, around)
  read = sum(_main(around[name].arrays) for name in set(one.operands) & around.keys())
  if one.opcode in ("copy-start", "slice-start"):
    # What is made stands beside what was given, of which no more is read than is made.
    made = list(one.arrays)
    made.remove(given[0][0])
    return min(read, max(array.bytes for array in made)) + _main(made)
  # The last of what a GPU's libraries return is their work space.
  library = one.opcode == "custom-call" and '"__cu' in one.rest
  return read + _main(one.arrays[:-1] if library and len(one.arrays) > 1 else one.arrays)


def _fused(one: Instruction, given: list[tuple[Array, ...]], inside: Computation) -> int:
  """Bytes of a fusion, which may read parts of its operands, and hand some on untouched."""
  stages = [each.rest for each in inside.values() if each.opcode == "custom-call"]
  if any("AsyncCollectiveStart" in rest for rest in stages):
    return sum(map(_main, given))
  if any("AsyncCollectiveDone" in rest for rest in stages):
    return _main(one.arrays)
  # The collectives that such a fusion holds are stages of others.
  passing = {
    name
    for name, each in inside.items()
    if "async_collective" in one.attribute("calls") and "channel_id" in each.rest
  }
  uses = dict[str, list[Instruction]]()
  for each in inside.values():
    for name in each.operands:
      uses.setdefault(name, []).append(each)

  def read(name: str, whole: int) -> int:
    total = 0
    for use in uses.get(name, []):
      if use.opcode == "bitcast":
        total += read(use.name, whole)
      elif use.opcode == "dynamic-slice":
        total += sum(array.bytes for array in use.arrays)
      elif use.opcode == "dynamic-update-slice" and use.operands[0] == name:
        continue
      elif not (use.root and use.opcode == "tuple") and use.name not in passing:
        return whole
    return min(total, whole)

  def written(name: str, whole: int) -> int:
    maker = inside[name]
    if maker.opcode == "bitcast":
      return written(maker.operands[0], whole)
    if maker.opcode == "dynamic-update-slice":
      return min(whole, sum(array.bytes for array in inside[maker.operands[1]].arrays))
    return 0 if maker.opcode == "parameter" or name in passing else whole

  operands = {each.name: given[int(each.inside)] for each in parameters(inside)}
  total = sum(read(name, _main(arrays)) for name, arrays in operands.items())
  root = next(each for each in inside.values() if each.root)
  made = root.operands if root.opcode == "tuple" else (root.name,) * len(one.arrays)
  return total + sum(
    written(name, array.bytes) for name, array in zip(made, one.arrays, strict=False) if array.main
  )


def parameters(inside: Computation) -> list[Instruction]:
  """What a computation is given."""
  return [each for each in inside.values() if each.opcode == "parameter"]
