"""What each kernel cannot do, in words; `None` where it can."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from compmod_jax.kernels.routing.blocks import Blocks

Refusals = dict[str, str | None]
Shape = tuple[int, ...]

MOST_UNITS = 64
# Of a GPU's registers and shared memory.
MOST_HIDDEN = 256
# Of a TPU's vector memory, blocks may take this much.
ROOM = 40 * 2**20


def softmax(tokens: int, units: int) -> Refusals:
  """Refusals of the softmax by itself."""
  refusal = _common(tokens, units)
  return {"tpu": refusal, "gpu": refusal}


def route(rows: Shape, matrix: Shape, dtype: DTypeLike, blocks: Blocks) -> Refusals:
  """Refusals of the inference network's end: rows [tokens, hidden], matrix [hidden, units]."""
  (tokens, hidden), units = rows, matrix[1]
  refusal = _common(tokens, units, dtype)
  tpu = refusal or _room(3 * hidden, hidden * units, dtype, blocks)
  wide = f"{hidden} hidden units are more than {MOST_HIDDEN}" if hidden > MOST_HIDDEN else None
  return {"tpu": tpu, "gpu": refusal or wide}


def _common(tokens: int, units: int, dtype: DTypeLike = jnp.float32) -> str | None:
  if tokens == 0:
    return "there are no tokens"
  if units > MOST_UNITS:
    return f"{units} units are more than {MOST_UNITS}"
  if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
    return f"{jnp.dtype(dtype)} is neither float32 nor bfloat16"
  return None


def _room(columns: int, elements: int, dtype: DTypeLike, blocks: Blocks) -> str | None:
  """Of a backward pass: blocks of rows twice and once more in float32, matrices and their sums."""
  size = jnp.dtype(dtype).itemsize
  needed = blocks.tpu_tokens * columns * (2 * size + 4) + elements * (2 * size + 8)
  if needed <= ROOM:
    return None
  return f"its blocks need {needed / 2**20:.0f} MiB of vector memory, more than {ROOM / 2**20:.0f}"
