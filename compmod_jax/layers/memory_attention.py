r"""Attention of a recurrent decoder over a memory: additive (Bahdanau) or multiplicative (Luong).

A score of every position j of the memory h for the decoder's state s before step i, and the mean of
the memory under their softmax:

.. math::
   \alpha_{ij} = \frac{\exp e_{ij}}{\sum_k \exp e_{ik}}, \qquad c_i = \sum_j \alpha_{ij} h_j

Additive, a network of one hidden layer, and multiplicative, a bilinear form:

.. math::
   e_{ij} = v^T \tanh(W s_i + U h_j) \qquad \text{or} \qquad e_{ij} = s_i^T W h_j

Source: Bahdanau, Cho and Bengio 2015, section 3.1 and appendix A.1.2; Luong, Pham and Manning 2015,
section 3.1 (general), where s is the state after the step.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.layers.context import Context

_INIT = nn.initializers.glorot_uniform()


class AdditiveAttention(nn.Module):
  """Attention from queries to a memory, by the sum of what is made of each.

  Intermediates: `attention` [batch, 1, queries, keys], the weights; the axis of length 1 is that of
  heads.

  Attributes:
    query_dim: width of the queries s.
    memory_dim: width of the memory h.
    dim: width of the hidden layer.
  """

  query_dim: int
  memory_dim: int
  dim: int

  def setup(self):
    """Makes W, U and v."""
    into = logical(_INIT, "embed", "mlp")
    self.query = self.param("query", into, (self.query_dim, self.dim))
    self.key = self.param("key", into, (self.memory_dim, self.dim))
    self.score = self.param("score", logical(_INIT, "mlp", "units"), (self.dim, 1))

  def describe(self) -> str:
    """Widths, in a few words."""
    return f"{self.query_dim} + {self.memory_dim} -> {self.dim} -> 1, additive attention"

  def keys(self, memory: Float[Array, "batch keys embed"]) -> Float[Array, "batch keys dim"]:
    """U h, which is the same for all queries."""
    return over_rows(lambda rows: rows @ self.key, memory)

  def __call__(
    self,
    query: Float[Array, "batch queries inner"],
    keys: Float[Array, "batch keys dim"],
    memory: Float[Array, "batch keys embed"],
    mask: Bool[Array, "batch keys"],
    ctx: Context = Context(),
  ) -> Float[Array, "batch queries embed"]:
    """The means of the memory that the queries ask for.

    Args:
      query: s.
      keys: of `keys(memory)`.
      memory: h.
      mask: true where the memory is a token; a row without any has a mean that means nothing.
      ctx: intermediates to read or change.
    """
    asked = over_rows(lambda rows: rows @ self.query, query)
    hidden = jnp.tanh(asked[:, :, None] + keys[:, None])
    return _mean(jnp.einsum("bqkd,d->bqk", hidden, self.score[:, 0]), memory, mask, ctx)


class MultiplicativeAttention(nn.Module):
  """Attention from queries to a memory, by the product of the two.

  Intermediates: as of `AdditiveAttention`.

  Attributes:
    query_dim: width of the queries s.
    memory_dim: width of the memory h.
  """

  query_dim: int
  memory_dim: int

  def setup(self):
    """Makes W."""
    into = logical(_INIT, "embed", "mlp")
    self.key = self.param("key", into, (self.memory_dim, self.query_dim))

  def describe(self) -> str:
    """Widths, in a few words."""
    return f"{self.query_dim} x {self.memory_dim} -> 1, multiplicative attention"

  def keys(self, memory: Float[Array, "batch keys embed"]) -> Float[Array, "batch keys dim"]:
    """W h, which is the same for all queries."""
    return over_rows(lambda rows: rows @ self.key, memory)

  def __call__(
    self,
    query: Float[Array, "batch queries inner"],
    keys: Float[Array, "batch keys inner"],
    memory: Float[Array, "batch keys embed"],
    mask: Bool[Array, "batch keys"],
    ctx: Context = Context(),
  ) -> Float[Array, "batch queries embed"]:
    """The means of the memory that the queries ask for; see `AdditiveAttention`."""
    return _mean(jnp.einsum("bqd,bkd->bqk", query, keys), memory, mask, ctx)


def _mean(
  scores: Float[Array, "batch queries keys"],
  memory: Float[Array, "batch keys embed"],
  mask: Bool[Array, "batch keys"],
  ctx: Context,
) -> jax.Array:
  """The means of the memory under the softmax of the scores."""
  scores = jnp.where(mask[:, None], scores, jnp.finfo(scores.dtype).min)
  weights = ctx.intermediates("attention", nn.softmax(scores, axis=-1)[:, None])
  return jnp.einsum("bqk,bke->bqe", weights[:, 0], memory)
