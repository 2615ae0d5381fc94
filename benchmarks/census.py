"""The memory traffic of a compiled program, every instruction's operands and results in full."""

import dataclasses

from compmod_jax.tools import hlo

_PALLAS = ("tpu_custom_call", "xla.gpu.triton")


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

  Computations that the entry calls, such as a GPU's command buffers, count as its own. Unlike
  `hlo.traffic` it counts an operand in full where a fusion reads a part of it.
  """
  module = hlo.Module.parse(text)
  moving = [
    (one, module.computations[name])
    for name, times in module.runs()
    for one in module.computations[name].values()
    for _ in range(times)
    if hlo.moves(one)
  ]
  return Census(
    bytes=sum(hlo.whole(one, around) for one, around in moving),
    kernels=sum(any(name in one.rest for name in _PALLAS) for one, _ in moving),
    instructions=len(moving),
  )
