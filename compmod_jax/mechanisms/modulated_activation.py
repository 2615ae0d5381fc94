r"""Neuromodulated activations: a signal of the context scales and shifts what a nonlinearity reads.

.. math::
   y = \sigma\big(z^\top (x w_s + w_b)\big), \qquad z = W_2 \tanh(W_1 c + b_1) + b_2

x is a number before the nonlinearity, and z in R^k the signal, which a modulatory network makes of
the context c; the vectors w_s and w_b are the activation's own. All units of a layer thus share a
slope and an offset, which differ from context to context.

In the thesis one network makes z for all activations. Here every feed-forward network has one, and
its context is what that feed-forward network reads: a position after attention has mixed others
into it. The signal of a position then depends on what attention lets that position read.

Source: Vecoven et al. 2020 (Introducing neuromodulation in deep neural networks to learn adaptive
behaviours); Knowles 2022, section 2.3.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical

_WIDER = 4  # hidden units of a modulatory network for each number of its signal


def modulated(
  x: Float[Array, "batch time mlp"],
  signal: Float[Array, "batch time signal"],
  scale: Float[Array, " signal"],
  offset: Float[Array, " signal"],
  activation: Callable[[jax.Array], jax.Array],
) -> Float[Array, "batch time mlp"]:
  r"""The nonlinearity of what a signal has scaled and shifted.

  .. math:: y = \sigma\big(z^\top (x w_s + w_b)\big)

  Args:
    x: what the nonlinearity would read.
    signal: z of every position.
    scale: w_s.
    offset: w_b.
    activation: sigma.

  Source: Knowles 2022, section 2.3.
  """
  slope, shift = ((signal @ vector)[..., None] for vector in (scale, offset))
  return activation(x * slope.astype(x.dtype) + shift.astype(x.dtype))


class ModulatedActivation(nn.Module):
  """A nonlinearity with a modulatory network of its own; see the module.

  Before training the slope is about 1 and the offset 0, so that it is about the nonlinearity.

  Parameters: `hidden` and `signal` of the modulatory network; `scale` w_s and `offset` w_b.

  Intermediates: `signal` [batch, time, signal], z.

  Attributes:
    signal_dim: k, numbers of the signal.
    activation: the nonlinearity.
    dtype: compute type of the modulatory network; slope and offset are float32.
  """

  signal_dim: int
  activation: Callable[[jax.Array], jax.Array]
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch time mlp"],
    context: Float[Array, "batch time embed"],
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time mlp"]:
    """The nonlinearity at every position.

    Args:
      x: what it reads.
      context: what the modulatory network reads.
      intermediates: sites to read or change.
    """
    k, init = self.signal_dim, nn.initializers.lecun_normal()
    hidden = nn.Dense(
      _WIDER * k, dtype=self.dtype, kernel_init=logical(init, "embed", "router"), name="hidden"
    )
    ones, zeros = nn.initializers.ones, nn.initializers.zeros
    make = nn.Dense(
      k,
      dtype=self.dtype,
      kernel_init=logical(init, "router", "units"),
      bias_init=logical(ones, "units"),
      name="signal",
    )
    signal = over_rows(make, nn.tanh(over_rows(hidden, context))).astype(jnp.float32)
    signal = intermediates("signal", signal)
    each = logical(nn.initializers.constant(1 / k), "units")
    scale = self.param("scale", each, (k,))
    offset = self.param("offset", logical(zeros, "units"), (k,))
    return modulated(x, signal, scale, offset, self.activation)
