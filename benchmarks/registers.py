"""Registers of the attention kernels for GPUs, for every width of a head.

    python -m benchmarks.registers [--quick] [--mask MASK] [--json FILE] [--check]

In the environment of `make aot`: attention of heads with weights, forward and all gradients, heads
of 32, 64, 96 and 128, float32 and bfloat16, with and without dropout of probabilities, of all
pairs, of causal order within segments, and of that with penalties on distances or a learned bias
for each, or without dropout with positions of queries, compiled for an H100 that is not here.
Registers a thread and bytes that do not fit into them. Half an hour on a core with other work.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from benchmarks import common, devices
from compmod_jax.kernels.attention import ProbabilityDropout, Visibility, packed_attention
from compmod_jax.kernels.attention.distances import DistanceBias

BATCH, TIME, HEADS = 16, 1024, 8
WIDTHS, DTYPES, RATES = (32, 64, 96, 128), ("bfloat16", "float32"), (0.0, 0.1)
KERNELS = ("_forward", "_backward")
MASKS = ("", "masked", "masked, penalties", "masked, biases", "masked, positions")


def kernels_of(width: int, dtype: str, rate: float, mask: str) -> dict[str, tuple[int, int]]:
  """Registers and spilt bytes of the kernels of one width of a head."""

  def total(
    packed: jax.Array,
    bias: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    penalties: jax.Array,
    key: jax.Array,
    numbers: jax.Array,
  ) -> jax.Array:
    dropout = ProbabilityDropout.of(key, rate, BATCH, HEADS) if rate else None
    seen = Visibility(causal=True, query_ids=ids, key_ids=ids) if mask else Visibility()
    if "penalties" in mask:
      seen = dataclasses.replace(seen, penalties=penalties)
    if "positions" in mask:
      seen = dataclasses.replace(seen, query_positions=ids)
    biased = DistanceBias(numbers) if "biases" in mask else None
    how = {"dropout": dropout, "visibility": seen, "distance_bias": biased}
    heads = packed_attention(packed, bias, weights=weights, **how)  # type: ignore
    return jnp.sum(heads.astype(jnp.float32) ** 2)

  args = (
    jax.ShapeDtypeStruct((BATCH, TIME, HEADS, 3 * width), dtype),
    jax.ShapeDtypeStruct((HEADS, 3 * width), jnp.float32),
    jax.ShapeDtypeStruct((BATCH, TIME, HEADS), jnp.float32),
    jax.ShapeDtypeStruct((BATCH, TIME), jnp.int32),
    jax.ShapeDtypeStruct((HEADS,), jnp.float32),
    jax.eval_shape(lambda: jax.random.key(0)),
    jax.ShapeDtypeStruct((HEADS, 2 * TIME - 1), jnp.float32),
  )
  training = jax.grad(total, (0, 1, 2, 6))
  made = devices.compile_for(devices.DEVICES["h100"], training, args, dtype, kernels=True)
  names = [*KERNELS, *["_sum_diagonals"] * ("biases" in mask)]
  return {name: made.kernels[name] for name in names}


def main() -> None:
  parser = common.options(__doc__, ("cpu",))
  parser.add_argument("--mask", choices=MASKS, help="these programs alone")
  options = parser.parse_args()
  devices.use_compilers()
  report = common.start("Registers of the attention kernels", options)
  masks = MASKS if options.mask is None else (options.mask,)
  cases = [*itertools.product(DTYPES, WIDTHS, RATES, masks)]
  cases = [case for case in cases if not (case[2] and "positions" in case[3])]
  table = report.tables["h100"] = {}
  for dtype, width, rate, mask in cases[: 2 if options.quick else None]:
    for name, (registers, spilt) in kernels_of(width, dtype, rate, mask).items():
      facts = [f"{name[1:]}, heads of {width}, {dtype}"]
      row = ", ".join(facts + ["dropout"] * (rate > 0) + [mask] * bool(mask))
      table[row] = {"registers": registers, "spilt": spilt}
      report.claim(f"{row}: bytes spilt ({registers} registers)", spilt, 1.0, at_most=0.0)
  report.finish()


if __name__ == "__main__":
  main()
