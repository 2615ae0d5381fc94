"""What a whole attention layer moves through a device's memory, with and without competing heads.

    python -m benchmarks.attention [--quick] [--json FILE] [--check]

In the environment of `make aot`: 8 heads of 64, width 512, bfloat16, rows of 128, 1,024 and 4,096
tokens, 16,384 in all for an H100 and 131,072 for a TPU v5e, compiled for devices that are not
here; nothing runs. Matrices of weights are given in bfloat16, to which a step rounds them once, and
biases in float32.
Bytes are counted as `benchmarks/census.py` says: the operands and results of every top-level
instruction, in full. A kernel that reads or writes some columns of a matrix counts these alone in
`MiB`, and the whole matrix in `MiB of whole operands`: beside routers' columns, those of keys and
values where a GPU's forward pass writes queries with their bias for the reverse pass. Registers a
thread and spilt bytes are the worst of the layer's Triton kernels. Fourteen minutes on one
core beside other work.

Layers: `plain`; `float32`, the default, whose routers' products are in float32 beside attention;
`inside`, whose routers are in the model's type, so that one product makes their first layer, too.
Then cross attention to as many other rows of 128, without competition and with the default one;
and self-attention in rows of 128 and 1,024, without competition: with a learned bias for each
distance in each head, given by distance, or as an array of all pairs, with which no kernel runs; as
T5 has it, with such biases, no others, and logits that are not divided by sqrt(head_dim); with
rotary positions; and with dropout of a tenth of the probabilities.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from benchmarks import common, devices
from benchmarks.routing import PASSES, Case
from compmod_jax.core.parameters import path_name
from compmod_jax.kernels.attention.distances import DistanceBias
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import Context
from compmod_jax.mechanisms.competition.router import CompetitionConfig

WIDTH, HEADS = 512, 8
TOKENS = {"h100": 16_384, "v5e": 131_072}
TIMES = (128, 1024, 4096)
BIASED = {"biases by distance": False, "biases of pairs": True}
T5 = {"scale_logits": False, "biases": False}
DROPOUT = 0.1
FURTHER_TIMES = TIMES[:2]  # of layers with biases, rotary positions or dropout
INSIDE = CompetitionConfig(dtype="model")
LAYERS = {"plain": None, "float32": CompetitionConfig(), "inside": INSIDE}
CROSS = {"cross, plain": None, "cross, float32": CompetitionConfig()}
# What must move: every array that is an operand or a result of a product or a kernel, once. Kernels
# for TPUs that hold the output projection save heads and their gradient of it.
FLOOR = {
  "h100": {"forward": 160.0, "training": 480.0},
  "v5e": {"forward": 1280.0, "training": 3840.0},
}
# MiB with the competition inside.
MOST_BYTES = {
  "h100": {"forward": 175.0, "training": 640.0},
  "v5e": {"forward": 1110.0, "training": 3300.0},
}
# Packed matrices that a kernel is given, and columns of each that it neither reads nor writes; the
# first half runs forward.
UNREAD = {
  "_forward": (1, INSIDE.hidden_dim),
  "_route_columns": (1, 3 * WIDTH),
  "_backward": (2, INSIDE.hidden_dim),
  "_route_columns_backward": (3, 3 * WIDTH),
}


def unread(kernels: Iterable[str], tokens: int) -> int:
  """Bytes of columns that these kernels are given and neither read nor write."""
  numbers = (matrices * columns for matrices, columns in map(UNREAD.__getitem__, kernels))
  return tokens * sum(numbers) * jnp.dtype(jnp.bfloat16).itemsize


def count(device: devices.Device, time: int, name: str, which: str) -> dict[str, Any]:
  """What one pass of a layer moves and takes."""
  tokens = TOKENS[device.name]
  case = Case(batch=tokens // time, time=time, dim=WIDTH, heads=HEADS, dtype="bfloat16")
  params, passes = case.passes(Attention(WIDTH, HEADS, LAYERS[name], dtype=case.dtype))
  inputs = jax.ShapeDtypeStruct(case.shape, jnp.dtype(case.dtype))
  args = (rounded(params), *[inputs] * (PASSES.index(which) + 1))
  on_gpu = device.platform == "cuda"
  made = devices.compile_for(device, passes[which], args, case.dtype, kernels=on_gpu)
  whole, names = made.census.bytes, list(UNREAD)[: 2 * (PASSES.index(which) + 1)]
  beside = INSIDE.hidden_dim if name == "inside" else 0
  skipped = unread(names, tokens) if name == "inside" else 0
  # A GPU has a kernel more there, which reads no packed matrix.
  more = on_gpu and which == "training"
  if more:
    skipped += tokens * (2 * WIDTH + beside) * inputs.dtype.itemsize
  if name == "inside" and made.census.kernels != len(names) + more:
    raise RuntimeError(f"for {device.name} there are {made.census.kernels} kernels, not {names}")
  found = {
    "MiB": (whole - skipped) / 2**20,
    "MiB of whole operands": whole / 2**20,
    "kernels": made.census.kernels,
  }
  if on_gpu:
    found["registers"] = max(registers for registers, _ in made.kernels.values())
    found["spilt"] = max(spilt for _, spilt in made.kernels.values())
  return found


def count_cross(device: devices.Device, name: str, which: str) -> dict[str, Any]:
  """What one pass of cross attention moves: gradients are of parameters, inputs and memory."""
  tokens, time = TOKENS[device.name], TIMES[0]
  layer = Attention(WIDTH, HEADS, CROSS[name], cross=True, dtype="bfloat16")
  few = jnp.zeros((1, 1, WIDTH), jnp.bfloat16)
  params = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), few, None, few))["params"]

  def forward(params: Any, inputs: jax.Array, memory: jax.Array) -> jax.Array:
    return layer.apply({"params": params}, inputs, None, memory)[0]

  rows = jax.ShapeDtypeStruct((tokens // time, time, WIDTH), jnp.bfloat16)
  return count_pass(device, which, forward, rows, rounded(params), rows, rows)


def count_biased(
  device: devices.Device, time: int, which: str, *, dense: bool = False, **fields: Any
) -> dict[str, Any]:
  """What one pass of self-attention moves: gradients are of parameters, inputs and the bias.

  No kernel runs where the bias is `dense`, an array of all pairs; `fields` are of the layer.
  """
  layer = Attention(WIDTH, HEADS, dtype="bfloat16", **fields)
  few = jnp.zeros((1, 1, WIDTH), jnp.bfloat16)
  params = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), few))["params"]

  def forward(params: Any, inputs: jax.Array, numbers: jax.Array) -> jax.Array:
    bias = DistanceBias(numbers)
    ctx = Context(position_bias=bias.dense() if dense else bias)
    return layer.apply({"params": params}, inputs, ctx=ctx)[0]

  rows = jax.ShapeDtypeStruct((TOKENS[device.name] // time, time, WIDTH), jnp.bfloat16)
  numbers = jax.ShapeDtypeStruct((HEADS, 2 * time - 1), jnp.float32)
  return count_pass(device, which, forward, rows, rounded(params), rows, numbers)


def count_further(device: devices.Device, time: int, which: str, **fields: Any) -> dict[str, Any]:
  """What one pass of another self-attention moves; gradients are of parameters and inputs."""
  layer = Attention(WIDTH, HEADS, dtype="bfloat16", **fields)
  few = jnp.zeros((1, 1, WIDTH), jnp.bfloat16)
  params = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), few))["params"]

  def forward(params: Any, inputs: jax.Array) -> jax.Array:
    rngs = {"dropout": jax.random.key(1)}
    return layer.apply({"params": params}, inputs, ctx=Context(deterministic=False), rngs=rngs)[0]

  rows = jax.ShapeDtypeStruct((TOKENS[device.name] // time, time, WIDTH), jnp.bfloat16)
  return count_pass(device, which, forward, rows, rounded(params), rows)


def count_pass(
  device: devices.Device,
  which: str,
  forward: Callable[..., jax.Array],
  slope: jax.ShapeDtypeStruct,
  *args: Any,
) -> dict[str, Any]:
  """What a function moves, or that and its gradients."""

  def training(slope: jax.Array, *args: Any) -> Any:
    output, pull = jax.vjp(forward, *args)
    return output, pull(slope)

  if which == "forward":
    made = devices.compile_for(device, forward, args, "bfloat16")
  else:
    made = devices.compile_for(device, training, (slope, *args), "bfloat16")
  return {"MiB": made.census.mebibytes, "kernels": made.census.kernels}


def rounded(params: Any) -> Any:
  """Shapes of parameters, matrices in bfloat16."""

  def given(path: KeyPath, leaf: Any) -> jax.ShapeDtypeStruct:
    matrix = path_name(path).endswith("kernel")
    return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16 if matrix else leaf.dtype)

  return jax.tree.map_with_path(given, params)


def main() -> None:
  options = common.options(__doc__, ("cpu",)).parse_args()
  devices.use_compilers()
  report = common.start("Attention layers in the memory of a device", options)
  for name in TOKENS:
    report.tables[name] = count_all(report, devices.DEVICES[name], options.quick)
  report.finish()


def count_all(report: common.Report, device: devices.Device, quick: bool) -> dict[str, Any]:
  """All layers for one device; their table and the claims about it."""
  table, floor, most = {}, FLOOR[device.name], MOST_BYTES[device.name]
  for time in TIMES[: 1 if quick else None]:
    for name in LAYERS:
      for which in PASSES:
        row = f"{name}, rows of {time}, {which}"
        table[row] = count(device, time, name, which)
        report.say(
          f"{device.name}, {row}: " + ", ".join(f"{k} {v:.0f}" for k, v in table[row].items())
        )
    for which in PASSES:
      inside, plain = (table[f"{n}, rows of {time}, {which}"]["MiB"] for n in ("inside", "plain"))
      title = f"{device.name}, rows of {time}, {which}: MiB"
      report.claim(f"{title}, competition inside", inside, 1.0, at_most=most[which])
      report.claim(f"{title}, competition inside / plain", inside, plain)
      report.claim(f"{title}, plain / what must move", plain, floor[which])
  for which in PASSES:
    for name in CROSS:
      row = f"{name}, {which}"
      table[row] = count_cross(device, name, which)
      report.say(f"{device.name}, {row}: {table[row]['MiB']:.0f} MiB")
    competing, plain = (table[f"{name}, {which}"]["MiB"] for name in reversed(CROSS))
    report.claim(
      f"{device.name}, cross attention, {which}: MiB, competing / plain", competing, plain
    )
  for time, which in itertools.product(FURTHER_TIMES[: 1 if quick else None], PASSES):
    rows = [f"{name}, rows of {time}, {which}" for name in BIASED]
    for row, dense in zip(rows, BIASED.values(), strict=True):
      table[row] = count_biased(device, time, which, dense=dense)
      report.say(f"{device.name}, {row}: {table[row]['MiB']:.0f} MiB")
    biased, dense = (table[row]["MiB"] for row in rows)
    plain = table[f"plain, rows of {time}, {which}"]["MiB"]
    title = f"{device.name}, rows of {time}, {which}: MiB"
    report.claim(f"{title}, biases by distance / plain", biased, plain)
    report.claim(f"{title}, biases by distance / as an array of pairs", biased, dense)
    further = {
      "T5": count_biased(device, time, which, **T5),
      "rotary": count_further(device, time, which, positions="rotary"),
      "dropout": count_further(device, time, which, dropout=DROPOUT),
    }
    for name, found in further.items():
      row = f"{name}, rows of {time}, {which}"
      table[row] = found
      report.say(f"{device.name}, {row}: {found['MiB']:.0f} MiB")
      report.claim(f"{title}, {name} / plain", found["MiB"], plain)
  return table


if __name__ == "__main__":
  main()
