"""Basic layers: layer normalisation, dropout, and the position-wise feed-forward network.

Dropout's masks are cheap on every backend and the same however arrays are sharded.
"""

import functools
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt16, UInt32

from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import over_rows
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

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


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


def threefry(
  key: UInt32[Array, " 2"], counter: UInt32[Array, "*shape"]
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
  """Two random words for each counter: Threefry-2x32 with 20 rounds, `jax.random`'s generator.

  Written out because XLA then makes the numbers in the loop that uses them; `jax.random` calls a
  loop over rounds that passes over memory five times on CPU.

  Args:
    key: two words.
    counter: the low word of each counter; the high word is 0.

  Source: Salmon et al. 2011, section 4.
  """
  keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
  first, second = counter + keys[0], jnp.broadcast_to(keys[1], counter.shape)
  for group in range(5):
    for bits in _ROTATIONS[group % 2]:
      first = first + second
      second = (second << np.uint32(bits)) | (second >> np.uint32(32 - bits))
      second = first ^ second
    first = first + keys[(group + 1) % 3]
    second = second + keys[(group + 2) % 3] + np.uint32(group + 1)
  return first, second


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> UInt16[Array, "..."]:
  """Uniform 16-bit numbers, a function of the key and of each element's place alone.

  Args:
    key: any JAX key.
    shape: at least one axis.
  """
  words = jax.random.key_data(key).reshape(-1)[:2]
  *outer, width = shape
  blocks = (*outer, -(-width // 4))
  place = jnp.zeros(blocks, jnp.uint32)
  for axis, size in enumerate(blocks):
    place = place * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, blocks, axis)
  bits = lax.bitcast_convert_type(jnp.stack(threefry(words, place), axis=-1), jnp.uint16)
  # Kept for the backward pass, rather than drawn again there.
  return lax.optimization_barrier(bits.reshape(*outer, -1)[..., :width])


class Dropout(nn.Module):
  """Zeroes each element with probability `rate`, a multiple of 2**-16, and scales up the rest.

  Attributes:
    rate: probability, at least 0 and below 1.
  """

  rate: float

  @nn.compact
  def __call__(self, inputs: Float[Array, "..."], *, deterministic: bool) -> Float[Array, "..."]:
    """The inputs, some of them dropped unless `deterministic`; draws from the key `dropout`."""
    if self.rate == 0 or deterministic:
      return inputs
    dropped = round(self.rate * 2**16)
    keep = random_bits(self.make_rng("dropout"), inputs.shape) >= np.uint16(dropped)
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
