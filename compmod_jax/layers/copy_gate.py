r"""A gate between a layer's input and what it computes, so that a position can wait.

.. math::
   u &= \mathrm{LN}(f), \qquad g = \sigma(G_2\, \mathrm{drop}(\mathrm{relu}(G_1 n + c)) + b) \\
   x' &= (1 - g) \odot x + g \odot u

x is the layer's input, n what its feed-forward network reads and f what that makes of it. b is -3
at first: layers copy until they learn otherwise.

Source: Csordas et al. 2022 (The Neural Data Router), section 2.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import over_rows
from compmod_jax.core.random_bits import random_bits
from compmod_jax.core.sharding import logical
from compmod_jax.layers.basic import Dropout, NormKind, layer_norm

_START = -3.0  # of b


class CopyGate(nn.Module):
  """The end of a layer in place of a residual sum.

  Intermediate: `copy_gate` [batch, time, embed], g.

  Attributes:
    dim: model width, and that of the gate's hidden layer.
    dropout: rate on the hidden layer.
    closed: in training, the share of positions whose gates are 0; a multiple of 2**-16.
    epsilon: added to the variance by the norm.
    kind: of the norm.
    biases: whether the norm has some.
    dtype: compute type.
  """

  dim: int
  dropout: float = 0.0
  closed: float = 0.0
  epsilon: float = 1e-5
  kind: NormKind = "layer"
  biases: bool = True
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Makes the norm and the gate's layers."""
    init, start = nn.initializers.xavier_uniform(), nn.initializers.constant(_START)
    self.norm = layer_norm(self.dtype, self.epsilon, kind=self.kind, biases=self.biases)
    self.up = nn.Dense(self.dim, dtype=self.dtype, kernel_init=logical(init, "embed", "mlp"))
    self.down = nn.Dense(
      self.dim, dtype=self.dtype, kernel_init=logical(init, "mlp", "embed"), bias_init=start
    )
    self.drop = Dropout(self.dropout)

  def __call__(
    self,
    x: Float[Array, "batch time embed"],
    read: Float[Array, "batch time embed"],
    update: Float[Array, "batch time embed"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The stream after the layer.

    Args:
      x: the layer's input.
      read: what its feed-forward network read.
      update: what that made of it.
      deterministic: no dropout, and no gate is closed by chance.
      intermediates: activations to read or change.
    """
    hidden = self.drop(nn.relu(over_rows(self.up, read)), deterministic=deterministic)
    gate = nn.sigmoid(over_rows(self.down, hidden).astype(jnp.float32))
    if self.closed and not deterministic:
      bits = random_bits(self.drop.key(), (*gate.shape[:2], 1))
      gate = jnp.where(bits >= np.uint16(round(self.closed * 2**16)), gate, 0)
    gate = intermediates("copy_gate", gate).astype(x.dtype)
    return (1 - gate) * x + gate * self.norm(update)
