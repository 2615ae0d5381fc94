r"""The definition of what the kernels of this folder compute, in plain array operations.

.. math::
   s_{ij} = C_{ij} \sum_k \mathrm{softmax}_{k \in V_j}\!\big(q_{ij} \cdot k_{ik} / \sqrt{D}\big)
   \, v_{ik}

for head i and position j, where V_j are the keys that position j may read. A position that may read
none gets zeros. Where heads have penalties :math:`m_i`, logits are less by :math:`m_i |j - k|`; a
distance bias adds a number of each head to the logits of each distance :math:`j - k`.
With dropout, probabilities are multiplied by its mask and scale. Automatic differentiation of it
gives the gradients.

Source: Vaswani et al. 2017, equation 1; Kolios 2023, equation 5.3, for the weights C.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compmod_jax.kernels.attention.distances import DistanceBias
from compmod_jax.kernels.attention.dropout import ProbabilityDropout
from compmod_jax.kernels.attention.visibility import Visibility

FAR = -1e30
"""Logit of a key that is not read: finite, so that a row without any stays free of NaN."""


def attention(
  query: Float[Array, "batch queries heads head_dim"],
  key: Float[Array, "batch keys key_heads head_dim"],
  value: Float[Array, "batch keys key_heads head_dim"],
  weights: Float[Array, "batch queries heads"] | None,
  distance_bias: DistanceBias | None,
  visibility: Visibility,
  dropout: ProbabilityDropout | None = None,
) -> Float[Array, "batch queries heads head_dim"]:
  """Attention in every head, times the head's weight.

  Args:
    query: Q.
    key: K; of heads in groups, one for every `heads / key_heads` of them.
    value: V.
    weights: C, float32; none for 1.
    distance_bias: added to the logits; none for nothing.
    visibility: which keys a query may read.
    dropout: which probabilities become 0; none for no dropout.
  """
  group = query.shape[2] // key.shape[2]
  key, value = (jnp.repeat(one, group, axis=2) for one in (key, value))
  logits = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
  logits = logits / jnp.sqrt(jnp.float32(query.shape[-1]))
  penalty = visibility.penalty(query.shape[1], key.shape[1])
  logits = logits if penalty is None else logits - penalty
  if distance_bias is not None:
    later = jnp.arange(key.shape[1])[None] - jnp.arange(query.shape[1])[:, None]
    logits = logits + distance_bias.numbers[:, later + (query.shape[1] - 1)][None]
  allowed = visibility.dense(query.shape[1], key.shape[1])
  allowed = jnp.ones((1, 1, 1, 1), bool) if allowed is None else allowed
  logits = jnp.where(allowed, logits, FAR)
  largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  numerator = jnp.where(allowed, jnp.exp(logits - largest), 0.0)
  total = jnp.sum(numerator, axis=-1, keepdims=True)
  probabilities = numerator / jnp.where(total > 0, total, 1.0)
  if dropout is not None:
    keep = dropout.keep(*probabilities.shape[2:])
    probabilities = jnp.where(keep, probabilities * dropout.scale, 0.0)
  heads = jnp.einsum("bhts,bshd->bthd", probabilities.astype(value.dtype), value)
  return heads if weights is None else (heads * weights[..., None]).astype(heads.dtype)
