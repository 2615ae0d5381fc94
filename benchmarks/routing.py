"""What it costs that heads compete: measured on the device at hand, on others compiled and counted.

    python -m benchmarks.routing [--quick] [--json FILE] [--check] [--device gpu]

On the CPU it needs the environment of `make aot`. The designs of `benchmarks/designs.py`, 8 heads
of 64, width 512, bfloat16: on an H100 at 16,384 tokens, on TPUs at 131,072. Bytes are counted in
the compiled programs as `benchmarks/census.py` says; the floor is these bytes at the memory's full
bandwidth, and model time what takes longer, they or the products of matrices at their peak; no such
figure is a measured time. Designs whose kernels matter only elsewhere are counted with what they
move there. Whole layers are counted by `benchmarks.attention`.

With --device gpu or tpu the same is counted for the accelerator that is here, and timed on it,
beside the floor: every design, after its results and gradients were compared with the definition's
in float32, and whole attention layers.

On the CPU no kernel runs: an attention layer whose heads compete against the plain layer, 2,048
tokens, width 512, float32, forward and training (gradients of parameters and inputs), fused and
step by step. Then layers that compute in bfloat16, 512 tokens: routers whose products are in
float32, as they are by default, against routers in bfloat16, for heads and for experts. In full
about four minutes on 2 cores; `--types` measures the last part alone, `--compiled` what is compiled
and counted.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, devices
from benchmarks.aot import compile_design
from benchmarks.census import take_census
from benchmarks.designs import Sizes, designs
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.experts import Experts, ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig

ROUNDS = 100
REPEATS = 50
PASSES = ("forward", "training")
COMPILED = ("h100", "v5e", "v5p")
TOKENS = {"cuda": 16384, "tpu": 131072}
# Of results in bfloat16, over the largest of the definition's.
MOST_ERROR = 0.03
LAYERS = {
  "plain": None,
  "competing": CompetitionConfig(),
  "step by step": CompetitionConfig(routing="plain"),
}
# In a model that computes in bfloat16: who wins is decided in float32, or in bfloat16, too.
TYPES = {"float32": CompetitionConfig(), "bfloat16": CompetitionConfig(dtype="model")}
TOP_2 = {"rule": "top_k", "keep": 2}


def count_designs(report: common.Report, device: devices.Device, sizes: Sizes) -> dict[str, Any]:
  """Compiles every design for a device; its table and the claims about it."""
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
  for name in PASSES:
    mine, plain = table[f"packed, {name}"], table[f"plain XLA, {name}"]
    label = f"{device.name} {name}: model time, packed / plain XLA"
    report.claim(label, mine["model us"], plain["model us"])
  return table


def draw(sizes: Sizes) -> tuple[dict[str, jax.Array], jax.Array]:
  """Normal arguments of all designs by name, matrices by their fan-in, and an output's gradient."""
  keys = iter(jax.random.split(jax.random.key(0), len(sizes.args()) + 1))
  activations = ("x", "pre", "heads")

  def one(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    scale = 1.0 if name in activations else like.shape[0] ** -0.5
    return (scale * jax.random.normal(next(keys), like.shape)).astype(like.dtype)

  args = {name: one(name, like) for name, like in sizes.args().items()}
  return args, one("x", sizes.cotangent())


def measure_designs(
  report: common.Report, device: devices.Device, sizes: Sizes, rounds: int
) -> dict[str, Any]:
  """Compares every design with the definition and times it, on the device that is here.

  Returns:
    Of every design and pass, microseconds and the largest error over the definition's largest.
  """
  every, cotangent = draw(sizes)
  found, truth = designs(device.kernels), designs("reference")
  table: dict[str, Any] = {}
  for number, which in enumerate(PASSES):
    runs = {}
    for name, design in found.items():
      args = ({key: every[key] for key in design.uses}, cotangent)[: number + 1]
      wide = jax.tree.map(lambda a: a.astype(jnp.float32), args)
      function, exact = (d.training if number else d.program for d in (design, truth[name]))
      with jax.default_matmul_precision("highest"):
        right = jax.jit(exact)(*wide)
      error = _error(jax.jit(function)(*args), right)
      report.claim(f"{name}, {which}: error", error, 1.0, at_most=MOST_ERROR)
      table[f"{name}, {which}"] = {"error": error}
      runs[name] = several(report, device, f"{name}, {which}", function, args)
    group = f"{device.name} {which}, {REPEATS} in turn"
    amount = REPEATS * sizes.tokens
    seconds = report.measure(group, runs, rounds, amount=amount, unit="tokens")
    for name, values in seconds.items():
      table[f"{name}, {which}"]["measured us"] = float(np.median(values)) / REPEATS * 1e6
    for other in ("no routing", "plain XLA"):
      label = f"{device.name} {which}: packed / {other}"
      report.claim(label, seconds["packed"], seconds[other])
  return table


def several(
  report: common.Report,
  device: devices.Device,
  name: str,
  function: Callable[..., Any],
  args: tuple[Any, ...],
) -> Callable[[], Any]:
  """A call that runs a function `REPEATS` times on the device that is here.

  On a GPU in a loop, of which is claimed that nothing was moved out; on a TPU call by call, as a
  run of 131,072 tokens takes far longer than its call, and the device is never waited for.
  """
  if device.platform == "cuda":
    looped = jax.jit(common.repeat(function, REPEATS))
    alone, all_runs = (
      take_census(program.lower(*args).compile().as_text() or "").mebibytes
      for program in (jax.jit(function), looped)
    )
    report.claim(
      f"{name}: MiB of a run in the loop / alone", all_runs / REPEATS, alone, at_least=1.0
    )
    return functools.partial(_run, looped, *args)
  once = jax.jit(function)

  def calls() -> Any:
    for _ in range(REPEATS - 1):
      once(*args)
    return _run(once, *args)

  return calls


def _error(found: Any, right: Any) -> float:
  """The worst of all arrays: the largest difference over the largest number."""
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
  return float(jnp.stack([jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) for a, b in pairs]).max())


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
    """Parameters and passes of one of `LAYERS`."""
    return self.passes(Attention(self.dim, self.heads, LAYERS[name], dtype=self.dtype))

  def experts(self, competition: CompetitionConfig) -> Experts:
    """Eight networks of 128 hidden units, two for each token."""
    config = ExpertsConfig(8, competition=dataclasses.replace(competition, **TOP_2))
    return Experts(self.dim, 128, config, dtype=self.dtype)

  def passes(self, layer: nn.Module) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Parameters of a layer, and its passes: of them, inputs, in training a gradient."""
    few = jnp.zeros((1, 1, self.dim), self.dtype)
    params = nn.unbox(jax.jit(layer.init)(jax.random.key(0), few))["params"]

    def forward(params: Any, inputs: jax.Array) -> Any:
      made = layer.apply({"params": params}, inputs)
      return made[0] if isinstance(layer, Attention) else made

    def training(params: Any, inputs: jax.Array, cotangent: jax.Array) -> Any:
      output, pull = jax.vjp(forward, params, inputs)
      return output, pull(cotangent)

    return params, {"forward": forward, "training": training}


def measure_layers(
  report: common.Report, case: Case, rounds: int, device: devices.Device | None = None
) -> None:
  """Times a layer with competing heads, fused and step by step, against the plain one.

  Args:
    report: collects the results.
    case: sizes.
    rounds: how often all are timed.
    device: an accelerator that is here; none: the CPU, on which a call takes milliseconds.
  """
  random = np.random.default_rng(0)
  arrays = [jnp.asarray(random.standard_normal(case.shape), case.dtype) for _ in range(2)]
  report.say(f"of products alone: {case.products(CompetitionConfig()):.3f} of the plain layer's")
  layers, place = {name: case.layer(name) for name in LAYERS}, device.name if device else "CPU"
  for number, name in enumerate(PASSES):
    runs = {}
    for layer, (params, passes) in layers.items():
      args = (params, *arrays[: number + 1])
      runs[layer] = (
        several(report, device, f"layer {layer}, {name}", passes[name], args)
        if device
        else functools.partial(_run, jax.jit(passes[name]), *args)
      )
    tokens = (REPEATS if device else 1) * case.batch * case.time
    seconds = report.measure(f"{place} {name}", runs, rounds, amount=tokens, unit="tokens")
    report.claim(
      f"{place} {name}: layer with competing heads / plain",
      seconds["competing"],
      seconds["plain"],
      at_most=1.05,
    )
    # For comparison: the equations as they are written, with no fusion of ours.
    report.claim(
      f"{place} {name}: the same, step by step / plain", seconds["step by step"], seconds["plain"]
    )


def measure_types(report: common.Report, case: Case, rounds: int) -> None:
  """Times layers in bfloat16 with routers in float32 against routers in bfloat16."""
  random = np.random.default_rng(0)
  arrays = [jnp.asarray(random.standard_normal(case.shape), case.dtype) for _ in range(2)]
  made: dict[str, Callable[[CompetitionConfig], nn.Module]] = {
    "heads": lambda config: Attention(case.dim, case.heads, config, dtype=case.dtype),
    "experts": case.experts,
  }
  for kind, layer_of in made.items():
    layers = {name: case.passes(layer_of(config)) for name, config in TYPES.items()}
    for number, name in enumerate(PASSES):
      runs = {
        which: functools.partial(_run, jax.jit(passes[name]), params, *arrays[: number + 1])
        for which, (params, passes) in layers.items()
      }
      tokens = case.batch * case.time
      label = f"CPU {name}, bfloat16 layer, {kind}"
      seconds = report.measure(label, runs, rounds, amount=tokens, unit="tokens")
      report.claim(
        f"{label}: router in float32 / in bfloat16", seconds["float32"], seconds["bfloat16"]
      )


def _run(function: Callable[..., Any], *args: Any) -> Any:
  return jax.block_until_ready(function(*args))


def main() -> None:
  parser = common.options(__doc__, ("cpu", "gpu", "tpu"))
  alone = parser.add_mutually_exclusive_group()
  alone.add_argument("--types", action="store_true", help="routers' types on the CPU alone")
  alone.add_argument("--compiled", action="store_true", help="counts alone; nothing is timed")
  options = parser.parse_args()
  here = options.device != "cpu"
  if not here and not options.types:
    devices.use_compilers()
  report = common.start("Competing heads on their way to the output projection", options)
  if not here and not options.compiled:
    if not options.types:
      measure_layers(report, Case(batch=4) if options.quick else Case(), ROUNDS)
    measure_types(report, Case(batch=4, dtype="bfloat16"), ROUNDS)
  if options.types:
    return report.finish()
  compiled = [devices.DEVICES[name] for name in (COMPILED[:1] if options.quick else COMPILED)]
  for device in [devices.attached()] if here else compiled:
    sizes = Sizes(tokens=TOKENS[device.platform])
    table = count_designs(report, device, sizes)
    if here and not options.compiled:
      rounds = 20 if options.quick else ROUNDS
      for name, found in measure_designs(report, device, sizes, rounds).items():
        table[name] |= found
      case = Case(batch=sizes.tokens // Case.time, dtype=sizes.dtype)
      measure_layers(report, case, rounds, device)
    report.tables[device.name] = table
  report.finish()


if __name__ == "__main__":
  main()
