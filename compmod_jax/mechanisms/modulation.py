r"""Modulation: context decides how much of each activation passes.

.. math:: x' = g \odot x, \qquad g = \sigma(\text{context}) \in (0, 1)

Source: Knowles 2022, equations 3.12 and 3.14.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# A gate below the first or above the second of these hardly depends on its context any more.
CLOSED, OPEN = 0.1, 0.9


class Gates(NamedTuple):
  """Gates inside a layer; None: what would be gated passes whole.

  Attributes:
    attention: on what self-attention adds to the stream.
    ffn: on what the feed-forward network adds to it.
    logits: logarithms of gates on attention probabilities before their normalisation, one for each
      head and key; added to the attention logits.
    plasticity: on how much the fast weights of every unit change, in layers that have some.
  """

  attention: Float[Array, "batch time embed"] | None = None
  ffn: Float[Array, "batch time embed"] | None = None
  logits: Float[Array, "batch keys heads"] | None = None
  plasticity: Float[Array, "batch time embed"] | None = None


UNGATED = Gates()
KINDS = Gates._fields


def modulate(
  values: Float[Array, "batch time embed"], gate: Float[Array, "batch time embed"] | None
) -> Float[Array, "batch time embed"]:
  """Values times their gate; without one, the values themselves.

  Source: Knowles 2022, equation 3.14.
  """
  return values if gate is None else gate.astype(values.dtype) * values


def attention_bias(
  logits: Float[Array, "batch keys heads"],
) -> Float[Array, "batch heads 1 keys"]:
  r"""What is added to attention logits so that probabilities are :math:`\propto g_k e^{s_{qk}}`."""
  return jnp.transpose(logits, (0, 2, 1))[:, :, None]


def gate_statistics(
  gate: Float[Array, "batch time embed"], rows: Bool[Array, "batch time"]
) -> Mapping[str, tuple[jax.Array, jax.Array]]:
  """Sums and counts over the real positions of a gate: its mean, and how much of it is saturated.

  Args:
    gate: values in (0, 1).
    rows: true where there is a token.
  """
  gate = gate.astype(jnp.float32)
  count = jnp.sum(rows).astype(jnp.float32) * gate.shape[-1]

  def total(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(jnp.where(rows[..., None], value, 0)), count

  return {
    "mean": total(gate),
    "square": total(gate**2),
    "closed": total((gate < CLOSED).astype(jnp.float32)),
    "open": total((gate > OPEN).astype(jnp.float32)),
  }
