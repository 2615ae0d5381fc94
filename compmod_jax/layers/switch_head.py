r"""Heads with several value and output projections, of which every token chooses some.

.. math::
   V_{hs} &= \sum_{e \in E_{hs}} \sigma(x_s \cdot u_{he})\, x_s W^V_{he}, \qquad
     E_{hs} = \mathrm{top}_k\{x_s \cdot u_{he}\} \\
   y_t &= \sum_h \sum_{e \in F_{ht}} \sigma(x_t \cdot w_{he})\, (A_h V_h)_t W^O_{he}, \qquad
     F_{ht} = \mathrm{top}_k\{x_t \cdot w_{he}\}

for head h, its experts e and its attention matrix :math:`A_h`, whose queries and keys are as in any
attention. Keys' positions s choose experts of values, queries' positions t those of outputs, each
expert with a sigmoid of its own, so that they do not compete but for being among the k best. All
experts are computed, and those that are not chosen have weights of 0.

Source: Csordas et al. 2024 (SwitchHead), equations 7 to 10.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import exactly, over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.kernels.routing import rank

_GATE = nn.initializers.variance_scaling(
  1.0, "fan_avg", "uniform", in_axis=0, out_axis=2, batch_axis=(1,)
)
# As large as projections into heads and out of heads without experts.
_VALUES = nn.initializers.variance_scaling(
  0.5, "fan_avg", "uniform", in_axis=0, out_axis=(1, 3), batch_axis=(2,)
)
_OUTPUT = nn.initializers.variance_scaling(
  1.0, "fan_avg", "uniform", in_axis=(0, 2), out_axis=3, batch_axis=(1,)
)


@dataclasses.dataclass(frozen=True)
class SwitchHeadConfig:
  """Experts inside every head (Csordas et al. 2024)."""

  experts: int = 4
  """Value projections of a head, and as many output projections."""
  keep: int = 2
  """How many of them every token chooses."""

  def __post_init__(self):
    errors.check(
      1 <= self.keep <= self.experts,
      f"switch_head.keep is {self.keep}; with switch_head.experts = {self.experts} it must lie"
      f" between 1 and {self.experts}.",
    )


class _Gate(nn.Module):
  """Sigmoids of the chosen experts of every head, 0 of the others; float32.

  Attributes:
    heads: number of heads.
    config: how many experts there are, and are chosen.
  """

  heads: int
  config: SwitchHeadConfig

  @nn.compact
  def __call__(
    self, inputs: Float[Array, "batch time embed"]
  ) -> Float[Array, "batch time heads experts"]:
    """Weights of experts at every position."""
    shape = (inputs.shape[-1], self.heads, self.config.experts)
    kernel = self.param("kernel", logical(_GATE, "embed", "heads", "projections"), shape)
    kernel = kernel.reshape(shape[0], -1)

    def product(rows: jax.Array) -> jax.Array:
      return jnp.matmul(rows.astype(jnp.float32), kernel, precision=exactly(jnp.float32))

    scores = over_rows(product, inputs).reshape(*inputs.shape[:2], *shape[1:])
    return jnp.where(rank(scores) < self.config.keep, nn.sigmoid(scores), 0)


class SwitchValues(nn.Module):
  """Values of all heads, from the experts that every position chooses.

  Intermediate: `value_experts` [batch, time, heads, experts], weights of the experts.

  Attributes:
    heads: number of heads.
    head_dim: width of a head.
    config: how many experts there are, and are chosen.
    dtype: compute type; weights of experts are float32.
  """

  heads: int
  head_dim: int
  config: SwitchHeadConfig
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, inputs: Float[Array, "batch time embed"], intermediates: Intermediates = OFF
  ) -> Float[Array, "batch time heads head_dim"]:
    """The first of the equations."""
    weights = _Gate(self.heads, self.config, name="gate")(inputs)
    weights = intermediates("value_experts", weights).astype(self.dtype)
    shape = (inputs.shape[-1], self.heads, self.config.experts, self.head_dim)
    names = ("embed", "heads", "projections", "head_dim")
    kernel = self.param("kernel", logical(_VALUES, *names), shape).astype(self.dtype)
    kernel = kernel.reshape(shape[0], -1)
    made = over_rows(lambda rows: rows.astype(self.dtype) @ kernel, inputs)
    made = made.reshape(*inputs.shape[:2], *shape[1:])
    return jnp.sum(weights[..., None] * made, axis=3)


class SwitchOutput(nn.Module):
  """The output projection, by the experts that every position chooses.

  Intermediate: `output_experts` [batch, time, heads, experts], weights of the experts.

  Attributes:
    dim: model width.
    config: how many experts there are, and are chosen.
    dtype: compute type; weights of experts are float32.
  """

  dim: int
  config: SwitchHeadConfig
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    heads: Float[Array, "batch time heads head_dim"],
    inputs: Float[Array, "batch time embed"],
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time embed"]:
    """What attention adds to the residual stream.

    Args:
      heads: outputs of all heads.
      inputs: what attention reads at the queries' positions.
      intermediates: activations to read or change.
    """
    weights = _Gate(heads.shape[2], self.config, name="gate")(inputs)
    weights = intermediates("output_experts", weights).astype(self.dtype)
    shape = (heads.shape[2], self.config.experts, heads.shape[3], self.dim)
    names = ("heads", "projections", "head_dim", "embed")
    kernel = self.param("kernel", logical(_OUTPUT, *names), shape).astype(self.dtype)
    kernel = kernel.reshape(-1, self.dim)
    weighed = weights[..., None] * heads[:, :, :, None].astype(self.dtype)
    return over_rows(lambda rows: rows @ kernel, weighed.reshape(*heads.shape[:2], -1))
