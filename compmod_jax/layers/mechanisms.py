r"""A Transformer layer made of independent mechanisms that compete for every position.

The width D is cut into N slices, one for each mechanism, which has projections, a feed-forward
network and norms of its own and reads its slice alone. Mechanisms compete for positions by a
softmax over one score each, and exchange information by attention over each other:

.. math::
   C_{\cdot j} &= \mathrm{softmax}_m(w_m \cdot x_{mj} + b_m) \\
   h_{mj} &= \mathrm{norm}(x_{mj} + C_{mj}\, \mathrm{attention}_m(x_m)_j) \\
   h_{mj} &\leftarrow \mathrm{norm}(h_{mj} + \mathrm{exchange}(h_{\cdot j})_m) \\
   h_{mj} &\leftarrow \mathrm{norm}(h_{mj} + \mathrm{FFN}_m(h_{mj}))

The published algorithm prints x where the exchange reads h.

Source: Lamb et al. 2021, algorithm 1; Kolios 2023, section 4.13, algorithm 4.6.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import group_product, over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.layers.basic import ACTIVATIONS, Activation, Dropout


@dataclasses.dataclass(frozen=True)
class MechanismsConfig:
  """Independent mechanisms in place of whole layers (Kolios 2023, section 4.13)."""

  count: int = 2
  """Mechanisms of a layer; divides the width, the heads and the feed-forward width."""
  competition: bool = True
  """Whether mechanisms compete for positions; without it (TIM-NoComp) each has weight 1."""
  exchange_heads: int = 2
  """Heads of the attention between mechanisms."""
  exchange_dim: int = 32
  """Width of each of these heads."""

  def __post_init__(self):
    errors.check(
      self.count >= 2, f"mechanisms.count is {self.count}; it takes at least 2 to be independent."
    )
    check_least(self, "mechanisms.", exchange_heads=1, exchange_dim=1)

  def check_sizes(self, dim: int, heads: int, ffn_dim: int) -> None:
    """Checks that sizes of a model can be split.

    Raises:
      UserError: one cannot.
    """
    for name, size in (("dim", dim), ("heads", heads), ("ffn_dim", ffn_dim)):
      errors.check(
        size % self.count == 0,
        f"mechanisms.count is {self.count}, which does not divide model.{name} = {size}; every"
        f" mechanism has a part of it. Choose a multiple of {self.count}.",
      )


def slices(
  x: Float[Array, "batch time embed"], mechanisms: int
) -> Float[Array, "batch time mechanisms slice"]:
  """Every mechanism's part of the width."""
  return x.reshape(*x.shape[:2], mechanisms, -1)


class GroupLinear(nn.Module):
  r"""A linear layer for each mechanism, :math:`y_m = x_m W_m + b_m`, of slices side by side.

  Attributes:
    mechanisms: number of slices.
    features: width of all outputs together.
    dtype: compute type.

  Source: Kolios 2023, equation 4.46.
  """

  mechanisms: int
  features: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, inputs: Float[Array, "batch time inputs"]
  ) -> Float[Array, "batch time outputs"]:
    """All mechanisms' outputs."""
    init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", batch_axis=(0,))
    shape = self.mechanisms, inputs.shape[-1] // self.mechanisms, self.features // self.mechanisms
    kernel = self.param("kernel", logical(init, "experts", "embed", "expert_mlp"), shape)
    bias = self.param("bias", logical(nn.initializers.zeros, "norm"), (self.features,))
    kernel, bias = kernel.astype(self.dtype), bias.astype(self.dtype)[None]
    return over_rows(lambda rows: group_product(rows.astype(self.dtype), kernel) + bias, inputs)


