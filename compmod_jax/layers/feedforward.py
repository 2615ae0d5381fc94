"""Position-wise feed-forward networks."""

from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core.intermediates import OFF, Taps
from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.layers.dropout import Dropout

Activation = Literal["relu", "gelu", "gelu_tanh"]

ACTIVATIONS = {
  "relu": nn.relu,
  "gelu": lambda x: nn.gelu(x, approximate=False),
  "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


class FeedForward(nn.Module):
  """Two dense layers with a nonlinearity between.

  Site: `hidden` [batch, time, mlp], after the nonlinearity.

  Attributes:
    dim: model width.
    hidden_dim: width between the layers.
    activation: the nonlinearity.
    dropout: rate on the hidden layer.
    dtype: compute type.
  """

  dim: int
  hidden_dim: int
  activation: Activation = "relu"
  dropout: float = 0.0
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "batch time embed"],
    *,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The network at every position."""
    init = nn.initializers.xavier_uniform()
    up = nn.Dense(
      self.hidden_dim, dtype=self.dtype, kernel_init=logical(init, "embed", "mlp"), name="up"
    )
    hidden = over_rows(up, inputs)
    hidden = taps("hidden", ACTIVATIONS[self.activation](hidden))
    hidden = Dropout(self.dropout)(hidden, deterministic=deterministic)
    down = nn.Dense(
      self.dim, dtype=self.dtype, kernel_init=logical(init, "mlp", "embed"), name="down"
    )
    return over_rows(down, hidden)
