"""Positions of which attention knows: rotations of queries and keys, or relative ones.

Those that are vectors added to embeddings stand beside the embedding.
"""

from typing import Literal, get_args

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.sharding import logical
from compmod_jax.layers.context import PositionIds

Positions = Literal["sinusoidal", "learned", "rotary", "relative"]
"""Vectors added to embeddings, fixed or learned; or what acts on queries and keys: rotations (Su et
al. 2021), or relative positions (Dai et al. 2019)."""
ADDED = ("sinusoidal", "learned")


def rotate(
  x: Float[Array, "batch time heads head_dim"], position_ids: Int[Array, "#batch #time"]
) -> Float[Array, "batch time heads head_dim"]:
  r"""Rotary positions: every pair of dimensions is turned by an angle that grows with the place.

  .. math:: (x_i, x_{i+D/2}) \mapsto (x_i \cos\theta - x_{i+D/2} \sin\theta,\;
     x_i \sin\theta + x_{i+D/2} \cos\theta), \quad \theta = t\, 10000^{-2i/D}

  The product of a query and a key then depends on the difference of their positions alone.

  Args:
    x: queries or keys; head_dim is even.
    position_ids: t, where each stands in its text.

  Source: Su et al. 2021, equation 34; dimensions are paired across halves.
  """
  half = x.shape[-1] // 2
  rates = jnp.asarray(10000.0 ** (-np.arange(half) / half), jnp.float32)
  angles = position_ids.astype(jnp.float32)[..., None, None] * rates[None, None, None]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
  return turned.astype(x.dtype)


class RelativePositions(nn.Module):
  r"""Relative positions in the logits of attention, as in Transformer-XL.

  .. math:: s_{ts} = \frac{(q_t + u) \cdot k_s + (q_t + v) \cdot W_R r_{t-s}}{\sqrt{D_h}}

  with fixed sinusoids :math:`r_d` of the distance and learned :math:`u`, :math:`v` in each head.

  Attributes:
    dim: model width, even.
    heads: number of heads.
    dtype: compute type.

  Source: Dai et al. 2019, section 3.3.
  """

  dim: int
  heads: int
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Makes W_R, u and v."""
    shape, names = (self.heads, self.dim // self.heads), ("heads", "head_dim")
    init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", in_axis=0, out_axis=(1, 2))
    self.kernel = self.param("kernel", logical(init, "embed", *names), (self.dim, *shape))
    zeros = logical(nn.initializers.zeros, *names)
    self.content = self.param("content", zeros, shape)
    self.distance = self.param("distance", zeros, shape)

  def __call__(
    self, query: Float[Array, "batch time heads head_dim"], position_ids: PositionIds
  ) -> tuple[Float[Array, "batch time heads head_dim"], Float[Array, "batch heads time keys"]]:
    """The queries q + u, and what is added to the logits for the distances, float32."""
    most = position_ids.length
    distances = np.arange(1 - most, most)[:, None]
    rates = 10000.0 ** (-np.arange(0, self.dim, 2) / self.dim)
    sinusoids = np.concatenate([np.sin(distances * rates), np.cos(distances * rates)], axis=1)
    kernel = self.kernel.astype(self.dtype)
    table = jnp.einsum("nm,mhd->nhd", jnp.asarray(sinusoids, self.dtype), kernel)
    moved = query + self.distance.astype(query.dtype)[None, None]
    every = jnp.einsum("bthd,nhd->bhtn", moved, table, preferred_element_type=jnp.float32)
    index = position_ids.queries[:, :, None] - position_ids.keys[:, None, :] + (most - 1)
    index = jnp.broadcast_to(index[:, None], (*every.shape[:3], index.shape[-1]))
    logits = jnp.take_along_axis(every, index, axis=-1)
    scale = jnp.sqrt(jnp.float32(query.shape[-1]))
    return query + self.content.astype(query.dtype)[None, None], logits / scale


def check_positions(positions: str, dim: int, heads: int) -> None:
  """Raises a `UserError` for positions that do not exist or do not suit the widths.

  Args:
    positions: as `model.positions` has them.
    dim: model width.
    heads: number of heads.
  """
  errors.check_choice("model.positions", positions, get_args(Positions))
  errors.check(
    positions == "learned" or dim % 2 == 0,
    f"model.dim is {dim}; {positions} positions need an even width. Use an even width or"
    " positions = learned.",
  )
  errors.check(
    positions != "rotary" or dim // heads % 2 == 0,
    f"model.dim is {dim} and model.heads {heads}, so that heads are {dim // heads} wide; rotary"
    " positions need an even width of heads. Choose other sizes.",
  )
