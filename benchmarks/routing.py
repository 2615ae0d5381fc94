"""What it costs that heads compete: on this CPU measured, on accelerators compiled and counted.

    python -m benchmarks.routing [--quick] [--json FILE] [--check]

Needs the environment of `make aot`. The designs of `benchmarks/designs.py`, 8 heads of 64, width
512, bfloat16: on an H100 at 16,384 tokens, on TPUs at 131,072. Bytes are counted in the compiled
programs as `benchmarks/census.py` says; the floor is these bytes at the memory's full bandwidth,
and model time what takes longer, they or the products of matrices at their peak. No accelerator
runs, so no such figure is a measured time. Designs whose kernels matter only elsewhere are counted
with what they move there. Then whole attention layers for the same devices, rows of 128 tokens, in
which the heads come from XLA's attention.

On the CPU no kernel runs: an attention layer whose heads compete against the plain layer, 2,048
tokens, width 512, float32, forward and training (gradients of parameters and inputs), fused and
step by step. In full about three minutes on 2 cores.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, devices
from benchmarks.aot import compile_design
from benchmarks.designs import Sizes, designs
from compmod_jax.layers.attention import Attention
from compmod_jax.mechanisms.competition import CompetitionConfig

ROUNDS = 100
PASSES = ("forward", "training")
TOKENS = {"h100": 16384, "v5e": 131072, "v5p": 131072}
# MiB on the H100; on TPUs, model time over that of plain XLA.
MOST_BYTES = {"forward": 55.0, "training": 190.0}
MOST_TIME = 0.65
FUSED = ("both", "packed")
LAYERS = {
  "plain": None,
  "competing": CompetitionConfig(),
  "step by step": CompetitionConfig(routing="plain"),
}


def count_designs(report: common.Report, device: devices.Device) -> dict[str, Any]:
  """Compiles every design for a device; its table and the claims about it."""
  sizes = Sizes(tokens=TOKENS[device.name])
  table: dict[str, Any] = {}
  report.say(f"{device.name}, {sizes.tokens} tokens: kernels, MiB, floor and model microseconds")
  for design in designs(device.kernels).values():
    for number, name in enumerate(PASSES):
      made = compile_design(device, design, sizes, training=name == "training")
      hidden, elsewhere = sizes.tokens * sizes.hidden, design.elsewhere[number]
      moved = made.census.bytes + elsewhere * hidden * jnp.dtype(sizes.dtype).itemsize
      flops = made.flops + elsewhere * 2 * hidden * sizes.embed
      floor = moved / device.bandwidth
      found = {
        "instructions": made.census.instructions,
        "kernels": made.census.kernels,
        "MiB": moved / 2**20,
        "floor us": floor * 1e6,
        "model us": max(floor, flops / device.peak(sizes.dtype)) * 1e6,
        "GFLOP": flops / 1e9,
      }
      table[f"{design.name}, {name}"] = found
      cells = ", ".join(
        f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()
      )
      report.say(f"{design.name}, {name}: {cells}")
  for design, name in ((d, p) for d in FUSED for p in PASSES):
    mine, plain = table[f"{design}, {name}"], table[f"plain XLA, {name}"]
    if device.name == "h100":
      report.claim(f"h100 {name}: MiB, {design}", mine["MiB"], 1.0, at_most=MOST_BYTES[name])
    else:
      report.claim(
        f"{device.name} {name}: model time, {design} / plain XLA",
        mine["model us"],
        plain["model us"],
        at_most=MOST_TIME,
      )
  return table


@dataclasses.dataclass(frozen=True)
class Case:
  """Sizes of an attention layer."""

  batch: int = 16
  time: int = 128
  dim: int = 512
  heads: int = 8
  dtype: str = "float32"

  @property
  def shape(self) -> tuple[int, int, int]:
    """Of its inputs."""
    return self.batch, self.time, self.dim

  def products(self, competition: CompetitionConfig) -> float:
    """Multiplications of a layer with competing heads over those of a plain one."""
    plain = 4 * self.dim**2 + 2 * self.time * self.dim
    return 1 + competition.hidden_dim * (self.dim + self.heads) / plain

  def layer(self, name: str) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Parameters of one of `LAYERS`, and its passes: of them, inputs, in training a gradient."""
    layer = Attention(self.dim, self.heads, LAYERS[name], dtype=self.dtype)
    few = jnp.zeros((1, *self.shape[1:]), self.dtype)
    params = nn.unbox(jax.jit(layer.init)(jax.random.key(0), few))["params"]

    def forward(params: Any, inputs: jax.Array) -> Any:
      return layer.apply({"params": params}, inputs)

    def training(params: Any, inputs: jax.Array, cotangent: jax.Array) -> Any:
      output, pull = jax.vjp(forward, params, inputs)
      return output, pull(cotangent)

    return params, {"forward": forward, "training": training}


