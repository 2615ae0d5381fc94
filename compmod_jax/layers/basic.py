"""Basic layers: layer normalisation, dropout, and the position-wise feed-forward network.

Dropout's masks are cheap on every backend and the same however arrays are sharded.
"""

import functools
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import over_rows
from compmod_jax.core.random_bits import random_bits
from compmod_jax.core.sharding import logical
from compmod_jax.mechanisms.modulated_activation import ModulatedActivation

Activation = Literal["relu", "gelu", "gelu_tanh"]
NormKind = Literal["layer", "rms"]
"""Layer normalisation (Ba et al. 2016), or by the root mean square alone (Zhang and Sennrich
2019)."""

ACTIVATIONS = {
  "relu": nn.relu,
  "gelu": lambda x: nn.gelu(x, approximate=False),
  "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


def layer_norm(
  dtype: DTypeLike,
  epsilon: float = 1e-5,
  name: str | None = None,
  *,
  kind: NormKind = "layer",
  biases: bool = True,
) -> nn.LayerNorm | nn.RMSNorm:
  r"""A normalisation with float32 statistics: of a layer, or by its root mean square.

  .. math:: \mathrm{rms}(x)_i = g_i\, x_i \big/ \sqrt{\tfrac{1}{D} \sum_j x_j^2 + \epsilon}
  """
  ones, zeros = nn.initializers.ones, nn.initializers.zeros
  settings = {"epsilon": epsilon, "dtype": dtype, "scale_init": logical(ones, "norm"), "name": name}
  if kind == "rms":
    return nn.RMSNorm(**settings)
  return nn.LayerNorm(**settings, use_bias=biases, bias_init=logical(zeros, "norm"))


class Dropout(nn.Module):
  """Zeroes each element with probability `rate`, a multiple of 2**-16, and scales up the rest.

  Attributes:
    rate: probability, at least 0 and below 1.
  """

  rate: float

  def key(self) -> jax.Array:
    """The key of what is dropped, for one who draws the mask elsewhere, in place of a call."""
    return self.make_rng("dropout")

  @nn.compact
  def __call__(self, inputs: Float[Array, "..."], *, deterministic: bool) -> Float[Array, "..."]:
    """The inputs, some of them dropped unless `deterministic`; draws from the key `dropout`."""
    if self.rate == 0 or deterministic:
      return inputs
    dropped = round(self.rate * 2**16)
    keep = random_bits(self.key(), inputs.shape) >= np.uint16(dropped)
    return jnp.where(keep, inputs * (1 / (1 - dropped / 2**16)), 0)


class FeedForward(nn.Module):
  r"""Two dense layers with a nonlinearity between, or a product with a second one.

  .. math:: F(x) = \phi(x W_u) W_d, \qquad F(x) = (\phi(x W_g) \odot x W_u) W_d

  Sites: `hidden` [batch, time, mlp], which the last layer reads, and with a signal
  `modulated/signal`; see `ModulatedActivation`.

  Attributes:
    dim: model width.
    hidden_dim: width between the layers.
    activation: the nonlinearity.
    dropout: rate on the hidden layer.
    dtype: compute type.
    gated: whether it is the second of the equations (Shazeer 2020).
    biases: whether its layers have some.
    signal_dim: numbers of the signal that modulates the nonlinearity; 0 for none.
  """

  dim: int
  hidden_dim: int
  activation: Activation = "relu"
  dropout: float = 0.0
  dtype: DTypeLike = jnp.float32
  gated: bool = False
  biases: bool = True
  signal_dim: int = 0

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "batch time embed"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The network at every position."""
    init, phi = nn.initializers.xavier_uniform(), ACTIVATIONS[self.activation]
    if self.signal_dim:
      phi = functools.partial(
        ModulatedActivation(self.signal_dim, phi, self.dtype, name="modulated"),
        context=inputs,
        intermediates=intermediates.scope("modulated"),
      )
    dense = functools.partial(nn.Dense, use_bias=self.biases, dtype=self.dtype)
    inner = functools.partial(dense, self.hidden_dim, kernel_init=logical(init, "embed", "mlp"))
    hidden = over_rows(inner(name="up"), inputs)
    hidden = phi(over_rows(inner(name="gate"), inputs)) * hidden if self.gated else phi(hidden)
    hidden = intermediates("hidden", hidden)
    hidden = Dropout(self.dropout)(hidden, deterministic=deterministic)
    down = dense(self.dim, kernel_init=logical(init, "mlp", "embed"), name="down")
    return over_rows(down, hidden)
