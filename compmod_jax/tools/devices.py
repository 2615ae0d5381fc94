"""What accelerators can do, from their makers' data sheets; the one place for such figures."""

import dataclasses
import math

from compmod_jax.core import errors


@dataclasses.dataclass(frozen=True)
class Tpu:
  """One chip of a TPU generation.

  Attributes:
    kind: what JAX calls it.
    peak: dense bfloat16 FLOP/s.
    memory: bytes of HBM.
    bandwidth: bytes/s between HBM and chip.
    interconnect: bytes/s to other chips of its slice, both directions of all links together.
    links: links to other chips: two for each dimension of the torus.
    source: where these figures are published.
  """

  kind: str
  peak: float
  memory: float
  bandwidth: float
  interconnect: float
  links: int
  source: str

  @property
  def ring(self) -> float:
    """Bytes/s that a chip can send in a ring that runs both ways: over two links, outwards."""
    return self.interconnect / 2 * 2 / self.links


TPUS = {
  "v5e": Tpu("TPU v5 lite", 197e12, 16e9, 819e9, 400e9, 4, "https://cloud.google.com/tpu/docs/v5e"),
  "v5p": Tpu("TPU v5", 459e12, 95e9, 2765e9, 1200e9, 6, "https://cloud.google.com/tpu/docs/v5p"),
  "v6e": Tpu(
    "TPU v6 lite", 918e12, 32e9, 1638e9, 800e9, 4, "https://cloud.google.com/tpu/docs/v6e"
  ),
}

PEAK_FLOPS = {
  "NVIDIA H100 80GB HBM3": 989e12,
  "NVIDIA H200": 989e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "TPU v4": 275e12,
  **{chip.kind: chip.peak for chip in TPUS.values()},
  **{f"TPU {name}": chip.peak for name, chip in TPUS.items()},
}
"""Peak dense bfloat16 FLOP/s of one device, by what JAX calls it."""

BANDWIDTH = {
  "NVIDIA H100 80GB HBM3": 3352e9,
  "NVIDIA H200": 4800e9,
  **{chip.kind: chip.bandwidth for chip in TPUS.values()},
  **{f"TPU {name}": chip.bandwidth for name, chip in TPUS.items()},
}
"""Bytes/s between a device's main memory and its chip, by what JAX calls it."""


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice of TPUs, such as v5e:4x4.

  Attributes:
    generation: a name in `TPUS`.
    shape: chips along each dimension of the torus.
  """

  generation: str
  shape: tuple[int, ...]

  def __str__(self) -> str:
    return f"{self.generation}:{'x'.join(map(str, self.shape))}"

  @property
  def chips(self) -> int:
    """How many there are."""
    return math.prod(self.shape)

  @property
  def chip(self) -> Tpu:
    """What one chip can do."""
    return TPUS[self.generation]

  @classmethod
  def parse(cls, text: str) -> "Topology":
    """The topology that a text names.

    Raises:
      UserError: it names none, or a generation whose figures are not known.
    """
    generation, colon, sizes = text.partition(":")
    errors.check_choice(f"The generation of --aot {text}", generation, TPUS)
    dimensions = TPUS[generation].links // 2
    parts = sizes.split("x")
    example = "x".join(["4"] * dimensions)
    errors.check(
      bool(colon)
      and len(parts) == dimensions
      and all(part.isdecimal() and int(part) > 0 for part in parts),
      f"--aot is {text!r}; after the colon belong the chips along each of {dimensions} dimensions,"
      f" for example {generation}:{example}.",
    )
    return cls(generation, tuple(map(int, parts)))
