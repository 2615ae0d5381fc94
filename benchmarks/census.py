"""The memory traffic of a compiled program, read from its text."""

import dataclasses
import re

_SIZES = {
  **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
  **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
  **dict.fromkeys(("s32", "u32", "f32"), 4),
  **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
}
# They move nothing: names, views and the ends of what began elsewhere.
_FREE = {
  "parameter",
  "constant",
  "bitcast",
  "tuple",
  "get-tuple-element",
  "after-all",
  "iota",
  "partition-id",
  "copy-done",
  "slice-done",
  "async-done",
  "opt-barrier",
}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")


@dataclasses.dataclass(frozen=True)
class Census:
  """What a program's top-level instructions read and write.

  Attributes:
    bytes: operands plus results of all of them, of what lies in the device's main memory.
    kernels: how many custom calls of Pallas there are.
    instructions: how many move anything.
  """

  bytes: int
  kernels: int
  instructions: int

  @property
  def mebibytes(self) -> float:
    """The bytes, as the tables have them."""
    return self.bytes / 2**20


def take_census(text: str) -> Census:
  """Counts a module as `compiled.as_text()` prints it.

  Computations that the entry calls, such as a GPU's command buffers, count as its own. Arrays in a
  TPU's on-chip memory, space 1, cost nothing, and neither does the work space that a GPU's library
  asks for.
  """
  computations = _computations(text)
  entry = next(name for name, (is_entry, _) in computations.items() if is_entry)
  return _count(entry, computations)


def _computations(text: str) -> dict[str, tuple[bool, list[str]]]:
  found: dict[str, tuple[bool, list[str]]] = {}
  lines: list[str] = []
  for line in text.splitlines():
    if line.endswith("{") and (line.startswith("ENTRY") or line.startswith("%")):
      name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
      lines = []
      found[name] = line.startswith("ENTRY"), lines
    elif line.startswith("  "):
      lines.append(line)
  return found


def _count(name: str, computations: dict[str, tuple[bool, list[str]]]) -> Census:
  sizes: dict[str, int] = {}
  total, kernels, instructions = 0, 0, 0
  for line in computations[name][1]:
    match = _INSTRUCTION.match(line)
    if match is None:
      continue
    result, shape, kind, rest = match.groups()
    sizes[result] = _bytes(shape)
    if kind == "call":
      called = re.search(r"to_apply=%?([\w.-]+)", rest)
      inner = _count(called.group(1), computations) if called else Census(0, 0, 0)
      total, kernels = total + inner.bytes, kernels + inner.kernels
      instructions += inner.instructions
      continue
    if kind in _FREE:
      continue
    operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
    read = sum(sizes.get(operand, 0) for operand in operands)
    if kind.endswith("-start"):
      # Names its operands, what it makes and a semaphore, in an order of its own.
      first = 1 if shape.startswith("((") else 0
      array = [found.group(0) for found in _ARRAY.finditer(shape)][first]
      sizes[result] = _bytes(array)
      read = min(read, _bytes(array.replace("S(1)", "")))
    written = sizes[result] - (_workspace(shape) if "__cu" in rest else 0)
    total += read + written
    instructions += 1
    kernels += "tpu_custom_call" in rest or "xla.gpu.triton" in rest
  return Census(total, kernels, instructions)


def _bytes(shape: str) -> int:
  total = 0
  for dtype, sides, layout in _ARRAY.findall(shape):
    if dtype not in _SIZES or "S(1)" in layout:
      continue
    size = _SIZES[dtype]
    for side in filter(None, sides.split(",")):
      size *= int(side)
    total += size
  return total


def _workspace(shape: str) -> int:
  return sum(_bytes(found.group(0)) for found in re.finditer(r"[su]8\[\d+\]\{0\}", shape))
