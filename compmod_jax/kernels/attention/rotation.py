"""Rotary positions of queries and keys, for attention that nobody takes apart.

Source: Su et al. 2021, equation 34; dimensions are paired across halves of a head.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

BASE = 10000.0


class Rotation(NamedTuple):
  r"""What columns of a query or key are multiplied by, and those that they are paired with.

  .. math:: x_i \mapsto x_i \cos\theta_i + x_{i \pm D/2}\, (\mp \sin\theta_i)

  Attributes:
    cos: of every position and column, float32.
    sin: the same, negative in the first half of a head.
  """

  cos: Float[Array, "#batch time head_dim"]
  sin: Float[Array, "#batch time head_dim"]

  @classmethod
  def of(cls, position_ids: Int[Array, "#batch time"], head_dim: int) -> "Rotation":
    r"""Of positions t, by angles :math:`t\, 10000^{-2i/D}`."""
    half = head_dim // 2
    rates = np.tile(BASE ** (-np.arange(half) / half), 2).astype(np.float32)
    signs = np.repeat([-1.0, 1.0], half).astype(np.float32)
    angles = position_ids.astype(jnp.float32)[..., None] * rates[None, None]
    return cls(jnp.cos(angles), jnp.sin(angles) * signs[None, None])

  def turn(
    self, rows: Float[Array, "batch time heads head_dim"]
  ) -> Float[Array, "batch time heads head_dim"]:
    """Queries or keys at their positions."""
    half = rows.shape[-1] // 2
    cos, sin = self.cos[:, :, None, :half], self.sin[:, :, None, half:]
    first, second = rows[..., :half].astype(jnp.float32), rows[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.astype(rows.dtype)

  def turn_packed(
    self, packed: Float[Array, "batch time parts columns"]
  ) -> Float[Array, "batch time parts columns"]:
    """All queries and keys of parts, each of which has those of its heads and then their values."""
    batch, time, parts, _ = packed.shape
    apart = packed.reshape(batch, time, parts, 3, -1, self.cos.shape[-1])
    turned = self.turn(apart[:, :, :, :2].reshape(batch, time, -1, apart.shape[-1]))
    turned = turned.reshape(batch, time, parts, 2, *apart.shape[4:])
    return jnp.concatenate([turned, apart[:, :, :, 2:]], axis=3).reshape(packed.shape)
