"""A model as text: its modules from input to output, with their parameters, equal layers as one.

A mechanism is what the plain model has no such parameters for, or what the configuration's `marks`
says of a site.
"""

import dataclasses
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Iterator

from jaxtyping import PyTree

from compmod_jax.tasks.base import Task
from compmod_jax.tools.diagram_parts import parts_of, shapes_of

WIDTH = 100
_NAME, _NUMBER, _SHARE = 32, 14, 8


@dataclasses.dataclass(frozen=True)
class Line:
  """A module, or what a mechanism does at a site.

  Attributes:
    name: its path, within the layer that it belongs to if it does.
    words: what it is.
    size: its parameters, without those of other lines.
    mechanism: whether the plain model has no such thing.
  """

  name: str
  words: str
  size: int = 0
  mechanism: bool = False


@dataclasses.dataclass(frozen=True)
class Block:
  """A module, or a layer with all that is in it.

  Attributes:
    name: path of the module, or of the first of equal layers.
    lines: from input to output.
    layer: whether it is a layer.
    count: how many equal layers follow each other.
  """

  name: str
  lines: tuple[Line, ...]
  layer: bool = False
  count: int = 1

  @property
  def size(self) -> int:
    """Parameters of all layers together."""
    return self.count * sum(line.size for line in self.lines)


def blocks_of(task: Task, params: PyTree, plain: PyTree) -> list[Block]:
  """The parts of a task's model from input to output, equal layers in a row as one.

  Args:
    task: the task.
    params: its parameters, or their shapes.
    plain: those of the plain model, to tell what belongs to mechanisms.
  """
  shapes, others = shapes_of(params), shapes_of(plain)
  parts = parts_of(task, params)
  sizes, own = dict.fromkeys(parts, 0), {part: part.mark for part in parts}
  for path, shape in shapes.items():
    part = max((p for p in parts if re.fullmatch(p.pattern, path)), key=lambda p: len(p.path))
    sizes[part] += math.prod(shape)
    own[part] |= others.get(path) != shape
  found = []
  for key, group in itertools.groupby(parts, key=lambda part: part.layer or part):
    layer = key if isinstance(key, str) else ""
    members = list(group)
    lines = tuple(
      Line(part.path.removeprefix(f"{layer}/"), part.words, sizes[part], own[part])
      for part in members
    )
    found.append(Block(layer or members[0].path, lines, layer=bool(layer)))
  return list(_folded(found))


def _folded(blocks: Iterable[Block]) -> Iterator[Block]:
  """Equal layers with successive numbers as one block."""
  last: Block | None = None
  for block in blocks:
    if last is not None and _follows(block, last):
      last = dataclasses.replace(last, count=last.count + 1)
      continue
    if last is not None:
      yield last
    last = block
  if last is not None:
    yield last


def _follows(block: Block, last: Block) -> bool:
  if not (block.layer and last.layer and block.lines == last.lines):
    return False
  stem, _, first = last.name.rpartition("_")
  return block.name == f"{stem}_{int(first) + last.count}"


def draw(blocks: Iterable[Block]) -> list[str]:
  """The lines of a diagram, at most `WIDTH` characters wide; mechanisms have a star."""
  blocks = list(blocks)
  total = sum(block.size for block in blocks)
  rows = _row(" ", "module", "what it is", "parameters", "share")
  for block in blocks:
    size = f"{block.size:,}" if block.size else ""
    share = f"{block.size / total:.1%}" if block.size else ""
    if block.layer:
      rows += _row(" ", _title(block), "each layer:" if block.count > 1 else "", size, share)
    for line in block.lines:
      star = "*" if line.mechanism else " "
      if block.layer:
        own = f"({line.size:,})" if line.size else ""
        rows += _row(star, f"| {line.name}", line.words, own)
      else:
        rows += _row(star, line.name, line.words, size, share)
  return rows


def _title(block: Block) -> str:
  """Such as `encoder 0-5` for encoder_0, and `vanilla 0-1` for vanilla/layer_0."""
  stem, _, first = block.name.replace("/layer_", "_").rpartition("_")
  last = int(first) + block.count - 1
  return f"{stem} {first}-{last}" if block.count > 1 else f"{stem} {first}"


def _row(star: str, name: str, words: str, number: str = "", share: str = "") -> list[str]:
  """One line, or more where name or words do not fit."""
  left, above = f"{star} {name}", list[str]()
  if len(left) > _NAME:
    left, above = "", [left]
  room = WIDTH - _NAME - 2 - ((_NUMBER + _SHARE) if number else 0)
  first, *rest = textwrap.wrap(words, room) or [""]
  end = f"{number:>{_NUMBER}}{share:>{_SHARE}}" if number else ""
  rows = [f"{left:<{_NAME}}  {first:<{room}}{end}".rstrip()]
  return [*above, *rows, *(f"{'':{_NAME}}  {more}" for more in rest)]
