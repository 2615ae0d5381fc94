"""Short convolutions, which mix every position with the few before it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core.sharding import logical
from compmod_jax.layers.context import Context


def neighbours(segments: Int[Array, "batch time"], width: int) -> Bool[Array, "batch time before"]:
  """Which of the `width` - 1 positions before each, the nearest first, are of its segment."""
  time = segments.shape[1]
  found = [
    jnp.pad(segments[:, k:] == segments[:, : max(0, time - k)], ((0, 0), (min(k, time), 0)))
    for k in range(1, width)
  ]
  return jnp.stack(found, axis=-1)


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

  def initial_state(self, batch: int, keys: int) -> jax.Array:
    """Room for what is read at `keys` positions, laid out as attention's keys are."""
    return jnp.zeros((batch, 1, keys, self.dim), self.dtype)

  def __call__(
    self, x: Float[Array, "batch time embed"], state: jax.Array | None, ctx: Context
  ) -> tuple[Float[Array, "batch time embed"], jax.Array | None]:
    """Mixes every position, or the newest of every beam, with the few before it.

    Args:
      x: what is read.
      state: of earlier positions, to which this is added; None: these are all.
      ctx: which of the positions before each are of its segment, and where decoding stands.
    """
    newest = ctx.newest
    if state is not None:
      # Written before it is read: a loop over steps then keeps one state, and copies none.
      zero = jnp.int32(0)
      place = (zero, zero, jnp.asarray(ctx.start, jnp.int32), zero)
      state = jax.lax.dynamic_update_slice(state, x[:, None], place)
    if state is None or newest is None:
      return self._whole(x, ctx.same_segment), state
    assert newest.neighbours is not None, "a convolution reads the positions before the newest"
    assert newest.same_segment is not None
    rows = jnp.arange(len(x))[:, None, None]
    earlier = jnp.where(newest.same_segment[..., None], state[rows, 0, newest.neighbours], 0)
    return x + jnp.einsum("bhkd,kd->bhd", earlier, self.kernel.astype(self.dtype)), state

  def _whole(
    self, x: Float[Array, "batch time embed"], near: Bool[Array, "#batch time before"] | None
  ) -> Float[Array, "batch time embed"]:
    kernel, time, out = self.kernel.astype(self.dtype), x.shape[1], x
    for k in range(1, min(self.width, time)):
      earlier = jnp.pad(x[:, : time - k], ((0, 0), (k, 0), (0, 0)))
      if near is not None:
        earlier = jnp.where(near[..., k - 1, None], earlier, 0)
      out = out + kernel[None, k - 1 : k] * earlier
    return out
