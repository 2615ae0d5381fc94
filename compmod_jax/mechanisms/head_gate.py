r"""A gate after attention: how much of each head passes, decided at every position.

.. math:: o_{tj} = \sigma(x_t \cdot w_j + b_j)\, \tilde o_{tj}

where :math:`\tilde o_{tj}` is the output of head :math:`j` at position :math:`t`, and :math:`x_t`
what attention reads there. Heads do not compete: every gate lies between 0 and 1 whatever the
others are.

Source: Qiu et al. 2025 (Gated Attention for Large Language Models), the headwise gate.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical


class HeadGate(nn.Module):
  """A sigmoid gate for every head, from the activation that attention reads.

  Attributes:
    heads: number of heads.
    dtype: compute type of the product; the sigmoid is float32.
  """

  heads: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, inputs: Float[Array, "batch time embed"]) -> Float[Array, "batch time heads"]:
    """The gates at every position, float32; one half each before training."""
    init = logical(nn.initializers.zeros, "embed", "heads")
    product = nn.Dense(self.heads, dtype=self.dtype, kernel_init=init, name="gate")
    return nn.sigmoid(over_rows(product, inputs).astype(jnp.float32))


def gate_heads(
  heads: Float[Array, "batch time heads head_dim"], gates: Float[Array, "batch time heads"]
) -> Float[Array, "batch time heads head_dim"]:
  """Head outputs times their gates."""
  return gates[..., None].astype(heads.dtype) * heads