def measure_layers(report: common.Report, case: Case) -> None:
  """Times a layer with competing heads, fused and step by step, against the plain one."""
  random = np.random.default_rng(0)
  arrays = [jnp.asarray(random.standard_normal(case.shape, np.float32)) for _ in range(2)]
  report.say(f"of products alone: {case.products(CompetitionConfig()):.3f} of the plain layer's")
  layers = {name: case.layer(name) for name in LAYERS}
  for number, name in enumerate(PASSES):
    runs = {
      layer: functools.partial(_run, jax.jit(passes[name]), params, *arrays[: number + 1])
      for layer, (params, passes) in layers.items()
    }
    tokens = case.batch * case.time
    seconds = report.measure(f"CPU {name}", runs, ROUNDS, amount=tokens, unit="tokens")
    report.claim(
      f"CPU {name}: layer with competing heads / plain",
      seconds["competing"],
      seconds["plain"],
      at_most=1.05,
    )
    # For comparison: the equations as they are written, with no fusion of ours.
    report.claim(
      f"CPU {name}: the same, step by step / plain", seconds["step by step"], seconds["plain"]
    )


def _run(function: Callable[..., Any], *args: Any) -> Any:
  return jax.block_until_ready(function(*args))


def count_layers(report: common.Report, device: devices.Device) -> dict[str, Any]:
  """Compiles the same layers for a device, in bfloat16; what they move and take at best."""
  case = Case(batch=TOKENS[device.name] // Case.time, dtype="bfloat16")
  inputs = jax.ShapeDtypeStruct(case.shape, jnp.dtype(case.dtype))
  table: dict[str, Any] = {}
  for name in LAYERS:
    params, passes = case.layer(name)
    for number, which in enumerate(PASSES):
      args = (params, *[inputs] * (number + 1))
      made = devices.compile_for(device, passes[which], args, case.dtype)
      found = {"MiB": made.census.mebibytes, "model us": made.seconds * 1e6}
      table[f"layer {name}, {which}"] = found
      report.say(f"layer {name}, {which}: " + ", ".join(f"{k} {v:.1f}" for k, v in found.items()))
  for which in PASSES:
    mine, plain = (table[f"layer {name}, {which}"] for name in ("competing", "step by step"))
    report.claim(
      f"{device.name} {which}: MiB of the layer, competing / step by step",
      mine["MiB"],
      plain["MiB"],
    )
  return table


def main() -> None:
  options = common.options(__doc__).parse_args()
  lacking = devices.missing()
  if lacking is not None:
    sys.exit(lacking)
  report = common.start("Competing heads on their way to the output projection", options)
  measure_layers(report, Case(batch=4) if options.quick else Case())
  for name in ("h100",) if options.quick else tuple(TOKENS):
    device = devices.DEVICES[name]
    report.tables[name] = count_designs(report, device) | count_layers(report, device)
  report.finish()


if __name__ == "__main__":
  main()
