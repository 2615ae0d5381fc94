"""Short convolutions, which mix every position with the few before it."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core.sharding import logical


def neighbours(segments: Int[Array, "batch time"], width: int) -> Bool[Array, "batch time before"]:
  """Which of the `width` - 1 positions before each, the nearest first, are of its segment."""
  time = segments.shape[1]
  found = [
    jnp.pad(segments[:, k:] == segments[:, : max(0, time - k)], ((0, 0), (min(k, time), 0)))
    for k in range(1, width)
  ]
  return jnp.stack(found, axis=-1)


class Near(NamedTuple):
  """The positions before the newest one of every beam, the nearest first.

  Attributes:
    places: where they are in the cache.
    there: whether they are, and of the same segment.
  """

  places: Int[Array, "batch beams before"]
  there: Bool[Array, "batch beams before"]


class ShortConvolution(nn.Module):
  r"""A causal convolution of every channel by itself, added to what it reads.

  .. math:: y_t = x_t + \sum_{k=1}^{w-1} a_k \odot x_{t-k}

  Positions that are no neighbours count as zeros. Keys then tell what stands around them, which
  attention otherwise has to find out in a layer of its own.

  Attributes:
    width: w, at least 2.
    dim: channels.
    dtype: compute type.

  Source: after So et al. 2021 (depthwise convolutions behind the projections of attention).
  """

  width: int
  dim: int
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Makes the kernel."""
    init = logical(nn.initializers.normal(stddev=self.width**-0.5), "norm", "norm")
    self.kernel = self.param("kernel", init, (self.width - 1, self.dim))

  def __call__(
    self, x: Float[Array, "batch time embed"], near: Bool[Array, "#batch time before"]
  ) -> Float[Array, "batch time embed"]:
    """Whole sequences; `near` are those of `neighbours`."""
    kernel, time, out = self.kernel.astype(self.dtype), x.shape[1], x
    for k in range(1, min(self.width, time)):
      earlier = jnp.pad(x[:, : time - k], ((0, 0), (k, 0), (0, 0)))
      out = out + kernel[None, k - 1 : k] * jnp.where(near[..., k - 1, None], earlier, 0)
    return out

  def empty_cache(self, batch: int, keys: int) -> jax.Array:
    """Room for what is read at `keys` positions, laid out as attention's keys are."""
    return jnp.zeros((batch, 1, keys, self.dim), self.dtype)

  def step(
    self, x: Float[Array, "batch beams embed"], cache: jax.Array, start: Array, near: Near
  ) -> tuple[Float[Array, "batch beams embed"], jax.Array]:
    """The newest position of every beam, and the cache that holds it from place `start` on."""
    rows = jnp.arange(len(x))[:, None, None]
    earlier = jnp.where(near.there[..., None], cache[rows, 0, near.places], 0)
    out = x + jnp.einsum("bhkd,kd->bhd", earlier, self.kernel.astype(self.dtype))
    return out, add_inputs(cache, x, start)


def add_inputs(
  cache: jax.Array, x: Float[Array, "batch positions embed"], start: Array | int
) -> jax.Array:
  """The cache of a convolution with what it read from place `start` on."""
  zero = jnp.int32(0)
  return jax.lax.dynamic_update_slice(cache, x[:, None], (zero, zero, jnp.int32(start), zero))
