"""Positions: vectors added to embeddings, rotations of queries and keys, or relative ones."""

import math
from typing import Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.sharding import logical
from compmod_jax.layers.context import Places

Positions = Literal["sinusoidal", "learned", "rotary", "relative"]
"""Vectors added to embeddings, fixed or learned; or what acts on queries and keys: rotations (Su et
al. 2021), or relative positions (Dai et al. 2019)."""
ADDED = ("sinusoidal", "learned")
_STDDEV = 0.02  # of a fresh table of learned positions


def sinusoids(length: int, dim: int) -> Float[np.ndarray, "length dim"]:
  r"""Fixed positions: sines in the first half of the width, cosines in the second.

  .. math:: p_{t,i} = \sin(t\, 10000^{-i/(D/2-1)}), \quad p_{t,i+D/2} = \cos(\cdot)

  Args:
    length: number of positions, from 0.
    dim: width, even.

  Source: Vaswani et al. 2017, section 3.5, in the order that fairseq uses.
  """
  half = dim // 2
  rates = np.exp(np.arange(half) * -(math.log(10000.0) / max(half - 1, 1)))
  angles = np.arange(length)[:, None] * rates[None, :]
  return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _sinusoids_as_large(
  key: jax.Array, shape: tuple[int, int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """Sinusoids whose root mean square is that of a fresh learned table."""
  return jnp.asarray(_STDDEV * math.sqrt(2) * sinusoids(*shape), dtype)


class PositionTable(nn.Module):
  """Positions added to embeddings: sinusoids, or a learned table; others add nothing here.

  Attributes:
    kind: which.
    length: most positions.
    dim: width.
    dtype: compute type.
    from_sinusoids: a learned table starts as sinusoids, in place of at random, as large.
  """

  kind: Positions
  length: int
  dim: int
  dtype: DTypeLike = jnp.float32
  from_sinusoids: bool = False

  def setup(self):
    """Makes the table."""
    if self.kind == "learned":
      init = nn.initializers.normal(stddev=_STDDEV)
      if self.from_sinusoids:
        init = _sinusoids_as_large
      shape = (self.length, self.dim)
      self.table = self.param("table", logical(init, "position", "embed"), shape)

  def add(
    self, x: Float[Array, "batch time embed"], start: Array | int = 0
  ) -> Float[Array, "batch time embed"]:
    """Embeddings and the vectors of their positions, which count from `start`."""
    if self.kind not in ADDED:
      return x
    rows = jax.lax.dynamic_slice_in_dim(self._table(), start, x.shape[1])
    return x + rows[None].astype(self.dtype)

  def add_at(
    self, x: Float[Array, "batch time embed"], places: Int[Array, "#batch #time"]
  ) -> Float[Array, "batch time embed"]:
    """Embeddings and the vectors of single positions."""
    return x + self._table()[places].astype(self.dtype) if self.kind in ADDED else x

  def _table(self) -> jax.Array:
    return self.table if self.kind == "learned" else jnp.asarray(sinusoids(self.length, self.dim))


def rotate(
  x: Float[Array, "batch time heads head_dim"], places: Int[Array, "#batch #time"]
) -> Float[Array, "batch time heads head_dim"]:
  r"""Rotary positions: every pair of dimensions is turned by an angle that grows with the place.

  .. math:: (x_i, x_{i+D/2}) \mapsto (x_i \cos\theta - x_{i+D/2} \sin\theta,\;
     x_i \sin\theta + x_{i+D/2} \cos\theta), \quad \theta = t\, 10000^{-2i/D}

  The product of a query and a key then depends on the difference of their places alone.

  Args:
    x: queries or keys; head_dim is even.
    places: t, where each stands in its text.

  Source: Su et al. 2021, equation 34; dimensions are paired across halves.
  """
  half = x.shape[-1] // 2
  rates = jnp.asarray(10000.0 ** (-np.arange(half) / half), jnp.float32)
  angles = places.astype(jnp.float32)[..., None, None] * rates[None, None, None]
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
    self, query: Float[Array, "batch time heads head_dim"], places: Places
  ) -> tuple[Float[Array, "batch time heads head_dim"], Float[Array, "batch heads time keys"]]:
    """The queries q + u, and what is added to the logits for the distances, float32."""
    most = places.length
    distances = np.arange(1 - most, most)[:, None]
    rates = 10000.0 ** (-np.arange(0, self.dim, 2) / self.dim)
    sinusoids = np.concatenate([np.sin(distances * rates), np.cos(distances * rates)], axis=1)
    kernel = self.kernel.astype(self.dtype)
    table = jnp.einsum("nm,mhd->nhd", jnp.asarray(sinusoids, self.dtype), kernel)
    moved = query + self.distance.astype(query.dtype)[None, None]
    every = jnp.einsum("bthd,nhd->bhtn", moved, table, preferred_element_type=jnp.float32)
    index = places.queries[:, :, None] - places.keys[:, None, :] + (most - 1)
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
