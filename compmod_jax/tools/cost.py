"""What a compiled training step costs on TPUs: memory, arithmetic, traffic, collectives, time."""

import dataclasses
import math
from collections import Counter

import jax

from compmod_jax.tools import hlo
from compmod_jax.tools.devices import Topology
from compmod_jax.training.distributed.collectives import Collective, census

_MEMORY = {
  "arguments": "argument_size_in_bytes",
  "outputs": "output_size_in_bytes",
  "of these in place of arguments": "alias_size_in_bytes",
  "temporaries": "temp_size_in_bytes",
  "program": "generated_code_size_in_bytes",
  "peak": "peak_memory_in_bytes",
}


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a step costs one chip, but for `products` and `laid_out`.

  Attributes:
    topology: what it was compiled for.
    memory: bytes by name, `peak` among them.
    products: operations of the whole step in matrix products; see `matmul_flops.count`.
    laid_out: the same of all chips together, what several of them do alike counted for each.
    counted: XLA's count of operations, in which the body of a loop counts once.
    traffic: bytes to and from main memory; see `hlo.traffic`.
    accessed: XLA's count of bytes, memory on the chip included, the body of a loop once.
    estimate: XLA's estimate in seconds, 0 where it has none.
    collectives: how often each runs.
    endless: loops that do not tell how often they run, and count once.
    spare: loops that run only if the data ask for it, and count nothing.
  """

  topology: Topology
  memory: dict[str, int]
  products: float
  laid_out: float
  counted: float
  traffic: float
  accessed: float
  estimate: float
  collectives: Counter[Collective]
  endless: int
  spare: int = 0

  @classmethod
  def of(
    cls, program: jax.stages.Compiled, topology: Topology, products: float, laid_out: float
  ) -> "Cost":
    """The cost of a compiled program.

    Args:
      program: what `compile` returned.
      topology: what it was compiled for.
      products: operations of the step in matrix products.
      laid_out: those of all chips together.
    """
    text, found = program.as_text(), program.cost_analysis() or {}
    assert text is not None
    module = hlo.Module.parse(text)
    memory, estimate = program.memory_analysis(), found.get("optimal_seconds", 0.0)
    return cls(
      topology=topology,
      memory={name: getattr(memory, field, 0) for name, field in _MEMORY.items()},
      products=products,
      laid_out=laid_out,
      counted=found.get("flops", 0.0),
      traffic=hlo.traffic(module),
      accessed=found.get("bytes accessed", 0.0),
      # XLA adds -1 for each instruction that it cannot estimate.
      estimate=estimate - math.floor(estimate) if estimate < 0 else estimate,
      collectives=census(module),
      endless=module.endless(),
      spare=module.spare(),
    )

  @property
  def fits(self) -> bool:
    """Whether a chip has the memory."""
    return self.memory["peak"] <= self.topology.chip.memory

  @property
  def operations(self) -> float:
    """Operations of a chip: of two counts, each of which leaves something out, the larger one."""
    return max(self.laid_out / self.topology.chips, self.counted)

  @property
  def computing(self) -> float:
    """Seconds that arithmetic takes at least."""
    return self.operations / self.topology.chip.peak

  @property
  def moving(self) -> float:
    """Seconds that traffic with main memory takes at least."""
    return self.traffic / self.topology.chip.bandwidth

  @property
  def sent(self) -> float:
    """Bytes that a chip sends to others."""
    return sum(times * one.sent for one, times in self.collectives.items())

  @property
  def exchanging(self) -> float:
    """Seconds that collectives take one after the other, each in rings that run both ways."""
    return self.sent / self.topology.chip.ring

  @property
  def seconds(self) -> float:
    """A step, in which nothing runs beside collectives."""
    return max(self.computing, self.moving) + self.exchanging

  @property
  def hidden(self) -> float:
    """A step, in which collectives run beside everything else."""
    return max(self.computing, self.moving, self.exchanging)

  def utilisation(self, seconds: float) -> float:
    """Share of all chips' peak that the step's products are if it takes these seconds."""
    return self.products / self.topology.chips / self.topology.chip.peak / seconds

  def lines(self) -> list[str]:
    """All of it as text."""
    return [*self._memory_lines(), "", *self._work_lines(), "", *self._time_lines()]

  def _memory_lines(self) -> list[str]:
    chip = self.topology.chip
    share = self.memory["peak"] / chip.memory
    verdict = f"{'fits' if self.fits else 'DOES NOT FIT'}: {share:.0%} of {_bytes(chip.memory)}"
    rows = [f"  {name:<32}{_bytes(size):>12}" for name, size in self.memory.items()]
    return ["memory of each chip", *rows, f"  {verdict}"]

  def _work_lines(self) -> list[str]:
    chips = self.topology.chips
    rows = [
      ("FLOPs in matrix products, whole step", _flops(self.products)),
      ("  shared evenly, each chip", _flops(self.products / chips)),
      ("  as they are laid out, each chip", _flops(self.laid_out / chips)),
      ("FLOPs of each chip, XLA's count", _flops(self.counted)),
      ("bytes to and from HBM, each chip", _bytes(self.traffic)),
      ("bytes, XLA's count (with VMEM)", _bytes(self.accessed)),
    ]
    text = [f"{name:<38}{value:>14}" for name, value in rows]
    if self.endless:
      text.append(f"{self.endless} loops do not tell how often they run and count once")
    if self.spare:
      text.append(f"{self.spare} loops run only for rows that do not fit at once and count nothing")
    if not self.collectives:
      return [*text, "", "no collectives"]
    text += ["", f"{'collectives':<22}{'chips':>6}{'times':>7}{'bytes each':>14}{'sent':>14}"]
    ordered = sorted(self.collectives.items(), key=lambda item: -item[0].sent * item[1])
    for one, times in ordered[:_MOST]:
      text.append(
        f"  {one.kind:<20}{one.group:>6}{times:>7}{_bytes(one.bytes):>14}"
        f"{_bytes(times * one.sent):>14}"
      )
    if ordered[_MOST:]:
      times = sum(times for _, times in ordered[_MOST:])
      sent = sum(times * one.sent for one, times in ordered[_MOST:])
      text.append(f"  {'smaller ones':<26}{times:>7}{_bytes(sent):>28}")
    times = self.collectives.total()
    return [*text, f"  {'all':<26}{times:>7}{_bytes(self.sent):>28}"]

  def _time_lines(self) -> list[str]:
    estimate = f"{_time(self.estimate)}" if self.estimate else "none"
    rows = [
      ("arithmetic, FLOPs / peak", _time(self.computing)),
      ("HBM, bytes / bandwidth", _time(self.moving)),
      ("collectives, sent / rings", _time(self.exchanging)),
      ("step: the larger of the first two + the third", _time(self.seconds)),
      ("step, collectives beside the rest", _time(self.hidden)),
      ("XLA's own estimate, without collectives", estimate),
      ("MFU at most", f"{self.utilisation(self.seconds):.1%}"),
      ("MFU at most, collectives beside the rest", f"{self.utilisation(self.hidden):.1%}"),
    ]
    return ["model time", *(f"  {name:<50}{value:>12}" for name, value in rows)]


_MOST = 12
"""Kinds of collectives that are listed, largest first."""


def _bytes(size: float) -> str:
  for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
    if size >= unit:
      return f"{size / unit:,.2f} {name}"
  return f"{size:,.0f} B"


def _flops(count: float) -> str:
  unit, name = (1e12, "TFLOP") if count >= 1e12 else (1e9, "GFLOP")
  return f"{count / unit:,.2f} {name}"


def _time(seconds: float) -> str:
  return f"{seconds * 1e3:,.3f} ms"
