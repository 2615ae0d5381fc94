r"""Anchors: each decoder of an ensemble is held near weights drawn from the prior.

.. math:: \mathrm{anchor}_k = \frac{1}{N} \left\| \Gamma^{1/2} (W_k - W_{0,k}) \right\|

Source: Pearce et al. 2018; Ulmer 2019, equation 4.11, without their square.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compmod_jax.mechanisms.recoding.config import AnchorConfig


def anchor_loss(
  config: AnchorConfig,
  tables: Float[Array, "members vocab dim"],
  anchors: Float[Array, "anchors vocab dim"],
  sequences: int,
) -> Float[Array, ""]:
  """The mean of all members' anchor terms; anchors do not move.

  Args:
    config: settings.
    tables: the decoders' weights.
    anchors: one for each member, or one for all.
    sequences: N, training examples.
  """
  away = tables - jax.lax.stop_gradient(jnp.broadcast_to(anchors, tables.shape))
  squares = config.weight_decay * jnp.sum(jnp.square(away), axis=(1, 2))
  if config.squared:
    return jnp.mean(squares) / sequences
  # The norm has no derivative at 0, where a member may start.
  return jnp.mean(jnp.sqrt(jnp.maximum(squares, 1e-30))) / sequences
