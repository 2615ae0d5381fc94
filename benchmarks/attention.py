"""What a whole attention layer moves through a GPU's memory, with and without competing heads.

    python -m benchmarks.attention [--quick] [--json FILE] [--check]

In the environment of `make aot`: 8 heads of 64, width 512, bfloat16, 16,384 tokens in rows of 128,
1,024 and 4,096, compiled for an H100 that is not here; nothing runs. Matrices of weights are given
in bfloat16, to which a step rounds them once, and biases in float32.
Bytes are counted as `benchmarks/census.py` says: the operands and results of every top-level
instruction, in full. A kernel that reads or writes some columns of a matrix counts these alone in
`MiB`, and the whole matrix in `MiB of whole operands`. Registers a thread and spilt bytes are the
worst of the layer's Triton kernels. About two minutes on 2 cores.

Layers: `plain`; `float32`, the default, whose routers' products are in float32 beside attention;
`inside`, whose routers are in the model's type, so that one product makes their first layer, too.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from benchmarks import common, devices
from benchmarks.routing import PASSES, Case
from compmod_jax.core.parameters import path_name
from compmod_jax.layers.attention import Attention
from compmod_jax.mechanisms.competition.router import CompetitionConfig

TOKENS, WIDTH, HEADS = 16_384, 512, 8
TIMES = (128, 1024, 4096)
INSIDE = CompetitionConfig(dtype="model")
LAYERS = {"plain": None, "float32": CompetitionConfig(), "inside": INSIDE}
# What must move: every array that is an operand or a result of a product or a kernel, once.
FLOOR = {"forward": 160.0, "training": 480.0}
# MiB with the competition inside.
MOST_BYTES = {"forward": 175.0, "training": 640.0}
# Packed matrices that a kernel is given, and columns of each that it neither reads nor writes.
UNREAD = {
  "_forward": (1, INSIDE.hidden_dim),
  "_backward": (2, INSIDE.hidden_dim),
  "_route_columns": (1, 3 * WIDTH),
  "_route_columns_backward": (3, 3 * WIDTH),
}


def unread(kernels: Iterable[str]) -> int:
  """Bytes of columns that these kernels are given and neither read nor write."""
  numbers = (matrices * columns for matrices, columns in map(UNREAD.__getitem__, kernels))
  return TOKENS * sum(numbers) * jnp.dtype(jnp.bfloat16).itemsize


def count(device: devices.Device, time: int, name: str, which: str) -> dict[str, Any]:
  """What one pass of a layer moves and takes."""
  case = Case(batch=TOKENS // time, time=time, dim=WIDTH, heads=HEADS, dtype="bfloat16")
  params, passes = case.passes(Attention(WIDTH, HEADS, LAYERS[name], dtype=case.dtype))

  def given(path: KeyPath, leaf: jax.Array) -> jax.ShapeDtypeStruct:
    rounded = path_name(path).endswith("kernel")
    return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16 if rounded else leaf.dtype)

  params = jax.tree.map_with_path(given, params)
  inputs = jax.ShapeDtypeStruct(case.shape, jnp.dtype(case.dtype))
  args = (params, *[inputs] * (PASSES.index(which) + 1))
  made = devices.compile_for(device, passes[which], args, case.dtype, kernels=True)
  whole = made.census.bytes
  packed = [name for name in made.kernels if name in UNREAD] if name == "inside" else []
  return {
    "MiB": (whole - unread(packed)) / 2**20,
    "MiB of whole operands": whole / 2**20,
    "kernels": made.census.kernels,
    "registers": max(registers for registers, _ in made.kernels.values()),
    "spilt": max(spilt for _, spilt in made.kernels.values()),
  }


def main() -> None:
  options = common.options(__doc__, ("cpu",)).parse_args()
  devices.use_compilers()
  report = common.start("Attention layers in the memory of a GPU", options)
  device, table = devices.DEVICES["h100"], {}
  for time in TIMES[: 1 if options.quick else None]:
    for name in LAYERS:
      for which in PASSES:
        row = f"{name}, rows of {time}, {which}"
        table[row] = count(device, time, name, which)
        report.say(f"{row}: " + ", ".join(f"{k} {v:.0f}" for k, v in table[row].items()))
    for which in PASSES:
      inside, plain = (table[f"{n}, rows of {time}, {which}"]["MiB"] for n in ("inside", "plain"))
      title = f"rows of {time}, {which}: MiB"
      report.claim(f"{title}, competition inside", inside, 1.0, at_most=MOST_BYTES[which])
      report.claim(f"{title}, competition inside / plain", inside, plain)
      report.claim(f"{title}, plain / what must move", plain, FLOOR[which])
  report.tables["h100"] = table
  report.finish()


if __name__ == "__main__":
  main()
