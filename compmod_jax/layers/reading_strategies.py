"""Reading strategies: answer options that look at each other, and words marked by their kind.

Source: Knowles 2022, section 3.4 (after Zhu et al. 2020 and Sun et al. 2019).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.layers.basic import Dropout

PARTS_OF_SPEECH = ("noun", "verb", "adjective", "adverb", "numeral", "foreign", "other", "special")
"""Kinds of words that are marked; special is every token that stands for no word."""


class OptionInteraction(nn.Module):
  r"""Answer option interaction: option positions attend to each other and replace themselves.

  .. math::
    H_1 = X W_1,\; H_2 = X W_2,\; G = \mathrm{softmax}(H_1 W_3 H_2^T),\;
    \mathrm{Hint} = \mathrm{relu}(G H_2)

    g = \sigma([\mathrm{Hint}; H_1] W_4), \qquad X' = g \odot H_1 + (1 - g) \odot \mathrm{Hint}

  No biases; the softmax is over option positions and not scaled. Positions of options see later
  options, whatever the mask of the model; the answer comes after all of them.

  Attributes:
    dim: width.
    rate: dropout on the result.
    dtype: compute type; the softmax is float32.

  Source: Knowles 2022, equation 3.15.
  """

  dim: int
  rate: float = 0.1
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "batch time embed"],
    options: Bool[Array, "batch time"],
    *,
    segments: Int[Array, "batch time"] | None = None,
    deterministic: bool = True,
  ) -> Float[Array, "batch time embed"]:
    """The inputs with their option positions replaced.

    Args:
      inputs: the vanilla set's output.
      options: true from the first option's label to the last token of the last option.
      segments: number of the part of every token, where a row has several; options of one part
        see no other's.
      deterministic: no dropout.
    """

    def product(name: str, x: jax.Array) -> jax.Array:
      init = logical(nn.initializers.xavier_uniform(), "embed", "mlp")
      dense = nn.Dense(self.dim, use_bias=False, dtype=self.dtype, kernel_init=init, name=name)
      return over_rows(dense, x)

    first, second = product("first", inputs), product("second", inputs)
    scores = jnp.einsum(
      "btd,bsd->bts", product("bilinear", first), second, preferred_element_type=jnp.float32
    )
    seen = options[:, None]
    if segments is not None:
      seen = seen & (segments[:, :, None] == segments[:, None])
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(second.dtype)
    hint = nn.relu(jnp.einsum("bts,bsd->btd", weights, second))
    share = nn.sigmoid(product("gate", jnp.concatenate([hint, first], axis=-1)))
    result = share * first + (1 - share) * hint
    result = Dropout(self.rate)(result, deterministic=deterministic)
    return jnp.where(options[..., None], result.astype(inputs.dtype), inputs)


class Highlighting(nn.Module):
  """Adds a learned vector to every position, by the part of speech of its word.

  The vectors start from zero, so that a trained model is not disturbed.

  Attributes:
    dim: width.
    dtype: compute type.

  Source: Knowles 2022, section 3.4.
  """

  dim: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, inputs: Float[Array, "batch time embed"], tags: Int[Array, "batch time"]
  ) -> Float[Array, "batch time embed"]:
    """The inputs with their marks.

    Args:
      inputs: embeddings, or the vanilla set's output.
      tags: number of the part in `PARTS_OF_SPEECH`; -1 where nothing is added, as in answers.
    """
    init = logical(nn.initializers.zeros, "kinds", "embed")
    table = self.param("table", init, (len(PARTS_OF_SPEECH), self.dim)).astype(self.dtype)
    return inputs + jnp.where(tags[..., None] >= 0, table[jnp.maximum(tags, 0)], 0)
