"""What the chips of a program tell each other."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from compmod_jax.tools import hlo

KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)
# XLA for TPUs writes a reduce-scatter as an all-reduce in a fusion of such a name.
_SCATTER = "all-reduce-scatter"


class Collective(NamedTuple):
  """An exchange between the chips of each group.

  Attributes:
    kind: one of `KINDS`.
    bytes: what is reduced, gathered or exchanged; of a gathered array the whole.
    group: how many chips exchange it with each other.
  """

  kind: str
  bytes: int
  group: int

  @property
  def sent(self) -> float:
    """Bytes that each chip sends, in a ring: an all-reduce goes round twice, the others once."""
    if self.kind.startswith("collective-"):
      return self.bytes
    rounds = 2 if self.kind == "all-reduce" else 1
    return rounds * (self.group - 1) / self.group * self.bytes


def census(module: hlo.Module) -> Counter[Collective]:
  """How often each collective runs in a step.

  One that runs beside other work stands in several fusions, a stage in each, with one channel;
  those that stand by themselves, and a TPU's reduce-scatters, may share a channel and are as many
  as there are.
  """
  found, channels = Counter[Collective](), set[str]()
  for name, times in module.runs():
    for holder, one in _collectives(module, name):
      stage = holder != name and _SCATTER not in holder
      channel = re.search(r"channel_id=\d+", one.rest) if stage else None
      if channel and channel[0] in channels:
        continue
      if channel:
        channels.add(channel[0])
      found[_read(one, holder)] += times
  return found


def _collectives(module: hlo.Module, name: str) -> Iterator[tuple[str, hlo.Instruction]]:
  """Collectives of a computation and of what is fused in it, each with where it stands."""
  for one in module.computations[name].values():
    if one.opcode.removesuffix("-start") in KINDS:
      yield name, one
    elif one.opcode in ("fusion", "async-start"):
      yield from _collectives(module, one.attribute("calls"))


def _read(one: hlo.Instruction, holder: str) -> Collective:
  kind = one.opcode.removesuffix("-start")
  sizes = [array.bytes for array in one.arrays]
  # Of all-gather-start and collective-permute-start, the operands stand beside the results.
  paired = kind != one.opcode and kind != "all-reduce" and len(sizes) > 1
  size = max(sizes) if paired else sum(sizes)
  group = _group(one.rest)
  if kind == "reduce-scatter":
    return Collective(kind, size * group, group)
  return Collective("reduce-scatter" if _SCATTER in holder else kind, size, group)


def _group(text: str) -> int:
  """Chips of a group, in any of the ways in which programs name groups."""
  listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
  if listed:
    return len(listed[1].split(","))
  counted = re.search(r"replica_groups=\[\d+,(\d+)\]", text)
  if counted:
    return int(counted[1])
  mesh = re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", text)
  if mesh:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
    # An axis may be taken in part: 'axis':(parts before)size.
    axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])
    return math.prod(int(part) if part else sizes[name] for name, part in axes)
  return 2 if "source_target_pairs" in text else 1
