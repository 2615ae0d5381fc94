"""What is saved where heads leave out the attention of tokens that did not choose them.

    python -m benchmarks.chosen_attention [--quick] [--json FILE] [--check]
    python -m benchmarks.chosen_attention --compiled [--json FILE]

A self-attention layer of 8 heads of 64, width 512, in which every token reads all others, or those
before it ("causal"): without competition, with heads of which 1, 2 or 4 stay at every token, and
the same with `competition.skip`. On the CPU: forward passes, and values with the gradients of
parameters and inputs, float32, 4,096 tokens in rows of 256 to 2,048, in turn. Fresh parameters on
random inputs choose some heads more often than others; the table says how many tokens chose the
most popular one. About five minutes on 2 cores.

`--compiled`, in the environment of `make aot`, counts what 2 of 8 heads make the layer move through
an H100's memory in bfloat16, as `benchmarks.attention` does, compiled for one that is not here;
nothing runs. Heads are in orders of their own there, which costs copies; what kernels do not
compute for that no count shows.
"""

import dataclasses
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from benchmarks import common, devices
from benchmarks.attention import HEADS, TOKENS, WIDTH, count_pass, rounded
from benchmarks.routing import PASSES
from compmod_jax.core.intermediates import run
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import AttentionMask, Context
from compmod_jax.mechanisms.competition.router import CompetitionConfig

ROUNDS, TIMED = 20, 4096
# Rows of, heads that stay, whether tokens read those before them alone.
CASES = (
  *((256, 2, False), (512, 2, False), (1024, 1, False), (1024, 2, False), (1024, 4, False)),
  *((2048, 2, False), (512, 2, True), (1024, 2, True), (2048, 2, True)),
)
COUNTED = 1024, 4096  # rows of


def layers(keep: int, dtype: str) -> dict[str, Attention]:
  """Without competition; with one; and with one that leaves tokens out."""
  some = CompetitionConfig(rule="top_k", keep=keep)
  ways = {"plain": None, "all": some, "chosen": dataclasses.replace(some, skip=True)}
  return {way: Attention(WIDTH, HEADS, one, dtype=dtype) for way, one in ways.items()}


def named(time: int, keep: int, *, causal: bool) -> str:
  """A case in words."""
  return f"rows of {time}, {keep} of {HEADS}" + ", causal" * causal


def measure(
  report: common.Report, time: int, keep: int, rounds: int, *, causal: bool
) -> dict[str, float]:
  """Times of a case, in turn; and how many tokens chose a head."""
  made, title = layers(keep, "float32"), named(time, keep, causal=causal)
  ctx = Context(AttentionMask(causal=causal))
  random = np.random.default_rng(0)
  inputs, slope = (
    jnp.asarray(random.normal(size=(TIMED // time, time, WIDTH)), jnp.float32) for _ in range(2)
  )
  params = nn.unbox(made["all"].init(jax.random.key(0), inputs[:1, :2]))
  _, found = run(made["all"].apply, params, inputs, capture=["router/weights"], ctx=Context())
  shares = np.mean(np.asarray(found["router/weights"]) > 0, axis=(0, 1))
  report.note(f"{title}: {shares.max():.0%} of the tokens chose the most popular head")

  def programs(layer: Attention) -> tuple[Compiled, ...]:
    def forward(params: Any, inputs: jax.Array) -> jax.Array:
      return layer.apply(params, inputs, ctx=ctx)[0]

    def training(params: Any, inputs: jax.Array) -> Any:
      outputs, pull = jax.vjp(forward, params, inputs)
      return outputs, pull(slope)

    return tuple(jax.jit(one).lower(params, inputs).compile() for one in (forward, training))

  compiled = {way: programs(layer) for way, layer in made.items()}
  for number, which in enumerate(PASSES):
    runs = {
      way: lambda both=both, number=number: jax.block_until_ready(both[number](params, inputs))
      for way, both in compiled.items()
    }
    seconds = report.measure(f"{title}, {which}", runs, rounds, amount=TIMED, unit="tokens")
    for other in ("all", "plain"):
      report.claim(f"{title}, {which}: chosen / {other}", seconds["chosen"], seconds[other])
  return {"most popular head": float(shares.max())}


def count(report: common.Report, name: str) -> dict[str, Any]:
  """MiB that a device's program moves."""
  device, table = devices.DEVICES[name], {}
  for causal, time, which in itertools.product((False, True), COUNTED, PASSES):
    case, ctx = f"rows of {time}, " + "causal, " * causal + which, Context(AttentionMask(causal))
    for way, layer in layers(2, "bfloat16").items():
      few = jnp.zeros((1, 1, WIDTH), jnp.bfloat16)
      params = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), few))["params"]

      def forward(
        params: Any, inputs: jax.Array, layer: Attention = layer, ctx: Context = ctx
      ) -> jax.Array:
        return layer.apply({"params": params}, inputs, ctx=ctx)[0]

      rows = jax.ShapeDtypeStruct((TOKENS[name] // time, time, WIDTH), jnp.bfloat16)
      row = f"{way}, {case}"
      table[row] = count_pass(device, which, forward, rows, rounded(params), rows)
      report.say(f"{name}, {row}: {table[row]['MiB']:.0f} MiB")
    mine, others = (table[f"{way}, {case}"]["MiB"] for way in ("chosen", "all"))
    report.claim(f"{name}, {case}: MiB, chosen / all", mine, others)
  return table


def main() -> None:
  parser = common.options(__doc__, ("cpu",))
  parser.add_argument("--compiled", action="store_true", help="counts alone; nothing is timed")
  options = parser.parse_args()
  if options.compiled:
    devices.use_compilers()
  report = common.start("Attention of tokens that chose a head", options)
  if options.compiled:
    report.tables["h100"] = count(report, "h100")
  else:
    for time, keep, causal in CASES[: 1 if options.quick else None]:
      found = measure(report, time, keep, 3 if options.quick else ROUNDS, causal=causal)
      report.tables[named(time, keep, causal=causal)] = found
  report.finish()


if __name__ == "__main__":
  main()
