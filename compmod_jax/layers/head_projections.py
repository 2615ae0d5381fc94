"""Projections into attention heads and out of them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core import sharding
from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.kernels.routing import scaled_projection

# Projections into heads start as in fairseq: Xavier-uniform with gain 1 / sqrt(2).
_INTO_HEADS = nn.initializers.variance_scaling(
  0.5, "fan_avg", "uniform", in_axis=0, out_axis=(1, 3), batch_axis=(2,)
)
_OUT_OF_HEADS = nn.initializers.variance_scaling(
  1.0, "fan_avg", "uniform", in_axis=(0, 1), out_axis=2
)


class IntoHeads(nn.Module):
  """One matrix product that makes several projections, each split into heads.

  Attributes:
    projections: how many (3 for query, key and value).
    heads: number of heads.
    head_dim: width of a head.
    dtype: compute type.
  """

  projections: int
  heads: int
  head_dim: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "batch time embed"],
    beside: tuple[Float[Array, "embed other"], Float[Array, " other"]] | None = None,
  ) -> tuple[Float[Array, "batch time ..."], ...]:
    """The projections, in order; last what another kernel and bias, of the same inputs, make."""
    # Heads come first, so that they can be split over devices after the axes are merged.
    shape = (self.heads, self.projections, self.head_dim)
    names = ("heads", "projections", "head_dim")
    kernel = self.param("kernel", logical(_INTO_HEADS, "embed", *names), (inputs.shape[-1], *shape))
    bias = self.param("bias", logical(nn.initializers.zeros, *names), shape)
    kernel = kernel.astype(self.dtype).reshape(inputs.shape[-1], -1)
    bias = bias.astype(self.dtype).reshape(1, -1)
    width = kernel.shape[1]
    if beside is not None:
      kernel = jnp.concatenate([kernel, beside[0]], axis=1)
      bias = jnp.concatenate([bias, beside[1][None]], axis=1)
    outputs = over_rows(lambda rows: rows.astype(self.dtype) @ kernel + bias, inputs)
    split = outputs[..., :width].reshape(*inputs.shape[:2], *shape)
    rest = () if beside is None else (outputs[..., width:],)
    return (*(split[:, :, :, i] for i in range(self.projections)), *rest)


class OutOfHeads(nn.Module):
  """The output projection: concatenates heads and multiplies by W_O.

  Attributes:
    dim: model width.
    dtype: compute type.
  """

  dim: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    heads: Float[Array, "batch time heads head_dim"],
    weights: Float[Array, "batch time heads"] | None = None,
  ) -> Float[Array, "batch time embed"]:
    """What the attention module adds to the residual stream.

    Args:
      heads: what every head puts out.
      weights: what each is multiplied with, in the same pass; none for nothing.
    """
    shape = (*heads.shape[2:], self.dim)
    names = ("heads", "head_dim", "embed")
    kernel = self.param("kernel", logical(_OUT_OF_HEADS, *names), shape).astype(self.dtype)
    bias = self.param("bias", logical(nn.initializers.zeros, "norm"), (self.dim,))
    bias = bias.astype(self.dtype)[None]
    if weights is None:
      flat = kernel.reshape(-1, self.dim)
      return over_rows(lambda rows: rows @ flat + bias, heads.reshape(*heads.shape[:2], -1))
    over = ("batch", "time")
    made = sharding.on_parts(
      functools.partial(_project_part, whole=heads.shape[2]),
      [kernel, weights, heads],
      [("heads", None, None), (*over, "heads"), (*over, "heads", None)],
      result=(*over, None),
    )
    return made + bias[None]


def _project_part(
  kernel: jax.Array, weights: jax.Array, heads: jax.Array, *, whole: int
) -> jax.Array:
  """Weighted heads through the output projection, of the heads that a device has."""
  flat = heads.reshape(*heads.shape[:2], -1)
  made = scaled_projection(weights, flat, kernel.reshape(-1, kernel.shape[-1]))
  return lax.psum(made, sharding.RULES["heads"]) if heads.shape[2] < whole else made
