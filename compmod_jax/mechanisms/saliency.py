r"""Saliency of text: scores of one network are added to the attention logits of another.

.. math:: \alpha_{qk} \propto \exp\Big(\frac{q_q \cdot k_k}{\sqrt{D_h}} + s_k\Big)

A token with a high score is attended to more by every head at every position, and one whose score
goes to minus infinity not at all. Scores come from a small network of its own, or are given: how
long people look at a word, or how rare it is.

Source: Sood et al. 2020 (Improving natural language processing tasks with human gaze-guided neural
attention), where scores multiply attention; Knowles 2022, section 2.3.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical


def key_bias(scores: Float[Array, "batch keys"]) -> Float[Array, "batch 1 1 keys"]:
  """What is added to the attention logits of all heads and queries.

  Args:
    scores: of every key, dimensionless.
  """
  return scores[:, None, None, :]


class SaliencyNetwork(nn.Module):
  r"""Scores of tokens, from each and its neighbours on both sides.

  .. math:: s_k = v \cdot \tanh(W\, [e_{k-1}; e_k; e_{k+1}] + b) + c

  Vectors e of tokens are its own. Before training all scores are 0.

  Parameters: `table`, `hidden`, `score`.

  Attributes:
    vocab: number of tokens.
    dim: width of vectors and hidden layer.
    pad: the token that marks padding, which counts as zeros.
  """

  vocab: int
  dim: int
  pad: int = 0

  @nn.compact
  def __call__(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time"]:
    """The score of every token, float32."""
    init = logical(nn.initializers.normal(1.0), "vocab", "embed")
    table = self.param("table", init, (self.vocab, self.dim))
    vectors = jnp.where((tokens != self.pad)[..., None], table[tokens], 0)
    padded = jnp.pad(vectors, ((0, 0), (1, 1), (0, 0)))
    near = jnp.concatenate([padded[:, :-2], vectors, padded[:, 2:]], axis=-1)
    init = logical(nn.initializers.lecun_normal(), "embed", "router")
    hidden = nn.tanh(over_rows(nn.Dense(self.dim, kernel_init=init, name="hidden"), near))
    init = logical(nn.initializers.zeros, "router", "units")
    return over_rows(nn.Dense(1, kernel_init=init, name="score"), hidden)[..., 0]
