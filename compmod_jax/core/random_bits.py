"""Random bits that are a function of a key and a place: the same however arrays are sharded.

Cheap on every backend, and what a kernel draws again where it needs them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt16, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
PER_COUNTER = 4
"""16-bit numbers that one counter gives."""


def threefry(
  key: UInt32[Array, " 2"] | tuple[jax.Array, jax.Array], counter: UInt32[Array, "*shape"]
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
  """Two random words for each counter: Threefry-2x32 with 20 rounds, `jax.random`'s generator.

  Written out because XLA then makes the numbers in the loop that uses them; `jax.random` calls a
  loop over rounds that passes over memory five times on CPU.

  Args:
    key: two words.
    counter: the low word of each counter; the high word is 0.

  Source: Salmon et al. 2011, section 4.
  """
  keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
  first, second = counter + keys[0], jnp.broadcast_to(keys[1], counter.shape)
  for group in range(5):
    for bits in _ROTATIONS[group % 2]:
      first = first + second
      second = (second << np.uint32(bits)) | (second >> np.uint32(32 - bits))
      second = first ^ second
    first = first + keys[(group + 1) % 3]
    second = second + keys[(group + 2) % 3] + np.uint32(group + 1)
  return first, second


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> UInt16[Array, "..."]:
  """Uniform 16-bit numbers, a function of the key and of each element's place alone.

  Args:
    key: any JAX key.
    shape: at least one axis.
  """
  words = jax.random.key_data(key).reshape(-1)[:2]
  *outer, width = shape
  blocks = (*outer, -(-width // PER_COUNTER))
  place = jnp.zeros(blocks, jnp.uint32)
  for axis, size in enumerate(blocks):
    place = place * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, blocks, axis)
  # Kept for the backward pass, rather than drawn again there.
  return lax.optimization_barrier(bits_at(words, place)[..., :width])


def bits_at(
  words: UInt32[Array, " 2"], counter: UInt32[Array, "*outer width"]
) -> UInt16[Array, "*outer four_widths"]:
  """The 16-bit numbers of every counter, side by side: of each word the low half first.

  Args:
    words: of the key.
    counter: see `threefry`.
  """
  bits = lax.bitcast_convert_type(jnp.stack(threefry(words, counter), axis=-1), jnp.uint16)
  return bits.reshape(*counter.shape[:-1], -1)
