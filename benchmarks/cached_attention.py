"""What attention to a cache of keys and values moves through memory, in a step of decoding.

    python -m benchmarks.cached_attention [--quick] [--json FILE] [--check]

In the environment of `make aot`: 16 examples, 12 heads, room for 2,048 keys, one query or five
beams an example, compiled for an H100 that is not here; nothing runs. Bytes are counted as
`benchmarks/census.py` says, with all keys written; those that are not written the kernel does not
read, which no count shows. Registers a thread and spilt bytes are those of the kernel. For a TPU
v5e there is no kernel, and XLA's program is counted. A minute on 2 cores; `benchmarks.gpu --only
cache` times both ways.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import common, devices
from compmod_jax.kernels.attention.cached import attend_to_cache, attend_to_cache_on_gpu

BATCH, HEADS, KEYS = 16, 12, 2048
BEAMS, WIDTHS, DTYPES = (1, 5), (64, 32, 96, 128), ("bfloat16", "float32")
MOST = 1.1  # bytes over those of keys and values, once
WAYS: dict[str, Callable[..., jax.Array]] = {
  "kernel": attend_to_cache_on_gpu,
  "XLA": attend_to_cache,
}


def compiled(device: str, way: str, beams: int, width: int, dtype: str) -> devices.Compiled:
  """The attention of one step."""
  shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
  args = (
    shape((BATCH, beams, HEADS, width)),
    shape((BATCH, HEADS, width, KEYS)),
    shape((BATCH, HEADS, KEYS, width)),
    jax.ShapeDtypeStruct((BATCH, 1, beams, KEYS), jnp.float32),
    jax.ShapeDtypeStruct((), jnp.int32),
  )
  kernels = way == "kernel"
  return devices.compile_for(devices.DEVICES[device], WAYS[way], args, dtype, kernels=kernels)


def bytes_once(width: int, dtype: str) -> float:
  """MiB of keys and values."""
  return 2 * BATCH * HEADS * KEYS * width * jnp.dtype(dtype).itemsize / 2**20


def main() -> None:
  options = common.options(__doc__, ("cpu",)).parse_args()
  devices.use_compilers()
  report = common.start("Attention to a cache in the memory of a device", options)
  table, on_tpu = {}, {}
  report.tables |= {"h100": table, "v5e": on_tpu}
  cases = [*itertools.product(WIDTHS, DTYPES, BEAMS)]
  for width, dtype, beams in cases[: 2 if options.quick else None]:
    row = f"{beams} queries, heads of {width}, {dtype}"
    floor = bytes_once(width, dtype)
    on_tpu[row] = {
      "XLA": compiled("v5e", "XLA", beams, width, dtype).census.mebibytes,
      "keys and values": floor,
    }
    report.claim(f"{row}: v5e, MiB over keys and values", on_tpu[row]["XLA"], floor)
    made = {way: compiled("h100", way, beams, width, dtype) for way in WAYS}
    registers, spilt = made["kernel"].kernels["_attend"]
    table[row] = {way: one.census.bytes / 2**20 for way, one in made.items()}
    table[row] |= {"keys and values": floor, "registers": registers, "spilt": spilt}
    report.say(f"{row}: " + ", ".join(f"{name} {value:.0f}" for name, value in table[row].items()))
    mib = table[row]["kernel"]
    report.claim(f"{row}: MiB over keys and values", mib, floor, at_most=MOST)
    report.claim(f"{row}: kernel / XLA, MiB", mib, table[row]["XLA"])
    report.claim(f"{row}: bytes spilt", spilt, 1.0, at_most=0.0)
  report.finish()


if __name__ == "__main__":
  main()