class GroupNorm(nn.Module):
  """Layer normalisation of each mechanism's slice, with scales and shifts of its own.

  Attributes:
    mechanisms: number of slices.
    epsilon: added to the variance.
    dtype: type of the result; statistics are float32.
  """

  mechanisms: int
  epsilon: float = 1e-5
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, "batch time embed"]) -> Float[Array, "batch time embed"]:
    """The slices, normalised, side by side."""
    width = x.shape[-1:]
    scale = self.param("scale", logical(nn.initializers.ones, "norm"), width)
    bias = self.param("bias", logical(nn.initializers.zeros, "norm"), width)
    parts = slices(x.astype(jnp.float32), self.mechanisms)
    centred = parts - jnp.mean(parts, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    made = (centred * jax.lax.rsqrt(variance + self.epsilon)).reshape(x.shape)
    return (made * scale[None, None] + bias[None, None]).astype(self.dtype)


class MechanismCompetition(nn.Module):
  """Weighs what mechanisms make of every position, by a softmax over one score of each.

  Intermediates: `router/signatures` [mechanisms, slice], the weights of the scores; `router/scores`
  and `router/weights` [batch, time, mechanisms].

  Attributes:
    mechanisms: how many compete.
  """

  mechanisms: int

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch time embed"],
    update: Float[Array, "batch time embed"],
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The update, every slice times its mechanism's weight.

    Args:
      x: what mechanisms read.
      update: what they made of it.
      intermediates: activations to read or change.
    """
    inner, parts = intermediates.scope("router"), slices(x.astype(jnp.float32), self.mechanisms)
    init = logical(nn.initializers.normal(parts.shape[-1] ** -0.5), "experts", "key")
    signatures = self.param("signatures", init, parts.shape[2:])
    bias = self.param("bias", logical(nn.initializers.zeros, "experts"), (self.mechanisms,))
    scores = jnp.einsum("btmi,mi->btm", parts, inner("signatures", signatures))
    weights = jax.nn.softmax(inner("scores", scores + bias[None, None]), axis=-1)
    weights = inner("weights", weights).astype(update.dtype)
    return (slices(update, self.mechanisms) * weights[..., None]).reshape(update.shape)


class Exchange(nn.Module):
  """Attention of every mechanism to all mechanisms at the same position.

  Intermediate: `attention` [batch, time, heads, mechanisms, mechanisms].

  Attributes:
    config: number and width of heads.
    dtype: compute type.
  """

  config: MechanismsConfig
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch time embed"], intermediates: Intermediates = OFF
  ) -> Float[Array, "batch time embed"]:
    """What every mechanism reads of all, slices side by side."""
    c = self.config
    width = c.count * c.exchange_heads * c.exchange_dim
    query, key, value = (
      GroupLinear(c.count, width, self.dtype, name=name)(x).reshape(
        *x.shape[:2], c.count, c.exchange_heads, c.exchange_dim
      )
      for name in ("query", "key", "value")
    )
    scores = jnp.einsum("btmhd,btnhd->bthmn", query, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores / jnp.sqrt(jnp.float32(c.exchange_dim)), axis=-1)
    weights = intermediates("attention", weights).astype(self.dtype)
    read = jnp.einsum("bthmn,btnhd->btmhd", weights, value).reshape(*x.shape[:2], width)
    return GroupLinear(c.count, x.shape[-1], self.dtype, name="output")(read)


class MechanismFeedForward(nn.Module):
  """A feed-forward network for each mechanism.

  Intermediate: `hidden` [batch, time, mlp], after the nonlinearity, mechanism by mechanism.

  Attributes:
    mechanisms: how many.
    hidden_dim: hidden units of all mechanisms together.
    activation: the nonlinearity.
    dropout: rate on hidden units.
    dtype: compute type.
  """

  mechanisms: int
  hidden_dim: int
  activation: Activation = "relu"
  dropout: float = 0.0
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch time embed"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The networks at every position, slices side by side."""
    hidden = GroupLinear(self.mechanisms, self.hidden_dim, self.dtype, name="up")(x)
    hidden = intermediates("hidden", ACTIVATIONS[self.activation](hidden))
    hidden = Dropout(self.dropout)(hidden, deterministic=deterministic)
    return GroupLinear(self.mechanisms, x.shape[-1], self.dtype, name="down")(hidden)
